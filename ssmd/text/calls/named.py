"""The parser of a call as Mistral's later models write it: `name[ARGS]{…}` or `name[CALL_ID]id[ARGS]{…}`."""

from __future__ import annotations

import re

from ssmd.text.calls.body import Body
from ssmd.text.calls.json_object import Value
from ssmd.text.calls.parts import Part

ARGS, CALL_ID = "[ARGS]", "[CALL_ID]"
MOST = 256  # characters before the arguments
_HEAD = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*\w*\s*)?\[ARGS\]")


class NamedCall(Body):
    """The parser of one call."""

    def __init__(self) -> None:
        super().__init__()
        self._head = ""
        self._name = ""
        self._value = Value()

    def push(self, text: str, at: int, out: list[Part]) -> int:
        while at < len(text) and self.state == "open":
            if not self._name:
                at = self._push_head(text, at)
            elif not self._value.first and text[at].isspace():
                self._unsaid.append(text[at])
                at += 1
            elif not self._value.first and text[at] != "{":
                self.state = "failed"
            else:
                at = self._push_value(text, at, out)
        return at

    def _push_head(self, text: str, at: int) -> int:
        self._head += text[at]
        found = _HEAD.fullmatch(self._head) if text[at] == "]" else None
        if found is not None:
            self._name = found[1]
        if len(self._head) > MOST:
            self.state = "failed"
            return at
        self._unsaid.append(text[at])
        return at + 1

    def _push_value(self, text: str, at: int, out: list[Part]) -> int:
        if not self.calling:
            self._begun(self._name, out)
        end, over = self._value.push(text, at)
        self._argued(text[at:end], out)
        if over:
            self._ended(out)
            self.state = "done"
        elif self._value.failed:
            self._break(out)
        return end
