"""Checkpoints that no turn links to: of prompts that belong to no conversation. How much of the store they may have."""

from __future__ import annotations

import time
from collections.abc import Collection

from sqlalchemy import Connection, bindparam, select, update

from ssmd.sessions.rows.checkpoints import sweep
from ssmd.sessions.rows.schema import checkpoint, turn_checkpoint

SHARE = 8  # of the quota they have one part in so many
_UNBOUNDED = 1 << 30  # bytes, where there is no quota
_c = checkpoint.c
_LINKS = select(turn_checkpoint.c.checkpoint).where(turn_checkpoint.c.checkpoint == _c.id)
_LOOSE = (
    select(_c.id, _c.recurrent_nbytes, _c.rows_nbytes)
    .where(~_LINKS.exists())
    .order_by(_c.last_used_at.desc(), _c.id.desc())
)
_USED = update(checkpoint).where(_c.id == bindparam("number")).values(last_used_at=bindparam("now"))


def bound(connection: Connection, quota: int | None, used: int | None, keep: Collection[int]) -> int:
    """Remove those used longest ago, as far as all take more than their share; how many. used: one that just was.

    keep: ids of those whose turn may still come.
    """
    if used is not None:
        connection.execute(_USED, {"number": used, "now": time.time_ns() // 1000})
    most, nbytes, gone = _UNBOUNDED if quota is None else quota // SHARE, 0, list[int]()
    for number, recurrent, rows in connection.execute(_LOOSE).all():
        nbytes += recurrent + rows
        if nbytes > most and number not in keep:
            gone.append(number)
    sweep(connection, gone)
    return len(gone)
