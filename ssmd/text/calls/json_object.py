"""The parser of a call as a JSON object, `{"name": …, "arguments": {…}}`. It streams the arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Collection

from ssmd.text.calls.body import SPACES, Body
from ssmd.text.calls.parts import Part

ARGUMENTS = ("arguments", "parameters")  # names of the arguments' key
_IN_STRING = re.compile(r'["\\]')
_BRACKET = re.compile(r'["\[\]{}]')
_SCALAR_END = re.compile(r"[\s,}\]]")
_CLOSES = {"}": "{", "]": "["}


class Value:
    """A finder of a JSON value's end. It reads only quotes and brackets, not the text between them."""

    def __init__(self) -> None:
        self.first = ""  # its first character
        self.failed = False
        self._open: list[str] = []
        self._string = self._escaped = False

    def push(self, text: str, at: int) -> tuple[int, bool]:
        """Take in the text from `at` on. Return (where the value or the text ends, True if it is the value)."""
        if not self.first and at < len(text):
            self.first = text[at]
            self._string = self.first == '"'
            if self.first in "{[":
                self._open.append(self.first)
            elif not self._string and self.first not in "-0123456789tfn":
                self.failed = True
                return at, False
            at += 1
        while at < len(text):
            if self._escaped:
                self._escaped = False
                at += 1
            elif self._string:
                found = _IN_STRING.search(text, at)
                if found is None:
                    return len(text), False
                at = found.end()
                self._escaped = found[0] == "\\"
                self._string = self._escaped
                if not self._string and not self._open:
                    return at, True
            elif self._open:
                found = _BRACKET.search(text, at)
                if found is None:
                    return len(text), False
                at = found.start()
                char = found[0]
                if char == '"':
                    self._string = True
                elif char in "{[":
                    self._open.append(char)
                elif self._open.pop() != _CLOSES[char]:
                    self.failed = True
                    return at, False
                elif not self._open:
                    return at + 1, True
                at += 1
            else:  # a number or a word ends before the next delimiter
                found = _SCALAR_END.search(text, at)
                return (len(text), False) if found is None else (found.start(), True)
        return at, False


class JsonObject(Body):
    """The parser of one call. names: names of the tools; None accepts any name."""

    def __init__(self, names: Collection[str] | None = None) -> None:
        super().__init__()
        self._names = names
        self._expects = "{"  # or "first key", "key", ":", "value", "more"
        self._key = ""
        self._value = Value()
        self._read: list[str] = []  # text so far of a key, or of a value that is not streamed
        self._name: str | None = None
        self._given: str | None = None  # complete arguments
        self._streams = False  # the value is the arguments, and the tool's name is known

    def push(self, text: str, at: int, out: list[Part]) -> int:
        while at < len(text) and self.state == "open":
            before, told = at, len(out)
            if text[at] in SPACES and not self._value.first:
                at, right = at + 1, True
            elif self._expects == "value":
                at, right = self._push_value(text, at, out)
            elif self._value.first or (text[at] == '"' and self._expects in ("key", "first key")):
                at, right = self._push_key(text, at)
            else:
                right = self._push_mark(text[at], out)
                at += right
            if len(out) == told:
                self._unsaid.append(text[before:at])
            if not right:
                self._break(out)
        return at

    def _push_mark(self, char: str, out: list[Part]) -> bool:
        """Take in a character between the values. Return False if it is not allowed there."""
        if char == "}" and self._expects in ("first key", "more"):
            return self._close(out)
        after = {"{": "first key", ":": "value", ",": "key"}
        if char not in after or char != {"more": ","}.get(self._expects, self._expects):
            return False
        self._expects = after[char]
        self._streams = char == ":" and self._key in ARGUMENTS and self._name is not None and not self.calling
        return True

    def _push_key(self, text: str, at: int) -> tuple[int, bool]:
        end, over = self._value.push(text, at)
        self._read.append(text[at:end])
        if over:
            key = self._taken()
            self._expects = ":"
            if not isinstance(key, str):
                return end, False
            self._key = key
        return end, True

    def _push_value(self, text: str, at: int, out: list[Part]) -> tuple[int, bool]:
        end, over = self._value.push(text, at)
        streams = self._streams and self._value.first == "{"
        if streams:
            if not self.calling:
                assert self._name is not None
                self._begun(self._name, out)
            self._argued(text[at:end], out)
        else:
            self._read.append(text[at:end])
        if not over:
            return end, not self._value.failed
        self._expects = "more"
        if streams:
            self._value, self._streams = Value(), False
            return end, True
        return end, self._take_value(out)

    def _take_value(self, out: list[Part]) -> bool:
        """Use a value that was read to its end. Return False if it is not valid for its key."""
        raw = "".join(self._read)
        value = self._taken()
        if self.calling:
            return True
        if self._key == "name" and self._name is None:
            if not isinstance(value, str) or not value or (self._names is not None and value not in self._names):
                return False
            self._name = value
        elif self._key in ARGUMENTS and self._given is None:
            if isinstance(value, str):  # their JSON text as a string
                raw, value = value, _loaded(value)
            if value is not None and not isinstance(value, dict):
                return False
            self._given = "{}" if value is None else raw
        if self._name is not None and self._given is not None:
            self._begun(self._name, out)
            self._argued(self._given, out)
        return True

    def _taken(self) -> object:
        raw = "".join(self._read)
        self._read.clear()
        self._value = Value()
        return _loaded(raw)

    def _close(self, out: list[Part]) -> bool:
        if not self.calling:
            if self._name is None:
                return False
            self._begun(self._name, out)
            self._argued("{}", out)
        self._ended(out)
        self.state = "done"
        return True


def _loaded(raw: str) -> object:
    """Return a JSON text's value; (), which no key accepts, if it is not JSON."""
    try:
        value: object = json.loads(raw, strict=False)
    except (ValueError, RecursionError):
        return ()
    return value
