"""The quantization of a pull: as asked for; else the usual one, or int4 where only that fits into memory."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import tiny
from conftest import BUILT, TinyArtifacts
from typer.testing import CliRunner

from ssmd.cli import app
from ssmd.cli import pull as command
from ssmd.cli.making import hint
from ssmd.config import Settings
from ssmd.machine import memory
from ssmd.model.artifact import Artifact
from ssmd.model.random_source import SeededSource
from ssmd.refit import catalog
from ssmd.refit.gguf import loss
from ssmd.refit.graphfile import StrippedGraph

MORE = 80 << 20  # bytes by which int8 is larger: so many that int4 takes less memory too
NAME = "mamba-130m"


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A shipped graph of int8, and the same as one of int4 that is smaller."""
    [file] = catalog.files("openvino", NAME, "int8")
    graph, folder = StrippedGraph.open(file), tmp_path_factory.mktemp("graphs")
    header = graph.header
    larger = header.files[0].model_copy(update={"size": header.files[0].size + MORE})
    int8 = header.model_copy(update={"files": (larger, *header.files[1:])})
    StrippedGraph(int8, (graph.literals[0] + bytes(MORE), *graph.literals[1:])).save(folder / file.name)
    int4 = header.model_copy(update={"quantization": "int4"})
    StrippedGraph(int4, graph.literals).save(folder / file.name.replace("int8", "int4"))
    return folder


@pytest.fixture
def config(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> Mapping[str, Any]:
    monkeypatch.setattr(catalog, "SHIPPED", shelf)
    catalog.sizes_of.cache_clear()
    return StrippedGraph.open(catalog.files()[0]).header.config


def chosen(config: Mapping[str, Any], folder: Path, quantization: Any = None, **fields: Any) -> Any:
    making = command._Making(Settings(data_dir=folder / "data"), NAME, quantization=quantization, **fields)
    making.look(config)
    return making.recipe


def form(recipe: Any) -> tuple[str, str]:
    return recipe.out.name, recipe.graph.header.quantization


def test_int8_is_the_usual_one(config: Mapping[str, Any], tmp_path: Path) -> None:
    recipe = chosen(config, tmp_path)
    assert form(recipe) == ("openvino-cpu-int8", "int8")
    assert recipe.why.startswith("the weights become int8, the usual one; --quant int4 takes 1")
    assert [catalog.quantization_of(file) for file in catalog.files("openvino", NAME)] == ["int8", "int4"]
    (usual, _), (smaller, _) = (catalog.sizes_of(NAME, "openvino", q) or (0, 0) for q in ("int8", "int4"))
    assert catalog.sizes_of(NAME, "openvino") == catalog.sizes_of(NAME, "openvino", "int8")
    assert usual == smaller + MORE


def test_memory_of_int4_is_what_openvino_packs(config: Mapping[str, Any]) -> None:
    """Granite-4.0-H-1B and -Micro and Qwen3.5-4B took 1.5 times their artifacts, and 0.4 GB."""
    for quantization, copies in (("int8", 1.0), ("int4", 1.5)):
        disk, needed = catalog.sizes_of(NAME, "openvino", quantization) or (0, 0)
        assert needed == int(copies * disk) + (400 << 20)


def test_a_quantization_that_is_asked_for_is_taken(config: Mapping[str, Any], tmp_path: Path) -> None:
    for quantization in ("int4", "int8"):
        recipe = chosen(config, tmp_path, quantization)
        assert (*form(recipe), recipe.why) == (f"openvino-cpu-{quantization}", quantization, "")


def test_int4_is_taken_where_int8_has_no_memory(
    config: Mapping[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = chosen(config, tmp_path, "int8").memory
    monkeypatch.setattr(memory, "available", lambda: needed - 1)
    recipe = chosen(config, tmp_path)
    assert form(recipe) == ("openvino-cpu-int4", "int4")
    assert recipe.why.startswith("the weights become int4, as int8 takes about ")
    assert form(chosen(config, tmp_path, anyway=True)) == ("openvino-cpu-int8", "int8")
    with pytest.raises(ValueError, match="this pull takes about"):
        chosen(config, tmp_path, "int8")
    recipe.out.with_name("openvino-cpu-int8").mkdir(parents=True)
    assert form(chosen(config, tmp_path)) == ("openvino-cpu-int8", "int8"), "it is installed"


def test_a_quantization_without_a_graph_is_refused_by_name(config: Mapping[str, Any], tmp_path: Path) -> None:
    graph, why_not = catalog.choose_graph(config, ["openvino"], "f16")
    said = "ssmd has no stripped graph of this config for runtime openvino in f16, nor any for that"
    assert (graph, why_not) == (None, said)
    done = CliRunner().invoke(app, ["pull", NAME, "--quant", "f16", "--to", str(tmp_path / "to")])
    assert (done.exit_code, "--to only fetches: leave out --from, --runtime, --quant" in done.output) == (2, True)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--quant", "f16"], "can be built: ssmd build smollm2 --runtime openvino --quant f16"),
        (["--runtime", "npu", "--quant", "int4"], "nor does `ssmd build` make int4 for npu"),
    ],
)
def test_a_refusal_names_a_build_and_unpacks_nothing(options: list[str], said: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["pull", "smollm2", *options, "--data-dir", str(tmp_path)])
    assert done.exit_code == 1
    assert said in " ".join(done.output.split())
    assert "unpack" not in done.output


@pytest.mark.parametrize(
    ("runtime", "variant", "said"), [("coreml", "llama", "runtime coreml"), ("openvino", "lfm2-moe", "experts")]
)
def test_a_graph_that_no_refit_fills_is_refused_at_once(
    artifacts: TinyArtifacts, runtime: str, variant: str, said: str, tmp_path: Path
) -> None:
    config = artifacts.source(f"openvino-{variant}-f32") / "config.json"
    asked = ["graph", "make", str(config), "--runtime", runtime, "--quant", "int4", "--out", str(tmp_path)]
    done = CliRunner().invoke(app, asked)
    assert (done.exit_code, list(tmp_path.iterdir())) == (2, [])
    assert f"no refit makes int4 of {said}" in done.output


def test_the_next_step_runs_what_was_made(artifacts: TinyArtifacts, tmp_path: Path) -> None:
    """The smallest artifact has the model's name alone, the smallest of a runtime needs the runtime's."""
    made = {}
    for name in ("openvino-llama-f32", "openvino-llama-int8", "llama-f32"):
        made[name] = tmp_path / "llama" / Path(BUILT[name].folder).name
        shutil.copytree(artifacts[name], made[name])
    said = {name: hint(Artifact.open(out).manifest, "llama", out) for name, out in made.items()}
    assert said == {
        "openvino-llama-f32": f"try: ssmd run {made['openvino-llama-f32']}",
        "openvino-llama-int8": "try: ssmd run llama",
        "llama-f32": "try: ssmd run llama --runtime litert",
    }


def test_the_error_of_divided_weights_counts_their_offsets() -> None:
    """16 levels of a block of normal numbers are off by some 8 %; the levels alone would be found again."""
    family, fields = tiny.VARIANTS["llama"]
    source = SeededSource({"model_type": family, "vocab_size": 300, **fields}, 1)
    holes = [
        SimpleNamespace(parameter=name, encoding=encoding)
        for name, encoding in (("layer0_down", "nncf-int4"), ("layer0_down", "nncf-int4-scale"))
    ]
    header = SimpleNamespace(recipe={"offsets": 32}, tiers=(64,), files=[SimpleNamespace(holes=holes)])
    error, count = loss.relative_rms(cast(Any, source), loss._of_graph(cast(Any, source), cast(Any, header)))
    assert 0.06 < error < 0.1
    assert count == 96 * 192
