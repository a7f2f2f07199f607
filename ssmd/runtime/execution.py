"""An artifact executed on a device, for a report that can be sent: its golden values and its times.

A driver may crash the process that uses it: a doctor does this in processes of their own, and tells what became of
them.
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
SAID = 200  # characters that are told of what is no JSON, such as a driver's last words


def told(command: Sequence[str], *arguments: str) -> dict[str, Any]:
    """What a process prints last, an object of JSON; `problem` in it where it fails, is killed, or says none."""
    try:
        said = last_line([*command, *arguments])
    except CrashError as err:
        return {"problem": str(err)}
    try:
        found = json.loads(said)
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {"problem": f"it said {said[:SAID]!r}"}


def execute(artifact: Artifact, device: str, runtime: Runtime) -> dict[str, Any]:
    """Golden values and times (ms, medians) of an artifact on a device of a runtime."""
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


def shown(where: str, seen: dict[str, Any]) -> str:
    """Write what `execute` found as a line for people."""
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
