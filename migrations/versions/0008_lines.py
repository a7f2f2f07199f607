"""Store format 2.

Turns keep items, describe by hashes what they add to a turn above, and carry a checksum. States are named by hashes
that can be carried on, without their ids. Everything has an owner. Answer and head may be missing.

`turn`, `session` and `checkpoint` are made again. Numbers of states stay where they are.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import sqlalchemy as sa
from alembic import op

from ssmd.sessions.checkpoint import bound, prefix_keys
from ssmd.sessions.items import items_of
from ssmd.sessions.line import NOTHING, SILENCE, Line, Passage, anchor, regrown
from ssmd.sessions.match import Chain
from ssmd.sessions.rows.growth import as_json, sealed
from ssmd.sessions.rows.turns import as_they_are, is_moment, is_unicode
from ssmd.text.messages import Message

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


class _Old(NamedTuple):
    """A turn that was moved, with the data that the turns below it need."""

    stem: str | None
    root: str
    chain: Chain
    ids: Line
    text: Passage
    lineage: str | None


def upgrade() -> None:
    connection = op.get_bind()
    _sessions(connection)
    _turns(connection)
    _checkpoints(connection)


def _replace(connection: sa.Connection, name: str, *, autoincrement: bool) -> None:
    """Replace the old table by the new one, which continues its numbers."""
    if autoincrement:
        last = connection.execute(sa.text("SELECT seq FROM sqlite_sequence WHERE name = :n"), {"n": name}).scalar()
        connection.execute(sa.text("DELETE FROM sqlite_sequence WHERE name = :n"), {"n": f"{name}_2"})
        connection.execute(sa.text("INSERT INTO sqlite_sequence VALUES (:n, :s)"), {"n": f"{name}_2", "s": last or 0})
    op.drop_table(name)
    op.rename_table(f"{name}_2", name)


def _owner() -> sa.Column[str]:
    return sa.Column("owner", sa.String(64), nullable=False, server_default=sa.text("''"))


def _sessions(connection: sa.Connection) -> None:
    op.create_table(
        "session_2",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("last_used_at", sa.BigInteger, nullable=False),
        sa.Column("model", sa.Text, nullable=False),
        sa.Column("lineage", sa.String(64), nullable=False),
        sa.Column("clock", sa.String(40), nullable=False),
        _owner(),
        sa.Column("head", sa.String(64)),
        sa.Column("turns", sa.Integer, nullable=False),
        sa.Column("title", sa.Text, nullable=False),
        sa.Column("pinned", sa.Boolean, nullable=False),
        sa.Column("imported", sa.String(64), nullable=False),
        sa.Column("base", sa.String(64)),
        sa.Column("root", sa.String(64)),
        sa.Column("own_nbytes", sa.BigInteger),
        sa.Column("shared_nbytes", sa.BigInteger),
        sa.Column("retained", sa.Integer, nullable=False, server_default=sa.text("0")),
        sa.PrimaryKeyConstraint("id", name="pk_session"),
    )
    columns = "id, created_at, last_used_at, model, lineage, clock, head, turns, title, pinned, imported, base, root, "
    columns += "own_nbytes, shared_nbytes, retained"
    copied = f"INSERT INTO session_2 ({columns}) SELECT {columns} FROM session"  # noqa: S608 - names of our own
    connection.execute(sa.text(copied))
    _replace(connection, "session", autoincrement=False)
    op.create_index("ix_session_last_used_at", "session", ["last_used_at"])
    op.create_index("ix_session_base", "session", ["base"])
    op.create_index("ix_session_root", "session", ["root"])
    op.create_index("ix_session_pinned_retained_last_used_at", "session", ["pinned", "retained", "last_used_at"])


def _turns(connection: sa.Connection) -> None:
    made = op.create_table(
        "turn_2",
        sa.Column("seq", sa.Integer, nullable=False, autoincrement=True),
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("session", sa.String(64), nullable=False),
        _owner(),
        sa.Column("parent", sa.String(64)),
        sa.Column("root", sa.String(64), nullable=False),
        sa.Column("stem", sa.String(64)),
        sa.Column("depth", sa.Integer, nullable=False),
        sa.Column("length", sa.Integer, nullable=False),
        sa.Column("chain", sa.LargeBinary(32), nullable=False),
        sa.Column("whole", sa.LargeBinary(32), nullable=False),
        sa.Column("items", sa.LargeBinary, nullable=False),
        sa.Column("answer", sa.LargeBinary),
        sa.Column("ids_start", sa.Integer, nullable=False),
        sa.Column("ids", sa.LargeBinary, nullable=False),
        sa.Column("ids_before", sa.LargeBinary, nullable=False),
        sa.Column("ids_anchored", sa.LargeBinary, nullable=False),
        sa.Column("text_start", sa.Integer, nullable=False),
        sa.Column("text", sa.LargeBinary, nullable=False),
        sa.Column("text_before", sa.LargeBinary, nullable=False),
        sa.Column("prompt_tokens", sa.Integer, nullable=False),
        sa.Column("cut", sa.Integer, nullable=False, server_default=sa.text("0")),
        sa.Column("settled_messages", sa.Integer),
        sa.Column("settled_characters", sa.Integer),
        sa.Column("template", sa.String(64), nullable=False, server_default=sa.text("''")),
        sa.Column("lineage", sa.String(64)),
        sa.Column("finish", sa.String(32), nullable=False),
        sa.Column("complete", sa.Boolean, nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("nbytes", sa.BigInteger, nullable=False),
        sa.Column("checksum", sa.LargeBinary(16), nullable=False),
        sa.PrimaryKeyConstraint("seq", name="pk_turn"),
        sa.UniqueConstraint("id", name="uq_turn_id"),
        sa.ForeignKeyConstraint(["session"], ["session.id"], name="fk_turn_session", ondelete="CASCADE"),
        sa.ForeignKeyConstraint(["parent"], ["turn.id"], name="fk_turn_parent", ondelete="CASCADE"),
        sqlite_autoincrement=True,
    )
    total = 0
    for row in _moved(connection):
        total += row["nbytes"]
        connection.execute(sa.insert(made), row)
    connection.execute(sa.text("INSERT INTO total (name, nbytes) VALUES ('turns', :n)"), {"n": total})
    _replace(connection, "turn", autoincrement=True)
    for column in ("session", "parent", "chain"):
        op.create_index(f"ix_turn_{column}", "turn", [column])


def _moved(connection: sa.Connection) -> Iterator[dict[str, Any]]:
    """Yield the rows of the new table. An unreadable turn keeps its readable data, with a checksum that is wrong."""
    known: dict[str, _Old] = {}
    for seq in connection.scalars(sa.text("SELECT seq FROM turn ORDER BY seq")).all():
        with as_they_are(connection):
            old = connection.execute(sa.text("SELECT * FROM turn WHERE seq = :seq"), {"seq": seq}).one()
        if not is_unicode(old.id) or not is_unicode(old.session) or not is_unicode(old.parent or ""):
            continue  # its session is unknown
        above = known.get(old.parent) if old.parent is not None else None
        named = is_unicode(old.lineage or "") and is_unicode(old.finish) and is_moment(old.created_at)
        counted = isinstance(old.depth, int) and isinstance(old.length, int)
        sound = named and counted and (old.parent is None or above is not None)
        try:
            said = [Message.from_json(m) for m in (*json.loads(old.messages), json.loads(old.answer))]
            as_json(m.to_json() for m in said)
            asked, answered = map(as_json, items_of(old.id, said))
        except (ValueError, TypeError, AttributeError):
            said, sound = [Message("assistant", "")], False
            asked, answered = _as_it_is(old.messages), _as_it_is(old.answer)
        moved = _regrown(known, old, above) if sound else _Old(None, old.id, Chain(), NOTHING, SILENCE, None)
        chain = (above.chain if above else Chain()).then(said)
        row = {
            "seq": old.seq,
            "id": old.id,
            "session": old.session,
            "parent": old.parent,
            "root": above.root if above else old.id,
            "stem": moved.stem,
            "depth": old.depth if counted else 0,
            "length": old.length if counted else 0,
            "chain": chain.said,
            "whole": chain.whole,
            "items": asked,
            "answer": answered,
            "ids_start": moved.ids.start,
            "ids": moved.ids.own.tobytes(),
            "ids_before": moved.ids.before,
            "ids_anchored": moved.ids.anchored,
            "text_start": moved.text.start,
            "text": moved.text.own.encode(),
            "text_before": moved.text.before,
            "prompt_tokens": min(old.prompt_tokens, len(moved.ids)) if isinstance(old.prompt_tokens, int) else 0,
            "cut": 0,
            "settled_messages": None,
            "settled_characters": None,
            "template": "",
            "lineage": old.lineage if named else None,
            "finish": old.finish if named else "stop",
            "complete": bool(old.complete),
            "created_at": old.created_at if named else 0,
        }
        if sound:
            known[old.id] = moved._replace(root=row["root"], chain=chain)
            yield sealed(row)
        else:
            yield sealed(row) | {"checksum": bytes(16)}


def _as_it_is(value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode("utf-8", "surrogateescape")


def _regrown(known: dict[str, _Old], old: Any, above: _Old | None) -> _Old:
    """Rebuild the ids and the text of a turn as additions to a whole turn. Before, it shared any part of its parent's.

    Both are empty if they are invalid: they are read again.
    """
    parts, names = [], []
    at, name = above, old.parent
    while at is not None and len(at.ids):
        parts.append((at.ids, at.text, at.lineage == old.lineage))
        names.append(name)
        name = at.stem
        at = known.get(name) if name is not None else None
    try:
        made = regrown(parts, old.ids_shared, np.frombuffer(old.ids, "<i4"), old.text_shared, old.text)
        if not is_unicode(old.text):
            made = None
    except (ValueError, TypeError):
        made = None
    if made is None:
        return _Old(None, old.id, Chain(), NOTHING, SILENCE, old.lineage)
    stem, ids, text = made
    return _Old(None if stem is None else names[stem], old.id, Chain(), ids, text, old.lineage)


def _checkpoints(connection: sa.Connection) -> None:
    made = op.create_table(
        "checkpoint_2",
        sa.Column("id", sa.Integer, nullable=False, autoincrement=True),
        sa.Column("key", sa.LargeBinary(32), nullable=False),
        sa.Column("anchor", sa.LargeBinary(32), nullable=False),
        sa.Column("layout", sa.String(32), nullable=False),
        sa.Column("lineage", sa.String(64), nullable=False),
        sa.Column("build", sa.String(64), nullable=False),
        sa.Column("producer", sa.Text, nullable=False),
        sa.Column("origin", sa.String(64), nullable=False),
        _owner(),
        sa.Column("position", sa.Integer, nullable=False),
        sa.Column("parent", sa.Integer),
        sa.Column("kind", sa.String(8), nullable=False),
        sa.Column("digest", sa.LargeBinary(32), nullable=False),
        sa.Column("recurrent_nbytes", sa.BigInteger, nullable=False),
        sa.Column("rows_nbytes", sa.BigInteger, nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("last_used_at", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_checkpoint"),
        sa.UniqueConstraint("key", "build", "origin", "owner", name="uq_checkpoint_key_build_origin_owner"),
        sa.ForeignKeyConstraint(["layout"], ["layout.digest"], name="fk_checkpoint_layout"),
        sa.ForeignKeyConstraint(["parent"], ["checkpoint.id"], name="fk_checkpoint_parent", ondelete="SET NULL"),
        sqlite_autoincrement=True,
    )
    with as_they_are(connection):
        names = connection.scalars(sa.text("SELECT id FROM checkpoint ORDER BY id")).all()
    for name in names:  # one at a time: each row has all of its ids
        with as_they_are(connection):
            row = connection.execute(sa.text("SELECT * FROM checkpoint WHERE id = :id"), {"id": name}).one()
        fields = dict(row._mapping)
        try:
            data = fields.pop("ids")
            ids = Line.of(np.frombuffer(data, "<i4"))
            if not all(is_unicode(value) for value in fields.values() if isinstance(value, str)):
                raise ValueError("not Unicode")
            if row.key != _named(row.layout, row.lineage, data):
                raise ValueError("not its ids")
            position = len(ids)
            fields["anchor"], fields["key"] = prefix_keys(row.layout, row.lineage, ids, [anchor(position), position])
            fields["digest"] = bound(row.digest, (fields["key"], row.build, row.origin))
            connection.execute(sa.insert(made), fields)
        except (ValueError, TypeError, sa.exc.IntegrityError):  # a state of unknown ids
            for table in ("turn_checkpoint", "checkpoint_segment", "piece"):
                gone = f"DELETE FROM {table} WHERE checkpoint = :id"  # noqa: S608 - names of our own
                connection.execute(sa.text(gone), {"id": name})
    connection.execute(
        sa.text("UPDATE checkpoint_2 SET parent = NULL WHERE parent NOT IN (SELECT id FROM checkpoint_2)")
    )
    _replace(connection, "checkpoint", autoincrement=True)
    op.create_index("ix_checkpoint_parent", "checkpoint", ["parent"])
    op.create_index("ix_checkpoint_anchor_position", "checkpoint", ["anchor", "position"])


def _named(layout: str, lineage: str, ids: bytes) -> bytes:
    """Return the key that a checkpoint of these ids had."""
    scope = json.dumps([layout, lineage]).encode()
    return hashlib.blake2b(scope + ids, digest_size=32, person=b"ssmd.prefix.1").digest()
