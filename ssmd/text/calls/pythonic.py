"""The parser of a call as LFM2 writes it, `name(key="value", …)`. It streams Python's literals as JSON arguments."""

from __future__ import annotations

import re

from ssmd.text.calls.body import Body
from ssmd.text.calls.parts import Part
from ssmd.text.calls.scalar import inner
from ssmd.text.calls.value import Value

MOST_NAME = 256  # characters
_WORD = re.compile(r"[\w.\-]+")
_NAME = re.compile(r"[^\W\d][\w.\-]*")


class PythonicCall(Body):
    """The parser of one call. The call is reported once its first argument has a name, or it has no arguments.

    `name({"key": "value"})` is read too. Other arguments without a name are left out of a reported call.
    """

    def __init__(self) -> None:
        super().__init__()
        self._expects = "name"  # or "key", "value", "more"
        self._word = ""
        self._gap = False  # spaces stand after the word
        self._name = ""
        self._value: Value | None = None
        self._left_out = False  # the value has no name
        self._closed = False  # the object of arguments is complete

    @property
    def quoted(self) -> bool:
        return self._value is not None and self._value.quoted

    def push(self, text: str, at: int, out: list[Part]) -> int:
        while at < len(text) and self.state == "open":
            before, told = at, len(out)
            if self._value is not None:
                at = self._push_value(self._value, text, at, out)
                continue
            if self._expects in ("name", "key") and (found := _WORD.match(text, at)) is not None:
                at = self._push_word(found)
            elif text[at].isspace() and not (self._word and self._expects == "name"):
                at, self._gap = at + 1, True
            else:
                at += self._push_mark(text[at], out)
            if len(out) == told and not self.calling:
                self._unsaid.append(text[before:at])
        return at

    def _push_word(self, found: re.Match[str]) -> int:
        self._word = found[0] if self._gap else self._word + found[0]
        self._gap = False
        if len(self._word) <= MOST_NAME:
            return found.end()
        if self.calling:
            self._word = "-"  # this is no name
            return found.end()
        self.state = "failed"
        return found.start()

    def _push_mark(self, char: str, out: list[Part]) -> bool:
        """Take in a character between the values. Return False if it is still to be read."""
        word, named = self._word, _NAME.fullmatch(self._word) is not None
        match self._expects, char:
            case "name", "(" if named:
                self._name, self._word, self._expects = word, "", "key"
            case "key", ("=" | ":") if named:
                self._begin_argument(word, out)
            case "key", ")" if self.calling or not word:
                self._finish(out)
            case "key", "," if self.calling or not word:
                self._word = ""
            case "key", "*" if not word:
                pass
            case "key", "{" if not word and not self.calling:
                self._begun(self._name, out)
                self._closed, self._value = True, Value(python=True)
                return False
            case "more", ",":
                self._expects, self._word = "key", ""
            case "more", ")":
                self._finish(out)
            case (("key" | "more"), "]") if self.calling:
                self._finish(out)
                return False
            case "more", _ if _WORD.match(char):
                self._expects, self._word = "key", ""
                return False
            case (("key" | "more"), _) if self.calling:
                if char not in "\"'[({":
                    return True
                self._value, self._left_out = Value(python=True), True
                return False
            case _:
                self.state = "failed"
                return False
        return True

    def _begin_argument(self, name: str, out: list[Part]) -> None:
        if not self.calling:
            self._begun(self._name, out)
            self._argued(f'{{"{inner(name)}": ', out)
        elif not self._closed:
            self._argued(f', "{inner(name)}": ', out)
        self._word, self._expects = "", "value"
        self._value, self._left_out = Value(python=True), self._closed

    def _push_value(self, value: Value, text: str, at: int, out: list[Part]) -> int:
        end, written = value.push(text, at)
        if not self._left_out:
            self._argued(written, out)
        if value.over:
            self._end_argument(value, out)
        return end

    def _end_argument(self, value: Value, out: list[Part]) -> None:
        if value.blank and not self._left_out:
            self._argued("null", out)
        self._value, self._left_out, self._expects, self._word = None, False, "more", ""

    def _finish(self, out: list[Part]) -> None:
        if not self.calling:
            self._begun(self._name, out)
            self._argued("{", out)
        if not self._closed:
            self._argued("}", out)
        self._ended(out)

    def end(self, out: list[Part]) -> None:
        if not self.calling:
            self.state = "failed"
            return
        if self._value is not None:
            written = self._value.end()
            if not self._left_out:
                self._argued(written, out)
            self._end_argument(self._value, out)
        self._finish(out)
