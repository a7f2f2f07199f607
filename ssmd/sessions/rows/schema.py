"""The tables of the session store. docs/state-layout.md explains them; `migrations/` makes them.

Times are microseconds since 1970 (UTC). Messages are stored as a turn's additions to its parent. Ids and rendered text
are additions to its stem, KV rows are a checkpoint's additions to its parent. All text from clients is stored as bytes:
no text column holds a NUL, which not every database takes.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
    bindparam,
    or_,
    select,
    text,
)

from ssmd.sessions.turn import Domain

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)

session = Table(
    "session",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("created_at", BigInteger, nullable=False),
    Column("last_used_at", BigInteger, nullable=False, index=True),
    Column("model", Text, nullable=False),
    Column("lineage", String(64), nullable=False),
    Column("clock", String(40), nullable=False),  # ISO 8601: the current time for the session's templates
    Column("owner", String(64), nullable=False, server_default=text("''")),  # name of the key that it came with
    Column("head", String(64)),  # a turn; no foreign key, as the two would point at each other. NULL: none yet
    Column("turns", Integer, nullable=False),
    Column("title", Text, nullable=False),
    Column("pinned", Boolean, nullable=False),
    Column("imported", String(64), nullable=False),  # the origin that its imported checkpoints carry; '' if none
    # A fork: the turn it begins at, and the first one above that; tree.py keeps them. Else NULL.
    Column("base", String(64), index=True),
    Column("root", String(64), index=True),
    # Sizes of its checkpoints, which holding.py keeps: bytes that no other session needs, and those that others need
    # too. NULL: to be counted.
    Column("own_nbytes", BigInteger, default=0),
    Column("shared_nbytes", BigInteger, default=0),
    Column("retained", Integer, nullable=False, server_default=text("0")),  # retention.EVERYTHING, THINNED or NOTHING
    Index("ix_session_pinned_retained_last_used_at", "pinned", "retained", "last_used_at"),
    Index("ix_session_owner_last_used_at", "owner", "last_used_at"),
)

turn = Table(
    "turn",
    metadata,
    Column("seq", Integer, primary_key=True, autoincrement=True),  # the order of writing, whatever the clock says
    Column("id", String(64), nullable=False, unique=True),
    Column("session", ForeignKey("session.id", ondelete="CASCADE"), nullable=False, index=True),
    Column("owner", String(64), nullable=False, server_default=text("''")),
    Column("parent", ForeignKey("turn.id", ondelete="CASCADE"), index=True),
    Column("root", String(64), nullable=False),  # the first turn above it, or itself
    Column("stem", String(64)),  # the turn above it whose ids and text its own go on from; NULL: they stand alone
    Column("depth", Integer, nullable=False),
    Column("length", Integer, nullable=False),  # messages of the conversation, its answer included
    Column("chain", LargeBinary(32), nullable=False),  # match.Chain.said of those messages
    Column("whole", LargeBinary(32), nullable=False),  # match.Chain.whole
    Column("items", LargeBinary, nullable=False),  # JSON: the input since the parent's answer
    Column("answer", LargeBinary),  # the items of the answer; NULL: none yet
    Column("ids_start", Integer, nullable=False),  # number of ids of its stem, which come first
    Column("ids", LargeBinary, nullable=False),  # its own ids after those, int32 little-endian
    Column("ids_before", LargeBinary, nullable=False),  # line.Line.before
    Column("ids_anchored", LargeBinary, nullable=False),  # line.Line.anchored
    Column("text_start", Integer, nullable=False),  # characters
    Column("text", LargeBinary, nullable=False),  # UTF-8
    Column("text_before", LargeBinary, nullable=False),  # line.Passage.before
    Column("prompt_tokens", Integer, nullable=False),
    Column("cut", Integer, nullable=False, server_default=text("0")),  # messages left out after the system prompt
    Column("settled_messages", Integer),  # turn.Settled
    Column("settled_characters", Integer),
    Column("template", String(64), nullable=False, server_default=text("''")),
    Column("lineage", String(64)),  # of the model whose ids and text these are; NULL: unknown
    Column("finish", String(32), nullable=False),
    Column("complete", Boolean, nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("nbytes", BigInteger, nullable=False),  # of items, ids and text
    Column("checksum", LargeBinary(16), nullable=False),  # xxh3-128 of all but seq, session and owner
    Index("ix_turn_chain_owner", "chain", "owner"),
    sqlite_autoincrement=True,
)

layout = Table(
    "layout",
    metadata,
    Column("digest", String(32), primary_key=True),  # StateSpec.digest()
    Column("tensors", JSON, nullable=False),  # StateSpec.to_json(), so that a state can be read without its model
)

checkpoint = Table(
    "checkpoint",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=True),
    Column("key", LargeBinary(32), nullable=False),  # H(layout, lineage, all ids fed); with `build` its key
    Column("anchor", LargeBinary(32), nullable=False),  # H(layout, lineage, ids to a rounded-down position)
    Column("layout", ForeignKey("layout.digest"), nullable=False),
    Column("lineage", String(64), nullable=False),
    Column("build", String(64), nullable=False),
    Column("producer", Text, nullable=False),
    # '' if the state was computed here; session of an import; '@' and the key of a trusted machine. States that grow
    # from it have the same.
    Column("origin", String(64), nullable=False),
    Column("owner", String(64), nullable=False, server_default=text("''")),
    Column("position", Integer, nullable=False),
    Column("parent", ForeignKey("checkpoint.id", ondelete="SET NULL"), index=True),
    Column("kind", String(8), nullable=False),
    Column("digest", LargeBinary(32), nullable=False),  # over all segments and pieces that it is made of
    Column("recurrent_nbytes", BigInteger, nullable=False),  # its pieces
    Column("rows_nbytes", BigInteger, nullable=False),  # segments that came with it, or with parents that are gone
    Column("created_at", BigInteger, nullable=False),
    Column("last_used_at", BigInteger, nullable=False),
    UniqueConstraint("key", "build", "origin", "owner"),
    Index("ix_checkpoint_anchor_position_owner", "anchor", "position", "owner"),
    sqlite_autoincrement=True,  # an id that was deleted never comes back as another checkpoint
)

piece = Table(
    "piece",
    metadata,
    Column("checkpoint", ForeignKey("checkpoint.id", ondelete="CASCADE"), primary_key=True),
    Column("first", Integer, primary_key=True),  # values [first, last) of the flattened recurrent data
    Column("last", Integer, nullable=False),
    Column("dtype", String(8), nullable=False),
    Column("checksum", LargeBinary(32), nullable=False),  # xxh3-128 of `data`; sha256 in early rows
    Column("data", LargeBinary, nullable=False),
)

segment = Table(
    "segment",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=True),
    Column("first", Integer, nullable=False),  # KV rows [first, last)
    Column("last", Integer, nullable=False),
    Column("dtype", String(8), nullable=False),
    Column("nbytes", BigInteger, nullable=False),
    Column("checksum", LargeBinary(32), nullable=False),  # xxh3-128 of `data`; sha256 in early rows
    Column("data", LargeBinary, nullable=False),
    sqlite_autoincrement=True,
)

checkpoint_segment = Table(
    "checkpoint_segment",
    metadata,
    Column("checkpoint", ForeignKey("checkpoint.id", ondelete="CASCADE"), primary_key=True),
    Column("segment", ForeignKey("segment.id", ondelete="RESTRICT"), primary_key=True, index=True),
    sqlite_with_rowid=False,
)

turn_checkpoint = Table(
    "turn_checkpoint",
    metadata,
    Column("turn", ForeignKey("turn.id", ondelete="CASCADE"), primary_key=True),
    Column("checkpoint", ForeignKey("checkpoint.id", ondelete="CASCADE"), primary_key=True, index=True),
    sqlite_with_rowid=False,
)

reply = Table(
    "reply",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("key", LargeBinary(32), nullable=False, index=True),  # ReplyKey.digest
    Column("body", LargeBinary(32), nullable=False),  # sha256 of the request's body
    Column("turn", ForeignKey("turn.id", ondelete="CASCADE"), nullable=False, index=True),  # of the first choice
    Column("turns", JSON, nullable=False),  # of all choices
    Column("complete", Boolean, nullable=False),
    Column("expires_at", BigInteger, nullable=False, index=True),
    Column("answer", JSON, nullable=False),  # beside the turns' own text: id, usage, log probabilities
)

# A request that was accepted and has no turn yet, or never got one. Its turn's commit removes it.
receipt = Table(
    "receipt",
    metadata,
    Column("turn", String(64), primary_key=True),  # the id that its turn has, once that is stored
    Column("owner", String(64), nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("facts", LargeBinary, nullable=False),  # JSON: those of its request, and how it ended
)

total = Table(
    "total",
    metadata,
    Column("name", String(16), primary_key=True),  # 'checkpoints': bytes of all pieces and segments; 'turns'
    Column("nbytes", BigInteger, nullable=False),
)

# Empty without a remote. No foreign keys: a tombstone outlives what it buries.
outbox = Table(
    "outbox",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=True),
    Column("session", String(64), nullable=False),
    Column("turn", String(64), index=True),  # to be sent, or buried; NULL: the session is to be buried
    Column("buried", Boolean, nullable=False),
    sqlite_autoincrement=True,
)

remote_session = Table(
    "remote_session",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("standing", String(8), nullable=False),  # outbox.Standing
)

# By remote: this machine's name there, and how often the remote has confirmed to have what left the outbox.
remote_mark = Table(
    "remote_mark",
    metadata,
    Column("remote", String(4096), primary_key=True),
    Column("machine", String(32), nullable=False),
    Column("confirmed", BigInteger, nullable=False),
)

# Removed from sessions that the remote may have, and that stay. Kept for ever, as sessions that are buried.
buried_turn = Table(
    "buried_turn",
    metadata,
    Column("turn", String(64), primary_key=True),
    Column("session", String(64), nullable=False),
)

# The machines whose states serve here as this one's own.
trusted_machine = Table(
    "trusted_machine",
    metadata,
    Column("origin", String(64), primary_key=True),  # that of its states: '@' and its key in base64
    Column("name", String(64), nullable=False),  # that the user gave it, or ''
    Column("trusted_at", BigInteger, nullable=False),
)


def serves_all(origin: Any) -> Any:
    """Build the condition that a state with this origin column may serve every conversation of its owner."""
    return or_(origin == "", origin.in_(select(trusted_machine.c.origin)))


def seen(owner: Any) -> Any:
    """Build the condition that a row with this owner column is visible. `by` gives its values."""
    return or_(bindparam("everybody", type_=Boolean), owner.in_(bindparam("owners", expanding=True)))


def by(domain: Domain) -> dict[str, Any]:
    """Return the values of the condition that `seen` builds."""
    everybody = domain.sees is None
    return {"everybody": everybody, "owners": ("",) if everybody else domain.sees}  # an empty list would make a query
