"""A store with many sessions: what a page, a search, a lookup and a commit cost does not grow with their number.

The cost is counted in instructions of SQLite's machine, which are the same on each computer.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from keeping import HYBRID, Chat, echo_of, find, new_store, user
from sqlalchemy import Connection, event
from store_scale import fill

from ssmd.sessions.rows import sessions
from ssmd.sessions.store import Store
from ssmd.sessions.turn import Domain

FEW, MANY = 60, 1500
_EACH = 10  # instructions between two looks


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, Store]:
    """Stores with few and with many sessions. `s` was used first and is pinned, `s59` or `s1499` last."""
    made = []
    for number in (FEW, MANY):
        store = new_store(tmp_path_factory.mktemp("many") / "data")
        fill(store, number, 1)
        store.pin("s")  # so that no test takes its states from another
        made.append(store)
    return made[0], made[1]


class Counter:
    """Counts the instructions of a store's transactions."""

    def __init__(self, store: Store) -> None:
        self.steps = 0
        event.listen(store._engine, "begin", self._begin)

    def _begin(self, connection: Connection) -> None:
        raw: Any = connection.connection.dbapi_connection
        raw.set_progress_handler(self._tick, _EACH)

    def _tick(self) -> int:
        self.steps += _EACH
        return 0


def commit(store: Store) -> None:
    Chat(store, "new").say("new-1", None, "something else", "yes")


ALICE = Domain("alice", ("", "alice"))
COSTS: dict[str, Callable[[Store], object]] = {
    "first page": lambda store: store.sessions(31),
    "deep page": lambda store: store.sessions(31, "s2"),
    "page of a key": lambda store: store.of(ALICE).sessions(31, "s2"),
    "last used": lambda store: store.newest(),
    "search that finds": lambda store: store.search("question", 20),
    "search that must stop": lambda store: store.search("nowhere", 20, within_s=0),
    "search that goes on": lambda store: store.search("nowhere", 20, "s55", within_s=0),
    "ids that begin so": lambda store: store.ids("s77777"),
    "one session": lambda store: store.session("s5"),
    "its turns": lambda store: store.turns("s5"),
    "bytes stored": lambda store: store.bytes_stored(),
    "match of a prompt": lambda store: echo_of(store, [user("who is not known?")]),
    "commit": commit,
    "fork": lambda store: store.fork("s6"),
    "its fork": lambda store: store.fork(store.fork("s9").id),
    "pin": lambda store: store.pin("s8"),
    "unpin": lambda store: store.pin("s8", False),
    "given title": lambda store: store.rename("s8", "About lists"),
    "default title": lambda store: store.rename("s8", None),
    "turns that need no reading": lambda store: store.resumable("s5"),
    "kept usages": lambda store: store.usages("s5"),
    "a little room": lambda store: store.collect(store.bytes_stored() - 1),
}


@pytest.mark.parametrize("name", COSTS)
def test_the_cost_does_not_grow_with_sessions(
    name: str, stores: tuple[Store, Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "PAGE", 50)
    few, many = (_steps(store, COSTS[name]) for store in stores)
    assert many <= 1.5 * few + 500, f"{few} instructions with {FEW} sessions, {many} with {MANY}"


def _steps(store: Store, work: Callable[[Store], object]) -> int:
    counter = Counter(store)
    work(store)
    return counter.steps


def test_a_look_up_does_not_grow_with_sessions_that_begin_alike(stores: tuple[Store, Store]) -> None:
    """As those of an agent do: their states have the same anchors, and lie at few positions."""
    steps = []
    for store in stores:
        with store.writing() as connection:
            own = connection.exec_driver_sql("SELECT position, anchor FROM checkpoint ORDER BY id LIMIT 2").all()
            for row in own:
                connection.exec_driver_sql("UPDATE checkpoint SET anchor = ? WHERE position = ?", (row[1], row[0]))
        scope, ids = Chat(store, "new", HYBRID).scope, [*store.path("t0")[-1].ids.own.tolist(), 7, 7]
        steps.append(_steps(store, partial(find, scope=scope, ids=ids)))
        found = find(store, scope, ids)
        assert found is not None
        assert found.position >= max(row[0] for row in own)
    few, many = steps
    assert many <= 1.5 * few + 500, f"{few} instructions with {FEW} sessions, {many} with {MANY}"


def test_pages_together_are_the_whole_list(stores: tuple[Store, Store]) -> None:
    store = stores[1]
    whole = [session.id for session in store.sessions()]
    assert store.ids() == whole
    with store.each_session() as each:
        assert [session.id for session in each()] == whole
    paged: list[str] = []
    while page := store.sessions(400, paged[-1] if paged else None):
        paged += [session.id for session in page]
    assert paged == whole
    found: list[str] = []
    while (result := store.search("question", 700, found[-1] if found else None)).sessions:
        found += [session.id for session in result.sessions]
    assert found == [one for one in whole if one != "new"]


def test_sessions_of_one_moment_are_paged_too(tmp_path: Path) -> None:
    """Also those whose time was altered to a text that is not Unicode."""
    with closing(new_store(tmp_path / "data")) as store:
        fill(store, 40, 1)
        with store.writing() as connection:
            connection.exec_driver_sql("UPDATE session SET last_used_at = 7")
            connection.exec_driver_sql("UPDATE session SET last_used_at = CAST(x'ff41' AS TEXT) WHERE id > 's3'")
        whole = [session.id for session in store.sessions()]
        assert len(whole) == 40
        with pytest.MonkeyPatch.context() as patched, store.each_session() as each:
            patched.setattr(sessions, "PAGE", 3)
            assert [session.id for session in each()] == whole
            assert len(store.search("question", 100).sessions) == 40


def test_sessions_are_counted_by_indices(stores: tuple[Store, Store]) -> None:
    """A table's rows are some hundred bytes each, an index has ten."""
    with stores[0].reading() as connection:
        for query in (sessions._COUNTED, sessions._COUNTED_PINNED):
            asked = str(query.compile(connection, compile_kwargs={"literal_binds": True}))
            plan = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {asked}").all()
            assert "USING COVERING INDEX" in plan[0][3]
