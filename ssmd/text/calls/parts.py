"""Parts of an answer, in the order in which they come: what is said, what is thought, and tool calls."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Said:
    """More of what is said."""

    text: str


@dataclass(frozen=True)
class Thought:
    """More of the reasoning."""

    text: str


@dataclass(frozen=True)
class Begun:
    """A call begins, of the tool of that name."""

    name: str


@dataclass(frozen=True)
class Arguments:
    """More of the arguments' JSON text, of the call that began last."""

    text: str


@dataclass(frozen=True)
class Ended:
    """The call that began last is over. whole: its arguments are a JSON object."""

    whole: bool


Part = Said | Thought | Begun | Arguments | Ended
