"""Chains of turns with tool calls: numbers in arguments are hashed as doubles, so that their echoes are found again.

A chain is carried on from turn to turn, so turns below a call get new chains too. A turn that was altered, or whose
chain does not match its messages, stays as it is. So do the turns below an altered one.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import NamedTuple

import sqlalchemy as sa
from alembic import op
from pydantic_core import from_json

from ssmd.sessions.match import Chain
from ssmd.sessions.rows.turns import as_they_are, seal, turn_of
from ssmd.text.messages import Message, ToolCall

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

_CALL = b'"function_call"'  # the type of an item


class _CallBefore(ToolCall):
    """A call as it was hashed before: `1.0` differs from `1`."""

    @property
    def said(self) -> tuple[str, str]:
        try:
            value = from_json(self.arguments, allow_inf_nan=False) if self.arguments.strip() else {}
            text = self.arguments if value is None else json.dumps(value, sort_keys=True, separators=(",", ":"))
        except (ValueError, TypeError):
            text = self.arguments
        return self.name, text


class _Above(NamedTuple):
    """A turn that others may continue. before: the chain that it had. now: its new chain."""

    before: Chain
    now: Chain
    calls: tuple[ToolCall, ...]


def upgrade() -> None:
    connection = op.get_bind()
    called = "SELECT root FROM turn WHERE instr(items, :call) OR instr(answer, :call)"
    with as_they_are(connection):
        query = sa.text(f"SELECT seq FROM turn WHERE root IN ({called}) ORDER BY seq")  # noqa: S608 - names of our own
        numbers = connection.scalars(query, {"call": _CALL}).all()
    known: dict[str, _Above] = {}
    for seq in numbers:
        with as_they_are(connection):
            row = connection.execute(sa.text("SELECT * FROM turn WHERE seq = :seq"), {"seq": seq}).one()
        turn = turn_of(row)
        above = _Above(Chain(), Chain(), ()) if turn.parent is None else known.get(turn.parent)
        if not turn.sound or above is None:
            continue
        now = above.now.then(turn.conversation, above.calls)
        # Turns that were written in the new form already also continue the old chain of the turn above.
        hashed = (above.before.then(said, above.calls) for said in (_before(turn.conversation), turn.conversation))
        if turn.chain not in hashed:
            now = turn.chain
        known[turn.id] = _Above(turn.chain, now, turn.answer.tool_calls)
        if now != turn.chain:
            new = {"chain": now.said, "whole": now.whole}
            new["checksum"] = seal({**row._mapping, **new})
            columns = "chain = :chain, whole = :whole, checksum = :checksum"
            connection.execute(sa.text(f"UPDATE turn SET {columns} WHERE seq = :seq"), {**new, "seq": seq})  # noqa: S608


def _before(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    return tuple(
        replace(m, tool_calls=tuple(_CallBefore(c.id, c.name, c.arguments) for c in m.tool_calls)) for m in messages
    )
