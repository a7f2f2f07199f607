"""Retention where sessions share turns: what a fork began with is an end, a pinned fork keeps it; every count is right,
whatever happens."""

from __future__ import annotations

import os
import random
import re
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from conftest import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st
from keeping import ATTENTION, FED, HYBRID, LINEAGE, RECURRENT, Chat, assert_same, grown, new_store, state_of, user
from sessions.rows.test_retention import WIDE, check_sound, really_stored, resumed_at, talk
from sqlalchemy import func, select

from ssmd.model.state import StateSpec
from ssmd.sessions.checkpoint import NewCheckpoint, prefix_keys
from ssmd.sessions.fsck.repair import check
from ssmd.sessions.line import Line, Passage
from ssmd.sessions.reply import NewReply, ReplyKey
from ssmd.sessions.rows import tree
from ssmd.sessions.rows.holding import read_holding, write_sizes
from ssmd.sessions.rows.schema import checkpoint, checkpoint_segment, segment, turn, turn_checkpoint
from ssmd.sessions.store import Store


def held(store: Store, session: str) -> set[int]:
    """Checkpoints of the session's turns, those that it began with included."""
    linked = select(turn_checkpoint.c.checkpoint).join(turn, turn.c.id == turn_checkpoint.c.turn)
    with store.reading() as connection:
        return set(connection.scalars(linked.where(tree.belongs(session))))


def resumes(store: Store, chat: Chat, at: str) -> bool:
    return resumed_at(store, chat, at) == len(chat.turns[at].ids) - 1


class TestBases:
    def test_the_end_of_what_a_fork_began_with_is_not_old(self, store: Store) -> None:
        chat = talk(store, "s", 24, RECURRENT)
        store.fork("s", "s-5")
        store.collect(store.bytes_stored() // 3)
        assert resumes(store, chat, "s-5")
        assert resumes(store, chat, "s-23")
        assert not resumes(store, chat, "s-11")
        check_sound(store, RECURRENT)

    def test_it_goes_after_all_that_is_older_or_between(self, store: Store) -> None:
        chat = talk(store, "s", 8, WIDE)
        store.fork("s", "s-1")
        one = store.bytes_stored() // 16
        store.collect(2 * one + one // 2)
        assert resumes(store, chat, "s-1")
        assert resumes(store, chat, "s-7")
        assert store.session("s").nbytes <= 2 * one + one // 2
        store.collect(0)
        assert store.bytes_stored() == 0


class TestPinnedForks:
    def test_what_it_began_with_stays(self, store: Store) -> None:
        chat = talk(store, "s", 6, WIDE)
        fork = store.fork("s", "s-2")
        store.pin(fork.id)
        kept = held(store, fork.id)
        assert len(kept) == 6
        store.collect(0)
        assert held(store, fork.id) == kept
        assert all(resumes(store, chat, f"s-{i}") for i in range(3))
        assert not resumes(store, chat, "s-3")
        check_sound(store, WIDE)
        other = Chat(store, "other", WIDE)
        store.quota = store.bytes_stored() + 1000
        done = other.say("o", None, "hi", "hello")
        assert all("pinned sessions" in p.why_not for p in done.checkpoints)
        assert held(store, fork.id) == kept

    def test_also_when_its_origin_is_removed(self, store: Store) -> None:
        talk(store, "s", 4)
        fork = store.fork("s", "s-2")
        store.pin(fork.id)
        kept = held(store, fork.id)
        store.delete("s")
        store.collect(0)
        assert held(store, fork.id) == kept
        check_sound(store, HYBRID)

    @pytest.mark.parametrize("how", ["unpin", "delete"])
    def test_until_it_is_let_go(self, store: Store, how: str) -> None:
        """The origin was emptied of the rest before: it has something to give again."""
        talk(store, "s", 4, WIDE)
        fork = store.fork("s", "s-2")
        store.pin(fork.id)
        assert store.collect(0).left > 0
        store.pin(fork.id, False) if how == "unpin" else store.delete(fork.id)
        assert store.collect(0).left == 0

    def test_what_a_fork_inherits_from_a_removed_session_can_go(self, store: Store) -> None:
        """The fork was emptied before; now it owns more."""
        talk(store, "s", 4, WIDE)
        store.pin("s")
        fork = store.fork("s", "s-2")
        store.collect(0)
        store.delete("s")
        assert store.bytes_stored() > 0
        assert store.session(fork.id).own_nbytes == store.bytes_stored()
        assert store.collect(0).left == 0


def test_one_module_writes_all_sizes() -> None:
    """Totals and sessions' sizes. A backup's copy, which has no states, is written by another program's statements."""
    writes = re.compile(r"""(own|shared)_nbytes(\s*=[^=]|":)|(update|insert|delete)\(total\)|INTO total""")
    folder = ROOT / "ssmd" / "sessions"
    found = {str(f.relative_to(folder)) for f in folder.rglob("*.py") if writes.search(f.read_text("utf-8"))}
    assert found == {"rows/holding.py", "files/backup.py"}


def test_many_forks_are_listed_without_being_counted(store: Store) -> None:
    talk(store, "s", 3)
    made = {store.fork("s", "s-1").id for _ in range(5)}
    with store.reading() as connection:
        sizes = connection.exec_driver_sql("SELECT id, own_nbytes, shared_nbytes FROM session").all()
    assert {row for row in sizes if row[0] in made} == {(one, 0, 0) for one in made}
    whole = store.session("s").own_nbytes
    store.delete("s")
    assert sorted(s.own_nbytes for s in store.sessions())[:-1] == [0] * 4, "one of them owns all there is"
    assert 0 < store.bytes_stored() < whole


def test_what_is_written_ahead_is_nobodys_yet(store: Store) -> None:
    """Counted meanwhile, a session's size is what it is when the request comes to nothing, or to a turn."""
    chat = talk(store, "s", 3)
    size = store.session("s").own_nbytes
    new, checkpoints = chat.make("s-3", "s-2", [user("more")], "sure")
    first, second = (chat.encode(c) for c in checkpoints)
    for _ in range(2):
        assert store.keep(first).id is not None
        with store.writing() as connection:
            write_sizes(connection, "s")
        assert store.session("s").own_nbytes == size
        assert store.sweep() == 1
        check_sound(store, HYBRID)
    store.keep(first)
    with store.writing() as connection:
        write_sizes(connection, "s")
    store.commit([new], [first.without_data(), second], session=chat.info)
    assert store.session("s").own_nbytes == store.bytes_stored()
    check_sound(store, HYBRID)


class Histories:
    """Random sessions, with a model of what must stay."""

    def __init__(self, store: Store, spec: StateSpec, rng: random.Random) -> None:
        self.store, self.spec, self.rng = store, spec, rng
        self.chats: dict[str, Chat] = {}
        self.pinned: dict[str, set[int]] = {}
        self.broken_off: dict[str, list[str]] = {}  # session -> turns of its attempts
        self.number = 0

    def some(self) -> Chat:
        return self.chats[self.rng.choice(list(self.chats))]

    def chat_of(self, session: str) -> Chat:
        """As it stands in the store now."""
        chat = self.chats[session]
        chat.turns, chat.ends = {}, {}
        for t in self.store.turns(session):
            whole, _ = grown(self.store, t.id)
            chat.remember(t, self._end(t.id, whole.up_to(len(whole) - 1)))
        chat.info = self.store.session(session).info
        chat.clock += timedelta(seconds=1)
        return chat

    def _end(self, turn_id: str, ids: Line) -> int | None:
        c = checkpoint.c
        mine = select(c.id).join(turn_checkpoint, turn_checkpoint.c.checkpoint == c.id)
        keys = prefix_keys(self.spec.digest(), LINEAGE, ids, [len(ids)])
        with self.store.reading() as connection:
            return connection.scalars(mine.where(turn_checkpoint.c.turn == turn_id, c.key.in_(keys))).first()

    def made(self, chat: Chat, text: str, tokens: int = 12, *, parent: str | None = None) -> tuple[Any, list[Any]]:
        self.number += 1
        if parent is None and chat.turns and self.rng.random() < 0.9:
            parent = self.rng.choice(list(chat.turns)[-4:])
        new, checkpoints = chat.make(f"t{self.number}", parent, [user(text)], "a", tokens)
        if parent is not None and chat.ends[parent][0] is None and self.spec.rows:
            first = replace(checkpoints[0], parent=None, state=state_of(self.spec, checkpoints[0].ids.own))
            checkpoints = [first, replace(checkpoints[1], parent=first)]
        return new, checkpoints

    def say(self, tokens: int) -> None:
        if not self.chats or (len(self.chats) < 5 and self.rng.random() < 0.3):
            self.number += 1
            name = f"s{self.number}"
            self.chats[name] = Chat(self.store, name, self.spec)
            chat = self.chats[name]
        else:
            chat = self.chat_of(self.some().info.id)
        text = self.rng.choice(["same", "same", f"question {self.number}"])
        new, checkpoints = self.made(chat, text, tokens)
        encoded = [chat.encode(c) for c in checkpoints]
        if self.rng.random() < 0.5:
            ahead = self.store.keep(encoded[0])
            if self.rng.random() < 0.2:
                self.store.settle()
            if self.rng.random() < 0.2:
                if new.parent is None and new.session not in {s.id for s in self.store.sessions()}:
                    del self.chats[new.session]
                return  # the request came to nothing
            encoded = [encoded[0].without_data() if ahead.id is not None else encoded[0], encoded[1]]
        reply = None
        earlier = self.broken_off.pop(chat.info.id, [])
        if earlier or self.rng.random() < 0.4:
            key = ReplyKey(bytes([self.number % 256]) * 32, b"b" * 32, timedelta(hours=1), True, tuple(earlier))
            reply = NewReply(key, not earlier, {})
        self.store.commit([new], encoded, session=chat.info, reply=reply)
        if reply is not None and not earlier and self.rng.random() < 0.5:
            self.broken_off[chat.info.id] = [new.id]
        if earlier:
            self.again()

    def fork(self, _: int) -> None:
        if self.chats and len(self.chats) < 7:
            chat = self.chat_of(self.some().info.id)
            made = self.store.fork(chat.info.id, self.rng.choice(list(chat.turns)))
            self.chats[made.id] = Chat(self.store, made.id, self.spec)
            self.chats[made.id].clock = made.last_used_at

    def delete(self, _: int) -> None:
        if self.chats:
            name = self.some().info.id
            self.store.delete(name)
            del self.chats[name]
            self.pinned.pop(name, None)
            self.broken_off.pop(name, None)

    def pin(self, _: int) -> None:
        if self.chats:
            name = self.some().info.id
            self.store.pin(name)
            self.pinned[name] = held(self.store, name)

    def unpin(self, _: int) -> None:
        if self.pinned:
            name = self.rng.choice(list(self.pinned))
            self.store.pin(name, False)
            del self.pinned[name]

    def repair(self, tokens: int) -> None:
        """An answer whose text was cut: later prompts say it with other ids."""
        if not self.chats:
            return
        chat = self.chat_of(self.some().info.id)
        one = self.rng.choice(list(chat.turns.values()))
        other = self.rng.sample(range(500), tokens)
        ids = Line.of([*one.ids.own[: one.prompt_tokens - 1].tolist(), *other, 1])
        saved = NewCheckpoint("turn", ids.up_to(len(ids) - 1), state_of(self.spec, ids.own[:-1]))
        before = one.text.own.rpartition("<assistant>")[0] if self.rng.random() < 0.5 else ""
        done = self.store.rewrite(one.id, ids, Passage(f"{before}repaired"), chat.encode(saved))
        assert done is None or grown(self.store, one.id)[0].own.tolist() == ids.own.tolist()
        self.again()

    def quota(self, tokens: int) -> None:
        self.store.quota = tokens * 2000

    def collect(self, _: int) -> None:
        self.store.collect()
        assert self.store.quota is not None
        assert really_stored(self.store) <= self.store.quota + self.exempt()

    def sweep(self, _: int) -> None:
        self.store.sweep()

    def settle(self, _: int) -> None:
        self.store.settle()

    def again(self) -> None:
        """Update the pinned states: a rewritten or replaced turn released its own."""
        self.pinned = {name: held(self.store, name) for name in self.pinned}

    def exempt(self) -> int:
        """Bytes that retention must leave: of pinned sessions, and those that are written ahead."""
        c, of = checkpoint.c, checkpoint_segment.c
        with self.store.reading() as connection:
            linked = select(turn_checkpoint.c.checkpoint)
            kept = set(connection.scalars(select(c.id).where(c.id.not_in(linked)))).union(*self.pinned.values())
            states = select(func.sum(c.recurrent_nbytes)).where(c.id.in_(kept))
            listed = select(of.segment).where(of.checkpoint.in_(kept))
            rows = select(func.sum(segment.c.nbytes)).where(segment.c.id.in_(listed))
            return (connection.scalars(states).one() or 0) + (connection.scalars(rows).one() or 0)

    def look(self, before: int) -> None:
        store = self.store
        stored = really_stored(store)
        assert store.bytes_stored() == stored
        assert store.quota is not None
        assert stored <= max(store.quota, before), "only what is exempt may be above, and then nothing is added"
        for name, there in self.pinned.items():
            now = held(store, name)
            assert there <= now, f"{name} is pinned"
            self.pinned[name] = now
        assert {s.id for s in store.sessions()} == set(self.chats)
        with store.reading() as connection:
            for row in connection.execute(select(checkpoint.c.id, checkpoint.c.key)).all():
                assert_same(store.load_in(connection, row.id, self.spec), state_of(self.spec, FED[row.key]))
            for session in store.sessions():
                own, shared = read_holding(connection, session.id).sizes()
                assert (session.own_nbytes, session.nbytes) == (own, own + shared), session.id
        assert check(store.file.parent).damages == ()


EVENTS = (
    *["say"] * 8,
    *["fork", "delete", "repair"] * 2,
    *["pin", "unpin", "quota", "collect", "sweep", "settle"],
)


@settings(max_examples=int(os.environ.get("SSMD_EXAMPLES", "12")), deadline=None)
@given(
    st.sampled_from([HYBRID, ATTENTION, RECURRENT]),
    st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(1, 30)), max_size=30),
    st.randoms(use_true_random=False),
)
def test_whatever_happens(
    tmp_path_factory: pytest.TempPathFactory, spec: StateSpec, events: list[tuple[str, int]], rng: random.Random
) -> None:
    store = new_store(tmp_path_factory.mktemp("store") / "data")
    store.quota = 30_000
    histories = Histories(store, spec, rng)
    for name, tokens in events:
        before = really_stored(store)
        getattr(histories, name)(tokens)
        histories.look(before)
    store.sweep()
    store.settle()
    check_sound(store, spec)
    for name in list(histories.chats):
        store.pin(name, False)
    assert store.collect(0).left == 0
    for name in list(histories.chats):
        store.delete(name)
    with store.reading() as connection:
        assert connection.execute(select(func.count()).select_from(turn)).scalar_one() == 0
    store.close()
