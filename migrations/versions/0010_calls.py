"""Tool calls and results in turns. No table changes, but an ssmd that cannot read them must leave them alone."""

from __future__ import annotations

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Do nothing: existing rows stay as they are."""
