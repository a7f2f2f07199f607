"""Which stored turn a request continues, as far as messages tell. Pure functions.

A turn is continued by a request whose first messages are the turn's whole conversation, from the root to its answer,
each the `same_as` the stored one. The deepest such turn wins, then a session that began here over an imported one,
which may be a forged copy, then the session used last, then that session's head, then the turn written last.
A final assistant message is one to be continued: it is input and matches no answer.
Of tool calls names and arguments count, not ids: those only tell which call a result is of, by its place.
Without a session id nothing but an echoed answer joins a request to a session: a system prompt or examples that two
conversations have in common do not.

A conversation is looked up by its chain, a hash that is carried on from answer to answer: what a request adds to the
turn that it continues is all that has to be hashed to store the next one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from ssmd.text.messages import ROLES, THINK_END, Message, Role, ToolCall

_ROLES = {role: role.encode() for role in ROLES}


@dataclass(frozen=True)
class Match:
    """What a request continues, and how.

    session: whose it is, None if a new one is to be opened. parent: the turn it continues, None for a branch at the
    root. messages: the whole conversation to render, stored messages in place of echoed ones; but reasoning that the
    echo leaves out is left out. new: those since the parent's answer; they are the tail of `messages`.
    """

    session: str | None
    parent: str | None
    messages: tuple[Message, ...]
    new: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class Chain:
    """Two hashes of a conversation. said: under which all echoes of it are found, as they may leave reasoning out.
    whole: that of its echoes which leave nothing out. Both are 32 bytes, carried on at each answer.
    """

    said: bytes = bytes(32)
    whole: bytes = bytes(32)

    def then(self, messages: Iterable[Message], calls: Sequence[ToolCall] = ()) -> Chain:
        """The chain of a conversation that goes on with these, the last of which is an answer. calls: those of the
        answer before them, whose results some may be.
        """
        *_, last = ((self, 0), *_answers(messages, self, calls))
        return last[0]


@dataclass(frozen=True)
class Echo:
    """The beginnings of a request that may be stored conversations: those that end in an answer and leave something.

    lengths: of each, in messages, ascending. chains: of each.
    """

    lengths: Sequence[int]
    chains: Sequence[Chain]

    @staticmethod
    def of(messages: Sequence[Message]) -> Echo:
        """All that may be stored of a request's messages."""
        found = list(_answers(messages[:-1], Chain()))
        return Echo([length for _, length in found], [chain for chain, _ in found])


def _answers(messages: Iterable[Message], chain: Chain, calls: Sequence[ToolCall] = ()) -> Iterator[tuple[Chain, int]]:
    """The chain after each answer, and how many messages it is of."""
    said, whole = chain.said, chain.whole
    parts: list[bytes] = []
    full: list[bytes] | None = None if said == whole else []  # differs from `parts` from the first reasoning on
    for n, m in enumerate(messages, 1):
        content, name = m.content, m.name
        if m.role != "assistant":
            part = _part(m.role, content, name)
            if m.tool_call_id is not None:
                part += _result_of(m.tool_call_id, calls)
            parts.append(part)
            if full is not None:
                full.append(part)
            continue
        thinks = THINK_END in content
        calls = m.tool_calls
        called = b"".join(map(_called, calls))
        part = _part("assistant", m.said if thinks else content.strip(), name) + called
        if thinks and full is None:
            full = parts.copy()
        parts.append(part)
        said = _digest(said, parts)
        parts = []
        if full is None:
            whole = said
        else:
            full.append(_part("assistant", content.strip(), name) + called if thinks else part)
            whole = _digest(whole, full)
            full = []
        yield Chain(said, whole), n


def _part(role: Role, text: str, name: str | None) -> bytes:
    """A message in bytes that no other one has, nor two one after the other: lengths come first."""
    raw = text.encode("utf-8", "surrogatepass")
    if name is None:
        return b"%b 0 %d\n%b" % (_ROLES[role], len(raw), raw)
    named = b"+" + name.encode("utf-8", "surrogatepass")
    return b"%b %d %d\n%b%b" % (_ROLES[role], len(named), len(raw), named, raw)


def _called(call: ToolCall) -> bytes:
    """A call in bytes, which follow those of its message. No role begins so."""
    name, arguments = (text.encode("utf-8", "surrogatepass") for text in call.said)
    return b"call %d %d\n%b%b" % (len(name), len(arguments), name, arguments)


def _result_of(call: str, calls: Sequence[ToolCall]) -> bytes:
    """Which of the last answer's calls a message is the result of, in bytes; by its id if that is of none of them."""
    place = _place(call, calls)
    if place is not None:
        return b"of %d\n" % place
    raw = call.encode("utf-8", "surrogatepass")
    return b"of id %d\n%b" % (len(raw), raw)


def _place(call: str, calls: Sequence[ToolCall]) -> int | None:
    return next((i for i, c in enumerate(calls) if c.id == call), None)


def _digest(before: bytes, parts: list[bytes]) -> bytes:
    return hashlib.blake2b(before + b"".join(parts), digest_size=32, person=b"ssmd.chain.2").digest()


def continues(messages: Sequence[Message], stored: Sequence[Message]) -> bool:
    """Whether a request echoes a whole stored conversation, its answer last, and adds something to it."""
    n = len(stored)
    if n >= len(messages) or not all(s.same_as(m) for s, m in zip(stored, messages[:n], strict=True)):
        return False
    return _results(stored) == _results(messages[:n])


def _results(messages: Sequence[Message]) -> list[bytes]:
    """Whose results there are, in order."""
    found: list[bytes] = []
    calls: Sequence[ToolCall] = ()
    for m in messages:
        if m.tool_call_id is not None:
            found.append(_result_of(m.tool_call_id, calls))
        calls = m.tool_calls if m.role == "assistant" else calls
    return found


def known(stored: Sequence[Message], echoes: Sequence[Message]) -> tuple[Message, ...]:
    """Stored messages in place of their echoes, but without reasoning where those leave it out."""
    return tuple(_known(s, m) for s, m in zip(stored, echoes, strict=True))


def _known(stored: Message, echo: Message) -> Message:
    if stored.content.strip() == echo.content.strip():
        return stored
    return replace(echo, tool_calls=stored.tool_calls) if stored.tool_calls else echo


def with_ids_of(answer: Message, messages: Sequence[Message], length: int) -> tuple[Message, ...]:
    """A request's messages with the ids that the calls of a stored answer have, which ends what the first `length` of
    them echo: in the echo of that answer, and in the results that follow it.
    """
    echo = messages[length - 1] if length else None
    ids = [c.id for c in answer.tool_calls]
    if echo is None or len(ids) != len(echo.tool_calls) or ids == [c.id for c in echo.tool_calls]:
        return tuple(messages)
    after = list(messages[length:])
    for i, m in enumerate(after):
        if m.role == "assistant":
            break
        place = None if m.tool_call_id is None else _place(m.tool_call_id, echo.tool_calls)
        if place is not None:
            after[i] = replace(m, tool_call_id=ids[place])
    return (*messages[: length - 1], replace(echo, tool_calls=answer.tool_calls), *after)
