"""A source that generates its tensors from a seed: the same numbers on every machine, no two tensors alike.

Numbers come from a hash of integers (splitmix64, doi:10.1145/2660193.2660195), not from a library's generator, whose
streams may change.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_BLOCK = 1 << 20  # numbers at a time: their hashes take eight bytes each
_GOLDEN, _MIX1, _MIX2 = (np.uint64(n) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_SPREAD = np.float32(0.75)
_BITS = 24  # of a float32's mantissa
_DECAY_RATE = ".linear_attn.A_log"  # log of 1 to 16, spread evenly
_DECIDING = np.float32(64)  # of scores between 0 and 1
_TIME_STEP = ".linear_attn.dt_bias"  # its softplus lies between 0.001 and 0.1, spread evenly in the logarithm


class SeededSource:
    """A source of random tensors. Matrices lie around 0, spread so that products keep their size.

    Vectors lie around 1, spread so far that a vector of another layer gives another model. Decays of gated DeltaNet
    (`linear_attn.A_log`, `linear_attn.dt_bias`) are those of a model before its training: with decays around 1 a state
    forgets each token at once, and rounded activations turn the sign of whole heads (docs/notes/log.md). A router's
    bias (`expert_bias`) decides the choice nearly alone: made-up scores lie so close that rounding would change it.
    """

    def __init__(self, config: Mapping[str, Any], seed: int) -> None:
        self.config = config
        self.seed = seed

    @property
    def path(self) -> Path:
        return Path(f"seed {self.seed}")

    def tensor(self, name: str, shape: tuple[int, ...], first: int = 0, last: int | None = None) -> NDArray[np.float32]:
        key = int.from_bytes(hashlib.sha256(f"{self.seed}/{name}".encode()).digest()[:8], "little")
        row = math.prod(shape[1:])
        begin, end = first * row, (shape[0] if last is None else min(last, shape[0])) * row
        values = np.empty(end - begin, np.float32)
        for start in range(0, len(values), _BLOCK):
            part = values[start : start + _BLOCK]
            part[:] = _between(key, begin + start, len(part))
        if name.endswith(_DECAY_RATE):
            rates: NDArray[np.float32] = np.log(8.5 + 7.5 * values.astype(np.float64)).astype(np.float32)
            return rates
        if name.endswith(_TIME_STEP):
            steps = np.exp(math.log(0.01) + math.log(10) * values.astype(np.float64))
            biases: NDArray[np.float32] = np.log(np.expm1(steps)).astype(np.float32)
            return biases
        if len(shape) == 1:
            vector = np.float32(1) + values * _SPREAD
            return vector * _DECIDING if name.endswith(".expert_bias") else vector
        return (values * np.float32(math.sqrt(3 / row))).reshape(-1, *shape[1:])


def _between(key: int, first: int, count: int) -> NDArray[np.float32]:
    """Return `count` numbers of the stream `key` from number `first` on, in -1..1 by steps of 2^-23."""
    with np.errstate(over="ignore"):  # modulo 2^64
        z = (np.arange(first + 1, first + 1 + count, dtype=np.uint64)) * _GOLDEN + np.uint64(key)
        z = (z ^ (z >> np.uint64(30))) * _MIX1
        z = (z ^ (z >> np.uint64(27))) * _MIX2
        z ^= z >> np.uint64(31)
    steps = (z >> np.uint64(64 - _BITS)).astype(np.float32)
    between: NDArray[np.float32] = steps * np.float32(2.0 ** (1 - _BITS)) - np.float32(1)
    return between
