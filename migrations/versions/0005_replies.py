"""Replies: the stored answers for repeated requests."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
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
