"""The quantization of weights: recipes of ai-edge-quantizer, by the name of the quantization.

int4 finds the 16 levels again that its weights have already (ssmd/families/offsets.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ssmd.build.builder import Quantization, Shapes
from ssmd.families.offsets import BLOCK, SUFFIX, is_exact, is_multiplied

# Smaller weights stay float: the Hadamard matrices of a rotated model and the SSD chunk's masks, 64 x 64 at most.
MIN_WEIGHT_ELEMENTS = 64 * 64 + 1
_BYTEWISE = ("embedding", "head")  # int8 in int4 too: one matrix where they are tied, and what decides between words
_OFFSETS = "BlockOffsets"  # in the names of the products of offsets: the class of ssmd/authoring/flat.py
_EXACT = "ExactProduct"  # likewise, of products that stay float32


def quantize(source: Path, target: Path, quantization: Quantization) -> None:
    """Quantize the float32 .tflite `source` into `target`."""
    from ai_edge_quantizer import quantizer

    q = quantizer.Quantizer(str(source))
    q.load_quantization_recipe([*ops(quantization), _KEPT])
    q.quantize().export_model(str(target))


def rotates(quantization: Quantization) -> bool:
    """Return True if the weights are rotated first. int4's are not, as they may have 16 levels already."""
    return quantization == "int8"


def ops(quantization: Quantization) -> list[dict[str, Any]]:
    """Return the recipe: weights int8 by output channel or int4 by blocks, activations int8 by token at run time.

    The quantizer calls this "dynamic range".
    """
    if quantization == "f32":
        return []
    embedding = _op(".*", "EMBEDDING_LOOKUP")
    if quantization == "int8":
        return [_op(".*", "FULLY_CONNECTED"), embedding]
    bytewise = [_op(f".*{name}.*", "FULLY_CONNECTED") for name in (_OFFSETS, "logits_output")]
    return [_op(".*", "FULLY_CONNECTED", 4), *bytewise, embedding]


def _op(regex: str, operation: str, bits: int = 8) -> dict[str, Any]:
    """Return an entry of a recipe. The last entry that fits an operation counts."""
    config = {
        "weight_tensor_config": {
            "num_bits": bits,
            "symmetric": True,
            "granularity": "CHANNELWISE" if bits == 8 else f"BLOCKWISE_{BLOCK}",
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
        "algorithm_key": "min_max_uniform_quantize" if bits == 8 else "dequantized_weight_recovery",
        "op_config": config,
    }


# The first name alone: a product of the same input has the names of both, one after the other.
_KEPT = {**_op(f"^[^;]*{_EXACT}", "FULLY_CONNECTED"), "algorithm_key": "no_quantize"}


def offsets(shapes: Shapes, quantization: Quantization) -> list[str]:
    """Return the names of the weights with offsets: those of 4 bits."""
    return [n for n, s in shapes.items() if _bits(n, s, quantization) == 4 and s[1] % BLOCK == 0]


def unfit(shapes: Shapes, quantization: Quantization) -> str | None:
    """Return the first parameter that cannot be quantized so; None if all can."""
    return next((n for n, s in shapes.items() if _bits(n, s, quantization) == 4 and s[1] % BLOCK), None)


def nbytes(shapes: Shapes, quantization: Quantization) -> int:
    """Return the bytes of all parameters together, quantized, with their scales."""
    total = 0
    for name, shape in shapes.items():
        elements, rows = 1, shape[0]
        for n in shape:
            elements *= n
        bits = _bits(name, shape, quantization)
        total += elements * bits // 8 + {32: 0, 8: 4 * rows, 4: 4 * elements // BLOCK}[bits]
    return total


def _bits(name: str, shape: tuple[int, ...], quantization: Quantization) -> int:
    elements = shape[0] * shape[1] if len(shape) == 2 else 0
    if quantization == "f32" or elements < MIN_WEIGHT_ELEMENTS or is_exact(name):
        return 32
    if quantization == "int8" or name in _BYTEWISE or name.endswith(SUFFIX):
        return 8
    return 4 if is_multiplied(name) else 32
