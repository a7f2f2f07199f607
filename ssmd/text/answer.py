"""The parser of an answer's text stream: it separates reasoning, content and tool calls."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

from ssmd.text.calls.formats import Format
from ssmd.text.calls.parts import Part, ReasoningPart, TextPart
from ssmd.text.calls.reader import CallReader
from ssmd.text.reasoning import Reasoning


class AnswerReader:
    """The reader of one answer.

    calls: the notation of its calls; None to look for no calls. tools: each tool's schema of its parameters, by name.
    thinking: the prompt already ends inside the reasoning. begun: the answer continues a text that has content.
    controls: the markers that are control tokens of this model; `mark` takes them in.
    """

    def __init__(
        self,
        calls: Format | None = None,
        tools: Mapping[str, Any] = MappingProxyType({}),
        *,
        thinking: bool = False,
        begun: bool = False,
        controls: Collection[str] = (),
    ) -> None:
        self._reasoning = Reasoning(opened=thinking, controls=controls)
        if begun and not thinking:
            self._reasoning.state = "over"
        self._calls = None if calls is None else CallReader(calls, tools, start=not begun, controls=controls)
        self._said: list[str] = []

    @property
    def content(self) -> str:
        """The answer so far without its calls; its reasoning is included as the model wrote it."""
        return self._reasoning.raw + ("".join(self._said) if self._calls is None else self._calls.said)

    @property
    def holds(self) -> bool:
        """True if some text is still held back, or a call is unfinished."""
        return self._reasoning.holds or (self._calls is not None and self._calls.holds)

    @property
    def thinks(self) -> bool:
        """True if the next text is reasoning."""
        return self._reasoning.thinks

    @property
    def speaks(self) -> bool:
        """True if the next text may be content."""
        return self._reasoning.state in ("start", "over") and (self._calls is None or self._calls.speaks)

    @property
    def begun(self) -> str | None:
        """The text after the marker of a call whose tool is still unknown; None if there is no such call."""
        return None if self._calls is None else self._calls.begun

    @property
    def calling(self) -> bool:
        """True if a call was reported and is unfinished."""
        return self._calls is not None and self._calls.calling

    @property
    def in_call(self) -> bool:
        """True if the next text belongs to a call, or to a marker that begins one."""
        return self._calls is not None and (self._calls.in_call or self._reasoning.holds)

    @property
    def calls_over(self) -> int:
        """The number of finished calls."""
        return 0 if self._calls is None else self._calls.over

    @property
    def called(self) -> bool:
        """True if there are calls, and all of them are complete."""
        return self._calls is not None and self._calls.whole

    def push(self, text: str) -> list[Part]:
        """Take in more text."""
        return self._told(*self._reasoning.push(text))

    def mark(self, marker: str) -> list[Part] | None:
        """Take in a control token by its text. Returns None if it is not a marker here."""
        found = self._reasoning.mark(marker)
        if found is not None:
            return self._told(*found)
        if self._calls is None or self._reasoning.state == "thinking":
            return None
        out: list[Part] = []
        if self._reasoning.state == "start":
            out = self._told(*self._reasoning.end())
        self._reasoning.state = "over"
        return out if self._calls.mark(marker, out) else None

    def end(self, *, in_call: bool = False, cut: bool = False) -> list[Part]:
        """End the answer, and return the parts of the text that was held back.

        in_call: that text could only have become a call, so it is not returned as content.
        cut: the answer did not come to its end, so the arguments of an unfinished call stay as far as they came.
        """
        thought, said = self._reasoning.end()
        out = self._told(thought, "" if in_call else said)
        if self._calls is not None:
            self._calls.end(out, in_call=in_call, cut=cut)
        return out

    def _told(self, thought: str, said: str) -> list[Part]:
        out: list[Part] = [ReasoningPart(thought)] if thought else []
        if said and self._calls is None:
            self._said.append(said)
            out.append(TextPart(said))
        elif said and self._calls is not None:
            self._calls.push(said, out)
        return out
