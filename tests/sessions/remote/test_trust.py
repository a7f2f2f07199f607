"""Machines know each other by their keys: a trusted one's state serves all, an unknown one's its conversation alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from keeping import (
    BUILD,
    HYBRID,
    LINEAGE,
    PRODUCER,
    RECURRENT,
    VOCABULARY,
    Chat,
    assert_same,
    find,
    new_store,
    state_of,
    user,
)
from remotes import signed

from ssmd.model.state import StateSpec
from ssmd.sessions.checkpoint import Maker, Scope
from ssmd.sessions.fsck.repair import check
from ssmd.sessions.remote import survey
from ssmd.sessions.remote.body import TurnBody
from ssmd.sessions.remote.ends import EndBody, RemoteReader, find_end, send_end, take_end
from ssmd.sessions.remote.link import Link
from ssmd.sessions.remote.remote import InvalidTurn, Remote, RemoteTurn, TurnPlace
from ssmd.sessions.remote.sending import send
from ssmd.sessions.remote.sharing import pull_session
from ssmd.sessions.remote.signing import MachineKey, new_key, own_key
from ssmd.sessions.rows import trust
from ssmd.sessions.rows.warm import warm_turn
from ssmd.sessions.store import Store
from ssmd.sessions.turn import Domain

FIRST, SECOND = TurnPlace("ses_1", "t1"), TurnPlace("ses_1", "t2")
STRANGER = MachineKey(Ed25519PrivateKey.generate())


class Machines:
    """Three stores that share a remote, the first with a conversation of two turns and the state of its end there."""

    def __init__(self, at: Path, remote: Remote, spec: StateSpec = HYBRID) -> None:
        self.remote, self.spec = remote, spec
        self.a, self.b, self.c = (new_store(at / name) for name in "abc")
        for store in (self.a, self.b, self.c):
            store.shares = lambda: None
        self.reader = RemoteReader(Maker(Scope(spec.digest(), LINEAGE, BUILD), PRODUCER, spec), VOCABULARY)
        self.chat = Chat(self.a, "ses_1", spec)
        self.chat.say("t1", None, "Tell me of a river.", "It flows.")
        self.chat.say("t2", "t1", "Where to?", "To the sea.")
        self.send(self.a)

    def send(self, store: Store) -> None:
        send(store, self.remote)
        assert send_end(store, self.remote, "ses_1") > 0

    def trust(self, here: Store, there: Store) -> str:
        """Let one machine trust another. Returns the origin of that one's states."""
        key = own_key(there).public
        with here.writing() as connection:
            trust.trust(connection, key, "a machine")
        return trust.origin_of(key)

    def distrust(self, here: Store, there: Store) -> int:
        with here.writing() as connection:
            return trust.distrust(connection, own_key(there).public)

    def fetch(self, store: Store, place: TurnPlace = SECOND) -> None:
        pull_session(store, self.remote, "ses_1", {LINEAGE: VOCABULARY})
        body = find_end(self.remote, [place], self.reader)
        assert body is not None
        packs = self.remote.packs
        assert packs is not None
        take_end(store, body, packs.get(body.pack, body.nbytes), self.reader)

    def found(self, store: Store, session: str | None, turn: str = "t2") -> tuple[int, str | None]:
        """The position and the origin of the state from which a prompt would start that goes on from a turn's ids."""
        state = find(store, self.reader.maker.scope, self.chat.turns[turn].ids.own, session)
        return (0, None) if state is None else (state.position, state.origin)

    def row(self, place: TurnPlace = SECOND) -> dict[str, Any]:
        raw = self.remote.end(place)
        assert raw is not None
        found: dict[str, Any] = json.loads(raw)
        return found

    def put(self, raw: bytes, place: TurnPlace = SECOND) -> None:
        """Put the row of a state into the remote, as its user may."""
        self.remote.publish_end(place, self.row()["pack"], raw, [])

    def bring(self, store: Store, ms_per_token: float = 1e9) -> str:
        """Let a request come that goes on with the conversation. Returns the link's problem."""
        link = Link(store, lambda: self.remote)
        link.connect()
        said = [m for t in self.a.turns("ses_1") for m in t.conversation] + [user("And then?")]
        link.bring(said, store.domain, None, replace(self.reader, ms_per_token=ms_per_token))
        return link.problem

    @property
    def position(self) -> int:
        return len(self.chat.ends["t2"][1])


@pytest.fixture
def machines(tmp_path: Path, remote: Remote) -> Iterator[Machines]:
    """Machines on a remote of each kind."""
    made = Machines(tmp_path, remote)
    yield made
    for store in (made.a, made.b, made.c):
        assert not check(store.file.parent).damages


def count(store: Store, where: str = "1") -> int:
    with store.reading() as connection:
        return int(connection.exec_driver_sql(f"SELECT count(*) FROM checkpoint WHERE {where}").scalar_one())


def grow(machines: Machines, store: Store, origin: str | None, turn: str = "t3") -> None:
    """Go on with the conversation in a store, from a state with this origin, as the engine does."""
    chat = Chat(store, "ses_1", machines.spec)
    chat.info = replace(store.session("ses_1").info)
    chat.turns, chat.ends = dict(machines.chat.turns), {"t2": (None, machines.chat.ends["t2"][1])}
    new, checkpoints = chat.make(turn, "t2", [user("And then?")], "It rests.")
    encoded = [replace(chat.encode(one), origin=origin) for one in checkpoints]
    store.commit([new], encoded, session=chat.info)
    machines.chat.turns[turn] = new


def test_a_trusted_machines_state_serves_all(machines: Machines) -> None:
    """It does as one that was computed here, for its owner alone, and is not exact where its producer differs."""
    origin = machines.trust(machines.b, machines.a)
    machines.fetch(machines.b)
    Chat(machines.b, "ses_2").say("o1", None, "Another.", "Yes.")
    for session in ("ses_1", "ses_2", None):
        assert machines.found(machines.b, session) == (machines.position, origin)
    other = machines.b.of(Domain("other", ("other",)))
    assert machines.found(other, None) == (0, None)
    state = find(machines.b, machines.reader.maker.scope, machines.chat.turns["t2"].ids.own)
    assert state is not None
    assert state.is_exact(BUILD, PRODUCER)
    assert not state.is_exact(BUILD, "another processor")
    assert_same(machines.b.load(state.id, machines.spec), state_of(machines.spec, machines.chat.ends["t2"][1]))


def test_an_unknown_machines_state_serves_its_session(machines: Machines) -> None:
    machines.trust(machines.b, machines.c)
    machines.fetch(machines.b)
    assert machines.found(machines.b, "ses_1") == (machines.position, "ses_1")
    assert machines.found(machines.b, None) == (0, None)


def test_a_request_takes_a_trusted_machines_state(machines: Machines) -> None:
    origin = machines.trust(machines.b, machines.a)
    assert machines.bring(machines.b) == ""
    assert machines.found(machines.b, None) == (machines.position, origin)


def unsigned(row: dict[str, Any]) -> dict[str, Any]:
    """The row as a machine of format 1 would have sent it."""
    return {name: value for name, value in row.items() if name not in ("key", "signature")} | {"format": 1}


def test_a_turn_of_format_1_is_still_read(machines: Machines) -> None:
    raw = machines.remote.fetch(FIRST)
    assert raw is not None
    body = unsigned(json.loads(raw))
    chain, body["session"]["id"], body["turn"]["id"] = bytes.fromhex(body["chain"]), "ses_9", "u1"
    machines.remote.publish([RemoteTurn(TurnPlace("ses_9", "u1"), "", chain, json.dumps(body).encode())])
    assert pull_session(machines.b, machines.remote, "ses_9", {LINEAGE: VOCABULARY}) == 1


def test_a_state_of_format_1_serves_its_session(machines: Machines) -> None:
    machines.trust(machines.b, machines.a)
    row = machines.row()
    machines.put(json.dumps(row | {"format": 1}).encode())
    with pytest.raises(InvalidTurn, match="has a key or a signature, which its format 1 has not"):
        find_end(machines.remote, [SECOND], machines.reader)
    machines.put(json.dumps(unsigned(row)).encode())
    assert machines.row()["vouched"]
    machines.fetch(machines.b)
    assert machines.found(machines.b, "ses_1") == (machines.position, "ses_1")
    assert machines.found(machines.b, None) == (0, None)


def _flipped(raw: bytes, what: bytes, by: bytes) -> bytes:
    assert raw.count(what) == 1
    return raw.replace(what, by)


def _signature(raw: bytes) -> bytes:
    return raw[-130:-2]


def _by_stranger(raw: bytes) -> bytes:
    """The key of a trusted machine, and a signature of another key."""
    other = signed(json.loads(raw), STRANGER, EndBody)
    return _flipped(other, STRANGER.public.encode(), json.loads(raw)["key"].encode())


ALTERED: dict[str, Callable[[bytes], bytes]] = {
    "a field": lambda raw: _flipped(raw, b'"kind":"turn"', b'"kind":"user"'),
    "its vouching": lambda raw: _flipped(raw, b'"vouched":true', b'"vouched":false'),
    "a space": lambda raw: _flipped(raw, b'{"format"', b'{ "format"'),
    "the key": lambda raw: _flipped(raw, json.loads(raw)["key"].encode(), STRANGER.public.encode()),
    "a signature of another key": _by_stranger,
    "a signature of a turn": lambda raw: signed(json.loads(raw), STRANGER, TurnBody),
    "a key that is no point": lambda raw: _flipped(raw, json.loads(raw)["key"].encode(), b"02" + b"0" * 62),
    "a key of zeros": lambda raw: _flipped(raw, json.loads(raw)["key"].encode(), b"0" * 64),
    "a signature of zeros": lambda raw: _flipped(raw, _signature(raw), b"0" * 128),
    "a signature of capitals": lambda raw: _flipped(raw, _signature(raw), _signature(raw).upper()),
    "a space at its end": lambda raw: raw + b" ",
    "no signature": lambda raw: raw[: raw.index(b',"signature"')] + b"}",
    "a part of it": lambda raw: raw[:-1],
    "more after it": lambda raw: raw[:-1] + b',"signature":"' + _signature(raw) + b'"}',
    "a key that is long": lambda raw: _flipped(raw, json.loads(raw)["key"].encode(), b"0" * 60_000),
    "a signature that is long": lambda raw: _flipped(raw, _signature(raw), b"0" * 60_000),
}


@pytest.mark.parametrize("case", ALTERED)
def test_an_altered_row_is_refused(case: str, machines: Machines) -> None:
    """A request that meets it reads the turns, and fails in no case."""
    machines.trust(machines.b, machines.a)
    raw = machines.remote.end(SECOND)
    assert raw is not None
    machines.put(ALTERED[case](raw))
    with pytest.raises(InvalidTurn, match=r"altered|signature|not JSON|key: "):
        find_end(machines.remote, [SECOND], machines.reader)
    assert machines.bring(machines.b) == ""
    assert [t.id for t in machines.b.turns("ses_1")] == ["t1", "t2"]
    assert machines.found(machines.b, "ses_1") == machines.found(machines.b, None) == (0, None)


def test_a_row_under_another_name_is_refused(machines: Machines) -> None:
    """Its signature is right, of the turn that it names."""
    raw, turn = machines.remote.end(SECOND), machines.remote.fetch(SECOND)
    assert raw is not None
    assert turn is not None
    machines.put(raw, FIRST)
    with pytest.raises(InvalidTurn, match="says that it is of 't2'"):
        find_end(machines.remote, [FIRST], machines.reader)
    there = TurnPlace("ses_9", "t2")
    machines.remote.publish([RemoteTurn(there, "", bytes(32), turn)])
    with pytest.raises(InvalidTurn, match="says that it is 't2' of 'ses_1'"):
        pull_session(machines.b, machines.remote, "ses_9", {LINEAGE: VOCABULARY})


def test_a_turn_with_another_signature_is_refused(machines: Machines) -> None:
    turn = machines.remote.fetch(SECOND)
    assert turn is not None
    body = json.loads(turn)
    body["session"]["id"] = body["above"] = "ses_9"
    forged = _flipped(signed(body, STRANGER, TurnBody), STRANGER.public.encode(), body["key"].encode())
    machines.remote.publish([RemoteTurn(TurnPlace("ses_9", "t2"), "", bytes(32), forged)])
    with pytest.raises(InvalidTurn, match="is not what its signature says: it was altered"):
        pull_session(machines.b, machines.remote, "ses_9", {LINEAGE: VOCABULARY})
    raw = machines.remote.end(SECOND)
    assert raw is not None
    machines.put(ALTERED["a field"](raw))
    found = {(one.kind, one.turn) for one in survey.check(machines.remote).faults if one.kind != "pack_unnamed"}
    assert found == {("turn_damaged", "t2"), ("state_damaged", "t2")}


def test_a_row_that_comes_again_is_the_same_state(machines: Machines) -> None:
    """An older row of a turn, with its pack, says what it said: the state of these ids."""
    origin = machines.trust(machines.b, machines.a)
    raw = machines.remote.end(SECOND)
    assert raw is not None
    packs = machines.remote.packs
    assert packs is not None
    pack = packs.get(machines.row()["pack"], machines.row()["nbytes"])
    machines.chat.say("t3", "t2", "And then?", "It rests.")
    machines.send(machines.a)
    assert machines.remote.ends("ses_1") == ["t3"]
    name = packs.put([pack])
    machines.remote.publish_end(SECOND, name, raw, [])
    machines.fetch(machines.b)
    assert machines.found(machines.b, None) == (machines.position, origin)


@pytest.mark.parametrize("knows", [False, True], ids=["of an unknown machine", "of a trusted machine"])
def test_a_state_is_vouched_for_with_all_above(knows: bool, machines: Machines) -> None:
    """The machine c trusts b alone. What b made from a state of a counts as b's only if b trusts a."""
    origin = machines.trust(machines.b, machines.a) if knows else "ses_1"
    machines.fetch(machines.b)
    assert machines.found(machines.b, "ses_1") == (machines.position, origin)
    grow(machines, machines.b, origin)
    machines.send(machines.b)
    assert machines.remote.ends("ses_1") == ["t3"]
    assert machines.row(TurnPlace("ses_1", "t3"))["vouched"] is knows
    its = machines.trust(machines.c, machines.b)
    machines.fetch(machines.c, TurnPlace("ses_1", "t3"))
    position, taken = machines.found(machines.c, "ses_1", "t3")
    assert (position > machines.position, taken) == (True, its if knows else "ses_1")
    assert machines.found(machines.c, None, "t3") == ((position, its) if knows else (0, None))


def test_a_fetched_state_is_not_vouched_for(machines: Machines) -> None:
    """A machine that sends on what it has from an unknown one does not make it its own."""
    machines.fetch(machines.b)
    packs, row = machines.remote.packs, machines.row()
    assert packs is not None
    machines.remote.publish_end(FIRST, packs.put([b"another"]), b"{}", ["t2"])  # as if no machine had sent it
    machines.send(machines.b)
    its = machines.trust(machines.c, machines.b)
    assert trust.origin_of(machines.row()["key"]) == its
    assert (row["vouched"], machines.row()["vouched"]) == (True, False)
    machines.fetch(machines.c)
    assert machines.found(machines.c, "ses_1") == (machines.position, "ses_1")
    assert machines.found(machines.c, None) == (0, None)


def test_distrust_removes_all_that_grew(machines: Machines) -> None:
    """Its states go, and those made here from them, of whatever conversation. Text and other states stay."""
    origin = machines.trust(machines.b, machines.a)
    machines.fetch(machines.b)
    grow(machines, machines.b, origin)
    own = Chat(machines.b, "ses_2")
    own.say("o1", None, "Another.", "Yes.")
    loose = replace(own.encode(own.make("o2", "o1", [user("More?")], "No.")[1][0]), origin=origin, turn=None)
    assert machines.b.keep(loose).id is not None  # ahead of its turn, or of a request without one
    before = count(machines.b)
    assert machines.b.session("ses_1").nbytes > 0  # the loose one is of no session
    assert count(machines.b, f"origin = '{origin}'") == 4
    assert machines.distrust(machines.b, machines.a) == 4
    assert count(machines.b) == before - 4
    assert count(machines.b, "origin != ''") == 0
    assert [t.id for t in machines.b.turns("ses_1")] == ["t1", "t2", "t3"]
    assert machines.found(machines.b, "ses_1") == (0, None)
    assert machines.b.session("ses_1").nbytes == 0
    with machines.b.reading() as connection:
        assert trust.trusted(connection) == []


def test_a_distrusted_machine_is_an_unknown_one(machines: Machines) -> None:
    machines.trust(machines.b, machines.a)
    machines.distrust(machines.b, machines.a)
    machines.fetch(machines.b)
    assert machines.found(machines.b, "ses_1") == (machines.position, "ses_1")
    assert machines.found(machines.b, None) == (0, None)


@pytest.mark.parametrize("spec", [HYBRID, RECURRENT], ids=["hybrid", "recurrent"])
def test_an_answer_during_distrust_keeps_its_text(spec: StateSpec, tmp_path: Path, remote: Remote) -> None:
    """A request that had started from the machine's state ends after it: its state is not stored."""
    machines = Machines(tmp_path, remote, spec)
    origin = machines.trust(machines.b, machines.a)
    machines.fetch(machines.b)
    machines.distrust(machines.b, machines.a)
    grow(machines, machines.b, origin)
    assert [t.id for t in machines.b.turns("ses_1")] == ["t1", "t2", "t3"]
    assert count(machines.b) == 0
    assert not check(machines.b.file.parent).damages


def test_a_state_serves_while_its_machine_is_trusted(machines: Machines) -> None:
    """As of a database that was put together again, and lost the row of the machine."""
    machines.trust(machines.b, machines.a)
    machines.fetch(machines.b)
    with machines.b.writing() as connection:
        connection.exec_driver_sql("DELETE FROM trusted_machine")
    assert machines.found(machines.b, "ses_1") == machines.found(machines.b, None) == (0, None)
    machines.remote.publish_end(FIRST, machines.row()["pack"], b"{}", ["t2"])  # as if no machine had sent it
    assert machines.remote.ends("ses_1") == ["t1"]
    assert send_end(machines.b, machines.remote, "ses_1") == 0


def test_a_new_key_ends_the_trust_in_the_old_one(machines: Machines) -> None:
    """Rows of the old key stay valid, as those of a machine that is unknown where it is distrusted."""
    old = machines.trust(machines.b, machines.a)
    machines.fetch(machines.b)
    before = own_key(machines.a).public
    made = new_key(machines.a)
    assert own_key(machines.a).public == made.public != before
    with machines.b.writing() as connection:
        trust.distrust(connection, before)
        trust.trust(connection, made.public)
    machines.fetch(machines.b)
    assert machines.found(machines.b, None) == (0, None)
    machines.chat.say("t3", "t2", "And then?", "It rests.")
    machines.send(machines.a)
    machines.fetch(machines.b, TurnPlace("ses_1", "t3"))
    assert machines.found(machines.b, None, "t3")[1] == trust.origin_of(made.public) != old


def test_a_copied_machine_is_one_with_the_first(machines: Machines) -> None:
    """Two data directories with one key: a third one cannot tell them apart, and each is unknown to the other."""
    file = machines.a.file.parent / "machine.key"
    copied = machines.c.file.parent / "machine.key"
    copied.touch(0o600)
    copied.write_bytes(file.read_bytes())
    machines.fetch(machines.c)
    assert machines.found(machines.c, "ses_1") == (machines.position, "ses_1")
    assert machines.found(machines.c, None) == (0, None)
    grow(machines, machines.c, "ses_1")
    machines.send(machines.c)
    origin = machines.trust(machines.b, machines.a)
    machines.fetch(machines.b, TurnPlace("ses_1", "t3"))
    assert machines.row(TurnPlace("ses_1", "t3"))["vouched"] is False
    assert machines.found(machines.b, None, "t3") == (0, None)
    assert origin == trust.origin_of(own_key(machines.c).public)


def test_a_warm_beginning_is_ready_by_a_trusted_state(machines: Machines) -> None:
    """A request that comes back to it starts from the state that grew from another machine's."""
    origin = machines.trust(machines.b, machines.a)
    chat = Chat(machines.b, "ses_3")
    turn, states = chat.make("w1", None, [user("A beginning")], "")
    turn = warm_turn(replace(turn, ids=states[-1].ids))
    machines.b.commit([turn], [replace(chat.encode(one), origin=origin) for one in states], session=chat.info)
    machines.b.pin("ses_3")
    assert [one.ready for one in machines.b.warm()] == [True]
    machines.distrust(machines.b, machines.a)
    assert [one.ready for one in machines.b.warm()] == [False]
