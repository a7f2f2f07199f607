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


def feed(g: Generation, program: Program, *, others: bool) -> None:
    """Feed the next piece of a prompt, or none if only its last token is left; begin with its state if it has none.

    A prompt's bits depend on its text alone: pieces end on the grid, and where the system prompt does. `others`:
    answers are under way, which wait for it. Then several short pieces are fed that together take no longer than a long
    one. Without others a `wide` program is fed several cells of the grid at once, which changes no bit of its results.
    """
    p = g.progress
    if p.handle is None:
        _begin(g, program)
    ids, last, system = g.prompt.ids, len(g.prompt.ids) - 1, g.prompt.system
    started = time.perf_counter()
    room = buckets.grid(program.buckets) + buckets.CALL if others else 0.0
    wide = not others and getattr(program, "wide", False)
    cost = 0.0  # of all pieces
    while p.position < last:
        n = buckets.piece(p.position, system if p.position < system else last, program.buckets, wide=wide)
        one = buckets.bucket_of(n, program.buckets) + buckets.CALL
        if cost and cost + one > room:
            break
        program.prefill(p.handle, ids.since(p.position)[:n].tolist())
        p.position += n
        p.fed += n
        cost += one
        g.kept.prefilled(p.handle, p.position)
    p.prefill_ms += (time.perf_counter() - started) * 1e3


def piece_forced(choice: Choice, program: Program) -> int:
    """Return how many of the tokens that a grammar left no choice of go into the next prefill call; 1: into a step."""
    at = program.position(choice.handle)
    return buckets.piece(at, at + len(choice.unfed), program.buckets)


def feed_forced(choice: Choice, program: Program) -> Logits | None:
    """Feed the next piece of what a grammar left no choice of; the logits [vocab] after its last token, None before."""
    n = piece_forced(choice, program)
    logits = program.prefill(choice.handle, choice.unfed[:n])
    return logits if choice.fed(n) else None


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
