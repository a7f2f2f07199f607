"""The wgpu runtime beside the contract: memory, limits, packed files, and what it says where there is no GPU."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny
from conftest import TinyArtifacts
from contract.driving import decode, started
from daemon import daemon, whole_text
from pydantic import ValidationError
from typer.testing import CliRunner

from ssmd.build.builder import BuildError
from ssmd.cli import app
from ssmd.families.offsets import is_exact
from ssmd.families.registry import family_of
from ssmd.machine.cache import forget
from ssmd.model.artifact import Artifact
from ssmd.model.plan import Attention, Layer
from ssmd.model.source import Source
from ssmd.model.state import State
from ssmd.runtime.hoststate.graph import GraphError
from ssmd.runtime.protocol import ProgramError, RuntimeUnavailable, StateLost
from ssmd.runtime.verify import verify
from ssmd_wgpu import device, pack, products, program, runtime, slots, trial, tuning
from ssmd_wgpu import recorder as recorder_module
from ssmd_wgpu.build import CONVERTER, RECIPES, packed_plan, packed_rows, recipe_of, rows_of
from ssmd_wgpu.device import Gpu, GpuAdapter, adapters, devices, no_adapter
from ssmd_wgpu.model import Model
from ssmd_wgpu.pack import Weights
from ssmd_wgpu.plan import PackedPlan
from ssmd_wgpu.products import SOFTWARE, Tiling
from ssmd_wgpu.program import WgpuProgram
from ssmd_wgpu.reference import Reference
from ssmd_wgpu.runtime import WgpuRuntime
from ssmd_wgpu.slots import Slot

pytestmark = pytest.mark.skipif(not adapters(), reason="no adapter: apt install mesa-vulkan-drivers libvulkan1")
IDS: list[int] = np.random.default_rng(3).integers(0, 384, 400).tolist()


@pytest.fixture(scope="module")
def granite(artifacts: TinyArtifacts) -> Artifact:
    return Artifact.open(artifacts["wgpu-granite-f32"])


@pytest.fixture(scope="module")
def loaded(granite: Artifact) -> Iterator[WgpuProgram]:
    made = WgpuRuntime().load(granite)
    yield made
    made.close()


def model_of(program: Any) -> Model:
    model: Model = program._loaded
    return model


def gpu_of(program: Any) -> Gpu:
    return model_of(program).gpu


def conversation(program: WgpuProgram, seed: int) -> bytes:
    handle = started(program, IDS[seed : seed + 40])
    out = decode(program, handle, IDS[seed : seed + 3])
    program.release(handle)
    return out.tobytes()


# Memory.


def test_handles_beyond_the_device_limit_wait_in_host_memory(
    loaded: WgpuProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit what they are on the device: decode calls of more handles than fit, saves and clones of one away."""
    alone: list[tuple[Any, State]] = []
    for i in range(5):
        handle = started(loaded, IDS[i : i + 30 + i])
        alone.append((decode(loaded, handle, IDS[:3]), loaded.save(handle)))
        loaded.release(handle)
    monkeypatch.setattr(loaded.handles, "resident", 2)
    them = [started(loaded, IDS[i : i + 30 + i]) for i in range(5)]
    assert sum(h.away is not None for h in them) == 3
    assert [loaded.position(h) for h in them] == [30, 31, 32, 33, 34]
    rows = np.stack([loaded.decode(them, [i] * 5) for i in IDS[:3]])  # (3, 5, V)
    for i, handle in enumerate(them):
        assert rows[:, i].tobytes() == alone[i][0].tobytes()
        state = loaded.save(handle)
        assert all(state.tensors[n].tobytes() == a.tobytes() for n, a in alone[i][1].tensors.items())
    tail = loaded.save(them[0], since=20)
    assert tail.tensors["key_2"].tobytes() == alone[0][1].tensors["key_2"][:, 20:].tobytes()
    twin = loaded.clone(them[0])
    expected = loaded.decode([them[0]], [9])
    assert loaded.decode([twin], [9]).tobytes() == expected.tobytes()
    for handle in (*them, twin):
        loaded.release(handle)
    loaded.release(them[0])


def test_pages_anywhere_change_no_bit(granite: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches that grow page by page, in turn with others', through buffers that grow under them and shrink again."""
    monkeypatch.setattr(slots, "PAGE", 64)

    def read(first: int, others: int) -> tuple[bytes, list[int], State]:
        monkeypatch.setattr(slots, "_FIRST_PAGES", first)
        one = WgpuRuntime().load(granite)
        handle, beside = one.new_state(), [one.new_state() for _ in range(others)]
        logits = []
        for at in range(0, 200, 25):
            logits.append(one.prefill(handle, IDS[at : at + 25]))
            for other in beside:
                one.prefill(other, IDS[at : at + 50])
        while beside:
            one.release(beside.pop())
        twin = one.clone(handle)
        logits += [one.decode([twin], [7])[0], one.decode([handle], [7])[0]]
        state, pages = one.save(handle, since=30), handle.slot.pages
        again = one.restore(one.save(twin))
        logits += [one.decode([again], [9])[0], one.decode([handle], [9])[0]]
        one.close()
        return np.stack(logits).tobytes(), pages, state

    large, small = read(40, 0), read(1, 2)
    assert large[1] == [0, 1, 2, 3]
    assert sorted(small[1]) != list(range(small[1][0], small[1][0] + 4))
    assert small[0] == large[0]
    assert all(small[2].tensors[name].tobytes() == array.tobytes() for name, array in large[2].tensors.items())


def test_memory_follows_the_handles(granite: Artifact) -> None:
    """Buffers of states and of pages double as they are needed, and halve when three quarters are free."""
    one = WgpuRuntime().load(granite)
    found = model_of(one).slots
    sizes = []
    them: list[Any] = []
    for count in (1, 3, 9, 16, 5, 4, 2, 1, 0):
        while len(them) < count:
            them.append(started(one, IDS[:20]))
        while len(them) > count:
            one.release(them.pop())
        sizes.append((found._count, found._page_count))
    assert sizes == [(1, 2), (4, 4), (16, 16), (16, 16), (16, 16), (8, 8), (4, 8), (4, 8), (4, 8)]
    handle = started(one, IDS[:300])
    assert (handle.slot.index, handle.slot.pages) == (0, [0, 1])
    one.close()


def test_parts_of_the_embedding(artifacts: TinyArtifacts, monkeypatch: pytest.MonkeyPatch) -> None:
    """A matrix larger than a binding: more dispatches, the same bits."""
    artifact = Artifact.open(artifacts["wgpu-mamba-f32"])
    size = 4 * artifact.manifest.vocabulary * 48
    outcomes = []
    for most in (Gpu(adapters()[0]).binding_bytes, size * 4 // 5, size * 4 // 5 + 100):
        monkeypatch.setattr(Gpu, "binding_bytes", most)
        one = WgpuRuntime().load(artifact)
        counts = (len(model_of(one).embed), len(model_of(one).decode(1)))
        outcomes.append((counts, conversation(one, 5)))
        one.close()
    whole = outcomes[0][0][1]
    assert [counts for counts, _ in outcomes] == [(1, whole), (2, whole + 2), (2, whole + 2)]
    assert len({logits for _, logits in outcomes}) == 1


def test_recording_by_wgpu_py_gives_the_same_bits(
    granite: Artifact, loaded: WgpuProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = conversation(loaded, 21)
    monkeypatch.setenv("SSMD_WGPU_WRAPPED", "1")
    one = WgpuRuntime().load(granite)
    made: list[Any] = []
    real = gpu_of(one).device.create_command_encoder

    def counted() -> Any:
        made.append(real())
        return made[-1]

    monkeypatch.setattr(gpu_of(one).device, "create_command_encoder", counted)
    assert conversation(one, 21) == expected
    assert len(made) >= 4  # a prefill and three steps
    one.close()


def test_a_prefill_submitted_in_parts_gives_the_same_bits(loaded: WgpuProgram, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = conversation(loaded, 33)
    monkeypatch.setattr(program, "_AT_ONCE", 7)
    submitted: list[int] = []
    real = gpu_of(loaded).recorder.submit

    def counted(dispatches: Any, *more: Any, **options: Any) -> None:
        submitted.append(len(dispatches))
        real(dispatches, *more, **options)

    monkeypatch.setattr(gpu_of(loaded).recorder, "submit", counted)
    assert conversation(loaded, 33) == expected
    assert submitted.count(7) > 5


def test_a_step_that_is_submitted_in_parts_gives_the_same_bits(
    loaded: WgpuProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, which computes a part while the next one is recorded."""
    expected = conversation(loaded, 35)
    recorder = gpu_of(loaded).recorder
    submitted: list[int] = []
    real = recorder.submit

    def counted(dispatches: Any, *more: Any, **options: Any) -> None:
        submitted.append(len(dispatches))
        real(dispatches, *more, **options)

    monkeypatch.setattr(recorder, "early", True)
    monkeypatch.setattr(recorder_module, "_FIRST", 2)
    monkeypatch.setattr(recorder, "submit", counted)
    assert conversation(loaded, 35) == expected
    step = len(model_of(loaded).decode(1))
    assert submitted[-3:] == [2, 4, step - 6]


def test_parts_of_a_step_double() -> None:
    sizes = {n: [len(p) for p in recorder_module.growing([()] * n)] for n in (0, 16, 17, 98, 166)}  # type: ignore[list-item]
    assert sizes == {0: [0], 16: [16], 17: [8, 9], 98: [8, 16, 32, 42], 166: [8, 16, 32, 110]}


def test_bindings_that_are_too_small(granite: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gpu, "binding_bytes", 50_000)
    with pytest.raises(ProgramError, match=r"needs a binding of .* gives 0 MB .*: build with --quant int8"):
        WgpuRuntime().load(granite)


@pytest.mark.parametrize(
    ("bindings", "coherent", "backend", "dispatches"),
    [
        (16, True, "vulkan", 14),
        (12, True, "vulkan", 15),
        (9, True, "vulkan", 19),
        (16, False, "vulkan", 23),
        (16, True, "metal", 23),
    ],
)
def test_an_adapter_that_cannot_go_on_with_the_next_product(
    granite: Artifact,
    loaded: WgpuProgram,
    monkeypatch: pytest.MonkeyPatch,
    bindings: int,
    coherent: bool,
    backend: str,
    dispatches: int,
) -> None:
    """For lack of bindings, or where workgroups do not see what others wrote: more dispatches, the same bits."""
    real = gpu_of(loaded).found
    limits = {name: real.adapter.limits[name] for name in device.LIMITS}
    limits["max-storage-buffers-per-shader-stage"] = bindings
    features = [name for name in real.adapter.features if coherent or name != device.COHERENT]
    few = SimpleNamespace(
        limits=limits, features=features, info=real.adapter.info, request_device_sync=real.adapter.request_device_sync
    )
    monkeypatch.setattr(runtime, "choose_adapter", lambda _: replace(real, adapter=few, backend=backend))
    one = WgpuRuntime().load(granite)
    assert len(model_of(one).decode(1)) == dispatches
    assert conversation(one, 13) == conversation(loaded, 13)
    one.close()


def test_too_little_memory_is_said_before_anything_is_uploaded(
    granite: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken, written = [], []
    real = Gpu.region

    def region(self: Gpu, nbytes: int) -> Any:
        taken.append(nbytes)
        if sum(taken) > 200_000:
            raise GraphError("no memory for 0.1 MB on vulkan: Out of Memory")
        return real(self, nbytes)

    monkeypatch.setattr(Gpu, "region", region)
    monkeypatch.setattr(Gpu, "write", lambda *a: written.append(a))
    with pytest.raises(ProgramError, match=r"no memory.*the weights take \d+ MB, --quant f16 takes \d+ MB, --qu"):
        WgpuRuntime().load(granite)
    assert not written


def refused_once(loaded: WgpuProgram, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """The next slot there is no memory for. The list is empty until then."""
    refused, take = list[bool](), model_of(loaded).slots.take

    def slot() -> Slot:
        if not refused:
            refused.append(True)
            raise GraphError("no memory")
        return take()

    monkeypatch.setattr(model_of(loaded).slots, "take", slot)
    return refused


def test_handles_without_memory_send_others_away(loaded: WgpuProgram, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = conversation(loaded, 11)
    first = started(loaded, IDS[:20])
    refused = refused_once(loaded, monkeypatch)
    assert conversation(loaded, 11) == expected
    assert refused
    assert first.away is not None
    loaded.release(first)


def test_a_step_whose_handles_take_one_anothers_memory(loaded: WgpuProgram, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last of three comes back by sending the first away: the step is made in two."""
    expected = []
    for i in range(3):
        alone = started(loaded, IDS[i : i + 20])
        expected.append(decode(loaded, alone, [i, 7]).tobytes())
        loaded.release(alone)
    them = [started(loaded, IDS[i : i + 20]) for i in (2, 0, 1)]
    while them[0].away is None:
        assert loaded.handles._send_away(model_of(loaded), them[1])
    refused = refused_once(loaded, monkeypatch)
    order = [1, 2, 0]
    rows = [loaded.decode([them[i] for i in order], tokens) for tokens in ([0, 1, 2], [7, 7, 7])]
    assert refused
    assert [row.tobytes() for row in np.stack(rows, 1)] == expected
    for handle in them:
        loaded.release(handle)


# Quantization and files.


@pytest.mark.parametrize("quantization", ["f16", "int8", "int4"])
@pytest.mark.parametrize("variant", ["granite", "falcon-mamba", "lfm2", "qwen3.5", "lfm2-moe"])
def test_kernels_compute_with_the_dequantized_weights_of_a_file(
    quantization: pack.Format, variant: str, artifacts: TinyArtifacts, tmp_path: Path
) -> None:
    """Whole models, against the reference in float64 on the dequantized weights."""
    source = Source.open(artifacts.source(f"wgpu-{variant}-f32"))
    made = CONVERTER.build(source, tmp_path / "made", name="tiny", quantization=quantization, tiers=[512])
    plan = PackedPlan.open(made.file("plan.json"))
    shapes = plan.packed()
    weights = Weights(made.file("weights.safetensors"), shapes)

    expected = Reference(plan, packed_rows(weights)).logits(IDS[:40], range(40))
    one = WgpuRuntime().load(made)
    handle = one.new_state()
    steps = np.concatenate([one.decode([handle], [i]) for i in IDS[:40]])
    again = one.new_state()
    prompt = one.prefill(again, IDS[:40])
    one.close()
    # Keys and values are float16 in these artifacts.
    tolerance = 2e-5 if variant == "falcon-mamba" else 2e-3
    for found, wanted in ((steps, expected), (prompt, expected[-1])):
        assert np.abs(found - wanted).max() <= tolerance * np.abs(wanted).max()


def test_the_same_source_gives_the_same_bytes(artifacts: TinyArtifacts, tmp_path: Path) -> None:
    source = Source.open(artifacts.source("wgpu-granite-f32"))
    one, two = (
        CONVERTER.build(source, tmp_path / n, name="tiny", quantization="int4", tiers=[512]) for n in ("one", "two")
    )
    assert one.manifest.build == two.manifest.build
    for name in one.manifest.files:
        if name != "golden.safetensors":
            assert one.file(name).read_bytes() == two.file(name).read_bytes()


def test_it_is_built_without_pytorch(artifacts: TinyArtifacts, tmp_path: Path) -> None:
    blocked = "import sys; sys.modules.update(dict.fromkeys(('torch', 'nncf', 'litert_torch', 'wgpu'))); "
    source = artifacts.source("wgpu-granite-f32")
    command = ["build", str(source), "--runtime", "wgpu", "--models-dir", str(tmp_path), "--context", "512"]
    done = subprocess.run(
        [sys.executable, "-c", f"{blocked}sys.argv = ['ssmd', *{command!r}]; from ssmd.cli import main; main()"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    [folder] = (tmp_path / source.name).iterdir()
    assert folder.name == "wgpu-gpu-int8"
    one = WgpuRuntime().load(Artifact.open(folder))
    assert verify(Artifact.open(folder), one).passed
    one.close()


@pytest.mark.parametrize("quantization", ["f32", "int8", "int4"])
def test_a_plans_reference_is_the_module_of_pytorch(
    quantization: pack.Format, artifacts: TinyArtifacts, tmp_path: Path
) -> None:
    """The other runtime's golden values come from the module that transformers checked."""
    source = Source.open(artifacts.source("wgpu-granite-f32"))
    made = CONVERTER.build(source, tmp_path / "made", name="tiny", quantization=quantization, tiers=[512])
    from safetensors.numpy import load_file

    ours, theirs = (
        load_file(Artifact.open(path).file("golden.safetensors")) for path in (made.path, artifacts["granite-f32"])
    )
    assert ours["tokens"].tolist() == theirs["tokens"].tolist()
    assert np.abs(ours["logits"] - theirs["logits"]).max() <= 1e-5 * np.abs(theirs["logits"]).max()


def altered(artifact: Artifact, folder: Path, **header: Any) -> Path:
    """A copy of the file of weights whose header says something else of `tensor`; None takes it out."""
    file = folder / "weights.safetensors"
    raw = artifact.file("weights.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    entries = json.loads(raw[8 : 8 + length])
    for name, change in header.items():
        if change is None:
            entries["stranger"] = entries.pop(name)
        else:
            entries[name] |= change
    text = json.dumps(entries, separators=(",", ":")).encode().ljust(length)
    file.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])
    return file


def test_files_that_do_not_fit_their_plan(granite: Artifact, tmp_path: Path) -> None:
    shapes = PackedPlan.open(granite.file("plan.json")).packed()
    n, k = shapes["layer0_in"]
    for change, said in (
        ({"layer0_in": {"shape": [k, n]}}, r"layer0_in is F32 \[96, .* the plan says F32"),
        ({"layer0_in": {"dtype": "I32"}}, "layer0_in is I32; this ssmd packs F32, F16, I8, U8"),
        ({"layer0_in": None}, "no 'layer0_in'"),
        ({"layer0_D": {"dtype": "I32"}}, "layer0_D is I32"),
        ({"layer0_in": {"dtype": "F64"}}, "do not fit its shape"),
    ):
        with pytest.raises(ProgramError, match=said):
            Weights(altered(granite, tmp_path, **change), shapes)
    with pytest.raises(ProgramError, match="'norm', which the plan has no use for"):
        Weights(granite.file("weights.safetensors"), {k: v for k, v in shapes.items() if k != "norm"})
    cut = tmp_path / "weights.safetensors"
    cut.write_bytes(granite.file("weights.safetensors").read_bytes()[:-100])
    with pytest.raises(ProgramError, match="should have"):
        Weights(cut, shapes)
    cut.write_bytes(b"")
    with pytest.raises(ProgramError, match="cannot be read"):
        Weights(cut, shapes)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format": 2}, "format: Input should be 1"),
        ({"hidden": 0}, "hidden"),
        ({"hidden": 1 << 40}, "hidden"),
        ({"eps": float("nan")}, "eps|JSON"),
        ({"layers": []}, "layers"),
        ({"more": 1}, "more: Extra inputs"),
    ],
)
def test_plans_that_make_no_sense(granite: Artifact, tmp_path: Path, change: dict[str, Any], said: str) -> None:
    fields = json.loads(granite.file("plan.json").read_text())
    (tmp_path / "plan.json").write_text(json.dumps(fields | change))
    with pytest.raises(ProgramError, match=said):
        PackedPlan.open(tmp_path / "plan.json").packed()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"groups": 5}, "5 groups do not divide 12 heads"),
        ({"width": 1}, "width"),
        ({"states": 5000}, "states"),
        ({"kind": "rwkv"}, "kind"),
        ({"dt_low": -1.0}, "dt_low"),
    ],
)
def test_layers_that_make_no_sense(granite: Artifact, tmp_path: Path, change: dict[str, Any], said: str) -> None:
    fields = json.loads(granite.file("plan.json").read_text())
    fields["layers"][0]["mixers"][0] |= change
    (tmp_path / "plan.json").write_text(json.dumps(fields))
    with pytest.raises(ProgramError, match=said):
        PackedPlan.open(tmp_path / "plan.json")


def test_a_plan_with_another_state_than_its_manifest(granite: Artifact, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(granite.path, folder)
    fields = json.loads((folder / "plan.json").read_text())
    fields["layers"][0]["mixers"][0]["states"] = 16
    (folder / "plan.json").write_text(json.dumps(fields))
    with pytest.raises(ProgramError, match="another state than its manifest"):
        WgpuRuntime().load(Artifact(folder, granite.manifest))
    twice, alone = ({**fields["layers"][1], "mixers": fields["layers"][1]["mixers"] * n} for n in (2, 0))
    for layer, said in ((twice, "state tensor names repeat"), (alone, "needs at least one tensor")):
        (folder / "plan.json").write_text(json.dumps(fields | {"layers": [layer]}))
        with pytest.raises(ProgramError, match=f"{said}.*build it again"):
            WgpuRuntime().load(Artifact(folder, granite.manifest))
    (folder / "plan.json").write_text(json.dumps(fields | {"layers": [fields["layers"][1]] * 2000}))
    with pytest.raises(ProgramError, match="layers"):
        WgpuRuntime().load(Artifact(folder, granite.manifest))


def test_values_that_a_format_cannot_hold() -> None:
    with pytest.raises(pack.PackError, match="beyond float16"):
        pack.encode(np.full((1, 8), 7e4, np.float32), "f16")
    values, scale = pack.encode(np.zeros((2, 33), np.float32), "int8")
    assert not values.any()
    assert np.isfinite(scale).all()
    assert not pack.decoded(33, "int4", *pack.encode(np.zeros((2, 33), np.float32), "int4")).any()


@pytest.mark.parametrize(("fmt", "most"), [("f32", 0), ("f16", 5e-4), ("int8", 1 / 254), ("int4", 1 / 8 + 1e-4)])
def test_rounding_is_as_fine_as_the_format(fmt: pack.Format, most: float) -> None:
    """In parts of the largest value of the row. int4 has no level 8: what is as large as the largest value of its block
    and of the other sign is a whole step off."""
    rows = np.random.default_rng(1).standard_normal((40, 70)).astype(np.float32)
    found = pack.decoded(70, fmt, *pack.encode(rows, fmt))
    assert (np.abs(found - rows).max(1) <= (most + 1e-7) * np.abs(rows).max(1)).all()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"mamba_d_conv": 10}, "width 10 of a convolution is more than 9; build it for litert or openvino"),
        ({"mamba_d_state": 2048}, "states 2048 are more than 1024; build it for litert or openvino"),
        ({"head_dim": 2048}, "head_dim 2048 is more than 1024; build it for litert or openvino"),
        ({"head_dim": 15}, "^head_dim 15 is odd; runtime wgpu keeps keys and values in pairs; build it for litert"),
    ],
)
def test_a_model_that_no_shader_runs_says_what_builds_it(fields: dict[str, Any], said: str) -> None:
    config = {"model_type": "granitemoehybrid", "vocab_size": 384, **tiny.GRANITE, **fields}
    family = family_of(config)
    with pytest.raises(BuildError, match=said):
        packed_plan(family, family.parse(config), 512)


def test_a_kind_of_layer_without_a_shader_is_refused() -> None:
    """A field that a later plan has is not passed over: the model would be another one, and say nothing."""

    class Sunk(Attention):
        sinks: int | None = None

    def packed(**fields: Any) -> PackedPlan:
        attention = Sunk(heads=2, kv_heads=1, head_dim=16, bias=False, qk_eps=None, rotated=0, **fields)
        layer = Layer.model_construct(mixers=(attention,), mlp=None, sandwich=False)
        plan = {"hidden": 32, "vocabulary": 384, "eps": 1e-5, "embedding_scale": 1.0, "tied": True, "context": 512}
        return PackedPlan.model_validate({**plan, "layers": (layer,)})

    assert packed().mixers
    with pytest.raises(ValidationError, match="runtime wgpu has no shader for sinks 4"):
        packed(sinks=4)


@pytest.mark.parametrize("name", ["key", "value"])
def test_keys_of_deltanet_larger_than_a_workgroup(name: str) -> None:
    config = {"model_type": "qwen3_5_text", "vocab_size": 384, **tiny.QWEN3_5, f"linear_{name}_head_dim": 260}
    family = family_of(config)
    said = f"^{name}_dim 260 of gated DeltaNet is more than 256; build it for litert or openvino"
    with pytest.raises(BuildError, match=said):
        packed_plan(family, family.parse(config), 512)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, "^layers with sandwich norms are not supported by runtime wgpu; build it for litert or openvino"),
        (
            {"use_sandwich_norm": False},
            "^attention within a window of 24 tokens is not supported by runtime wgpu; build",
        ),
        (
            {"use_sandwich_norm": False, "layer_types": ["full_attention"] * 5},
            "^attention with gates of heads is not supported by runtime wgpu; build it for litert or openvino",
        ),
    ],
)
def test_lfm3_says_what_builds_it(fields: dict[str, Any], said: str) -> None:
    config = {"model_type": "lfm3", "vocab_size": 384, **tiny.LFM3, **fields}
    family = family_of(config)
    with pytest.raises(BuildError, match=said):
        packed_plan(family, family.parse(config), 512)


@pytest.mark.parametrize("quantization", ["f16", "int8", "int4"])
def test_what_decides_on_forgetting_stays_float32(quantization: pack.Format) -> None:
    """As in the graphs of the other runtimes; and a recipe says so where a model has it."""
    config = {"model_type": "qwen3_5_text", "vocab_size": 384, **tiny.QWEN3_5}
    family = family_of(config)
    plan = packed_plan(family, family.parse(config), 512)
    matrices = [name for name, size in plan.packed().items() if pack.is_matrix(name, size)]
    exact = [name for name in matrices if pack.format_of(name, quantization) == "f32"]
    assert exact == [name for name in matrices if is_exact(name)] == [f"layer{i}_ba" for i in range(3)]
    assert recipe_of(plan, quantization)["weights"].endswith("; those of gated DeltaNet's b and a float32")
    without = plan.model_copy(update={"layers": plan.layers[3:]})
    assert recipe_of(without, quantization) == RECIPES.get(quantization, {})


def test_rows_are_of_everything_in_the_file(artifacts: TinyArtifacts) -> None:
    source = Source.open(artifacts.source("wgpu-granite-f32"))
    family = family_of(source.config)
    config = family.parse(source.config)
    plan = packed_plan(family, config, 512)
    assert set(rows_of(family, config, plan, source)) == set(plan.packed())


# Adapters.


def test_devices_are_named_by_their_interface() -> None:
    found = devices()
    assert found[0].name == "gpu"
    assert [d.name for d in found[1:]] == [a.name for a in adapters()]
    if len(found) > 1:
        assert found[0].description == found[1].description


def test_no_such_device(granite: Artifact) -> None:
    with pytest.raises(RuntimeUnavailable, match="no device 'cuda' here; it has: gpu"):
        WgpuRuntime().load(granite, device="cuda")


def test_an_adapter_that_gives_too_little(granite: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(device._NEEDED, "max-compute-invocations-per-workgroup", 4096)
    assert all("max-compute-invocations-per-workgroup is 1024, 4096" in d.why_not for d in devices())
    with pytest.raises(RuntimeUnavailable, match="cannot be used: its max-compute-invocations-per-workgroup is 1024"):
        WgpuRuntime().load(granite)


def test_opengl_without_compute_shaders_is_not_usable() -> None:
    """Its limits say nothing of that: as on NVIDIA's, whose OpenGL wgpu gets as 3.3."""
    if "gl" not in {a.name for a in adapters()}:
        pytest.skip("no adapter gl here: apt install libegl1 libgl1-mesa-dri")
    asked = "from ssmd_wgpu.device import devices; print({d.name: d.why_not for d in devices()})"
    old = {"MESA_GL_VERSION_OVERRIDE": "3.3", "MESA_GLSL_VERSION_OVERRIDE": "330"}
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, env={**os.environ, **old})
    said = ast.literal_eval(done.stdout)
    assert said["gl"].startswith("it cannot be opened: "), said
    assert said["gpu"] == said["vulkan"] == ""


def without_drivers(*arguments: str) -> subprocess.CompletedProcess[str]:
    nowhere = {"VK_DRIVER_FILES": "/nowhere", "VK_ICD_FILENAMES": "/nowhere", "LIBGL_DRIVERS_PATH": "/nowhere"}
    nowhere["__EGL_VENDOR_LIBRARY_FILENAMES"] = "/nowhere"
    return subprocess.run(
        [sys.executable, "-m", "ssmd", *arguments], capture_output=True, text=True, env={**os.environ, **nowhere}
    )


def test_a_machine_without_a_driver(artifacts: TinyArtifacts, granite: Artifact) -> None:
    report = without_drivers("doctor", "--models-dir", str(artifacts.folder))
    assert "  no  runtime wgpu: wgpu finds no GPU driver; install one: on Debian" in report.stdout
    done = without_drivers("verify", str(granite.path))
    assert done.returncode == 1
    assert "wgpu finds no GPU driver; install one" in done.stderr
    assert "Traceback" not in done.stderr


def test_what_to_install_depends_on_the_system() -> None:
    texts = [no_adapter(platform) for platform in ("linux", "darwin", "win32")]
    assert "mesa-vulkan-drivers" in texts[0]
    assert "macOS" in texts[1]
    assert "driver of your graphics card" in texts[2]


# Tilings.


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Tilings are measured, of few weights, and kept here."""
    monkeypatch.setenv("SSMD_DATA_DIR", str(tmp_path))
    monkeypatch.setattr(GpuAdapter, "software", False)
    sizes: tuple[tuple[str, float], ...]
    sizes = ("TOKENS", 40), ("ROUNDS", 1), ("REPEATS", 2), ("FEW", 1), ("POOL_BYTES", 1 << 20), ("WARM_S", 0)
    monkeypatch.setattr(tuning, "STREAMS", 2)
    for name, size in sizes:
        monkeypatch.setattr(tuning, name, size)
    monkeypatch.setattr(tuning, "LIMIT_S", 600)
    monkeypatch.setattr(tuning, "FORMS", ((16, 4, False, 1), (8, 2, False, 2)))
    monkeypatch.setattr(tuning, "tiles", lambda gpu: [(32, 1), (64, 1)])
    monkeypatch.setattr(tuning, "SEVERAL", (2,))
    monkeypatch.setattr(trial, "_WARM_S", 0)
    return tmp_path / "tunings"


def test_a_tiling_is_measured_once(small: Path, granite: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each shape of the model has a form; a second load reads them, and what the trial found, and answers alike."""
    one = WgpuRuntime().load(granite)
    [file] = small.iterdir()
    assert file.name.startswith(granite.manifest.build[:24])
    tiling = model_of(one).tiling
    plan = PackedPlan.open(granite.file("plan.json"))
    assert {name for name, _ in tiling.shapes} == {products.shape(*key[:3]) for key in tuning.shapes_of(plan, "f32")}
    assert one.producer.endswith(f"; {tiling}")
    assert one.step_cost(8) == model_of(one).step_s[8] / model_of(one).step_s[1]
    expected = decode(one, started(one, IDS[:40]), IDS[:3]).tobytes()
    producer, cost = one.producer, one.step_cost(8)
    one.close()
    monkeypatch.setattr(tuning, "measured", lambda *_: pytest.fail("measured again"))
    monkeypatch.setattr(trial, "alike", lambda *_: pytest.fail("tried again"))
    again = WgpuRuntime().load(granite)
    assert (again.producer, again.step_cost(8)) == (producer, cost)
    assert set(model_of(again)._steps) == {1}
    assert decode(again, started(again, IDS[:40]), IDS[:3]).tobytes() == expected
    again.close()
    forget(granite.manifest.build)
    assert not list(small.iterdir())


def test_bench_explains_its_forms_and_measures_anew(
    small: Path, granite: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first load measures, `--retune` measures again; another adapter's tiling stays."""
    alike = trial.alike  # whether these small forms agree in company depends on the one that is quickest here
    monkeypatch.setattr(trial, "alike", lambda model: alike(model) or True)
    command = ["bench", str(granite.path), "--repeats", "1", "--json", "--explain"]
    first = CliRunner().invoke(app, command)
    assert first.exit_code == 0, first.output
    times = json.loads(first.stdout)["forms"]
    kernels = {one["kernel"] for one in times}
    plan = PackedPlan.open(granite.file("plan.json"))
    for rows, columns, fmt, count in tuning.shapes_of(plan, "f32"):
        assert f"matvec {products.shape(rows, columns, fmt)}, {count} in the model" in kernels
    for kernel in kernels:
        assert sum(one["chosen"] for one in times if one["kernel"] == kernel) == 1, kernel
    [file] = small.iterdir()
    other = file.with_name(f"{file.name[:24]}-0123456789abcdef.json")
    other.write_text("another adapter's")
    measured, counts = tuning.measured, list[int]()

    def counted(*given: Any) -> tuning.Tuning:
        counts.append(1)
        return measured(*given)

    monkeypatch.setattr(tuning, "measured", counted)
    again = CliRunner().invoke(app, [*command[:-2], "--retune"])
    assert again.exit_code == 0, again.output
    assert len(counts) == 1, "its second load reads them"
    assert "matvec" in again.stdout
    assert "* " in again.stdout
    assert {one.name for one in small.iterdir()} == {file.name, other.name}
    assert other.read_text() == "another adapter's"


def test_bench_on_a_software_adapter_measured_no_forms(granite: Artifact) -> None:
    done = CliRunner().invoke(app, ["bench", str(granite.path), "--repeats", "1", "--retune"])
    assert done.exit_code == 0, done.output
    assert "forms of kernels: none were measured" in done.stdout


@pytest.mark.parametrize("name", ["matvec", "product", "weights", "ssd_output"])
def test_a_tiling_is_of_these_shaders(
    loaded: WgpuProgram, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Also of those that others include, and of Mamba-2's; and of the driver."""
    shaders = tmp_path / "shaders"
    shutil.copytree(device.SHADERS, shaders)
    gpu = gpu_of(loaded)
    before = tuning.kept_in(gpu, "build")
    monkeypatch.setattr(tuning, "SHADERS", shaders)
    assert tuning.kept_in(gpu, "build") == before
    (shaders / f"{name}.wgsl").write_text("")
    assert tuning.kept_in(gpu, "build") != before
    monkeypatch.setattr(tuning, "SHADERS", device.SHADERS)
    monkeypatch.setattr(GpuAdapter, "description", "the same card, another driver")
    assert tuning.kept_in(gpu, "build") != before


@pytest.mark.parametrize(
    "change",
    [
        lambda kept: "",
        lambda kept: "[]",
        lambda kept: json.dumps({"tiling": kept["tiling"]}),
        lambda kept: json.dumps({**kept, "tiling": {**kept["tiling"], "threads_per_row": 3}}),
        lambda kept: json.dumps({**kept, "tiling": {**kept["tiling"], "shapes": [["96x96 f32", [32, 2]]]}}),
        lambda kept: json.dumps({**kept, "step_s": 3}),
        lambda kept: json.dumps({**kept, "table": {"96x96 f32": {"one": {"16x4/1": 3}}}}),
    ],
)
def test_a_tiling_that_makes_no_sense_is_measured_again(
    small: Path, loaded: WgpuProgram, granite: Artifact, monkeypatch: pytest.MonkeyPatch, change: Any
) -> None:
    gpu, plan = gpu_of(loaded), PackedPlan.open(granite.file("plan.json"))
    best, times = Tiling(16, 4, 64, rows_of_several=2, shapes=(("96x96 f32", (16, 4, 0, 1, 2, 32, 1)),)), list[Any]()

    def measured(*asked: Any) -> tuning.Tuning:
        times.append(asked)
        return tuning.Tuning(best)

    monkeypatch.setattr(tuning, "measured", measured)
    for _ in range(2):
        assert tuning.tuned(gpu, plan, "int8", "build").tiling == best
    assert len(times) == 1
    [file] = small.iterdir()
    kept = json.loads(file.read_text())
    file.write_text(change(kept))
    assert tuning.tuned(gpu, plan, "int8", "build").tiling == best
    assert len(times) == 2
    assert json.loads(file.read_text()) == kept


def test_a_form_gives_way_only_to_one_that_beats_it_by_a_margin() -> None:
    assert tuning.picked({"usual": 1.0, "other": 0.98}) == "usual"
    assert tuning.picked({"usual": 1.0, "other": 0.9, "another": 0.89}) == "other"
    assert tuning.picked({"usual": 5.2e-6, "other": 4.95e-6}) == "usual"  # less than can be seen


def test_what_recording_takes_is_the_least_of_all_rounds(loaded: WgpuProgram, monkeypatch: pytest.MonkeyPatch) -> None:
    """A round whose recording was held up takes nothing off the others: 5 us of work are 5 us."""
    taken = iter([105.0, 100.0, 205.0, 300.0, 106.0, 101.0, 107.0, 100.0, 105.0, 102.0])  # whole, empty, whole, …
    monkeypatch.setattr(tuning._Bench, "_taken", lambda *_: next(taken) / 1e6)
    bench = tuning._Bench.__new__(tuning._Bench)
    one: Any = (None, None, None, 1, 1, None)
    assert bench.seconds({"a": [one]}, 1)["a"] == pytest.approx(5e-6)


@pytest.mark.parametrize(
    ("seconds", "error", "coherent", "fused"),
    [(0.5, 0.0, True, True), (0.98, 0.0, True, False), (0.5, 1e-5, True, False), (0.5, 0.0, False, False)],
)
def test_a_step_fuses_the_next_product_where_that_is_quicker(
    small: Path,
    loaded: WgpuProgram,
    granite: Artifact,
    monkeypatch: pytest.MonkeyPatch,
    seconds: float,
    error: float,
    coherent: bool,
    fused: bool,
) -> None:
    """And gives the same bits, on an adapter whose workgroups see what others wrote."""
    real = tuning._Bench.mlp

    def timed(self: Any, tiling: Tiling, quantization: pack.Format) -> tuple[float, Any]:
        _, found = real(self, tiling, quantization)
        return (seconds, found + np.float32(error)) if tiling.fused else (1.0, found)

    first = tuning.shapes_of(PackedPlan.open(granite.file("plan.json")), "int4")[:1]
    monkeypatch.setattr(tuning, "shapes_of", lambda *_: first)
    monkeypatch.setattr(tuning._Bench, "mlp", timed)
    monkeypatch.setattr(Gpu, "coherent", coherent)
    plan = PackedPlan.open(granite.file("plan.json"))
    assert tuning.measured(gpu_of(loaded), plan, "int4").tiling.fused == fused


@pytest.mark.parametrize(
    ("kernel", "simpler"), [("", 0), ("mlp", 1), ("ahead", tuning.FEW_ROWS), ("matvec", tuning.APART)]
)
def test_streams_that_differ_in_company_are_kept_apart(
    granite: Artifact, small: Path, monkeypatch: pytest.MonkeyPatch, kernel: str, simpler: int
) -> None:
    """A GPU's compiler may see to that. What differs is not used: first none is fused, then threads have few rows."""
    real = device.shader

    def shader(file: str, **sizes: Any) -> str:
        text = real(file, **sizes)
        wrong = {"mlp": ("mlp", 1), "ahead": ("matvec", 1), "matvec": ("matvec", 4)}.get(kernel)
        if (file, sizes.get("streams")) == wrong and (kernel != "ahead" or sizes["ahead"] > 1):
            text = text.replace("return fma(sum, rms, start);", "return fma(sum, rms * 1.000001, start);")
        return text

    monkeypatch.setattr(products, "shader", shader)
    tiling = replace(SOFTWARE, ahead=2)
    monkeypatch.setattr(runtime, "tuned", lambda *_: tuning.Tuning(tiling))
    one, together = WgpuRuntime().load(granite), simpler < tuning.APART
    assert model_of(one).tiling == tuning.Tuning(tiling, simpler=simpler).simplified
    assert (model_of(one).slots._count, model_of(one).slots._page_count) == (1, 2)
    assert set(model_of(one).step_s) == ({1, 2, 4, 8} if together else set())
    handles = [started(one, IDS[i : i + 20]) for i in range(4)]
    expected = []
    for i in range(4):
        alone = started(one, IDS[i : i + 20])
        expected.append(one.decode([alone], [i]).tobytes())
        one.release(alone)
    assert [row.tobytes() for row in one.decode(handles, [0, 1, 2, 3])] == expected
    one.close()


def test_what_a_step_costs(loaded: WgpuProgram, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as it has streams, where that was not tried, or they do not go together."""
    model = model_of(loaded)
    assert [loaded.step_cost(n) for n in (1, 3, 8, 20)] == [1, 3, 8, 20]
    monkeypatch.setattr(model, "step_s", {1: 2.0, 2: 2.5, 4: 3.0})
    assert [loaded.step_cost(n) for n in (1, 2, 3, 4, 5, 8)] == [1, 1.25, 1.5, 1.5, 5, 8]
    monkeypatch.setattr(model, "step_s", {1: 2.0, 2: 2.5, 4: 3.0, 8: 4.0})
    assert [loaded.step_cost(n) for n in (5, 8, 9, 20)] == [2, 2, 3, 5.5]
    monkeypatch.setattr(model, "tiling", replace(model.tiling, together=False))
    assert [loaded.step_cost(n) for n in (1, 8)] == [1, 8]


def test_every_tiling_computes_the_same(
    granite: Artifact, loaded: WgpuProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = np.frombuffer(conversation(loaded, 9), np.float32)
    """Also one with a form of its own for each shape, in turn."""
    gpu = gpu_of(loaded)
    forms, cuts = tuning.forms(gpu), tuning.tiles(gpu)
    some = [
        Tiling(t, r, *cuts[i % len(cuts)], s, bool(i % 2), ahead=a, rows_of_several=2)
        for i, (t, r, s, a) in enumerate(forms)
    ]
    assert len(some) > 2
    assert {t.chunked for t in some} == {t.subgroups for t in some} == {False, True}
    plan = PackedPlan.open(granite.file("plan.json"))
    names = [products.shape(*key[:3]) for key in tuning.shapes_of(plan, "f32")]
    own = [tuple(getattr(some[i % len(some)], key) for key in products.OWN) for i in range(len(names))]
    some.append(replace(some[0], fused=True, shapes=tuple(zip(names, own, strict=True))))
    for tiling in some:
        monkeypatch.setattr(runtime, "tuned", lambda *_, tiling=tiling: tuning.Tuning(tiling))
        one = WgpuRuntime().load(granite)
        found = np.frombuffer(conversation(one, 9), np.float32)
        assert np.abs(found - expected).max() <= 5e-5 * expected.std()
        assert str(tiling) in one.producer
        one.close()


# A device that goes away.


@pytest.mark.parametrize("name", ["vulkan", "gl"])
def test_a_lost_device_is_opened_again(granite: Artifact, name: str) -> None:
    if name not in {a.name for a in adapters() if not a.why_not}:
        pytest.skip(f"no adapter {name} here")
    one = WgpuRuntime().load(granite, device=name)
    handle, other = started(one, IDS[:50]), started(one, IDS[:20])
    state = one.save(handle)
    expected = decode(one, handle, IDS[:3]).tobytes()
    gpu_of(one).device.destroy()
    with pytest.raises(StateLost, match="was lost and is open again: ask once more"):
        one.decode([handle], [1])
    for use in (lambda: one.decode([handle], [1]), lambda: one.save(other), lambda: one.clone(other)):
        with pytest.raises(StateLost, match="was lost, with its device"):
            use()
    again = one.restore(state)
    assert decode(one, again, IDS[:3]).tobytes() == expected
    for gone in (handle, other, again):
        one.release(gone)
    for use in (one.new_state, lambda: one.restore(state)):  # whatever call is the first to find out
        gpu_of(one).device.destroy()
        with pytest.raises(StateLost):
            use()
    assert decode(one, one.restore(state), IDS[:3]).tobytes() == expected
    one.close()


def test_a_device_that_stays_away_is_tried_at_every_call(granite: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    one = WgpuRuntime().load(granite)
    state = one.save(started(one, IDS[:20]))
    monkeypatch.setattr(device, "adapters", list)
    gpu_of(one).device.destroy()
    with pytest.raises(StateLost, match=r"the GPU is lost .*see ssmd doctor"):
        one.new_state()
    with pytest.raises(RuntimeUnavailable, match="wgpu finds no GPU"):
        one.new_state()
    monkeypatch.undo()
    assert one.position(one.restore(state)) == 20
    one.close()


def test_a_conversation_outlives_its_device(granite: Artifact, tmp_path: Path) -> None:
    """The request that finds the device lost is told to come back; the next one goes on from the checkpoint."""
    with daemon(granite.path, tmp_path) as one:
        first = one.chat("Remember the number 42")
        gpu_of(one.engine.program).device.destroy()
        messages = [
            {"role": "user", "content": "Remember the number 42"},
            {"role": "assistant", "content": whole_text(first)},
            {"role": "user", "content": "Which number?"},
        ]
        refused = one.chat(messages=messages)
        assert (refused.status, refused.error["code"]) == (503, "device_lost")
        assert refused.headers["retry-after"] == "1"
        second = one.chat(messages=messages)
        assert second.status == 200
        assert second.json["usage"]["prompt_tokens_details"]["cached_tokens"] > 20
        assert second.json["usage"]["ssmd"]["resume"] == "exact"
