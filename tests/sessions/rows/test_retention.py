"""The quota: never more bytes of checkpoints than it allows, and what goes first is what is missed least."""

from __future__ import annotations

import math
import os
import random
import sqlite3
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from keeping import ATTENTION, FED, HYBRID, RECURRENT, START, Chat, assert_same, find, new_store, state_of, user
from sqlalchemy import event, func, select

from ssmd.model.state import StateSpec, TensorSpec
from ssmd.sessions.rows.database import FILE
from ssmd.sessions.rows.holding import miscounted_owners, read_holding
from ssmd.sessions.rows.retention import ages, kept_when_thin, thinned
from ssmd.sessions.rows.schema import checkpoint, piece, segment
from ssmd.sessions.store import Store
from ssmd.sessions.turn import StoreError, UnknownSession

WIDE = StateSpec((TensorSpec("ssm_0", "ssm", 0, (100, 1000)),))  # 400 kB for each checkpoint


def talk(store: Store, session: str, turns: int, spec: StateSpec = HYBRID) -> Chat:
    chat = Chat(store, session, spec)
    for i in range(turns):
        go_on(chat, i)
    return chat


def go_on(chat: Chat, i: int) -> None:
    above = f"{chat.info.id}-{i - 1}" if i else None
    chat.say(f"{chat.info.id}-{i}", above, f"{chat.info.id} asks {i}", "yes")


def really_stored(store: Store) -> int:
    """Counted byte by byte."""
    with store.reading() as connection:
        columns = (piece.c.data, segment.c.data)
        return sum(connection.scalars(select(func.coalesce(func.sum(func.length(c)), 0))).one() for c in columns)


def check_sound(store: Store, spec: StateSpec) -> None:
    """Every checkpoint loads, nothing lies about loose, and all that is counted is right."""
    assert store.bytes_stored() == really_stored(store)
    with store.reading() as connection:
        assert not miscounted_owners(connection)
        for row in connection.execute(select(checkpoint.c.id, checkpoint.c.key)).all():
            assert_same(store.load_in(connection, row.id, spec), state_of(spec, FED[row.key]))
        for session in store.sessions():
            own, shared = read_holding(connection, session.id).sizes()
            assert (session.own_nbytes, session.nbytes) == (own, own + shared), session.id
    with closing(sqlite3.connect(store.file)) as raw:
        assert raw.execute("PRAGMA foreign_key_check").fetchall() == []
        loose = "SELECT count(*) FROM segment WHERE id NOT IN (SELECT segment FROM checkpoint_segment)"
        assert raw.execute(loose).fetchone() == (0,)
        orphans = "SELECT count(*) FROM checkpoint WHERE id NOT IN (SELECT checkpoint FROM turn_checkpoint)"
        assert raw.execute(orphans).fetchone() == (0,)


def resumed_at(store: Store, chat: Chat, turn: str) -> int:
    """The position from which a continuation of the turn would start."""
    found = find(store, chat.scope, [*chat.turns[turn].ids.own.tolist(), 1], chat.info.id)
    return 0 if found is None else found.position


class TestOrder:
    def test_ages(self) -> None:
        tree = {"a": None, "b": "a", "c": "b", "d": "a", "e": "c", "elsewhere": "not here"}
        assert ages(tree) == {"a": 1, "b": 2, "c": 1, "d": 0, "e": 0, "elsewhere": 0, "not here": 1}

    @pytest.mark.parametrize("turns", [1, 2, 3, 7, 50, 1000])
    def test_ever_sparser(self, turns: int) -> None:
        kept = [depth for depth in range(turns) if kept_when_thin(turns - 1 - depth, depth)]
        assert kept[0] == 0
        assert kept[-2:] == list(range(turns))[-2:]
        assert len(kept) <= 3 + 1.5 * math.log2(turns + 1)
        for depth in range(1, turns):  # to edit message `depth` the state before it is needed
            age = turns - 1 - depth
            nearest = max(k for k in kept if k < depth)
            assert depth - 1 - nearest <= 2 * age + 1, (depth, nearest)

    def test_what_is_kept_later_is_kept_now(self) -> None:
        for turns in range(1, 200):
            now = {d for d in range(turns) if kept_when_thin(turns - 1 - d, d)}
            later = {d for d in range(turns) if kept_when_thin(turns - d, d)}
            assert later <= now, turns

    def test_thinned(self, store: Store) -> None:
        talk(store, "s", 12)
        with store.reading() as connection:
            holding = read_holding(connection, "s")
        gone = [(h.turn, h.kind) for h in thinned(holding)]
        assert len({*gone}) == len(gone)
        left = [(h.turn, h.kind) for h in holding.checkpoints if (h.turn, h.kind) not in gone]
        assert left == [
            *[(f"s-{i}", "turn") for i in (0, 4, 8)],
            *[(f"s-{i}", kind) for i in (10, 11) for kind in ("user", "turn")],
        ]
        assert gone[0] == ("s-0", "user"), "the oldest goes first"

    def test_the_system_prompt_and_cut_turns_stay(self, store: Store) -> None:
        """A turn whose text was cut has no checkpoint at its end: then that of its message is kept."""
        chat = talk(store, "s", 8)
        with store.reading() as connection:
            holding = read_holding(connection, "s")
        cut = tuple(
            replace(h, kind="system") if h.id == 1 else h
            for h in holding.checkpoints
            if (h.turn, h.kind) != ("s-4", "turn")
        )
        gone = {(h.turn, h.kind) for h in thinned(replace(holding, checkpoints=cut))}
        assert ("s-0", "system") not in gone
        assert ("s-4", "user") not in gone
        assert chat.info.id == "s"


class TestQuota:
    def test_far_below_nothing_goes(self, store: Store) -> None:
        store.quota = 1 << 30
        talk(store, "s", 10)
        with store.reading() as connection:
            assert len(read_holding(connection, "s").checkpoints) == 20
        check_sound(store, HYBRID)

    def test_old_ones_first_everywhere(self, store: Store) -> None:
        """All sessions thin out before one loses what it is resumed from."""
        a, b = talk(store, "a", 12, RECURRENT), talk(store, "b", 12, RECURRENT)
        store.quota = store.bytes_stored() // 2
        chat = talk(store, "c", 1, RECURRENT)
        assert really_stored(store) <= store.quota
        for one in (a, b):
            last = one.turns[f"{one.info.id}-11"]
            assert resumed_at(store, one, last.id) == len(last.ids) - 1
        assert resumed_at(store, a, "a-5") < len(a.turns["a-5"].ids) - 1
        assert resumed_at(store, chat, "c-0") == 23
        check_sound(store, RECURRENT)

    def test_a_little_ahead_but_for_what_is_resumed_from(self, store: Store) -> None:
        """Looking through a session takes time that grows with its turns: not every commit at the quota does."""
        a, b = talk(store, "a", 60, WIDE), talk(store, "b", 1, WIDE)
        full = store.quota = store.bytes_stored()
        looked = []
        for i in range(60, 80):
            before = store.bytes_stored()
            go_on(a, i)
            looked.append(store.bytes_stored() < before)
            assert really_stored(store) <= full
        assert 1 <= sum(looked) <= 8
        assert resumed_at(store, a, "a-79") == len(a.turns["a-79"].ids) - 1
        assert resumed_at(store, b, "b-0") == len(b.turns["b-0"].ids) - 1
        check_sound(store, WIDE)

    def test_then_the_least_recently_used(self, store: Store) -> None:
        chats = {name: Chat(store, name, WIDE) for name in "abcde"}
        said = dict.fromkeys(chats, 0)

        def say(name: str, after: int) -> None:
            chats[name].clock = START + timedelta(hours=after)
            go_on(chats[name], said[name])
            said[name] += 1

        for after, name in enumerate("abcad"):
            say(name, after)
        store.quota = store.bytes_stored()
        say("e", 6)
        assert {s.id: round(s.nbytes / 380_000) for s in store.sessions()} == {"e": 2, "d": 2, "a": 4, "c": 2, "b": 0}
        say("d", 7)
        assert {s.id: round(s.nbytes / 380_000) for s in store.sessions()} == {"d": 4, "e": 2, "a": 4, "c": 0, "b": 0}
        assert resumed_at(store, chats["a"], "a-1") == len(chats["a"].turns["a-1"].ids) - 1
        check_sound(store, WIDE)

    def test_text_stays(self, store: Store) -> None:
        talk(store, "a", 3, WIDE)
        store.quota = 900_000
        talk(store, "b", 3, WIDE)
        assert store.session("a").nbytes == 0
        assert [t.id for t in store.turns("a")] == ["a-0", "a-1", "a-2"]
        assert really_stored(store) <= store.quota

    def test_an_emptied_session_goes_on(self, store: Store) -> None:
        a = talk(store, "a", 3)
        store.collect(0)
        assert store.bytes_stored() == 0
        a.ends["a-2"] = (None, a.ends["a-2"][1])
        with pytest.raises(AssertionError):
            assert resumed_at(store, a, "a-2")
        turn, checkpoints = a.make("a-3", "a-2", [user("more")], "sure")
        first = replace(checkpoints[0], parent=None, state=state_of(HYBRID, checkpoints[0].ids.own))
        second = replace(checkpoints[1], parent=first)
        store.commit([turn], [a.encode(first), a.encode(second)], session=a.info)
        a.remember(turn, None)
        assert resumed_at(store, a, "a-3") == len(turn.ids) - 1
        check_sound(store, HYBRID)

    @pytest.mark.parametrize("spec", [HYBRID, ATTENTION, RECURRENT])
    def test_a_middle_takes_nothing_from_what_stands_on_it(self, store: Store, spec: StateSpec) -> None:
        a = talk(store, "a", 16, spec)
        everything = store.bytes_stored()
        store.collect(everything * 2 // 3)
        assert store.bytes_stored() <= everything * 2 // 3
        check_sound(store, spec)
        if spec is not ATTENTION:  # there, rows go from the end
            assert resumed_at(store, a, "a-15") == len(a.turns["a-15"].ids) - 1

    def test_rows_alone_go_from_the_end(self, store: Store) -> None:
        """Of a chain of rows the middle frees nothing: the beginning stays good for what it is."""
        a = talk(store, "a", 16, ATTENTION)
        store.collect(store.bytes_stored() // 2)
        assert 0 < resumed_at(store, a, "a-15") < len(a.turns["a-15"].ids) - 1
        assert store.bytes_stored() > 0
        check_sound(store, ATTENTION)

    def test_shared_ones_go_with_the_last_who_needs_them(self, store: Store) -> None:
        a = talk(store, "a", 3)
        b = Chat(store, "b")
        b.ends, b.turns = dict(a.ends), dict(a.turns)
        turn, checkpoints = b.make("b-3", "a-2", [user("other")], "sure")
        store.commit([replace(turn, parent=None)], [b.encode(c) for c in checkpoints], session=b.info)
        store.settle()
        own, shared = store.session("b").own_nbytes, store.session("b").nbytes - store.session("b").own_nbytes
        assert own > 0
        assert shared > 0
        assert store.session("a").own_nbytes + store.session("b").nbytes == store.bytes_stored()
        store.pin("b")
        before = store.session("b").nbytes
        assert store.collect(0).nbytes > 0
        assert store.session("b").nbytes == before == store.bytes_stored()
        assert store.session("a").nbytes == 0
        check_sound(store, HYBRID)
        store.pin("b", False)
        assert store.collect(0).left == 0
        check_sound(store, HYBRID)

    def test_a_pinned_fork_keeps_what_it_begins_with(self, store: Store) -> None:
        a = talk(store, "a", 4)
        fork = store.fork("a", "a-2").id
        store.pin(fork)
        assert store.collect(0).nbytes > 0
        for turn, kept in (("a-0", True), ("a-1", True), ("a-2", True), ("a-3", False)):
            assert (resumed_at(store, a, turn) == len(a.turns[turn].ids) - 1) is kept, turn
        store.delete("a")
        assert store.collect(0).nbytes == 0, "it owns them now"
        assert resumed_at(store, a, "a-2") == len(a.turns["a-2"].ids) - 1
        store.pin(fork, False)
        assert store.collect(0).left == 0
        check_sound(store, HYBRID)

    def test_of_two_who_share_both_let_go(self, store: Store) -> None:
        a = talk(store, "a", 1)
        b = Chat(store, "b")
        turn, checkpoints = a.make("a-0", None, [user("a asks 0")], "yes")
        store.commit(
            [replace(turn, id="b-0", session="b")],
            [a.encode(replace(c, turn=None)) for c in checkpoints],
            session=b.info,
        )
        assert store.session("b").own_nbytes == 0
        assert store.collect(0).left == 0
        check_sound(store, HYBRID)

    def test_a_checkpoint_larger_than_the_quota(self, store: Store) -> None:
        store.quota = 100_000
        chat = Chat(store, "s", WIDE)
        done = chat.say("t1", None, "hi", "hello")
        assert [p.id for p in done.checkpoints] == [None, None]
        assert all("larger than the quota of 100000 bytes" in p.why_not for p in done.checkpoints)
        assert done.nbytes == store.bytes_stored() == 0
        assert [t.id for t in store.turns("s")] == ["t1"]

    def test_a_quota_of_one_checkpoint(self, store: Store) -> None:
        """The last of a turn is kept: to go on is likelier than to regenerate."""
        store.quota = 500_000
        chat = Chat(store, "s", WIDE)
        for i in range(4):
            above = f"t{i - 1}" if i else None
            new, checkpoints = chat.make(f"t{i}", above, [user(f"more {i}")], "yes")
            placed = store.commit([new], [chat.encode(c) for c in checkpoints], session=chat.info).checkpoints
            chat.remember(new, placed[-1].id)
            assert [p.id is None for p in placed] == [True, False]
            assert "no room" in placed[0].why_not
            assert resumed_at(store, chat, f"t{i}") == len(new.ids) - 1
            assert really_stored(store) <= store.quota
        check_sound(store, WIDE)

    def test_what_is_written_ahead_counts(self, store: Store) -> None:
        """The state of a prompt is written before its turn, and linked when that comes."""
        store.quota = 1_000_000
        chat = Chat(store, "s", WIDE)
        for i in range(5):
            new, checkpoints = chat.make(f"t{i}", f"t{i - 1}" if i else None, [user(f"more {i}")], "yes")
            first, second = (chat.encode(c) for c in checkpoints)
            ahead = store.keep(first)
            assert really_stored(store) == store.bytes_stored() <= store.quota
            assert ahead.id is not None
            done = store.commit([new], [first.without_data(), second], session=chat.info).checkpoints
            assert [p.id is None for p in done] == [False, False]
            chat.remember(new, done[-1].id)
            assert really_stored(store) <= store.quota
            check_sound(store, WIDE)

    def test_what_is_written_ahead_makes_way(self, store: Store) -> None:
        """If there is room for one, it is the turn's."""
        store.quota = 500_000
        chat = Chat(store, "s", WIDE)
        for i in range(3):
            new, checkpoints = chat.make(f"t{i}", f"t{i - 1}" if i else None, [user(f"more {i}")], "yes")
            first, second = (chat.encode(c) for c in checkpoints)
            kept = store.keep(first).id is not None
            assert kept == (i == 0), "not at the cost of what it grew from"
            given = [first.without_data() if kept else first, second]
            done = store.commit([new], given, session=chat.info).checkpoints
            chat.remember(new, done[-1].id)
            assert resumed_at(store, chat, f"t{i}") == len(new.ids) - 1
            assert really_stored(store) <= store.quota
            check_sound(store, WIDE)
        pinned = talk(store, "p", 1, WIDE)
        store.pin(pinned.info.id)
        new, checkpoints = chat.make("t9", None, [user("no room")], "yes")
        first = chat.encode(checkpoints[0])
        assert "no room for it yet" in store.keep(first).why_not
        store.quota = 100
        assert store.keep(first).id is None

    def test_what_came_to_nothing_is_swept(self, store: Store) -> None:
        chat = Chat(store, "s", WIDE)
        _, checkpoints = chat.make("t0", None, [user("more")], "yes")
        store.keep(chat.encode(checkpoints[0]))
        assert store.bytes_stored() > 0
        assert store.sweep() == 1
        assert store.bytes_stored() == really_stored(store) == 0

    def test_a_hybrid_keeps_its_rows_though_the_parent_goes(self, store: Store) -> None:
        chat = talk(store, "s", 1)
        store.quota = store.bytes_stored() - 1
        for i in range(1, 5):
            go_on(chat, i)
            assert really_stored(store) <= store.quota
            check_sound(store, HYBRID)

    def test_nothing_is_evicted_for_what_cannot_be_kept(self, store: Store) -> None:
        talk(store, "old", 1, RECURRENT)
        talk(store, "pinned", 1, WIDE)
        store.pin("pinned")
        store.quota = store.bytes_stored() + 1000
        before = store.session("old").nbytes
        done = Chat(store, "new", WIDE).say("n", None, "hi", "hello")
        assert all("pinned sessions" in p.why_not for p in done.checkpoints)
        assert store.session("old").nbytes == before > 0

    def test_pinned_ones_alone_exceed_it(self, store: Store) -> None:
        chat = talk(store, "p", 2, WIDE)
        store.pin("p")
        store.quota = store.bytes_stored() // 2
        before = store.bytes_stored()
        done = chat.say("p-2", "p-1", "more", "sure")
        assert [p.id for p in done.checkpoints] == [None, None]
        assert store.bytes_stored() == before
        assert store.session("p").info.pinned
        assert resumed_at(store, chat, "p-2") == len(chat.turns["p-1"].ids) - 1
        assert store.collect().nbytes == 0, "they are exempt from collections too"

    def test_two_processes_share_the_total(self, store: Store) -> None:
        quota = 3_000_000
        other = Store.open(store.file.parent, quota=quota)
        store.quota = quota
        chats = [Chat(store, "a", WIDE), Chat(other, "b", WIDE)]
        for i in range(5):
            for chat in chats:
                go_on(chat, i)
                assert really_stored(store) <= quota
        other.close()
        check_sound(store, WIDE)

    def test_a_clock_that_jumps_back(self, store: Store) -> None:
        """The session used last is not emptied first because the clock was set back."""
        old = talk(store, "old", 2, WIDE)
        new = Chat(store, "new", WIDE)
        new.clock = old.clock + timedelta(days=1)
        go_on(new, 0)
        new.clock -= timedelta(days=300)
        go_on(new, 1)
        store.quota = store.bytes_stored() - 1
        third = Chat(store, "third", WIDE)
        third.clock = old.clock + timedelta(days=2)
        third.say("x", None, "hi", "hello")
        assert store.session("new").nbytes > store.session("old").nbytes
        check_sound(store, WIDE)


class TestCollect:
    def test_the_file_shrinks(self, tmp_path: Path) -> None:
        store = Store.open(tmp_path)
        store.settle()
        empty = (tmp_path / FILE).stat().st_size
        talk(store, "s", 8, WIDE)
        store.settle()
        full = (tmp_path / FILE).stat().st_size
        assert full > empty + 5_000_000
        done = store.collect(1_000_000)
        size = sum(f.stat().st_size for f in tmp_path.glob(FILE + "*"))
        assert done.left <= 1_000_000
        assert done.nbytes + done.left == pytest.approx(full - empty, rel=0.1)
        assert size <= empty + done.left + 300_000
        store.collect(0)
        assert (tmp_path / FILE).stat().st_size <= empty + 200_000
        store.close()

    def test_in_parts(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("ssmd.sessions.rows.retention.PART_BYTES", 500_000)
        for name in "abc":
            talk(store, name, 4, WIDE)
        told = store.collect(900_000, dry_run=True)
        done = store.collect(900_000)
        assert done == told
        assert done.left <= 900_000
        assert done.checkpoints == sum(count for _, count in done.sessions.values())
        assert done.nbytes == sum(nbytes for nbytes, _ in done.sessions.values())
        check_sound(store, WIDE)

    def test_a_dry_run_changes_nothing(self, store: Store) -> None:
        talk(store, "a", 5)
        talk(store, "b", 5)
        with closing(sqlite3.connect(store.file)) as raw:
            before = list(raw.iterdump())
        told = store.collect(3000, dry_run=True)
        with closing(sqlite3.connect(store.file)) as raw:
            assert list(raw.iterdump()) == before
        assert told.nbytes > 0
        done = store.collect(3000)
        assert done == told
        assert done.left == really_stored(store) <= 3000

    def test_without_a_quota(self, store: Store) -> None:
        talk(store, "a", 2)
        assert store.collect().nbytes == 0

    def test_pin(self, store: Store) -> None:
        talk(store, "a", 2)
        assert store.pin("a").info.pinned
        assert store.session("a").info.pinned
        assert store.collect(0).nbytes == 0
        assert not store.pin("a", False).info.pinned
        assert store.collect(0).left == 0
        with pytest.raises(UnknownSession):
            store.pin("nobody")

    def test_sizes_are_counted_when_idle(self, store: Store) -> None:
        talk(store, "a", 2)
        with closing(sqlite3.connect(store.file)) as raw:
            raw.execute("UPDATE session SET own_nbytes = NULL")
            raw.commit()
        shown = store.session("a").own_nbytes
        assert shown == store.bytes_stored() > 0
        store.settle()
        with closing(sqlite3.connect(store.file)) as raw:
            assert raw.execute("SELECT own_nbytes FROM session").fetchall() == [(shown,)]


class TestFaults:
    """Failures in the middle of retention, which leave everything as it was."""

    def test_full(self, store: Store) -> None:
        chat = talk(store, "a", 3, WIDE)
        store.quota = store.bytes_stored()
        store.settle()

        def limit(connection: sqlite3.Connection, *_: object) -> None:
            (pages,) = connection.execute("PRAGMA page_count").fetchone()
            connection.execute(f"PRAGMA max_page_count={pages + 8}")  # some for the text

        event.listen(store._engine, "checkout", limit)
        go_on(chat, 3)  # what goes makes room for what comes, in the file too
        store.quota += 10_000_000
        before = store.bytes_stored()
        go_on(chat, 4)
        assert store.bytes_stored() == before, "its words are kept, its states are not"
        event.remove(store._engine, "checkout", limit)
        store._engine.dispose()
        assert [t.id for t in store.turns("a")] == [f"a-{i}" for i in range(5)]
        go_on(chat, 5)
        check_sound(store, WIDE)

    def test_locked(self, tmp_path: Path) -> None:
        new_store(tmp_path / "data").close()
        store = Store.open(tmp_path / "data", busy_ms=100)
        talk(store, "a", 3)
        with closing(sqlite3.connect(store.file, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            for ask in (lambda: store.collect(0), lambda: store.pin("a"), lambda: store.collect(0, dry_run=True)):
                with pytest.raises(StoreError, match="locked by another process"):
                    ask()
            assert store.session("a").nbytes > 0
            other.execute("ROLLBACK")
        assert store.collect(0).left == 0
        store.close()


@st.composite
def steps(draw: st.DrawFn) -> list[tuple[Any, ...]]:
    names = st.sampled_from("abcd")
    say = st.tuples(st.just("say"), names, st.integers(0, 3), st.integers(1, 30))
    quota = st.tuples(st.just("quota"), st.integers(0, 60_000))
    others = st.tuples(st.sampled_from(["pin", "unpin", "delete", "share", "settle"]), names)
    return draw(st.lists(st.one_of(say, say, say, quota, others, st.just(("collect",))), max_size=40))


@settings(max_examples=int(os.environ.get("SSMD_EXAMPLES", "25")), deadline=None)
@given(st.sampled_from([HYBRID, ATTENTION, RECURRENT]), steps(), st.randoms(use_true_random=False))
def test_whatever_happens(
    tmp_path_factory: pytest.TempPathFactory, spec: StateSpec, does: list[tuple[Any, ...]], rng: random.Random
) -> None:
    """Never over the quota after a commit, pinned ones whole, every kept checkpoint loads, every number is right."""
    store = new_store(tmp_path_factory.mktemp("store") / "data")
    store.quota = 20_000
    chats: dict[str, Chat] = {}
    pinned: dict[str, set[int]] = {}

    def held(name: str) -> set[int]:
        with store.reading() as connection:
            return {h.id for h in read_holding(connection, name).checkpoints}

    for n, step in enumerate(does):
        name = step[1] if len(step) > 1 else ""
        before = really_stored(store)
        if step[0] == "say":
            chat = chats.setdefault(name, Chat(store, name, spec, owner="key" if name in "ab" else ""))
            parent = rng.choice([None, *list(chat.turns)[-3:]]) if step[2] == 0 else next(reversed(chat.turns), None)
            new, checkpoints = chat.make(f"{name}{n}", parent, [user(f"q{n}" if step[2] else "same")], "a", step[3])
            if parent is not None and chat.ends[parent][0] not in held(name) and spec.rows:
                first = replace(checkpoints[0], parent=None, state=state_of(spec, checkpoints[0].ids.own))
                checkpoints = [first, replace(checkpoints[1], parent=first)]
            placed = store.commit([new], [chat.encode(c) for c in checkpoints], session=chat.info).checkpoints
            chat.remember(new, placed[-1].id)
            after = really_stored(store)
            assert after <= max(store.quota, before), "only pinned ones may be above, and then nothing is added"
            if after > store.quota:
                assert pinned
            if name in pinned:
                pinned[name] |= {p.id for p in placed if p.id is not None}
        elif step[0] == "quota":
            store.quota = step[1]
        elif step[0] == "collect":
            done = store.collect()
            assert done.left == really_stored(store)
            assert done.left <= store.quota or set(pinned)
        elif step[0] == "settle":
            store.settle()
        elif name in chats:
            if step[0] == "pin":
                store.pin(name)
                pinned[name] = held(name)
            elif step[0] == "unpin":
                store.pin(name, False)
                pinned.pop(name, None)
            elif step[0] == "delete":
                store.delete(name)
                pinned.pop(name, None)
                del chats[name]
            elif len(chats) > 1:  # go on from another session's state, as one with an equal beginning would
                other = chats[rng.choice([c for c in chats if c != name])]
                turn = next((t for t in reversed(other.turns) if other.ends[t][0] in held(other.info.id)), None)
                if turn is not None:
                    chat = chats[name]
                    chat.ends[turn], chat.turns[turn] = other.ends[turn], other.turns[turn]
                    new, checkpoints = chat.make(f"{name}{n}", turn, [user(f"q{n}")], "a")
                    encoded = [chat.encode(c) for c in checkpoints]
                    placed = store.commit([replace(new, parent=None)], encoded, session=chat.info).checkpoints
                    del chat.ends[turn], chat.turns[turn]
                    chat.remember(new, placed[-1].id)
                    if name in pinned:
                        pinned[name] = held(name)
                    assert really_stored(store) <= max(store.quota, before)
        for one, before_ in pinned.items():
            assert before_ <= held(one), f"{one} is pinned"
    store.settle()
    check_sound(store, spec)
    store.close()
