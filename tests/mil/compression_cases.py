"""A small model and the ways in which coremltools compresses its weights: by an affine map, or by a table of values."""

from __future__ import annotations

from typing import Any

import numpy as np
from mil.schema import coremltools as ct

COMPRESSIONS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "int8-channels": ("iOS18", "linear", {"mode": "linear_symmetric", "dtype": "int8", "granularity": "per_channel"}),
    "int8-shifted": ("iOS18", "linear", {"mode": "linear", "dtype": "int8", "granularity": "per_channel"}),
    "uint8-tensor": ("iOS18", "linear", {"mode": "linear", "dtype": "uint8", "granularity": "per_tensor"}),
    "int4-blocks": (
        "iOS18",
        "linear",
        {"mode": "linear_symmetric", "dtype": "int4", "granularity": "per_block", "block_size": 8},
    ),
    "uint4-blocks": (
        "iOS18",
        "linear",
        {"mode": "linear", "dtype": "uint4", "granularity": "per_block", "block_size": 4},
    ),
    "table-of-16": ("iOS18", "table", {"mode": "uniform", "nbits": 4}),
    "tables-of-4": (
        "iOS18",
        "table",
        {"mode": "uniform", "nbits": 2, "granularity": "per_grouped_channel", "group_size": 8},
    ),
    "table-of-8-scaled": ("iOS18", "table", {"mode": "uniform", "nbits": 3, "enable_per_channel_scale": True}),
    "ios17-int8": ("iOS17", "linear", {"mode": "linear", "dtype": "int8", "granularity": "per_channel"}),
    "ios17-table-of-64": ("iOS17", "table", {"mode": "uniform", "nbits": 6}),
    "ios17-table-of-4": ("iOS17", "table", {"mode": "uniform", "nbits": 2}),
}
IDS = np.random.default_rng(3).integers(0, 32, (1, 9)).astype(np.int32)


def converted(target: str) -> Any:
    """A model of an embedding, a linear layer and two convolutions, ids (1, T) -> y (1, 16, T - 3), in float16."""
    import torch

    class Small(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.embedding = torch.nn.Embedding(32, 16)
            self.linear = torch.nn.Linear(16, 24)
            self.depthwise = torch.nn.Conv1d(24, 24, 4, groups=24)
            self.pointwise = torch.nn.Conv1d(24, 16, 1)

        def forward(self, ids: Any) -> Any:
            x = self.linear(self.embedding(ids)).transpose(1, 2)  # (1, 24, T)
            return self.pointwise(torch.tanh(self.depthwise(x)))

    torch.manual_seed(0)
    return ct.convert(
        torch.jit.trace(Small().eval(), torch.from_numpy(IDS)),
        inputs=[ct.TensorType(name="ids", shape=IDS.shape, dtype=np.int32)],
        outputs=[ct.TensorType(name="y", dtype=np.float32)],
        minimum_deployment_target=getattr(ct.target, target),
        skip_model_load=True,
    )


WEIGHT_BYTES = 2 * (32 * 16 + 16 * 24 + 24 + 24 * 4 + 24 + 24 * 16 + 16)  # of that model, uncompressed


def compressed(model: Any, kind: str, parameters: dict[str, Any]) -> Any:
    """The model with its weights compressed."""
    import coremltools.optimize.coreml as cto

    config, compress = {
        "linear": (cto.OpLinearQuantizerConfig, cto.linear_quantize_weights),
        "table": (cto.OpPalettizerConfig, cto.palettize_weights),
    }[kind]
    return compress(model, cto.OptimizationConfig(global_config=config(weight_threshold=0, **parameters)))


# What each target and kind of compression becomes.
CONSTEXPRS = {
    ("iOS17", "linear"): "constexpr_affine_dequantize",
    ("iOS18", "linear"): "constexpr_blockwise_shift_scale",
    ("iOS17", "table"): "constexpr_lut_to_dense",
    ("iOS18", "table"): "constexpr_lut_to_dense",
}
