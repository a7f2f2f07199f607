"""Mixtures of experts on OpenVINO: only chosen experts are computed, equal ones in order, and routers stay float32."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from typer.testing import CliRunner

from ssmd.authoring import ops
from ssmd.authoring.host import Host
from ssmd.authoring.model import author
from ssmd.build import builder
from ssmd.build.builder import BuildError
from ssmd.cli import app
from ssmd.cli.making import converter_of
from ssmd.families.fields import FamilyError
from ssmd.families.registry import family_of
from ssmd.model.artifact import Artifact
from ssmd.model.source import Source
from ssmd.runtime.verify import verify
from ssmd_openvino import compile as compiling
from ssmd_openvino import library
from ssmd_openvino.build import CONVERTER, rewriting
from ssmd_openvino.compile import chosen_products, compile_model
from ssmd_openvino.convert import converted, converted_lanes
from ssmd_openvino.runtime import LANES, ON_CPU, OPEN, WEIGHTS, WITH_LANES, OpenVINORuntime

ASKED: dict[str, Any] = {"name": "t", "buckets": (16,), "tiers": (64,)}
LAYERS = 3  # with experts, of lfm2-moe's four


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    return Source.open(tiny.write_source(tmp_path_factory.mktemp("source") / "tiny", "lfm2-moe"))


def module_of(source: Source) -> Any:
    family = family_of(source.config)
    config = family.parse(source.config)
    return author(family, config, {n: b(source) for n, b in family.bindings(config).items()}, 64)


def compiled(model: Any) -> Any:
    return compile_model(library.openvino().Core(), model, "CPU", {**ON_CPU, **WITH_LANES, "INFERENCE_NUM_THREADS": 1})


def logits_of(model: Any, module: Any, tokens: list[int]) -> np.ndarray[Any, Any]:
    """Logits (V,) of an open model after tokens that it is given in one call, from an empty state."""
    request, openvino = compiled(model).create_infer_request(), library.openvino()
    states = Host(module).states
    given = {"tokens": np.array([tokens], np.int32), "pos": np.zeros(1, np.int32)}
    given |= {"n_valid": np.full(1, len(tokens), np.int32), **{name: s.numpy() for name, s in states.items()}}
    for i, port in enumerate(model.inputs):
        request.set_input_tensor(i, openvino.Tensor(given[next(n for n in given if n in port.names)]))
    request.infer()
    row: np.ndarray[Any, Any] = request.get_output_tensor(0).data[0].copy()
    return row


@pytest.fixture
def tied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module of 64 experts, of which each has the score of another one: five are chosen, so that a pair is parted."""
    fields = tiny.LFM2_MOE | {"num_experts": 64, "num_experts_per_tok": 5, "num_hidden_layers": 2}
    fields |= {"layer_types": ["conv", "full_attention"], "num_dense_layers": 0, "moe_intermediate_size": 16}
    monkeypatch.setitem(tiny.VARIANTS, "tied", ("lfm2_moe", fields))
    module = module_of(Source.open(tiny.write_source(tmp_path / "tied", "tied")))
    with torch.no_grad():
        for name, p in module.named_parameters():
            if name.endswith("router"):
                p[32:] = p[:32].clone()
            elif name.endswith("router_bias"):
                p.zero_()
    return module


def test_equal_experts_are_taken_in_order(tied: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the module and by the plugin, for one token and for several. In another order the logits are others."""
    ids = np.random.default_rng(2).integers(0, tied.plan.vocabulary, 37).tolist()
    model = converted(tied, 64)
    assert chosen_products(compiled(model.clone())) == 3 * 2
    tied.open = False
    for count in (1, 5, 37):
        expected = Host(tied).feed(ids[:count], count)
        found = logits_of(model, tied, ids[:count])
        assert np.abs(found - expected).max() <= 2e-5 * np.abs(expected).max()

    def last(scores: Any, count: int) -> Any:
        values, places = torch.sort(scores.flip(-1), dim=-1, descending=True, stable=True)
        return values[..., :count], scores.shape[-1] - 1 - places[..., :count]

    monkeypatch.setattr(ops, "best", last)
    assert np.abs(Host(tied).feed(ids, 37) - expected).max() > 1e-3 * np.abs(expected).max()


@pytest.mark.parametrize("lanes", LANES)
def test_lanes_compute_chosen_experts_only(source: Source, lanes: int) -> None:
    assert chosen_products(compiled(converted_lanes(module_of(source), lanes))) == 3 * LAYERS


def test_a_form_that_the_plugin_misses_is_refused(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def all_of_them(x: Any, shares: Any, gate: Any, up: Any, down: Any) -> Any:
        inner = ops.silu(torch.einsum("th,ejh->etj", x, gate)) * torch.einsum("th,ejh->etj", x, up)
        return torch.einsum("te,etj,ehj->th", shares, inner, down).unsqueeze(0)

    monkeypatch.setattr(ops, "experts", all_of_them)
    with pytest.raises(BuildError, match=r"compute all experts for each token: its model has 0 .* 9 are needed, 3 for"):
        builder.build(CONVERTER, source, tmp_path / "made", quantization="f32", **ASKED)
    assert not (tmp_path / "made").exists()


def test_rewrites_that_hide_experts_are_refused(source: Source, tmp_path: Path) -> None:
    """ActiBA takes the experts' SiLU, by which the plugin knows them."""
    with pytest.raises(BuildError, match="would compute all experts for each token"):
        builder.build(rewriting("openvino", "actiba=16"), source, tmp_path / "made", quantization="f32", **ASKED)


def kinds(artifact: Artifact) -> dict[str, set[str]]:
    """Element types of the constants that are a router's and an expert's weights, by their shape."""
    model = library.openvino().Core().read_model(artifact.file(f"{OPEN}.xml"), artifact.file(WEIGHTS))
    found: dict[str, set[str]] = {"router": set(), "experts": set()}
    for op in model.get_ops():
        if op.get_type_name() == "Constant" and op.get_output_size():
            shape = list(op.get_output_shape(0))
            kind = op.get_element_type().get_type_name()
            if shape == [72, 64]:
                found["router"].add(kind)
            elif len(shape) >= 3 and shape[0] == 72 and np.prod(shape) == 72 * 64 * 32:
                found["experts"].add(kind)
    return found


@pytest.mark.parametrize(("quantization", "stored"), [("int8", "i8"), ("int4", "u4")])
def test_routers_stay_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quantization: Any, stored: str) -> None:
    """One of 72 experts is large enough to be quantized. The products of chosen experts read quantized weights."""
    fields = tiny.LFM2_MOE | {"num_experts": 72, "moe_intermediate_size": 32, "num_hidden_layers": 2}
    fields |= {"layer_types": ["conv", "full_attention"]}
    monkeypatch.setitem(tiny.VARIANTS, "many", ("lfm2_moe", fields))
    many = Source.open(tiny.write_source(tmp_path / "many", "many"))
    made = builder.build(CONVERTER, many, tmp_path / "made", quantization=quantization, **ASKED)
    assert kinds(made) == {"router": {"f32"}, "experts": {stored}}
    assert made.manifest.conversion == {"experts": {"products": 3}}
    program = OpenVINORuntime().load(made)
    assert verify(made, program).passed
    program.close()


def test_int4_needs_whole_blocks_of_experts(tmp_path: Path, source: Source) -> None:
    with pytest.raises(BuildError, match="layer1_experts_down has rows that are no multiple of 32 values"):
        builder.build(CONVERTER, source, tmp_path / "made", quantization="int4", **ASKED)


def test_a_load_that_computes_all_experts_warns(
    artifacts: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """As a later OpenVINO might, that does not know the form any more."""
    artifact = Artifact.open(artifacts["openvino-lfm2-moe-f32"])
    assert artifact.manifest.conversion == {"experts": {"products": 3 * LAYERS}}
    with caplog.at_level(logging.WARNING, "ssmd_openvino.runtime"):
        OpenVINORuntime().load(artifact).close()
        assert not caplog.records
        monkeypatch.setattr(compiling, "_CHOSEN", "Unknown")
        OpenVINORuntime().load(artifact).close()
    [record] = caplog.records
    assert "computes all experts of lfm2-moe for each token: it has 0 products of chosen experts, not 9" in (
        record.getMessage()
    )


@pytest.mark.parametrize("told", [7, [], "x", {"products": "9"}, {"products": None}, {}])
def test_a_strange_count_in_a_manifest_is_ignored(
    artifacts: Mapping[str, Path], tmp_path: Path, told: Any, caplog: pytest.LogCaptureFixture
) -> None:
    from mutants import reseal

    folder = shutil.copytree(artifacts["openvino-lfm2-moe-f32"], tmp_path / "other")
    reseal(folder, lambda whole: whole.update(conversion={"experts": told}))
    with caplog.at_level(logging.WARNING, "ssmd_openvino.runtime"):
        OpenVINORuntime().load(Artifact.open(folder)).close()
    assert not caplog.records


@pytest.mark.parametrize("variant", ["lfm2-moe", "granite-moe"])
@pytest.mark.parametrize("runtime", ["litert", "npu", "coreml"])
def test_other_runtimes_refuse_experts_by_name(runtime: str, variant: str, tmp_path: Path) -> None:
    opened = Source.open(tiny.write_source(tmp_path / "tiny", variant))
    said = rf"the model has experts, in \d of 4 layers, and runtime {runtime} does not serve them; take --runtime open"
    converter: Any = converter_of(runtime)
    with pytest.raises(FamilyError, match=said):
        builder.build(converter, opened, tmp_path / "made", **ASKED)
    assert not (tmp_path / "made").exists()
    done = CliRunner().invoke(
        app, ["build", str(opened.path), "--runtime", runtime, "--models-dir", str(tmp_path / "models")]
    )
    assert done.exit_code != 0
    assert "does not serve them; take --runtime openvino or wgpu" in str(done.exception) + done.output
