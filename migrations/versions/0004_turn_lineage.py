"""The lineage of each turn: a session may continue with another model, whose ids mean other text."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("turn", sa.Column("lineage", sa.String(64)))
    op.execute("UPDATE turn SET lineage = (SELECT lineage FROM session WHERE session.id = turn.session)")
