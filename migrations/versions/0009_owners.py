"""Indices by owner: a caller that sees a part of the store finds it without reading the rest."""

from __future__ import annotations

from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_index("ix_session_owner_last_used_at", "session", ["owner", "last_used_at"])
    op.drop_index("ix_turn_chain", "turn")
    op.create_index("ix_turn_chain_owner", "turn", ["chain", "owner"])
    op.drop_index("ix_checkpoint_anchor_position", "checkpoint")
    op.create_index("ix_checkpoint_anchor_position_owner", "checkpoint", ["anchor", "position", "owner"])
