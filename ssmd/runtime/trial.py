"""The trial load of an artifact on a device whose driver may crash: in a process of its own, against golden values.

The verdict is kept in a folder for this artifact, device and driver.
"""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

import numpy as np

from ssmd.machine.crash import crash
from ssmd.machine.privatefile import read_own
from ssmd.machine.progress import announce
from ssmd.model.artifact import Artifact
from ssmd.model.state import State
from ssmd.runtime.protocol import Program, Runtime, prepare
from ssmd.runtime.verify import Report, verify

log = logging.getLogger(__name__)
LIMIT_S = 3600  # longest trial: a compiler of large models takes minutes
COMPILED_FOR = ("npu", "gpu", "ane")  # devices whose drivers compile an artifact
MOST_BYTES = 64 << 10  # bytes that are read of a verdict, and of a process's output
_SECRET = re.compile(r"(TOKEN|KEY|KEYS_FILE|SECRET|PASSWORD)$")
_LOGGED = re.compile(r"(VERBOSE|INFO|WARNING): \[")  # LiteRT's log lines, which may follow the last line of a traceback
_ERROR = re.compile(r"[A-Za-z_][\w.]*(?:: |\Z)")  # the line of a traceback that begins the error
_TAIL = 500  # characters of a process's error that are shown
_LONGEST_WAIT_S = 24 * 3600  # longest time until a trial after accidents is repeated
_unkept: dict[Path, Verdict] = {}  # verdicts by the folder that cannot be written
_accidents: dict[Path, _Accident] = {}  # the last one by the verdict's folder, until a trial ends without one


class CrashError(RuntimeError):
    """The failure or crash of a process; the message describes it."""

    def __init__(self, why: str, *, accident: bool = False) -> None:
        """accident: the cause may be temporary, such as too little memory, and not the tried library."""
        super().__init__(why)
        self.accident = accident


@dataclass(frozen=True)
class Verdict:
    """The result of a trial load. why: the reason of a failure, or "". The verdict of an accident is not kept.

    again_s: time until this process repeats a trial that ended by an accident.
    """

    passed: bool
    why: str
    accident: bool = False
    again_s: float = field(default=0.0, compare=False)


@dataclass(frozen=True)
class _Accident:
    verdict: Verdict
    count: int  # accidents so far
    until: float  # monotonic time before which the trial is not repeated


def probed(
    command: Sequence[str],
    artifact: Artifact,
    device: str,
    folder: Path,
    costs: str = "",
    *,
    limit_s: float = LIMIT_S,
    times: int = 1,
) -> Verdict:
    """Return the verdict in `folder`. Without one there, find it by running `command` with the artifact and the device.

    costs: added to the log line before the trial. limit_s: longest run of each trial. times: trials that must pass.
    A trial that ends by an accident, such as a hang, is repeated after twice the time that it took, then after four
    times, and so on: each request would repeat it otherwise.
    """
    file = folder / "verdict.json"
    kept = _unkept.get(folder) or _read(file)
    if kept is not None:
        return kept
    last, began = _accidents.get(folder), time.monotonic()
    if last is not None and began < last.until:
        return replace(last.verdict, again_s=last.until - began)
    compiles = ", which compiles it; this can take minutes" if device in COMPILED_FOR else ""
    said = f"first load on {device}: trying it in a process of its own{compiles or ' first'}"
    log.warning("%s%s", said, f"; {costs}" if costs else "")
    verdict = Verdict(True, "")
    for number in range(1, times + 1):
        which = f"trial load {number} of {times}" if times > 1 else "trial load"
        announce(f"{which} on {device}, in a process of its own{compiles or ', with golden values'}")
        verdict = _tried([*command, str(artifact.path), device], limit_s)
        if not verdict.passed:
            break
    if verdict.accident:
        count = 1 if last is None else last.count + 1
        ended = time.monotonic()
        wait = min(_LONGEST_WAIT_S, (ended - began) * 2.0 ** min(count, 30))
        _accidents[folder] = _Accident(verdict, count, ended + wait)
        return replace(verdict, again_s=wait)
    _accidents.pop(folder, None)
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder.chmod(0o700)
        descriptor, fresh = tempfile.mkstemp(dir=folder)  # no other user can read or write it
        with os.fdopen(descriptor, "w") as new:
            new.write(_json(verdict))
        os.replace(fresh, file)
    except OSError as err:
        log.warning("the verdict could not be kept (%s): each start tries the artifact again", err)
        _unkept[folder] = verdict
    return verdict


def judge(runtime: Runtime, *, bare: bool = False) -> None:
    """Do the work of a trial's command: load the artifact, run all signatures, and print the verdict as JSON.

    The command line names the artifact and the device. The verdict compares golden values. bare: an artifact without
    them may pass.
    """
    artifact = Artifact.open(Path(sys.argv[1]))
    program = runtime.load(artifact, device=sys.argv[2])
    try:
        why = "" if bare and artifact.manifest.golden == "none" else _off(verify(artifact, program))
        run_all(program, artifact.manifest.tiers)
    finally:
        program.close()
    sys.stdout.write(_json(Verdict(not why, why)) + "\n")


def _off(report: Report) -> str:
    """Return the reason why golden values failed, or ""."""
    off = f"its logits are {report.worst.rms_relative:.3g} standard deviations off, {report.tolerance:g} is allowed"
    return "" if report.passed else off


def run_all(program: Program, tiers: Iterable[int]) -> None:
    """Run every signature once. Golden values run only few of the buckets, the smallest tier, and one stream.

    If one model serves all tiers, every length runs with the smallest tier. Only a step and the smallest bucket run
    with the largest: 256 tokens there take ten times as long as all the rest.
    """
    lengths = (1, *program.buckets)
    below = [(at, lengths) for at in (0, *tuple(tiers)[:-1])]  # for each tier, the capacity of the one below it
    if getattr(program, "any_capacity", False):
        below = [*below[:1], *((at, lengths[:2]) for at, _ in below[1:][-1:])]
    prepare(program)
    for tier_below, those in below:
        for length in those:
            position = max(0, tier_below + 1 - length)  # the first position whose call exceeds that capacity
            zeros = {t.name: np.zeros(t.shape_at(position), t.numpy_dtype) for t in program.spec.tensors}
            handle = program.restore(State(position, 0, zeros))
            if length == 1:
                program.decode([handle], [0])
            else:
                program.prefill(handle, [0] * length)
            program.release(handle)


def last_line(command: Sequence[str], limit_s: float = LIMIT_S) -> str:
    """Run a command that may crash, and return its last line. Raises CrashError if it fails."""
    try:
        with tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as errors:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=errors,
                timeout=limit_s,
                check=False,
                env=_without_secrets(),
            )
            stdout, stderr = _end(said), _end(errors)
    except subprocess.TimeoutExpired as err:
        raise CrashError(f"it was not done after {limit_s:.0f} s", accident=True) from err
    except OSError as err:
        raise CrashError(f"no process could be started to try it: {err}", accident=True) from err
    if crashed := crash(done.returncode):
        raise CrashError(f"it crashed ({crashed.name})", accident=not crashed.own or _short(stderr))
    if done.returncode or not stdout:
        last = _error(stderr)
        raise CrashError(last[:_TAIL] or f"it ended with exit code {done.returncode}", accident=_short(last))
    return stdout.splitlines()[-1]


def _error(stderr: str) -> str:
    """Return the error at the end of a process's output as one line: the end of a traceback, or the last line."""
    lines = [line for line in stderr.splitlines() if not _LOGGED.match(line)] or [""]
    inner = max((i for i, line in enumerate(lines) if line.startswith("  File ")), default=None)
    if inner is None:
        return lines[-1]
    begins = next((i for i in range(inner, len(lines)) if _ERROR.match(lines[i])), len(lines) - 1)
    return " ".join(" ".join(lines[begins:]).split())


def _short(said: str) -> bool:
    """Return True if a process's output says that it had too little memory."""
    return any(one in said for one in ("MemoryError", "bad_alloc", "Cannot allocate memory", "(ulimit -v)"))


def _end(file: IO[bytes]) -> str:
    file.seek(max(0, file.seek(0, os.SEEK_END) - MOST_BYTES))
    return file.read().decode(errors="replace").strip()


def _without_secrets() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not _SECRET.search(name.upper())}


def _tried(command: Sequence[str], limit_s: float) -> Verdict:
    try:
        said = last_line(command, limit_s)
    except CrashError as err:
        return Verdict(False, str(err), err.accident)
    return _parsed(said) or Verdict(False, f"it printed {said[:_TAIL]!r} instead of a verdict")


def _read(file: Path) -> Verdict | None:
    try:
        found = read_own(file, MOST_BYTES + 1)
        return _parsed(found.decode()) if len(found) <= MOST_BYTES else None
    except (OSError, UnicodeDecodeError):
        return None


def _json(verdict: Verdict) -> str:
    return json.dumps({"passed": verdict.passed, "why": verdict.why})


def _parsed(text: str) -> Verdict | None:
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        return None
    match fields:
        case {"passed": bool(passed), "why": str(why)}:
            return Verdict(passed, why)
    return None
