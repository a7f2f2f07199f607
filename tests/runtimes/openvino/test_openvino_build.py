"""Artifacts of `ssmd build --runtime openvino` and `--runtime npu`, and requests refused before a conversion."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tiny
from conftest import TinyArtifacts
from typer.testing import CliRunner

from ssmd.build import builder
from ssmd.build.builder import BuildError
from ssmd.cli import app
from ssmd.cli.making import BuildFailed, converter_of
from ssmd.model.artifact import Artifact
from ssmd.model.source import Source
from ssmd.runtime.verify import verify
from ssmd_litert.build import CONVERTER as LITERT
from ssmd_openvino import library
from ssmd_openvino.build import CONVERTER, MIN_WEIGHT_ELEMENTS, NPU_CONVERTER, SharedWeights, rewriting
from ssmd_openvino.runtime import OPEN, WEIGHTS, OpenVINORuntime


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Source:
    return Source.open(tiny.write_source(tmp_path_factory.mktemp("source") / "tiny", "llama"))


def weights(artifact: Artifact) -> list[tuple[str, tuple[int, ...]]]:
    """Element type and shape of every constant in the model that is large enough to be a weight, once each."""
    model = library.openvino().Core().read_model(artifact.file(f"{OPEN}.xml"), artifact.file(WEIGHTS))
    found = {}
    for op in model.get_ops():
        if op.get_type_name() == "Constant" and op.get_output_size() and op.get_byte_size() > 1024:
            found[op.get_friendly_name()] = (op.get_element_type().get_type_name(), tuple(op.get_output_shape(0)))
    return sorted(found.values())


def test_int8_is_for_weights_alone(artifacts: Mapping[str, Path]) -> None:
    artifact = Artifact.open(artifacts["openvino-granite-int8"])
    recipe = {"rotation": 64, "weights": "int8, symmetric, a scale for each output channel"}
    assert artifact.manifest.quantization_recipe == recipe
    found = weights(artifact)
    assert any(kind == "i8" for kind, _ in found)
    for kind, shape in found:
        count = math.prod(shape)
        if kind == "i8":
            assert len(shape) == 2
            assert count >= MIN_WEIGHT_ELEMENTS
        else:
            assert kind in ("f32", "f16")
            assert len(shape) != 2 or min(shape) == 1 or count < MIN_WEIGHT_ELEMENTS or 512 in shape  # RoPE's tables
    assert artifact.manifest.conversion == {}


def test_every_weight_stands_in_the_file_once(artifacts: TinyArtifacts) -> None:
    """Of float32: the file is as large as the parameters of the source, and some masks."""
    artifact = Artifact.open(artifacts["openvino-granite-f32"])
    source = Source.open(artifacts.source("openvino-granite-f32"))
    parameters = sum(4 * math.prod(tensor.shape) for tensor in source.tensors.values())
    assert parameters * 0.99 < artifact.file(WEIGHTS).stat().st_size < parameters * 1.06


@pytest.mark.parametrize("quantization", ["f32", "int8"])
def test_mamba_1_with_a_state_of_one(tmp_path: Path, quantization: Any) -> None:
    """Its loop leaves that dimension open, and shares constants with the graph around it."""
    source = Source.open(tiny.write_source(tmp_path / "tiny", "mamba-odd"))
    asked: dict[str, Any] = {"name": "tiny", "quantization": quantization, "buckets": (16,), "tiers": (256,)}
    artifact = builder.build(CONVERTER, source, tmp_path / "made", **asked)
    assert artifact.manifest.spec.recurrent[1].shape[-1] == 1
    program = OpenVINORuntime().load(artifact)
    assert verify(artifact, program).passed
    program.close()


def test_int4(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wide = {**tiny.LLAMA, "hidden_size": 128, "num_attention_heads": 8, "num_hidden_layers": 1}
    monkeypatch.setitem(tiny.VARIANTS, "wide", ("llama", wide))
    source = Source.open(tiny.write_source(tmp_path / "wide", "wide"))
    made = builder.build(
        CONVERTER, source, tmp_path / "made", name="t", quantization="int4", buckets=(16,), tiers=(64,)
    )
    kinds = {kind for kind, _ in weights(made)}
    assert {"i4", "i8"} <= kinds
    program = OpenVINORuntime().load(made)
    assert verify(made, program).passed
    program.close()


@pytest.mark.parametrize(
    ("converter", "asked", "said"),
    [
        (CONVERTER, {"buckets": (16, 128)}, "a prefill of runtime openvino takes 64 tokens at most"),
        (NPU_CONVERTER, {"quantization": "int4"}, r"openvino \(npu\) has no int4; it has: f16, int8"),
        (LITERT, {"quantization": "f16"}, r"litert \(cpu\) has no f16; it has: int8, int4, f32"),
    ],
)
def test_what_is_refused(llama: Source, tmp_path: Path, converter: Any, asked: dict[str, Any], said: str) -> None:
    with pytest.raises(BuildError, match=said):
        builder.build(converter, llama, tmp_path / "made", name="t", **{"buckets": (16,), "tiers": (64,), **asked})
    assert list(tmp_path.iterdir()) == []


def test_rows_that_blocks_do_not_fit_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = {**tiny.LLAMA, "hidden_size": 80, "num_attention_heads": 5, "num_key_value_heads": 1, "num_hidden_layers": 1}
    monkeypatch.setitem(tiny.VARIANTS, "odd", ("llama", odd))
    source = Source.open(tiny.write_source(tmp_path / "odd", "odd"))
    with pytest.raises(BuildError, match="layer0_q has rows that are no multiple of 32 values"):
        builder.build(CONVERTER, source, tmp_path / "made", name="t", quantization="int4", buckets=(16,), tiers=(64,))
    assert [file.name for file in tmp_path.iterdir()] == ["odd"]


def test_weights_are_rotated_where_activations_are_rounded() -> None:
    assert [q for q in ("int8", "int4", "f16", "f32") if CONVERTER.rotates(q)] == ["int8"]
    assert [q for q in ("int8", "f16") if NPU_CONVERTER.rotates(q)] == []


def test_a_name_of_a_runtime_is_a_converter() -> None:
    assert converter_of("openvino") is CONVERTER
    assert converter_of("npu") is NPU_CONVERTER
    assert (CONVERTER.quantizations[0], NPU_CONVERTER.quantizations[0]) == ("int8", "f16")
    with pytest.raises(BuildFailed, match="no runtime is named 'tpu'"):
        converter_of("tpu")


def test_rewritten_graphs_say_so(tmp_path: Path) -> None:
    source = Source.open(tiny.write_source(tmp_path / "source", "mamba2-groups"))
    asked: dict[str, Any] = {"name": "t", "buckets": (16,), "tiers": (64,)}
    made = builder.build(rewriting("npu", "cumba,reduba,actiba=32"), source, tmp_path / "made", **asked)
    xamba, operations = (made.manifest.conversion[k] for k in ("xamba", "operations"))
    assert xamba["passes"] == {"cumba": True, "reduba": True, "actiba": 32}
    for name in ("decode", "prefill_16"):
        assert {"CumSum", "ReduceSum", "Swish", "SoftPlus"}.isdisjoint(operations[name])
        assert xamba[name]["reduba"]["replaced"]["reduba"] == xamba[name]["reduba"]["before"]["ReduceSum"] > 0
        assert xamba[name]["reduba"]["logits_error"] < 1e-4  # the worst logit, in standard deviations; sums only
        assert xamba[name]["actiba"]["before"]["Swish"] == 6
        assert 1e-4 < xamba[name]["actiba"]["logits_error"] < 0.2
    program = OpenVINORuntime().load(made, device="cpu")
    off = verify(made, program).worst.rms_relative
    program.close()
    assert 1e-3 < off < 0.1


def test_a_pass_that_replaces_nothing_says_so(tmp_path: Path) -> None:
    """And an artifact with piecewise linear functions is judged with the allowance of its segments."""
    source = tiny.write_source(tmp_path / "source", "mamba2-groups")
    asked = ["--runtime", "openvino", "--quant", "f32", "--buckets", "16", "--context", "64"]
    command = ["build", str(source), *asked, "--models-dir", str(tmp_path / "models"), "--name", "tiny"]
    done = CliRunner().invoke(app, [*command, "--xamba", "cumba,reduba,actiba=32"])
    assert done.exit_code == 0, done.output
    said = [line for line in done.output.splitlines() if "nothing to replace" in line]
    assert said == [
        f"{kind}: nothing to replace: no {sought} is in the graph (docs/notes/xamba.md)"
        for kind, sought in (("cumba", "CumSum"), ("reduba", "ReduceSum"))
    ]
    made = Artifact.open(tmp_path / "models" / "tiny" / "openvino-cpu-f32")
    program = OpenVINORuntime().load(made)
    report = verify(made, program)
    program.close()
    assert report.passed
    assert 1e-3 < report.worst.rms_relative < report.tolerance < 0.05


def test_rewrites_are_openvinos() -> None:
    with pytest.raises(BuildFailed, match="add --runtime openvino or npu"):
        converter_of("litert", "xamba", "cumba")
    with pytest.raises(BuildFailed, match=r"xamba: .*there is no pass 'sumba'; write cumba, reduba and actiba=N"):
        converter_of("npu", "xamba", "sumba")


def test_constants_of_several_models_are_kept_once(tmp_path: Path) -> None:
    """Two hand-made IRs: what they share stands once, and each still reads its own values."""
    big, small = bytes(range(256)) * 4, b"\xff\x07\xff"
    for name, parts in (("a", (big, small)), ("b", (small, big, b"only here"))):
        text, data = "", b""
        for part in parts:
            text += f'<data offset="{len(data)}" size="{len(part)}" />'
            data += part
        (tmp_path / f"{name}.xml").write_text(f"<net>{text}</net>")
        (tmp_path / f"{name}.bin").write_bytes(data)
    with SharedWeights(tmp_path / WEIGHTS) as shared:
        for name in ("a", "b"):
            shared.take(tmp_path / f"{name}.xml", {})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.xml", "b.xml", WEIGHTS]
    content = (tmp_path / WEIGHTS).read_bytes()
    assert content.count(big) == content.count(small) == 1
    assert (tmp_path / "b.xml").read_text() == (
        '<net><data offset="1024" size="3" /><data offset="0" size="1024" /><data offset="1088" size="9" /></net>'
    )
    assert content[1088:1097] == b"only here"
