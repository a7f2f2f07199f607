"""How weights are quantized: the recipes of ai-edge-quantizer, by the name of the quantization."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ssmd.build.builder import Quantization

# Smaller weights stay float: the Hadamard matrices of a rotated model and the SSD chunk's masks, 64 x 64 at most.
MIN_WEIGHT_ELEMENTS = 64 * 64 + 1
INT4_BLOCK = 32  # values of a row that share a scale
_BYTEWISE = ("embedding", "head")  # int8 in int4 too: one matrix where they are tied, and what decides between words


def quantize(source: Path, target: Path, quantization: Quantization) -> None:
    """Quantize the float32 .tflite `source` into `target`."""
    from ai_edge_quantizer import quantizer

    q = quantizer.Quantizer(str(source))
    q.load_quantization_recipe(ops(quantization))
    q.quantize().export_model(str(target))


def rotates(quantization: Quantization) -> bool:
    """Whether the weights are rotated first. int4 loses more by it than it gains (docs/quantization.md)."""
    return quantization == "int8"


def ops(quantization: Quantization) -> list[dict[str, Any]]:
    """Weights int8 by output channel or int4 by blocks, activations int8 by token at run time: "dynamic range"."""
    if quantization == "f32":
        return []
    products = _op(".*", "FULLY_CONNECTED", 8 if quantization == "int8" else 4)
    head = [_op(".*logits_output.*", "FULLY_CONNECTED", 8)] if quantization == "int4" else []
    return [products, *head, _op(".*", "EMBEDDING_LOOKUP", 8)]


def _op(regex: str, operation: str, bits: int) -> dict[str, Any]:
    """The last that fits an operation counts."""
    config = {
        "weight_tensor_config": {
            "num_bits": bits,
            "symmetric": True,
            "granularity": "CHANNELWISE" if bits == 8 else f"BLOCKWISE_{INT4_BLOCK}",
            "dtype": "INT",
            "block_size": 0,
        },
        "compute_precision": "INTEGER",
        "explicit_dequantize": False,
        "skip_checks": False,
        "min_weight_elements": MIN_WEIGHT_ELEMENTS,
    }
    return {
        "regex": regex,
        "operation": operation,
        "algorithm_key": "min_max_uniform_quantize",
        "op_config": config,
    }


def unfit(shapes: Mapping[str, tuple[int, ...]], quantization: Quantization) -> str | None:
    """The first parameter that cannot be quantized so, if there is one."""
    if quantization != "int4":
        return None
    return next((n for n, s in shapes.items() if _bits(n, s, quantization) == 4 and s[1] % INT4_BLOCK), None)


def nbytes(shapes: Mapping[str, tuple[int, ...]], quantization: Quantization) -> int:
    """Bytes of all parameters together, quantized, with their scales."""
    total = 0
    for name, shape in shapes.items():
        elements, rows = 1, shape[0]
        for n in shape:
            elements *= n
        bits = _bits(name, shape, quantization)
        total += elements * bits // 8 + {32: 0, 8: 4 * rows, 4: 4 * elements // INT4_BLOCK}[bits]
    return total


def _bits(name: str, shape: tuple[int, ...], quantization: Quantization) -> int:
    elements = shape[0] * shape[1] if len(shape) == 2 else 0
    if quantization == "f32" or elements < MIN_WEIGHT_ELEMENTS:
        return 32
    return 8 if quantization == "int8" or name in _BYTEWISE else 4
