"""The parser of a call as LFM2 writes it, `name(key="value", …)`. It streams Python's literals as JSON arguments."""

from __future__ import annotations

import json
import re

from ssmd.text.calls.body import SPACES, Body
from ssmd.text.calls.parts import Part

MOST_NAME = 256  # characters
_WORD = re.compile(r"[\w.\-]+")
_NAME = re.compile(r"[^\W\d][\w.\-]*")
_PLAIN = re.compile(r"[^\\'\"]+")
_SCALAR = re.compile(r"[\w.+\-]+")
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_ESCAPES = {"n": "\\n", "t": "\\t", "r": "\\r", "b": "\\b", "f": "\\f", "\\": "\\\\", '"': '\\"', "'": "'", "/": "/"}
_HEX = {"x": 2, "u": 4, "U": 8}
_CLOSES = {"]": "[", "}": "{", ")": "("}


class Literal:
    """The parser of a Python literal: a string, number, True, False, None, list, tuple, or dict with string keys."""

    def __init__(self) -> None:
        self.begun = self.over = self.failed = False
        self._open: list[str] = []
        self._expects = "value"  # or "first", "next", "first key", "next key", ":", "more"
        self._quote = ""
        self._escape = ""  # an unfinished escape so far
        self._scalar = ""

    def push(self, text: str, at: int) -> tuple[int, str]:
        """Take in the text from `at` on. Return (where it stopped, the JSON of that part).

        A scalar is over when another character follows it.
        """
        json_: list[str] = []
        while at < len(text) and not (self.over or self.failed):
            if self._escape:
                at = self._push_escape(text, at, json_)
            elif self._quote:
                at = self._push_string(text, at, json_)
            elif (found := _SCALAR.match(text, at)) is not None:
                at = self._push_scalar(found, json_)
            elif self._scalar:
                self._end_scalar(json_)
            elif text[at] in SPACES or self._push_mark(text[at], json_):
                at += 1
            else:
                self.failed = True
        return at, "".join(json_)

    def _push_string(self, text: str, at: int, json_: list[str]) -> int:
        found = _PLAIN.match(text, at)
        if found is not None:
            json_.append(_inner(found[0]))
            return found.end()
        char = text[at]
        if char == "\\":
            self._escape = char
        elif char == self._quote:
            json_.append('"')
            self._quote = ""
            self._end_value()
        else:
            json_.append(_inner(char))
        return at + 1

    def _push_escape(self, text: str, at: int, json_: list[str]) -> int:
        self._escape += text[at]
        kind, digits = self._escape[1], self._escape[2:]
        if kind in _HEX:
            if len(digits) == _HEX[kind]:
                self._end_escape(kind, digits, json_)
        else:
            json_.append(_ESCAPES.get(kind, "" if kind == "\n" else "\\\\" + _inner(kind)))
            self._escape = ""
        return at + 1

    def _end_escape(self, kind: str, digits: str, json_: list[str]) -> None:
        try:
            code = int(digits, 16) if digits.isalnum() else -1
            json_.append(_inner(chr(code)) if kind == "U" else f"\\u{code:04x}")
        except (ValueError, OverflowError):
            self.failed = True
        self.failed = self.failed or code < 0
        self._escape = ""

    def _push_scalar(self, found: re.Match[str], json_: list[str]) -> int:
        self.failed = not self._scalar and not self._begin(json_, key=False)
        self._scalar += found[0]
        self.failed = self.failed or len(self._scalar) > MOST_NAME
        return found.start() if self.failed else found.end()

    def _end_scalar(self, json_: list[str]) -> None:
        word, self._scalar = self._scalar, ""
        if word not in _WORDS and not _NUMBER.fullmatch(word):
            try:
                number = float(word)
                word = json.dumps(int(number) if number.is_integer() else number, allow_nan=False)
            except (ValueError, OverflowError):
                self.failed = True
                return
        json_.append(_WORDS.get(word, word))
        self._end_value()

    def _begin(self, json_: list[str], *, key: bool) -> bool:
        """Begin a value, or with `key` also a dict's key, and write a comma if needed. Return False if not allowed."""
        if self._expects not in ("value", "first", "next", *(("first key", "next key") if key else ())):
            return False
        self.begun = True
        if self._expects.startswith("next"):
            json_.append(", ")
        return True

    def _push_mark(self, char: str, json_: list[str]) -> bool:
        if char in "\"'":
            if not self._begin(json_, key=True):
                return False
            self._quote = char
            json_.append('"')
        elif char in "[({":
            if not self._begin(json_, key=False):
                return False
            self._open.append(char)
            self._expects = "first key" if char == "{" else "first"
            json_.append("{" if char == "{" else "[")
        elif char in _CLOSES and self._open and self._expects not in ("value", ":"):
            if self._open.pop() != _CLOSES[char]:
                return False
            self._expects = "value"
            json_.append("}" if char == "}" else "]")
            self._end_value()
        elif char == ":" and self._expects == ":":
            self._expects = "value"
            json_.append(": ")
        elif char == "," and self._expects == "more":
            self._expects = "next key" if self._open[-1] == "{" else "next"
        else:
            return False
        return True

    def _end_value(self) -> None:
        if self._expects.endswith("key"):
            self._expects = ":"
        else:
            self._expects = "more"
            self.over = not self._open


class PythonicCall(Body):
    """The parser of one call. The call is reported once its first argument has a name, or it has no arguments."""

    def __init__(self) -> None:
        super().__init__()
        self._expects = "name"  # or "key", "value", "more"
        self._word = ""
        self._name: str | None = None
        self._literal = Literal()

    def push(self, text: str, at: int, out: list[Part]) -> int:
        while at < len(text) and self.state == "open":
            before, told, words = at, len(out), self._expects != "value"
            if not words:
                at, right = self._push_value(text, at, out)
            elif (found := _WORD.match(text, at)) is not None and self._expects in ("name", "key"):
                self._word += found[0]
                right = len(self._word) <= MOST_NAME
                at = found.end() if right else at
            elif text[at] in SPACES and not (self._word and self._expects == "name"):
                at, right = at + 1, True
            else:
                right = self._push_mark(text[at], out)
                at += right
            if words and len(out) == told:
                self._unsaid.append(text[before:at])
            if not right:
                self._break(out)
        return at

    def _push_mark(self, char: str, out: list[Part]) -> bool:
        word = self._word
        if self._expects == "name" and char == "(" and _NAME.fullmatch(word):
            self._name, self._word, self._expects = word, "", "key"
        elif self._expects == "key" and char == "=" and _NAME.fullmatch(word):
            begins = self._open(out)
            self._argued(f'{begins}"{_inner(word)}": ', out)
            self._word, self._expects, self._literal = "", "value", Literal()
        elif self._expects == "more" and char == ",":
            self._expects = "key"
        elif char == ")" and (self._expects == "more" or (self._expects == "key" and not word)):
            self._argued("}" if self.calling else self._open(out) + "}", out)
            self._ended(out)
            self.state = "done"
        else:
            return False
        return True

    def _open(self, out: list[Part]) -> str:
        """Return the JSON before an argument. Before the first one, report the call."""
        if self.calling:
            self._unsaid.clear()
            return ", "
        assert self._name is not None
        self._begun(self._name, out)
        return "{"

    def _push_value(self, text: str, at: int, out: list[Part]) -> tuple[int, bool]:
        end, json_ = self._literal.push(text, at)
        self._argued(json_, out)
        if self._literal.over:
            self._expects = "more"
        return end, not self._literal.failed


def _inner(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
