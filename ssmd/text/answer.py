"""The parser of an answer's text stream: it separates reasoning, content and tool calls.

Reasoning stands in <think>…</think> at an answer's beginning, the content after it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any, Literal

from ssmd.text.calls.formats import Format
from ssmd.text.calls.parts import Part, ReasoningPart, TextPart
from ssmd.text.calls.reader import CallReader
from ssmd.text.markers import first, may_become
from ssmd.text.messages import THINK, THINK_END


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


class Reasoning:
    """The reader of one answer's reasoning, without the spaces around it. state: `over` once all text is content.

    opened: the prompt already ends inside the reasoning. controls: the markers that are control tokens; `mark` takes
    them in.
    """

    def __init__(self, *, opened: bool = False, controls: Collection[str] = ()) -> None:
        self.state: Literal["start", "thinking", "after", "over"] = "start"
        self._opened = opened
        self._begins = () if THINK in controls else (THINK,)
        self._ends = () if THINK_END in controls else (THINK_END,)
        self._raw: list[str] = []
        self._spaces: list[str] = []  # more reasoning may follow them
        self._held = ""  # what may become a marker
        self._told = False

    @property
    def raw(self) -> str:
        """The reasoning so far as the model wrote it, with its markers."""
        return "".join(self._raw)

    @property
    def thinks(self) -> bool:
        """True if the next text is reasoning, unless it begins with a marker."""
        return self.state == "thinking" or (self.state == "start" and self._opened)

    @property
    def holds(self) -> bool:
        """True if some text is still held back."""
        return bool(self._held or self._spaces)

    def push(self, text: str) -> tuple[str, str]:
        """Take in text. Returns (reasoning, content)."""
        thought = ""
        if self.state == "start":
            text = self._start(text)
        if self.state == "thinking":
            thought, text = self._think(text)
        if self.state == "after":
            rest = text.lstrip()
            self._raw.append(text[: len(text) - len(rest)])
            text = rest
            if rest:
                self.state = "over"
        return thought, text

    def mark(self, marker: str) -> tuple[str, str] | None:
        """Take in a control token by its text, as `push`. Returns None if it is not a marker here."""
        if marker == THINK and self.state == "start" and not self._held:
            self._open(marker)
            return "", ""
        if marker == THINK_END and (self.state == "thinking" or (self.state == "start" and self._opened)):
            held, self._held = self._held, ""
            thought = self._more(held)
            self._close(marker)
            return thought, ""
        return None

    def end(self) -> tuple[str, str]:
        """End the answer. Returns (reasoning, content) of the text that was held back."""
        held, self._held = self._held, ""
        if self.state == "start" and not self._opened:
            self.state = "over"
            said = "".join(self._spaces) + held
            self._spaces.clear()
            return "", said
        thought = self._more(held) if held else ""
        self._keep_spaces()
        return thought, ""

    def _start(self, text: str) -> str:
        if not self._held:
            rest = text.lstrip()
            self._spaces.append(text[: len(text) - len(rest)])
            text = rest
        text, self._held = self._held + text, ""
        for marker in self._begins:
            if text.startswith(marker):
                self._open(marker)
                return text[len(marker) :]
            if marker.startswith(text):
                self._held = text
                return ""
        if not text:
            return ""
        if self._opened:
            self._keep_spaces()
            self.state = "thinking"
            return text
        self.state = "over"
        text = "".join([*self._spaces, text])
        self._spaces.clear()
        return text

    def _think(self, text: str) -> tuple[str, str]:
        text, self._held = self._held + text, ""
        at, marker = first(text, self._ends)
        if not marker:
            at -= may_become(text, self._ends)
            self._held = text[at:]
            return self._more(text[:at]), ""
        thought = self._more(text[:at])
        self._close(marker)
        return thought, text[at + len(marker) :]

    def _more(self, text: str) -> str:
        """Take in more reasoning, and return it up to its last word."""
        if not self._told:
            rest = text.lstrip()
            self._raw.append(text[: len(text) - len(rest)])
            text, self._told = rest, bool(rest)
        words = text.rstrip()
        thought = ""
        if words:
            thought = "".join([*self._spaces, words])
            self._raw.append(thought)
            self._spaces.clear()
        if len(words) < len(text):
            self._spaces.append(text[len(words) :])
        return thought

    def _open(self, marker: str) -> None:
        self._keep_spaces()
        self._raw.append(marker)
        self.state = "thinking"

    def _close(self, marker: str) -> None:
        self._keep_spaces()
        self._raw.append(marker)
        self.state = "after"

    def _keep_spaces(self) -> None:
        self._raw += self._spaces
        self._spaces.clear()
