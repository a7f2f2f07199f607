"""The processor that this process runs on."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import sys
import threading
from pathlib import Path

MOST_THREADS = 256  # that anyone may ask of a runtime: more is a mistake, and a library would try to start them


def cpu_name() -> str:
    """What tells processors apart on which a graph may round differently: model name and vector extensions."""
    name, flags = platform.processor() or platform.machine(), ""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return name
    if found := re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE):
        name = found[1].strip()
    if found := re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE):
        wanted = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "amx_int8", "asimddp", "i8mm", "sve")
        flags = "+".join(w for w in wanted if w in found[1].split())
    return f"{name} {flags}".strip()


def give_way() -> None:
    """Let this thread run where others leave a processor free, if the system can tell threads apart so."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
