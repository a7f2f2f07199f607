"""Stored numbers carry an xxh3-128, which is not sha256: the column says checksum, the rows there are keep theirs."""

from __future__ import annotations

from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for table in ("piece", "segment"):  # not as a batch, which would copy every row
        op.execute(f"ALTER TABLE {table} RENAME COLUMN sha256 TO checksum")
