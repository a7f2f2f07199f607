"""How many choices may decode at the same time, and how many for who would have none: as there is memory."""

from __future__ import annotations

import logging

from ssmd.machine.memory import available
from ssmd.machine.size import show_size
from ssmd.model.state import StateSpec

log = logging.getLogger(__name__)
TOKENS = 2048  # that a conversation is reckoned with, if the context is no shorter
SIDES = 2  # of a recurrent state: one is read, the other written
PART = 0.75  # of the free memory


def lane_bytes(spec: StateSpec, context: int | None) -> int:
    """Bytes of memory that a choice takes while it decodes, with a conversation of TOKENS tokens."""
    tokens = TOKENS if context is None else min(context, TOKENS)
    rows = sum(t.nbytes_at(tokens) * 4 // t.numpy_dtype.itemsize + t.nbytes_at(tokens) for t in spec.rows)
    return SIDES * sum(t.nbytes_at(0) for t in spec.recurrent) + rows  # rows as float32, and as they are stored


def affordable(spec: StateSpec, context: int | None, asked: int, free: int | None = None) -> tuple[int, int]:
    """How many of the choices asked for there is memory for, one at least; says so if they are fewer. And how many
    spare lanes beside them: as many again, or what memory there is for, one at least.

    `free`: bytes that can still be taken; by default what the system tells.
    """
    free = available() if free is None else free
    if free is None:
        return asked, asked
    each = lane_bytes(spec, context)
    fitting = int(PART * free) // each
    if fitting >= asked:
        return asked, max(1, min(asked, fitting - asked))
    found = max(1, fitting)
    log.warning(
        "there is memory for %d choices at the same time, not for %d: %s are free, and one of %d tokens takes %s",
        *(found, asked, show_size(free), TOKENS if context is None else min(context, TOKENS), show_size(each)),
    )
    return found, 1
