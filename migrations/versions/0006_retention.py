"""Sizes for quick retention: bytes of all checkpoints and of each session's, and what retention left of a session."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("session", sa.Column("own_nbytes", sa.BigInteger))
    op.add_column("session", sa.Column("shared_nbytes", sa.BigInteger))
    op.add_column("session", sa.Column("retained", sa.Integer, nullable=False, server_default=sa.text("0")))
    op.create_index("ix_session_pinned_retained_last_used_at", "session", ["pinned", "retained", "last_used_at"])
    op.create_table(
        "total",
        sa.Column("name", sa.String(16), nullable=False),
        sa.Column("nbytes", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_total"),
    )
    op.execute(
        "INSERT INTO total (name, nbytes) SELECT 'checkpoints', "
        "(SELECT coalesce(sum(recurrent_nbytes), 0) FROM checkpoint) + "
        "(SELECT coalesce(sum(nbytes), 0) FROM segment)"
    )
