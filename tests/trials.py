"""Trial loads of many artifacts from elsewhere, each in a fork of one process that has imported their runtime.

The arguments of the program are ARTIFACT SECONDS FOLDER and seeds. It makes a mutant of each seed in the folder, and
loads it as a daemon would. It prints a line of JSON for each (Outcome).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mutants import Mutant, mutant

from ssmd.installed import read, why_unusable
from ssmd.machine.crash import crash
from ssmd.model.artifact import MANIFEST
from ssmd.model.checked import CheckedArtifacts
from ssmd.runtime import loading, trial
from ssmd.runtime.protocol import get_runtime

MANIFEST_CHECK, TRIAL, CRASH, LATE, LOADED, BUG = (
    *("refused by the manifest", "refused by the load", "crash contained", "out of time", "loaded and right", "bug"),
)


@dataclass(frozen=True)
class Outcome:
    """The end of a mutant's load. said: the error, or "". mib: most memory of the process that loaded it."""

    seed: int
    rule: str
    end: str
    said: str
    seconds: float
    mib: int


def outcomes(artifact: Path, folder: Path, seeds: Iterable[int], limit_s: float = 60) -> Iterator[Outcome]:
    """Yield what became of the mutants of these seeds."""
    words = [sys.executable, __file__, str(artifact), str(limit_s), str(folder), *map(str, seeds)]
    env = {**os.environ, "SSMD_CACHE_DIR": str(folder / "cache")}
    with subprocess.Popen(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            yield Outcome(**json.loads(line))
    assert process.returncode == 0


def _load(made: Mutant, runtime: str, limit_s: float) -> Outcome:
    started = time.perf_counter()

    def outcome(end: str, said: str = "", mib: int = 0) -> Outcome:
        text = said.replace(str(made.path), "DIR")
        return Outcome(made.seed, made.rule, end, text, round(time.perf_counter() - started, 2), mib)

    try:
        found = read("mutant", made.path)
        why = found.problem
        if not why and found.manifest is not None and found.manifest.runtime != "wgpu":  # its adapters do not fork
            why = why_unusable(found.manifest)
        if not why:
            CheckedArtifacts().open(made.path)
    except ValueError as err:
        if not type(err).__module__.startswith("ssmd"):
            return outcome(BUG, traceback.format_exc())
        why = str(err)
    except Exception:
        return outcome(BUG, traceback.format_exc())
    if why or found.manifest is None:
        return outcome(MANIFEST_CHECK, why)
    files = [made.path.with_name(f"{made.path.name}.{name}") for name in ("out", "err")]
    child = os.fork()
    if not child:
        for number, file in enumerate(files, 1):
            os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        try:
            _in_fork(made.path, found.manifest.runtime)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        sys.stdout.flush()
        os._exit(0)
    deadline = time.monotonic() + limit_s
    while not (ended := os.wait4(child, os.WNOHANG))[0]:
        if time.monotonic() > deadline:
            os.kill(child, 9)
        time.sleep(0.01)
    code, mib = os.waitstatus_to_exitcode(ended[1]), ended[2].ru_maxrss // 1024
    printed, errors = (file.read_text(errors="replace").strip() for file in files)
    if time.monotonic() > deadline:
        return outcome(LATE, mib=mib)
    if crashed := crash(code):
        return outcome(CRASH, crashed.name, mib)
    if code:
        return outcome(TRIAL, trial._error(errors), mib)
    verdict = json.loads(printed.splitlines()[-1])
    return outcome(LOADED if verdict["passed"] else TRIAL, verdict["why"], mib)


def _in_fork(path: Path, runtime: str) -> None:
    if runtime == "wgpu":  # nothing is asked of a GPU: a daemon loads it in its own process, after these checks
        import ssmd_wgpu.runtime

        vars(ssmd_wgpu.runtime)["WgpuProgram"] = _passed
        get_runtime(runtime).load(CheckedArtifacts().open(path))
        return
    sys.argv = ["trial", str(os.getppid()), str(path), json.loads((path / MANIFEST).read_text())["device_class"]]
    loading.main()


def _passed(*_: Any) -> None:
    sys.stdout.write(json.dumps({"passed": True, "why": ""}) + "\n")


def main() -> None:
    artifact, limit_s, folder = Path(sys.argv[1]), float(sys.argv[2]), Path(sys.argv[3])
    runtime = json.loads((artifact / MANIFEST).read_text())["runtime"]
    get_runtime(runtime)
    if runtime == "openvino":
        from ssmd_openvino.library import openvino

        openvino()
    folder.mkdir(parents=True, exist_ok=True)
    for seed in map(int, sys.argv[4:]):
        made = mutant(artifact, folder / str(seed), seed)
        done = _load(made, runtime, limit_s)
        sys.stdout.write(json.dumps(asdict(done)) + "\n")
        sys.stdout.flush()
        for left in folder.glob(f"{seed}*"):
            shutil.rmtree(left) if left.is_dir() else left.unlink()


if __name__ == "__main__":
    main()
