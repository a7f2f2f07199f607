"""Processes that crash, and what is said of them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ssmd.machine.crash import Crash, crash

CRASHES = "import faulthandler; faulthandler._read_null()"


def test_a_process_that_crashes_is_told_from_one_that_ends() -> None:
    """For real, on the system that this is."""
    crashed = crash(_ended(CRASHES))
    assert crashed is not None
    assert crashed.own
    assert crashed.name in ("SIGSEGV", "0xC0000005, access violation")
    for code in (0, 1, 3, 130):
        assert crash(_ended(f"raise SystemExit({code})")) is None


def _ended(program: str) -> int:
    return subprocess.run([sys.executable, "-c", program], stderr=subprocess.DEVNULL, check=False).returncode


@pytest.mark.parametrize(
    ("code", "system", "found"),
    [
        (-9, "linux", Crash("SIGKILL", own=False)),
        (-6, "linux", Crash("SIGABRT", own=True)),
        (0xC0000005, "linux", None),
        (0xC0000005, "win32", Crash("0xC0000005, access violation", own=True)),
        (-1073741819, "win32", Crash("0xC0000005, access violation", own=True)),  # the same, with a sign
        (0xC000013A, "win32", Crash("0xC000013A", own=False)),  # Ctrl-C
        (0xC0000017, "win32", Crash("0xC0000017", own=False)),  # no memory
        (1, "win32", None),
    ],
)
def test_what_a_system_says_is_understood_on_every_other(code: int, system: str, found: Crash | None) -> None:
    if sys.platform == "win32" and system != "win32":
        pytest.skip("its signals have other numbers")
    assert crash(code, system) == found
