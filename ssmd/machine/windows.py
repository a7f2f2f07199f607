"""Calls of Windows' own libraries: memory, short paths, and the access rights of files and folders."""

from __future__ import annotations

import ctypes
import re
import sys
from pathlib import Path

# Full access for the owner, administrators and the system, to the folder and all that is made in it. Nothing is
# inherited from the folder above. Python's os.mkdir makes the same of mode 0o700 from 3.12.4 on.
_PRIVATE = "D:P(A;OICI;FA;;;OW)(A;OICI;FA;;;BA)(A;OICI;FA;;;SY)"
# SIDs of Everyone, Anonymous, Guests, Users, Authenticated, Interactive, Network.
_OTHERS = re.compile(r"\(A;[^)]*;(WD|AN|BG|BU|AU|IU|NU)\)")
_DACL, _PROTECTED, _REVISION = 0x4, 0x80000000, 1  # winnt.h, sddl.h

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

    _kernel, _advapi = ctypes.WinDLL("kernel32", use_last_error=True), ctypes.WinDLL("advapi32", use_last_error=True)
    _kernel.GetCurrentProcess.restype = wintypes.HANDLE
    _kernel.K32GetProcessMemoryInfo.argtypes = (wintypes.HANDLE, ctypes.c_void_p, wintypes.DWORD)
    _kernel.LocalFree.argtypes = (ctypes.c_void_p,)
    _kernel.GetShortPathNameW.argtypes = (wintypes.LPCWSTR, wintypes.LPWSTR, wintypes.DWORD)

    def memory_free() -> int | None:
        """Return the bytes of free physical memory; None if the call fails."""
        found = _Memory(length=ctypes.sizeof(_Memory))
        return int(found.free) if _kernel.GlobalMemoryStatusEx(ctypes.byref(found)) else None

    def resident() -> int | None:
        """Return the bytes of this process in memory now; None if the call fails."""
        return _process("resident")

    def most_resident() -> int | None:
        """Return the most bytes of this process that were ever in memory; None if the call fails."""
        return _process("peak")

    def _process(field: str) -> int | None:
        found = _Process(length=ctypes.sizeof(_Process))
        told = _kernel.K32GetProcessMemoryInfo(_kernel.GetCurrentProcess(), ctypes.byref(found), found.length)
        return int(getattr(found, field)) if told else None

    def short_name(path: Path) -> str:
        """Return an existing path by its short names (8.3), where it has them. Raises OSError."""
        size = _kernel.GetShortPathNameW(str(path), None, 0)
        _done(size)
        name = ctypes.create_unicode_buffer(size)
        _done(_kernel.GetShortPathNameW(str(path), name, size))
        return name.value

    def make_private(folder: Path) -> None:
        """Set a folder's rights to _PRIVATE; what is made in it later inherits them. Raises OSError."""
        descriptor = ctypes.c_void_p()
        text = ctypes.c_wchar_p(_PRIVATE)
        _done(
            _advapi.ConvertStringSecurityDescriptorToSecurityDescriptorW(
                text, _REVISION, ctypes.byref(descriptor), None
            )
        )
        try:
            which = ctypes.c_uint32(_DACL | _PROTECTED)
            _done(_advapi.SetFileSecurityW(ctypes.c_wchar_p(str(folder)), which, descriptor))
        finally:
            _kernel.LocalFree(descriptor)

    def others_open(path: Path) -> bool:
        """Return True if other users of this computer may open a file or folder. Raises OSError."""
        name, needed = ctypes.c_wchar_p(str(path)), wintypes.DWORD()
        _advapi.GetFileSecurityW(name, _DACL, None, 0, ctypes.byref(needed))
        descriptor = ctypes.create_string_buffer(needed.value)
        _done(_advapi.GetFileSecurityW(name, _DACL, descriptor, needed, ctypes.byref(needed)))
        text = ctypes.c_wchar_p()
        _done(
            _advapi.ConvertSecurityDescriptorToStringSecurityDescriptorW(
                descriptor, _REVISION, _DACL, ctypes.byref(text), None
            )
        )
        try:
            return "D:" not in (rights := text.value or "") or _OTHERS.search(rights) is not None
        finally:
            _kernel.LocalFree(text)

    def _done(told: int) -> None:
        if not told:
            raise ctypes.WinError(ctypes.get_last_error())
