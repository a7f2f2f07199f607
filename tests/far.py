"""A program at far positions, compared with transformers: what lies before is a short text's rows, again and again."""

from __future__ import annotations

from typing import Any

import numpy as np
import oracle

from ssmd.runtime.protocol import Program

TOLERANCE = 5e-5  # of logits, in standard deviations, as tests/contract/test_parity.py has it
STATE_TOLERANCE = 1e-5  # of a row, in units of the largest value of its tensor
# Of an angle, a token: transformers' frequencies of RoPE have another last bit (tests/families/test_rope.py).
ANGLE = 2.0**-24


def check_far(program: Program, model: Any, position: int, rope: bool) -> None:
    """Check that 20 tokens from `position` on, read and then generated, have the logits and rows of transformers.
    `rope`: whether what they turn by is off by ANGLE for each token before."""
    turned = ANGLE * position if rope else 0.0
    ids = np.random.default_rng(position).integers(0, program.vocabulary, 60).tolist()
    before, prompt, rest = ids[:40], ids[40:56], ids[56:]
    cache = oracle.continued(model, before)[1]
    handle = program.restore(oracle.stretched(cache, len(before), position))
    logits, cache = oracle.continued(model, [*prompt, *rest], cache, position)
    found = [program.prefill(handle, prompt), *(program.decode([handle], [token])[0] for token in rest)]
    expected = logits[len(prompt) - 1 :]
    assert float(np.abs(np.stack(found) - expected).max() / expected.std()) <= TOLERANCE + turned
    end = position + len(prompt) + len(rest)
    state, wanted = program.save(handle), oracle.state(cache, end)
    assert state.position == end
    for name, array in wanted.tensors.items():
        off = float(np.abs(state.tensors[name] - array).max() / np.abs(array).max())
        assert off <= STATE_TOLERANCE + turned, name
    program.release(handle)
