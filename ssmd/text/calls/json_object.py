"""The parser of a call as a JSON object, `{"name": …, "arguments": {…}}`. It streams the arguments."""

from __future__ import annotations

import json
from collections.abc import Collection

from ssmd.text.calls.body import Body
from ssmd.text.calls.parts import Part
from ssmd.text.calls.value import SPACES, Value, arguments_of

ARGUMENTS = ("arguments", "parameters")  # names of the arguments' key


class JsonObject(Body):
    """The parser of one call. names: names of the tools; None accepts any name."""

    def __init__(self, names: Collection[str] | None = None) -> None:
        super().__init__()
        self._names = names
        self._expects = "{"  # or "key", ":", "value", "more"; "object in quotes", "key in quotes"
        self._quote = ""  # before an object
        self._key = ""
        self._value: Value | None = None  # of a key, or behind one
        self._read: list[str] = []  # its JSON so far, if it is not streamed
        self._name: str | None = None
        self._given: str | None = None  # complete arguments
        self._streaming = False  # the value is the arguments, and the tool is known

    @property
    def quoted(self) -> bool:
        return self._expects.endswith("in quotes") or (self._value is not None and self._value.quoted)

    def push(self, text: str, at: int, out: list[Part]) -> int:
        while at < len(text) and self.state == "open":
            if self._streaming:
                at = self._stream(text, at, out)
                continue
            before, told = at, len(out)
            if self._value is not None:
                at = self._push_value(self._value, text, at, out)
            elif text[at] in SPACES:
                at += 1
            else:
                at += self._push_mark(text[at], out)
            if not self.calling and len(out) == told:
                self._unsaid.append(text[before:at])
        return at

    def _push_mark(self, char: str, out: list[Part]) -> bool:
        """Take in a character between the values. Return False if it is still to be read."""
        match self._expects, char:
            case (("key" | "more"), "}"):
                self._finish(out)
                return True
            case ("{", "{") | ("key", ","):
                self._expects = "key"
                return True
            case "key", "{" if not self._key:  # a brace too many
                return True
            case ":", (":" | "="):
                self._expects = "value"
                return True
            case "more", ",":
                self._expects = "key"
                return True
            case "value", ('"' | "'") if self._key in ARGUMENTS:
                self._quote, self._expects = char, "object in quotes"
                return True
            case "object in quotes", "{":
                self._expects = "key in quotes"
                return True
            case "key in quotes", _ if char == self._quote:  # the quotes in the object are not escaped
                self._value, self._expects = Value(), "value"
                if self._push_value(self._value, "{", 0, out) == 0:
                    self._stream("{", 0, out)
            case (("object in quotes" | "key in quotes"), _):
                self._read_string()
            case "more", _ if char == self._quote:
                self._quote = ""
                return True
            case "value", ("," | "}"):
                self._expects = "more"
            case "value", _:
                self._value = Value()
            case (("key" | "more"), ('"' | "'")):
                self._value, self._expects = Value(key=True), "key"
            case "key", _ if char.isalpha() or char == "_":
                self._value = Value(key=True)
            case _ if self.calling or char in "{]":
                self._finish(out)
            case _:
                self.state = "failed"
        return False

    def _read_string(self) -> None:
        """Read what has come as the beginning of a string."""
        begun = self._quote + ("{" if self._expects == "key in quotes" else "")
        self._value, self._expects, self._quote = Value(), "value", ""
        _, written = self._value.push(begun, 0)
        self._read.append("" if self.calling else written)

    def _stream(self, text: str, at: int, out: list[Part]) -> int:
        """Take in arguments of a tool that is known."""
        value = self._value
        assert value is not None
        end, written = value.push(text, at)
        self._argued(written, out)
        if value.over:
            self._value, self._streaming, self._expects = None, False, "more"
        return end

    def _push_value(self, value: Value, text: str, at: int, out: list[Part]) -> int:
        begins = text[at] == "{" and not value.first and self._expects == "value" and self._key in ARGUMENTS
        if begins and self._name is not None and not self.calling:
            self._begun(self._name, out)
            self._streaming = True
            return at
        end, written = value.push(text, at)
        if not self.calling:
            self._read.append(written)
        if value.over:
            self._take(value, out)
        return end

    def _take(self, value: Value, out: list[Part]) -> None:
        """Use a key or a value that was read to its end. Fail if it is not valid for its key."""
        written = "".join(self._read) or ("null" if self._expects == "value" else '""')
        self._read.clear()
        self._value = None
        if self._expects == "key":
            self._expects = ":"
            self._key = "" if self.calling else json.loads(written)
            return
        self._expects = "more"
        if self.calling:
            return
        if self._key == "name" and self._name is None:
            name: object = json.loads(written)
            if not isinstance(name, str) or not name or (self._names is not None and name not in self._names):
                self.state = "failed"
                return
            self._name = name
        elif self._key in ARGUMENTS and self._given is None:
            self._given = written if value.first == "{" else arguments_of(written)
            if self._given is None:
                self.state = "failed"
                return
        if self._name is not None and self._given is not None:
            self._begun(self._name, out)
            self._argued(self._given, out)

    def _finish(self, out: list[Part]) -> None:
        """End the call. It has no arguments if none have come. Fail if the tool is unknown."""
        if not self.calling:
            if self._name is None:
                self.state = "failed"
                return
            self._begun(self._name, out)
            self._argued("{}", out)
        self._ended(out)

    def end(self, out: list[Part]) -> None:
        if self._expects.endswith("in quotes"):
            self._read_string()
        value = self._value
        cut = value is not None and (self._expects == "key" or (self._key == "name" and value.quoted))
        if cut and not self.calling:  # a key or the name may have gone on
            self.state = "failed"
            return
        if value is not None:
            written = value.end()
            if self._streaming:
                self._argued(written, out)
            else:
                self._read.append(written)
                self._take(value, out)
        elif self._expects in (":", "value") and not self.calling:
            self.state = "failed"
        if self.state == "open":
            self._finish(out)
