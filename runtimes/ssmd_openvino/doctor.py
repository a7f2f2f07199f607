"""A closer look at OpenVINO artifacts, `ssmd doctor npu`: each model is compiled for the device, and the artifact is
executed there, every step in a process of its own.

As a program: `describe DEVICE`, `compile DEVICE WAY ARTIFACT MODEL` or `execute DEVICE WAY ARTIFACT`, where a way is
one of runtime.ways; prints JSON.
"""

from __future__ import annotations

import json
import platform
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ssmd import __version__
from ssmd.machine.memory import most_resident
from ssmd.machine.processor import cpu_name
from ssmd.machine.size import show_size
from ssmd.machine.threads import default_threads
from ssmd.model.artifact import Artifact
from ssmd.runtime.execution import execute, result_line, told
from ssmd_openvino import library
from ssmd_openvino.runtime import PLUGINS, WEIGHTS, OpenVINORuntime, compiler_of, ways

STATUS = "compiled and linted for the NPU, never executed on one by those who made ssmd"
COMMAND = (sys.executable, "-m", "ssmd_openvino.doctor")
# Properties that identify a device, its driver and its compiler, if the plugin has them.
_DESCRIBED = (
    *("FULL_DEVICE_NAME", "DEVICE_ARCHITECTURE", "NPU_PLATFORM", "NPU_DRIVER_VERSION", "NPU_COMPILER_TYPE"),
    *("NPU_COMPILER_VERSION", "NPU_DEVICE_TOTAL_MEM_SIZE", "NPU_MAX_TILES", "OPTIMIZATION_CAPABILITIES"),
)


def look(artifacts: Sequence[Artifact], say: Callable[[str], None], device: str | None = None) -> dict[str, Any]:
    """Check artifacts, and return a report that a user can send. Its `ok` is True if no problem was found.

    say: gets lines of text meanwhile. device: a device instead of the one that an artifact was built for.
    """
    report: dict[str, Any] = {
        "ssmd": __version__,
        "openvino": library.package_version(),
        "platform": platform.platform(),
        "processor": cpu_name(),
        "devices": {},
        "artifacts": [],
    }
    usable = {d.name: d.why_not for d in OpenVINORuntime(probe=False).devices()}
    for name in dict.fromkeys([device or a.manifest.device_class for a in artifacts] or [device or "npu"]):
        why_not = usable.get(name, f"OpenVINO has no device {name!r}")
        report["devices"][name] = {"problem": why_not} if why_not else told(COMMAND, "describe", name)
        for text in _about(name, report["devices"][name]):
            say(text)
    for artifact in artifacts:
        where = device or artifact.manifest.device_class
        found = _read(artifact, where)
        report["artifacts"].append(found)
        if "problem" not in report["devices"][where]:
            _measure(artifact, where, report["devices"][where]["kept"].split(), found, say)
    report["ok"] = all("problem" not in d for d in report["devices"].values()) and all(map(_fine, report["artifacts"]))
    return report


def _about(name: str, found: dict[str, Any]) -> list[str]:
    """Return lines that describe a device, or say why it cannot be used."""
    if "problem" in found:
        npu = name == "npu" and sys.platform != "darwin"
        what = "Core ML and the NPU cannot execute here" if npu else f"{name} cannot be used here"
        return [f"{what}: {found['problem']}"]
    told = f"{name}: {'; '.join(f'{key} {value}' for key, value in found.items())}"
    return [told, STATUS if name == "npu" else f"what follows is measured on {name}, not on an NPU"]


def _read(artifact: Artifact, device: str) -> dict[str, Any]:
    """Return an artifact's description from its manifest and files."""
    manifest = artifact.manifest
    return {
        "name": manifest.name,
        "build": manifest.build,
        "quantization": manifest.quantization,
        "built_for": manifest.device_class,
        "device": device,
        "buckets": list(manifest.buckets),
        "tiers": list(manifest.tiers),
        "weights_bytes": manifest.files[WEIGHTS].size if artifact.has(WEIGHTS) else 0,
        "conversion": manifest.conversion,
        "builders": manifest.builders,
    }


def _measure(
    artifact: Artifact, device: str, kept: Sequence[str], found: dict[str, Any], say: Callable[[str], None]
) -> None:
    """Compile each model and execute the artifact, in each way to keep blobs. found: gets the results."""
    models = sorted(name for name in artifact.manifest.files if name.endswith(".xml"))
    size = show_size(found["weights_bytes"])
    say(f"{found['name']} ({found['quantization']}, build {found['build'][:12]}): {len(models)} models over {size}")
    found["ways"] = {}
    for way in kept:
        say(f" {way}:")
        seen: dict[str, Any] = {"models": {}}
        found["ways"][way] = seen
        for model in models:
            one = told(COMMAND, "compile", device, way, str(artifact.path), model)
            seen["models"][model.removesuffix(".xml")] = one
            said = one.get("problem") or f"compiled in {one['compile_s']:.1f} s, {show_size(one['blob_bytes'] or 0)}"
            say(f"  {model.removesuffix('.xml')}: {said}")
        seen["executed"] = told(COMMAND, "execute", device, way, str(artifact.path))
        say(result_line(device, seen["executed"]))


def _fine(found: dict[str, Any]) -> bool:
    """Return True if one of the ways works; a load takes the first that does."""
    return any(
        seen["executed"].get("passed") and not any("problem" in one for one in seen["models"].values())
        for seen in found.get("ways", {}).values()
    )


def describe(device: str) -> dict[str, Any]:
    """Return the plugin's properties of a device ("npu"), its driver and its compiler."""
    core, plugin = library.openvino().Core(), PLUGINS[device]
    known = set(core.get_property(plugin, "SUPPORTED_PROPERTIES"))
    found = {"build": str(core.get_versions(plugin)[plugin].build_number)}
    found |= {name: str(core.get_property(plugin, name)) for name in _DESCRIBED if name in known}
    return found | {"kept": " ".join(["whole"] if device == "cpu" else ways(core, device))}  # on the CPU nothing is


def compile_anew(artifact: Artifact, device: str, way: str, model: str) -> dict[str, Any]:
    """Compile one model. Returns the seconds and memory that it took, and the bytes of its blob; the CPU's has none."""
    core, build = library.openvino().Core(), artifact.manifest.build
    compiler = compiler_of(core, device, default_threads(), build, weightless=way == "weightless")
    started = time.perf_counter()
    _, nbytes = compiler.anew(artifact.file(model), artifact.file(WEIGHTS))
    found = {"compile_s": time.perf_counter() - started, "blob_bytes": nbytes, "peak_bytes": most_resident()}
    if device == "cpu" and compiler.folder is not None:
        shutil.rmtree(compiler.folder, ignore_errors=True)
    return found


def main() -> None:
    step, device, *rest = sys.argv[1:]
    found: dict[str, Any]
    if step == "describe":
        found = describe(device)
    elif step == "compile":
        found = compile_anew(Artifact.open(Path(rest[1])), device, rest[0], rest[2])
    else:
        runtime = OpenVINORuntime(probe=False, weightless=rest[0] == "weightless")
        found = execute(Artifact.open(Path(rest[1])), device, runtime) | {"peak_bytes": most_resident()}
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
