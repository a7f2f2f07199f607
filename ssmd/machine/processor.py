"""The processor that this process runs on."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import subprocess
import sys
import threading
from functools import cache
from pathlib import Path

MOST_THREADS = 256  # threads that a setting may request: more is a mistake, and a library would try to start them
# /proc/cpuinfo on ARM has numbers, not names: a core's maker, and the model of ARM's own cores (names as in `lscpu`).
_MAKERS = {0x41: "ARM", 0x46: "Fujitsu", 0x48: "HiSilicon", 0x4E: "NVIDIA", 0x51: "Qualcomm", 0x61: "Apple"}
_ARM, _CORES = (
    0x41,
    {
        0xD03: "Cortex-A53",
        0xD04: "Cortex-A35",
        0xD05: "Cortex-A55",
        0xD07: "Cortex-A57",
        0xD08: "Cortex-A72",
        0xD09: "Cortex-A73",
        0xD0A: "Cortex-A75",
        0xD0B: "Cortex-A76",
        0xD0C: "Neoverse-N1",
        0xD0D: "Cortex-A77",
        0xD40: "Neoverse-V1",
        0xD41: "Cortex-A78",
        0xD44: "Cortex-X1",
        0xD46: "Cortex-A510",
        0xD47: "Cortex-A710",
        0xD48: "Cortex-X2",
        0xD49: "Neoverse-N2",
        0xD4D: "Cortex-A715",
        0xD4E: "Cortex-X3",
        0xD4F: "Neoverse-V2",
        0xD80: "Cortex-A520",
        0xD81: "Cortex-A720",
        0xD82: "Cortex-X4",
    },
)
_WANTED = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "amx_int8", "asimddp", "i8mm", "sve")  # vector extensions
_LIMIT_S = 5.0  # longest run of a system command


def cpu_name() -> str:
    """Return the processor's model name and vector extensions. Graphs may round differently where these differ."""
    if sys.platform == "darwin" and (name := sysctl("machdep.cpu.brand_string")):
        return name
    name = platform.processor() or platform.machine()
    if sys.platform != "linux":  # under wine that file is there
        return name
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    return name_in(text, name)


def name_in(cpuinfo: str, machine: str) -> str:
    """Return the result of `cpu_name` for this text of /proc/cpuinfo. machine: the name known without it."""
    name, flags = machine, ""
    if found := re.search(r"^model name\s*:\s*(.+)$", cpuinfo, re.MULTILINE):
        name = found[1].strip()
    if cores := _arm_cores(cpuinfo):
        name = f"{machine} {' and '.join(cores)}"
    if found := re.search(r"^(?:flags|Features)\s*:\s*(.+)$", cpuinfo, re.MULTILINE):
        flags = "+".join(w for w in _WANTED if w in found[1].split())
    return f"{name} {flags}".strip()


def _arm_cores(cpuinfo: str) -> list[str]:
    """Return the kinds of cores of an ARM processor, sorted: "ARM Cortex-A55", or numbers for unknown ones."""
    makers = re.findall(r"^CPU implementer\s*:\s*(0x[0-9a-f]+)$", cpuinfo, re.MULTILINE | re.IGNORECASE)
    parts = re.findall(r"^CPU part\s*:\s*(0x[0-9a-f]+)$", cpuinfo, re.MULTILINE | re.IGNORECASE)
    kinds = {(int(maker, 16), int(part, 16)) for maker, part in zip(makers, parts, strict=False)}

    def named(maker: int, part: int) -> str:
        core = _CORES.get(part, "") if maker == _ARM else ""
        return f"{_MAKERS.get(maker, f'{maker:#x}')} {core or f'{part:#05x}'}"

    return sorted(named(*kind) for kind in kinds)


@cache
def sysctl(name: str) -> str:
    """Return a value of macOS' kernel; "" if it has none of this name."""
    try:
        done = subprocess.run(
            ["/usr/sbin/sysctl", "-n", name], capture_output=True, text=True, check=True, timeout=_LIMIT_S
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def cpus() -> set[int]:
    """Return the numbers of the hardware threads that this process may use."""
    if sys.platform == "linux":
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def load_average() -> tuple[float, float, float] | None:
    """Return the load average over 1, 5 and 15 minutes; None if the system does not count it."""
    if sys.platform == "win32":
        return None
    try:
        return os.getloadavg()
    except OSError:
        return None


def behind_others(nice: int) -> None:
    """Lower this process's priority by `nice`; on Windows do nothing."""
    if sys.platform != "win32":
        with contextlib.suppress(OSError):
            os.nice(nice)


def give_way() -> None:
    """Give this thread the lowest priority, if the system has priorities of threads (Linux)."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
