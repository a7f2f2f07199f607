"""Excerpts of long turns: a few of their messages are read and verified without all the others.

The facts of a long turn have the place of each block of its stored messages, and a checksum of it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import xxhash
from sqlalchemy import Connection, bindparam, func, select

from ssmd.sessions.rows.schema import turn as turn_table
from ssmd.sessions.rows.turns import as_json, as_they_are
from ssmd.sessions.turn import NewTurn, StoreError, items_of, messages_of
from ssmd.text.messages import Message

LONG = 256  # messages of a turn's input from which on its blocks are noted
BLOCK = 64  # messages of a block
_t = turn_table.c
_PART = select(func.substr(_t["items"], bindparam("first"), bindparam("size"))).where(_t.id == bindparam("turn"))
_ANSWER = select(_t.answer).where(_t.id == bindparam("turn"))


def blocks_of(turn: NewTurn) -> dict[str, Any] | None:
    """Return the blocks of a turn as its facts keep them: [first byte, bytes, checksum] of each. None: it is short."""
    if len(turn.messages) < LONG:
        return None
    items, answer = items_of(turn.id, turn.conversation)
    blocks, first, at = list[list[Any]](), 1, 0  # the array's bracket comes before
    for start in range(0, len(turn.messages), BLOCK):
        count = sum(1 + len(message.tool_calls) for message in turn.messages[start : start + BLOCK])
        part = as_json(items[at : at + count])[1:-1]
        blocks.append([first, len(part), _sum(part)])
        first, at = first + len(part) + 1, at + count
    return {"messages": len(turn.messages), "blocks": blocks, "answer": _sum(as_json(answer))}


def read_block(connection: Connection, turn: str, blocks: Mapping[str, Any], number: int) -> tuple[Message, ...]:
    """Read the messages of a block. Raises StoreError if they are not those that were written."""
    first, size, expected = blocks["blocks"][number]
    part = _raw(connection, _PART, {"turn": turn, "first": first + 1, "size": size})
    return _messages(turn, b"[%b]" % part, part, expected)


def read_answer(connection: Connection, turn: str, blocks: Mapping[str, Any]) -> Message:
    """Read the answer of a long turn. Raises StoreError if it is not the one that was written."""
    raw = _raw(connection, _ANSWER, {"turn": turn})
    return _messages(turn, raw, raw, blocks["answer"])[0]


def _raw(connection: Connection, query: Any, values: Mapping[str, Any]) -> bytes:
    with as_they_are(connection):
        found = connection.execute(query, values).scalar()
    return found if isinstance(found, bytes) else b""


def _messages(turn: str, array: bytes, part: bytes, expected: str) -> tuple[Message, ...]:
    if _sum(part) != expected:
        raise StoreError(f"turn {turn!r} was altered; see `ssmd session check`")
    return messages_of(json.loads(array))


def _sum(part: bytes) -> str:
    return xxhash.xxh3_64_hexdigest(part)
