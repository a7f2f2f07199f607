"""Receipts of requests that were accepted and have no turn yet."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "receipt",
        sa.Column("turn", sa.String(64), nullable=False),
        sa.Column("owner", sa.String(64), nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("facts", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("turn", name="pk_receipt"),
    )
