"""The tables of 0.1.0: sessions, turns, replies, checkpoints and their parts."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    _sessions()
    _turns()
    _checkpoints()
    total = op.create_table(
        "total",
        sa.Column("name", sa.String(16), nullable=False),
        sa.Column("nbytes", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_total"),
    )
    op.bulk_insert(total, [{"name": name, "nbytes": 0} for name in ("checkpoints", "turns")])


def _owner() -> sa.Column[str]:
    return sa.Column("owner", sa.String(64), nullable=False, server_default=sa.text("''"))


def _sessions() -> None:
    op.create_table(
        "session",
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
    op.create_index("ix_session_last_used_at", "session", ["last_used_at"])
    op.create_index("ix_session_base", "session", ["base"])
    op.create_index("ix_session_root", "session", ["root"])
    op.create_index("ix_session_pinned_retained_last_used_at", "session", ["pinned", "retained", "last_used_at"])
    op.create_index("ix_session_owner_last_used_at", "session", ["owner", "last_used_at"])


def _turns() -> None:
    op.create_table(
        "turn",
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
    op.create_index("ix_turn_session", "turn", ["session"])
    op.create_index("ix_turn_parent", "turn", ["parent"])
    op.create_index("ix_turn_chain_owner", "turn", ["chain", "owner"])
    op.create_table(
        "reply",
        sa.Column("id", sa.Integer, nullable=False),
        sa.Column("key", sa.LargeBinary(32), nullable=False),
        sa.Column("body", sa.LargeBinary(32), nullable=False),
        sa.Column("turn", sa.String(64), nullable=False),
        sa.Column("turns", sa.JSON, nullable=False),
        sa.Column("complete", sa.Boolean, nullable=False),
        sa.Column("expires_at", sa.BigInteger, nullable=False),
        sa.Column("answer", sa.JSON, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_reply"),
        sa.ForeignKeyConstraint(["turn"], ["turn.id"], name="fk_reply_turn", ondelete="CASCADE"),
    )
    op.create_index("ix_reply_key", "reply", ["key"])
    op.create_index("ix_reply_turn", "reply", ["turn"])
    op.create_index("ix_reply_expires_at", "reply", ["expires_at"])


def _checkpoints() -> None:
    op.create_table(
        "layout",
        sa.Column("digest", sa.String(32), nullable=False),
        sa.Column("tensors", sa.JSON, nullable=False),
        sa.PrimaryKeyConstraint("digest", name="pk_layout"),
    )
    op.create_table(
        "checkpoint",
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
    op.create_index("ix_checkpoint_parent", "checkpoint", ["parent"])
    op.create_index("ix_checkpoint_anchor_position_owner", "checkpoint", ["anchor", "position", "owner"])
    op.create_table(
        "piece",
        sa.Column("checkpoint", sa.Integer, nullable=False),
        sa.Column("first", sa.Integer, nullable=False),
        sa.Column("last", sa.Integer, nullable=False),
        sa.Column("dtype", sa.String(8), nullable=False),
        sa.Column("checksum", sa.LargeBinary(32), nullable=False),
        sa.Column("data", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("checkpoint", "first", name="pk_piece"),
        sa.ForeignKeyConstraint(["checkpoint"], ["checkpoint.id"], name="fk_piece_checkpoint", ondelete="CASCADE"),
    )
    op.create_table(
        "segment",
        sa.Column("id", sa.Integer, nullable=False, autoincrement=True),
        sa.Column("first", sa.Integer, nullable=False),
        sa.Column("last", sa.Integer, nullable=False),
        sa.Column("dtype", sa.String(8), nullable=False),
        sa.Column("nbytes", sa.BigInteger, nullable=False),
        sa.Column("checksum", sa.LargeBinary(32), nullable=False),
        sa.Column("data", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_segment"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "checkpoint_segment",
        sa.Column("checkpoint", sa.Integer, nullable=False),
        sa.Column("segment", sa.Integer, nullable=False),
        sa.PrimaryKeyConstraint("checkpoint", "segment", name="pk_checkpoint_segment"),
        sa.ForeignKeyConstraint(
            ["checkpoint"], ["checkpoint.id"], name="fk_checkpoint_segment_checkpoint", ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(["segment"], ["segment.id"], name="fk_checkpoint_segment_segment", ondelete="RESTRICT"),
        sqlite_with_rowid=False,
    )
    op.create_index("ix_checkpoint_segment_segment", "checkpoint_segment", ["segment"])
    op.create_table(
        "turn_checkpoint",
        sa.Column("turn", sa.String(64), nullable=False),
        sa.Column("checkpoint", sa.Integer, nullable=False),
        sa.PrimaryKeyConstraint("turn", "checkpoint", name="pk_turn_checkpoint"),
        sa.ForeignKeyConstraint(["turn"], ["turn.id"], name="fk_turn_checkpoint_turn", ondelete="CASCADE"),
        sa.ForeignKeyConstraint(
            ["checkpoint"], ["checkpoint.id"], name="fk_turn_checkpoint_checkpoint", ondelete="CASCADE"
        ),
        sqlite_with_rowid=False,
    )
    op.create_index("ix_turn_checkpoint_checkpoint", "turn_checkpoint", ["checkpoint"])
