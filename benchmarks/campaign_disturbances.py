"""Disturbances of remote_campaign.py: kills, cut links, closed lids, lost packs, and a remote from an older backup."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from campaign_clients import Reach
from cluster import Cluster
from namespaces import MachineDaemon, Network

from ssmd.sessions.rows.database import FILE

MOMENTS = {"in a stream": 0.35, "in a commit": 0.25, "at start-up": 0.15, "at any moment": 0.25}
LID_S = 30.0
LAST = 8  # kills of a round during which no lid is closed any more: the round would wait for it
EACH_KILLER = 2  # daemons for a thread that kills
AWAY, BACK, SERVES = b"nothing is sent to the remote", b"the remote is reached again", b" serves "  # in a log
WAITED_FOR = 0.7  # part of the kills after which the daemon is waited for; else the next kill may meet its start


class Campaign(Protocol):
    """A round, as its disturbances use it."""

    seed: str
    kills: int
    server_kills: int
    folder: Path
    counts: Counter[str]
    failures: list[str]


class Disturber:
    """Disturbs daemons and their server, in several threads, until a round's kills are done."""

    def __init__(
        self,
        of: Campaign,
        daemons: dict[str, MachineDaemon],
        network: Network,
        cluster: Cluster,
        database: str,
        packs: Path,
        reach: Reach,
    ) -> None:
        self.of, self.daemons, self.network, self.cluster = of, daemons, network, cluster
        self.database, self.packs, self.reach = database, packs, reach
        self._left = of.kills
        self._lock, self._server = threading.Lock(), threading.Lock()
        self._busy = {name: threading.Lock() for name in daemons}
        self._over = threading.Event()
        self._healthy_s = 1.5

    def run(self) -> None:
        """Return when all kills are done, all links joined, and all daemons up."""
        killing = len(self.daemons) // EACH_KILLER
        killers = [
            threading.Thread(target=self._guarded(self._kill_daemons), args=[n], daemon=True) for n in range(killing)
        ]
        works = (self._kill_servers, self._cut_links, self._close_lids, self._lose_packs, self._restore, self._watch)
        others = [
            threading.Thread(target=self._guarded(work), args=[n], daemon=True) for n, work in enumerate(works, killing)
        ]
        for thread in (*killers, *others):
            thread.start()
        for thread in killers:
            thread.join()
        self._over.set()
        for thread in others:
            thread.join()

    def _guarded(self, work: Callable[[random.Random], None]) -> Callable[[int], None]:
        def run(number: int) -> None:
            try:
                work(random.Random(f"{self.of.seed} {number}"))
            except Exception as err:
                self.of.failures.append(f"{work.__name__}: {type(err).__name__}: {err}")

        return run

    def _count(self, *what: str) -> None:
        with self._lock:
            self.of.counts.update(what)

    def _take(self) -> bool:
        with self._lock:
            self._left -= 1
            return self._left >= 0

    @contextlib.contextmanager
    def _one(self, rng: random.Random) -> Iterator[MachineDaemon]:
        """Hold a daemon that no other thread stops or kills."""
        while True:
            for name in rng.sample(sorted(self.daemons), len(self.daemons)):
                if self._busy[name].acquire(blocking=False):
                    try:
                        yield self.daemons[name]
                    finally:
                        self._busy[name].release()
                    return
            time.sleep(0.05)

    def _kill_daemons(self, rng: random.Random) -> None:
        while self._take():
            with self._one(rng) as victim:
                moment = rng.choices(list(MOMENTS), list(MOMENTS.values()))[0]
                time.sleep(rng.uniform(0, 1.0))
                if moment == "in a stream":
                    self._until(lambda: self.reach.streams[victim.name] > 0, 3)
                    time.sleep(rng.uniform(0, 0.2))
                elif moment == "in a commit":
                    self._until_written(victim.name)
                    time.sleep(rng.choice((0, 0, 0.002, 0.01)))
                elif moment == "at start-up":
                    victim.kill()
                    victim.spawn()
                    time.sleep(rng.uniform(0, self._healthy_s))
                self._count("kills of a daemon", moment)
                victim.kill()
                if rng.random() < WAITED_FOR:
                    began = time.monotonic()
                    victim.start()
                    self._healthy_s = 0.8 * self._healthy_s + 0.2 * (time.monotonic() - began)
                else:
                    victim.spawn()

    def _until(self, condition: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.0005)

    def _until_written(self, name: str) -> None:
        """Wait until a daemon's store writes to its log."""
        log = self.of.folder / name / f"{FILE}-wal"

        def state() -> tuple[int, int]:
            try:
                found = log.stat()
            except FileNotFoundError:
                return 0, 0
            return found.st_size, found.st_mtime_ns

        before = state()
        self._until(lambda: state() != before, 3)

    def _kill_servers(self, rng: random.Random) -> None:
        for _ in range(self.of.server_kills):
            time.sleep(rng.uniform(4, 12))
            with self._server:
                began = time.monotonic()
                self._count("kills of the server")
                self.cluster.end(signal.SIGKILL)
                time.sleep(rng.uniform(0, 2.0))
                self.cluster.start()
                self.reach.note("", began, time.monotonic())

    def _cut_links(self, rng: random.Random) -> None:
        while not self._over.wait(rng.uniform(4, 12)):
            name, began = rng.choice(sorted(self.daemons)), time.monotonic()
            self.network.cut(name)
            self._count("links cut")
            self._over.wait(rng.choice((1, 3, 8, 40)) * rng.uniform(0.5, 1))
            self.network.mend(name)
            self.reach.note(name, began, time.monotonic())

    def _close_lids(self, rng: random.Random) -> None:
        while not self._over.wait(rng.uniform(5, 15)) and self._left > LAST:
            with self._one(rng) as sleeper:
                if sleeper.process is None or sleeper.process.poll() is not None:
                    continue
                self._until_written(sleeper.name)
                began = time.monotonic()
                sleeper.process.send_signal(signal.SIGSTOP)
                self._count("lids closed for 30 s")
                time.sleep(LID_S)
                sleeper.process.send_signal(signal.SIGCONT)
                self.reach.note(sleeper.name, began, time.monotonic())

    def _lose_packs(self, rng: random.Random) -> None:
        while not self._over.wait(rng.uniform(3, 9)):
            found = sorted(self.packs.glob("packs/*/*"))
            if found:
                with contextlib.suppress(FileNotFoundError):
                    rng.choice(found).unlink()
                    self._count("packs lost")

    def _restore(self, rng: random.Random) -> None:
        """Save the database in the middle of the round, and put the copy back some time later."""
        if self._over.wait(rng.uniform(8, 15)):
            return
        file = self.cluster.folder / "backup"
        with self._server:
            self._tool("pg_dump", "--format=custom", "--file", str(file), self.database)
        if self._over.wait(rng.uniform(10, 20)):
            return
        with self._server:
            began = time.monotonic()
            words = ("--clean", "--if-exists", "--single-transaction", "-d", self.database, str(file))
            while "deadlock detected" in self._tool("pg_restore", *words):  # nothing was changed
                time.sleep(0.2)
            self._count("remotes restored from a backup")
            self.reach.note("", began, time.monotonic() + 60)  # until each machine has looked at its mark

    def _watch(self, _: random.Random) -> None:
        """Note what the daemons' logs say of the remote, which may be late on a busy computer."""
        read, away = Counter[str](), dict[str, float]()
        while not self._over.wait(0.2):
            for name in self.daemons:
                with (self.of.folder / f"{name}.log").open("rb") as log:
                    log.seek(read[name])
                    said = log.read()
                read[name] += len(said)
                if AWAY in said:
                    away.setdefault(name, time.monotonic())
                    self._count("remote late or away, by a log")
                if name in away and (BACK in said or SERVES in said):
                    self.reach.note(name, away.pop(name), time.monotonic())
        for name, since in away.items():
            self.reach.note(name, since, time.monotonic())

    def _tool(self, name: str, *words: str) -> str:
        """Run a tool of PostgreSQL. Returns what it complains of; a deadlock with a daemon is not a failure."""
        program = shutil.which(name)
        assert program is not None
        where = {"PGHOST": str(self.cluster.sockets), "PGPORT": str(self.cluster.port), "PGUSER": "admin"}
        done = subprocess.run(
            [program, *words], env={**os.environ, **where}, capture_output=True, text=True, check=False
        )
        if done.returncode and "deadlock detected" not in done.stderr:
            self.of.failures.append(f"{name} ended with {done.returncode}: {done.stderr[-600:]}")
        return done.stderr
