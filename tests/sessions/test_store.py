"""The session store: what was committed comes back, bit for bit, and what is shared is stored once."""

from __future__ import annotations

import os
import sqlite3
import stat
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from keeping import (
    ATTENTION,
    BUILD,
    HYBRID,
    LINEAGE,
    SPECS,
    START,
    Chat,
    answer,
    assert_same,
    find,
    new_store,
    plain,
    state_of,
    user,
    whole,
)
from sqlalchemy import func, select

from ssmd.model.state import State, StateError, StateSpec, TensorSpec
from ssmd.sessions.checkpoint import NewCheckpoint, Scope
from ssmd.sessions.line import NOTHING, SILENCE, Line, Passage, anchor, anchors
from ssmd.sessions.match import Chain
from ssmd.sessions.rows import blobs as blobs_module
from ssmd.sessions.rows.blobs import encode
from ssmd.sessions.rows.database import FILE
from ssmd.sessions.rows.schema import checkpoint, metadata, piece, segment
from ssmd.sessions.store import Patience, Store
from ssmd.sessions.turn import NewTurn, SessionInfo, StoreError, TurnRemoved, UnknownSession
from ssmd.text.messages import Message


@pytest.fixture(params=list(SPECS))
def spec(request: pytest.FixtureRequest) -> StateSpec:
    return SPECS[str(request.param)]


def counts(store: Store) -> dict[str, int]:
    with store.reading() as connection:
        tables = [t for t in metadata.sorted_tables if t.name != "total"]  # which has one row, always
        return {t.name: connection.execute(select(func.count()).select_from(t)).scalar_one() for t in tables}


def check_prefix_found(store: Store, chat: Chat, turn: str) -> None:
    """The turn's own checkpoint is what its continuation finds, and it holds what the model held."""
    ids = chat.turns[turn].ids.own
    found = find(store, chat.scope, [*ids.tolist(), 1, 2, 3], chat.info.id)
    assert found is not None
    assert found.position == len(ids) - 1
    assert_same(store.load(found.id, chat.spec), state_of(chat.spec, ids[:-1]))


def test_a_conversation_comes_back(store: Store, spec: StateSpec) -> None:
    chat = Chat(store, "s", spec)
    chat.say("t1", None, "hi", "hello", system="Be brief.")
    chat.say("t2", "t1", "more", " sure\n")
    for turn in ("t1", "t2"):
        check_prefix_found(store, chat, turn)
    for read, wrote in zip(store.path("t2"), chat.turns.values(), strict=True):
        first = wrote.parent is None
        stands = {"depth": 0, "length": 3, "stem": None} if first else {"depth": 1, "length": 5, "stem": "t1"}
        chain = (Chain() if first else store.path("t1")[0].chain).then(wrote.conversation)
        assert plain(read) == plain(wrote) | stands | {"root": "t1", "sound": True, "chain": chain}
        assert read.ids.own.dtype == np.int32
        assert whole(store, read.id) == (wrote.ids.own.tolist(), wrote.text.own)
    session = store.session("s")
    assert (session.head, session.turns, session.title) == ("t2", 2, "hi")
    assert session.info == chat.info
    assert session.nbytes == store.bytes_stored() > 0
    assert store.sessions() == [session]
    Chat(store, "other", spec).say("u1", None, "unlike", "that")
    assert store.session("s") == session, "what another session stores is not counted"
    assert sum(s.nbytes for s in store.sessions()) == store.bytes_stored()


def test_a_part_of_the_list(store: Store) -> None:
    for i in range(7):
        Chat(store, f"s{i}").say(f"t{i}", None, f"question {i}", "yes")
    with sqlite3.connect(store.file) as raw:  # three of one moment
        used = {"s0": 5, "s1": 6, "s2": 4, "s3": 4, "s4": 4, "s5": 7, "s6": 8}
        raw.executemany("UPDATE session SET last_used_at = ? WHERE id = ?", [(at, name) for name, at in used.items()])
    whole = [s.id for s in store.sessions()]
    assert whole == ["s6", "s5", "s1", "s0", "s2", "s3", "s4"]
    for limit in (1, 2, 3, 8):
        pages: list[str] = []
        while page := store.sessions(limit, pages[-1] if pages else None):
            assert len(page) == min(limit, len(whole) - len(pages))
            pages += [s.id for s in page]
        assert pages == whole
    with pytest.raises(UnknownSession, match="there is no session 's9'"):
        store.sessions(2, "s9")


def test_reopened_it_is_the_same(tmp_path: Path, spec: StateSpec) -> None:
    store = Store.open(tmp_path)
    chat = Chat(store, "s", spec)
    chat.say("t1", None, "hi", "hello")
    store.close()
    again = Store.open(tmp_path)
    check_prefix_found(again, chat, "t1")
    again.close()


def test_rows_are_stored_once(store: Store) -> None:
    chat = Chat(store, "s", ATTENTION)
    for i in range(6):
        chat.say(f"t{i}", f"t{i - 1}" if i else None, f"q{i}", f"a{i}")
    with store.reading() as connection:
        rows = connection.execute(select(segment.c.first, segment.c.last).order_by(segment.c.first)).all()
    assert [r.first for r in rows] == [0, *(r.last for r in rows[:-1])], "each row lies in exactly one segment"
    assert rows[-1].last == len(chat.turns["t5"].ids) - 1


def test_whoever_stops_in_the_middle_of_a_state_leaves_no_reader(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blobs_module, "BLOB_BYTES", 64)
    chat = Chat(store, "s")
    made = chat.say("t1", None, "hi", "hello").checkpoints[-1].id
    assert made is not None
    with store.parts(made, HYBRID) as (_, parts):
        next(parts)
    assert "ssmd-read" not in {thread.name for thread in threading.enumerate()}, "it reads on a connection given back"
    assert list(parts) == []


def test_any_number_of_readers_keep_no_writer_waiting(store: Store) -> None:
    """As many requests as the server has threads may be planned at once, each in a snapshot while it is tokenised."""
    chat = Chat(store, "s1", HYBRID)
    with ExitStack() as planned:
        for _ in range(40):
            planned.enter_context(store.snapshot()).resume(chat.scope, Line.of([1, 2, 3]))
        chat.say("t1", None, "hi", "hello")
    check_prefix_found(store, chat, "t1")


def test_a_checkpoint_written_ahead_is_only_linked_later(store: Store, spec: StateSpec) -> None:
    chat = Chat(store, "s", spec)
    chat.say("t1", None, "hi", "hello")
    turn, made = chat.make("t2", "t1", [user("more")], "sure")
    ahead, last = (chat.encode(c) for c in made)
    assert store.keep(ahead).nbytes == ahead.nbytes
    assert find(store, chat.scope, [*made[0].ids.own.tolist(), 1], "s") is not None, "it serves already"
    assert store.session("s").turns == 1
    done = store.commit([turn], [ahead.without_data(), last], session=chat.info)
    assert [(p.was_there, p.nbytes) for p in done.checkpoints] == [(True, 0), (False, last.nbytes)]
    assert store.sweep() == 0
    chat.remember(turn, done.checkpoints[-1].id)
    check_prefix_found(store, chat, "t2")


class _Impatient(Patience):
    """Stops at the 20th question, and counts attempts."""

    def __init__(self) -> None:
        self.attempts = self.asked = 0
        self.told = False

    def begin(self) -> None:
        self.attempts += 1

    def stop(self) -> bool:
        self.asked += 1
        return self.asked == 20

    def sure(self) -> None:
        if self.told:
            raise StoreError("told already")


def test_a_state_is_stopped_between_two_of_its_rows(store: Store) -> None:
    """A plain insert of a row has no loop, where alone SQLite looks at what interrupts it."""
    chat = Chat(store, "s", StateSpec((TensorSpec("ssm_0", "ssm", 0, (5000, 1000)),)))  # 20 rows
    turn, made = chat.make("t1", None, [user("hi")], "hello")
    states, patience = [chat.encode(c) for c in made], _Impatient()
    with pytest.raises(StoreError, match="interrupted"):
        store.commit([turn], states, session=chat.info, patience=patience)
    assert store.sessions() == []
    store.commit([turn], session=chat.info, patience=patience)
    assert (patience.attempts, patience.asked) == (2, 20), "a text is not stopped"
    patience.asked = 0
    with pytest.raises(StoreError, match="interrupted"):
        store.attach([turn], states, session=chat.info, patience=patience)
    patience.told = True
    with pytest.raises(StoreError, match="told already"):
        store.attach([turn], states, session=chat.info, patience=patience)
    assert counts(store)["checkpoint"] == store.bytes_stored() == 0
    assert store.attach([turn], states, session=chat.info).ends


def test_what_no_turn_came_to_is_swept(store: Store, spec: StateSpec) -> None:
    chat = Chat(store, "s", spec)
    chat.say("t1", None, "hi", "hello")
    before = store.bytes_stored()
    turn, made = chat.make("t2", "t1", [user("more")], "sure")
    ahead, last = (chat.encode(c) for c in made)
    store.keep(ahead)
    assert store.sweep() == 1
    assert store.bytes_stored() == before
    check_prefix_found(store, chat, "t1")
    gone, orphan = store.commit([turn], [ahead.without_data(), last], session=chat.info).checkpoints
    assert gone.id is None
    assert "removed before" in gone.why_not
    assert (orphan.id is None) == bool(spec.rows), "rows below are missing"
    turn = replace(turn, id="t3")
    again = [replace(c, turn=turn.id) for c in (ahead, last)]  # with its data it is written once more
    done = store.commit([turn], again, session=chat.info)
    assert done.checkpoints[0].nbytes == ahead.nbytes
    chat.remember(turn, done.checkpoints[-1].id)
    check_prefix_found(store, chat, "t3")


def test_large_states_are_cut_into_rows_that_fit(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blobs_module, "BLOB_BYTES", 64)
    chat = Chat(store, "s")
    chat.say("t1", None, "hi", "hello", tokens=50)
    chat.say("t2", "t1", "more", "sure", tokens=3)
    check_prefix_found(store, chat, "t1")
    check_prefix_found(store, chat, "t2")
    assert counts(store)["segment"] > 20
    assert counts(store)["piece"] > 8


class TestFind:
    def test_at_least_one_id_is_left_to_feed(self, store: Store, spec: StateSpec) -> None:
        chat = Chat(store, "s", spec)
        chat.say("t1", None, "hi", "hello")
        fed = chat.turns["t1"].ids.own[:-1].tolist()
        at_end = find(store, chat.scope, fed, "s")
        assert at_end is not None
        assert at_end.position == 12, "the turn's checkpoint at 23 would leave nothing to feed"
        deeper = find(store, chat.scope, [*fed, 7], "s")
        assert deeper is not None
        assert deeper.position == 23

    def test_nothing_in_common(self, store: Store) -> None:
        chat = Chat(store, "s")
        chat.say("t1", None, "hi", "hello")
        ids = chat.turns["t1"].ids.own.tolist()
        assert find(store, chat.scope, [ids[0] + 1, *ids[1:], 1], "s") is None
        assert find(store, chat.scope, ids[:5], "s") is None
        assert find(store, chat.scope, [], "s") is None
        assert find(store, chat.scope, [3], "s") is None

    def test_scopes_stay_apart(self, store: Store) -> None:
        chat = Chat(store, "s")
        chat.say("t1", None, "hi", "hello")
        ids = [*chat.turns["t1"].ids.own.tolist(), 1]
        assert find(store, replace(chat.scope, lineage="c" * 64), ids, None) is None
        assert find(store, replace(chat.scope, layout="d" * 32), ids, None) is None
        other = find(store, replace(chat.scope, build="e" * 64), ids, None)
        assert other is not None
        assert other.build == BUILD, "another build of the lineage may resume it"

    def test_own_build_first_among_equals_and_depth_first_of_all(self, store: Store) -> None:
        one, two = Chat(store, "s1"), Chat(store, "s2", build="c" * 64)
        one.say("t1", None, "hi", "hello")
        two.say("u1", None, "hi", "hello")
        ids = [*one.turns["t1"].ids.own.tolist(), 1]
        for chat in (one, two):
            found = find(store, chat.scope, ids, None)
            assert found is not None
            assert (found.position, found.build) == (23, chat.scope.build)
        two.say("u2", "u1", "more", "sure")
        found = find(store, one.scope, [*two.turns["u2"].ids.own.tolist(), 1], None)
        assert found is not None
        assert (found.position, found.build) == (47, two.scope.build)

    def test_skipping_one_that_cannot_be_loaded(self, store: Store) -> None:
        chat = Chat(store, "s")
        chat.say("t1", None, "hi", "hello")
        ids = [*chat.turns["t1"].ids.own.tolist(), 1]
        first = find(store, chat.scope, ids, "s")
        assert first is not None
        second = find(store, chat.scope, ids, "s", skip={first.id})
        assert second is not None
        assert second.position == 12

    @pytest.mark.parametrize("bad", [[-1, 2], [2**31, 2], [[1, 2]]])
    def test_impossible_ids(self, store: Store, bad: list[Any]) -> None:
        with pytest.raises(ValueError, match="token ids"):
            find(store, Chat(store, "s").scope, bad, None)

    @settings(max_examples=20, deadline=None)
    @given(st.lists(st.integers(1, 300), min_size=1, max_size=8), st.integers(1, 320), st.data())
    def test_it_is_the_longest_true_beginning(
        self, tmp_path_factory: pytest.TempPathFactory, positions: list[int], length: int, data: st.DataObject
    ) -> None:
        store = new_store(tmp_path_factory.mktemp("store") / "data")
        spec = SPECS["recurrent"]
        scope = Scope(spec.digest(), LINEAGE, BUILD)
        base = np.random.default_rng(0).integers(0, 9, 320).astype(np.int32)
        kept = []
        for n, p in enumerate(positions):
            ids = base[:p].copy()
            if data.draw(st.booleans()):
                ids[data.draw(st.integers(0, p - 1))] += 1
            kept.append(ids)
            new = NewCheckpoint("turn", Line.of(ids), state_of(spec, ids))
            turn = NewTurn(f"t{n}", "s", None, (user("x"),), answer("y"), Line.of(ids), 1, SILENCE, "stop", True, START)
            encoded = encode(new, scope=scope, producer="p", spec=spec)
            store.commit([turn], [encoded], session=SessionInfo("s", "m", LINEAGE, START))
        prompt = base[:length]
        fitting = [len(k) for k in kept if len(k) < length and (k == prompt[: len(k)]).all()]
        found = find(store, scope, prompt.tolist(), None)
        assert (found.position if found else 0) == max(fitting, default=0)
        store.close()

    @given(st.integers(1, 1 << 20))
    def test_every_position_has_its_anchor_among_the_anchors(self, position: int) -> None:
        assert anchor(position) in anchors(1, position)
        assert anchors(position, position) == [anchor(position)]
        assert len(anchors(1, position)) <= 8 * position.bit_length()
        assert position - anchor(position) <= position / 8


class TestCommit:
    def test_siblings_in_one_transaction(self, store: Store) -> None:
        chat = Chat(store, "s")
        one, checkpoints = chat.make("t1", None, [user("hi")], "a")
        two = replace(one, id="t2", answer=answer("b"))
        store.commit([one, two], [chat.encode(c) for c in checkpoints], session=chat.info)
        assert store.session("s").head == "t1"
        assert [t.id for t in store.turns("s")] == ["t1", "t2"]

    def test_a_stored_checkpoint_is_linked_not_copied(self, store: Store) -> None:
        one, two = Chat(store, "s1"), Chat(store, "s2")
        one.say("t1", None, "hi", "hello")
        before = counts(store)
        done = two.say("u1", None, "hi", "hello")
        assert [p.was_there for p in done.checkpoints] == [True, True]
        assert done.nbytes == 0
        after = counts(store)
        assert {k: after[k] - before[k] for k in after if after[k] != before[k]} == {
            "session": 1,
            "turn": 1,
            "turn_checkpoint": 2,
        }

    def test_rows_of_two_runs_are_never_called_exact(self, store: Store) -> None:
        """A child keeps the rows its stored parent has; if those differ in a bit, the child is of no single run."""
        one, two = Chat(store, "s1"), Chat(store, "s2")
        one.say("t1", None, "hi", "hello")
        turn, (first, second) = two.make("u1", None, [user("hi")], "hello")
        other = {name: a.copy() for name, a in first.state.tensors.items()}
        other["key_1"][0, 0, 0] += 0.001
        first = replace(first, state=State(first.state.position, 0, other))
        longer = np.concatenate([first.ids.own, np.array([1, 2, 3], np.int32)])
        second = replace(second, ids=Line.of(longer), state=state_of(HYBRID, longer, 12), parent=first)
        done = store.commit([turn], [two.encode(first), two.encode(second)], session=two.info)
        assert [p.was_there for p in done.checkpoints] == [True, False]
        found = find(store, two.scope, [*longer.tolist(), 1], None)
        assert found is not None
        assert found.position == 15
        assert found.producer != "numpy 1 cpu 2 threads"

    def test_parent_vanished(self, store: Store) -> None:
        one, two = Chat(store, "s1"), Chat(store, "s2")
        one.say("t1", None, "hi", "hello")
        two.ends["t1"], two.turns["t1"] = one.ends["t1"], one.turns["t1"]
        turn, checkpoints = two.make("u1", "t1", [user("more")], "sure")
        turn = replace(turn, parent=None)
        encoded = [two.encode(c) for c in checkpoints]
        store.delete("s1")
        done = store.commit([turn], encoded, session=two.info)
        assert [p.id for p in done.checkpoints] == [None, None]
        assert all("removed" in p.why_not for p in done.checkpoints)
        assert [t.id for t in store.turns("s2")] == ["u1"]

    def test_recurrent_state_needs_no_parent(self, store: Store) -> None:
        chat = Chat(store, "s", SPECS["recurrent"])
        chat.say("t1", None, "hi", "hello")
        turn, (first, _) = chat.make("t2", "t1", [user("more")], "sure")
        done = store.commit([turn], [chat.encode(replace(first, parent=999))], session=chat.info)
        assert done.checkpoints[0].id is not None

    def test_a_parent_with_other_ids_is_refused(self, store: Store) -> None:
        one, two = Chat(store, "s1"), Chat(store, "s2")
        one.say("t1", None, "hi", "hello")
        two.say("u1", None, "hi!", "hello")
        turn, (first, _) = two.make("u2", "u1", [user("more")], "sure")
        wrong = two.encode(replace(first, parent=one.ends["t1"][0]))
        with pytest.raises(StoreError, match="same ids"):
            store.commit([turn], [wrong], session=two.info)
        assert [t.id for t in store.turns("s2")] == ["u1"], "all or nothing"

    @pytest.mark.parametrize("parent", ["t1", None])
    def test_session_removed_meanwhile(self, store: Store, parent: str | None) -> None:
        """Neither is a turn written without those above it, nor does a new first one bring the session back."""
        chat = Chat(store, "s")
        chat.say("t1", None, "hi", "hello")
        chat.info = store.session("s").info
        store.delete("s")
        with pytest.raises(TurnRemoved, match="removed meanwhile"):
            chat.say("t2", parent, "more", "sure")
        assert store.sessions() == []
        assert not any(n for name, n in counts(store).items() if name != "layout")

    @pytest.mark.parametrize("bad", ["", "../x", "a b", "x" * 65, "ü", "a/b", "a\n"])
    def test_ids_that_could_be_taken_for_something_else(self, store: Store, bad: str) -> None:
        with pytest.raises(StoreError, match="not allowed"):
            Chat(store, bad).say("t1", None, "hi", "hello")
        with pytest.raises(StoreError, match="not allowed"):
            Chat(store, "s").say(bad, None, "hi", "hello")
        assert store.sessions() == []

    def test_what_is_not_unicode_is_refused(self, store: Store) -> None:
        chat = Chat(store, "s")
        with pytest.raises(StoreError, match="Unicode"):
            chat.say("t1", None, "\ud800", "hello")
        assert store.sessions() == []

    def test_nonsense(self, store: Store) -> None:
        chat = Chat(store, "s")
        turn, checkpoints = chat.make("t1", None, [user("hi")], "hello")
        encoded = [chat.encode(c) for c in checkpoints]
        with pytest.raises(StoreError, match="at least one turn"):
            store.commit([], [], session=chat.info)
        with pytest.raises(StoreError, match="of session"):
            store.commit([replace(turn, session="other")], [], session=chat.info)
        with pytest.raises(StoreError, match="not of this commit"):
            store.commit([replace(turn, id="t9")], encoded, session=chat.info)
        with pytest.raises(StoreError, match="time zone"):
            store.commit([turn], [], session=replace(chat.info, clock=START.replace(tzinfo=None)))
        chat.say("t0", None, "hi", "hello")
        with pytest.raises(StoreError, match="no turn 'nobody'"):
            store.commit([replace(turn, parent="nobody")], [], session=chat.info)
        with pytest.raises(StoreError, match="contradicts stored rows"):
            store.commit([turn, turn], [], session=chat.info)
        assert [t.id for t in store.turns("s")] == ["t0"]

    def test_a_clock_that_was_far_ahead(self, store: Store) -> None:
        """A session used later counts as used last, before that day and after it: in lists, and in removals."""
        chats = {name: Chat(store, name) for name in ("a", "b", "c")}
        for day, name, order in (
            (0, "a", "a"),
            (0, "b", "ba"),
            (400, "a", "ab"),
            (1, "b", "ba"),
            (1, "c", "cba"),
            (2, "a", "acb"),
            (2, "b", "bac"),
            (500, "c", "cba"),
        ):
            chat = chats[name]
            chat.clock = START + timedelta(days=day)
            turns = list(chat.turns)
            chat.say(f"{name}{len(turns)}", turns[-1] if turns else None, f"I am {name}", "hello")
            assert "".join(s.id for s in store.sessions()) == order
            assert store.newest() == store.session(name)
        store.collect(sum(store.session(name).nbytes for name in "bc"))
        assert [bool(store.resumable(name)) for name in "abc"] == [False, True, True]
        assert store.fork("b").id == store.sessions()[0].id

    def test_a_clock_that_was_set_back(self, store: Store) -> None:
        chat = Chat(store, "s")
        chat.say("t1", None, "hi", "hello")
        used = store.session("s").last_used_at
        chat.clock = START.replace(year=2001)
        chat.say("t2", "t1", "more", "sure")
        assert store.session("s").last_used_at == used + timedelta(microseconds=1)
        assert [t.id for t in store.path("t2")] == ["t1", "t2"]


class TestEncode:
    def make(self, **changes: Any) -> NewCheckpoint:
        ids = np.arange(1, 9, dtype=np.int32)
        return replace(NewCheckpoint("turn", Line.of(ids), state_of(HYBRID, ids)), **changes)

    def test_what_cannot_be(self) -> None:
        scope = Scope(HYBRID.digest(), LINEAGE, BUILD)
        good = self.make()
        broken = dict(good.state.tensors) | {"ssm_0": np.full((2, 4, 8), np.nan, np.float32)}
        for changes, reason in (
            ({"ids": good.ids.up_to(7)}, "needs that many ids"),
            ({"ids": good.ids.cut(8), "state": state_of(HYBRID, good.ids.own, 3), "parent": 1}, "not at hand"),
            ({"kind": "other"}, "kind"),
            ({"state": State(8, 0, broken)}, "not finite"),
            ({"state": state_of(HYBRID, good.ids.own, 3)}, "needs a parent"),
            ({"parent": 3}, "needs no parent"),
            ({"state": State(8, 0, {})}, "differ"),
            ({"state": state_of(HYBRID, good.ids.own, 3), "parent": self.make()}, "the parent ends at 8"),
        ):
            with pytest.raises(ValueError, match=reason):
                encode(self.make(**changes), scope=scope, producer="p", spec=HYBRID)
        with pytest.raises(ValueError, match="token ids"):
            Line.of(-good.ids.own)
        with pytest.raises(StateError, match="layout"):
            encode(good, scope=replace(scope, layout="c" * 32), producer="p", spec=HYBRID)

    def test_views_of_larger_arrays(self, store: Store) -> None:
        """A runtime may hand out slices of its caches, transposed ones even."""
        ids = np.arange(1, 9, dtype=np.int32)
        state = state_of(HYBRID, ids)
        views = {}
        for name, a in state.tensors.items():
            whole = np.full((*(d + 3 for d in a.shape[::-1]),), 9, a.dtype)
            view = whole[tuple(slice(d) for d in a.shape[::-1])].T
            view[...] = a
            views[name] = view
        chat = Chat(store, "s")
        turn, _ = chat.make("t1", None, [user("hi")], "hello")
        done = store.commit(
            [turn], [chat.encode(NewCheckpoint("turn", Line.of(ids), State(8, 0, views)))], session=chat.info
        )
        number = done.checkpoints[0].id
        assert number is not None
        assert_same(store.load(number, HYBRID), state)


class TestDtypes:
    """The layout does not fix the dtype: a float16 state may serve a float32 program, and the other way round."""

    def spec(self, dtype: str) -> StateSpec:
        return StateSpec(tuple(replace(t, dtype=t.dtype if t.recurrent else dtype) for t in HYBRID.tensors))

    @pytest.mark.parametrize(("wrote", "reads"), [("float16", "float32"), ("float32", "float16")])
    def test_another_dtype(self, store: Store, wrote: str, reads: str) -> None:
        chat = Chat(store, "s", self.spec(wrote))
        chat.say("t1", None, "hi", "hello")
        number, ids = chat.ends["t1"]
        assert number is not None
        state = store.load(number, self.spec(reads))
        expected = state_of(self.spec(wrote), ids)
        for t in self.spec(reads).tensors:
            assert state.tensors[t.name].dtype == t.numpy_dtype
            assert (state.tensors[t.name] == expected.tensors[t.name].astype(t.numpy_dtype)).all()

    def test_rows_of_both_in_one_chain(self, store: Store) -> None:
        chat = Chat(store, "s", self.spec("float16"))
        chat.say("t1", None, "hi", "hello")
        chat.spec = self.spec("float32")
        chat.say("t2", "t1", "more", "sure")
        number, ids = chat.ends["t2"]
        assert number is not None
        state = store.load(number, self.spec("float32"))
        half, full = state_of(self.spec("float16"), ids), state_of(self.spec("float32"), ids)
        assert (state.tensors["key_1"][:, :23] == half.tensors["key_1"][:, :23]).all()
        assert (state.tensors["key_1"][:, 23:] == full.tensors["key_1"][:, 23:]).all()

    def test_values_too_large_for_the_program(self, store: Store) -> None:
        ids = np.arange(1, 9, dtype=np.int32)
        state = state_of(self.spec("float32"), ids)
        big = dict(state.tensors) | {"key_1": np.full((2, 8, 6), 1e6, np.float32)}
        chat = Chat(store, "s", self.spec("float32"))
        turn, _ = chat.make("t1", None, [user("hi")], "hello")
        done = store.commit(
            [turn], [chat.encode(NewCheckpoint("turn", Line.of(ids), State(8, 0, big)))], session=chat.info
        )
        assert done.checkpoints[0].id is not None
        with pytest.raises(StoreError, match="too large for float16"):
            store.load(done.checkpoints[0].id, self.spec("float16"))


class TestImported:
    """A state from elsewhere may be forged: it serves only its own session."""

    def test_it_serves_only_its_session(self, store: Store) -> None:
        chat = Chat(store, "s").imported_as("s")
        turn, checkpoints = chat.make("t1", None, [user("hi")], "hello")
        encoded = [replace(chat.encode(c), origin="s") for c in checkpoints]
        store.commit([turn], encoded, session=chat.info)
        ids = [*turn.ids.own.tolist(), 1]
        Chat(store, "other").say("x1", None, "unlike", "this")
        assert find(store, chat.scope, ids, None) is None
        assert find(store, chat.scope, ids, "other") is None
        found = find(store, chat.scope, ids, "s")
        assert found is not None
        assert found.origin == "s"

    def test_what_grows_from_it_stays_imported(self, store: Store) -> None:
        chat = Chat(store, "s").imported_as("s")
        turn, checkpoints = chat.make("t1", None, [user("hi")], "hello")
        done = store.commit([turn], [replace(chat.encode(c), origin="s") for c in checkpoints], session=chat.info)
        chat.remember(turn, done.checkpoints[-1].id)
        with pytest.raises(StoreError, match="must keep that origin"):
            chat.say("t2", "t1", "more", "sure")

    def test_a_local_twin_is_another_checkpoint(self, store: Store) -> None:
        chat = Chat(store, "s").imported_as("s")
        turn, checkpoints = chat.make("t1", None, [user("hi")], "hello")
        store.commit([turn], [replace(chat.encode(c), origin="s") for c in checkpoints], session=chat.info)
        other = Chat(store, "other")
        assert [p.was_there for p in other.say("u1", None, "hi", "hello").checkpoints] == [False, False]
        found = find(store, chat.scope, [*turn.ids.own.tolist(), 1], "s")
        assert found is not None
        assert found.origin is None, "of two equally deep ones the one that was computed here"


class TestDelete:
    def test_others_go_on(self, store: Store, spec: StateSpec) -> None:
        one, two = Chat(store, "s1", spec), Chat(store, "s2", spec)
        one.say("t1", None, "hi", "hello")
        one.say("t2", "t1", "more", "sure")
        two.say("u1", None, "hi", "hello")
        two.say("u2", "u1", "else", "yes")
        store.delete("s1")
        check_prefix_found(store, two, "u1")
        check_prefix_found(store, two, "u2")
        left = find(store, one.scope, [*one.turns["t2"].ids.own.tolist(), 1], None)
        assert left is not None
        assert left.position == 23, "the shared beginning; what only s1 had is gone"
        assert [s.id for s in store.sessions()] == ["s2"]
        store.delete("s2")
        assert not any(n for name, n in counts(store).items() if name != "layout")
        assert store.bytes_stored() == 0

    def test_a_shared_beginning_outlives_its_maker(self, store: Store) -> None:
        """A session that resumed from another's checkpoint links to it, so that it keeps it."""
        one, two = Chat(store, "s1"), Chat(store, "s2")
        one.say("t1", None, "hi", "hello")
        two.ends["t1"], two.turns["t1"] = one.ends["t1"], one.turns["t1"]
        turn, checkpoints = two.make("u1", "t1", [user("more")], "sure")
        store.commit([replace(turn, parent=None)], [two.encode(c) for c in checkpoints], session=two.info)
        two.remember(turn, None)
        store.delete("s1")
        check_prefix_found(store, two, "u1")
        found = find(store, one.scope, [*one.turns["t1"].ids.own.tolist(), 499], None)
        assert found is not None
        assert found.position == 23

    def test_a_long_reader_delays_erasing_and_no_writer(self, store: Store, tmp_path: Path) -> None:
        chats = [Chat(store, name, HYBRID) for name in ("s1", "s2", "s3")]
        for chat in chats:
            chat.say(f"{chat.info.id}t0", None, f"I am {chat.info.id}", "hello")
        with (
            closing(Store.open(tmp_path / "data", busy_ms=600)) as other,
            ThreadPoolExecutor(1) as thread,
            store.snapshot() as stored,
        ):
            assert stored.info("s1")
            thread.submit(other.delete, "s1")
            removing = thread.submit(other.delete, "s2")
            commits: list[float] = []
            while not removing.done():
                start, n = time.monotonic(), len(commits)
                chats[2].say(f"s3t{n + 1}", f"s3t{n}", "more", "sure")
                commits.append(time.monotonic() - start)
                time.sleep(0.05)
            removing.result()
            assert max(commits) < 1, "removing two sessions, it would keep others from writing for 1.2 s"
        assert [s.id for s in store.sessions()] == ["s3"]

    def test_bytes_come_back_and_nothing_can_be_read_any_more(self, tmp_path: Path) -> None:
        wide = StateSpec((TensorSpec("ssm_0", "ssm", 0, (64, 1000)),))
        store = Store.open(tmp_path)
        store.settle()
        empty = (tmp_path / FILE).stat().st_size
        for i in range(3):
            Chat(store, f"s{i}", wide).say(f"t{i}", None, f"a secret of {i}", "never tell")
        store.settle()
        assert (tmp_path / FILE).stat().st_size > empty + 1_000_000
        for i in range(3):
            store.delete(f"s{i}")
        assert (tmp_path / FILE).stat().st_size <= empty + 4 * 16384
        for file in tmp_path.iterdir():
            content = file.read_bytes()
            assert b"secret" not in content, file.name
            assert b"never tell" not in content, file.name
        store.close()

    def test_text_beside_others_is_overwritten(self, tmp_path: Path) -> None:
        """Rows of several sessions share a page that stays: the bytes of the removed ones must not."""
        store = new_store(tmp_path / "data")
        for i in range(6):
            turn, _ = Chat(store, f"s{i}").make(f"t{i}", None, [user(f"secret {i}")], "never tell")
            store.commit([turn], session=SessionInfo(f"s{i}", "m", LINEAGE, START))
        for i in (1, 2, 4):
            store.delete(f"s{i}")
        left = b"".join(file.read_bytes() for file in (tmp_path / "data").iterdir())
        assert [f"secret {i}".encode() in left for i in range(6)] == [True, False, False, True, False, True]
        store.close()

    def test_a_conversation_of_any_length(self, store: Store) -> None:
        info = SessionInfo("s", "m", LINEAGE, START)
        for at in range(0, 1500, 500):
            turns = [
                NewTurn(
                    f"t{i}",
                    "s",
                    f"t{i - 1}" if i else None,
                    (user("q"),),
                    answer("a"),
                    NOTHING,
                    0,
                    SILENCE,
                    "stop",
                    True,
                    START,
                )
                for i in range(at, at + 500)
            ]
            store.commit(turns, session=info)
        store.delete("s")
        assert store.sessions() == []

    def test_unknown(self, store: Store) -> None:
        for ask in (store.delete, store.session, store.turns):
            with pytest.raises(UnknownSession, match="no session 'nobody'"):
                ask("nobody")
        with pytest.raises(UnknownSession, match="no turn 'nobody'"):
            store.path("nobody")


def test_modes(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        store = Store.open(tmp_path / "a" / "data")
        Chat(store, "s").say("t1", None, "hi", "hello")
    finally:
        os.umask(old)
    data = tmp_path / "a" / "data"
    assert stat.S_IMODE(data.stat().st_mode) == 0o700
    files = {f.name: stat.S_IMODE(f.stat().st_mode) for f in data.iterdir()}
    assert files == {FILE: 0o600, f"{FILE}-wal": 0o600, f"{FILE}-shm": 0o600}
    store.close()


def test_a_directory_of_others_keeps_its_mode(tmp_path: Path) -> None:
    """SSMD_DATA_DIR may point anywhere: only a directory that is ours alone is closed to others."""
    (tmp_path / "holiday.jpg").touch()
    tmp_path.chmod(0o755)
    Store.open(tmp_path).close()
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755
    assert stat.S_IMODE((tmp_path / FILE).stat().st_mode) == 0o600


def test_names_and_contents_of_every_kind(store: Store) -> None:
    chat = Chat(store, "s")
    text = "\x00 ' ; DROP TABLE turn; -- <|im_end|> 東京 \U0001f600 \u2028"
    chat.info = replace(chat.info, model=text)
    messages = [Message("system", text, "n"), Message("developer", ""), Message("user", text, text)]
    turn, _ = chat.make("t1", None, messages, text)
    store.commit([turn], session=chat.info)
    (read,) = store.turns("s")
    assert read.messages == tuple(messages)
    assert read.answer.content == text
    assert read.text.own == turn.text.own
    assert store.session("s").info.model == text


def test_history_that_a_template_rewrote(store: Store) -> None:
    """A child's ids and text need not continue its parent's."""
    chat = Chat(store, "s")
    chat.say("t1", None, "hi", "hello")
    turn, _ = chat.make("t2", "t1", [user("more")], "sure")
    other = replace(turn, ids=Line.of([3, 1]), text=Passage("<system>something else"))
    store.commit([other], session=chat.info)
    assert whole(store, "t2") == ([3, 1], other.text.own)
    assert store.path("t2")[-1].stem is None


def test_large_tensors_are_stored_as_they_lie(store: Store) -> None:
    """Only small ones, and those that do not lie in their order, are copied on their way into the database."""
    shapes = {"conv_0": (40, 3), "ssm_0": (70, 64, 64), "conv_1": (40, 3), "ssm_1": (64, 96, 70), "conv_2": (9, 3)}
    spec = StateSpec(
        tuple(TensorSpec(name, "ssm" if "ssm" in name else "conv", 0, shape) for name, shape in shapes.items())
    )
    ids = np.arange(1, 9, dtype=np.int32)
    state = state_of(spec, ids)
    turned = {"ssm_1": np.ascontiguousarray(state.tensors["ssm_1"].T).T}
    chat = Chat(store, "s", spec)
    turn, _ = chat.make("t1", None, [user("hi")], "hello")
    encoded = chat.encode(NewCheckpoint("turn", Line.of(ids), State(8, 0, {**state.tensors, **turned})))
    lies = [np.shares_memory(np.frombuffer(b.data, np.uint8), state.tensors["ssm_0"]) for b in encoded.pieces]
    assert lies == [False, True, True, False, False]
    [placed] = store.commit([turn], [encoded], session=chat.info).checkpoints
    assert placed.id is not None
    assert_same(store.load(placed.id, spec), state)


def test_no_row_is_larger_than_a_mebibyte(store: Store) -> None:
    spec = StateSpec((TensorSpec("ssm_0", "ssm", 0, (5000, 1000)),))  # 20 MB
    Chat(store, "s", spec).say("t1", None, "hi", "hello")
    with store.reading() as connection:
        sizes = connection.scalars(select(func.length(piece.c.data))).all()
        assert connection.scalars(select(checkpoint.c.recurrent_nbytes)).first() == sum(sizes[:20])
    assert max(sizes) <= 1 << 20
    assert len(sizes) == 40
