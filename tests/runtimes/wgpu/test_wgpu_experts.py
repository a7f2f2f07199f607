"""Mixtures of experts on wgpu: the choice, its groups and its products against numpy, and whole models."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from conftest import TinyArtifacts
from contract.driving import decode, feed, same, started
from safetensors.numpy import load_file, save_file
from shaders import (
    EPS,
    FORMATS,
    Array,
    close,
    control,
    matrix,
    normal,
    normed,
    packed,
    run,
    silu,
)

from ssmd.authoring import ops
from ssmd.authoring.host import Host
from ssmd.authoring.model import author
from ssmd.families.registry import family_of
from ssmd.model.artifact import Artifact
from ssmd.model.plan import Experts
from ssmd.model.source import Source
from ssmd.runtime.protocol import ProgramError
from ssmd_wgpu import op, pack, runtime, tuning
from ssmd_wgpu.build import CONVERTER, packed_plan, recipe_of, rows_of
from ssmd_wgpu.device import Gpu, adapters, shader
from ssmd_wgpu.experts import TILE, Groups
from ssmd_wgpu.pack import Format
from ssmd_wgpu.products import SOFTWARE
from ssmd_wgpu.program import WgpuProgram
from ssmd_wgpu.reference import expert_shares
from ssmd_wgpu.runtime import WgpuRuntime

IDS: list[int] = np.random.default_rng(5).integers(0, 384, 200).tolist()
MOST = 80  # rows of a call
# Experts, of which so many are chosen: one, all, more than a workgroup has threads.
COUNTS = [(1, 1), (5, 5), (8, 3), (64, 6), (300, 10)]


def mixture(count: int, chosen: int, **fields: Any) -> Experts:
    plain = {"intermediate": 20, "sigmoid": False, "bias": False, "normed": False}
    return Experts(count=count, chosen=chosen, **{**plain, **fields})


# Kernels.


@pytest.mark.parametrize(("count", "chosen"), COUNTS)
@pytest.mark.parametrize(("sigmoid", "with_norm"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_the_best_experts_and_their_shares(
    any_gpu: Gpu, count: int, chosen: int, sigmoid: bool, with_norm: bool, with_bias: bool
) -> None:
    """Steps of 1/4 make many scores equal: the first of them are taken, as by the module, the best first."""
    m = mixture(count, chosen, sigmoid=sigmoid, normed=with_norm, bias=with_bias)
    scores = (np.round(normal(9, count, scale=2) * 4) / 4).astype(np.float32)
    scores[0] = 0.0
    scores[0, ::2] = -0.0  # equal, too
    scores[1] *= 30  # sigmoids of 0 and 1
    bias = (np.round(normal(count) * 4) / 4).astype(np.float32) if with_bias else None
    p, at = packed(first=normal(5), bias=bias)
    sizes = {"count": count, "chosen": chosen, "sigmoid": sigmoid, "normed": with_norm, "bias": at["bias"]}
    arrays = {"SCORES": scores, "P": p, "EXPERTS": np.full((10, chosen), 7777, np.uint32)}
    arrays["SHARES"] = np.full((10, chosen), np.nan, np.float32)
    experts, shares = run(any_gpu, shader("experts_choose", **sizes), arrays, (1, 9), "EXPERTS", "SHARES")
    given, more = torch.from_numpy(scores), None if bias is None else torch.from_numpy(bias)
    wanted = ops.shares(given, more, chosen, sigmoid=sigmoid, normed=with_norm).numpy()
    found = np.zeros((9, count), np.float32)
    np.put_along_axis(found, experts[:9].astype(np.int64), shares[:9], -1)
    assert all(len(set(row)) == chosen for row in experts[:9].tolist())
    close(found, wanted)
    keys = torch.sigmoid(given) if sigmoid else given
    order = ops.best(keys if more is None else keys + more, chosen)[1].numpy()
    assert (experts[:9] == order).all()
    rest = np.delete(scores, 1, 0).astype(np.float64)  # in which sigmoids are 1 only later
    wide = None if bias is None else bias.astype(np.float64)
    close(expert_shares(rest, wide, m).astype(np.float32), np.delete(wanted, 1, 0))
    assert (experts[9] == 7777).all()  # of a row that is not there


def grouped(gpu: Gpu, m: Experts, experts: Array, most: int) -> NDArrayOfWords:
    """The words that group these choices, (T, k)."""
    groups = Groups(m, most)
    arrays = {"EXPERTS": experts, "GROUPS": np.full(groups.words, 99, np.uint32), "CTL": control(3, len(experts))}
    [words] = run(gpu, shader("experts_group", experts=groups.sizes), arrays, (1,), "GROUPS")
    return np.asarray(words, np.uint32)


NDArrayOfWords = np.ndarray[Any, np.dtype[np.uint32]]


def choices(kind: str, m: Experts, count: int) -> NDArrayOfWords:
    """Numbers of chosen experts (T, k): of any, all rows of the last ones, or of every second one only."""
    rng = np.random.default_rng(count)
    every = {"any": m.count, "few": -(-m.count // 2)}
    if kind == "last":
        return np.tile(np.arange(m.count - m.chosen, m.count, dtype=np.uint32), (count, 1))
    each = [rng.permutation(every[kind])[: m.chosen] for _ in range(count)]
    return np.array(each, np.uint32) * (2 if kind == "few" else 1)


@pytest.mark.parametrize(("count", "chosen"), COUNTS)
@pytest.mark.parametrize("kind", ["any", "last"])
@pytest.mark.parametrize("rows", [1, 45, 64])
def test_pairs_are_grouped_by_expert(gpu: Gpu, count: int, chosen: int, kind: str, rows: int) -> None:
    m, most = mixture(count, chosen), 64
    experts = choices(kind, m, rows)
    groups, words = Groups(m, most), grouped(gpu, m, experts, most)
    counts = np.bincount(experts.reshape(-1), minlength=count)
    assert words[: count + 1].tolist() == [0, *np.cumsum(counts)]
    tiles = [(e, words[e] + t) for e in range(count) for t in range(0, counts[e], TILE)]
    assert words[count + 1] == len(tiles) <= groups.tiles(rows)
    assert words[groups.tiles_at : groups.tiles_at + 2 * len(tiles)].tolist() == [v for tile in tiles for v in tile]
    pairs = words[groups.places_at :][: rows * chosen]
    assert pairs.tolist() == np.argsort(experts.reshape(-1), kind="stable").tolist()
    assert (words[groups.places_at + rows * chosen :] == 99).all()


SIZES = [(8, 3, 60, 33), (5, 5, 96, 40), (1, 1, 64, 20)]  # experts, chosen, hidden, channels of an expert
LAYER = pytest.mark.parametrize("sizes", SIZES, ids=str)


class Layer:
    """An expert layer's arrays and, in float64, what it computes."""

    def __init__(self, sizes: tuple[int, int, int, int], fmt: Format, experts: NDArrayOfWords) -> None:
        count, chosen, hidden, inner = sizes
        self.m, self.experts = mixture(count, chosen, intermediate=inner), experts
        self.into, w, self.into_sizes = matrix(2 * count * inner, hidden, fmt)
        self.down, v, self.down_sizes = matrix(count * hidden, inner, fmt)
        self.x, self.gain = normal(len(experts), hidden), normal(hidden)
        self.shares = np.abs(normal(*experts.shape))
        self.p, self.at = packed(first=normal(3), gain=self.gain)
        w, v = w.reshape(count, 2 * inner, hidden), v.reshape(count, hidden, inner)
        self.inner = np.empty((*experts.shape, inner))
        self.outer = np.empty((*experts.shape, hidden))
        for (t, rank), e in np.ndenumerate(experts):
            gate, up = np.split(w[e] @ normed(self.x[t], self.gain), 2)
            self.inner[t, rank] = silu(gate) * up
            self.outer[t, rank] = v[e] @ self.inner[t, rank].astype(np.float32).astype(np.float64)

    @property
    def wanted(self) -> Array:
        return np.asarray(self.x + (self.shares[..., None] * self.outer).sum(1))

    def product(self, gpu: Gpu, arrays: dict[str, Array], first: int, here: int, end: str, tiled: bool) -> Array:
        """Y after a product with some of the experts. Rows of a step are those of EXPERTS."""
        weights, sizes = (self.into, self.into_sizes) if end == "swiglu" else (self.down, self.down_sizes)
        rows, groups = sizes["rows"] // self.m.count, Groups(self.m, MOST)
        cut = {name: array[first * rows :] for name, array in weights.items()}  # `here` alone leaves out later experts
        across = -(-rows // 16)
        text = shader(
            "experts_product",
            **{**sizes, "rows": rows, "threads_per_row": 8, "rows_per_thread": 2, "subgroups": False, "ahead": 1},
            unit=1,
            threads=64,
            eps=EPS,
            end=end,
            across=across,
            tiled=tiled,
            streams=TILE if tiled else 1,
            gain=self.at["gain"] if end == "swiglu" else None,
            experts={**groups.sizes, "first": first, "here": here},
        )
        count = len(arrays["EXPERTS"])
        grid = (across, groups.tiles(count)) if tiled else (across * (self.m.chosen if end == "swiglu" else 1), count)
        [y] = run(gpu, text, {"P": self.p, **arrays, **cut}, grid, "Y")
        return y

    def stepped(self, gpu: Gpu, rows: list[int], parts: list[tuple[int, int]]) -> tuple[Array, Array]:
        """The values between the products and the sum with x, of these rows in one step."""
        arrays: dict[str, Array] = {"EXPERTS": self.experts[rows], "SHARES": self.shares[rows]}
        inner: Array = np.full((len(rows), self.m.chosen, self.m.intermediate), 5, np.float32)
        y: Array = self.x[rows]
        for first, here in parts:
            given = {**arrays, "X": self.x[rows], "Y": inner}
            inner = self.product(gpu, given, first, here, "swiglu", False)
        for first, here in parts:
            y = self.product(gpu, {**arrays, "X": inner, "Y": y}, first, here, "add", False)
        return inner, y

    def prefilled(self, gpu: Gpu, parts: list[tuple[int, int]], of: slice) -> tuple[Array, Array, Array]:
        """The values between the products, the experts' outputs, and their sum with x, of these rows in one prompt."""
        x, experts = self.x[of], self.experts[of]
        arrays = {"EXPERTS": experts, "GROUPS": grouped(gpu, self.m, experts, MOST)}
        inner: Array = np.full((*experts.shape, self.m.intermediate), 5, np.float32)
        outer: Array = np.full((*experts.shape, x.shape[1]), 5, np.float32)
        for first, here in parts:
            inner = self.product(gpu, {**arrays, "X": x, "Y": inner}, first, here, "swiglu", True)
        for first, here in parts:
            outer = self.product(gpu, {**arrays, "X": inner, "Y": outer}, first, here, "store", True)
        text = shader("experts_sum", columns=x.shape[1], chosen=self.m.chosen)
        given = {"Y": outer, "SHARES": self.shares[of], "X": x}
        [y] = run(gpu, text, given, (-(-x.shape[1] // 64), len(x)), "X")
        return inner, outer, y


def halves(count: int) -> list[tuple[int, int]]:
    """Two parts of the experts, or one of one."""
    return [(first, here) for first, here in ((0, count // 2), (count // 2, count - count // 2)) if here]


@LAYER
@pytest.mark.parametrize("fmt", FORMATS)
def test_a_step_computes_the_chosen_experts(any_gpu: Gpu, fmt: Format, sizes: tuple[int, int, int, int]) -> None:
    """Bit for bit the same in any company; by experts in two bindings, too, but for the order of their sum."""
    layer = Layer(sizes, fmt, choices("any", mixture(*sizes[:2]), 5))
    whole = [(0, layer.m.count)]
    inner, y = layer.stepped(any_gpu, [0, 1, 2, 3, 4], whole)
    close(inner, layer.inner)
    close(y, layer.wanted)
    for i in (3, 0):
        alone = layer.stepped(any_gpu, [i], whole)
        assert (alone[0][0].tobytes(), alone[1][0].tobytes()) == (inner[i].tobytes(), y[i].tobytes())
    again, cut = layer.stepped(any_gpu, [0, 1, 2, 3, 4], halves(layer.m.count))
    assert again.tobytes() == inner.tobytes()
    close(cut, layer.wanted)


@LAYER
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(("kind", "count"), [("any", 71), ("last", 33), ("any", 1)])
def test_a_prefill_computes_the_chosen_experts(
    gpu: Gpu, fmt: Format, sizes: tuple[int, int, int, int], kind: str, count: int
) -> None:
    """With experts that no row chose, and with one that all chose; neither parts of the weights nor rows beside change
    a bit, and the values between the products are those of a step."""
    layer = Layer(sizes, fmt, choices(kind, mixture(*sizes[:2]), count))
    whole = [(0, layer.m.count)]
    found = layer.prefilled(gpu, whole, slice(None))
    for array, wanted in zip(found, (layer.inner, layer.outer, layer.wanted), strict=True):
        close(array, wanted)
    again = layer.prefilled(gpu, halves(layer.m.count), slice(None))
    assert [a.tobytes() for a in again] == [a.tobytes() for a in found]
    rest = slice(count // 2, None)  # in other tiles
    for array, part in zip(found, layer.prefilled(gpu, whole, rest), strict=True):
        assert part.tobytes() == array[rest].tobytes()
    assert layer.stepped(gpu, [0, count - 1], whole)[0].tobytes() == found[0][[0, count - 1]].tobytes()


# Whole models.


@pytest.fixture(scope="module")
def moe(artifacts: TinyArtifacts) -> Artifact:
    if not adapters():
        pytest.skip("no adapter: apt install mesa-vulkan-drivers libvulkan1")
    return Artifact.open(artifacts["wgpu-lfm2-moe-f32"])


@pytest.fixture(scope="module")
def loaded(moe: Artifact) -> Iterator[WgpuProgram]:
    made = WgpuRuntime().load(moe)
    yield made
    made.close()


def module_of(source: Source) -> Any:
    family = family_of(source.config)
    config = family.parse(source.config)
    return author(family, config, {n: b(source) for n, b in family.bindings(config).items()}, 512)


VARIANTS = [
    "granite-moe",
    *(pytest.param(v, marks=pytest.mark.full) for v in ("lfm2-moe-all", "lfm2-moe-single", "lfm2-moe-one")),
]


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_states_are_those_of_transformers(artifacts: TinyArtifacts, variant: str) -> None:
    """Token by token and by prompts of any length; lfm2-moe is in tests/contract."""
    oracle = pytest.importorskip("oracle")
    program = WgpuRuntime().load(Artifact.open(artifacts[f"wgpu-{variant}-f32"]))
    logits, cached = oracle.continued(tiny.official(variant, program.vocabulary), IDS[:101])
    state = oracle.state(cached, 101)
    for lengths in ([1] * 101, [64, 37], [16, 7, 1, 33, 2, 42]):
        handle, at = program.new_state(), 0
        for n in lengths:
            at += n
            found = program.prefill(handle, IDS[at - n : at])
            assert np.abs(found - logits[at - 1]).max() <= 2e-5 * np.abs(logits[at - 1]).max()
        saved = program.save(handle)
        assert all(np.abs(saved.tensors[n] - t).max() <= 1e-5 * np.abs(t).max() for n, t in state.tensors.items())
        program.release(handle)
    program.close()


def test_equal_experts_are_taken_in_order(tmp_path: Path, moe: Artifact, artifacts: TinyArtifacts) -> None:
    """As by the module, of routers in which each expert has the score of another one: pairs are parted. Shares are not
    normed, as they are in the other models of the default set."""
    source = shutil.copytree(artifacts.source("wgpu-lfm2-moe-f32"), tmp_path / "tied")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"norm_topk_prob": False}))
    weights = load_file(source / "model.safetensors")
    for name, array in weights.items():
        if name.endswith(("feed_forward.gate.weight", "expert_bias")):
            array[4:] = array[:4]
    save_file(weights, source / "model.safetensors", {"format": "pt"})
    tied = Source.open(source)
    made = CONVERTER.build(tied, tmp_path / "made", name="tiny", quantization="f32", tiers=[512])
    program, module = WgpuRuntime().load(made), module_of(tied)
    for count in (1, 5, 64):
        wanted = Host(module).feed(IDS[:count], count)
        handle = program.new_state()
        assert np.abs(program.prefill(handle, IDS[:count]) - wanted).max() <= 2e-5 * np.abs(wanted).max()
    program.close()


def test_experts_leave_no_trace_of_other_calls(loaded: WgpuProgram, moe: Artifact) -> None:
    """Rows of a longer prompt or of other streams, which stay in the buffers, change no bit; nor does a restore."""
    fresh = WgpuRuntime().load(moe)
    first = started(fresh, IDS[:5])
    wanted, state = decode(fresh, first, IDS[5:8]), fresh.save(first)
    others = [started(loaded, IDS[i : i + 64]) for i in range(8)]
    loaded.decode(others, IDS[:8])
    handle = started(loaded, IDS[:5])
    assert decode(loaded, handle, IDS[5:8]).tobytes() == wanted.tobytes()
    assert same(loaded.save(handle), state)
    again = fresh.restore(loaded.save(handle))
    logits = feed(fresh, again, IDS[8:30], [20, 2])
    assert logits.tobytes() == feed(loaded, handle, IDS[8:30], [20, 2]).tobytes()
    for each in (*others, handle):
        loaded.release(each)
    fresh.close()


def test_every_form_of_a_product_computes_the_same_experts(
    moe: Artifact, loaded: WgpuProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a GPU's are measured: threads of a row, its rows and blocks ahead, with subgroups and without."""

    def both(program: WgpuProgram) -> Array:
        handle = program.new_state()
        made = [program.prefill(handle, IDS[:40]), *program.decode([handle], IDS[40:41])]
        program.release(handle)
        return np.stack(made)

    wanted = both(loaded)
    for threads, rows, subgroups, units in tuning.forms(Gpu(adapters()[0])):
        tiling = replace(SOFTWARE, threads_per_row=threads, rows_per_thread=rows, subgroups=subgroups, ahead=units)
        monkeypatch.setattr(runtime, "tuned", lambda *_, tiling=tiling: tuning.Tuning(tiling))
        program = WgpuRuntime().load(moe)
        assert np.abs(both(program) - wanted).max() <= 1e-5 * np.abs(wanted).max()
        program.close()


def test_experts_that_a_binding_does_not_hold(moe: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are bound by parts, four of eight experts in each. A prompt's bits do not depend on it."""
    monkeypatch.setattr(Gpu, "coherent", False)  # sums of kernels that go on would be larger than a binding
    outcomes = []
    for most in (Gpu(adapters()[0]).binding_bytes, 100_000):
        monkeypatch.setattr(Gpu, "binding_bytes", most)
        program = WgpuRuntime().load(moe)
        assert program._loaded is not None
        parts = program._loaded._weights.matrices["layer1_experts_gate_up"].parts
        handle = program.new_state()
        prompt = program.prefill(handle, IDS[:50])
        outcomes.append(([(p.first, p.rows) for p in parts], prompt, program.decode([handle], [7])))
        program.close()
    (whole, prompt, step), (cut, again, near) = outcomes
    assert (whole, cut) == ([(0, 768)], [(0, 384), (384, 384)])
    assert prompt.tobytes() == again.tobytes()
    assert np.abs(near - step).max() <= 1e-5 * np.abs(step).max()


def test_more_tiles_than_a_dispatch_takes_are_refused(moe: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the model is loaded: a submission of them would end the process. 64 tokens make 32 tiles of 8 experts."""
    monkeypatch.setattr(op, "MOST_GROUPS", 31)
    with pytest.raises(ProgramError, match=r"a dispatch of \(6, 32\) workgroups is more than any device takes"):
        WgpuRuntime().load(moe)
    monkeypatch.setattr(op, "MOST_GROUPS", 32)
    WgpuRuntime().load(moe).close()


def test_an_expert_larger_than_a_binding_is_refused(moe: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gpu, "binding_bytes", 4 * 2 * 48 * 64 - 16)
    said = r"an expert of layer1_experts_gate_up takes 0.0246 MB, and vulkan binds at most 0.0246 MB; the weights take"
    with pytest.raises(ProgramError, match=said):
        WgpuRuntime().load(moe)


@pytest.mark.parametrize("variant", ["lfm2-moe", "granite-moe"])
def test_experts_are_packed_one_after_another(artifacts: TinyArtifacts, variant: str) -> None:
    """And routers stay float32 in every quantization."""
    source = Source.open(artifacts.source(f"wgpu-{variant}-f32"))
    family = family_of(source.config)
    config = family.parse(source.config)
    plan = packed_plan(family, config, 512)
    shapes, rows, bound = plan.packed(), rows_of(family, config, plan, source), family.bindings(config)
    assert rows.keys() == shapes.keys()
    for name in plan.expert_rows():
        prefix, _, kind = name.partition("_experts_")
        if kind == "down":
            wanted = bound[name](source).reshape(shapes[name])
        else:
            both = [bound[f"{prefix}_experts_{part}"](source) for part in ("gate", "up")]
            wanted = np.concatenate(both, 1).reshape(shapes[name])
        assert (np.concatenate(list(rows[name]())) == wanted).all()
    formats: tuple[Format, ...] = ("f16", "int8", "int4")
    for quantization in formats:
        exact = [n for n, s in shapes.items() if pack.is_matrix(n, s) and pack.format_of(n, quantization) == "f32"]
        assert exact == [f"layer{i}_router" for i, layer in enumerate(plan.layers) if layer.experts]
        assert recipe_of(plan, quantization)["weights"].endswith("; those of routers float32")
