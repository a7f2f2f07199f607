"""SIGKILLs of a real `ssmd serve` under load, against a control daemon that is not killed and gets the same turns.

An episode is one data directory and some kills. Four clients send requests at once. At the end their answers are
compared, turn by turn and to the last bit, with the control's to the same requests. After a kill a copy of the
directory is read: it must be sound, and hold every answer that a client got.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from daemon_process import DaemonProcess
from talkers import CHAT, SESSIONS, Dead, Done, Line, Talker, Told, ask, body_of, plain_bias, told_by

from ssmd.sessions.fsck.repair import check
from ssmd.sessions.rows.database import FILE
from ssmd.sessions.store import Store

CLIENTS = 8  # as many as decode together
LOOK_AFTER = 3  # kills
MOMENTS = {"under load": 0.40, "during a commit": 0.25, "as an answer ends": 0.15, "while it starts": 0.20}
ROWS = (
    *("kills", *MOMENTS, "requests that died", "turns", "told that it was not stored", "answers given again"),
    *("forks", "exports", "imports", "sessions removed", "looks at a session", "looks at what a kill left"),
    *("turns compared", "that went on exactly", "prompt tokens", "cached", "cached by the control"),
)


class Episode:
    """One data directory, its clients and its kills. counts, failures: its results."""

    rows = ROWS
    served_by: type[DaemonProcess] = DaemonProcess

    def __init__(self, artifact: Path, model: str, seed: str, kills: int, folder: Path) -> None:
        self.artifact, self.kills, self.folder = artifact, kills, folder
        self.rng = random.Random(seed)
        self.counts = Counter[str](dict.fromkeys(self.rows, 0))
        self.failures: list[str] = []
        self.line = Line(model, plain_bias(artifact))
        self.daemon = self.served_by(artifact, folder / "data", "--threads", "1", *self.options())
        self.talkers = self.clients(seed)
        self._healthy_s = 1.0

    def options(self) -> tuple[str, ...]:
        """Return options of the daemon that is killed."""
        return ()

    def clients(self, seed: str) -> list[Talker]:
        """Return the clients, each of which has a thread."""
        return [Talker(f"c{i}", random.Random(f"{seed}:{i}"), self.line, self.failures.append) for i in range(CLIENTS)]

    def run(self) -> None:
        threads = [threading.Thread(target=t.run, daemon=True) for t in self.talkers]
        for thread in threads:
            thread.start()
        try:
            for number in range(self.kills):
                self.life()
                if number % LOOK_AFTER == 0:
                    self.look()
            self.daemon.start()
            self.line.over = True  # each client ends what it is at
            self.line.up(self.daemon.port)
            for thread in threads:
                thread.join(60)
                if thread.is_alive():
                    self.failures.append("a client got no answer for a minute after the last start")
            self.last_look()
            self.compare()
        finally:
            self.line.over = True
            with contextlib.suppress(Exception):
                self.daemon.kill()
        for talker in self.talkers:
            self.counts.update(talker.counts)
        if "Traceback" in (log := (self.folder / "data.log").read_text()):
            self.failures.append(f"the daemon's log: {log[log.rindex('Traceback') :][:1500]}")

    def life(self) -> None:
        """Start, let the clients ask, kill."""
        moment = self.rng.choices(list(MOMENTS), list(MOMENTS.values()))[0]
        self.counts.update(["kills", moment])
        started = time.monotonic()
        if moment == "while it starts":
            self.daemon.spawn()
            time.sleep(self.rng.uniform(0, self._healthy_s))
            self.daemon.kill()
            return
        self.daemon.start()
        self._healthy_s = 0.8 * self._healthy_s + 0.2 * (time.monotonic() - started)
        self.line.up(self.daemon.port)
        self.wait_under_load()
        if moment == "during a commit":
            self._wait_for_a_write(self.rng.choice([0, 0, 0.001, 0.003]))
        elif moment == "as an answer ends":
            self.line.wait_for_answers(1, 2)
        self.line.down()
        self.daemon.kill()

    def wait_under_load(self) -> None:
        """Wait for a random time, while the clients ask."""
        time.sleep(self.rng.uniform(0, 1.0))

    def _wait_for_a_write(self, then_s: float) -> None:
        log = self.folder / "data" / f"{FILE}-wal"

        def state() -> tuple[int, int]:
            try:
                found = log.stat()
            except FileNotFoundError:
                return 0, 0
            return found.st_size, found.st_mtime_ns

        before, until = state(), time.monotonic() + 2
        while state() == before and time.monotonic() < until:
            time.sleep(0.0002)
        time.sleep(then_s)

    def look(self) -> None:
        """Read what the kill left, on a copy, so that the daemon recovers the rest itself."""
        data = self.folder / "data"
        if not (data / FILE).exists():
            return
        with tempfile.TemporaryDirectory(dir=self.folder) as name:
            shutil.copytree(data, copy := Path(name) / "data")
            self.counts["looks at what a kill left"] += 1
            if damages := check(copy).damages:
                self.failures.append(f"not sound after a kill: {'; '.join(map(str, damages))}")
            self.has_all(copy, "after a kill")

    def has_all(self, data: Path, when: str) -> None:
        """Check that confirmed turns are stored, only once if the request had a name, and removed ones are not."""
        told = [d for t in self.talkers for d in tuple(t.journal)]
        gone = {s for t in self.talkers for s in tuple(t.gone)}
        doomed = {s for t in self.talkers for s in tuple(t.doomed)}
        wanted, most = Counter[str](), Counter[str]()
        for done in told:
            if done.told is not None and done.stores and "imported" not in done.talk:
                wanted[done.question] += done.told.session not in doomed
                most[done.question] += 1 if done.named else done.attempts
        there: dict[str, tuple[str, bool]] = {}
        store = Store.open(data)
        with contextlib.closing(store):
            sessions = store.sessions()
            for session in sessions:
                if session.id in gone:
                    self.failures.append(f"{when} {session.id} is there, and was removed")
                if session.info.imported is None:
                    for turn in store.turns(session.id):
                        there[turn.id] = turn.messages[-1].content, turn.complete
        found = Counter(question for question, _ in there.values())
        if not all(complete for _, complete in there.values()):
            self.failures.append(f"{when} a turn is incomplete")
        for question, count in wanted.items():
            if found[question] < count:
                self.failures.append(f"{when} {question!r} is there {found[question]} times, told {count} times")
            pending = 1 if when == "after a kill" else 0  # the next attempt was never answered
            if found[question] > most[question] + pending:
                self.failures.append(f"{when} {question!r} is there {found[question]} times, asked {most[question]}")

    def last_look(self) -> None:
        """Run `ssmd session check` beside the running daemon, and check all turns that clients got."""
        command = [sys.executable, "-m", "ssmd", "session", "check", "--data-dir", str(self.folder / "data")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            self.failures.append(f"ssmd session check: {done.stdout} {done.stderr[-1500:]}")
        self.has_all(self.folder / "data", "at the end")

    def compare(self) -> None:
        """Send all requests of the clients to the control, and compare its answers."""
        with self.served_by(self.artifact, self.folder / "control", "--threads", "1") as control:
            for talker in self.talkers:
                try:
                    for done, told in replayed(control.port, self.line.model, talker.journal):
                        self.judge(done, told)
                except AssertionError as err:
                    self.failures.append(f"client {talker.name}: the control refuses what was done: {err}")

    def judge(self, done: Done, control: Told) -> None:
        """Compare an answer with the control's."""
        told = done.told
        assert told is not None
        self.counts.update({"turns compared": 1, "that went on exactly": told.resume == "exact"})
        self.counts.update(
            {"prompt tokens": told.prompt, "cached": told.cached, "cached by the control": control.cached}
        )
        what = f"{done.talk} {done.question!r} (by id {done.by_id}, named {done.named}, attempts {done.attempts})"
        if (told.text, told.finish, told.prompt) != (control.text, control.finish, control.prompt):
            self.failures.append(f"{what}: told {told.text!r}, the control says {control.text!r}")
        elif told.tokens != control.tokens:
            self.failures.append(f"{what}: other log probabilities; {told.resume} {told.cached}, {control.cached}")
        if told.cached < control.cached:
            self.failures.append(f"{what}: {told.cached} of {told.prompt} cached, the control has {control.cached}")
        if "portable" in (told.resume, control.resume):
            self.failures.append(f"{what}: resumed as {told.resume}, the control's as {control.resume}")


def replayed(port: int, model: str, journal: list[Done]) -> Iterator[tuple[Done, Told]]:
    """Repeat a client's requests on another daemon. Yield each turn with that daemon's answer."""
    sessions: dict[str, str] = {}
    for done in journal:
        try:
            if done.what == "delete":
                assert ask(port, "DELETE", f"{SESSIONS}/{sessions[done.talk]}").status == 200
            elif done.what == "fork":
                answer = ask(port, "POST", f"{SESSIONS}/{sessions[done.source]}/fork", {})
                assert answer.status == 201, answer
                sessions[done.talk] = answer.json["id"]
            else:
                here = {"session": sessions[done.talk]} if done.by_id and done.talk in sessions else {}
                body = {**body_of(model, done.messages, done.fields), **here}
                answer = ask(port, "POST", CHAT, body)
                assert answer.status == 200, answer
                told = told_by(answer.body, done.fields["stream"])
                if done.stores:
                    sessions[done.talk] = told.session
                yield done, told
        except Dead:
            raise RuntimeError("the control died") from None
