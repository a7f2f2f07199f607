"""Turns may hold tool calls and results. No table changes: an ssmd that cannot read them is to leave them alone."""

from __future__ import annotations

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Nothing to do: what is there is written as it was."""
