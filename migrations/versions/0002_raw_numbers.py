"""Numbers may be stored as they are (raw/float16, raw/float32): tables stay, but older versions cannot read them."""

from __future__ import annotations

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Nothing to change: a version that knows only revision 0001 refuses the database instead of misreading it."""
