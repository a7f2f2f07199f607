"""Error-compensated rounding: GPTQ's own formula, the inputs that it is given, and the artifacts that come of it."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import TinyArtifacts
from numpy.typing import NDArray
from refitting import stripped
from typer.testing import CliRunner

from ssmd.authoring.host import Host
from ssmd.authoring.model import author
from ssmd.build.builder import Target
from ssmd.build.stripping import Label, written
from ssmd.cli import app, pull, show
from ssmd.config import Settings
from ssmd.families.offsets import BLOCK, SUFFIX
from ssmd.families.registry import family_of
from ssmd.model.artifact import Artifact
from ssmd.model.source import Source
from ssmd.refit import calibration, catalog
from ssmd.refit.compensated import Factor, better, compensated, plain
from ssmd.refit.encodings import bfloat16
from ssmd.refit.graphfile import StrippedGraph
from ssmd.refit.refit import RefitError, bindings_of
from ssmd.runtime.info import info_of
from ssmd.text.tokenizer import Tokenizer
from ssmd_openvino.build import CONVERTER as OPENVINO

Values = NDArray[np.float32]
TEXT = (Path(__file__).parents[2] / "docs" / "sessions.md").read_text()


def numbers(seed: int, *shape: int) -> Values:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def inputs(seed: int, tokens: int, columns: int) -> Values:
    """Rows whose columns depend on one another, as those of a model do."""
    mixed = numbers(seed, columns, columns) * (np.arange(1, columns + 1, dtype=np.float32) ** -0.5)[:, None]
    rows: Values = numbers(seed + 1, tokens, columns) @ mixed
    return rows


# the rounding


def by_the_papers_formula(rows: Values, gram: NDArray[np.float64], step: Values, low: Values) -> NDArray[np.int8]:
    """Round the columns of a block in order; each error goes to the later columns by the inverse of what is left of H.

    Equations 2 and 3 of arXiv:2210.17323, without its rearrangements.
    """
    left, inverse = rows.astype(np.float64), np.linalg.inv(gram)
    levels = np.empty(rows.shape, np.int8)
    for column in range(rows.shape[1]):
        levels[:, column] = np.clip(np.rint((left[:, column] - low) / step), 0, 15) - 8
        error = (left[:, column] - (low + step * (levels[:, column] + 8))) / inverse[0, 0]
        left[:, column:] -= error[:, None] * inverse[0]
        inverse = inverse[1:, 1:] - np.outer(inverse[1:, 0], inverse[0, 1:]) / inverse[0, 0]
    return levels


def test_a_block_is_rounded_as_the_paper_does() -> None:
    rows, gram = numbers(1, 40, BLOCK), (lambda x: x.T @ x)(inputs(2, 400, BLOCK))
    damped = gram.astype(np.float64) + 0.01 * float(gram.diagonal().mean()) * np.eye(BLOCK)
    made = compensated(rows, Factor.of(gram.copy()), brief=False)
    step = made.steps[:, 0]
    expected = by_the_papers_formula(rows, damped, step, made.offsets[:, 0] - 8 * step)
    assert (made.levels != expected).mean() < 0.002, "but for values that lie between two levels"


@pytest.mark.parametrize("columns", [32, 96, 320])
def test_the_cost_is_that_of_the_products(columns: int) -> None:
    """Of as many inputs as the damping is small beside."""
    rows, x = numbers(1, 24, columns), inputs(2, 4 * columns, columns)
    factor = Factor.of(x.T @ x)
    damping = 0.01 * np.square(x).sum() / columns
    for made in (plain(rows, factor, brief=False), compensated(rows, factor, brief=False)):
        off = rows - made.values()
        expected = np.square(x @ off.T).sum(0) + damping * np.square(off).sum(1)
        np.testing.assert_allclose(made.costs, expected, rtol=2e-3)


@pytest.mark.parametrize("brief", [False, True])
def test_less_is_lost_with_inputs_that_were_not_seen(brief: bool) -> None:
    rows, x = numbers(1, 64, 256), inputs(2, 2048, 256)
    factor = Factor.of(x[:1024].T @ x[:1024])
    ways = [way(rows, factor, brief) for way in (plain, compensated)]
    plain_off, off = (float(np.square(x[1024:] @ (rows - made.values()).T).sum()) for made in ways)
    assert off < 0.5 * plain_off
    for made in ways:
        stored = bfloat16(made.steps) if brief else made.steps.astype(np.float16).astype(np.float32)
        assert np.array_equal(made.steps, stored), "what a runtime reads is what was counted with"
        assert (made.levels.min(), made.levels.max()) == (-8, 7)


def test_weights_that_came_in_blocks_of_4_bits_stay() -> None:
    """Rows are chosen one by one: these lose nothing, whatever comes in."""
    levels = np.random.default_rng(1).integers(0, 16, (8, 4, BLOCK)).astype(np.float32)
    levels[..., 0], levels[..., 1] = 0, 15
    rows = (levels * np.float32(0.0625) - 0.25).reshape(8, -1)
    made, before = better(rows, Factor.of((lambda x: x.T @ x)(inputs(2, 500, 128))), brief=True)
    assert before.max() == 0
    assert np.array_equal(made.values(), rows)


def test_each_row_costs_no_more_than_before() -> None:
    rows, x = numbers(1, 200, 96), numbers(2, 2000, 96)  # inputs that do not depend on one another
    made, before = better(rows, Factor.of(x.T @ x), brief=False)
    assert (made.costs <= before).all()
    assert (made.costs < before).any()


@pytest.mark.parametrize("rank", [0, 1, 5])
def test_inputs_that_span_little(rank: int) -> None:
    """None at all, as of experts that nothing chose; or fewer tokens than columns."""
    x = numbers(1, rank, 128) * 1e3
    made, before = better(numbers(2, 16, 128), Factor.of(x.T @ x), brief=False)
    assert np.isfinite(made.values()).all()
    assert (made.costs <= before).all()


@pytest.mark.parametrize("columns", [32, 256, 288, 800])
def test_the_factor_is_that_of_numpy(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ssmd.refit.compensated._ROWS", 96)
    x = inputs(1, 2 * columns, columns)
    gram = x.T @ x
    factor = Factor.of(gram.copy())
    damped = gram.astype(np.float64) + 0.01 * float(gram.diagonal().mean()) * np.eye(columns)
    expected = np.linalg.cholesky(damped[::-1, ::-1])[::-1, ::-1]
    found = factor.upper * np.sqrt(factor.squares)
    assert np.array_equal(factor.upper, np.triu(factor.upper))
    np.testing.assert_allclose(found, expected, atol=2e-5 * float(np.abs(expected).max()))


def test_rows_without_a_difference() -> None:
    rows = np.zeros((3, 64), np.float32)
    rows[1], rows[2, :32] = 0.5, -1e-9
    made, _ = better(rows, Factor.of((lambda x: x.T @ x)(inputs(2, 500, 64))), brief=True)
    np.testing.assert_allclose(made.values(), rows, atol=1e-8)


# the inputs


@pytest.fixture(scope="module", params=["litert", "openvino"])
def graph(request: pytest.FixtureRequest, artifacts: TinyArtifacts, tmp_path_factory: Any) -> StrippedGraph:
    source = Source.open(artifacts.source("llama-int4"))
    if request.param == "litert":
        return stripped(Artifact.open(artifacts["llama-int4"]), source)
    folder = tmp_path_factory.mktemp("graph")
    made = written(OPENVINO, source.config, Target("int4", (16, 64), (512,)), folder, 1, Label("tiny"))
    header = made.header.model_copy(update={"golden": stripped_golden(artifacts, source)})
    return StrippedGraph(header, made.literals)


def stripped_golden(artifacts: TinyArtifacts, source: Source) -> Any:
    return stripped(Artifact.open(artifacts["llama-int4"]), source).header.golden


@pytest.fixture(scope="module")
def source(artifacts: TinyArtifacts) -> Source:
    return Source.open(artifacts.source("llama-int4"))


@pytest.fixture(scope="module")
def tokens(source: Source) -> list[int]:
    return calibration.tokens_of(TEXT, Tokenizer.open(source.path / "tokenizer.json"))


@pytest.fixture(scope="module")
def made(graph: StrippedGraph, source: Source, tmp_path_factory: Any) -> tuple[Artifact, Artifact]:
    """The artifact of a source as it is refitted, and one that was calibrated."""
    folder = tmp_path_factory.mktemp("made")
    said: list[str] = []
    artifacts = [
        catalog.install(graph, source, folder / name, name="tiny", text=text, progress=said.append)
        for name, text in (("plain", None), ("calibrated", TEXT))
    ]
    assert any("matrices were rounded for 8192 tokens: what they give is off by " in line for line in said)
    return artifacts[0], artifacts[1]


def dequantized(graph: StrippedGraph, source: Source, name: str, rows: Values) -> Values:
    identity = Factor(np.eye(rows.shape[1], dtype=np.float32), np.ones(rows.shape[1], np.float32))
    return plain(rows, identity, brief=graph.header.runtime == "litert").values()


def inputs_by_pytorch(graph: StrippedGraph, source: Source, tokens: list[int], length: int) -> Mapping[str, Values]:
    """Return what PyTorch's linear is given in a module with these weights, by matrix, over all tokens."""
    family = family_of(source.config)
    config = family.parse(source.config)
    bindings = family.bindings(config)
    cut = {name for name in divided_names(graph, source)}
    weights = {n: dequantized(graph, source, n, b(source)) if n in cut else b(source) for n, b in bindings.items()}
    module = author(family, config, weights, graph.header.tiers[-1])
    names = {p.data_ptr(): n for n, p in module.named_parameters()}
    found: dict[str, list[Values]] = {}
    plain_linear = torch.nn.functional.linear

    def linear(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        found.setdefault(names.get(w.data_ptr(), ""), []).append(x.reshape(-1, x.shape[-1]).numpy().copy())
        return plain_linear(x, w, bias)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "linear", linear)
        host = Host(module)
        for first in range(0, len(tokens), length):
            host.feed(tokens[first : first + length], length)
    return {name: np.concatenate(rows) for name, rows in found.items()}


def divided_names(graph: StrippedGraph, source: Source) -> list[str]:
    bindings = bindings_of(source.config, graph.header.recipe, graph.header.tiers[-1])
    return [name for name in bindings if name + SUFFIX in bindings]


def test_the_inputs_are_those_that_pytorch_computes(
    graph: StrippedGraph, source: Source, made: tuple[Artifact, Artifact], tokens: list[int]
) -> None:
    """But for the 8 bits that a runtime rounds them to: another matrix' inputs would be off by their whole size."""
    matrices = calibration._Matrices(graph.header, source)
    observe = info_of(graph.header.runtime).activations
    assert observe is not None
    assert sorted(matrices.places) == sorted(divided_names(graph, source))
    with closing(observe(made[0], matrices.places)) as activations:
        piece = tokens[: 2 * activations.length]
        tensors = sorted(set(activations.sources.values()))
        calls = list(activations.fed([*piece, 1, 2, 3], tensors))  # the rest is no whole call
        again = list(activations.fed(piece, tensors[:1]))
        expected = inputs_by_pytorch(graph, source, piece, activations.length)
    assert len(calls) == 2
    assert all(np.array_equal(one[tensors[0]], other[tensors[0]]) for one, other in zip(calls, again, strict=True))
    for name, tensor in activations.sources.items():
        rows = np.concatenate([call[tensor] for call in calls])
        assert rows.shape == (len(piece), matrices.columns[name])
        off = np.linalg.norm(rows - expected[name]) / np.linalg.norm(expected[name])
        assert off < 0.05, (name, off)


def test_all_pieces_of_a_text_count(graph: StrippedGraph, source: Source, made: Any, tokens: list[int]) -> None:
    """Each from a fresh state; what is left of the last one, beside whole calls, is not read."""
    places, observe = calibration._Matrices(graph.header, source).places, info_of(graph.header.runtime).activations
    assert observe is not None
    with closing(observe(made[0], places)) as activations:
        tensor, last = activations.sources["layer0_down"], 2 * calibration.PIECE + activations.length
        found = calibration._grams(activations, tokens[: last + 1], [tensor])[tensor]
        pieces = (tokens[:512], tokens[512:1024], tokens[1024:last])
        rows = np.concatenate([call[tensor] for piece in pieces for call in activations.fed(piece, [tensor])])
    assert len(rows) == last
    np.testing.assert_allclose(found, rows.T @ rows, rtol=1e-3, atol=1e-3 * float(np.square(rows).sum(0).max()))


# the artifacts


def test_what_is_written_is_what_was_rounded(
    graph: StrippedGraph, source: Source, made: tuple[Artifact, Artifact], tmp_path: Path
) -> None:
    """Levels, steps and offsets, as the runtime's files hold them."""
    copied = tmp_path / "made"
    shutil.copytree(made[0].path, copied)
    matrices, name = calibration._Matrices(graph.header, source), "layer1_down"
    rows = family_of(source.config).bindings(family_of(source.config).parse(source.config))[name](source)
    factor = Factor.of((lambda x: x.T @ x)(inputs(3, 1000, rows.shape[1])))
    expected, before = better(rows, factor, brief=graph.header.runtime == "litert")
    with ExitStack() as stack:
        files = {f.name: stack.enter_context((copied / f.name).open("r+b")) for f in graph.header.files}
        share = matrices.rounded(name, factor, files)
    assert share == pytest.approx(expected.costs.sum() / before.sum())
    parts: dict[str, NDArray[Any]] = {}
    for file in graph.header.files:
        for hole in file.holes:
            if hole.parameter in (name, name + SUFFIX):
                data = np.fromfile(copied / file.name, np.uint8, hole.length, offset=hole.offset)
                parts[f"{hole.parameter.removeprefix(name)} {hole.encoding.partition('-')[2]}"] = data
    packed, steps = parts[" int4"], parts[" int4-scale"].view(np.float16).reshape(len(rows), -1)
    levels = np.stack([packed & 15, packed >> 4], -1).reshape(*steps.shape, BLOCK).astype(np.int8)
    levels[levels > 7] -= 16
    offsets = parts[f"{SUFFIX} "].view(np.float32)  # so few that they are not rounded
    assert np.array_equal(offsets.reshape(steps.shape), expected.offsets)
    assert np.array_equal(steps.astype(np.float32), expected.steps)
    assert np.array_equal(levels.reshape(rows.shape), expected.levels)


def logits(artifact: Artifact, tokens: list[int]) -> Values:
    from ssmd.runtime.protocol import get_runtime

    program = get_runtime(artifact.manifest.runtime).load(artifact, device="cpu")
    try:
        handle = program.new_state()
        return np.concatenate([program.decode([handle], [token]) for token in tokens])
    finally:
        program.close()


def test_an_artifact_is_nearer_to_the_model(source: Source, made: tuple[Artifact, Artifact], tokens: list[int]) -> None:
    """By the logits of tokens that it was not calibrated with."""
    family = family_of(source.config)
    config = family.parse(source.config)
    module = author(family, config, {n: b(source) for n, b in family.bindings(config).items()}, 512)
    fed = np.random.default_rng(1).permutation(tokens)[:200].tolist()
    expected = Host(module).rows(fed, 64)
    off = [float(np.square(logits(artifact, fed) - expected).sum()) for artifact in made]
    assert off[1] < 0.9 * off[0]


def test_only_matrices_of_4_bits_change(graph: StrippedGraph, made: tuple[Artifact, Artifact]) -> None:
    """The bytes of everything else are a refit's."""
    matrices = ("-int4", "-int4-scale")
    for file in graph.header.files:
        one, other = (np.fromfile(artifact.path / file.name, np.uint8) for artifact in made)
        same = one == other
        for hole in file.holes:
            if hole.encoding.endswith(matrices) or hole.parameter.endswith(SUFFIX):
                same[hole.offset : hole.offset + hole.length] = True
        assert same.all()
        assert not np.array_equal(one, other) or not file.holes


def test_another_build_of_the_same_model(made: tuple[Artifact, Artifact]) -> None:
    """Its conversations go on in the other, as those of another quantization do."""
    one, other = (artifact.manifest for artifact in made)
    assert one.lineage == other.lineage
    assert one.build != other.build
    assert "calibrated" not in one.quantization_recipe
    assert other.quantization_recipe["calibrated"]["tokens"] == 8192
    assert {**other.quantization_recipe, "calibrated": 0} == {**one.quantization_recipe, "calibrated": 0}
    assert Artifact.open(made[1].path).manifest == other, "with its files"
    shown = CliRunner().invoke(app, ["show", str(made[1].path)]).output
    assert "quantization  int4, rounded for 8192 tokens of a text\n" in shown


@pytest.mark.parametrize("told", [None, 5, {}, {"tokens": "many"}, {"tokens": [1]}, {"tokens": True}])
def test_what_a_manifest_from_elsewhere_says(made: tuple[Artifact, Artifact], told: Any) -> None:
    assert show._calibrated({"calibrated": told}) == ""


def test_nothing_is_left_beside_it(made: tuple[Artifact, Artifact]) -> None:
    assert sorted(p.name for p in made[0].path.parent.iterdir()) == ["calibrated", "plain"]


# errors


def test_a_text_that_is_too_short(graph: StrippedGraph, source: Source, tmp_path: Path) -> None:
    with pytest.raises(RefitError, match=r"has 7[0-9][0-9] tokens, expected 1024 or more"):
        catalog.install(graph, source, tmp_path / "out", name="tiny", text=TEXT[:1000])
    assert list(tmp_path.iterdir()) == []


def test_a_graph_that_has_another_form_than_its_artifact(
    graph: StrippedGraph, source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no product is found, nothing is made."""
    info = info_of(graph.header.runtime)
    observe = info.activations
    assert observe is not None

    def moved(artifact: Artifact, places: Any) -> Any:
        from ssmd.runtime.activations import Place

        return observe(artifact, {n: Place(p.file, p.offset + 1) for n, p in places.items()})

    changed = info.__class__(**{**info.__dict__, "activations": moved})
    monkeypatch.setattr(calibration, "info_of", lambda name: changed)
    with pytest.raises(RefitError, match=r"cannot be calibrated: .* has no product with layer0_"):
        catalog.install(graph, source, tmp_path / "out", name="tiny", text=TEXT)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [np.inf, np.nan])
def test_inputs_that_are_no_numbers(number: float) -> None:
    gram = np.eye(32, dtype=np.float32)
    gram[3, 3] = number
    with pytest.raises(RefitError, match="the inputs of layer0_q are not finite"):
        calibration._factor(gram, "layer0_q")


def test_a_context_that_is_shorter_than_a_piece(graph: StrippedGraph, source: Source, tmp_path: Path) -> None:
    """300 tokens end within a call."""
    context = 300 if len(graph.header.tiers) > 1 else None
    made = catalog.install(graph, source, tmp_path / "out", name="tiny", text=TEXT, context=context)
    assert made.manifest.context == (context or 512)


def test_memory_is_that_of_the_widest_matrix(graph: StrippedGraph, source: Source) -> None:
    matrices = calibration._Matrices(graph.header, source)
    widest = max(matrices.columns.values())
    assert 12 * widest * widest < calibration.memory_of(graph.header) - (1 << 30) < 12 * widest * widest + (4 << 20)


def test_an_artifact_that_is_there_says_what_it_was_rounded_for(
    made: tuple[Artifact, Artifact], tmp_path: Path
) -> None:
    """Nothing tells a user more plainly that --calibrate did nothing."""
    making = pull._Making(Settings(data_dir=tmp_path), "tiny", text=TEXT)
    said: list[str] = []
    for artifact in made:
        making.recipe = SimpleNamespace(out=artifact.path, most=artifact.manifest.context)  # type: ignore[assignment]
        making.made_before(said.append)
    assert ["not rounded for this text; --force makes it again, for it" in line for line in said] == [True, False]


@pytest.mark.parametrize(
    ("asked", "text", "said"),
    [
        (["--quant", "int8"], TEXT, "--calibrate rounds weights of 4 bits: add --quant int4"),
        ([], TEXT, "--calibrate rounds weights of 4 bits: add --quant int4"),
        (["--quant", "int4"], "short", "5 characters are less than 1024 tokens"),
        (["--quant", "int4"], b"\xff\xfe" * 2000, "it is no text in UTF-8, from byte 0 on"),
        (["--quant", "int4"], None, "No such file or directory"),
        (["--quant", "int4", "--runtime", "wgpu"], TEXT, "runtime wgpu does not read what its matrices multiply"),
        (["--quant", "int4", "--runtime", "coreml"], TEXT, "runtime coreml does not read what its matrices multiply"),
        (["--quant", "int4", "--runtime", "npu"], TEXT, "npu does not read what its matrices multiply; take litert or"),
        (["--quant", "int4", "--to", "x"], TEXT, "--calibrate rounds weights of 4 bits"),
    ],
)
def test_a_refusal_comes_before_anything_is_fetched(
    asked: list[str], text: str | bytes | None, said: str, tmp_path: Path
) -> None:
    file = tmp_path / "text"
    if text is not None:
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    done = CliRunner().invoke(
        app, ["pull", "smollm2", *asked, "--calibrate", str(file), "--data-dir", str(tmp_path / "data")]
    )
    assert said in " ".join(done.output.split())
    assert done.exit_code == 2
    assert "unpack" not in done.output
