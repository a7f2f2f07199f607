"""A step's tensors besides a handle's state: tokens, position, logits and new rows."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ssmd.runtime.hoststate.buffers import carve
from ssmd.runtime.hoststate.graph import Tensor
from ssmd.runtime.hoststate.slot import NewRows, RowGroup

_INT32 = np.dtype(np.int32)
_FLOAT32 = np.dtype(np.float32)


class Step:
    """The tensors of one length's signatures that all handles share."""

    def __init__(self, length: int, vocabulary: int, groups: tuple[RowGroup, ...]) -> None:
        self.length = length
        tensors = {
            "tokens": Tensor((1, length), _INT32),
            "pos": Tensor((1,), _INT32),
            "n_valid": Tensor((1,), _INT32),
            "logits": Tensor((1, vocabulary), _FLOAT32),
        }
        self.memory, self.arrays = carve(tensors)
        self.tokens: NDArray[np.int32] = self.arrays["tokens"][0]
        self.pos: NDArray[np.int32] = self.arrays["pos"]
        self.n_valid: NDArray[np.int32] = self.arrays["n_valid"]
        self.logits: NDArray[np.float32] = self.arrays["logits"][0]
        self.rows = NewRows(groups, length)
