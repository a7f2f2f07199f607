"""What Windows alone has, asked of its own libraries: memory, and who may open what lies in a folder."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

# Full access for the folder's owner, administrators and the system, for what is made in it too; nothing comes from the
# folder above. Python's own os.mkdir(mode=0o700) says the same, from 3.12.4 on.
_PRIVATE = "D:P(A;OICI;FA;;;{owner})(A;OICI;FA;;;BA)(A;OICI;FA;;;SY)"
_OTHERS = ("WD", "AN", "BU", "AU", "BG", "IU", "NU")  # everyone, anonymous, users, who logged on, guests, ...
_DACL, _PROTECTED = 0x4, 0x80000000  # winnt.h

if sys.platform == "win32":
    from ctypes import wintypes

    class _Memory(ctypes.Structure):
        """MEMORYSTATUSEX"""

        _fields_ = (
            ("length", wintypes.DWORD),
            ("load", wintypes.DWORD),
            *((name, ctypes.c_uint64) for name in ("total", "free", "page", "page_free", "virtual", "virtual_free")),
            ("extended", ctypes.c_uint64),
        )

    class _Process(ctypes.Structure):
        """PROCESS_MEMORY_COUNTERS"""

        _fields_ = (
            ("length", wintypes.DWORD),
            ("faults", wintypes.DWORD),
            *((name, ctypes.c_size_t) for name in ("peak", "resident", *"abcd", "page", "page_peak")),
        )

    _kernel, _advapi = ctypes.WinDLL("kernel32"), ctypes.WinDLL("advapi32")
    _kernel.GetCurrentProcess.restype = wintypes.HANDLE
    _kernel.K32GetProcessMemoryInfo.argtypes = (wintypes.HANDLE, ctypes.c_void_p, wintypes.DWORD)
    _kernel.LocalFree.argtypes = (ctypes.c_void_p,)

    def memory_free() -> int | None:
        """Bytes of memory that no process has taken."""
        found = _Memory(length=ctypes.sizeof(_Memory))
        return int(found.free) if _kernel.GlobalMemoryStatusEx(ctypes.byref(found)) else None

    def resident() -> int | None:
        """Bytes of this process in memory now."""
        return _process("resident")

    def most_resident() -> int | None:
        """The most bytes of this process that were ever in memory."""
        return _process("peak")

    def _process(field: str) -> int | None:
        found = _Process(length=ctypes.sizeof(_Process))
        told = _kernel.K32GetProcessMemoryInfo(_kernel.GetCurrentProcess(), ctypes.byref(found), found.length)
        return int(getattr(found, field)) if told else None
