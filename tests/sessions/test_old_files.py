"""Files that earlier versions wrote stay readable. Those in `data/` are never made again: new formats add new ones."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from keeping import HYBRID, LINEAGE, VOCABULARY, assert_same, find, grown

from ssmd.model.state import State
from ssmd.sessions.checkpoint import Scope
from ssmd.sessions.files.transfer import LocalModel, import_session
from ssmd.sessions.rows.database import FILE
from ssmd.sessions.store import Store
from ssmd.sessions.turn import StoreError

DATA = Path(__file__).parents[1] / "data"


def from_database(folder: Path) -> Store:
    folder.mkdir(mode=0o700)
    shutil.copy(DATA / "sessions-0001.sqlite", folder / FILE)
    return Store.open(folder)


def from_file(folder: Path) -> Store:
    store = Store.open(folder)
    import_session(store, DATA / "session-file-1.ssmd", local={LINEAGE: LocalModel("made-up", HYBRID, VOCABULARY)})
    return store


def head_state(store: Store) -> State:
    """The state at the end of the session's current turn."""
    ids, _ = grown(store, store.session("ses_old").head)
    found = find(store, Scope(HYBRID.digest(), LINEAGE, "c" * 64), ids.own, "ses_old")
    assert found is not None
    assert found.position == len(ids) - 1
    state = store.load(found.id, HYBRID)
    state.check(HYBRID)
    return state


@pytest.mark.parametrize("opened", [from_database, from_file])
def test_turns_are_there(opened: Callable[[Path], Store], tmp_path: Path) -> None:
    store = opened(tmp_path / "data")
    turns = store.turns("ses_old")
    assert [(t.id, t.parent, t.answer.content) for t in turns] == [
        ("t1", None, "The keeper."),
        ("t2", "t1", "The lamp."),
        ("t3", "t1", "Nobody."),
    ]
    assert turns[0].messages[0].content == "Be brief."
    assert store.session("ses_old").head == "t3"
    store.close()


def test_the_states_are_the_same(tmp_path: Path) -> None:
    a, b = from_database(tmp_path / "a"), from_file(tmp_path / "b")
    assert_same(head_state(a), head_state(b))
    a.close()
    b.close()


@pytest.mark.parametrize("opened", [from_database, from_file])
@pytest.mark.parametrize("table", ["piece", "segment"])
def test_a_flipped_bit_is_found(opened: Callable[[Path], Store], table: str, tmp_path: Path) -> None:
    """Numbers of the first version carry a sha256, those that this one writes an xxh3-128."""
    store = opened(tmp_path / "data")
    head_state(store)
    with contextlib.closing(sqlite3.connect(store.file)) as raw, raw:
        (length,) = {n for (n,) in raw.execute(f"SELECT length(checksum) FROM {table}")}
        assert length == (32 if opened is from_database else 16)
        for rowid, data in raw.execute(f"SELECT rowid, data FROM {table}").fetchall():
            torn = bytes([*data[:-1], data[-1] ^ 1])
            raw.execute(f"UPDATE {table} SET data = ? WHERE rowid = ?", (torn, rowid))
    with pytest.raises(StoreError, match="altered"):
        head_state(store)
    store.close()
