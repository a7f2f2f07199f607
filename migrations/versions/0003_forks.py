"""Forks: sessions that begin at a turn of another one."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("session", sa.Column("base", sa.String(64)))
    op.add_column("session", sa.Column("root", sa.String(64)))
    op.create_index("ix_session_base", "session", ["base"])
    op.create_index("ix_session_root", "session", ["root"])
