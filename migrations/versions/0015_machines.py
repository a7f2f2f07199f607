"""The table of the machines whose states this one trusts."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "trusted_machine",
        sa.Column("origin", sa.String(64), nullable=False),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("trusted_at", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("origin", name="pk_trusted_machine"),
    )
