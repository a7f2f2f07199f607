"""The tables of what a remote has confirmed, and of turns that were removed from shared sessions."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "remote_mark",
        sa.Column("remote", sa.String(4096), nullable=False),
        sa.Column("machine", sa.String(32), nullable=False),
        sa.Column("confirmed", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("remote", name="pk_remote_mark"),
    )
    op.create_table(
        "buried_turn",
        sa.Column("turn", sa.String(64), nullable=False),
        sa.Column("session", sa.String(64), nullable=False),
        sa.PrimaryKeyConstraint("turn", name="pk_buried_turn"),
    )
