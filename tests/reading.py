"""An answer read as it comes, and what it comes to: parts joined, whatever the pieces were."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from ssmd.text.answer import AnswerReader
from ssmd.text.calls.formats import Format
from ssmd.text.calls.parts import CallArguments, CallEnd, CallStart, Part, ReasoningPart, TextPart

TOOLS: dict[str, Any] = {
    "f": {},
    "g": {},
    "get_weather": {"type": "object", "properties": {"city": {"type": "string"}}},
}


@dataclass
class Read:
    """A parsed answer. calls: (name, arguments, whether they are whole)."""

    said: str = ""
    thought: str = ""
    calls: list[tuple[str, str, bool | None]] = field(default_factory=list)
    order: list[str] = field(default_factory=list)  # of kinds, none twice in a row
    content: str = ""
    _arguments: list[str] = field(default_factory=list, compare=False)

    def take(self, parts: Iterable[Part]) -> None:
        for part in parts:
            kind = type(part).__name__
            if isinstance(part, TextPart):
                self.said += part.text
            elif isinstance(part, ReasoningPart):
                self.thought += part.text
            elif isinstance(part, CallStart):
                self.calls.append((part.name, "", None))
                self._arguments = []
            elif isinstance(part, CallArguments):
                self._arguments.append(part.text)
            elif isinstance(part, CallEnd):
                self.calls[-1] = (self.calls[-1][0], "".join(self._arguments), part.whole)
            if self.order[-1:] != [kind]:
                self.order.append(kind)


def read(
    format_: Format | None,
    pieces: Iterable[str],
    controls: Collection[str] = (),
    thinking: bool = False,
    cut: bool = False,
    tools: Mapping[str, Any] = MappingProxyType(TOOLS),
) -> Read:
    """Parse pieces of text; one that is among the controls comes as a control token. cut: the answer did not end."""
    reader, found = AnswerReader(format_, tools, thinking=thinking, controls=controls), Read()
    for piece in pieces:
        parts = reader.mark(piece) if piece in controls else reader.push(piece)
        assert parts is not None, f"{piece} is no marker here"
        found.take(parts)
    found.take(reader.end(cut=cut))
    found.content = reader.content
    return found


def without_markers(format_: Format | None, text: str) -> str:
    """Return a text without the markers that a client is not sent."""
    if format_ is None:
        return text
    inner = format_.inner if any(opening in text for opening in format_.openings) else ()
    return re.sub("|".join(map(re.escape, (*format_.openings, *format_.closings, *inner))), "", text)
