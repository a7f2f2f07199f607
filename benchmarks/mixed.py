"""Several models in one daemon under load, with endless evictions, kills, and clients that leave.

Nothing may be lost, and the bits must be those of an undisturbed daemon.

    benchmarks/mixed.py [--minutes N] [--models DIR] [--seed S] [--keep DIR]

Eight clients of different addresses hold conversations with all models in DIR (default: the installed ones), of which
one does not fit the budget. Another one loads, unloads and pins models. In the first half the daemon is killed, or
stopped, again and again; in the second one process lives on. Afterwards a second daemon, with room for all and a
directory of its own, is told the same conversations turn by turn. The first may take no more memory than the second
when both have let go of every model.

Two answers come the same way if they continue from the same states and the same tokens were fed in the same calls.
Their log probabilities must then be equal to the last bit, also after a `portable` resume, as both got the same
numbers.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from daemon_process import SSMD, HostProcess, conditions
from faults import commit
from mixers import Keeper, Life, Mixer
from retold import Kind, retold
from talkers import is_in

from ssmd.config import Settings
from ssmd.engine.host.loader import LEAST_BYTES, TIMES_FILES
from ssmd.sessions.store import Store
from ssmd.sessions.turn import Turn

CLIENTS = 8
KILLS_A_MINUTE = 1.0
STOPPED = 4  # one in so many ends is a SIGTERM
LONG_S = 300.0  # of a run that tells something of memory
GROWTH = 1.15  # of what a daemon has that loaded each model once
ENDED_S = 120.0  # for which a client may still wait when all is over
FIRST = (
    *("turns told as stored", "told that it was not stored", "conversations", "with several models"),
    *("requests", "answered 200", "retries"),
    *("died with the daemon", "streams that broke off", "streams left"),
    *("503 no_memory", "503 queue_full", "503 shutting_down", "kills", "stops", "loads", "models let go"),
    *("loads asked for", "unloads asked for", "pins", "resumed exact", "resumed portable", "resumed none"),
    *("prompt tokens", "cached", "cached by the undisturbed daemon", "turns found in the store"),
    *("left answers found, as far as they were read", "turns compared", "that came the same way, bitwise equal"),
    *("of these portable", "that came another way", "of these with another text"),
)


class Campaign:
    """One run. counts, failures: its results."""

    def __init__(self, models_dir: Path, minutes: float, seed: str, folder: Path, *options: str) -> None:
        self.models_dir, self.seconds, self.seed, self.folder = models_dir, minutes * 60, seed, folder
        self.options = options
        self.counts = Counter[str](dict.fromkeys(FIRST, 0))
        self.failures: list[str] = []
        self.notes: list[str] = []
        self.memory: list[tuple[float, tuple[str, ...], float]] = []  # (seconds, models loaded, MB) of the second half
        self.kinds: dict[str, Kind] = {}
        self.budget = 0
        self.left_mb = 0.0  # resident, with nothing loaded any more
        self._rng = random.Random(seed)

    def run(self) -> None:
        self._weigh()
        daemon = HostProcess(
            self.folder / "data", *self.options, "--memory-budget", str(self.budget), models_dir=self.models_dir
        )
        life = Life(daemon.port)
        mixers = [Mixer(n, self.seed, sorted(self.kinds), life, self.failures.append) for n in range(CLIENTS)]
        keeper = Keeper(self.seed, sorted(self.kinds), life, self.failures.append)
        over = threading.Event()
        threads = [threading.Thread(target=mixer.run, daemon=True) for mixer in mixers]
        threads.append(threading.Thread(target=keeper.run, args=(over, min(4.0, self.seconds / 10)), daemon=True))
        daemon.start()
        try:
            for thread in threads:
                thread.start()
            self._disturb(daemon, life)
            over.set()
            life.over = True
            for thread in threads:
                thread.join(ENDED_S)
                if thread.is_alive():
                    self.failures.append(f"a client got no answer for {ENDED_S:.0f} s after the end")
            self._at_rest(daemon)
            if code := daemon.stop(60):
                self.failures.append(f"the daemon ended with {code}")
        finally:
            life.over = True
            with contextlib.suppress(Exception):
                daemon.kill()
        for caller in (*mixers, keeper):
            self.counts.update(caller.counts)
        self._read_log()
        self._look(mixers)
        self._compare(mixers)

    def _weigh(self) -> None:
        """Find out what there is, and a budget for all but one of the models.

        The daemon counts what a model's files suggest until it has measured more: by that the budget is made.
        """
        least = list[int]()
        with HostProcess(self.folder / "weighed", *self.options, models_dir=self.models_dir) as daemon:
            rows = daemon.get("/ssmd/v1/models")[1]["data"]
            for row in rows:  # the libraries' own memory is no model's: each is loaded once before
                daemon.model(row["id"], "load")
                daemon.unloaded(row["id"])
            for row in rows:
                row |= daemon.model(row["id"], "load")
                least.append(max(LEAST_BYTES, int(TIMES_FILES * row["file_bytes"])))
                self.kinds[row["id"]] = Kind(row["id"], row["lineage"], max(least[-1], row["resident_bytes"] or 0))
        self.budget = max(sum(least) - min(least) // 2, *(kind.nbytes for kind in self.kinds.values()))

    def _disturb(self, daemon: HostProcess, life: Life) -> None:
        """Kills in the first half, then none."""
        began, half = time.monotonic(), self.seconds / 2
        kills = max(1, round(KILLS_A_MINUTE * self.seconds / 60))
        for number in range(kills):
            at = (number + self._rng.uniform(0.4, 1.0)) * half / kills
            time.sleep(max(0.0, began + at - time.monotonic()))
            if number % STOPPED == STOPPED - 1:
                self.counts["stops"] += 1
                life.stopping = True
                if code := daemon.stop(60):
                    self.failures.append(f"the daemon, told to stop, ended with {code}")
            else:
                self.counts["kills"] += 1
                daemon.kill()
            daemon.start()
            life.stopping = False
        while (now := time.monotonic() - began) < self.seconds:
            states = {row["id"]: row["state"] for row in daemon.get("/ssmd/v1/models")[1]["data"]}
            if not {"loading", "unloading"} & set(states.values()):
                loaded = tuple(sorted(id_ for id_, state in states.items() if state == "loaded"))
                self.memory.append((now, loaded, sum(daemon.resident_mb())))
            time.sleep(0.5)

    def _at_rest(self, daemon: HostProcess) -> None:
        """Check that nothing runs, waits, or holds a model after the last request."""
        until = time.monotonic() + 20
        while (wrong := _unrest(daemon.get("/ssmd/v1/metrics")[1])) and time.monotonic() < until:
            time.sleep(0.2)
        if wrong:
            self.failures.append(f"at the end {wrong}")
        if self.seconds >= LONG_S:
            self._tell_memory()
            self.left_mb = self._emptied(daemon)

    def _tell_memory(self) -> None:
        """Report the daemon's memory with the same models loaded, early and late in the second half.

        Each is a median of a few samples, taken soon after other models were unloaded.
        """
        found = dict[tuple[str, ...], tuple[list[float], list[float]]]()
        for at, loaded, mb in self.memory:
            part = (at / self.seconds - 0.5) / 0.5
            if part < 0.4 or part > 0.6:
                found.setdefault(loaded, ([], []))[part > 0.6].append(mb)
        for loaded, both in found.items():
            if all(both):
                early, late = (f"{statistics.median(one):,.0f} MB ({len(one)} looks)" for one in both)
                self.notes.append(f"{' and '.join(loaded) or 'nothing'} loaded: {early}, later {late}")

    def _emptied(self, daemon: HostProcess) -> float:
        """MB that are resident with every model let go."""
        for id_ in self.kinds:
            daemon.unloaded(id_)
        time.sleep(1.0)
        return sum(daemon.resident_mb())

    def _read_log(self) -> None:
        log = (self.folder / "data.log").read_text()
        self.counts["loads"] = log.count(" was loaded in ")
        self.counts["models let go"] = log.count(" was unloaded\n")
        if "Traceback" in log:
            self.failures.append(f"the daemon's log: {log[log.index('Traceback') - 300 :][:3000]}")
        for line in log.splitlines():
            said = self.counts["told that it was not stored"] and " ERROR ssmd.engine.persist.writer: " in line
            if " ERROR " in line and not said:
                self.failures.append(f"the daemon's log: {line}")

    def _look(self, mixers: list[Mixer]) -> None:
        """Check that the store is sound, and holds the clients' answers word for word."""
        data = self.folder / "data"
        command = [*SSMD, "session", "check", "--data-dir", str(data)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            self.failures.append(f"ssmd session check: {done.stdout} {done.stderr[-1500:]}")
        with contextlib.closing(Store.open(data)) as store:
            turns = {session.id: store.turns(session.id) for session in store.sessions()}
        trees = {id_: [_row(turn) for turn in mine if turn.complete] for id_, mine in turns.items()}
        everything = [turn for mine in turns.values() for turn in mine]
        complete = Counter(turn.messages[-1].content for turn in everything if turn.complete)
        cut = {turn.messages[-1].content: turn.answer.content for turn in everything if not turn.complete}
        for mixer in mixers:
            for turn in mixer.journal:
                assert turn.told is not None
                said = [*turn.messages, {"role": "assistant", "content": turn.told.text}]
                if is_in(said, trees.get(turn.told.session, [])):
                    self.counts["turns found in the store"] += 1
                else:
                    self.failures.append(f"{turn.talk} {turn.question!r} is not in {turn.told.session} as it was told")
            for question, asked in mixer.asked.items():
                if complete[question] > asked:
                    self.failures.append(f"{question!r} is stored {complete[question]} times, asked {asked}")
            for question, read in mixer.begun.items():
                if question in cut:
                    self.counts["left answers found, as far as they were read"] += cut[question].startswith(read)
                    if not cut[question].startswith(read):
                        self.failures.append(f"{question!r}: {read!r} was read, {cut[question]!r} is stored")

    def _compare(self, mixers: list[Mixer]) -> None:
        """Send the same requests to an undisturbed daemon, and compare its answers."""
        options = (*self.options, "--memory-budget", str(4 * sum(kind.nbytes for kind in self.kinds.values())))
        control = HostProcess(self.folder / "control", *options, "--keep-alive", "-1", models_dir=self.models_dir)
        with control, ThreadPoolExecutor(CLIENTS) as pool:
            for kind in self.kinds.values():
                control.model(kind.id, "load")
            for found, failures in pool.map(lambda mixer: retold(control.port, mixer.journal, self.kinds), mixers):
                self.counts.update(found)
                self.failures += failures
            if self.left_mb:
                left = self._emptied(control)
                said = f"{self.left_mb:,.0f} MB with every model let go, the undisturbed daemon {left:,.0f} MB"
                self.notes.append(f"at the end {said}")
                if self.left_mb > GROWTH * left:
                    self.failures.append(f"resident memory is {said}: something is kept of what was let go")


def _row(turn: Turn) -> dict[str, Any]:
    """Return a stored turn as `is_in` looks at it."""
    said = [{"role": m.role, "content": m.content} for m in (*turn.messages, turn.answer)]
    return {"id": turn.id, "parent": turn.parent, "messages": said}


def _unrest(metrics: dict[str, Any]) -> str:
    """Return the part that is not at rest; "" if all is."""
    if metrics["running"] or any(metrics["queue"].values()):
        return f"{metrics['running']} run, queue {metrics['queue']}"
    loaded = [m for m in metrics["models"] if m["state"] == "loaded" and not m["pinned"]]
    held = [m["id"] for m in loaded if m["idle_until"] is None]
    busy = [m["id"] for m in metrics["models"] if m["state"] in ("loading", "unloading")]
    return f"{held} are in use, {busy} are on their way" if held or busy else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--models", type=Path, default=Settings().models_dir)
    parser.add_argument("--seed", default="1")
    parser.add_argument("--keep", type=Path, help="an empty folder for data and logs, which stay")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        campaign = Campaign(asked.models, asked.minutes, asked.seed, asked.keep or Path(folder))
        campaign.run()
    tell(campaign)
    sys.exit(bool(campaign.failures))


def tell(campaign: Campaign) -> None:
    models, minutes = ", ".join(sorted(campaign.kinds)), campaign.seconds / 60
    print(f"{models}; {CLIENTS} clients, {minutes:g} minutes, a budget of {campaign.budget / 1e6:,.0f} MB")
    print(f"seed {campaign.seed}, at {commit()}; {conditions()}\n\n| | |\n| --- | --- |")
    for what in (*FIRST, *sorted(set(campaign.counts) - set(FIRST) - {"turns"})):
        print(f"| {what} | {campaign.counts[what]:,} |")
    print("", *campaign.notes, f"\nfailures: {len(campaign.failures)}", sep="\n")
    for failure in campaign.failures:
        print(failure, file=sys.stderr)


if __name__ == "__main__":
    main()
