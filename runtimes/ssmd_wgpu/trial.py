"""The trial of a model on a GPU: a stream must give the same bits in a step of its own and in a step of several.

It also measures steps of several streams. The shaders sum in one order for any number of streams, but an untested
compiler might change it.
"""

from __future__ import annotations

import logging
import time

import numpy as np

from ssmd.runtime.hoststate.graph import GraphError
from ssmd_wgpu.model import Model
from ssmd_wgpu.slots import STREAMS, Slot
from ssmd_wgpu.tuning import APART, Tuning, warm

log = logging.getLogger(__name__)
_TOKENS = 3
_WARM_S = 0.02  # before steps are timed, after their kernels were compiled
_THEN = "", "products are not fused", "threads have two rows", "streams are decoded one after another"


def tried(model: Model, tuning: Tuning) -> Model:
    """Return the model, simplified until a stream's bits do not depend on other streams. Raises GraphError.

    The result of an earlier trial of this build on this adapter is used if there is one.
    """
    if tuning.step_s is not None:
        model.step_s = dict(tuning.step_s)
        return model
    for simpler in range(APART + 1):
        if simpler:
            tuning.simpler = simpler
            log.warning("streams differ in company on %s: %s", model.gpu.found.description, _THEN[simpler])
            model.simplify(tuning.simplified)
        if simpler == APART or alike(model):
            break
    model.slots.trim()
    tuning.step_s = dict(model.step_s)
    tuning.keep()
    return model


def alike(model: Model) -> bool:
    """Return True if logits of some tokens are equal for one stream alone and for 2, 4 or 8 together.

    The shortest times of these steps are stored in the model.
    """
    tokens = np.arange(STREAMS * _TOKENS, dtype=np.int32).reshape(_TOKENS, STREAMS) * 7919 % model.plan.vocabulary
    alone = [_decoded(model, tokens[:, i : i + 1]) for i in range(STREAMS)]
    for count in (2, 4, 8):
        try:
            if _decoded(model, tokens[:, :count]) != b"".join(alone[:count]):
                return False
        except GraphError:
            if not model.gpu.answers():
                raise
            return True  # no memory for so many
    return True


def _decoded(model: Model, tokens: np.ndarray[tuple[int, int], np.dtype[np.int32]]) -> bytes:
    """Return the logits of each stream after its tokens (tokens, streams)."""
    count = tokens.shape[1]
    slots: list[Slot] = []
    logits: list[list[bytes]] = [[] for _ in range(count)]
    try:
        for _ in range(count):
            slots.append(model.slots.take())
            model.slots.reserve(slots[-1], len(tokens))
        for position, ids in enumerate(tokens):
            model.slots.feed(slots, [position] * count, ids)
            dispatches = model.step(count, 1)
            if not position:
                warm(model.gpu, _WARM_S)
            begin = time.perf_counter()
            rows = model.gpu.recorder.read(dispatches, [model.logits(i) for i in range(count)], probed=True)
            model.step_s[count] = min(time.perf_counter() - begin, model.step_s.get(count, float("inf")))
            for own, row in zip(logits, rows, strict=True):
                own.append(row.tobytes())
    finally:
        for slot in slots:
            model.slots.give(slot)
    return b"".join(part for own in logits for part in own)
