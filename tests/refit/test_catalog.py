"""Stripped graphs at work: golden values catch a wrong one, a refitted artifact is the build of `ssmd build`."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from conftest import ONE_EACH, ROOT, TinyArtifacts
from evaluated import play, runtime_of
from oracle import continued
from refitting import CONVERTERS, stripped
from safetensors.numpy import load_file, save_file
from test_server import environment
from typer.testing import CliRunner

from ssmd.build.builder import TIERS, Target
from ssmd.build.stripping import Label, make
from ssmd.cli import app
from ssmd.families import weights
from ssmd.families.registry import family_of
from ssmd.model.artifact import GOLDEN, Artifact, ArtifactError
from ssmd.model.defaults import FILE, Default, defaults_of
from ssmd.model.made import is_made_here
from ssmd.model.random_source import SeededSource
from ssmd.model.source import Source, SourceError
from ssmd.refit import catalog
from ssmd.refit.catalog import GraphError, choose_graph, install, origin_of, shipped, verified
from ssmd.refit.graphfile import StrippedGraph
from ssmd.refit.refit import RefitError, bindings_of, bounded, differences, refit, write_literal
from ssmd.runtime.protocol import ProgramError, RuntimeUnavailable, get_runtime
from ssmd.runtime.trial import judge
from ssmd.runtime.verify import replay, verify

NAMES = ("openvino-granite-int8", "granite-int8", "openvino-llama-f32", "llama-f32", "npu-granite-f16")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSMD_CACHE_DIR", str(tmp_path / "cache"))


# golden values


@pytest.fixture(scope="module", params=["f32", pytest.param("int8", marks=pytest.mark.full)])  # as refit/test_refit.py
def graph(request: pytest.FixtureRequest, artifacts: TinyArtifacts, tmp_path_factory: Any) -> StrippedGraph:
    source = Source.open(artifacts.source("granite-f32"))
    plan = Target(request.param, (16, 64), (256,))
    scratch = tmp_path_factory.mktemp("scratch")

    def stage(what: str) -> AbstractContextManager[None]:
        return nullcontext()

    return make(CONVERTERS["openvino"], source.config, plan, scratch, label=Label("tiny"), stage=stage)


def test_a_graph_computes_what_pytorch_does(graph: StrippedGraph, tmp_path: Path) -> None:
    steps = verified(graph, tmp_path / "run")
    assert len(steps) == len(graph.header.golden.positions)
    assert all(step.rms_relative <= allowed for step, allowed in steps)
    if graph.header.quantization == "f32":
        assert max(step.rms_relative for step, _ in steps) < 1e-5


def test_two_tensors_of_one_shape_that_change_places_are_seen(graph: StrippedGraph, tmp_path: Path) -> None:
    """Of every kind of parameter, those of two layers; the refit itself has no way to see it. In int8 D, eight numbers
    a layer, can be lost among the roundings of a processor."""
    names = {h.parameter for f in graph.header.files for h in f.holes}
    kinds = {re.sub(r"^layer\d+_", "", n) for n in names if n.startswith("layer")}
    assert {"in", "out", "A", "dt_bias", "gate_up", "down", "conv"} <= kinds
    assert ("norm1" in kinds) == (graph.header.quantization == "f32")  # those of a rotated model are in what reads them
    unseen = []
    for kind in sorted(kinds):
        found = sorted(n for n in names if re.fullmatch(rf"layer\d+_{kind}", n))
        if len(found) > 1:
            wrong = swapped(graph, found[0], found[1])
            steps = verified(wrong, tmp_path / kind)
            if not any(step.rms_relative > allowed for step, allowed in steps):
                unseen.append(kind)
    assert set(unseen) <= (set() if graph.header.quantization == "f32" else {"D"})


def swapped(graph: StrippedGraph, one: str, other: str) -> StrippedGraph:
    def placed(file: Any) -> Any:
        to = {one: other, other: one}
        holes = (h.model_copy(update={"parameter": to.get(h.parameter, h.parameter)}) for h in file.holes)
        return file.model_copy(update={"holes": tuple(holes)})

    header = graph.header.model_copy(update={"files": tuple(map(placed, graph.header.files))})
    return StrippedGraph(header, graph.literals)


def test_the_command(graph: StrippedGraph, tmp_path: Path) -> None:
    good, bad = tmp_path / "good.graph", tmp_path / "bad.graph"
    graph.save(good)
    swapped(graph, "layer0_conv", "layer1_conv").save(bad)
    done = CliRunner().invoke(app, ["graph", "verify", str(good)])
    assert (done.exit_code, done.output.splitlines()[1].split()[-1]) == (0, "passed")
    done = CliRunner().invoke(app, ["graph", "verify", str(good), str(bad)])
    assert done.exit_code == 1
    assert "FAILED at position" in done.output
    assert "do not use it" in done.output


# artifacts


@pytest.mark.parametrize("name", NAMES)
def test_it_is_the_build_that_a_build_makes(artifacts: TinyArtifacts, name: str, tmp_path: Path) -> None:
    built, source = Artifact.open(artifacts[name]), Source.open(artifacts.source(name))
    made = install(stripped(built, source), source, tmp_path / "made", name=built.manifest.name)
    assert made.manifest.build == built.manifest.build
    for file in built.manifest.files:
        if file != GOLDEN:
            assert made.file(file).read_bytes() == built.file(file).read_bytes()
    assert (made.manifest.golden, built.manifest.golden) == ("itself", "reference")
    program = get_runtime(made.manifest.runtime).load(made, device="cpu")
    try:
        assert max(step.rms_relative for step in verify(made, program).steps) == 0  # it is what it was
        assert verify(built, program).passed  # and what the reference is
    finally:
        program.close()
    assert sorted(p.name for p in tmp_path.iterdir() if p.name != "cache") == ["made"]


def test_what_does_not_fit_leaves_what_was_there(artifacts: TinyArtifacts, tmp_path: Path) -> None:
    built = Artifact.open(artifacts["openvino-llama-f32"])
    source = Source.open(artifacts.source("llama-f32"))
    graph, out = stripped(built, source), tmp_path / "models" / "made"
    install(graph, source, out, name="x")
    before = (out / "artifact.json").read_bytes()
    copied = altered(source, tmp_path / "nan", lambda t: t["model.layers.1.mlp.down_proj.weight"].fill(np.nan))
    with pytest.raises(SourceError, match="not finite"):
        install(graph, copied, out, name="x")
    huge = altered(source, tmp_path / "huge", lambda t: t["model.norm.weight"].fill(3e38))
    with pytest.raises(ProgramError, match="its logits are not finite numbers: the weights are damaged"):
        install(graph, huge, out, name="x")
    assert (out / "artifact.json").read_bytes() == before
    assert [p.name for p in out.parent.iterdir()] == ["made"]


def altered(source: Source, folder: Path, change: Callable[[dict[str, Any]], object]) -> Source:
    folder.mkdir()
    for file in source.path.iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    tensors = {n: np.array(source.tensor(n, t.shape)) for n, t in source.tensors.items()}
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return Source.open(folder)


def test_tensors_too_many(artifacts: TinyArtifacts, tmp_path: Path) -> None:
    """But what checkpoints carry and no model reads."""
    source = Source.open(artifacts.source("llama-f32"))
    graph = stripped(Artifact.open(artifacts["openvino-llama-f32"]), source)
    idle = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
    (tmp_path / "out").mkdir()
    refit(graph, altered(source, tmp_path / "idle", lambda t: t.update(idle)), tmp_path / "out")
    more = altered(source, tmp_path / "more", lambda t: t.update({"model.layers.9.mlp.up_proj.weight": np.ones(4)}))
    with pytest.raises(
        RefitError, match=r"has the tensor 'model\.layers\.9\.mlp\.up_proj\.weight', which its config.json does not use"
    ):
        refit(graph, more, tmp_path)


@pytest.mark.parametrize("tokens", [256, 1024])
def test_a_graph_that_lies_about_its_tables_is_refused(artifacts: TinyArtifacts, tokens: int, tmp_path: Path) -> None:
    source = Source.open(artifacts.source("llama-f32"))
    graph = stripped(Artifact.open(artifacts["llama-f32"]), source)
    assert graph.header.tiers[-1] == 512
    lying = StrippedGraph(graph.header.model_copy(update={"tiers": (128, tokens)}), graph.literals)
    with pytest.raises(RefitError, match=rf"graph is for {tokens} tokens, and rope_\w+ in model.tflite has 512 rows"):
        install(lying, source, tmp_path / "made", name="x")
    assert not (tmp_path / "made").exists()


def test_values_that_float16_cannot_hold(artifacts: TinyArtifacts, tmp_path: Path) -> None:
    source = Source.open(artifacts.source("llama-f32"))
    built = Artifact.open(artifacts["openvino-llama-f32"])
    header = json.loads(stripped(built, source).header.model_dump_json())
    [weights_file] = [f for f in header["files"] if f["holes"]]
    [hole] = [h for h in weights_file["holes"] if h["parameter"] == "layer1_down"]
    hole |= {"encoding": "f16", "length": hole["length"] // 2}
    weights_file["size"] -= hole["length"]
    for later in weights_file["holes"]:
        if later["offset"] > hole["offset"]:
            later["offset"] -= hole["length"]
    graph = StrippedGraph(type(stripped(built, source).header).model_validate(header), stripped(built, source).literals)
    wide = altered(source, tmp_path / "wide", lambda t: t["model.layers.1.mlp.down_proj.weight"].fill(7e4))
    with pytest.raises(RefitError, match=r"layer1_down: values up to 7e\+04 are beyond float16"):
        refit(graph, wide, tmp_path)


def test_what_a_killed_one_left_goes_a_day_later(artifacts: TinyArtifacts, tmp_path: Path) -> None:
    source = Source.open(artifacts.source("llama-f32"))
    graph, out = stripped(Artifact.open(artifacts["openvino-llama-f32"]), source), tmp_path / "models" / "made"
    left, running = out.parent / ".made-left", out.parent / ".made-running"
    for folder in (left, running):
        (folder / "artifact").mkdir(parents=True)
    os.utime(left, (0, 0))
    install(graph, source, out, name="x")
    assert sorted(p.name for p in out.parent.iterdir()) == [".made-running", "made"]


# rows


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("variant", ONE_EACH)
def test_rows_block_by_block_are_the_whole(
    artifacts: TinyArtifacts, variant: str, rotated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "BLOCK_ELEMENTS", 300)
    source = Source.open(artifacts.source(f"{variant}-f32"))
    several = 0
    for binding in bindings_of(source.config, {"rotation": 64} if rotated else {}, 64).values():
        blocks = list(binding.blocks(source))
        assert np.array_equal(np.concatenate(blocks), binding(source))
        several += len(blocks) > 1
    assert several > 3


def test_the_bindings_say_what_they_read(artifacts: TinyArtifacts) -> None:
    for variant in ONE_EACH:
        source = Source.open(artifacts.source(f"{variant}-f32"))
        reads: dict[str, Any] = {}
        for binding in bindings_of(source.config, {"rotation": 64}, 64).values():
            reads |= binding.reads
        assert reads == {n: t.shape for n, t in source.tensors.items()}


# which graph


def header_of(config: Mapping[str, Any], context: int = 256) -> Any:
    class Header:
        family = config["model_type"]
        name, runtime, device_class = "a", "litert", "cpu"
        buckets, tiers = (16, 64), (128, 192, context)
        files: tuple[Any, ...] = ()  # so no table of RoPE is a hole

    made: Any = Header()
    made.config = config
    return made


def test_what_keeps_a_config_from_fitting() -> None:
    config = json.loads((ROOT / "scripts/models/smollm2.json").read_text())["config"]
    header = header_of(config)
    assert differences(header, config) == {}
    rope = {k: v for k, v in config.items() if k not in ("rope_theta", "rope_scaling")}
    newer = {**rope, "rope_parameters": {"rope_theta": 100000.0, "rope_type": "default"}}
    assert differences(header, {**newer, "initializer_range": 0.5, "architectures": [], "head_dim": 64}) == {}
    for enough in (64, 4096):
        assert differences(header, {**config, "max_position_embeddings": enough}) == {}
    assert differences(header, {**config, "rms_norm_eps": 1e-5 * (1 + 1e-12)}) == {}
    changes: dict[str, object] = {"rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 63}
    changes |= {"num_hidden_layers": 31, "tie_word_embeddings": False, "model_type": "qwen3", "hidden_act": "gelu"}
    for field, value in changes.items():
        if field == "hidden_act":
            continue  # of no family at all
        assert differences(header, {**config, field: value, "pad_token_id": 7}) == {field: (value, config[field])}
    without = {k: v for k, v in config.items() if k != "num_key_value_heads"}
    assert differences(header, without) == {"num_key_value_heads": (None, 3)}


def test_a_field_that_another_forbids_is_not_named() -> None:
    """RoPE in the older spelling beside the newer one is refused, but here it is not what keeps the config out."""
    header = StrippedGraph.open(catalog.SHIPPED / catalog.file_name("qwen3.5-0.8b", "litert", "cpu", "int8")).header
    text = header.config["text_config"] | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_theta": 1e7}
    text |= {"rope_parameters": None}
    assert differences(header, {**header.config, "text_config": text}) == {}
    text |= {"intermediate_size": 1024}
    assert differences(header, {**header.config, "text_config": text}).keys() == {"intermediate_size"}


@pytest.mark.parametrize("runtime", ["", "openvino-"])
def test_rope_of_another_base_takes_the_same_graph(artifacts: TinyArtifacts, runtime: str, tmp_path: Path) -> None:
    """And gives transformers' logits of the config with that base, which are far from those of the graph's own."""
    built, usual = artifacts[f"{runtime}lfm2-f32"], artifacts.source("lfm2-f32")
    config = json.loads((usual / "config.json").read_text())
    shutil.copytree(usual, tmp_path / "other")
    (tmp_path / "other" / "config.json").write_text(json.dumps(config | {"rope_parameters": {"rope_theta": 37.0}}))
    source = Source.open(tmp_path / "other")
    graph = stripped(Artifact.open(built), Source.open(usual))
    made = install(graph, source, tmp_path / "made", name="other")
    ids = [n * 7 % 384 for n in range(40)]
    program = get_runtime(made.manifest.runtime).load(made, device="cpu")
    try:
        *_, (_, mine) = replay(program, ids, [len(ids) - 1])
    finally:
        program.close()
    theirs, plain = (
        continued(transformers.AutoModelForCausalLM.from_pretrained(p, dtype=torch.float32).eval(), ids)[0][-1]
        for p in (source.path, usual)
    )
    assert np.abs(mine - theirs).max() <= 2e-5 * np.abs(theirs).max()
    assert np.abs(plain - theirs).max() > 1e-2 * np.abs(theirs).max()


@pytest.mark.parametrize(
    ("tiers", "most", "asked", "expected"),
    [
        ((128, 192, 256), 8192, None, (128, 192, 256)),
        ((128, 192, 256), 8192, 256, (128, 192, 256)),
        ((128, 192, 256), 8192, 130, (128, 130)),
        ((128, 192, 256), 8192, 64, (64,)),
        ((128, 192, 256), 200, None, (128, 192, 200)),
        ((128, 192, 256), 200, 201, "a for litert holds 200 tokens at most, not 201: config.json says so"),
        ((128, 192, 256), 8192, 257, "holds 256 tokens at most, not 257: `ssmd build --context` makes more"),
        ((128, 192, 256), 8192, 63, "a context of 63 tokens is too short for a for litert: 64 or more"),
        ((256,), 8192, None, (256,)),
        ((256,), 8192, 255, "a context of 255 tokens is too short for a for litert: 256 or more"),
    ],
)
def test_the_tiers_of_an_artifact_end_where_asked(
    tiers: tuple[int, ...], most: int, asked: int | None, expected: tuple[int, ...] | str
) -> None:
    """At the model's own end at the latest. A graph of one capacity has that one."""
    config = json.loads((ROOT / "scripts/models/smollm2.json").read_text())["config"]
    header = header_of(config)
    header.tiers = tiers
    given = header, {**config, "max_position_embeddings": most}, asked
    if isinstance(expected, tuple):
        assert bounded(*given) == expected
        return
    with pytest.raises(RefitError, match=re.escape(expected)):
        bounded(*given)


def test_fixed_capacities_are_all_there_are() -> None:
    config = json.loads((ROOT / "scripts/models/smollm2.json").read_text())["config"]
    header = header_of(config)
    header.device_class = "npu"
    assert bounded(header, {**config, "max_position_embeddings": 200}) == (128, 192)
    assert bounded(header, config, 192) == (128, 192)
    with pytest.raises(RefitError, match=r"have a fixed size: --context 200 is not possible, only 128, 192, 256$"):
        bounded(header, config, 200)


def test_the_numbers_of_a_mixer_count_as_float32_too() -> None:
    config = json.loads((ROOT / "scripts/models/mamba2-130m.json").read_text())["config"]
    eps = config["layer_norm_epsilon"]
    assert differences(header_of(config), {**config, "layer_norm_epsilon": eps * (1 + 1e-12)}) == {}
    assert set(differences(header_of(config), {**config, "layer_norm_epsilon": 2 * eps})) == {"layer_norm_epsilon"}


@pytest.fixture(scope="module")
def stripped_ones(artifacts: TinyArtifacts, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Graphs of a tiny model for three runtimes and an NPU."""
    folder = tmp_path_factory.mktemp("graphs")
    for name in ("openvino-granite-int8", "granite-int8", "npu-granite-f16", "coreml-granite-int8"):
        built, source = Artifact.open(artifacts[name]), Source.open(artifacts.source(name))
        graph = stripped(built, source, "tiny-granite")
        m = graph.header
        graph.save(folder / catalog.file_name(m.name, m.runtime, m.device_class, m.quantization))
    return folder


@pytest.fixture
def shelf(stripped_ones: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The graphs that are shipped are those."""
    monkeypatch.setattr(catalog, "SHIPPED", stripped_ones)
    return stripped_ones


def test_the_first_usable_runtime_is_taken(
    artifacts: TinyArtifacts, shelf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Source.open(artifacts.source("granite-int8")).config
    assert origin_of("tiny-granite") == "acme/tiny-granite"
    for runtimes, taken in ((["litert", "openvino"], "litert"), (["openvino"], "openvino")):
        graph, why_not = choose_graph(config, runtimes)
        assert (graph and graph.header.runtime, why_not) == (taken, "")
    classes = {"npu": ("openvino", "npu"), "openvino": ("openvino", "cpu"), "coreml": ("coreml", "gpu")}
    for runtime, made_for in classes.items():
        graph, _ = choose_graph(config, [runtime])
        assert (graph and (graph.header.runtime, graph.header.device_class)) == made_for
        assert catalog.names(runtime) == ["tiny-granite"]
    assert choose_graph({**config, "rms_norm_eps": 0.5}, ["npu"])[1].startswith(
        "ssmd has no stripped graph of this config for runtime npu; it is nearly tiny-granite, but "
    )
    graph, why_not = choose_graph({**config, "rms_norm_eps": 0.5}, ["openvino"])
    assert graph is None
    assert why_not == (
        "ssmd has no stripped graph of this config for runtime openvino; it is nearly tiny-granite, but rms_norm_eps "
        f"is 0.5, not {config['rms_norm_eps']}"
    )
    llama = Source.open(artifacts.source("llama-f32")).config
    assert choose_graph(llama, ["litert"]) == (None, "ssmd has no stripped graph of this config for runtime litert")

    def without_litert(name: str) -> Any:
        if name == "litert":
            raise RuntimeUnavailable("runtime 'litert' is not installed")
        return get_runtime(name)

    monkeypatch.setattr(catalog, "get_runtime", without_litert)
    graph, _ = choose_graph(config, ["litert", "openvino"])
    assert graph is not None
    assert graph.header.runtime == "openvino"
    assert choose_graph(config, ["litert"]) == (None, "runtime 'litert' is not installed")


def test_names_that_no_graph_has(shelf: Path) -> None:
    with pytest.raises(GraphError, match=r"or one that ssmd has a graph of: tiny-granite$"):
        origin_of("granite")


# ssmd pull


def pull(tmp_path: Path, *arguments: str) -> Any:
    places = ["--data-dir", str(tmp_path / "data"), "--models-dir", str(tmp_path / "models")]
    return CliRunner().invoke(app, ["pull", *arguments, *places])


def test_pull_refits_a_folder(artifacts: TinyArtifacts, shelf: Path, tmp_path: Path) -> None:
    folder = str(artifacts.source("granite-int8"))
    done = pull(tmp_path, "mine", "--from", folder)
    assert done.exit_code == 0, done.output
    made = Artifact.open(tmp_path / "models" / "mine" / "litert-cpu-int8")
    assert f"{made.path}: " in done.output
    assert is_made_here(made.path, tmp_path / "data")
    assert "try: ssmd run mine" in done.output
    done = pull(tmp_path, "mine", "--from", folder)
    assert (done.exit_code, done.output) == (0, f"{made.path} is here already; --force makes it again\n")
    done = pull(tmp_path, "mine", "--from", folder, "--runtime", "openvino", "--json")
    assert done.exit_code == 0, done.output
    said = json.loads(done.output)
    assert said == {"name": "mine", "path": folder, "artifact": str(made.path.with_name("openvino-cpu-int8"))}
    before = made.path.stat().st_ino
    assert pull(tmp_path, "mine", "--from", folder, "--force").exit_code == 0
    assert made.path.stat().st_ino != before
    assert Artifact.open(made.path).manifest == made.manifest


def test_a_pull_with_a_context_ends_there(artifacts: TinyArtifacts, shelf: Path, tmp_path: Path) -> None:
    """It computes what another does up to there; a state of either goes on in the other."""
    folder = str(artifacts.source("granite-int8"))
    built = Artifact.open(artifacts["granite-int8"])
    [one] = [file for file in shelf.iterdir() if "@litert-" in file.name]
    graph = StrippedGraph.open(one)
    StrippedGraph(graph.header.model_copy(update={"tiers": (128, 256, 512)}), graph.literals).save(one)
    try:
        done = pull(tmp_path, "mine", "--from", folder, "--context", "200")
        assert done.exit_code == 0, done.output
        made = Artifact.open(tmp_path / "models" / "mine" / "litert-cpu-int8")
        assert (made.manifest.context, made.manifest.tiers) == (200, (128, 200))
        assert made.file("model.tflite").read_bytes() == built.file("model.tflite").read_bytes()
        done = pull(tmp_path, "mine", "--from", folder)
        assert done.output.endswith("for conversations of 200 tokens; --force makes it again, for 512\n")
        done = pull(tmp_path, "other", "--from", folder, "--context", "513")
        assert isinstance(done.exception, RefitError)
        assert "holds 512 tokens at most, not 513" in str(done.exception)
        assert not (tmp_path / "models" / "other").exists()
    finally:
        graph.save(one)
    short, long = (get_runtime("litert").load(a) for a in (made, built))
    try:
        ids = list(range(130))
        handle, other = short.new_state(), long.new_state()
        for program, at in ((short, handle), (long, other)):
            program.prefill(at, ids[:64])
            program.prefill(at, ids[64:128])
        moved = long.restore(short.save(handle))
        assert np.array_equal(long.decode([moved], [3]), long.decode([other], [3]))
        short.prefill(handle, ids[:64])
        with pytest.raises(ProgramError, match=r"200"):
            short.prefill(handle, ids[:16])
        assert short.position(handle) == 192
        short.prefill(handle, ids[:8])
    finally:
        short.close()
        long.close()


def test_pull_keeps_the_defaults_of_a_source(artifacts: TinyArtifacts, shelf: Path, tmp_path: Path) -> None:
    folder = tmp_path / "source"
    shutil.copytree(artifacts.source("granite-int8"), folder)
    said = '{"eos_token_id": [2, 0], "temperature": 0.6, "top_k": -5, "top_p": NaN, "max_new_tokens": 1, "min_p": 0.05}'
    (folder / "generation_config.json").write_text(said)
    done = pull(tmp_path, "mine", "--from", str(folder))
    assert done.exit_code == 0, done.output
    for name, value in (("top_k", "-5"), ("top_p", "nan"), ("max_new_tokens", "1")):
        assert f"generation_config.json: {name} is {value}" in done.output
    made = Artifact.open(tmp_path / "models" / "mine" / "litert-cpu-int8")
    source = "generation_config.json of mine"
    assert defaults_of(made.manifest, made.path) == {
        "temperature": Default(0.6, source),
        "min_p": Default(0.05, source),
    }
    plain = pull(tmp_path, "plain", "--from", str(artifacts.source("granite-int8")))
    assert plain.exit_code == 0, plain.output
    assert not (made.path.parents[1] / "plain" / made.path.name / FILE).exists()


def test_pull_for_an_npu_needs_none(artifacts: TinyArtifacts, shelf: Path, tmp_path: Path) -> None:
    """And says before it begins what the first load on one takes. Core ML and the NPU cannot execute here."""
    done = pull(tmp_path, "mine", "--from", str(artifacts.source("granite-int8")), "--runtime", "npu")
    assert done.exit_code == 0, done.output
    first, *_, last = done.output.splitlines()
    assert re.match(r"for the NPU: 3 models over .* of weights; the first load there compiles each", first)
    made = Artifact.open(tmp_path / "models" / "mine" / "openvino-npu-f16")
    assert last.startswith(f"{made.path}: ")
    assert "Core ML and the NPU cannot execute here: no Intel NPU here" in last
    assert last.endswith("on the processor: ssmd run mine --runtime npu --device cpu")
    program = get_runtime("openvino").load(made, device="cpu")
    try:
        assert verify(Artifact.open(artifacts["npu-granite-f16"]), program).passed
    finally:
        program.close()


def test_pull_for_core_ml_on_another_system(
    artifacts: TinyArtifacts,
    shelf: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The files are those of a build; golden values are left to a Mac. Core ML and the NPU cannot execute here."""
    done = pull(tmp_path, "mine", "--from", str(artifacts.source("granite-int8")), "--runtime", "coreml")
    assert done.exit_code == 0, done.output
    made, built = (
        Artifact.open(p) for p in (tmp_path / "models" / "mine" / "coreml-gpu-int8", artifacts["coreml-granite-int8"])
    )
    assert done.output.splitlines()[-1].startswith(f"{made.path}: ")
    assert "; Core ML cannot execute here: it is a part of macOS" in done.output
    assert made.manifest.golden == "none"
    assert (made.path / "model.mlpackage").stat().st_mode & 0o700 == 0o700  # which not only root can open
    files = [name for name in built.manifest.files if name != GOLDEN]
    assert [made.file(name).read_bytes() for name in files] == [built.file(name).read_bytes() for name in files]
    program = runtime_of("coreml").load(made, device="cpu")
    try:
        with pytest.raises(ArtifactError, match=r"has no golden values: .* ssmd pull mine --runtime coreml --force$"):
            verify(made, program)
        assert verify(built, program).passed
    finally:
        program.close()
    monkeypatch.setattr(sys, "argv", ["trial", str(made.path), "cpu"])  # its first load on a Mac
    judge(runtime_of("coreml"), bare=True)
    assert json.loads(capsys.readouterr().out) == {"passed": True, "why": ""}
    with pytest.raises(ArtifactError, match="has no golden values"):  # on the Neural Engine, whose numbers may be wrong
        judge(runtime_of("coreml"))


def test_pull_for_core_ml_on_a_mac(
    artifacts: TinyArtifacts, shelf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the evaluator plays it: loaded, fed a text, and told how to run."""
    play(monkeypatch)
    done = pull(tmp_path, "mine", "--from", str(artifacts.source("granite-int8")), "--runtime", "coreml")
    assert done.exit_code == 0, done.output
    assert done.output.endswith("; try: ssmd run mine\n")
    made = Artifact.open(tmp_path / "models" / "mine" / "coreml-gpu-int8")
    assert made.manifest.golden == "itself"
    program = runtime_of("coreml").load(made)
    try:
        assert verify(made, program).worst.rms_relative == 0
        assert verify(Artifact.open(artifacts["coreml-granite-int8"]), program).passed
    finally:
        program.close()


def test_pull_says_what_no_graph_fits(artifacts: TinyArtifacts, shelf: Path, tmp_path: Path) -> None:
    folder = str(artifacts.source("llama-f32"))
    done = pull(tmp_path, "mine", "--from", folder)
    assert done.exit_code == 1
    assert done.output.count("no stripped graph of this config") == 1
    assert "for runtime litert or openvino" in done.output
    assert done.output.endswith(f"; with PyTorch it can be built: ssmd build {folder}\n")
    done = pull(tmp_path, "mine", "--from", folder, "--runtime", "openvino")
    assert done.exit_code == 1
    assert f"with PyTorch it can be built: ssmd build {folder} --runtime openvino" in done.output
    assert pull(tmp_path, "mine", "--from", folder, "--to", str(tmp_path / "to")).exit_code == 2
    assert not list((tmp_path / "models").iterdir())


# what is shipped


def test_every_model_is_shipped_for_both_runtimes() -> None:
    models = {f.stem: json.loads(f.read_text()) for f in (ROOT / "scripts" / "models").glob("*.json")}
    assert len(models) == 18
    found = {r: {g.header.name: g.header for g in shipped(r, "int8")} for r in ("litert", "openvino")}
    only_int4, experts = {"granite-4.0-h-micro", "qwen3.5-4b"}, {"lfm2-8b-a1b"}
    assert set(models) - set(found["litert"]) == only_int4 | experts | {"lfm2-2.6b"}
    assert set(found["openvino"]) == set(models) - only_int4
    for headers in found.values():
        for name, header in headers.items():
            assert (header.origin, header.provenance) == (models[name]["origin"], models[name]["provenance"])
            assert differences(header, models[name]["config"]) == {}
            assert header.quantization == "int8"
            assert max(header.golden.rms) < 0.25
    four = {r: [g.header for g in shipped(r, "int4")] for r in found}
    assert [h.name for h in four["litert"]] == [
        "granite-4.0-h-1b",
        "granite-4.0-h-micro",
        "lfm2-1.2b",
        "lfm3-1.7b",
        "qwen3.5-2b",
        "smollm2",
    ]
    assert [h.name for h in four["openvino"]] == [
        "granite-4.0-h-1b",
        "granite-4.0-h-micro",
        "lfm2-2.6b",
        "qwen3.5-4b",
        "smollm2",
    ]
    for header in (*four["litert"], *four["openvino"]):
        assert header.quantization == "int4"
        assert differences(header, models[header.name]["config"]) == {}
        # LFM3 norms what its layers put out, so what activations lose to rounding goes on: 0.18 in int8, 0.26 in int4.
        most = {"lfm3-1.7b": 0.27}.get(header.name, {"litert": 0.25, "openvino": 0.05}[header.runtime])
        assert max(header.golden.rms) < most
    assert sum(f.stat().st_size for f in catalog.SHIPPED.iterdir()) < 13 << 20


def test_what_is_shipped_ends_where_the_model_does() -> None:
    """Or at 32,768 tokens; with the capacities of a build, but for graphs that were made with fewer of them."""
    older = ("falcon-h1-0.5b-instruct", "mamba-130m", "mamba2-130m", "qwen3-0.6b")
    for runtime in ("litert", "openvino"):
        for graph in shipped(runtime):
            header = graph.header
            last = min(32_768, family_of(header.config).parse(header.config).max_position)
            tiers = (*(tier for tier in TIERS if tier < last), last)
            assert header.tiers[-1] == last
            assert header.tiers == tiers or (runtime, header.name in older) == ("openvino", True)
            assert set(header.tiers) <= set(tiers)


@pytest.mark.parametrize("name", ["smollm2", "lfm2-350m", "qwen3-0.6b", "falcon-h1-0.5b-instruct"])
def test_rope_of_a_shipped_graph_reaches_its_end(name: str, tmp_path: Path) -> None:
    """Bit for bit the rows of the tables that follow from the config; no weights are needed for that."""
    from ai_edge_litert.interpreter import Interpreter, OpResolverType

    graph = StrippedGraph.open(catalog.SHIPPED / catalog.file_name(name, "litert", "cpu", "int8"))
    header, [part] = graph.header, graph.header.files
    family, last = family_of(header.config), header.tiers[-1]
    tables = {n: b(SeededSource({}, 1)) for n, b in family.tables(family.parse(header.config), last).items()}
    with (tmp_path / part.name).open("xb") as file:
        write_literal(file, part.holes, graph.literals[0], part.size)
        for hole in part.holes:
            if hole.parameter in tables:
                file.seek(hole.offset)
                file.write(tables[hole.parameter].tobytes())
    interpreter = Interpreter(
        str(tmp_path / part.name),
        experimental_preserve_all_tensors=True,
        experimental_op_resolver_type=OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES,
    )
    interpreter.allocate_tensors()
    shapes = {t["index"]: tuple(t["shape"]) for t in interpreter.get_tensor_details()}
    shape = tables["rope_cos"].shape
    rows = [o["outputs"][0] for o in interpreter._get_ops_details() if shape in [shapes.get(i) for i in o["inputs"]]]
    assert len(rows) == 2
    for position in (5, 2047, 2048, last - 1):
        for given in interpreter.get_input_details():
            value = position if "pos" in given["name"] else int("n_valid" in given["name"])
            interpreter.set_tensor(given["index"], np.full(given["shape"], value, given["dtype"]))
        interpreter.invoke()
        found = [interpreter.get_tensor(int(index)).reshape(-1) for index in rows]
        for table in tables.values():
            assert any(np.array_equal(row, table[position]) for row in found)


def test_what_is_shipped_for_core_ml() -> None:
    headers = for_some("coreml", "granite-4.0-h-350m", "smollm2")
    for header in headers.values():
        assert (header.runtime, header.device_class, header.quantization) == ("coreml", "gpu", "int8")
        assert (header.buckets, header.tiers) == ((16, 64, 256), (2048,))
        assert header.conversion["variant"] == "stateful"
        assert max(header.golden.rms) < 0.1


def for_some(runtime: str, *names: str) -> dict[str, Any]:
    """The headers, by name, of a runtime that these models alone are shipped for."""
    models = {f.stem: json.loads(f.read_text()) for f in (ROOT / "scripts" / "models").glob("*.json")}
    headers = {g.header.name: g.header for g in shipped(runtime)}
    assert set(headers) == set(names)
    for name, header in headers.items():
        assert differences(header, models[name]["config"]) == {}
    return headers


def test_what_is_shipped_for_the_npu() -> None:
    for header in for_some("npu", "smollm2", "granite-4.0-h-350m", "qwen3.5-0.8b").values():
        assert (header.runtime, header.device_class, header.quantization) == ("openvino", "npu", "f16")
        assert (header.buckets, header.tiers) == ((64,), (2048,))
        assert header.conversion["npu_lint"] == "passed"
        assert catalog.memory_of(header) > 4 * catalog.disk_of(header)  # two models, both in float32 on the processor
        assert max(header.golden.rms) < 0.01


@pytest.mark.parametrize(
    ("runtime", "device_class", "quantization"),
    [
        ("litert", "cpu", "int8"),
        # tests/refit/test_refit.py sees what OpenVINO's graphs of today give, test_every_model_is_shipped… these files.
        pytest.param("openvino", "cpu", "int8", marks=pytest.mark.full),
        pytest.param("openvino", "npu", "f16", marks=pytest.mark.full),
    ],
)
def test_shipped_graphs_compute_here_what_they_did(runtime: str, device_class: str, quantization: str) -> None:
    """The smallest; `ssmd graph verify` runs them all."""
    file = catalog.SHIPPED / catalog.file_name("smollm2", runtime, device_class, quantization)
    done = CliRunner().invoke(app, ["graph", "verify", str(file)])
    assert done.exit_code == 0, done.output
    assert done.output.endswith("passed\n")


# CI asks LiteRT's the same question of a wheel in an environment of its own: scripts/wheel.
@pytest.mark.full
@pytest.mark.parametrize("runtime", ["litert", "openvino", "npu"])
def test_the_first_run_makes_smollm2_without_pytorch(runtime: str, tmp_path: Path) -> None:
    """Real weights in a graph that was made with others; nothing else of a converter may be loaded either."""
    code = (
        "import sys\n"
        "for name in ('torch', 'transformers', 'litert_torch', 'ai_edge_quantizer', 'nncf'): sys.modules[name] = None\n"
        "from ssmd.cli import main\n"
        "main()"
    )
    question = ["run", "smollm2", "What is the capital of France?", "--temperature", "0", "--runtime", runtime]
    question += ["--device", "cpu"] if runtime == "npu" else []  # Core ML and the NPU cannot execute here
    for already in (False, True):
        done = subprocess.run(
            [sys.executable, "-c", code, *question],
            env=environment(tmp_path),
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.endswith("The capital of France is Paris.\n")
        assert ("unpack SmolLM2" not in done.stdout + done.stderr) == already
    folder = "openvino-npu-f16" if runtime == "npu" else f"{runtime}-cpu-int8"
    manifest = Artifact.open(tmp_path / "data" / "models" / "smollm2" / folder).manifest
    assert manifest.golden == "itself"


def test_golden_files_hold_what_the_artifact_computed(artifacts: TinyArtifacts, tmp_path: Path) -> None:
    source = Source.open(artifacts.source("granite-f32"))
    graph = stripped(Artifact.open(artifacts["openvino-granite-f32"]), source)
    made = install(graph, source, tmp_path / "made", name="x")
    theirs = load_file(artifacts["granite-f32"] / GOLDEN)["logits"]
    assert np.allclose(load_file(made.file(GOLDEN))["logits"], theirs, atol=1e-4 * float(theirs.std()))


def test_a_seeded_source_takes_rows() -> None:
    source = SeededSource({}, 1)
    whole = source.tensor("w", (40, 3))
    assert np.array_equal(source.tensor("w", (40, 3), 7, 21), whole[7:21])
    assert np.array_equal(source.tensor("w", (40, 3), 30, 99), whole[30:])
