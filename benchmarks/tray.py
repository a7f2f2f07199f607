"""The cost of the tray: its part of a core, its memory, its effect on TBT, and its memory after a day.

    python benchmarks/tray.py [MODEL]

The daemon is real. The tray runs as `ssmd tray` in a process of its own; it is drawn without a screen unless DISPLAY is
set. The day is simulated: as many updates as a day has, once a second, go through the tray's own logic and window as
fast as they can. Needs the extra `tray`; Linux alone, for /proc.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from daemon_process import SSMD, HostProcess, conditions

from ssmd.daemon.discovery import Address, find

if "DISPLAY" not in os.environ:
    os.environ["QT_QPA_PLATFORM"] = "offscreen"
MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
STORY = [{"role": "user", "content": "Tell a long story of a lighthouse and its keeper."}]
IDLE_S, TOKENS, ROUNDS = 20.0, 400, 20
DAY = 86_400
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def processor_s(pid: int) -> float:
    """Seconds of processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * TICK_S


def memory_mb(pid: int | str = "self") -> dict[str, float]:
    """Resident memory, and of that what the process shares with no file."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    told = [line.split() for line in lines if line.startswith(("VmRSS", "RssAnon"))]
    return {name.rstrip(":"): float(kilobytes) / 1e3 for name, kilobytes, _ in told}


@contextlib.contextmanager
def tray(data: Path) -> Iterator[int]:
    with subprocess.Popen([*SSMD, "tray", "--data-dir", str(data)]) as process:
        try:
            time.sleep(8)
            yield process.pid
        finally:
            process.terminate()


def share(pid: int, work: object) -> float:
    """The part of a core that a process used while something else was done."""
    assert callable(work)
    used, began = processor_s(pid), time.monotonic()
    work()
    return (processor_s(pid) - used) / (time.monotonic() - began)


def row(what: str, value: str) -> None:
    print(f"| {what} | {value} |", flush=True)


def costs(daemon: HostProcess, data: Path) -> None:
    def answer() -> list[float]:
        return daemon.chat(STORY, model=MODEL, max_tokens=TOKENS, store=False).gaps_ms

    with tray(data) as pid:
        row("idle, of a core", f"{share(pid, lambda: time.sleep(IDLE_S)):.2%}")
        row("while the daemon answers, of a core", f"{statistics.median(share(pid, answer) for _ in range(3)):.2%}")
        found = memory_mb(pid)
        row("resident memory", f"{found['VmRSS']:.0f} MB, of which {found['RssAnon']:.0f} MB are its own")
    without, beside = list[float](), list[float]()
    without.append(statistics.fmean(answer()))
    for _ in range(ROUNDS):
        with tray(data):
            beside.append(statistics.fmean(answer()))
        without.append(statistics.fmean(answer()))
    around = [statistics.fmean(pair) for pair in itertools.pairwise(without)]  # before it and after: the machine drifts
    low, middle, high = statistics.quantiles([b / a for a, b in zip(around, beside, strict=True)])
    mine, its = statistics.median(beside), statistics.median(without)
    row(
        "TBT beside it, ms",
        f"{mine:.2f}, {its:.2f} without; median ratio {middle:.3f}, quartiles {low:.3f} and {high:.3f}",
    )


def a_day(daemon: HostProcess, address: Address) -> None:
    """Real metrics, a day of them, with the numbers changed as an answer changes them."""
    from PySide6.QtCore import QTimer

    from ssmd_tray.qt.app import Tray, application
    from ssmd_tray.watching import Observation

    app = application()
    found = daemon.get("/ssmd/v1/metrics")[1]
    shown = Tray(Path(tempfile.gettempdir()))
    shown.window.unasked()
    told, began = list[str](), time.monotonic()
    seconds = iter(range(DAY + 1))

    def update() -> None:
        second = next(seconds, None)
        if second is None:
            app.quit()
            return
        there = second % 5000 < 4990
        at = began + second
        now = as_answered(found, second)
        shown.saw(Observation(at, now, address, 1) if there else Observation(at, problem="no daemon runs"))
        if second % (DAY // 6) == 0 or second == DAY // 100:
            told.append(f"{memory_mb()['VmRSS']:.1f} after {second / 3600:.1f} h")

    timer = QTimer(interval=0)  # when all was drawn
    timer.timeout.connect(update)
    timer.start()
    app.exec()
    row("its memory in a day, MB", ", ".join(told))
    row("an update, with what is drawn of it", f"{(time.monotonic() - began) / DAY * 1e3:.2f} ms")


def as_answered(found: dict[str, Any], second: int) -> dict[str, Any]:
    """The metrics of a second of a day in which an answer of 20 s comes every half minute, some of them not kept."""
    series = {"since_start": {"n": second * 20}, "recent": [10.0 + second % 9] * 120}
    numbers = {"last": 10 + second % 7, "p50": 11.0, "p95": 20.0, **series}
    generating = second % 30 < 20
    request = {"id": f"gen_{second // 30}", "model": MODEL, "phase": "decode", "tokens": second % 30 * 20}
    state = "degraded" if second % 1000 == 999 else ("generating" if generating else "idle")
    running = [request] if generating else []
    return {**found, "state": state, "running": running, "tbt_ms": numbers, "ttft_ms": numbers}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        print(f"{conditions()}\n\n| of the tray | |\n| --- | --- |")
        with HostProcess(data, "--preload", MODEL, "--keep-alive", "-1") as daemon:
            costs(daemon, data)
            address = find(data)
            assert address is not None
            a_day(daemon, address)


if __name__ == "__main__":
    main()
