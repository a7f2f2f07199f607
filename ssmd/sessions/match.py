"""Comparison of a request's messages with stored turns: which turn does it continue? Pure functions.

A request continues a turn if its first messages are the turn's whole conversation, from the root to its answer. Each
message must be `same_as` the stored one. The deepest such turn wins. Among equals the order is: a session that began
here over an imported one, which may be forged; the session used last; its head; the turn written last.
A final assistant message is to be continued: it is input and matches no answer.
Of tool calls, names and arguments are compared, not ids. Ids only say which call a result belongs to, by its place.
Without a session id only an echoed answer joins a request to a session. A shared system prompt or shared examples do
not.

A conversation is looked up by its chain, a hash that is carried on from answer to answer. To store the next turn, only
the messages that the request adds have to be hashed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from ssmd.text.messages import ROLES, THINK_END, Message, Role, ToolCall

_ROLES = {role: role.encode() for role in ROLES}


@dataclass(frozen=True)
class Match:
    """The result of matching a request."""

    session: str | None  # the session it continues; None: a new one is to be opened
    parent: str | None  # the turn it continues; None: a branch at the root
    messages: tuple[Message, ...]  # all to render: stored ones in place of echoes, without reasoning that an echo lacks
    new: tuple[Message, ...]  # those since the parent's answer, the tail of `messages`


@dataclass(frozen=True, slots=True)
class Chain:
    """Two hashes of a conversation, 32 bytes each, carried on at each answer."""

    said: bytes = bytes(32)  # finds all echoes of it; they may leave reasoning out
    whole: bytes = bytes(32)  # of echoes that leave nothing out

    def then(self, messages: Iterable[Message], calls: Sequence[ToolCall] = ()) -> Chain:
        """Return the chain of the conversation with these messages added, the last of which is an answer.

        calls: calls of the answer before them. Some of these messages may be their results.
        """
        *_, last = ((self, 0), *_answers(messages, self, calls))
        return last[0]


@dataclass(frozen=True)
class Echo:
    """The beginnings of a request that may be stored conversations: each ends in an answer, and messages follow it."""

    lengths: Sequence[int]  # of each beginning, in messages, ascending
    chains: Sequence[Chain]  # of each beginning

    @staticmethod
    def of(messages: Sequence[Message]) -> Echo:
        """List the beginnings of a request's messages that may be stored."""
        found = list(_answers(messages[:-1], Chain()))
        return Echo([length for _, length in found], [chain for chain, _ in found])


def _answers(messages: Iterable[Message], chain: Chain, calls: Sequence[ToolCall] = ()) -> Iterator[tuple[Chain, int]]:
    """Yield the chain after each answer, and the number of messages up to it."""
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
    """Encode a message. Lengths come first, so that no other message or pair of messages has the same bytes."""
    raw = text.encode("utf-8", "surrogatepass")
    if name is None:
        return b"%b 0 %d\n%b" % (_ROLES[role], len(raw), raw)
    named = b"+" + name.encode("utf-8", "surrogatepass")
    return b"%b %d %d\n%b%b" % (_ROLES[role], len(named), len(raw), named, raw)


def _called(call: ToolCall) -> bytes:
    """Encode a call. It follows the bytes of its message, and no role begins like it."""
    name, arguments = (text.encode("utf-8", "surrogatepass") for text in call.said)
    return b"call %d %d\n%b%b" % (len(name), len(arguments), name, arguments)


def _result_of(call: str, calls: Sequence[ToolCall]) -> bytes:
    """Encode which call of the last answer a message is the result of: by its place, or by its id if not there."""
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
    """Return True if a request echoes a whole stored conversation, which ends in an answer, and adds messages to it."""
    n = len(stored)
    if n >= len(messages) or not all(s.same_as(m) for s, m in zip(stored, messages[:n], strict=True)):
        return False
    return _results(stored) == _results(messages[:n])


def _results(messages: Sequence[Message]) -> list[bytes]:
    """List the encoded references of all results to their calls, in order."""
    found: list[bytes] = []
    calls: Sequence[ToolCall] = ()
    for m in messages:
        if m.tool_call_id is not None:
            found.append(_result_of(m.tool_call_id, calls))
        calls = m.tool_calls if m.role == "assistant" else calls
    return found


def known(stored: Sequence[Message], echoes: Sequence[Message]) -> tuple[Message, ...]:
    """Return stored messages in place of their echoes, without reasoning if the echo leaves it out."""
    return tuple(_known(s, m) for s, m in zip(stored, echoes, strict=True))


def _known(stored: Message, echo: Message) -> Message:
    if stored.content.strip() == echo.content.strip():
        return stored
    return replace(echo, tool_calls=stored.tool_calls) if stored.tool_calls else echo


def with_ids_of(answer: Message, messages: Sequence[Message], length: int) -> tuple[Message, ...]:
    """Return a request's messages with the call ids of a stored answer, in the answer's echo and in its results.

    length: number of messages that echo the stored conversation; the last of them echoes `answer`.
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
