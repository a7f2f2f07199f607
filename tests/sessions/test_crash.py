"""Whatever happens to a process that writes, the store opens, is whole, and each session is at one turn or the next."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from keeping import LINEAGE, Chat, assert_same, grown, ids_of, new_store, state_of, user
from sqlalchemy import select
from storewriter import SPEC

from ssmd.sessions.checkpoint import prefix_keys
from ssmd.sessions.line import NOTHING, Ids, Line
from ssmd.sessions.rows.database import FILE
from ssmd.sessions.rows.schema import checkpoint, segment, turn_checkpoint
from ssmd.sessions.store import Store

KILLS = [5, pytest.param(100, marks=pytest.mark.full)]
if "SSMD_KILLS" in os.environ:
    KILLS = [int(os.environ["SSMD_KILLS"])]
KILLS_A_STORE = 5
MOST_COMMITS = 500  # of a writer before it is killed
HERE = Path(__file__).parents[1]


def start(folder: Path, name: str, *, seed: int = 0, commits: int = 0) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(HERE / "storewriter.py"), str(folder), name, str(seed), str(commits)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


class Ledger:
    """A writer's log: the turns of each session that were surely written, and the step that may or may not be."""

    def __init__(self) -> None:
        self.turns: dict[str, list[str]] = {}
        self.open_step: tuple[str, str] | None = None
        self.removed = False  # a session was

    def read(self, output: str) -> None:
        # A line that the kill cut short says nothing.
        for line in output.splitlines(keepends=True):
            words = line.split()
            if not line.endswith("\n") or words == ["open"]:
                continue
            word, session, turn = words
            if word == "begin":
                self.open_step = (session, turn)
                continue
            self._do(session, turn)
            self.open_step = None

    def _do(self, session: str, turn: str) -> None:
        if turn == "-":
            self.turns.pop(session)
            self.removed = True
        else:
            self.turns.setdefault(session, []).append(turn)

    def settle(self, there: dict[str, list[str]]) -> None:
        """`there` must be what was said, or that and the open step. From now on it is what was said."""
        if there != self.turns and self.open_step is not None:
            self._do(*self.open_step)
        assert there == self.turns
        self.open_step = None


def fed(line: Line, row: Any) -> Ids:
    """The ids that a checkpoint was fed: with which the turn begins that links to it."""
    assert prefix_keys(SPEC.digest(), LINEAGE, line, [row.position]) == [row.key]
    return line.up_to(row.position).own


def fed_ahead(lines: dict[str, Line], row: Any) -> Ids:
    """Return the ids of a checkpoint without a turn: some prompt of the writer's after some turn, or after none."""
    for whole in (NOTHING, *lines.values()):
        line = whole.cut(len(whole))
        for n in range(1, MOST_COMMITS):
            prompt = line.then(ids_of([user(f"question {n}")], f"answer {n}", 40)[:40])
            if prefix_keys(SPEC.digest(), LINEAGE, prompt, [len(prompt)]) == [row.key]:
                return whole.then(prompt.own).own
    raise AssertionError(f"checkpoint {row.id} is of no prompt")


def check(folder: Path, ledger: Ledger) -> int:
    """Everything in the store is sound; the number of checkpoints."""
    store = Store.open(folder, busy_ms=20_000)
    try:
        ledger.settle({s.id: [t.id for t in store.turns(s.id)] for s in store.sessions()})
        for session in store.sessions():
            assert session.turns == len(ledger.turns[session.id])
            assert session.head == ledger.turns[session.id][-1]
        with store.reading() as connection:
            used = (checkpoint.c.last_used_at != checkpoint.c.created_at).label("used")
            columns = select(checkpoint.c.id, checkpoint.c.position, checkpoint.c.key, checkpoint.c.kind, used)
            rows = connection.execute(columns).all()
            links = connection.execute(select(turn_checkpoint.c.checkpoint, turn_checkpoint.c.turn)).all()
            segments = connection.execute(select(segment.c.id)).all()
        lines = {t: grown(store, t)[0] for turns in ledger.turns.values() for t in turns}
        turn_of = {link.checkpoint: link.turn for link in links}
        for row in rows:
            ids = fed(lines[turn_of[row.id]], row) if row.id in turn_of else fed_ahead(lines, row)
            assert_same(store.load(row.id, SPEC), state_of(SPEC, ids))
        linked = Counter(link.checkpoint for link in links)
        for row in rows:
            assert not (row.kind == "turn" and linked[row.id] > 1) or row.used, "a second turn went on from it"
            assert not row.used or linked[row.id] > 1 or ledger.removed, "its own turn alone links to it"
        ahead = {row.id for row in rows} - set(turn_of)
        assert len(ahead) <= 1, "only one that was written ahead of its turn may be without one"
        assert store.sweep() == len(ahead)
        for turns in ledger.turns.values():
            for end in (store.path(t)[-1] for t in turns):
                assert end.sound
                assert end.stem == end.parent
                assert len(end.ids) == len(lines[end.id]) == 80 * (end.depth + 1)
    finally:
        store.close()
    raw = sqlite3.connect(folder / FILE)
    try:
        assert raw.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert raw.execute("PRAGMA foreign_key_check").fetchall() == []
        loose = "SELECT count(*) FROM segment WHERE id NOT IN (SELECT segment FROM checkpoint_segment)"
        assert raw.execute(loose).fetchone() == (0,)
    finally:
        raw.close()
    assert not rows or segments
    return len(rows)


@pytest.mark.parametrize("kills", KILLS)
def test_killed_at_random_instants(tmp_path: Path, kills: int) -> None:
    rng = random.Random(20261121)
    seen = 0
    for kill in range(kills):
        folder = tmp_path / f"store{kill // KILLS_A_STORE}"
        if kill % KILLS_A_STORE == 0:
            ledger = Ledger()
        writer = start(folder, f"w{kill}", seed=kill)
        assert writer.stdout is not None
        opened = ""
        if kill % KILLS_A_STORE not in (0, 3):
            opened = "".join(writer.stdout.readline() for _ in range(rng.randint(1, 60)))
            time.sleep(rng.uniform(0, 0.05))
        else:  # anywhere, while it makes or opens the database too
            time.sleep(rng.uniform(0, 1.2))
        writer.send_signal(signal.SIGKILL)
        # Not communicate(), which passes over what readline has read ahead.
        assert writer.stderr is not None
        with writer:
            output, complaints = writer.stdout.read(), writer.stderr.read()
        assert writer.returncode == -signal.SIGKILL, complaints
        ledger.read(opened + output)
        seen = max(seen, check(folder, ledger))
    assert seen > 10, "the kills came too early to show anything"


def test_two_processes_write_at_once(tmp_path: Path) -> None:
    """They also make and migrate the database at the same time."""
    writers = [start(tmp_path / "store", f"w{i}", seed=i, commits=15) for i in range(2)]
    ledger = Ledger()
    for writer in writers:
        output, complaints = writer.communicate(timeout=120)
        assert writer.returncode == 0, complaints
        ledger.read(output)
    assert check(tmp_path / "store", ledger) > 20


def header_of_log(store: Store) -> bytes:
    """Read the salts and the number of a log: a log that begins anew has others."""
    with store.file.with_name(f"{FILE}-wal").open("rb") as log:
        return log.read(32)


def test_a_commit_after_a_rest_finds_a_begun_log(tmp_path: Path) -> None:
    """SQLite makes a new header durable before the frames: a second fsync, for which a client would wait."""
    with closing(new_store(tmp_path / "store")) as store:
        chat = Chat(store, "s", SPEC)
        chat.say("t1", None, "hi", "hello")
        full = header_of_log(store)
        store.settle()
        begun = header_of_log(store)
        assert begun != full
        chat.say("t2", "t1", "more", "sure")
        assert header_of_log(store) == begun
        store.settle()
        again = header_of_log(store)
        assert again != begun
        store.settle()  # nothing was written since
        assert header_of_log(store) == again


def test_no_log_begins_beside_another_writer(tmp_path: Path) -> None:
    with closing(new_store(tmp_path / "store")) as store:
        chat = Chat(store, "s", SPEC)
        chat.say("t1", None, "hi", "hello")
        before = header_of_log(store)
        with closing(sqlite3.connect(store.file, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            store.settle()
            assert header_of_log(store) == before
            other.execute("ROLLBACK")
        assert chat.say("t2", "t1", "more", "sure").ends
