"""The cost of an idle daemon that the system starts (memory and wake-ups), and the time of its first answer.

benchmarks/service.py [MODEL]     an installed model, default smollm2; it alone is served, loaded when it is asked for,
                                  against `ssmd serve MODEL`, which loads it at the start; in turn
"""

from __future__ import annotations

import collections
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from daemon_process import DaemonProcess, HostProcess, ServerProcess, conditions

from ssmd.config import Settings

MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
ROUNDS = 7
SETTLE_S = 5.0
WATCHED_S = 60.0
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
WAITS = re.compile(
    r"\b(epoll_p?wait2?|futex|p?poll|p?select6?|clock_nanosleep|restart_syscall)"
    r"\((?!.*(?:, 0\) |_WAKE))"  # no polls without a wait, and no calls that wake a thread
)


def main(
    model: str = MODEL, models_dir: Path | None = None, rounds: int = ROUNDS, watched_s: float = WATCHED_S
) -> None:
    models_dir = Settings().models_dir if models_dir is None else models_dir
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "models").mkdir(mode=0o700)
        (folder / "models" / model).symlink_to(models_dir / model)  # alone
        print(f"{model}; {conditions()}\n")
        starts(model, models_dir, folder, rounds)
        idle(folder, watched_s)


def starts(model: str, models_dir: Path, folder: Path, rounds: int) -> None:
    """Print how long a start takes to the first token, when the model is loaded then and when it is first asked for."""
    taken: dict[str, list[tuple[float, float]]] = {"when asked for": [], "at the start": []}
    paths = sorted((models_dir / model).iterdir())[:1]
    for turn in range(rounds):
        lazy = HostProcess(folder / f"lazy{turn}", models_dir=folder / "models")
        taken["when asked for"].append(to_first_token(lazy))
        taken["at the start"].append(to_first_token(DaemonProcess(paths[0], folder / f"named{turn}")))
    print("| loaded | it answers, ms | first token, ms | least to most |")
    print("| --- | --- | --- | --- |")
    for name, both in taken.items():
        healthy, tokens = ([one[i] for one in both] for i in (0, 1))
        print(
            f"| {name} | {statistics.median(healthy):.0f} | {statistics.median(tokens):.0f} "
            f"| {min(tokens):.0f} – {max(tokens):.0f} |"
        )
    first, named = (statistics.median(one for _, one in both) for both in taken.values())
    print(f"\nto the first token {first / named:.2f} of what it takes with the model loaded at the start\n")


def to_first_token(server: ServerProcess) -> tuple[float, float]:
    """Start a daemon and ask: ms until it answers at all, and until the first token."""
    started = time.perf_counter()
    with server:
        asked = time.perf_counter()
        reply = server.chat(QUESTION, max_tokens=2)
        return server.healthy_ms, (asked - started) * 1e3 + reply.ttft_ms


def idle(folder: Path, watched_s: float) -> None:
    """Print the memory and wake-ups of an idle daemon."""
    with HostProcess(folder / "idle", models_dir=folder / "models") as daemon:
        assert daemon.process is not None
        time.sleep(min(SETTLE_S, watched_s))
        own, mapped = daemon.resident_mb()
        before = switches(daemon.process.pid)
        time.sleep(watched_s)
        woken = switches(daemon.process.pid) - before
        print("| while nobody asks, no model loaded | |")
        print("| --- | --- |")
        print(f"| memory, MB | {own + mapped:.0f}, of these {mapped:.0f} mapped files |")
        print(f"| waits that ended in {watched_s:.0f} s, of all threads | {woken} |")
        if shutil.which("strace"):
            calls = traced(daemon.process.pid, watched_s)
            print(f"| the same by strace | {sum(calls.values())}: {', '.join(f'{n} {c}' for c, n in calls.items())} |")


def switches(pid: int) -> int:
    """Return how often the threads of a process went to sleep so far."""
    texts = [file.read_text() for file in Path(f"/proc/{pid}/task").glob("*/status")]
    return sum(int(n) for text in texts for n in re.findall(r"^voluntary_ctxt_switches:\s*(\d+)", text, re.MULTILINE))


def traced(pid: int, watched_s: float) -> collections.Counter[str]:
    """Count the waits by system call in this time, without calls that poll and do not wait."""
    command = ["timeout", str(watched_s), "strace", "-f", "-qq", "-p", str(pid)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return collections.Counter(WAITS.findall(done.stderr))


if __name__ == "__main__":
    main()
