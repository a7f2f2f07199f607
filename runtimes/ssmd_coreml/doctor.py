"""The check of Core ML artifacts, `ssmd doctor coreml`.

On a Mac each artifact is executed on every compute unit, in a process of its own. Elsewhere the report says what was
verified and what was not. As a program, it executes an artifact on a unit and prints the measurements as JSON.
Arguments: ARTIFACT UNIT.
"""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ssmd.model.artifact import Artifact
from ssmd.runtime.execution import execute, result_line, told
from ssmd.runtime.hoststate.graph import GraphError
from ssmd.runtime.protocol import RuntimeUnavailable
from ssmd_coreml import library
from ssmd_coreml.backend import COMPUTE_UNITS, compiled_path
from ssmd_coreml.package import Package
from ssmd_coreml.runtime import DEVICES, MODEL, CoreMLRuntime

VERIFIED = "verified by an independent evaluator on Linux, not executed on Apple hardware"
COMMAND = (sys.executable, "-m", "ssmd_coreml.doctor")


def look(artifacts: Sequence[Artifact], say: Callable[[str], None], device: str | None = None) -> dict[str, Any]:
    """Check artifacts, and return a report that a user can send. Its `ok` is True if no problem was found.

    say: gets lines of text. device: a compute unit, instead of all. Raises RuntimeUnavailable for an unknown one.
    """
    if device not in (None, *DEVICES):
        raise RuntimeUnavailable(f"Core ML has no device {device!r}; there are: {', '.join(DEVICES)}")
    runtime = CoreMLRuntime(probe=False)
    why_not = runtime.devices()[0].why_not
    report: dict[str, Any] = {"system": why_not or "executed here", "artifacts": []}
    say(f"how artifacts are built is {VERIFIED}" + (f"; {why_not}" if why_not else ""))
    for artifact in artifacts:
        found = read(artifact)
        if not why_not:
            found["executed"] = {
                unit: told(COMMAND, str(artifact.path), unit) for unit in DEVICES if device in (None, unit)
            }
        report["artifacts"].append(found)
        for line in lines(found):
            say(line)
    report["ok"] = all(_fine(found) for found in report["artifacts"])
    return report


def _fine(found: dict[str, Any]) -> bool:
    """Return True if an artifact can be read and gives its golden values; on the Neural Engine it need not.

    A load falls back from the Neural Engine.
    """
    executed: dict[str, Any] = found.get("executed", {})
    return "problem" not in found and all(seen.get("passed") for unit, seen in executed.items() if unit != "ane")


def read(artifact: Artifact) -> dict[str, Any]:
    """Return the contents of the files, without executing them: functions, operations, bytes read by a call, states."""
    manifest = artifact.manifest
    found: dict[str, Any] = {
        "name": manifest.name,
        "build": manifest.build,
        "quantization": manifest.quantization,
        "variant": manifest.conversion.get("variant"),
        "ane": manifest.conversion.get("ane"),
        "builders": manifest.builders,
    }
    try:
        package = Package(artifact.path / MODEL)
    except GraphError as err:
        return {**found, "problem": str(err)}
    found["functions"] = {
        name: {
            "operations": package.counted(name),
            "constant_bytes": sum(package.constants(name).values()),
            "state_bytes": sum(math.prod(t.shape) * t.dtype.itemsize for t in interface.states.values()),
        }
        for name, interface in package.functions.items()
    }
    return found


def lines(found: dict[str, Any]) -> list[str]:
    """Write the same report as lines for people."""
    made = [f"{found['name']} ({found['variant']}, {found['quantization']}, build {found['build'][:12]})"]
    if "problem" in found:
        return [*made, f"  {found['problem']}"]
    for name, function in found["functions"].items():
        made.append(
            f"  {name}: {sum(function['operations'].values())} operations, reads {function['constant_bytes'] / 1e6:.1f}"
            f" MB of constants; states of {function['state_bytes'] / 1e6:.1f} MB"
        )
    ane = found["ane"]
    made.append(f"  Neural Engine: {ane if isinstance(ane, str) else '; '.join(ane or ['not known'])}")
    for unit, seen in found.get("executed", {}).items():
        made.append(result_line(unit, seen))
        for name, counts in seen.get("placement", {}).items():
            made.append(f"    {name}: " + ", ".join(f"{n} operations on {where}" for where, n in counts.items()))
    return made


def placement(artifact: Artifact, unit: str) -> dict[str, dict[str, int]]:
    """Return the number of each function's operations by the unit that Core ML plans (MLComputePlan, macOS 14.4)."""
    ct = library.coremltools()
    from coremltools.models.compute_plan import MLComputePlan

    [units] = [name for key, name in COMPUTE_UNITS.items() if key == unit]
    with library.quiet():
        plan = MLComputePlan.load_from_path(
            str(compiled_path(artifact.manifest.build)), compute_units=ct.ComputeUnit[units]
        )
    found = {}
    for name, function in plan.model_structure.program.functions.items():
        counts: Counter[str] = Counter()
        for operation in function.block.operations:
            usage = plan.get_compute_device_usage_for_mlprogram_operation(operation)
            if usage is not None:
                counts[type(usage.preferred_compute_device).__name__] += 1
        found[name] = dict(counts)
    return found


def main() -> None:
    artifact = Artifact.open(Path(sys.argv[1]))
    measured = execute(artifact, sys.argv[2], CoreMLRuntime(probe=False))
    sys.stdout.write(json.dumps({**measured, "placement": placement(artifact, sys.argv[2])}) + "\n")


if __name__ == "__main__":
    main()
