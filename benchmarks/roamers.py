"""SIGKILLs of two daemons that share a remote in PostgreSQL, and of its server, while clients move between the daemons.

Each question of a client has a number of its own. A client whose daemon dies asks the other one, with a new question.
At the end both daemons send what waits. Then each turn that a client was told is stored must be in the remote, once,
with the answer that the client got; and a new machine must be able to take all conversations.
"""

from __future__ import annotations

import contextlib
import random
import signal
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from cluster import Cluster, missing
from forked import DaemonProcess
from talkers import CHAT, WORDS, Dead, ask, plain_bias

from ssmd.model.artifact import Artifact
from ssmd.sessions.fsck.repair import check
from ssmd.sessions.remote.body import TurnBody
from ssmd.sessions.remote.postgres.postgres import PostgresRemote
from ssmd.sessions.remote.sharing import pull_session
from ssmd.sessions.store import Store

CLIENTS = 4
MOST_QUESTIONS = 4  # of a conversation: the tiny models that have attention have a context of 512
SERVER_EACH = 8  # kills, of which the last is one of the server
END_S = 180.0  # s in which what waits must have been sent
STARTED = 0.7  # part of the kills after which the daemon is waited for; else the next kill may meet its start
ROWS = (
    *("kills", "of a daemon", "of a daemon that starts", "of the server", "requests that died", "answers"),
    *("told that it was stored", "told that it was not", "went on at the other daemon"),
    *("went on in its session", "began another session", "refused"),
    *("turns in the remote", "questions found once", "states in the remote", "sessions a new machine took"),
)


class Client:
    """A client that talks to either daemon. told: (its answer, said to be stored) by question."""

    def __init__(self, number: int, seed: str, episode: Episode) -> None:
        self.number, self.rng, self.episode = number, random.Random(f"{seed}:{number}"), episode
        self.told: dict[str, tuple[str, bool]] = {}
        self.counts = Counter[str]()

    def run(self) -> None:
        asked = 0
        while not self.episode.over:
            said: list[dict[str, str]] = []
            last = session = None
            for _ in range(MOST_QUESTIONS):
                if self.episode.over:
                    return
                asked += 1
                question = f"c{self.number}q{asked} {' '.join(self.rng.choices(WORDS, k=4))}"
                at = self.rng.choice(self.episode.places)
                messages = [*said, {"role": "user", "content": question}]
                try:
                    got = ask(at.port, "POST", CHAT, {**self.episode.fields, "messages": messages})
                except (Dead, TimeoutError):
                    self.counts["requests that died"] += 1
                    time.sleep(0.05)
                    continue
                if got.status != 200:
                    self.counts["refused"] += 1
                    if got.status not in self.episode.refusals:
                        self.episode.failures.append(f"{question}: {got.status} {got.body[:300]!r}")
                    time.sleep(0.05)
                    continue
                answer, own = got.json["choices"][0]["message"]["content"], got.json["usage"]["ssmd"]
                self.counts["answers"] += 1
                self.counts["told that it was stored" if own["stored"] else "told that it was not"] += 1
                self.told[question] = answer, own["stored"]
                self.counts["went on at the other daemon"] += last not in (None, at) and own["session"] == session
                if session is not None:
                    went_on = own["session"] == session
                    self.counts["went on in its session" if went_on else "began another session"] += 1
                last, session = at, own["session"]
                said = [*messages, {"role": "assistant", "content": answer}]


class Place(Protocol):
    """A place that clients ask: a daemon, or a balancer before several."""

    port: int


class Episode:
    """Data directories, a server, its clients and their kills. counts, failures: its results."""

    names: tuple[str, ...] = ("a", "b")  # of the machines
    refusals: tuple[int, ...] = (503,)  # statuses that an end or a kill may give

    def __init__(self, artifact: Path, seed: str, kills: int, folder: Path) -> None:
        if why := missing():
            raise SystemExit(why)
        self.kills, self.folder, self.rng = kills, folder, random.Random(seed)
        self.counts = Counter[str](dict.fromkeys(ROWS, 0))
        self.failures: list[str] = []
        model = Artifact.open(artifact).manifest.name
        self.fields = {"model": model, "logit_bias": plain_bias(artifact), "max_tokens": 6, "temperature": 0}
        self.over = False
        (folder / "packs").mkdir(mode=0o700)
        self.cluster = Cluster("fsync=on")
        self.database = self.cluster.database()
        self.url = self.cluster.url(self.database, packs=str(folder / "packs"))
        options = ("--threads", "1", "--remote", self.url)
        self.daemons = [DaemonProcess(artifact, folder / name, *options) for name in self.names]
        self.places: Sequence[Place] = self.daemons
        self.clients = [Client(n, seed, self) for n in range(CLIENTS)]

    def run(self) -> None:
        threads = [threading.Thread(target=one.run, daemon=True) for one in self.clients]
        try:
            for one in self.daemons:
                one.start()
            for thread in threads:
                thread.start()
            for number in range(self.kills):
                self.life(server=number % SERVER_EACH == SERVER_EACH - 1)
            self.over = True
            for thread in threads:
                thread.join(90)
            self.end()
            self.compare()
        finally:
            self.over = True
            for one in self.daemons:
                with contextlib.suppress(Exception):
                    one.kill()
            self.cluster.close()
        for client in self.clients:
            self.counts.update(client.counts)
        for name in self.names:
            if "Traceback" in (log := (self.folder / f"{name}.log").read_text()):
                self.failures.append(f"the log of {name}: {log[log.rindex('Traceback') :][:1500]}")

    def life(self, *, server: bool) -> None:
        time.sleep(self.rng.uniform(0, 1.5))
        self.counts["kills"] += 1
        if server:
            self.counts["of the server"] += 1
            self.cluster.end(signal.SIGKILL)
            time.sleep(self.rng.uniform(0, 1.5))
            self.cluster.start()
            return
        victim = self.rng.choice(self.daemons)
        starts = not _answers(victim)
        self.counts["of a daemon that starts" if starts else "of a daemon"] += 1
        victim.kill()
        if self.rng.random() < STARTED:
            victim.start()
        else:
            victim.spawn()

    def end(self) -> None:
        """Start both daemons again, and wait until the remote has all."""
        for one in self.daemons:
            one.kill()
            one.start()
        deadline = time.monotonic() + END_S
        for name, one in zip(self.names, self.daemons, strict=True):
            while (found := one.get("/health")[1]["remote"]) != {"status": "ok", "waiting": 0}:
                if time.monotonic() > deadline:
                    self.failures.append(f"after {END_S:.0f} s {name} still says {found}")
                    return
                time.sleep(0.2)
        for one in self.daemons:
            one.stop()

    def compare(self) -> None:
        remote = PostgresRemote.open(self.url, create=False)
        try:
            rows = self.cluster.admin("SELECT session, turn, body FROM ssmd.turn", self.database)
            self.counts["turns in the remote"] = len(rows)
            states = self.cluster.admin("SELECT count(*) FROM ssmd.ending", self.database)
            self.counts["states in the remote"] = int(states[0][0])
            found = defaultdict[str, set[tuple[str, str]]](set)
            for _, turn, body in rows:
                given, [answered] = TurnBody.model_validate_json(bytes(body)).turn.said
                asked = [message.content for message in given if message.role == "user"]
                found[asked[-1]].add((turn, answered.content))
            for client in self.clients:
                for question, (answer, stored) in client.told.items():
                    got = found.get(question, set())
                    if stored and len(got) != 1:
                        self.failures.append(f"{question!r} is {len(got)} times in the remote")
                    elif got and {said for _, said in got} != {answer}:
                        self.failures.append(f"{question!r} has another answer in the remote: {got}, not {answer!r}")
                    self.counts["questions found once"] += stored and len(got) == 1
            self._take({session for session, *_ in rows}, remote)
        finally:
            remote.close()
        for name in (*self.names, "new"):
            if damages := check(self.folder / name).damages:
                self.failures.append(f"the store {name} is damaged: {damages[:3]}")

    def _take(self, sessions: set[str], remote: PostgresRemote) -> None:
        """Let a new machine take all conversations."""
        store = Store.open(self.folder / "new")
        try:
            for session in sorted(sessions):
                if pull_session(store, remote, session, {}) >= 0:
                    self.counts["sessions a new machine took"] += 1
        except Exception as err:
            self.failures.append(f"a new machine could not take all conversations: {err!r}")
        finally:
            store.close()


def _answers(daemon: DaemonProcess) -> bool:
    try:
        return daemon.get("/health")[0] == 200
    except Exception:
        return False
