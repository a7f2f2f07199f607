"""Crashes: the ends of processes by a signal, or on Windows by an error status."""

from __future__ import annotations

import signal
import sys
from dataclasses import dataclass

_OWN = ("SIGSEGV", "SIGABRT", "SIGFPE", "SIGBUS", "SIGILL")
_OWN_STATUS = {  # ntstatus.h
    0x80000003: "breakpoint",
    0xC0000005: "access violation",
    0xC0000006: "page that cannot be read",
    0xC000001D: "illegal instruction",
    0xC0000094: "division by zero",
    0xC0000096: "privileged instruction",
    0xC00000FD: "stack overflow",
    0xC0000374: "heap corruption",
    0xC0000409: "abort",
    0xC06D007E: "library that is missing",
}
_ERROR = 0xC0000000  # the severity of an error status, which out of memory, Ctrl-C and a logoff have too


@dataclass(frozen=True)
class Crash:
    """The end of a process by a signal or an error status."""

    name: str
    own: bool  # its own code caused it, not a lack of memory, a shutdown, or another process


def crash(code: int, system: str = sys.platform) -> Crash | None:
    """Return the crash behind an exit code; None if the process ended by itself. system: as `sys.platform`."""
    if system == "win32":
        code &= 0xFFFFFFFF
        if code in _OWN_STATUS:
            return Crash(f"0x{code:08X}, {_OWN_STATUS[code]}", own=True)
        return Crash(f"0x{code:08X}", own=False) if code & _ERROR == _ERROR else None
    if code >= 0:
        return None
    name = signal.Signals(-code).name
    return Crash(name, own=name in _OWN)
