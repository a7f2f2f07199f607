"""Parts of an answer, in the order in which they come: content, reasoning, and tool calls."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TextPart:
    """More of the content."""

    text: str


@dataclass(frozen=True)
class ReasoningPart:
    """More of the reasoning."""

    text: str


@dataclass(frozen=True)
class CallStart:
    """The beginning of a call of the tool of this name."""

    name: str


@dataclass(frozen=True)
class CallArguments:
    """More of the JSON text of the last call's arguments."""

    text: str


@dataclass(frozen=True)
class CallEnd:
    """The end of the last call. whole: the call is complete, and its arguments are a JSON object."""

    whole: bool


Part = TextPart | ReasoningPart | CallStart | CallArguments | CallEnd
