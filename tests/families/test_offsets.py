"""int4's levels and offsets: what llama.cpp and the converters, which others wrote, make of the same blocks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tiny
from ai_edge_litert.schema_py_generated import TensorType
from ai_edge_quantizer.algorithms.uniform_quantize.dequantized_weight_recovery import (
    get_zp_scale_from_dequantized_symmetric_weights as recovered,
)
from conftest import TinyArtifacts
from gguf import GGMLQuantizationType, quants

from ssmd.authoring.host import Host
from ssmd.authoring.model import author
from ssmd.build.builder import Quantization
from ssmd.families.offsets import BLOCK, divided, is_exact, is_multiplied, with_offsets
from ssmd.families.registry import family_of
from ssmd.families.weights import Array, Binding, mapped
from ssmd.model.artifact import Artifact
from ssmd.model.source import Source, SourceError
from ssmd.runtime.protocol import get_runtime
from ssmd_litert.modelfile import Edited
from ssmd_litert.recipe import nbytes, offsets, unfit
from ssmd_openvino.build import _compressed

TOLERANCE = 2e-5  # of the largest logit: float32, as against transformers
_KIND = GGMLQuantizationType.Q4_1


def as_q4_1(rows: Array) -> Array:
    """Quantize rows as llama.cpp does, in blocks of 4 bits with a scale and an offset, and dequantize them."""
    found: Array = quants.dequantize(quants.quantize(rows, _KIND), _KIND)
    return found


def whole(rows: Array) -> Array:
    """Return the sum of levels and offsets."""
    levels, offsets = divided(rows)
    return levels + np.repeat(offsets, BLOCK, -1)


@pytest.mark.parametrize("size", [1e-2, 1.0, 300.0])
def test_blocks_of_q4_1_stay_what_they_were(size: float) -> None:
    rows = as_q4_1(np.random.default_rng(1).standard_normal((64, 256), np.float32) * np.float32(size))
    np.testing.assert_allclose(whole(rows), rows, rtol=0, atol=2e-6 * np.abs(rows).max())


@pytest.mark.parametrize("size", [1.0, 2e-4])  # with the second, steps are no normal numbers of float16
def test_others_are_rounded_as_q4_1_rounds(size: float) -> None:
    rows = (np.random.default_rng(2).standard_normal((64, 256), np.float32) + 3) * np.float32(size)
    ours, theirs = (np.square(found - rows).mean() for found in (whole(rows), as_q4_1(rows)))
    assert ours < 1.01 * theirs
    step = np.ptp(rows.reshape(64, -1, BLOCK), -1, keepdims=True) / 15
    assert (np.abs(whole(rows) - rows).reshape(64, -1, BLOCK) <= 0.51 * step).all()


ODD = {
    "zeros": np.zeros((2, 64), np.float32),
    "all alike": np.full((2, 64), -0.37, np.float32),
    "one of many": np.eye(2, 64, dtype=np.float32),
    "tiny": np.random.default_rng(3).standard_normal((2, 64), np.float32) * np.float32(1e-7),
    "far from zero": np.random.default_rng(4).standard_normal((2, 64), np.float32) + 1000,
    "ordinary": np.random.default_rng(5).standard_normal((512, 64), np.float32),
}


@pytest.mark.parametrize("name", ODD)
def test_a_scale_by_the_largest_value_finds_the_levels_again(name: str) -> None:
    levels, _ = divided(ODD[name])
    assert np.isfinite(levels).all()
    np.testing.assert_allclose(whole(ODD[name]), ODD[name], atol=np.ptp(ODD[name]) / 29 + 1e-4)
    blocks = levels.reshape(len(levels), -1, BLOCK)
    largest = blocks.min(-1, keepdims=True) / -8  # nncf's and wgpu's
    assert (np.abs(blocks).max(-1, keepdims=True) <= 8 * largest).all()
    np.testing.assert_array_equal(np.rint(blocks / largest) * largest, blocks)
    if name != "tiny":  # a step that is not of the block: levels may be apart by more than one
        _, scales = recovered(levels, 1, BLOCK)
        scales = scales.reshape(len(levels), -1, 1).astype(np.float16).astype(np.float32)
        np.testing.assert_allclose(np.clip(np.rint(blocks / scales), -8, 7) * scales, blocks, rtol=2e-3)


def test_what_float16_cannot_hold_is_refused() -> None:
    with pytest.raises(SourceError, match=r"weights 2\^2[01] apart are too far for int4; build with --quant int8"):
        divided(np.linspace(-1e6, 1e6, 64, dtype=np.float32)[None])


def test_which_weights_have_4_bits_in_litert() -> None:
    shapes = {
        "embedding": (512, 96),
        "layer0_q": (96, 96),
        "layer0_k": (32, 96),  # too small
        "layer0_in": (96, 80),  # not of whole blocks
        "layer0_A": (64, 96),  # no product
        "layer0_q_offset": (4096, 32),
    }
    assert offsets(shapes, "int4") == ["layer0_q"]
    assert unfit(shapes, "int4") == "layer0_in"
    assert (offsets(shapes, "int8"), unfit(shapes, "int8")) == ([], None)


def test_b_and_a_stay_float32_in_litert(artifacts: TinyArtifacts) -> None:
    file = Edited(Artifact.open(artifacts["qwen3.5-int8"]).file("model.tflite"))
    kinds: dict[tuple[int, ...], set[int]] = {}
    for tensor in (t for graph in file.model.subgraphs for t in graph.tensors if len(t.shape) == 2):
        kinds.setdefault(tuple(map(int, tensor.shape)), set()).add(tensor.type)
    assert kinds[512, 96] == {TensorType.INT8}  # in
    assert kinds[48, 96] == {TensorType.FLOAT32, TensorType.INT8}  # ba; attention's k and v
    assert nbytes({"layer0_ba": (48, 96)}, "int8") == nbytes({"layer0_ba": (48, 96)}, "int4") == 4 * 48 * 96


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_b_and_a_stay_float32_in_openvino(quantization: Quantization) -> None:
    import openvino
    from openvino import opset14 as ops

    x, products = ops.parameter([1, 4, 64], np.float32), []
    for seed, name in enumerate(("layer0_in", "layer0_ba")):
        rows = ops.constant(np.random.default_rng(seed).standard_normal((160, 64), np.float32), name=name)
        products.append(ops.matmul(x, rows, False, True))
    model = _compressed(openvino.Model(products, [x]), quantization)
    constants = [op for op in model.get_ops() if op.get_type_name() == "Constant"]
    kinds = {op.get_friendly_name(): op.get_element_type().get_type_name() for op in constants}
    assert [kind for name, kind in kinds.items() if is_exact(name)] == ["f32"]
    assert kinds["layer0_in"] in ("i8", "i4")  # nncf keeps 8 bits of a model's last product


@pytest.mark.parametrize("variant", ["llama", "granite", "mamba", "lfm2", "qwen3.5"])
def test_a_module_with_offsets_is_the_same_function(variant: str, tmp_path: Path) -> None:
    source = Source.open(tiny.write_source(tmp_path / "source", variant))
    family = family_of(source.config)
    config = family.parse(source.config)
    bindings = family.bindings(config)
    parameters = {name: binding(source) for name, binding in bindings.items()}
    weights = [n for n, w in parameters.items() if is_multiplied(n) and w.shape[1] % BLOCK == 0]
    assert len({name.partition("_")[2] for name in weights}) >= 2  # kinds of them

    def rows(bindings: dict[str, Binding]) -> Array:
        made = {name: binding(source) for name, binding in bindings.items()}
        return Host(author(family, config, made, 128)).rows(list(range(3, 40)), 16)

    plain = {**bindings, **{n: mapped(as_q4_1, bindings[n]) for n in weights}}
    offset = with_offsets(plain, weights)
    assert len(offset) == len(plain) + len(weights)
    expected = rows(plain)
    assert np.abs(rows(offset) - expected).max() < TOLERANCE * np.abs(expected).max()


def test_litert_computes_levels_and_offsets(artifacts: TinyArtifacts) -> None:
    """Against the module that has them: what is left is the rounding of activations, and of the offsets."""
    source, artifact = Source.open(artifacts.source("llama-int4")), Artifact.open(artifacts["llama-int4"])
    family = family_of(source.config)
    config = family.parse(source.config)
    bindings = family.bindings(config)
    shapes = {name: binding(source).shape for name, binding in bindings.items()}
    weights = offsets(shapes, "int4")
    assert {name.partition("_")[2] for name in weights} == {"q", "o", "gate_up", "down"}
    file = Edited(artifact.file("model.tflite"))
    for graph in file.model.subgraphs:
        packed = [t for t in graph.tensors if t.type == TensorType.INT4]
        assert len(packed) == len(weights)
    tokens = list(range(3, 40))

    def rows(bindings: dict[str, Binding]) -> Array:
        made = {name: binding(source) for name, binding in bindings.items()}
        return Host(author(family, config, made, 128)).rows(tokens, 16)

    program = get_runtime("litert").load(artifact, threads=1)
    handle = program.new_state()
    found = np.stack([program.decode([handle], [token])[0].copy() for token in tokens])
    program.close()
    divided_up, plain = rows(with_offsets(bindings, weights)), rows(bindings)
    ours, theirs = (np.sqrt(np.square(found - r).mean()) / r.std() for r in (divided_up, plain))
    assert ours < 0.03
    assert theirs > 2 * ours
