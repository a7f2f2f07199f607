"""An artifact's execution on a device, for a report that a user can send: its golden values and times.

A driver may crash the process that uses it. So `ssmd doctor` does this in processes of their own, and reports how they
ended.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ssmd.model.artifact import Artifact
from ssmd.runtime.protocol import Program, Runtime
from ssmd.runtime.trial import CrashError, last_line
from ssmd.runtime.verify import verify

DECODED, REPEATS = 32, 5  # tokens and prefills that are timed
SAID = 200  # characters of output that are reported if it is not JSON, such as a driver's last line


def told(command: Sequence[str], *arguments: str) -> dict[str, Any]:
    """Run a process and return the JSON object of its last line.

    Returns an object with `problem` if it fails, is killed, or prints no JSON object.
    """
    try:
        said = last_line([*command, *arguments])
    except CrashError as err:
        return {"problem": str(err)}
    try:
        found = json.loads(said)
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {"problem": f"it printed {said[:SAID]!r} instead of a result"}


def execute(artifact: Artifact, device: str, runtime: Runtime) -> dict[str, Any]:
    """Run an artifact on a device of a runtime. Return its golden values' errors and its times (ms, medians)."""
    started = time.perf_counter()
    program = runtime.load(artifact, device=device)
    loaded = time.perf_counter() - started
    try:
        report = verify(artifact, program)
        decode_ms, prefill_ms = _timed(program)
    finally:
        program.close()
    return {
        "producer": program.producer,
        "passed": report.passed,
        "worst_rms": report.worst.rms_relative,
        "allowed_rms": report.tolerance,
        "golden": artifact.manifest.golden,
        "steps": [asdict(step) for step in report.steps],
        "load_s": loaded,
        "decode_ms": decode_ms,
        "prefill_ms": prefill_ms,
    }


def result_line(where: str, seen: dict[str, Any]) -> str:
    """Return the result of `execute` as a line for people."""
    if "problem" in seen:
        return f"  {where}: {seen['problem']}"
    verdict = "passed" if seen["passed"] else "FAILED"
    return (
        f"  {where}: golden values {verdict} (worst step {seen['worst_rms']:.2g} standard deviations off), load "
        f"{seen['load_s']:.1f} s, decode {seen['decode_ms']:.2f} ms, prefill "
        + ", ".join(f"{n}: {ms:.1f} ms" for n, ms in seen["prefill_ms"].items())
    )


def _timed(program: Program) -> tuple[float, dict[int, float]]:
    """Measure a decode step, and a whole prefill of every length: medians, ms."""
    prefill_ms = {}
    for length in program.buckets:
        took = []
        for _ in range(REPEATS):
            handle = program.new_state()
            started = time.perf_counter()
            program.prefill(handle, [0] * length)
            took.append((time.perf_counter() - started) * 1e3)
            program.release(handle)
        prefill_ms[length] = statistics.median(took)
    handle, took = program.new_state(), []
    for _ in range(DECODED):
        started = time.perf_counter()
        program.decode([handle], [0])
        took.append((time.perf_counter() - started) * 1e3)
    program.release(handle)
    return statistics.median(took), prefill_ms
