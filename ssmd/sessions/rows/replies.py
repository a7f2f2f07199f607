"""Replies in the database: written with their turns, found by their request, removed with their turns or on expiry."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import xxhash
from sqlalchemy import Connection, String, bindparam, delete, func, insert, select, type_coerce, update

from ssmd.sessions.reply import NewReply, Reply, ReplyKey
from ssmd.sessions.rows import checkpoints as checkpoint_rows
from ssmd.sessions.rows import holding, outbox, tree
from ssmd.sessions.rows.excerpts import blocks_of
from ssmd.sessions.rows.schema import receipt as receipt_table
from ssmd.sessions.rows.schema import reply as reply_table
from ssmd.sessions.rows.schema import session as session_table
from ssmd.sessions.rows.schema import turn as turn_table
from ssmd.sessions.rows.turns import LAST_MOMENT, as_they_are, to_micros, turn_of
from ssmd.sessions.turn import Domain, NewTurn, Turn

_r = reply_table.c
# Built once: putting a statement together takes longer than running it.
_TOLD = select(_r.key, _r.body, *(type_coerce(c, String).label(c.name) for c in (_r.turns, _r.complete, _r.answer)))
_KEPT = (
    _TOLD.where(_r.key == bindparam("digest"), _r.expires_at > bindparam("now"))
    .order_by(_r.complete, _r.id.desc())
    .limit(1)
)
_OVER = delete(reply_table).where(_r.expires_at <= bindparam("now"))
_SAME = delete(reply_table).where(_r.key == bindparam("digest"))
_WITH = _SAME.where(_r.turn == bindparam("turn"))
_NEW = insert(reply_table)
_FACTS = bytes(32)  # in place of a body's hash: the row has facts of a turn, and answers no request
_ALL_FACTS = _TOLD.where(_r.key.in_(bindparam("digests", expanding=True)))
_MANY = 500  # turns asked for at once
MAX_RECEIPTS = 1_000  # of requests that ended without a turn; of more the oldest are forgotten


def find_reply(connection: Connection, key: ReplyKey) -> Reply | None:
    """Return the reply under a key. Of several, one that broke off comes first: its client is the one that retries.

    None if there is none, or if it was altered: then the request is answered again.
    """
    with as_they_are(connection):
        row = connection.execute(_KEPT, {"digest": key.digest, "now": _now()}).one_or_none()
        said = None if row is None else said_in_reply(row)
        if row is None or said is None:
            return None
        names, answer = said
        found = connection.execute(select(turn_table).where(turn_table.c.id.in_(names))).all()
    turns = {turn.id: turn for turn in map(turn_of, found) if turn.sound}
    if set(turns) != set(names):
        return None
    texts = tuple(turns[turn].answer.content for turn in names)
    return Reply(row.body, turns[names[0]].session, tuple(names), texts, bool(row.complete), answer)


def drop_reply(connection: Connection, digest: bytes) -> None:
    """Remove the reply under a key; its turns stay."""
    connection.execute(_SAME, {"digest": digest})


def read_usages(connection: Connection, session_id: str) -> dict[str, Mapping[str, Any]]:
    """Return the usage of the answers of a session's turns, by turn. Answers without a whole reply are left out."""
    of = select(turn_table.c.id).where(tree.belongs(session_id))
    with as_they_are(connection):
        rows = connection.execute(_TOLD.where(_r.turn.in_(of))).all()
    told = [said for row in rows if (said := said_in_reply(row)) is not None]
    return {turn: answer["usage"] for names, answer in told for turn in names if "usage" in answer}


def read_facts(connection: Connection, turns: Sequence[str]) -> dict[str, Mapping[str, Any]]:
    """Return the facts that are kept with turns, by turn. Turns without facts, or with altered ones, are left out."""
    return _facts_of(connection, {_facts_key(turn): turn for turn in turns})


def read_parts(connection: Connection, turn: str, parts: Sequence[str]) -> dict[str, Mapping[str, Any]]:
    """Return further facts that are kept with a turn, by their names, as `read_facts`."""
    return _facts_of(connection, {_facts_key(turn, part): part for part in parts})


def _facts_of(connection: Connection, names: Mapping[bytes, str]) -> dict[str, Mapping[str, Any]]:
    """Return the facts of these keys, by the name of each."""
    found: dict[str, Mapping[str, Any]] = {}
    digests = list(names)
    for at in range(0, len(digests), _MANY):
        with as_they_are(connection):
            rows = connection.execute(_ALL_FACTS, {"digests": digests[at : at + _MANY]}).all()
        told = [(row.key, said) for row in rows if row.body == _FACTS and (said := said_in_reply(row)) is not None]
        found |= {names[key]: facts for key, (_, facts) in told}
    return found


def write_facts(connection: Connection, turn: str, facts: Mapping[str, Any], part: str = "") -> None:
    """Keep facts with a turn, in place of those that it has. part: the name of further facts, apart from its own."""
    digest = _facts_key(turn, part)
    connection.execute(_SAME, {"digest": digest})
    answer = dict(facts)
    row = {
        "key": digest,
        "body": _FACTS,
        "turn": turn,
        "turns": [turn],
        "complete": True,
        "expires_at": LAST_MOMENT,
        "answer": answer | {"seal": _seal(digest, _FACTS, [turn], True, answer)},
    }
    connection.execute(_NEW, row)


def _facts_key(turn: str, part: str = "") -> bytes:
    name = f"{turn} {part}" if part else turn
    return hashlib.blake2b(name.encode(), digest_size=32, person=b"ssmd.facts.1").digest()


def said_in_reply(row: Any) -> tuple[list[str], dict[str, Any]] | None:
    """Return (turns, answer) of a row whose columns were read raw; None if it was altered."""
    try:
        turns, answer = json.loads(row.turns), json.loads(row.answer)
        sealed = answer.pop("seal")
        return (turns, answer) if sealed == _seal(row.key, row.body, turns, row.complete, answer) else None
    except (ValueError, TypeError, AttributeError, KeyError):
        return None


def _seal(key: bytes, body: bytes, turns: Sequence[str], complete: bool, answer: Mapping[str, Any]) -> str:
    said = [key.hex(), body.hex(), turns, int(complete), answer]
    return xxhash.xxh3_128_hexdigest(json.dumps(said, sort_keys=True).encode())


def insert_reply(
    connection: Connection, reply: NewReply, turns: Sequence[NewTurn], *, state_stored: bool = True
) -> None:
    """Store a reply with its turns, one a choice. Remove expired replies, and the reply that it replaces.

    state_stored: True if the state at the end of each turn is stored; written into the answer's usage.
    """
    now = _now()
    connection.execute(_OVER, {"now": now})
    if reply.key.named:
        connection.execute(_SAME, {"digest": reply.key.digest})
    names, answer = [turn.id for turn in turns], dict(reply.answer)
    if "usage" in answer:
        answer["usage"] = {**answer["usage"], "state_stored": state_stored}
    row = {
        "key": reply.key.digest,
        "body": reply.key.body,
        "turn": names[0],
        "turns": names,
        "complete": reply.complete,
        "expires_at": now + to_micros(datetime.fromtimestamp(0, UTC) + reply.key.lasts),
        "answer": answer | {"seal": _seal(reply.key.digest, reply.key.body, names, reply.complete, answer)},
    }
    connection.execute(_NEW, row)
    if reply.facts is not None and len(names) == 1:
        facts = dict(reply.facts)
        if "usage" in facts:
            facts["usage"] = {**facts["usage"], "state_stored": state_stored}
        if (blocks := blocks_of(turns[0])) is not None:
            facts["blocks"] = blocks
        write_facts(connection, names[0], facts)


def update_reply(connection: Connection, reply: NewReply, turns: Sequence[NewTurn], *, state_stored: bool) -> None:
    """Write a reply again that is stored with its turns, with a new `state_stored`, unless it was removed."""
    gone = connection.execute(_WITH, {"digest": reply.key.digest, "turn": turns[0].id})
    if gone.rowcount:
        insert_reply(connection, reply, turns, state_stored=state_stored)


def read_receipt(connection: Connection, turn: str, domain: Domain) -> Mapping[str, Any] | None:
    """Return the facts of a request that was accepted and has no turn; None if there is no such one, or altered."""
    c = receipt_table.c
    row = connection.execute(select(c.owner, c.facts).where(c.turn == turn)).one_or_none()
    if row is None or not domain.has(row.owner):
        return None
    try:
        facts = json.loads(row.facts)
        sound = facts.pop("seal") == _receipt_seal(turn, row.owner, facts)
    except (ValueError, TypeError, AttributeError, KeyError):
        return None
    return facts if sound else None


def write_receipt(connection: Connection, turn: str, owner: str, facts: Mapping[str, Any], keep: Sequence[str]) -> None:
    """Write that a request was accepted. Forget receipts beyond MAX_RECEIPTS, but those of the turns in `keep`."""
    c = receipt_table.c
    said = json.dumps({**facts, "seal": _receipt_seal(turn, owner, facts)}).encode()
    row = {"turn": turn, "owner": owner, "created_at": _now(), "facts": said}
    connection.execute(insert(receipt_table), row)
    latest = select(c.turn).where(c.turn.not_in(keep), c.turn != turn).order_by(c.created_at.desc())
    connection.execute(delete(receipt_table).where(c.turn.in_(latest.limit(-1).offset(MAX_RECEIPTS))))


def end_receipt(connection: Connection, turn: str, owner: str, facts: Mapping[str, Any]) -> None:
    """Write how a request ended without a turn, unless its receipt is gone."""
    said = json.dumps({**facts, "seal": _receipt_seal(turn, owner, facts)}).encode()
    connection.execute(update(receipt_table).where(receipt_table.c.turn == turn).values(facts=said))


def drop_receipt(connection: Connection, turn: str) -> bool:
    """Remove the receipt of a request, as its turn is written or no client needs it. Returns True if there was one."""
    return bool(connection.execute(delete(receipt_table).where(receipt_table.c.turn == turn)).rowcount)


def _receipt_seal(turn: str, owner: str, facts: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps([turn, owner, facts], sort_keys=True).encode())


def forget(connection: Connection, turns: Any) -> None:
    """Remove the replies of turns, a list or a sub-select. Facts stay as long as their turns."""
    connection.execute(delete(reply_table).where(reply_table.c.turn.in_(turns), reply_table.c.body != _FACTS))


def replace_turns(connection: Connection, session_id: str, turns: Sequence[str]) -> bool:
    """Remove turns of attempts that broke off, if nothing follows on them. Others only lose their reply.

    Returns True if any was removed.
    """
    if not turns:
        return False
    t = turn_table.c
    connection.execute(delete(reply_table).where(reply_table.c.turn.in_(turns)))
    mine = (t.id.in_(turns), t.session == session_id, *(t.id.not_in(one) for one in _followed(turns)))
    gone = list(connection.scalars(select(t.id).where(*mine)))
    if not gone:
        return False
    outbox.bury_turns(connection, session_id, gone)
    linked = checkpoint_rows.linked_to(connection, gone)
    holding.add_turn_bytes(connection, -holding.nbytes_of_turns(connection, t.id.in_(gone)))
    connection.execute(delete(turn_table).where(t.id.in_(gone)))
    left = select(func.count()).where(tree.belongs(session_id)).scalar_subquery()
    connection.execute(update(session_table).where(session_table.c.id == session_id).values(turns=left))
    holding.relink(connection, session_id, linked)
    checkpoint_rows.sweep(connection, linked)
    return True


def _followed(turns: Sequence[str]) -> tuple[Any, Any]:
    """Select those of the turns that other turns follow on, and those at which forks begin."""
    parent, base = turn_table.c.parent, session_table.c.base
    return select(parent).where(parent.in_(turns)), select(base).where(base.in_(turns))


def is_followed(connection: Connection, turn: str) -> bool:
    """Return True if another turn, or a fork, follows on a turn."""
    return any(connection.execute(one.limit(1)).first() for one in _followed([turn]))


def remove_turn(connection: Connection, turn: Turn) -> bool:
    """Remove a turn that nothing follows on, but not the only one of its session. Returns True if it was removed.

    If it was the head of its session, its parent is the head then, or else the turn written last.
    """
    t, s = turn_table.c, session_table.c
    others = select(t.id).where(tree.belongs(turn.session), t.id != turn.id)
    latest = connection.execute(others.order_by(t.seq.desc()).limit(1)).scalar()
    if latest is None:
        return False
    replace_turns(connection, turn.session, [turn.id])
    head = update(session_table).where(s.id == turn.session, s.head == turn.id)
    connection.execute(head.values(head=turn.parent or latest))
    return True


def _now() -> int:
    return to_micros(datetime.now(UTC))
