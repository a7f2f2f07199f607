"""The trial of an artifact in a process of its own: which verdicts are believed, and which are kept."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import TinyArtifacts
from daemon import soon

from ssmd.model.artifact import Artifact
from ssmd.runtime import trial
from ssmd.runtime.protocol import get_runtime
from ssmd.runtime.trial import CrashError, last_line, probed, run_all

PASSED = json.dumps({"passed": True, "why": ""})
FAILED = json.dumps({"passed": False, "why": "somebody said so"})


def command(code: str) -> list[str]:
    return [sys.executable, "-c", f"import os, signal, time; {code}; print({PASSED!r})"]


@pytest.fixture
def artifact(tmp_path: Path) -> Any:
    return type("A", (), {"path": tmp_path})()


@pytest.mark.parametrize("whose", ["writable", "link", "pipe", "long"])
def test_a_verdict_that_others_could_have_written_does_not_count(artifact: Any, tmp_path: Path, whose: str) -> None:
    folder = tmp_path / "verdicts"
    folder.mkdir(0o777)
    file = folder / "verdict.json"
    if whose == "pipe":
        os.mkfifo(file)
    else:
        file.write_text(FAILED + " " * (1 << 20) * (whose == "long"))
    if whose == "writable":
        file.chmod(0o666)
    elif whose == "link":
        file.rename(tmp_path / "elsewhere")
        file.symlink_to(tmp_path / "elsewhere")
    assert probed(command("pass"), artifact, "cpu", folder).passed
    assert (file.lstat().st_mode & 0o777, folder.stat().st_mode & 0o777) == (0o600, 0o700)
    assert (file.read_text(), [p.name for p in folder.iterdir()]) == (PASSED, ["verdict.json"])


@pytest.mark.parametrize("end", ["KILL", "TERM", "XCPU", "late", "unstarted", "memory", "addresses"])
def test_an_accident_is_no_verdict(artifact: Any, tmp_path: Path, end: str) -> None:
    late = command("time.sleep(60)")
    ways = {"late": late, "unstarted": [str(tmp_path / "none")], "memory": command("raise MemoryError('no room')")}
    ways["addresses"] = command("raise OSError('a graph takes about 1 GB of addresses, and 0 are left (ulimit -v)')")
    ends = ways.get(end) or command(f"os.kill(os.getpid(), signal.SIG{end})")
    first = probed(ends, artifact, "cpu", tmp_path / "kept", limit_s=0.2 if end == "late" else 60)
    assert (first.passed, first.accident) == (False, True)
    soon(lambda: probed(command("pass"), artifact, "cpu", tmp_path / "kept").passed)


def test_a_trial_that_hangs_is_repeated_ever_later(artifact: Any, tmp_path: Path) -> None:
    marker, folder = tmp_path / "tried", tmp_path / "kept"
    hangs = command(f"open({str(marker)!r}, 'a').write('x'); time.sleep(60)")
    first = probed(hangs, artifact, "cpu", folder, limit_s=2)
    assert (first.accident, marker.read_text()) == (True, "x")
    assert first.again_s >= 4
    assert probed(hangs, artifact, "cpu", folder, limit_s=2) == first
    assert marker.read_text() == "x", "a request right after it does not repeat it"
    trial._accidents[folder] = replace(trial._accidents[folder], until=0.0)
    assert probed(hangs, artifact, "cpu", folder, limit_s=2).again_s >= 8
    assert marker.read_text() == "xx"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits the memory that a process writes")
def test_a_trial_writes_memory_by_its_artifacts_size(artifacts: TinyArtifacts) -> None:
    """Reserved addresses do not count. Memory beyond the bound is the artifact's fault if the machine has enough."""
    code = (
        "import mmap, os, resource, sys; from ssmd.runtime import loading\n"
        "loading.memory.available = lambda: 8 << 30\n"
        "def judge(*_, **__):\n"
        "    mmap.mmap(-1, 6 << 30, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)\n"
        "    print(resource.getrlimit(resource.RLIMIT_DATA)[0], flush=True)\n"
        "    bytearray(3 << 30)\n"
        "loading.judge = judge; loading.main()"
    )
    path = artifacts["llama-f32"]
    done = subprocess.run(
        [sys.executable, "-c", code, str(os.getpid()), str(path), "cpu"], capture_output=True, text=True, check=False
    )
    size = sum(file.size for file in Artifact.open(path).manifest.files.values())
    assert int(done.stdout) == (2 << 30) + 8 * size, done.stderr
    assert trial._error(done.stderr) == "ssmd.model.artifact.ArtifactError: it takes more than 2.2 GB of memory"


def test_a_verdict_that_cannot_be_kept_holds_for_the_process(artifact: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert probed(command("pass"), artifact, "cpu", tmp_path / "file" / "kept").passed
    assert probed(command("os.abort()"), artifact, "cpu", tmp_path / "file" / "kept").passed


@pytest.mark.parametrize("end", ["os.abort()", "os.kill(os.getpid(), signal.SIGSEGV)", "raise OSError('bad')"])
def test_what_the_artifact_did_is_kept(artifact: Any, tmp_path: Path, end: str) -> None:
    first = probed(command(end), artifact, "cpu", tmp_path / "kept")
    assert (first.passed, first.accident) == (False, False)
    assert probed(command("pass"), artifact, "cpu", tmp_path / "kept") == first


@pytest.mark.parametrize("device", ["cpu", "npu"])
def test_minutes_are_said_of_what_is_compiled(
    artifact: Any, tmp_path: Path, device: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        probed(command("pass"), artifact, device, tmp_path / "kept")
    assert ("minutes" in caplog.text) == (device == "npu")


def test_a_trial_is_told_no_secrets_and_asked_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = ("SSMD_API_KEY", "SSMD_API_KEYS_FILE", "HF_TOKEN", "AWS_SECRET")
    for name in secrets:
        monkeypatch.setenv(name, "hidden")
    monkeypatch.setenv("SSMD_CACHE_DIR", "told")
    code = (
        "import os, sys; print(sys.stdin.read(), sorted(n for n, v in os.environ.items() if v in ('hidden', 'told')))"
    )
    assert last_line([sys.executable, "-c", code]).strip() == "['SSMD_CACHE_DIR']"


def test_what_a_library_logs_last_is_not_the_reason() -> None:
    code = (
        "import atexit, sys\n"
        "atexit.register(lambda: print('INFO: [registry.cc:43] Destroyed', file=sys.stderr))\n"
        "raise ValueError('the reason')"
    )
    with pytest.raises(CrashError, match="the reason"):
        last_line([sys.executable, "-c", code])


@pytest.mark.parametrize("chained", ["", "try: 1 / 0\nexcept ZeroDivisionError as err: "])
def test_an_error_of_several_lines_is_one_line(chained: str) -> None:
    error = "raise ValueError('the file: \\n  └ broken\\n└ at 7; build it again')"
    with pytest.raises(CrashError, match=r"^ValueError: the file: └ broken └ at 7; build it again$"):
        last_line([sys.executable, "-c", f"{chained}{error}"])


def test_only_the_end_of_what_a_trial_says_is_read() -> None:
    assert len(last_line([sys.executable, "-c", "print('x' * (1 << 20))"])) <= 64 << 10


@pytest.mark.parametrize(("name", "lanes"), [("granite-f32", {4, 8}), ("openvino-granite-f32", {4})])
def test_what_is_opened_later_is_opened_in_a_trial(
    artifacts: TinyArtifacts, name: str, lanes: set[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSMD_CACHE_DIR", str(tmp_path))
    artifact = Artifact.open(artifacts[name])
    program: Any = get_runtime(artifact.manifest.runtime).load(artifact)
    calls: list[tuple[int, int]] = []
    prefill = program.prefill

    def noted(handle: Any, ids: list[int]) -> Any:
        calls.append((program.position(handle), len(ids)))
        return prefill(handle, ids)

    monkeypatch.setattr(program, "prefill", noted)
    run_all(program, (64, 256, 512))
    assert program.batches._tried == lanes
    assert calls == [(0, 16), (0, 64), (241, 16)], "with the least capacity, and the least bucket with the largest"
    program.close()
