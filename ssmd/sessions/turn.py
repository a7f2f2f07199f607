"""Sessions and turns, as they are handed to the store and read back."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime

import numpy as np
from numpy.typing import NDArray

from ssmd.text.messages import Message

ID_PATTERN = re.compile(r"[A-Za-z0-9_-]{1,64}")


class StoreError(Exception):
    """The store could not do what was asked; it is whole and nothing was changed. The message says what to do."""

    reason = "error"  # a code for metrics and /health


class UnknownSession(StoreError):
    """No session, or no turn, has that id."""


class UnknownTurn(UnknownSession):
    """The session has no turn of that id."""


@dataclass(frozen=True)
class SessionInfo:
    """What a session is, whatever is said in it: model, lineage, clock.

    model, lineage: of what answered last. clock: the moment its templates see, frozen. imported: the import it descends
    from. known: it was read from the store, so that a turn of it is none of a new session.
    """

    id: str
    model: str
    lineage: str
    clock: datetime
    pinned: bool = False
    imported: str | None = None
    known: bool = field(default=False, compare=False)


@dataclass(frozen=True)
class Session:
    """A stored session.

    head: its current turn. turns: all that it has, those of its beginning included. title: how its first user message
    begins. nbytes: the checkpoints of its own turns, `own_nbytes` of which no other session needs. base: the turn that
    a fork begins at: that one and those above it may be another session's.
    """

    info: SessionInfo
    created_at: datetime
    last_used_at: datetime
    head: str
    turns: int
    title: str
    nbytes: int
    own_nbytes: int
    base: str | None = None

    @property
    def id(self) -> str:
        return self.info.id


@dataclass(frozen=True, eq=False)
class NewTurn:
    """One exchange that is to be stored.

    parent: the turn before it, or None at the root. messages: the input since the parent's answer. answer: the
    assistant's message; where a given beginning was continued it is the whole message, and `messages` leaves the
    beginning out. ids: of the whole rendered conversation up to the end of the answer's text (of a repaired turn: up
    to the last control token that no later message can change). text: what those ids stand for, rendered and escaped;
    both are empty where only the messages are known. complete: False if it was cut off by a disconnect or a shutdown.
    lineage: of the model whose ids these are; "" on the way in: the session's.
    """

    id: str
    session: str
    parent: str | None
    messages: tuple[Message, ...]
    answer: Message
    ids: NDArray[np.int32]
    prompt_tokens: int
    text: str
    finish: str
    complete: bool
    created_at: datetime
    lineage: str = field(default="", kw_only=True)

    @property
    def conversation(self) -> tuple[Message, ...]:
        """The messages of this turn alone: its input, then its answer."""
        return (*self.messages, self.answer)


@dataclass(frozen=True, eq=False)
class Turn(NewTurn):
    """A stored turn; `ids` and `text` are whole again. depth: turns above it."""

    depth: int


def conversation(path: Sequence[NewTurn]) -> tuple[Message, ...]:
    """All messages of a path, root first."""
    return tuple(m for turn in path for m in turn.conversation)


def check_id(kind: str, value: str) -> str:
    """The id itself. Raises StoreError unless it is one that cannot be mistaken for a path or a command."""
    if not isinstance(value, str) or not ID_PATTERN.fullmatch(value):
        raise StoreError(f"{kind} id {value!r} is not allowed: 1 to 64 letters, digits, _ or - are")
    return value
