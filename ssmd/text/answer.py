"""An answer's text as it comes, told apart: what is thought, what is said, and tool calls."""

from __future__ import annotations

from collections.abc import Collection

from ssmd.text.calls.formats import Format
from ssmd.text.calls.parts import Part, Said, Thought
from ssmd.text.calls.reader import CallReader
from ssmd.text.reasoning import Reasoning


class AnswerReader:
    """One answer. calls: how they are written, None if there are none to look for. names: of the tools.

    thinking: the prompt ends within the reasoning already. begun: the answer goes on from a text that said something.
    controls: the markers that are control tokens here, and come by `mark`.
    """

    def __init__(
        self,
        calls: Format | None = None,
        names: Collection[str] = (),
        *,
        thinking: bool = False,
        begun: bool = False,
        controls: Collection[str] = (),
    ) -> None:
        self._reasoning = Reasoning(opened=thinking, controls=controls)
        if begun and not thinking:
            self._reasoning.state = "over"
        self._calls = None if calls is None else CallReader(calls, names, start=not begun, controls=controls)
        self._said: list[str] = []

    @property
    def content(self) -> str:
        """The answer without its calls, as far as it was told; its reasoning is there as it was written."""
        return self._reasoning.raw + ("".join(self._said) if self._calls is None else self._calls.said)

    @property
    def holds(self) -> bool:
        """Whether something came that was not told yet, or a call is not over."""
        return self._reasoning.holds or (self._calls is not None and self._calls.holds)

    @property
    def thinks(self) -> bool:
        """Whether what comes next is reasoning."""
        return self._reasoning.thinks

    @property
    def speaks(self) -> bool:
        """Whether what comes next may be said."""
        return self._reasoning.state in ("start", "over") and (self._calls is None or self._calls.speaks)

    @property
    def begun(self) -> str | None:
        """What came behind a call's marker whose tool is not known yet; None: no call is begun."""
        return None if self._calls is None else self._calls.begun

    @property
    def calling(self) -> bool:
        """Whether a call was told of that is not over."""
        return self._calls is not None and self._calls.calling

    @property
    def in_call(self) -> bool:
        """Whether what comes next is of a call, or of a marker that begins one."""
        return self._calls is not None and (self._calls.in_call or self._reasoning.holds)

    @property
    def calls_over(self) -> int:
        """How many calls are over."""
        return 0 if self._calls is None else self._calls.over

    @property
    def called(self) -> bool:
        """Whether there are calls, and all of them are whole."""
        return self._calls is not None and self._calls.whole

    def push(self, text: str) -> list[Part]:
        """Take in more text."""
        return self._told(*self._reasoning.push(text))

    def mark(self, marker: str) -> list[Part] | None:
        """Take in a control token by its text. None: it is no marker here."""
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

    def end(self, *, in_call: bool = False) -> list[Part]:
        """Nothing more comes: what was held back is told as what it is by now. in_call: it can only have become a call,
        and is none of what is said.
        """
        thought, said = self._reasoning.end()
        out = self._told(thought, "" if in_call else said)
        if self._calls is not None:
            self._calls.end(out, in_call=in_call)
        return out

    def _told(self, thought: str, said: str) -> list[Part]:
        out: list[Part] = [Thought(thought)] if thought else []
        if said and self._calls is None:
            self._said.append(said)
            out.append(Said(said))
        elif said and self._calls is not None:
            self._calls.push(said, out)
        return out
