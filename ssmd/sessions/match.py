"""Which stored turn a request continues. Pure functions: messages and conversations in, a decision out.

A turn is continued by a request whose first messages are the turn's whole conversation, from the root to its answer,
each the `same_as` the stored one. The deepest such turn wins, then a session that began here over an imported one,
which may be a forged copy, then the session used last, then that session's head, then the turn written last.
A final assistant message is one to be continued: it is input and matches no answer.
Without a session id nothing but an echoed answer joins a request to a session: a system prompt or examples that two
conversations have in common do not.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

from ssmd.text.messages import Message


@dataclass(frozen=True)
class Conversation:
    """A stored turn with all the messages that lead to it. messages: root first, its answer last."""

    session: str
    turn: str
    messages: tuple[Message, ...]
    last_used_at: datetime
    is_head: bool = False
    seq: int = 0
    imported: bool = False


@dataclass(frozen=True)
class Match:
    """What a request continues, and how.

    session: whose it is, None if a new one is to be opened. parent: the turn it continues, None for a branch at the
    root. messages: the whole conversation to render, stored messages in place of echoed ones; but reasoning that the
    echo leaves out is left out. new: those since the
    parent's answer; they are the tail of `messages`.
    """

    session: str | None
    parent: str | None
    messages: tuple[Message, ...]
    new: tuple[Message, ...]


def _normal(message: Message) -> tuple[str, ...]:
    """What a message and its echoes have in common: those that differ in reasoning only have it too."""
    return (message.role, message.said) if message.name is None else (message.role, message.said, message.name)


class Chain:
    """A hash of a conversation, under which all echoes of it are found; `continues` tells them from others.

    Never changed: `then` makes a longer one.
    """

    def __init__(self, running: hashlib.blake2b | None = None) -> None:
        self._running = running or hashlib.blake2b(digest_size=32, person=b"ssmd.chain.1")

    def then(self, messages: Iterable[Message]) -> Chain:
        running = self._running.copy()
        for m in messages:
            parts = [p.encode("utf-8", "surrogatepass") for p in _normal(m)]
            running.update(bytes([len(parts)]))
            for p in parts:
                running.update(len(p).to_bytes(8, "little") + p)  # lengths first: no two lists of texts read alike
        return Chain(running)

    def digest(self) -> bytes:
        """The hash of the messages so far, 32 bytes."""
        return self._running.copy().digest()


def echoed_chains(messages: Sequence[Message]) -> list[bytes]:
    """The chain of every beginning of a request that may be a stored conversation: those that end in an answer."""
    running, found = Chain(), []
    for m in messages[:-1]:
        running = running.then([m])
        if m.role == "assistant":
            found.append(running.digest())
    return found


def continues(messages: Sequence[Message], stored: Conversation) -> bool:
    """Whether the request echoes the whole stored conversation and adds something to it."""
    n = len(stored.messages)
    return n < len(messages) and all(s.same_as(m) for s, m in zip(stored.messages, messages[:n], strict=True))


def match(messages: Sequence[Message], stored: Iterable[Conversation], session: str | None = None) -> Match:
    """Decide who continues what among `stored`; with a `session` only that one's conversations count.

    The caller has seen to it that `session` exists. `stored` may hold anything: each is compared message by message.
    """
    fitting = [c for c in stored if session in (None, c.session) and continues(messages, c)]
    if not fitting:
        return Match(session, None, tuple(messages), tuple(messages))
    best = max(fitting, key=lambda c: (len(c.messages), not c.imported, c.last_used_at, c.is_head, c.seq))
    new = tuple(messages[len(best.messages) :])
    known = (s if s.content.strip() == m.content.strip() else m for s, m in zip(best.messages, messages, strict=False))
    return Match(best.session, best.turn, (*known, *new), new)
