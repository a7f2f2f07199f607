"""How weights are quantized: the recipes of ai-edge-quantizer, by the name of the quantization."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

Quantization = Literal["int8", "f32"]
# Smaller weights stay float: the Hadamard matrices of a rotated model and the SSD chunk's masks, 64 x 64 at most.
MIN_WEIGHT_ELEMENTS = 64 * 64 + 1


def quantize(source: Path, target: Path, quantization: Quantization) -> None:
    """A float32 .tflite as a quantized one."""
    from ai_edge_quantizer import quantizer

    q = quantizer.Quantizer(str(source))
    q.load_quantization_recipe(ops(quantization))
    q.quantize().export_model(str(target))


def ops(quantization: Quantization) -> list[dict[str, Any]]:
    """None for f32; else weights int8 by output channel, activations by token at run time: "dynamic range"."""
    if quantization == "f32":
        return []
    config = {
        "weight_tensor_config": {
            "num_bits": 8,
            "symmetric": True,
            "granularity": "CHANNELWISE",
            "dtype": "INT",
            "block_size": 0,
        },
        "compute_precision": "INTEGER",
        "explicit_dequantize": False,
        "skip_checks": False,
        "min_weight_elements": MIN_WEIGHT_ELEMENTS,
    }
    return [
        {"regex": ".*", "operation": op, "algorithm_key": "min_max_uniform_quantize", "op_config": config}
        for op in ("FULLY_CONNECTED", "EMBEDDING_LOOKUP")
    ]
