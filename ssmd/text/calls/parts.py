"""Parts of an answer, in the order in which they come: content, reasoning, and tool calls."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Said:
    """More of the content."""

    text: str


@dataclass(frozen=True)
class Thought:
    """More of the reasoning."""

    text: str


@dataclass(frozen=True)
class Begun:
    """The beginning of a call of the tool of this name."""

    name: str


@dataclass(frozen=True)
class Arguments:
    """More of the JSON text of the last call's arguments."""

    text: str


@dataclass(frozen=True)
class Ended:
    """The end of the last call. whole: the call is complete, and its arguments are a JSON object."""

    whole: bool


Part = Said | Thought | Begun | Arguments | Ended
