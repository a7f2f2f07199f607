"""The tables of a remote: what is to be sent to it, and which sessions it may have."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "outbox",
        sa.Column("id", sa.Integer, nullable=False),
        sa.Column("session", sa.String(64), nullable=False),
        sa.Column("turn", sa.String(64)),
        sa.Column("buried", sa.Boolean, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_outbox"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_outbox_turn", "outbox", ["turn"])
    op.create_table(
        "remote_session",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("standing", sa.String(8), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_remote_session"),
    )
