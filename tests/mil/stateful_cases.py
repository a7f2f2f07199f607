"""A small stateful model of two functions, prefill and decode, as coremltools converts and joins them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from mil.schema import coremltools as ct

WIDTH = 8
LENGTHS = {"prefill": 4, "decode": 1}  # tokens that a function takes
STATES = {"sums": (1, WIDTH), "count": (1, 1)}


def module() -> Any:
    """A leaky sum of embeddings and a count of tokens: ids (1, T), scale (1,) -> (1, WIDTH), (1, 1).

    The count is read again after it was written.
    """
    import torch

    class Leaky(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.embedding = torch.nn.Embedding(64, WIDTH)
            self.head = torch.nn.Linear(WIDTH, WIDTH)
            for name, shape in STATES.items():
                self.register_buffer(name, torch.zeros(shape))

        def forward(self, ids: Any, scale: Any) -> Any:
            x = self.embedding(ids) * scale  # (1, T, W)
            sums = self.sums * 0.75 + x.sum(1)
            self.sums[:] = sums
            self.count[:] = self.count + ids.shape[1]
            return torch.tanh(self.head(sums)), self.count * 2.0

    torch.manual_seed(1)
    return Leaky().eval()


def convert(length: int, output: type = np.float32) -> Any:
    """The model for `length` tokens at a time, in float16."""
    import torch

    example = (torch.zeros((1, length), dtype=torch.int32), torch.ones(1))
    states = [
        ct.StateType(wrapped_type=ct.TensorType(shape=shape, dtype=np.float16), name=name)
        for name, shape in STATES.items()
    ]
    return ct.convert(
        torch.jit.trace(module(), example, check_trace=False),
        inputs=[
            ct.TensorType(name="ids", shape=(1, length), dtype=np.int32),
            ct.TensorType(name="scale", shape=(1,), dtype=np.float32),
        ],
        outputs=[ct.TensorType(name="y", dtype=output), ct.TensorType(name="twice", dtype=output)],
        states=states,
        minimum_deployment_target=ct.target.iOS18,
        skip_model_load=True,
    )


def packages(folder: Path) -> None:
    """Save prefill.mlpackage, decode.mlpackage, and both.mlpackage of both functions."""
    both = ct.utils.MultiFunctionDescriptor()
    for name, length in LENGTHS.items():
        path = str(folder / f"{name}.mlpackage")
        convert(length).save(path)
        both.add_function(path, src_function_name="main", target_function_name=name)
    both.default_function_name = "decode"
    ct.utils.save_multifunction(both, str(folder / "both.mlpackage"))
