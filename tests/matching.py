"""The match of a request, found by looking at everything: the reference for the store's look-up.

A turn is continued by a request whose first messages are the turn's whole conversation, each the `same_as` the stored
one. The deepest such turn wins, then a session that began here over an imported one, then the session used last, then
that session's head, then the turn written last.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

from keeping import echo_of

from ssmd.sessions.match import known
from ssmd.sessions.store import Store
from ssmd.sessions.turn import conversation
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
    """The conversation that a request continues. session: None opens a new one. parent: None for a branch at the root.

    messages: the whole conversation to render. new: those since the parent's answer.
    """

    session: str | None
    parent: str | None
    messages: tuple[Message, ...]
    new: tuple[Message, ...]


def match(messages: Sequence[Message], stored: Iterable[Conversation], session: str | None = None) -> Match:
    """Pick what the messages continue among `stored`; with a `session` only its conversations count."""
    fitting = [c for c in stored if session in (None, c.session) and _continues(messages, c)]
    if not fitting:
        return Match(session, None, tuple(messages), tuple(messages))
    best = max(fitting, key=lambda c: (len(c.messages), not c.imported, c.last_used_at, c.is_head, c.seq))
    new = tuple(messages[len(best.messages) :])
    shown = (s if s.content.strip() == m.content.strip() else m for s, m in zip(best.messages, messages, strict=False))
    return Match(best.session, best.turn, (*shown, *new), new)


def _continues(messages: Sequence[Message], stored: Conversation) -> bool:
    n = len(stored.messages)
    if n >= len(messages) or not all(s.same_as(m) for s, m in zip(stored.messages, messages[:n], strict=True)):
        return False
    return places(stored.messages) == places(messages[:n])


def places(messages: Sequence[Message]) -> list[int | str | None]:
    """Of each message whose result it is: the place of a call of the last answer, the id of another one."""
    found: list[int | str | None] = []
    calls: list[str] = []
    for m in messages:
        found.append(calls.index(m.tool_call_id) if m.tool_call_id in calls else m.tool_call_id)
        calls = [c.id for c in m.tool_calls] if m.role == "assistant" else calls
    return found


def looked_up(store: Store, messages: Sequence[Message], session: str | None = None) -> Match:
    """Return the store's match of a request. Checks that the store read the stored words."""
    found = echo_of(store, messages, session)
    if found is None:
        return Match(session, None, tuple(messages), tuple(messages))
    stored = conversation(store.path(found.turn))
    assert found.length == len(stored)
    echoes = messages[: found.length]
    assert found.stored in (None, stored)
    if found.stored is None:
        assert [m.content.strip() for m in stored] == [m.content.strip() for m in echoes]
    new = tuple(messages[found.length :])
    return Match(found.session, found.turn, (*known(stored, echoes), *new), new)
