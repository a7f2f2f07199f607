"""The first load of an artifact on a device whose driver may crash: in a process of its own, against golden values.

The verdict is kept in a folder that is of this artifact, device and driver.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ssmd.model.artifact import Artifact
from ssmd.runtime.protocol import Runtime
from ssmd.runtime.verify import verify

log = logging.getLogger(__name__)
LIMIT_S = 3600  # a compiler of large models takes minutes
_TAIL = 500  # characters of what a process said last


class CrashError(RuntimeError):
    """A process failed, or was killed by what it tried; the message says how."""


@dataclass(frozen=True)
class Verdict:
    """Whether a first load passed. `why` is empty if it did."""

    passed: bool
    why: str


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
    """The verdict in `folder`; where there is none it is found out by `command` with the artifact and the device.

    `costs`: what is said of that before it begins; `limit_s`: when it is given up; `times`: how often it has to pass.
    """
    file = folder / "verdict.json"
    kept = _read(file)
    if kept is not None:
        return kept
    said = f"first load on {device}: trying it in a process of its own, which compiles it; this can take minutes"
    log.warning("%s%s", said, f"; {costs}" if costs else "")
    tries = (_tried([*command, str(artifact.path), device], limit_s) for _ in range(times))
    verdict = next((one for one in tries if not one.passed), Verdict(True, ""))
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        file.write_text(json.dumps(asdict(verdict)))
    except OSError as err:
        log.warning("the verdict could not be kept (%s): each load tries the artifact again", err)
    return verdict


def judge(runtime: Runtime) -> None:
    """What such a command does: load the artifact named first on the device named second and print the verdict on
    golden values as JSON."""
    artifact = Artifact.open(Path(sys.argv[1]))
    program = runtime.load(artifact, device=sys.argv[2])
    try:
        report = verify(artifact, program)
    finally:
        program.close()
    worst = report.worst
    why = f"its logits are {worst.rms_relative:.3g} standard deviations off, {report.tolerance:g} is allowed"
    sys.stdout.write(json.dumps(asdict(Verdict(report.passed, "" if report.passed else why))) + "\n")


def last_line(command: Sequence[str], limit_s: float = LIMIT_S) -> str:
    """What a command that may crash says last. Raises CrashError if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False, env=os.environ)
    except subprocess.TimeoutExpired as err:
        raise CrashError(f"it was not done after {limit_s:.0f} s") from err
    except OSError as err:
        raise CrashError(f"no process could be started to try it: {err}") from err
    if done.returncode < 0:
        raise CrashError(f"it crashed ({signal.Signals(-done.returncode).name})")
    if done.returncode or not done.stdout.strip():
        last = done.stderr.strip().rpartition("\n")[2]  # of a traceback: the error
        raise CrashError(last[-_TAIL:] or f"it ended with exit code {done.returncode}")
    return done.stdout.strip().splitlines()[-1]


def _tried(command: Sequence[str], limit_s: float) -> Verdict:
    try:
        said = last_line(command, limit_s)
    except CrashError as err:
        return Verdict(False, str(err))
    return _parsed(said) or Verdict(False, f"it said {said[:_TAIL]!r}")


def _read(file: Path) -> Verdict | None:
    try:
        return _parsed(file.read_text())
    except (OSError, UnicodeDecodeError):
        return None


def _parsed(text: str) -> Verdict | None:
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        return None
    match fields:
        case {"passed": bool(passed), "why": str(why)}:
            return Verdict(passed, why)
    return None
