"""`ssmd bench`: every number is there and can be true. How fast this machine is, is no matter of a test."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import commands
import numpy as np
import pytest
from conftest import TinyArtifacts
from test_server import environment

from ssmd.machine.memory import most_resident, resident
from ssmd.machine.processor import cpu_name
from ssmd.model.artifact import Artifact
from ssmd.model.state import State
from ssmd.runtime import weightread
from ssmd.runtime.bench import STEPS, STREAMS, BenchError, Report, bench
from ssmd.runtime.protocol import Device, Program, ProgramError, get_runtime

# By variant: the quantization, and the positions that a bucket of 64 has room after in a context of 512.
CASES = {"llama": ("int8", (0, 100, 448)), "granite": ("int8", (0, 448)), "mamba": ("f32", (0, 5000))}
KEYS: dict[str, Any] = {
    **dict.fromkeys(("name", "path", "build", "runtime", "quantization", "producer", "cpu"), str),
    **dict.fromkeys(("threads", "position", "repeats"), int),
    **dict.fromkeys(("save_ms", "restore_ms", "decode_per_read"), float),
    "load_average": [float],
    "load_ms": {"first": float, "again": float},
    "prefill": [{"bucket": int, "ms": float, "tokens_per_s": float}],
    "decode": {"steps": int, "p50_ms": float, "p95_ms": float},
    "state_bytes": {"fixed": int, "a_token": int, "at_position": int},
    "weights": {"bytes": int, "read_ms": float},
    "together": [{"streams": int, "p50_ms": float, "tokens_per_s": float}],
    "memory_bytes": {"loaded": int, "most": int, "together": int},
}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSMD_CACHE_DIR", str(tmp_path / "cache"))


def opened(artifacts: TinyArtifacts, variant: str) -> Artifact:
    return Artifact.open(artifacts[f"{variant}-{CASES[variant][0]}"])


def saved_after(artifact: Artifact, position: int) -> State:
    """Return the state after a conversation of that many tokens."""
    program = get_runtime("litert").load(artifact, threads=1)
    try:
        handle = program.new_state()
        while (left := position - program.position(handle)) > 0:
            program.prefill(handle, [1] * min(left, program.buckets[-1]))
        return program.save(handle)
    finally:
        program.close()


def nbytes(state: State) -> int:
    return sum(array.nbytes for array in state.tensors.values())


class Remembering:
    """The runtime itself, and the programs that it loaded."""

    def __init__(self) -> None:
        self.name = "litert"
        self.programs: list[Program] = []
        self._runtime = get_runtime("litert")

    def devices(self) -> list[Device]:
        return self._runtime.devices()

    def load(self, artifact: Artifact, *, device: str | None = None, threads: int | None = None) -> Program:
        self.programs.append(self._runtime.load(artifact, device=device, threads=threads))
        return self.programs[-1]

    def all_closed(self) -> bool:
        for program in self.programs:
            with pytest.raises(ProgramError, match="closed"):
                program.new_state()
        return len(self.programs) > 0


def check_numbers(report: Report, artifact: Artifact, position: int, repeats: int) -> None:
    times = [report.load_first_ms, report.load_again_ms, report.save_ms, report.restore_ms, report.weights_read_ms]
    assert all(ms > 0 for ms in [*times, report.tbt_p50_ms, *(p.ms for p in report.prefill)])
    assert report.tbt_p50_ms <= report.tbt_p95_ms
    assert tuple(p.bucket for p in report.prefill) == artifact.manifest.buckets
    assert all(abs(p.tokens_per_s * p.ms / 1e3 - p.bucket) < 1e-6 for p in report.prefill)
    assert abs(report.decode_per_read * report.weights_read_ms - report.tbt_p50_ms) < 1e-9
    assert (report.position, report.repeats, report.decode_steps) == (position, repeats, repeats * STEPS)
    assert report.weights_bytes == (artifact.path / "model.tflite").stat().st_size
    assert report.resident_bytes is not None
    assert report.most_resident_bytes is not None
    assert report.weights_bytes < report.resident_bytes <= report.most_resident_bytes
    assert tuple(t.streams for t in report.together) == STREAMS
    assert all(t.ms > 0 and abs(t.tokens_per_s * t.ms / 1e3 - t.streams) < 1e-6 for t in report.together)
    assert report.resident_together_bytes is not None
    assert report.resident_together_bytes > report.weights_bytes


@pytest.mark.parametrize(("variant", "position"), [(v, p) for v, (_, ps) in CASES.items() for p in ps])
def test_numbers(artifacts: TinyArtifacts, variant: str, position: int) -> None:
    artifact, runtime = opened(artifacts, variant), Remembering()
    rounds: list[tuple[int, int]] = []

    def progress(done: int, of: int) -> None:
        rounds.append((done, of))
        program: Any = runtime.programs[-1]
        assert not program._slots  # no handle is left alive

    report = bench(artifact, runtime, threads=1, position=position, repeats=2, progress=progress)
    check_numbers(report, artifact, position, 2)
    assert (report.threads, report.cpu) == (1, cpu_name())
    assert report.producer == runtime.programs[-1].producer
    assert rounds == [(0, 3), (1, 3), (2, 3)]
    assert len(runtime.programs) == 2
    assert runtime.all_closed()


@pytest.mark.parametrize("variant", CASES)
def test_bytes_are_those_of_a_saved_state(artifacts: TinyArtifacts, variant: str) -> None:
    artifact = opened(artifacts, variant)
    report = bench(artifact, get_runtime("litert"), threads=1, position=100, repeats=1)
    none, one, state = (saved_after(artifact, position) for position in (0, 1, 100))
    assert report.state_bytes == nbytes(state)
    assert report.fixed_bytes == nbytes(none)
    assert report.token_bytes == nbytes(one) - nbytes(none)
    assert report.state_bytes == report.fixed_bytes + 100 * report.token_bytes
    assert (report.fixed_bytes > 0) == (variant != "llama")
    assert (report.token_bytes > 0) == (variant != "mamba")


def test_everything_is_measured_after_the_position(artifacts: TinyArtifacts, monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls that a program gets, by where the handle was."""
    artifact, runtime = opened(artifacts, "llama"), Remembering()
    calls: list[tuple[str, int, int]] = []
    program_type = type(program := runtime.load(artifact, threads=1))
    program.close()
    for name in ("prefill", "decode", "save"):
        real = getattr(program_type, name)

        def noting(self: Any, handle: Any, *rest: Any, name: str = name, real: Any = real) -> Any:
            one = handle[0] if name == "decode" else handle
            calls.append((name, self.position(one), len(rest[0]) if rest else 0))
            return real(self, handle, *rest)

        monkeypatch.setattr(program_type, name, noting)
    bench(artifact, runtime, threads=1, position=120, repeats=2)
    decoded = [("decode", 120 + i, 1) for i in range(1 + STEPS)]  # from one KV tier into the next
    a_round = [("prefill", 120, 16), ("prefill", 120, 64), ("save", 120, 0), *decoded]
    together = [("decode", 120 + i, n) for n in STREAMS for i in range(1 + STEPS)]
    assert calls == [("save", 120, 0), *a_round * 3, *together]


def test_what_has_no_room_is_refused_before_anything_is_loaded(artifacts: TinyArtifacts) -> None:
    artifact, runtime = opened(artifacts, "granite"), Remembering()

    def refused(position: int = 0, repeats: int = 1, **fields: Any) -> str:
        lying = replace(artifact, manifest=artifact.manifest.model_copy(update=fields))
        with pytest.raises(BenchError) as failure:
            bench(lying, runtime, position=position, repeats=repeats)
        return str(failure.value)

    assert "prefill of 64 tokens after position 449; the last position that can be measured is 448" in refused(449)
    assert "between 0 and" in refused(-1)
    assert "at least one round" in refused(repeats=0)
    assert "prefill of 64 tokens after position 0; build it with a larger one" in refused(context=63)
    assert "21 decode steps after position 3; the last position that can be measured is 2" in refused(
        3, context=23, buckets=(16,)
    )
    assert "between 0 and" in refused(1 << 31, context=None)
    assert runtime.programs == []


@pytest.mark.parametrize("when", [0, 1, 2])
def test_broken_off_it_is_closed(artifacts: TinyArtifacts, when: int) -> None:
    def stop(done: int, of: int) -> None:
        if done == when:
            raise KeyboardInterrupt

    runtime = Remembering()
    with pytest.raises(KeyboardInterrupt):
        bench(opened(artifacts, "granite"), runtime, threads=1, repeats=2, progress=stop)
    assert runtime.all_closed()


@pytest.mark.parametrize(("size", "threads"), [(900, 1), (900, 4), (2500, 2), (2500, 3), (2000, 1), (1, 3), (0, 2)])
def test_a_read_is_of_every_byte(monkeypatch: pytest.MonkeyPatch, size: int, threads: int) -> None:
    monkeypatch.setattr(weightread, "_LARGEST_BUFFER", 1000)  # what is larger reads it again
    with weightread.WeightRead(size, threads) as read:
        assert read.ms() > 0
        read_by = [list(read.parts(thread)) for thread in range(threads)]
        assert sum(part.nbytes for parts in read_by for part in parts) == size
        assert max(map(len, read_by)) == -(-size // 1000)
        for passed in zip(*read_by, strict=True):  # the same number of bytes for each thread, and none twice
            assert max(p.nbytes for p in passed) - min(p.nbytes for p in passed) <= 1
            for part in passed:
                assert (part == 1).all()
                part += 1
            for part in passed:
                part -= 1


def test_memory_of_this_process() -> None:
    before, block = resident(), np.ones(64 << 20, np.uint8)
    now, most = resident(), most_resident()
    assert before is not None
    assert now is not None
    assert most is not None
    assert 60 << 20 <= now - before <= 100 << 20
    assert block.nbytes <= now <= most + (1 << 20)  # counts of pages are a little behind
    # A process that a large one started has not been large itself.
    line = "from ssmd.machine.memory import most_resident as m; print(m())"
    assert 1 << 20 < int(subprocess.check_output([sys.executable, "-c", line])) < block.nbytes


# The command.


@pytest.fixture(scope="module")
def home(artifacts: TinyArtifacts, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("home")
    for variant, (quantization, _) in CASES.items():
        folder = path / "data" / "models" / variant
        folder.mkdir(parents=True)
        (folder / f"litert-cpu-{quantization}").symlink_to(artifacts[f"{variant}-{quantization}"])
    return path


def command(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return commands.ssmd("bench", *arguments, env=environment(home))


def shape(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: shape(one) for key, one in value.items()}
    return [shape(value[0])] if isinstance(value, list) else type(value)


def test_json_is_as_documented(home: Path, artifacts: TinyArtifacts) -> None:
    done = command(home, "granite", "--threads", "1", "--position", "40", "--repeats", "2", "--json")
    assert done.returncode == 0, done.stderr
    fields = json.loads(done.stdout)
    assert fields.pop("forms") == [], "LiteRT measures none"
    assert shape(fields) == KEYS
    documented = (Path(__file__).parents[2] / "docs" / "notes" / "benchmarks.md").read_text()
    assert all(f"`{key}`" in documented for key in (*KEYS, "forms"))
    manifest = opened(artifacts, "granite").manifest
    assert (fields["name"], fields["build"]) == (manifest.name, manifest.build)
    assert (fields["runtime"], fields["quantization"]) == ("litert", "int8")
    assert (fields["threads"], fields["position"], fields["repeats"]) == (1, 40, 2)
    assert [p["bucket"] for p in fields["prefill"]] == [16, 64]
    assert fields["decode"]["steps"] == 2 * STEPS
    assert fields["state_bytes"]["at_position"] == manifest.spec.nbytes_at(40)


@pytest.mark.parametrize("variant", CASES)
def test_the_table(home: Path, variant: str) -> None:
    done = command(home, variant, "--threads", "1", "--repeats", "1")
    assert done.returncode == 0, done.stderr
    said = done.stdout
    for wanted in (
        "build ",
        "; load average before: ",
        "load again",
        "prefill of 16 ",
        "prefill of 64 ",
        "decode step",
        "of 8 streams",
        "with 8 streams",
    ):
        assert wanted in said
    for wanted in ("p95", "x one read of the weights", "save", "restore", "bytes a token", "when loaded,", "1 threads"):
        assert wanted in said
    assert "\x1b" not in said  # plain without a terminal
    assert done.stderr == ""


def test_the_command_refuses(home: Path, tmp_path: Path) -> None:
    for arguments, message in (
        (["unknown"], "there is no model 'unknown' here"),
        ([str(tmp_path)], "is no artifact"),
        ([], "say which model to use"),
        (["llama", "--position", "449"], "the last position that can be measured is 448"),
        (["llama", "--runtime", "openvino"], "no artifact for runtime 'openvino'"),
        (["llama", "--runtime", "coreml"], "Core ML cannot execute here"),
    ):
        done = command(home, *arguments)
        assert (done.returncode, done.stdout) == (1, ""), done
        [line] = done.stderr.splitlines()
        assert line.startswith("error: ")
        assert message in line
    for option, value in (("--repeats", "0"), ("--position", "-1"), ("--position", "x"), ("--threads", "512")):
        assert command(home, "llama", option, value).returncode == 2


def test_ctrl_c(home: Path) -> None:
    # A shell that starts the tests in the background has them ignore SIGINT, and their children with them.
    process = subprocess.Popen(
        [sys.executable, "-m", "ssmd", "bench", "granite", "--repeats", "1000"],
        env=environment(home),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL) and None,
    )
    maps = Path(f"/proc/{process.pid}/maps")
    while "libLiteRt" not in maps.read_text():
        assert process.poll() is None
        time.sleep(0.05)
    time.sleep(1)  # it is at work
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (130, "")
    assert "Traceback" not in err
