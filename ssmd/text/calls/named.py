"""The parser of a call as Mistral's later models write it: `name[ARGS]{…}` or `name[CALL_ID]id[ARGS]{…}`."""

from __future__ import annotations

import re

from ssmd.text.calls.body import Body
from ssmd.text.calls.parts import Part
from ssmd.text.calls.value import Value, arguments_of

ARGS, CALL_ID = "[ARGS]", "[CALL_ID]"
MOST = 256  # characters before the arguments
_HEAD = re.compile(r"([\w.-]+)\s*(?:\[CALL_ID\]\s*\w*\s*)?(?:\[ARGS\]\s*)?")
_BEGINNING = re.compile(r"[\w.-]+\s*(?:\[[A-Z_]*(?:\]\s*(?:\w+\s*)?(?:\[[A-Z]*\]?\s*)?)?)?")


class NamedCall(Body):
    """The parser of one call. It also reads `name{…}`, and arguments as a string."""

    def __init__(self) -> None:
        super().__init__()
        self._head = ""
        self._name = ""
        self._value: Value | None = None
        self._read: list[str] = []  # the JSON of arguments that are a string

    @property
    def quoted(self) -> bool:
        return self._value is not None and self._value.quoted

    def push(self, text: str, at: int, out: list[Part]) -> int:
        while at < len(text) and self.state == "open":
            value = self._value
            at = self._push_head(text, at, out) if value is None else self._push_value(value, text, at, out)
        return at

    def _push_head(self, text: str, at: int, out: list[Part]) -> int:
        char = text[at]
        found = _HEAD.fullmatch(self._head)
        if found is not None and (char == "{" or (char in "\"'" and ARGS in self._head)):
            self._name, self._value = found[1], Value()
            if char == "{":
                self._begun(self._name, out)
            return at
        self._head += char
        if len(self._head) > MOST or not _BEGINNING.fullmatch(self._head):
            self.state = "failed"
            return at
        self._unsaid.append(char)
        return at + 1

    def _push_value(self, value: Value, text: str, at: int, out: list[Part]) -> int:
        end, written = value.push(text, at)
        if self.calling:
            self._argued(written, out)
        else:
            self._read.append(written)
            self._unsaid.append(text[at:end])
        if value.over:
            self._take(out)
        return end

    def _take(self, out: list[Part]) -> None:
        if not self.calling:
            arguments = arguments_of("".join(self._read))
            if arguments is None:
                self.state = "failed"
                return
            self._begun(self._name, out)
            self._argued(arguments, out)
        self._ended(out)

    def end(self, out: list[Part]) -> None:
        if self._value is None:
            self.state = "failed"
            return
        written = self._value.end()
        if self.calling:
            self._argued(written, out)
        else:
            self._read.append(written)
        self._take(out)
