"""Stripped graphs and refitting: the files are byte for byte those that a build with the same weights writes."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import zstandard
from conftest import BUILT, KEPT, ONE_EACH, TinyArtifacts
from refitting import stripped
from safetensors.numpy import save_file

from ssmd.build.builder import Target
from ssmd.build.stripping import Label, StripError, strip, written
from ssmd.families.offsets import BLOCK, SUFFIX, divided
from ssmd.families.registry import family_of
from ssmd.families.rotation import rotated
from ssmd.families.weights import given
from ssmd.model.artifact import Artifact
from ssmd.model.random_source import SeededSource
from ssmd.model.source import Source, SourceError, Tensors
from ssmd.refit.encodings import ENCODINGS, EncodingError, decoded
from ssmd.refit.graphfile import StrippedError, StrippedGraph
from ssmd.refit.refit import RefitError, bindings_of, refit
from ssmd_coreml.build import CONVERTER as COREML
from ssmd_litert.build import CONVERTER as LITERT
from ssmd_openvino import library
from ssmd_openvino.build import CONVERTER as OPENVINO

CONVERTERS: Mapping[str, Any] = {"litert": LITERT, "openvino": OPENVINO}
PLAN = Target("int8", (16,), (256,))  # of `graph`


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def fresh(folder: Path) -> Path:
    folder.mkdir()
    return folder


def refitted(graph: StrippedGraph, source: Tensors, folder: Path) -> dict[str, bytes]:
    """By way of the file that it is kept in."""
    graph.save(folder.with_suffix(".graph"))
    refit(StrippedGraph.open(folder.with_suffix(".graph")), source, fresh(folder))
    return contents(folder)


# what refitting writes


INLINE = "coreml-falcon-h1-norm-f32"  # its heads are eight: so few numbers stand in Core ML's program, not in a file
# Of which no graph can be stripped yet, by the first parameter that it does not hold as it was given: Core ML's
# converter combines the gain of gated DeltaNet's heads.
WHOLE_ONLY = {"coreml-qwen3.5-f32": "layer0_gated_norm"}
NO_INT4 = "coreml-llama-int4"  # no encoding makes it
REFITTED = [n for n in KEPT if BUILT[n].runtime != "wgpu" and n not in (INLINE, NO_INT4, *WHOLE_ONLY)]
# Of the others test_artifacts_can_be_had_again says as much, and of int8 with other weights test_from_a_checkpoint.
USUAL = {("mamba", "f32"), ("llama", "int4")}
# Fields with which the rows of every matrix are whole blocks, without which int4 builds none.
IN_BLOCKS: Mapping[str, Mapping[str, int]] = {
    "qwen3": {"head_dim": 32},
    "mamba": {"hidden_size": 96, "intermediate_size": 192},
    "falcon-mamba": {"hidden_size": 96, "intermediate_size": 192},
    "falcon-h1-norm": {"head_dim": 32},
    "nemotron-h-biases": {"head_dim": 32, "mamba_head_dim": 16},
    "qwen3.5": {"head_dim": 32},
}


@pytest.mark.parametrize(
    ("variant", "quantization"),
    [
        pytest.param(v, q, marks=[] if (v, q) in USUAL else [pytest.mark.full])
        for v in ONE_EACH
        for q in ("f32", "int8", "int4")
    ],
)
def test_openvinos_files_are_those_of_a_build(
    artifacts: TinyArtifacts, variant: str, quantization: Any, tmp_path: Path
) -> None:
    """And which weights it was made with does not show in a graph."""
    more = IN_BLOCKS.get(variant, {}) if quantization == "int4" else {}
    two_seeds(OPENVINO, {**config_of(artifacts, variant), **more}, Target(quantization, (16,), (256,)), tmp_path)


@pytest.mark.full
def test_openvinos_files_of_float16(artifacts: TinyArtifacts, tmp_path: Path) -> None:
    two_seeds(OPENVINO, config_of(artifacts, "granite"), Target("f16", (16,), (256,)), tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("variant", ["granite", "llama", "mamba"])
def test_coremls_files_are_those_of_a_build(artifacts: TinyArtifacts, variant: str, tmp_path: Path) -> None:
    two_seeds(COREML, config_of(artifacts, variant), Target("int8", (16,), (256,)), tmp_path)


@pytest.mark.full
@pytest.mark.parametrize(("variant", "quantization"), [("granite", "int8"), ("granite", "int4"), ("llama", "int4")])
def test_litert_files_are_those_of_a_build(
    artifacts: TinyArtifacts, variant: str, quantization: str, tmp_path: Path
) -> None:
    """In a process of its own: see tests/conftest.py."""
    code = (
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[1]); from refit import test_refit as t; "
        "config = t.Source.open(Path(sys.argv[2])).config; "
        "t.two_seeds(t.LITERT, config, t.Target(sys.argv[4], (16,), (256,)), Path(sys.argv[3]))"
    )
    folder = str(Path(__file__).parents[1])
    where = (folder, str(artifacts.source(f"{variant}-f32")), str(tmp_path), quantization)
    done = subprocess.run([sys.executable, "-c", code, *where], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def config_of(artifacts: TinyArtifacts, variant: str) -> Mapping[str, Any]:
    name = f"{variant}-f32"
    assert artifacts[name]  # which writes its source
    return Source.open(artifacts.source(name)).config


def two_seeds(converter: Any, config: Mapping[str, Any], plan: Target, folder: Path) -> None:
    first = written(converter, config, plan, fresh(folder / "1"), 1, Label("tiny"))
    second = written(converter, config, plan, fresh(folder / "2"), 2, Label("tiny"))
    assert first.header == second.header
    assert first.literals == second.literals
    assert refitted(first, SeededSource(config, 2), folder / "out") == contents(folder / "2")
    assert contents(folder / "1") != contents(folder / "2")


@pytest.mark.parametrize("name", REFITTED)
def test_artifacts_can_be_had_again(artifacts: TinyArtifacts, name: str, tmp_path: Path) -> None:
    """From what is left of them without their weights: of a transformers checkpoint, of every family."""
    artifact = Artifact.open(artifacts[name])
    source = Source.open(artifacts.source(name))
    graph = stripped(artifact, source)
    files = refitted(graph, source, tmp_path / "out")
    assert files == {n: artifact.file(n).read_bytes() for n in files}
    holes = [hole for part in graph.header.files for hole in part.holes]
    left = sum(map(len, graph.literals))
    assert left + sum(hole.length for hole in holes) == len(b"".join(files.values()))
    wanted = bindings_of(source.config, artifact.manifest.quantization_recipe, graph.header.tiers[-1])
    assert {hole.parameter for hole in holes} == {name for name in wanted if not name.startswith("spread_")}


@pytest.mark.parametrize("name", WHOLE_ONLY)
def test_graphs_that_cannot_be_stripped_are_refused(artifacts: TinyArtifacts, name: str) -> None:
    with pytest.raises(StripError, match=f"does not hold {WHOLE_ONLY[name]} as it was given"):
        stripped(Artifact.open(artifacts[name]), Source.open(artifacts.source(name)))


def test_from_a_checkpoint(artifacts: TinyArtifacts, graph: StrippedGraph, tmp_path: Path) -> None:
    """Of other dtypes than the graph's, in several files."""
    source = checkpoint(artifacts.source("llama-f32"), tmp_path / "source")
    assert refitted(graph, source, tmp_path / "out") == built(source, PLAN, tmp_path / "2")


def built(source: Source, plan: Target, folder: Path) -> dict[str, bytes]:
    from ssmd.authoring.model import author

    family = family_of(source.config)
    config = family.parse(source.config)
    bound = {n: binding(source) for n, binding in rotated(family.bindings(config)).items()}
    OPENVINO.write(author(family, config, bound, plan.context), plan, fresh(folder), lambda _: nullcontext())
    return contents(folder)


def checkpoint(origin: Path, folder: Path) -> Source:
    """The source at `origin` with other weights: a file of float16, one of bfloat16."""
    found = Source.open(origin)
    names = sorted(found.tensors)
    seeded = SeededSource(found.config, 3)
    folder.mkdir()
    for file in origin.iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    tensors = {n: seeded.tensor(n, found.tensors[n].shape).astype(np.float16) for n in names}
    shards = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    half, brain = shards.values()
    save_file({n: tensors[n] for n in half}, folder / "model-1.safetensors")
    write_bf16(folder / "model-2.safetensors", {n: tensors[n].astype(np.float32) for n in brain})
    index = {"weight_map": {n: shard for shard, inside in shards.items() for n in inside}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return Source.open(folder)


def write_bf16(file: Path, tensors: Mapping[str, Any]) -> None:
    """numpy has no bf16, and so has the library none for it."""
    header: dict[str, Any] = {}
    data = b""
    for name, array in tensors.items():
        raw = (np.ascontiguousarray(array).view(np.uint32) >> 16).astype(np.uint16).tobytes()
        header[name] = {"dtype": "BF16", "shape": array.shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)


# encodings, against the libraries that define them


def rows() -> np.ndarray[Any, np.dtype[np.float32]]:
    """Rows of 384: ordinary ones, and such as have their own rule in a quantizer."""
    made = SeededSource({}, 7).tensor("rows", (64, 384)).copy()
    made[0] = 0
    made[1] = 3e-8  # scales below nncf's smallest
    made[2, :2] = made[2].max() + 1, -made[2].max() - 1  # as far below zero as above
    made[3] = np.abs(made[3])
    made[4] = -np.abs(made[4])
    made[5] *= 1000
    made[6] = np.float32(0.25) * np.arange(384, dtype=np.float32)  # halves between steps
    made[7] = 1e-12
    return made


def test_int8_is_nncfs() -> None:
    nncf = library.nncf()
    from nncf.quantization.algorithms.weight_compression.config import WeightCompressionConfig
    from nncf.quantization.algorithms.weight_compression.weight_lowering import do_integer_quantization
    from nncf.tensor import Tensor as NNCFTensor

    config = WeightCompressionConfig(mode=nncf.CompressWeightsMode.INT8_SYM)
    for repeats in (1, 40):  # it computes small matrices in numpy, large ones in OpenVINO
        matrix = np.concatenate([rows()] * repeats)
        expected = do_integer_quantization(NNCFTensor(matrix), config, reduction_axes=(1,))
        assert np.array_equal(encoded("nncf-int8", matrix), expected.tensor.data)
        scales = np.asarray(expected.scale.data, np.float32).astype(np.float16)
        assert np.array_equal(encoded("nncf-int8-scale", matrix), scales)


def test_int4_is_nncfs() -> None:
    nncf = library.nncf()
    from nncf.quantization.algorithms.weight_compression.config import WeightCompressionConfig
    from nncf.quantization.algorithms.weight_compression.weight_lowering import do_integer_quantization
    from nncf.tensor import Tensor as NNCFTensor

    config = WeightCompressionConfig(mode=nncf.CompressWeightsMode.INT4_SYM, group_size=BLOCK)
    for repeats in (1, 40):
        matrix = np.concatenate([divided(rows())[0]] * repeats)
        expected = do_integer_quantization(NNCFTensor(matrix), config, reduction_axes=(1,))
        levels = np.asarray(expected.tensor.data).reshape(matrix.shape)
        scales = np.asarray(expected.scale.data, np.float32).astype(np.float16)[..., 0]
        assert np.array_equal(encoded("nncf-int4", matrix), (levels[:, ::2] & 15 | levels[:, 1::2] << 4).view(np.uint8))
        assert np.array_equal(encoded("nncf-int4-scale", matrix), scales)
        assert np.array_equal(decoded(matrix, ["nncf-int4"]), matrix), "16 levels are found again"


@pytest.mark.parametrize("variant", tiny.VARIANTS)
def test_int4_divides_the_weights_that_a_converter_names(variant: str) -> None:
    family, fields = tiny.VARIANTS[variant]
    source = SeededSource({"model_type": family, "vocab_size": 300, **fields}, 1)
    bindings = bindings_of(source.config, {}, 64)
    more = bindings_of(source.config, OPENVINO.recipe("int4"), 64).keys() - bindings.keys()
    named = OPENVINO.offsets({name: binding(source).shape for name, binding in bindings.items()}, "int4")
    assert more == {name + SUFFIX for name in named}


def test_int8_is_ai_edge_quantizers() -> None:
    from ai_edge_quantizer import qtyping
    from ai_edge_quantizer.algorithms.uniform_quantize import uniform_quantize_tensor as theirs

    matrix = rows()
    low, high = matrix.min(1, keepdims=True), matrix.max(1, keepdims=True)
    zero, scale = theirs.tensor_zp_scale_from_min_max(low, high, 8, True, qtyping.QuantGranularity.CHANNELWISE)
    how = qtyping.UniformQuantParams(
        num_bits=8, quantized_dimension=0, scale=scale, zero_point=zero, symmetric=True, signed=True
    )
    assert np.array_equal(encoded("litert-int8", matrix), theirs.uniform_quantize(matrix, how))
    assert np.array_equal(encoded("litert-int8-scale", matrix), scale)


def test_int4_is_ai_edge_quantizers() -> None:
    """Of weights with offsets, of nearly equal ones, whose blocks have few levels, and of zeros."""
    from ai_edge_quantizer.algorithms.uniform_quantize import dequantized_weight_recovery as theirs
    from ai_edge_quantizer.algorithms.uniform_quantize.uniform_quantize_tensor import uniform_quantize
    from ai_edge_quantizer.qtyping import UniformQuantParams
    from ai_edge_quantizer.transformations.transformation_utils import pack_data
    from ml_dtypes import bfloat16

    near = 1 + rows() * np.float32(2e-6)
    few = np.float32(2.0**-18) * np.array([[-8, -5, -5, 3] * 96], np.float32)
    matrix = np.concatenate([*(divided(part)[0] for part in (rows(), near)), few, 0 * few])
    zero, scale = theirs.get_zp_scale_from_dequantized_symmetric_weights(matrix, 1, BLOCK)
    how = UniformQuantParams(
        num_bits=4, quantized_dimension=1, scale=scale, zero_point=zero, symmetric=True, block_size=BLOCK
    )
    levels = uniform_quantize(matrix, how, is_blockwise_quant=True)
    packed = pack_data(4, levels.ravel().view(np.uint8)).reshape(len(matrix), -1)
    assert np.array_equal(encoded("litert-int4", matrix), packed)
    stored = scale.astype(bfloat16).astype(np.float16)
    assert np.array_equal(encoded("litert-int4-scale", matrix), stored)
    values = levels.reshape(len(matrix), -1, BLOCK) * stored.astype(np.float32)[..., None]
    assert np.array_equal(decoded(matrix, ["litert-int4"]), values.reshape(matrix.shape))


def encoded(name: str, matrix: Any) -> Any:
    return ENCODINGS[name].form(matrix)[ENCODINGS[name].part]


def test_int8_is_coremltools() -> None:
    from coremltools.converters.mil.mil import types
    from coremltools.optimize._utils import compute_qparams_by_dtype as theirs

    half = rows().astype(np.float16)
    with np.errstate(all="ignore"):  # rows of zeros have a scale of zero
        expected, scale, _ = theirs(half, types.int8, "LINEAR_SYMMETRIC", [1, 0])
    assert np.array_equal(encoded("coreml-int8", rows()), expected)
    assert np.array_equal(encoded("coreml-int8-scale", rows()), scale)


def test_what_float16_cannot_hold() -> None:
    with pytest.raises(EncodingError, match=r"up to 7e\+04 are beyond float16"):
        encoded("f16", np.array([1.0, -7e4], np.float32))


def test_seeded_tensors_are_the_same_everywhere() -> None:
    """Their first numbers as splitmix64's reference implementation gives them, and no two streams alike."""
    key = int.from_bytes(hashlib.sha256(b"5/w").digest()[:8], "little")
    expected = []
    for i in range(1, 4):
        z = (key + i * 0x9E3779B97F4A7C15) % 2**64
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        expected.append(((z ^ (z >> 31)) >> 40) / 2**23 - 1)
    assert SeededSource({}, 5).tensor("w", (1, 3)).tolist() == [expected]
    vector = SeededSource({}, 5).tensor("w", (3,))
    assert vector.tolist() == [float(np.float32(1) + np.float32(e) * np.float32(0.75)) for e in expected]
    assert not np.array_equal(vector, SeededSource({}, 6).tensor("w", (3,)))
    assert not np.array_equal(vector, SeededSource({}, 5).tensor("v", (3,)))


def test_seeded_decays_and_biases_are_those_of_a_model() -> None:
    """A state that forgets at once, or experts that lie close, would make of a rounding another model."""
    source, shape = SeededSource({}, 5), (4096,)
    rates = np.exp(source.tensor("layers.0.linear_attn.A_log", shape))
    steps = np.log1p(np.exp(source.tensor("layers.0.linear_attn.dt_bias", shape)))
    assert (rates.min(), rates.max(), rates.mean()) == pytest.approx((1, 16, 8.5), rel=0.02)
    assert (steps.min(), steps.max(), np.median(steps)) == pytest.approx((0.001, 0.1, 0.01), rel=0.1)
    biases = np.sort(source.tensor("layers.2.feed_forward.expert_bias", (32,)))
    assert np.median(np.diff(biases)) > 1  # scores lie between 0 and 1


# what does not fit


@pytest.fixture(scope="module")
def graph(artifacts: TinyArtifacts, tmp_path_factory: pytest.TempPathFactory) -> StrippedGraph:
    folder = tmp_path_factory.mktemp("graph")
    return written(OPENVINO, config_of(artifacts, "llama"), PLAN, folder, 1, Label("tiny"))


def test_a_config_that_is_nearly_the_graphs(graph: StrippedGraph, tmp_path: Path) -> None:
    config = {**graph.header.config, "rms_norm_eps": 1e-6, "_name_or_path": "elsewhere"}
    with pytest.raises(
        RefitError, match=r"not of the config that tiny's graph is for: rms_norm_eps is 1e-06, not 1e-05$"
    ):
        refit(graph, SeededSource(config, 1), tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop("model.norm.weight"), "there is no tensor 'model.norm.weight'"),
        (lambda t: t.update({"model.norm.weight": np.ones(5, np.float32)}), r"has shape \(5,\)"),
        (lambda t: t["model.norm.weight"].__setitem__(3, np.nan), "not finite"),
        (lambda t: t.update({"lm_head.weight": -t["model.embed_tokens.weight"]}), "has no head of its own: build it"),
    ],
)
def test_tensors_that_do_not_fit(
    artifacts: TinyArtifacts, graph: StrippedGraph, tmp_path: Path, change: Any, said: str
) -> None:
    origin = artifacts.source("llama-f32")
    source = Source.open(origin)
    tensors = {n: source.tensor(n, t.shape).copy() for n, t in source.tensors.items()}
    change(tensors)
    copied = fresh(tmp_path / "source")
    for file in origin.iterdir():
        if file.suffix != ".safetensors":
            (copied / file.name).write_bytes(file.read_bytes())
    save_file(tensors, copied / "model.safetensors")
    with pytest.raises((SourceError, RefitError), match=said):
        refit(graph, Source.open(copied), fresh(tmp_path / "out"))


def test_weights_that_are_alike(tmp_path: Path) -> None:
    ones, source = given(lambda: np.ones(4, np.float32)), SeededSource({}, 1)
    (tmp_path / "f").write_bytes(np.ones(4, np.float32).tobytes())
    with pytest.raises(StripError, match="a and b have the same values in the graph"):
        strip(tmp_path, {"f": [(0, 16)]}, {"a": ones, "b": ones}, source, "nncf")
    (tmp_path / "f").write_bytes(bytes(16))
    with pytest.raises(StripError, match=r"does not hold a as it was given \(1 of 1 parameters\)"):
        strip(tmp_path, {"f": [(0, 16)]}, {"a": ones}, source, "nncf")


def test_weights_whose_scales_are_alike(tmp_path: Path) -> None:
    """Only an encoding that the graph has must tell two parameters apart: here it has their floats."""
    source = SeededSource({}, 1)
    a = np.linspace(-1, 1, 64, dtype=np.float32).reshape(2, 32)
    b = np.roll(a, 5, axis=1)  # with the same scales of rows
    (tmp_path / "f").write_bytes(a.tobytes() + b.tobytes())
    constants, both = {"f": [(0, a.nbytes), (a.nbytes, b.nbytes)]}, {"a": given(lambda: a), "b": given(lambda: b)}
    files, literals = strip(tmp_path, constants, both, source, "nncf")
    assert [(hole.parameter, hole.encoding) for hole in files[0].holes] == [("a", "f32"), ("b", "f32")]
    assert literals == (b"",)


def test_a_file_that_is_damaged(graph: StrippedGraph, tmp_path: Path) -> None:
    file = tmp_path / "g"
    graph.save(file)
    whole = file.read_bytes()
    for data, said in (
        (whole[:-1], "do not hash to what it says; get it again"),
        (whole[:200] + bytes([whole[200] ^ 1]) + whole[201:], "do not hash"),
        (whole.replace(b"graph 1\n", b"graph 2\n", 1), "has format 2, this ssmd reads 1; install a newer ssmd"),
        (b"PK", "is not a stripped graph"),
        (b"", "is not a stripped graph"),
        (bytes(17 << 20), "is larger than"),
    ):
        file.write_bytes(data)
        with pytest.raises(StrippedError, match=said):
            StrippedGraph.open(file)
    with pytest.raises(StrippedError, match="cannot be read"):
        StrippedGraph.open(tmp_path / "none")


def forged(graph: StrippedGraph, file: Path, change: Any, tail: bytes = b"") -> None:
    """A file that hashes to what it says, with another header."""
    header = json.loads(graph.header.model_dump_json())
    change(header)
    text = json.dumps(header).encode()
    content = len(text).to_bytes(8, "little") + text + b"".join(graph.literals) + tail
    packed = zstandard.ZstdCompressor().compress(content)
    file.write_bytes(b"ssmd stripped graph 1\n" + hashlib.sha256(packed).digest() + packed)


def holed(header: dict[str, Any]) -> dict[str, Any]:
    """The first of its files that has holes."""
    found: dict[str, Any] = next(file for file in header["files"] if file["holes"])
    return found


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda h: h["files"][0].update(name="../x"), "files.0.name"),
        (lambda h: h["files"][0].update(name="a/../x"), "files.0.name"),
        (lambda h: h["files"][0].update(name="/x"), "files.0.name"),
        (lambda h: h["files"][0].update(name=h["files"][1]["name"] + "/x"), "the name of another's folder"),
        (lambda h: h["files"][1].update(name=h["files"][0]["name"]), "two files have one name"),
        (lambda h: holed(h)["holes"][1].update(offset=0), "begins before"),
        (lambda h: holed(h)["holes"][0].update(offset=-4), "greater than or equal to 0"),
        (lambda h: holed(h)["holes"][-1].update(length=1 << 50), "holes reach to"),
        (lambda h: holed(h)["holes"][0].update(encoding="int3"), "no encoding is named 'int3'"),
        (lambda h: h["files"][0].update(size=h["files"][0]["size"] + 1), "its header describes"),
        (lambda h: h.update(more=1), "more"),
    ],
)
def test_a_header_that_lies(graph: StrippedGraph, tmp_path: Path, change: Any, said: str) -> None:
    forged(graph, tmp_path / "g", change)
    with pytest.raises(StrippedError, match=said):
        StrippedGraph.open(tmp_path / "g")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda hole: hole.update(parameter="layer9_nothing"), "needs 'layer9_nothing'"),
        (lambda hole: hole.update(encoding="f16"), "the graph has .* bytes for what takes .* as f16"),
        (lambda hole: hole.update(first=10**9), "the graph has .* bytes for what takes 0"),
    ],
)
def test_a_hole_that_lies(graph: StrippedGraph, tmp_path: Path, change: Any, said: str) -> None:
    forged(graph, tmp_path / "g", lambda h: change(holed(h)["holes"][0]))
    with pytest.raises(RefitError, match=said):
        refit(StrippedGraph.open(tmp_path / "g"), SeededSource(graph.header.config, 1), fresh(tmp_path / "out"))


def test_a_bomb(tmp_path: Path) -> None:
    packed = zstandard.ZstdCompressor().compress(bytes(300 << 20))
    (tmp_path / "g").write_bytes(b"ssmd stripped graph 1\n" + hashlib.sha256(packed).digest() + packed)
    with pytest.raises(StrippedError, match="is not whole"):
        StrippedGraph.open(tmp_path / "g")
