"""The return of freed memory to the system: when it is due, and that a daemon does it."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import TinyArtifacts
from daemon import daemon, soon

from ssmd.machine import memory
from ssmd.machine.memory import TrimSchedule

MB = 1_000_000


def trims(work: list[float], grows: int = 0) -> list[int]:
    """Return the seconds at which a process is trimmed. work: processor time of each second. grows: bytes a second."""
    schedule, worked, found = TrimSchedule(0.0, 0.0, 0), 0.0, []
    for second, more in enumerate(work, 1):
        worked += more
        held = grows * second
        if schedule.due(second, worked, lambda held=held: held):  # type: ignore[misc]  # bound in the loop
            found.append(second)
            schedule.trimmed(second, worked, held)
    return found


def test_memory_goes_back_once_after_work() -> None:
    assert trims([0.0] * 5 + [0.9] * 5 + [0.0] * 100) == [11]
    assert trims([0.01] * 100) == [20, 40, 60, 80, 100], "a little work is not worth more"
    assert trims([0.0] * 1000) == []


def test_memory_goes_back_seldom_while_a_process_works() -> None:
    assert trims([0.9] * 300) == []
    assert trims([0.9] * 300, grows=MB) == [256]
    assert trims([0.9] * 300, grows=100 * MB) == [60, 120, 180, 240, 300]


def test_a_moment_is_no_rest() -> None:
    schedule = TrimSchedule(0.0, 0.0, 0)
    assert not schedule.due(1.0, 0.9, lambda: 0)
    assert not schedule.due(1.001, 0.9, lambda: 0)
    assert schedule.due(2.0, 0.9, lambda: 0)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_a_daemon_returns_what_any_work_freed(
    artifacts: TinyArtifacts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trimmed, trim = list[float](), memory.trim

    def note() -> None:
        trimmed.append(time.monotonic())
        trim()

    monkeypatch.setattr(memory, "trim", note)
    with daemon(artifacts["llama-f32"], None) as one:
        trimmed.clear()
        answer = one.served.ask("POST", "/tokenize", {"model": one.model, "content": "a b " * 50_000})
        assert answer.status == 200, answer.body[:200]  # some tenths of a second of work, and no turn is stored for it
        done = time.monotonic()
        soon(lambda: bool(trimmed) and trimmed[-1] > done, within_s=15)


ARENAS = """
import ctypes, os, sys, tempfile, threading
from ssmd.machine.memory import return_big_blocks
return_big_blocks()
c, together = ctypes.CDLL("libc.so.6"), threading.Barrier(41)
c.malloc.restype = c.fopen.restype = ctypes.c_void_p
def take():
    c.malloc(5000)
    together.wait()
for _ in range(40):
    threading.Thread(target=take).start()
with tempfile.NamedTemporaryFile() as file:
    stream = ctypes.c_void_p(c.fopen(file.name.encode(), b"w"))
    together.wait()
    c.malloc_info(0, stream)
    c.fclose(stream)
    print(open(file.name).read().count("<heap nr="))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_threads_share_a_few_arenas() -> None:
    ran = subprocess.run([sys.executable, "-c", ARENAS], check=True, capture_output=True, text=True, timeout=60)
    assert 1 <= int(ran.stdout) <= 4
