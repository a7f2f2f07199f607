"""Turns go from one store to another through a remote, as they were; what was forged on the way is not taken."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from keeping import LINEAGE, VOCABULARY, Chat, new_store, user, whole
from remotes import signed

from ssmd.sessions.fsck.repair import check
from ssmd.sessions.line import NOTHING, SILENCE
from ssmd.sessions.remote.body import TurnBody
from ssmd.sessions.remote.folder import FolderRemote
from ssmd.sessions.remote.remote import InvalidTurn, RemoteTurn, TurnPlace
from ssmd.sessions.remote.sending import purge, send
from ssmd.sessions.remote.sharing import keep_local, pull_session, share, shareable
from ssmd.sessions.remote.signing import own_key
from ssmd.sessions.store import Store
from ssmd.sessions.turn import Domain, NewTurn, StoreError
from ssmd.text.messages import Message, ToolCall

IDS = {LINEAGE: VOCABULARY}


class Shared:
    """Two stores that share a remote, the first with a conversation of two turns."""

    def __init__(self, at: Path) -> None:
        self.root = at / "remote"
        self.root.mkdir(mode=0o700)
        self.remote = FolderRemote.open(self.root, create=True)
        self.a, self.b = (self.store(at / name) for name in "ab")
        self.chat = Chat(self.a, "ses_1")
        self.chat.say("t1", None, "Tell me of a river.", "It flows.")
        self.chat.say("t2", "t1", "Where to?", "To the sea.")

    @staticmethod
    def store(at: Path) -> Store:
        store = new_store(at)
        store.shares = lambda: None
        return store

    def pull(self, session: str = "ses_1") -> int:
        send(self.a, self.remote)
        return pull_session(self.b, self.remote, session, IDS)

    def forge(self, name: str, change: Callable[[dict[str, Any]], object]) -> None:
        """Change a turn in the remote; its digest fits."""
        place = TurnPlace("ses_1", name)
        raw = self.remote.fetch(place)
        assert raw is not None
        [file] = self.root.glob(f"sessions/*/ses_1/{name}")
        chain = bytes.fromhex(json.loads(file.read_bytes().partition(b"\n")[0])["chain"])
        file.unlink()
        body = json.loads(raw)
        change(body)
        self.remote.publish([RemoteTurn(place, "", chain, signed(body, own_key(self.a), TurnBody))])

    def untouched(self) -> bool:
        """True if the second store is sound and has nothing."""
        return not self.b.sessions() and not check(self.b.file.parent).damages


@pytest.fixture
def shared(tmp_path: Path) -> Shared:
    return Shared(tmp_path)


def test_turns_arrive_as_they_were(shared: Shared) -> None:
    call = ToolCall("call_1", "map", '{"of": "a river"}')
    asks = NewTurn(
        id="t3",
        session="ses_1",
        parent="t2",
        messages=(user("Show \0 it: \u2028\U0001f30a."),),
        answer=Message("assistant", "", tool_calls=(call,)),
        ids=NOTHING,
        prompt_tokens=0,
        text=SILENCE,
        finish="tool_calls",
        complete=False,
        created_at=datetime.now(UTC),
        lineage=LINEAGE,
    )
    shown = replace(asks, id="t4", parent="t3", messages=(Message("tool", "a map", tool_call_id="call_1"),))
    for one in (asks, replace(shown, answer=Message("assistant", "There."))):
        shared.a.commit([one], session=shared.chat.info)
    assert shared.pull() == 4
    for there, here in zip(shared.a.turns("ses_1"), shared.b.turns("ses_1"), strict=True):
        assert replace(here, ids=there.ids, text=there.text, settled=there.settled) == there or vars(here) | {
            "ids": 0,
            "text": 0,
        } == vars(there) | {"ids": 0, "text": 0}
        assert whole(shared.b, here.id) == whole(shared.a, there.id)
    before, after = shared.a.session("ses_1"), shared.b.session("ses_1")
    assert (after.info.clock, after.info.lineage, after.title) == (before.info.clock, LINEAGE, before.title)
    assert (after.head, after.turns) == ("t4", 4)
    assert not check(shared.b.file.parent).damages
    assert shared.pull() == 0


def test_a_fork_arrives_with_its_beginning(shared: Shared) -> None:
    fork = shared.a.fork("ses_1", "t1")
    chat = Chat(shared.a, fork.id)
    chat.info, chat.turns, chat.ends = replace(fork.info), dict(shared.chat.turns), dict(shared.chat.ends)
    chat.say("f1", "t1", "And a brook?", "It runs.")
    assert shared.pull(fork.id) == 2
    assert [t.id for t in shared.b.turns(fork.id)] == ["t1", "f1"]
    assert shared.b.session(fork.id).turns == 2
    assert shared.pull() == 1  # the other branch of the session that it was forked from
    assert not check(shared.b.file.parent).damages


def test_a_fork_outlives_what_it_was_forked_from(shared: Shared) -> None:
    """The turns that it needs are sent again as its own; the removed session's others are gone everywhere."""
    fork = shared.a.fork("ses_1", "t1")
    chat = Chat(shared.a, fork.id)
    chat.info, chat.turns, chat.ends = replace(fork.info), dict(shared.chat.turns), dict(shared.chat.ends)
    chat.say("f1", "t1", "And a brook?", "It runs.")
    send(shared.a, shared.remote)
    shared.a.delete("ses_1")
    assert shared.pull(fork.id) == 2
    assert [(t.id, t.session) for t in shared.b.turns(fork.id)] == [("t1", fork.id), ("f1", fork.id)]
    assert not any(b"To the sea." in f.read_bytes() for f in shared.root.rglob("*") if f.is_file())
    assert not check(shared.b.file.parent).damages


def test_both_branches_arrive_at_both(shared: Shared) -> None:
    shared.pull()
    other = Chat(shared.b, "ses_1")
    other.info = shared.b.session("ses_1").info
    last = shared.chat.turns["t2"]
    other.turns, other.ends = {"t2": last}, {"t2": (None, last.ids.own[:-1])}
    other.say("b3", "t2", "Which sea?", "The north one.")
    shared.chat.say("a3", "t2", "How far?", "Some miles.")
    for store, remote in ((shared.a, shared.remote), (shared.b, shared.remote)):
        send(store, remote)
    for store in (shared.a, shared.b):
        assert pull_session(store, shared.remote, "ses_1", IDS) == 1
        assert {t.id for t in store.turns("ses_1")} == {"t1", "t2", "a3", "b3"}
        assert not check(store.file.parent).damages
    assert (shared.a.session("ses_1").head, shared.b.session("ses_1").head) == ("a3", "b3")


def test_a_removed_turn_is_removed_at_the_other(shared: Shared) -> None:
    shared.pull()
    shared.a.remove_turn("t2", {})
    send(shared.a, shared.remote)
    assert purge(shared.b, shared.remote) == 1
    assert [t.id for t in shared.b.turns("ses_1")] == ["t1"]
    assert shared.pull() == 0


def test_a_local_session_outlives_its_tombstone(shared: Shared) -> None:
    """Of another machine: this one's user said that it stays."""
    shared.pull()
    keep_local(shared.b, "ses_1")
    shared.a.delete("ses_1")
    send(shared.a, shared.remote)
    assert purge(shared.b, shared.remote) == 0
    assert len(shared.b.turns("ses_1")) == 2


def test_an_imported_session_is_not_sent(shared: Shared) -> None:
    Chat(shared.a, "ses_2").imported_as("ses_2").say("i1", None, "From a file.", "Yes.")
    send(shared.a, shared.remote)
    assert shared.remote.turns("ses_2") == []
    with pytest.raises(StoreError, match="was imported"):
        shareable(shared.a, ["ses_2"])
    assert [one.session for one in shareable(shared.a, None)] == ["ses_1"]


def test_ids_of_an_unknown_model_are_not_taken(shared: Shared) -> None:
    send(shared.a, shared.remote)
    assert pull_session(shared.b, shared.remote, "ses_1", {}) == 2
    assert [len(t.ids) for t in shared.b.turns("ses_1")] == [0, 0]
    assert not check(shared.b.file.parent).damages


def _ids(*numbers: int) -> str:
    return base64.b64encode(np.array(numbers, "<i4").tobytes()).decode()


FORGED: dict[str, Callable[[dict[str, Any]], object]] = {
    "an id beyond the vocabulary": lambda body: body.update(ids=_ids(VOCABULARY)),
    "a negative id": lambda body: body.update(ids=_ids(-1)),
    "half an id": lambda body: body.update(ids="AAA="),
    "no numbers": lambda body: body.update(ids="!"),
    "other words": lambda body: body["turn"]["answer"][0].update(content="To the hills."),
    "another role": lambda body: body["turn"]["answer"][0].update(role="user"),
    "another name": lambda body: body["turn"].update(id="t9"),
    "a path as a session": lambda body: body["session"].update(id="../../etc"),
    "a path as a parent": lambda body: body["turn"].update(parent="../t2"),
    "itself as its parent": lambda body: body["turn"].update(parent="t1"),
    "a parent that is not there": lambda body: body["turn"].update(parent="t0"),
    "a stem that is not there": lambda body: body["turn"].update(stem="t0"),
    "a time without a zone": lambda body: body["turn"].update(created_at="2026-11-21T12:00:00"),
    "a clock that is none": lambda body: body["session"].update(clock="noon"),
    "a count as a text": lambda body: body["turn"].update(prompt_tokens="7"),
    "more messages left out": lambda body: body["turn"].update(cut=9),
    "an unknown field": lambda body: body.update(more=1),
    "half a character": lambda body: body["turn"]["items"][0].update(content="\ud800"),
    "a NUL in a model's name": lambda body: body["session"].update(model="a\0b"),
    "a long owner": lambda body: body["session"].update(owner="o" * 65),
    "a newer version": lambda body: body.update(format=3),
    "a list": lambda body: body.update(turn=[]),
}


@pytest.mark.parametrize("change", FORGED.values(), ids=FORGED)
def test_a_forged_turn_is_not_taken(change: Callable[[dict[str, Any]], object], shared: Shared) -> None:
    send(shared.a, shared.remote)
    shared.forge("t1", change)
    with pytest.raises(InvalidTurn, match=r"^2 of 2 turns were not taken, 0 were: .{20,300}$"):
        pull_session(shared.b, shared.remote, "ses_1", IDS)
    assert shared.untouched()


@pytest.mark.parametrize("size", ["ids_start", "text_start"])
def test_a_size_that_lies_costs_the_ids_alone(size: str, shared: Shared) -> None:
    send(shared.a, shared.remote)
    shared.forge("t2", lambda body: body.update({size: 7}))
    assert pull_session(shared.b, shared.remote, "ses_1", IDS) == 2
    assert [len(t.ids) for t in shared.b.turns("ses_1")] == [len(shared.chat.turns["t1"].ids), 0]
    assert not check(shared.b.file.parent).damages


def test_another_keys_session_is_not_taken(shared: Shared) -> None:
    send(shared.a, shared.remote)
    shared.forge("t1", lambda body: body["session"].update(owner="bob"))
    ann = shared.b.of(Domain("ann", ("ann", "")))
    with pytest.raises(InvalidTurn, match=r"of another key|disagree on its key"):
        pull_session(ann, shared.remote, "ses_1", IDS)
    assert shared.untouched()


def test_a_session_of_the_same_name_is_not_mixed(shared: Shared) -> None:
    send(shared.a, shared.remote)
    Chat(shared.b, "ses_1", owner="bob").say("o1", None, "Mine.", "Yes.")
    with pytest.raises(InvalidTurn, match="is another one here"):
        pull_session(shared.b, shared.remote, "ses_1", IDS)
    assert [t.id for t in shared.b.turns("ses_1")] == ["o1"]


def test_an_altered_turn_is_not_sent(shared: Shared) -> None:
    with shared.a.writing() as connection:
        connection.exec_driver_sql("UPDATE turn SET items = '[]' WHERE id = 't2'")
    assert shared.pull() == 1
    share(shared.a, "ses_1")
    assert shared.pull() == 0
