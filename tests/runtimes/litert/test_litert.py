"""The LiteRT runtime itself: loading, checking signatures, shared memory and its fallback, the weight cache."""

from __future__ import annotations

import errno
import gc
import json
import logging
import mmap
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kept
import numpy as np
import pytest
from conftest import TinyArtifacts
from far import check_far
from flat_programs import altered, conversation, mapped, silent, stale

from ssmd.build.builder import BuildError
from ssmd.machine.processor import cpu_name
from ssmd.machine.threads import default_threads
from ssmd.model.artifact import Artifact
from ssmd.model.state import State
from ssmd.runtime.hoststate.buffers import ALIGNMENT, Snapshots, aligned, carve, stack_bytes, stacked
from ssmd.runtime.hoststate.graph import GraphError, Tensor
from ssmd.runtime.hoststate.program import FlatProgram
from ssmd.runtime.protocol import ProgramError, RuntimeUnavailable
from ssmd_litert import lanes
from ssmd_litert.calls import LibraryCall
from ssmd_litert.capacity import open_capacity
from ssmd_litert.interface import package_version
from ssmd_litert.lanes import LanesFile
from ssmd_litert.library import LibraryGraph
from ssmd_litert.managed import ManagedGraph
from ssmd_litert.modelfile import edit
from ssmd_litert.runtime import LiteRTRuntime
from ssmd_litert.weight_cache import WeightCache

NAMES = ("llama-int8", "granite-f32")


@pytest.fixture(params=NAMES)
def artifact(request: pytest.FixtureRequest, artifacts: Mapping[str, Path]) -> Artifact:
    return Artifact.open(artifacts[request.param])


@pytest.fixture
def closed(artifacts: TinyArtifacts, tmp_path: Path) -> Artifact:
    """One that was built when a graph had signatures for each capacity; it has 64 and 512."""
    packed = (Path(__file__).parents[2] / "data" / "closed" / "granite-f32.tar.zst").read_bytes()
    assert kept.unpack(packed, artifacts.source("granite-f32"), tmp_path / "closed")
    return Artifact.open(tmp_path / "closed")


def test_managed_buffers_give_the_same_bits(artifact: Artifact, caplog: pytest.LogCaptureFixture) -> None:
    shared, managed = LiteRTRuntime().load(artifact), LiteRTRuntime(zero_copy=False).load(artifact)
    assert isinstance(shared.graph, LibraryGraph)
    assert isinstance(managed.graph, ManagedGraph)
    assert shared.producer == managed.producer
    assert conversation(shared) == conversation(managed)
    assert not caplog.records


def test_a_hybrid_without_rope_at_far_positions(granite: Artifact, tmp_path: Path) -> None:
    """The graph knows no end: its manifest says one. Memory is for what is used, views of it stay."""
    tiny = pytest.importorskip("tiny")
    program = LiteRTRuntime().load(altered(granite, tmp_path / "long", context=32_768, tiers=[64, 512, 2304, 32_768]))
    try:
        for position in (2040, 8180, 32_748):
            check_far(program, tiny.official("granite", program.vocabulary), position, rope=False)
        handle = program.new_state()
        program.prefill(handle, [5] * 60)
        held, rows = program.save(handle), len(handle.slot._store)
        before = {name: array.copy() for name, array in held.tensors.items()}
        program.prefill(handle, [6] * 64)
        program.prefill(handle, [7] * 64)
        assert rows == 128 < len(handle.slot._store) < 32_768
        whole = program.save(handle)
        for name, array in before.items():
            np.testing.assert_array_equal(held.tensors[name], array)
        for row in program.spec.rows:
            np.testing.assert_array_equal(whole.tensors[row.name][:, :60], before[row.name])
    finally:
        program.close()


def test_a_library_of_another_version_is_left_alone(
    granite: Artifact, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = conversation(LiteRTRuntime().load(granite))
    monkeypatch.setattr("ssmd_litert.interface.TESTED", "9.9.")
    with caplog.at_level(logging.WARNING):
        program = LiteRTRuntime().load(granite)
    assert isinstance(program.graph, ManagedGraph)
    assert "9.9." in caplog.text
    assert "slower" in caplog.text
    assert conversation(program) == expected


@pytest.mark.parametrize("broken", [stale(LibraryGraph), silent(LibraryGraph)])
def test_memory_that_is_not_shared_is_noticed(
    granite: Artifact, broken: type[LibraryGraph], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = conversation(LiteRTRuntime().load(granite))
    monkeypatch.setattr("ssmd_litert.runtime.LibraryGraph", broken)
    with caplog.at_level(logging.WARNING):
        program = LiteRTRuntime().load(granite)
    assert "self-test" in caplog.text
    assert isinstance(program.graph, ManagedGraph)
    assert conversation(program) == expected


def test_a_failed_run_leaves_the_handle_as_it_was(closed: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where states are not written in place."""
    program = LiteRTRuntime().load(closed)
    handles = [program.new_state() for _ in range(3)]
    for i, handle in enumerate(handles):
        program.prefill(handle, [i] * 20)
    before = [conversation_state(program, h) for h in handles]
    runs: list[object] = []
    run = LibraryCall.run

    def failing(call: LibraryCall) -> None:
        runs.append(call)
        run(call)
        if len(runs) == 3:
            raise GraphError("the third run breaks")

    with monkeypatch.context() as patch:
        patch.setattr(LibraryCall, "run", failing)
        with pytest.raises(GraphError, match="third"):
            program.decode(handles, [1, 2, 3])
    assert [conversation_state(program, h) for h in handles] == before
    together = program.decode(handles, [1, 2, 3])
    for i, row in enumerate(together):
        alone = program.new_state()
        program.prefill(alone, [i] * 20)
        assert program.decode([alone], [i + 1])[0].tobytes() == row.tobytes()


def conversation_state(program: FlatProgram, handle: Any) -> tuple[int, ...]:
    state: State = program.save(handle)
    return (state.position, *(hash(state.tensors[t.name].tobytes()) for t in program.spec.tensors))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"buckets": [16, 32, 64]}, "no signature 'prefill_32'"),
        ({"vocabulary": 383}, "'logits' is"),
    ],
)
def test_manifest_and_model_must_agree(
    granite: Artifact, tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    with pytest.raises(ProgramError, match=message):
        LiteRTRuntime().load(altered(granite, tmp_path / "copy", **changed))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"context": 511, "tiers": [63, 511]}, "'key_2' is"),
        ({"tiers": [64, 128, 512]}, "no signature 'decode_128'"),
        ({"tiers": []}, "'key_2' is"),
    ],
)
def test_closed_capacities_must_be_those_of_the_manifest(
    closed: Artifact, tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    with pytest.raises(ProgramError, match=message):
        LiteRTRuntime().load(altered(closed, tmp_path / "copy", **changed))


def test_state_of_the_manifest_must_be_that_of_the_model(granite: Artifact, tmp_path: Path) -> None:
    state = json.loads(json.dumps(granite.manifest.state))
    for i, changed in enumerate((state[1:], [*state, state[0] | {"name": "conv_9", "layer": 9}])):
        with pytest.raises(ProgramError, match="the manifest says"):
            LiteRTRuntime().load(altered(granite, tmp_path / f"copy{i}", state=changed))


def test_a_file_that_is_no_model_is_refused(granite: Artifact, tmp_path: Path) -> None:
    model = next(n for n in granite.manifest.files if n.endswith(".tflite"))
    for i, content in enumerate((b"", b"TFL3", b"not a model" * 100)):
        folder = tmp_path / f"copy{i}"
        shutil.copytree(granite.path, folder)
        (folder / model).write_bytes(content)
        with pytest.raises(ProgramError, match=r"no \.tflite model"):
            LiteRTRuntime().load(altered(Artifact(folder, granite.manifest), tmp_path / f"sealed{i}"))


def test_what_is_not_for_this_runtime(granite: Artifact, tmp_path: Path) -> None:
    with pytest.raises(ProgramError, match="'openvino'"):
        LiteRTRuntime().load(altered(granite, tmp_path / "other", runtime="openvino"))
    for device in ("gpu", "npu", "tpu"):
        with pytest.raises(RuntimeUnavailable, match=device):
            LiteRTRuntime().load(granite, device=device)


def test_devices() -> None:
    devices = {d.name: d for d in LiteRTRuntime().devices()}
    assert devices["cpu"].why_not == ""
    assert cpu_name() in devices["cpu"].description
    assert all(d.why_not for d in devices.values() if d.name != "cpu")
    assert 1 <= default_threads() <= (os.cpu_count() or 1)


def test_producer_names_what_bits_depend_on(granite: Artifact) -> None:
    one, two = (LiteRTRuntime().load(granite, threads=n).producer for n in (1, 2))
    assert one != two
    assert "2.3" in one
    assert cpu_name() in one
    assert one.endswith("1 threads")


def test_weight_cache_is_written_once_and_used(artifact: Artifact, cache: Path) -> None:
    expected = conversation(LiteRTRuntime().load(artifact))
    files = {p: p.stat().st_mtime_ns for p in cache.iterdir()}
    assert sorted(p.suffix for p in files) == [".json", ".xnnpack"]
    assert conversation(LiteRTRuntime().load(artifact)) == expected
    assert {p: p.stat().st_mtime_ns for p in cache.iterdir()} == files


def test_a_model_in_a_folder_of_any_name(granite: Artifact, tmp_path: Path) -> None:
    folder = tmp_path / "Jörg 日"
    shutil.copytree(granite.path, folder)
    assert conversation(LiteRTRuntime().load(Artifact.open(folder))) == conversation(LiteRTRuntime().load(granite))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_pages_of_the_model_file_are_given_back(artifact: Artifact) -> None:
    """Almost none is resident once the graph or lanes are open, and a read brings them back."""
    other = LiteRTRuntime().load(artifact)
    expected = conversation(other)
    other.close()
    program, file = LiteRTRuntime().load(artifact), artifact.file("model.tflite")
    assert mapped(file) <= 8 * mmap.PAGESIZE  # where the lists of signatures were cut
    assert isinstance(program.graph, LibraryGraph)
    others = LanesFile(file, program.graph, 1, WeightCache("x", "1", "cpu")).open(4)
    assert mapped(file) <= 16 * mmap.PAGESIZE
    others.close()
    assert conversation(program) == expected


ODD_SEALS = {
    "odd seal": "[]",
    "nested seal": "[" * 4000,
    "long seal": "[" * 200_000,
    "a seal of no name": '{"size": 1, "xxh3": "", "file": "a\\u0000b"}',
    **({"a seal that waits": ""} if hasattr(os, "mkfifo") else {}),
}


@pytest.mark.parametrize("damage", ["empty", "cut", "garbage", "flipped", "no seal", "a folder", *ODD_SEALS])
def test_a_damaged_weight_cache_is_replaced(granite: Artifact, cache: Path, damage: str) -> None:
    expected = conversation(LiteRTRuntime().load(granite))
    file, seal_file = next(cache.glob("*.xnnpack")), next(cache.glob("*.json"))
    content = file.read_bytes()
    middle = len(content) // 2
    if damage == "empty":
        file.write_bytes(b"")
    elif damage == "cut":
        file.write_bytes(content[:middle])
    elif damage == "garbage":
        file.write_bytes(os.urandom(len(content)))
    elif damage == "flipped":
        file.write_bytes(content[:middle] + bytes([content[middle] ^ 255]) + content[middle + 1 :])
    elif damage == "no seal":
        seal_file.unlink()
    elif damage == "a seal that waits":
        seal_file.unlink()
        os.mkfifo(seal_file)
    elif damage in ODD_SEALS:
        seal_file.write_text(ODD_SEALS[damage])
    else:
        file.unlink()
        file.mkdir()
    assert conversation(LiteRTRuntime().load(granite)) == expected
    if damage != "a folder":
        assert file.read_bytes() == content


def test_a_cache_folder_that_cannot_be_made(
    granite: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = conversation(LiteRTRuntime().load(granite))
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SSMD_CACHE_DIR", str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING):
        assert conversation(LiteRTRuntime().load(granite)) == expected
    assert "no cache in" in caplog.text


@pytest.mark.skipif(sys.platform == "win32", reason="Unix limits the size of files")
def test_a_disk_without_room(granite: Artifact, cache: Path) -> None:
    """XNNPACK ends the process where it cannot write. What others left, whose processes are gone, makes room."""
    code = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from ssmd.model.artifact import Artifact\n"
        "from ssmd_litert.runtime import LiteRTRuntime\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]),) * 2)\n"
        "LiteRTRuntime().load(Artifact.open(Path(sys.argv[2]))).new_state()\n"
    )
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    for room, said in ((100_000, "no cache in"), (1 << 30, "")):
        name = WeightCache(granite.manifest.build, package_version(), cpu_name()).name
        left, mine = cache / f"{name}.{ended.pid}.tmp", cache / f"{name}.{os.getpid()}.tmp"
        cache.mkdir(parents=True, exist_ok=True)
        left.touch()
        mine.touch()
        done = subprocess.run(
            [sys.executable, "-c", code, str(room), str(granite.path)], capture_output=True, text=True, check=True
        )
        assert said in done.stderr
        assert not left.exists()
        assert mine.exists()
        assert [p.suffix for p in cache.glob("*.xnnpack")] == ([] if said else [".xnnpack"])
        assert [p for p in cache.glob("*.tmp") if p != mine] == []


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="there is none")
@pytest.mark.parametrize("free", [0, 1 << 40])
def test_a_file_system_that_cannot_hold_room_free_is_asked(
    granite: Artifact, cache: Path, monkeypatch: pytest.MonkeyPatch, free: int
) -> None:
    def unknown(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "not supported")

    monkeypatch.setattr(os, "posix_fallocate", unknown)
    monkeypatch.setattr("ssmd.machine.cache.shutil.disk_usage", lambda path: SimpleNamespace(free=free))
    LiteRTRuntime().load(granite)
    assert bool(list(cache.glob("*.xnnpack"))) == bool(free)


def test_a_process_without_addresses(
    granite: Artifact, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """XNNPACK would end it, or write the kept weights anew under other processes that have mapped them."""
    program = LiteRTRuntime().load(granite)
    monkeypatch.setattr("ssmd_litert.weight_cache.address_space", lambda: 100 << 20)
    program.prepare()
    assert list(program.batches.costs) == [1]
    assert "a graph takes about" in caplog.text
    with pytest.raises(ProgramError, match=r"of addresses, and 104\.9 MB are left \(ulimit -v\)"):
        LiteRTRuntime().load(granite)


def test_nothing_of_a_conversation_is_left_in_a_slot(artifact: Artifact) -> None:
    program = LiteRTRuntime().load(artifact)
    handle = program.new_state()
    program.prefill(handle, [7] * 40)
    slot = handle.slot
    assert all(stack.any() for stack in slot.caches.stacks)
    program.release(handle)
    assert slot in program._spare
    assert not any(stack.any() for stack in slot.caches.stacks)
    assert not slot.arenas[0].any()


def test_caches_of_other_builds_versions_and_processors_differ(cache: Path) -> None:
    paths = {WeightCache(*key).path(1) for key in (("a" * 64, "1", "x"), ("b" * 64, "1", "x"), ("a" * 64, "2", "x"))}
    paths |= {WeightCache("a" * 64, "1", "y").path(1)}
    assert len(paths) == 4
    assert all(p is not None and p.parent == cache for p in paths)


@pytest.mark.parametrize(
    ("name", "said"), [("llama-f32", b"ssmd.authoring.llama.Llama;"), ("mamba-f32", b"ssmd.authoring.mamba.Mamba;")]
)
def test_a_file_says_a_fixed_name_wherever_the_code_lies(name: str, said: bytes, artifacts: Mapping[str, Path]) -> None:
    """At each operator; the graphs that are shipped say so, and the same model is to give the same bytes."""
    model = (artifacts[name] / "model.tflite").read_bytes()
    assert said in model
    assert b"ssmd.authoring.model" not in model


def test_blocks_are_aligned_and_disjoint() -> None:
    shapes = {"a": (3,), "b": (1, 5, 7), "c": (2, 2)}
    _, arrays = carve({n: Tensor(s, np.dtype(np.float32)) for n, s in shapes.items()})
    for i, array in enumerate(arrays.values()):
        assert array.ctypes.data % ALIGNMENT == 0
        array.fill(i + 1)
    assert [(arrays[n] == i + 1).all() for i, n in enumerate(shapes)] == [True] * 3
    memory = aligned(stack_bytes(5, (3, 7)))
    parts = stacked(memory, 5, (3, 7))
    assert parts.shape == (5, 3, 7)
    for i, part in enumerate(parts):
        assert part.ctypes.data % ALIGNMENT == 0
        assert np.shares_memory(part, memory)
        part.fill(i)
    assert (parts.reshape(5, -1) == np.arange(5)[:, None]).all()
    assert not aligned(1000).any()


def test_a_snapshot_is_reused_only_when_no_view_of_it_is_left() -> None:
    snapshots = Snapshots(256, ready=1, spare_bytes=256)
    source = aligned(256)
    source.fill(1)
    view = snapshots.copy(source).view(np.float32).reshape(8, 8)[2:4].T
    kept, address = view.copy(), view.ctypes.data
    source.fill(2)
    other = snapshots.copy(source)
    gc.collect()
    assert (view == kept).all()
    assert other.ctypes.data != address - 64
    del view
    gc.collect()
    source.fill(3)
    assert snapshots.copy(source).ctypes.data == address - 64
    assert (other == 2).all()


def test_loading_says_nothing_that_does_not_matter(artifacts: Mapping[str, Path]) -> None:
    """In a process of its own, for LiteRT writes to file descriptor 2."""
    code = (
        "import sys; from pathlib import Path\n"
        "from ssmd.model.artifact import Artifact\n"
        "from ssmd.runtime.protocol import get_runtime\n"
        "get_runtime('litert').load(Artifact.open(Path(sys.argv[1])))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(artifacts["granite-f32"])], capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr) == ("", "")


def test_what_others_write_meanwhile_is_not_lost() -> None:
    """Nor is output lost where that model cannot be loaded, or where stderr is closed."""
    code = (
        "import os; from pathlib import Path\n"
        "from ssmd_litert import greeting\n"
        "def load(file):\n"
        "    assert file.read_bytes() == greeting.MODEL\n"
        "    os.write(2, b'one\\nINFO: Created TensorFlow Lite XNNPACK delegate for CPU.\\ntwo\\n')\n"
        "    raise MemoryError\n"
        "greeting.heard(load)\n"
        "greeting.heard(lambda file: os.write(2, b'a second time\\n'))\n"
        "os.write(2, b'three\\n')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "one\ntwo\nthree\n")
    closed = "import os; from ssmd_litert import greeting; os.close(2); greeting.heard(lambda file: None); print('on')"
    done = subprocess.run([sys.executable, "-c", closed], capture_output=True, text=True, check=True)
    assert done.stdout == "on\n"


@pytest.fixture(scope="module")
def _quick_collections() -> Iterator[None]:
    """Exclude objects made by these libraries' imports from the search for cycles, which takes a second each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _no_cycles(_quick_collections: None) -> Iterator[None]:
    """Programs of a test give their memory back before the next one."""
    yield
    gc.collect()


@pytest.mark.parametrize("which", ["closed", "granite"])
def test_a_conversation_moves_up_by_itself(
    which: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step runs in the smallest tier that has room for it, whatever happened before: a restore, a clone."""
    artifact = request.getfixturevalue(which)
    assert artifact.manifest.tiers == (64, 512)
    program, ids = LiteRTRuntime().load(artifact), list(range(40)) * 3
    assert len(program.graph.signatures) == (6 if which == "closed" else 3)
    run: list[str] = []
    bind = program.graph.bind

    def watched(signature: str, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> Any:
        large = which == "granite" and inputs["key_2"].shape[1] == 512
        run.append(f"{signature}_512" if large else signature)
        return bind(signature, inputs, outputs)

    monkeypatch.setattr(program.graph, "bind", watched)
    handle = program.new_state()
    handle.slot.unbind()  # what the self-test bound
    program.prefill(handle, ids[:60])
    program.decode([handle], [1])
    assert run == ["prefill_64", "decode"]
    at_61, twin = program.save(handle), program.clone(handle)
    logits = [program.prefill(handle, ids[61:70]), program.decode([handle], [2])]
    assert run[2:] == ["prefill_16_512", "decode_512"]
    for other in (twin, program.restore(at_61)):
        again = [program.prefill(other, ids[61:70]), program.decode([other], [2])]
        assert [a.tobytes() for a in again] == [a.tobytes() for a in logits]
        assert conversation_state(program, other) == conversation_state(program, handle)
        program.release(other)
    beyond = program.restore(program.save(handle))
    assert program.decode([beyond], [3]).tobytes() == program.decode([handle], [3]).tobytes()
    assert not [name for name in run[4:] if not name.endswith("_512")]


def test_a_step_is_the_same_whatever_capacity_the_one_before_had(granite: Artifact) -> None:
    """Steps of conversations of other lengths in between, as many as there are capacities."""
    granite = altered(granite, granite.path.parent / "many", tiers=[64, 96, 160, 512])
    ids = [(7 * i) % 384 for i in range(200)]

    def feeding(program: FlatProgram, handle: Any) -> Iterator[bytes]:
        for start in range(0, 160, 40):
            yield program.prefill(handle, ids[start : start + 40]).tobytes()
            yield from (program.decode([handle], [ids[i]]).tobytes() for i in range(160, 170))

    program = LiteRTRuntime().load(granite)
    alone = list(feeding(program, program.new_state()))
    late, early = feeding(program, program.new_state()), feeding(program, program.new_state())
    first = [next(late) for _ in range(25)]
    both = [logits for _ in range(19) for logits in (next(late), next(early))]
    assert [*first, *both[::2]] == alone
    assert both[1::2] == alone[:19]
    assert {slot.caches.capacity for slot in program._slots} == {160, 512}


def test_conversations_of_two_lengths_cost_one_change_a_step(
    granite: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes, "sizes", lambda graph: [])  # which would be tried meanwhile, and take some together
    program = LiteRTRuntime().load(granite)
    handles = [program.new_state() for _ in range(5)]
    for i, handle in enumerate(handles):
        program.prefill(handle, [i + 1] * 40)
        if i % 2:
            program.prefill(handle, [i + 1] * 40)
    program.decode(handles, [1] * 5)
    changes: list[int] = []
    size = LibraryGraph.size

    def counted(graph: LibraryGraph, index: int, sizes: dict[int, tuple[int, ...]]) -> None:
        changes.append(index)
        size(graph, index, sizes)

    monkeypatch.setattr(LibraryGraph, "size", counted)
    together = [program.decode(handles, [i] * 5) for i in range(4)]
    assert len(changes) == 4
    monkeypatch.undo()
    for i in range(5):
        alone = program.new_state()
        for _ in range(1 + i % 2):
            program.prefill(alone, [i + 1] * 40)
        program.decode([alone], [1])
        assert [program.decode([alone], [j])[0].tobytes() for j in range(4)] == [row[i].tobytes() for row in together]


def test_a_capacity_that_is_in_other_sizes_too_is_not_opened(closed: Artifact) -> None:
    """64 is also a prefill length here."""
    file = closed.file("model.tflite")
    before = file.read_bytes()
    with pytest.raises(BuildError, match="has the capacity of the caches in its sizes otherwise than is known"):
        edit(file, partial(open_capacity, nominal=64))
    assert file.read_bytes() == before
    assert not list(file.parent.glob("*.open"))


def test_a_conversation_of_an_older_artifact_goes_on(closed: Artifact, granite: Artifact) -> None:
    """Its state, in a graph whose capacity is open: the same numbers, but for the order of sums."""
    old, new, ids = LiteRTRuntime().load(closed), LiteRTRuntime().load(granite), list(range(100))
    there, here = old.new_state(), new.new_state()
    for program, handle in ((old, there), (new, here)):
        program.prefill(handle, ids[:50])
        program.prefill(handle, ids[50:])
    moved = new.restore(old.save(there))
    for token in (5, 6, 7):
        before, after = old.decode([there], [token])[0], new.decode([moved], [token])[0]
        assert np.abs(before - after).max() < 1e-4 * before.std()


def test_memory_of_a_larger_tier_is_used_again_or_given_back(
    granite: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = LiteRTRuntime().load(granite)
    fresh = conversation(program)
    (small,) = program._spare

    def grown() -> State:
        handle = program.new_state()
        for _ in range(8):
            program.prefill(handle, [9] * 60)
        state: State = program.save(handle)
        program.release(handle)
        return state

    state = grown()  # it began with the small one's memory, and moved to larger
    assert [s.caches.capacity for s in program._spare] == [512]
    large = program._spare[0]
    assert conversation(program) == fresh  # in that memory, as if it were small
    assert program._spare == [large]
    assert large.caches.capacity == 64
    again = program.restore(state)
    assert again.slot is large
    assert program.save(again).tensors["key_2"].tobytes() == state.tensors["key_2"].tobytes()
    beside = program.new_state()
    program.release(again)
    program.release(beside)
    assert len(program._spare) == 2
    monkeypatch.setattr("ssmd.runtime.hoststate.program._SPARE_SLOT_BYTES", small.nbytes)
    program.release(program.new_state())
    assert [s.caches.capacity for s in program._spare] == [64]
    assert program._spare != [large]
    assert conversation(program) == fresh


def test_a_handle_that_finds_no_memory_to_move_up_is_unharmed(
    granite: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = LiteRTRuntime().load(granite)
    handle = program.new_state()
    program.prefill(handle, [7] * 60)
    before = conversation_state(program, handle)

    def none(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr("ssmd.runtime.hoststate.slot.aligned", none)
        with pytest.raises(MemoryError):
            program.prefill(handle, [8] * 10)
    assert conversation_state(program, handle) == before
    expected = program.decode([program.restore(program.save(handle))], [3])
    assert program.decode([handle], [3]).tobytes() == expected.tobytes()


def test_without_memory_for_a_new_handle_others_are_unharmed(
    artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a release needs none."""
    program = LiteRTRuntime().load(artifact)
    expected = conversation(program)
    handle = program.new_state()
    program.prefill(handle, [7] * 20)
    beside = program.new_state()
    saved = program.save(handle).tensors

    def none(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr("ssmd.runtime.hoststate.slot.np.empty", none)
        program.release(beside)
        known = list(program._spare)
        with pytest.raises(MemoryError):
            program.new_state()
        assert program._spare == known
    before = {name: np.array(values) for name, values in saved.items()}
    again = program.decode([handle], [3])
    assert conversation(program) == expected
    assert all(np.array_equal(saved[name], values) for name, values in before.items())
    assert np.array_equal(program.decode([program.restore(State(20, 0, before))], [3]), again)
