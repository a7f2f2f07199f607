"""Checksums: stored numbers get an xxh3-128 instead of a sha256. The column is renamed; old rows keep their sha256."""

from __future__ import annotations

from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for table in ("piece", "segment"):  # not as a batch, which would copy every row
        op.execute(f"ALTER TABLE {table} RENAME COLUMN sha256 TO checksum")
