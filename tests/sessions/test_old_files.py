"""Files of earlier versions open, or are refused. Those in `data/` are never made again: new formats add new ones."""

from __future__ import annotations

import gzip
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from keeping import BUILD, HYBRID, LINEAGE, PRODUCER, VOCABULARY, Chat, assert_same, find, grown, state_of

from ssmd.sessions.checkpoint import Scope, StoredCheckpoint
from ssmd.sessions.files.packing import States
from ssmd.sessions.files.sessionfile import SessionFileError
from ssmd.sessions.files.transfer import LocalModel, export_session, import_session
from ssmd.sessions.fsck.repair import check, repair
from ssmd.sessions.line import Ids
from ssmd.sessions.rows.blobs import DamagedState
from ssmd.sessions.rows.database import FILE
from ssmd.sessions.store import Store

DATA = Path(__file__).parents[1] / "data"
SCOPE = Scope(HYBRID.digest(), LINEAGE, BUILD)
LOCAL = {LINEAGE: LocalModel("made-up", HYBRID, VOCABULARY)}


@pytest.fixture
def database(tmp_path: Path) -> Path:
    """The folder of a database of revision 0011 with sessions of states in all forms that were ever written."""
    folder = tmp_path / "data"
    folder.mkdir(mode=0o700)
    (folder / FILE).write_bytes(gzip.decompress((DATA / "sessions-0011.sqlite.gz").read_bytes()))
    return folder


def state_after(store: Store, session: str, turn: str) -> tuple[StoredCheckpoint, Ids]:
    """The deepest state for a request that goes on from a turn, and the ids that it was fed."""
    ids, _ = grown(store, turn)
    found = find(store, SCOPE, ids.own, session)
    assert found is not None
    assert found.position == len(ids) - 1
    return found, ids.own[:-1]


def rows_of(database: Path) -> dict[str, list[Any]]:
    with closing(sqlite3.connect(database / FILE)) as raw:
        tables = [name for (name,) in raw.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        return {name: sorted(raw.execute(f"SELECT * FROM {name}").fetchall(), key=repr) for name in tables}


def test_a_database_of_0011_gets_the_newer_tables(database: Path) -> None:
    before = rows_of(database)
    store = Store.open(database)
    said = {s.id: [t.id for t in store.turns(s.id)] for s in store.sessions()}
    fork = next(name for name in said if not name.endswith(("old", "new", "sha")))
    assert said == {
        "ses_old": ["t1", "t2", "t3", "t4"],
        "ses_new": ["n1", "n2", "n2b", "n3"],
        "ses_sha": ["h1", "h2"],
        fork: ["n1", "n2"],
    }
    store.receive("turn_1", {"a": "b"})
    with store.snapshot() as stored:
        assert stored.receipt("turn_1") == {"a": "b"}
    store.drop_receipt("turn_1")
    store.close()
    assert rows_of(database) == {
        **before,
        "receipt": [],
        "outbox": [],
        "remote_session": [],
        "remote_mark": [],
        "buried_turn": [],
        "trusted_machine": [],
        "alembic_version": [("0015",)],
    }


@pytest.mark.parametrize(
    ("session", "turns"), [("ses_new", ("n1", "n2", "n2b", "n3")), ("ses_sha", ("h1", "h2"))], ids=["xxh3", "sha256"]
)
def test_a_session_of_0011_resumes_exactly(session: str, turns: tuple[str, ...], database: Path) -> None:
    """Raw states carry an xxh3-128, those of before revision 0007 a sha256."""
    store = Store.open(database)
    for turn in turns:
        found, ids = state_after(store, session, turn)
        assert found.is_exact(BUILD, PRODUCER)
        assert_same(store.load(found.id, HYBRID), state_of(HYBRID, ids))
    chat, last = Chat(store, session), store.path(turns[-1])[-1]
    chat.ends[last.id], (line, text) = (found.id, ids), grown(store, last.id)
    chat.turns[last.id] = replace(last, ids=line, text=text)
    chat.say("next", last.id, "Go on.", "Well.")
    found, ids = state_after(store, session, "next")
    assert_same(store.load(found.id, HYBRID), state_of(HYBRID, ids))
    store.close()


def test_a_session_file_of_0011_imports_equal_states(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "data")
    done = import_session(store, DATA / "session-file-2-states.ssmd", local=LOCAL)
    assert (done.session, done.turns, done.checkpoints, done.text_only) == ("ses_new", 4, 5, "")
    for turn in ("n2b", "n3"):
        found, ids = state_after(store, "ses_new", turn)
        assert found.is_exact(BUILD, PRODUCER)
        assert found.origin == "ses_new"
        assert_same(store.load(found.id, HYBRID), state_of(HYBRID, ids))
    store.close()


def test_a_session_file_of_format_1_is_refused(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "data")
    with pytest.raises(
        SessionFileError, match="it has format 1, this ssmd reads format 2 alone: import it with the ver"
    ):
        import_session(store, DATA / "session-file-1.ssmd", local=LOCAL)
    assert store.sessions() == []
    store.close()


PLANES = ("t1", "t2", "t3", "t4")  # states in byte planes; of t4 the new rows stand on those of t3


def lost(store: Store) -> dict[str, bool]:
    """Return for each turn of the session with byte planes: True if no state of it or before it is found."""
    return {t: find(store, SCOPE, grown(store, t)[0].own, "ses_old") is None for t in PLANES}


def said(store: Store) -> list[str]:
    return [
        f"{m.content} {t.answer.content} {len(grown(store, t.id)[0])}"
        for t in store.turns("ses_old")
        for m in t.messages
    ]


def test_states_in_planes_are_dropped_where_met(database: Path) -> None:
    """As a request does that goes on from the turns: text stays, and states of other sessions do."""
    store = Store.open(database)
    words, gone = said(store), 0
    for turn in PLANES:
        ids = grown(store, turn)[0].own
        while (found := find(store, SCOPE, ids, "ses_old")) is not None:
            with pytest.raises(DamagedState, match="cannot be read: numbers are stored as 'float"):
                store.load(found.id, HYBRID)
            gone += store.drop_damaged(found.id, HYBRID)
    assert gone == 8
    assert said(store) == words
    found, ids = state_after(store, "ses_new", "n3")
    assert_same(store.load(found.id, HYBRID), state_of(HYBRID, ids))
    store.close()
    assert check(database).damages == ()


def test_rows_in_planes_take_all_states_on_them(database: Path) -> None:
    store = Store.open(database)
    found = find(store, SCOPE, grown(store, "t2")[0].own, "ses_old")
    assert found is not None
    assert store.drop_damaged(found.id, HYBRID) == 8, "the first segment is a part of all of them"
    assert all(lost(store).values())
    store.close()


def test_repair_takes_out_states_in_planes(database: Path) -> None:
    found = check(database)
    assert any("stored as 'float32', which this version does not read" in d.problem for d in found.damages)
    assert any("stored as 'float16', which this version does not read" in d.problem for d in found.damages)
    done = repair(database)
    assert (done.sessions, done.turns, done.checkpoints) == (4, 10, found.checkpoints - 8)
    store = Store.open(database)
    assert all(lost(store).values())
    found_, ids = state_after(store, "ses_sha", "h2")
    assert_same(store.load(found_.id, HYBRID), state_of(HYBRID, ids))
    store.close()


@pytest.mark.parametrize("states", ["newest", "all"])
def test_a_session_with_planes_exports_its_text(states: States, database: Path) -> None:
    store = Store.open(database)
    done = export_session(store, "ses_old", database / "old.ssmd", states=states)
    assert (done.turns, done.checkpoints, done.left_out) == (4, 0, 0)
    done = export_session(store, "ses_new", database / "new.ssmd", states=states)
    assert done.checkpoints == (2 if states == "newest" else 5)
    store.close()
