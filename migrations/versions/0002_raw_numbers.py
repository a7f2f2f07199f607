"""Raw numbers (raw/float16, raw/float32). Tables stay, but older versions cannot read such rows."""

from __future__ import annotations

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Do nothing: the new number makes older versions refuse the database instead of misreading it."""
