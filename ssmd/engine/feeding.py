"""A request's prompt on its way into the program: its state, then pieces that fit the buckets, up to its last token.

The last token is fed by a decode step, which gives the logits that every choice starts from; the state before it is
kept.
"""

from __future__ import annotations

import time

from ssmd.engine.choice import Choice
from ssmd.engine.generation import Generation
from ssmd.runtime import buckets
from ssmd.runtime.protocol import Logits, Program

BUCKET_WHILE_OTHERS_DECODE = 64
FORCED_BESIDE_OTHERS = 12  # tokens in a row: fewer take longer in a piece of their own than in the others' steps


def feed(g: Generation, program: Program, *, others: bool) -> None:
    """Feed the next piece of a prompt, or none if only its last token is left; begin with its state if it has none.

    `others`: whether answers are under way, which wait for it. Then a piece is a short one; or several, shorter ones,
    which together take no longer.
    """
    p = g.progress
    if p.handle is None:
        _begin(g, program)
    ids, last = g.prompt.ids, len(g.prompt.ids) - 1
    started, room, limit = time.perf_counter(), 0.0, None
    if others:
        limit = BUCKET_WHILE_OTHERS_DECODE
        room = limit + buckets.CALL
    cost = 0.0  # of all pieces
    while p.position < last:
        mark = g.kept.mark if p.position < g.kept.mark else last
        n = buckets.plan(mark - p.position, program.buckets, limit)[0]
        piece = buckets.bucket_of(n, program.buckets) + buckets.CALL
        if cost and cost + piece > room:
            break
        program.prefill(p.handle, ids.since(p.position)[:n].tolist())
        p.position += n
        p.fed += n
        cost += piece
        g.kept.prefilled(p.handle, p.position)
    p.prefill_ms += (time.perf_counter() - started) * 1e3


def feed_forced(choice: Choice, program: Program, *, others: bool) -> Logits | None:
    """Feed the next piece of what a grammar left no choice of; the logits [vocab] after its last token, None before.

    `others`: as `feed`; without them all pieces are fed.
    """
    limit = BUCKET_WHILE_OTHERS_DECODE if others else None
    while True:
        unfed = choice.unfed
        n = buckets.plan(len(unfed), program.buckets, limit)[0]
        logits = program.prefill(choice.handle, unfed[:n])
        if choice.fed(n):
            return logits
        if others:
            return None


def is_read(g: Generation) -> bool:
    """Whether all of a prompt was fed but for its last token."""
    p = g.progress
    return p.handle is not None and p.logits is None and p.position == len(g.prompt.ids) - 1


def _begin(g: Generation, program: Program) -> None:
    """The handle to feed: restored from the checkpoint found, or new when there is none that can be read."""
    p, restored = g.progress, g.kept.restored()
    if restored is not None:
        p.prompt = restored.prompt
    if restored is None or restored.handle is None:
        p.handle = program.new_state()
        return
    p.handle, p.position, p.resume = restored.handle, restored.position, restored.resume
    assert p.admitted is not None  # who reads was admitted
    p.restore_ms = (time.perf_counter() - p.admitted) * 1e3
