"""The state of a conversation's newest end goes through a remote, bit for bit; what was forged or cut off does not."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import commands
import numpy as np
import pytest
from keeping import BUILD, LINEAGE, PRODUCER, SPECS, VOCABULARY, Chat, assert_same, find, new_store, state_of, user
from remotes import signed

from ssmd.model.state import StateSpec
from ssmd.sessions.checkpoint import Maker, Scope
from ssmd.sessions.fsck.repair import check
from ssmd.sessions.remote import folder as folder_module
from ssmd.sessions.remote import link as link_module
from ssmd.sessions.remote import packs as packs_module
from ssmd.sessions.remote.ends import EndBody, RemoteReader, find_end, send_end, take_end
from ssmd.sessions.remote.folder import FolderRemote
from ssmd.sessions.remote.link import Bandwidth, Link, RestingEnds, fetching_is_sooner
from ssmd.sessions.remote.packs import SWEPT_S
from ssmd.sessions.remote.remote import InvalidTurn, RemoteError, TurnPlace
from ssmd.sessions.remote.sending import send
from ssmd.sessions.remote.sharing import keep_local, pull_session
from ssmd.sessions.remote.signing import own_key
from ssmd.sessions.store import Store
from ssmd.text.messages import Message

HERE = Path(__file__).parents[2]
FIRST, SECOND = TurnPlace("ses_1", "t1"), TurnPlace("ses_1", "t2")


class Roaming:
    """Two stores that share a remote, the first with a conversation of two turns, both in the remote."""

    def __init__(self, at: Path, spec: StateSpec) -> None:
        self.root, self.spec = at / "remote", spec
        self.root.mkdir(mode=0o700)
        self.remote = FolderRemote.open(self.root, create=True)
        self.a, self.b = (self.store(at / name) for name in "ab")
        self.reader = RemoteReader(Maker(Scope(spec.digest(), LINEAGE, BUILD), PRODUCER, spec), VOCABULARY)
        self.chat = Chat(self.a, "ses_1", spec)
        self.chat.say("t1", None, "Tell me of a river.", "It flows.")
        self.chat.say("t2", "t1", "Where to?", "To the sea.")
        send(self.a, self.remote)

    @staticmethod
    def store(at: Path) -> Store:
        store = new_store(at)
        store.shares = lambda: None
        return store

    def pull(self) -> None:
        pull_session(self.b, self.remote, "ses_1", {LINEAGE: VOCABULARY})

    def take(self, place: TurnPlace = SECOND) -> None:
        body = find_end(self.remote, [place], self.reader)
        assert body is not None
        take_end(self.b, body, self.remote.packs.get(body.pack, body.nbytes), self.reader)

    def link(self, opened: Callable[[], FolderRemote] | None = None) -> Link:
        link = Link(self.b, opened or (lambda: self.remote))
        link.connect()
        return link

    def row(self, place: TurnPlace = SECOND) -> dict[str, Any]:
        raw = self.remote.end(place)
        assert raw is not None
        found: dict[str, Any] = json.loads(raw)
        return found

    def signed(self, row: dict[str, Any]) -> bytes:
        return signed(row, own_key(self.a), EndBody)

    def packs(self) -> list[Path]:
        return sorted(p for p in self.root.glob("packs/*/*"))

    def said(self) -> list[Message]:
        return [m for t in self.a.turns("ses_1") for m in t.conversation] + [user("And then?")]

    def found(self, session: str | None, turn: str = "t2") -> tuple[int, str | None]:
        """The position and the origin of the state that the second store would start from."""
        state = find(self.b, self.reader.maker.scope, self.chat.turns[turn].ids.own, session)
        return (0, None) if state is None else (state.position, state.origin)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


@pytest.fixture(params=SPECS)
def roaming(request: pytest.FixtureRequest, tmp_path: Path) -> Roaming:
    return Roaming(tmp_path, SPECS[request.param])


@pytest.fixture
def hybrid(tmp_path: Path) -> Roaming:
    return Roaming(tmp_path, SPECS["hybrid"])


def test_a_state_arrives_bit_for_bit(roaming: Roaming) -> None:
    assert send_end(roaming.a, roaming.remote, "ses_1") == roaming.packs()[0].stat().st_size
    roaming.pull()
    roaming.take()
    number, ids = roaming.chat.ends["t2"]
    assert number is not None
    state = find(roaming.b, roaming.reader.maker.scope, roaming.chat.turns["t2"].ids.own, "ses_1")
    assert state is not None
    assert (state.position, state.origin) == (len(ids), "ses_1")
    assert state.is_exact(BUILD, PRODUCER)
    assert not state.is_exact(BUILD, "another processor")
    assert_same(roaming.b.load(state.id, roaming.spec), roaming.a.load(number, roaming.spec))
    assert_same(roaming.b.load(state.id, roaming.spec), state_of(roaming.spec, ids))
    assert not check(roaming.b.file.parent).damages


def test_a_fetched_state_serves_its_session_and_forks_alone(hybrid: Roaming) -> None:
    send_end(hybrid.a, hybrid.remote, "ses_1")
    hybrid.pull()
    hybrid.take()
    fork = hybrid.b.fork("ses_1", "t2").id
    again = hybrid.b.fork(fork, "t2").id
    Chat(hybrid.b, "ses_2").say("o1", None, "Another.", "Yes.")
    position = len(hybrid.chat.ends["t2"][1])
    assert [hybrid.found(one) for one in ("ses_1", fork, again)] == [(position, "ses_1")] * 3
    assert hybrid.found("ses_2") == hybrid.found(None) == (0, None)


def test_a_newer_end_replaces_the_one_before(hybrid: Roaming) -> None:
    send_end(hybrid.a, hybrid.remote, "ses_1")
    [first] = hybrid.packs()
    hybrid.chat.say("t3", "t2", "And then?", "It rests.")
    assert send_end(hybrid.a, hybrid.remote, "ses_1") == 0  # the remote has not got its turn yet
    send(hybrid.a, hybrid.remote)
    assert send_end(hybrid.a, hybrid.remote, "ses_1") > 0
    assert send_end(hybrid.a, hybrid.remote, "ses_1") == 0  # once is enough
    assert hybrid.remote.ends("ses_1") == ["t3"]
    [second] = hybrid.packs()
    assert second != first


def test_an_end_that_is_not_known_here_stays(hybrid: Roaming) -> None:
    """Two machines went on with one conversation, and each sends the end that it knows."""
    hybrid.pull()
    other = Chat(hybrid.b, "ses_1")
    other.turns, other.ends = dict(hybrid.chat.turns), {"t2": (None, np.empty(0, np.int32))}
    other.say("b3", "t2", "In winter?", "It is ice.")
    hybrid.chat.say("t3", "t2", "In summer?", "It is low.")
    for store in (hybrid.b, hybrid.a):
        send(store, hybrid.remote)
        assert send_end(store, hybrid.remote, "ses_1") > 0
    assert sorted(hybrid.remote.ends("ses_1")) == ["b3", "t3"]
    assert len(hybrid.packs()) == 2


def test_states_that_are_to_stay_are_not_sent(hybrid: Roaming) -> None:
    hybrid.a.shares = None
    Chat(hybrid.a, "ses_2").say("o1", None, "Before the remote.", "Yes.")
    hybrid.a.shares = lambda: None
    Chat(hybrid.a, "ses_3").imported_as("ses_3").say("i1", None, "From a file.", "Yes.")
    for session in ("ses_2", "ses_3", "ses_4"):
        assert send_end(hybrid.a, hybrid.remote, session) == 0
    keep_local(hybrid.a, "ses_1")
    assert send_end(hybrid.a, hybrid.remote, "ses_1") == 0
    assert not hybrid.packs()


def test_a_fetched_state_is_sent_on_by_its_session_alone(hybrid: Roaming) -> None:
    """Another machine would take it as one of the remote too. A state with the mark of an import stays."""
    send_end(hybrid.a, hybrid.remote, "ses_1")
    hybrid.pull()
    hybrid.take()
    for file in hybrid.root.glob("ends/*/ses_1/t2"):
        file.unlink()
    assert send_end(hybrid.b, hybrid.remote, "ses_1") > 0
    for file in hybrid.root.glob("ends/*/ses_1/t2"):
        file.unlink()
    with hybrid.b.writing() as connection:
        connection.exec_driver_sql("UPDATE checkpoint SET origin = 'ses_9'")
    assert send_end(hybrid.b, hybrid.remote, "ses_1") == 0


def test_a_removed_conversation_takes_its_state_along(hybrid: Roaming) -> None:
    send_end(hybrid.a, hybrid.remote, "ses_1")
    row = hybrid.row()
    hybrid.a.delete("ses_1")
    send(hybrid.a, hybrid.remote)
    assert not hybrid.packs()
    assert not list(hybrid.root.glob("ends/*/*"))
    hybrid.remote.publish_end(SECOND, row["pack"], hybrid.signed(row), [])  # by one that does not know yet
    assert not list(hybrid.root.glob("ends/*/*/*"))
    assert hybrid.remote.end(SECOND) is None


FORGED: dict[str, tuple[dict[str, Any], str]] = {
    "another version": ({"format": 3}, "of another version"),
    "an unknown field": ({"more": 1}, "more: Extra inputs"),
    "another turn": ({"turn": "t1"}, "says that it is of 't1'"),
    "a kind that is not known": ({"kind": "sealed"}, "kind: "),
    "a dtype that is not known": ({"rows": "int64"}, "rows: "),
    "another dtype": ({"recurrent": "float16"}, "bytes by its row"),
    "a longer position": ({"position": 1 << 30}, "bytes by its row"),
    "no position": ({"position": 0}, "position: "),
    "a size that is too large": ({"nbytes": 10 << 30}, "nbytes: "),
    "another size": ({"nbytes": 4}, "bytes by its row"),
    "a name with a path": ({"pack": "../../" + "0" * 58}, "pack: "),
    "a producer that is no text": ({"producer": "a\0b"}, "producer: "),
}


@pytest.mark.parametrize("case", FORGED)
def test_a_row_that_lies_is_not_taken(case: str, hybrid: Roaming) -> None:
    change, said = FORGED[case]
    send_end(hybrid.a, hybrid.remote, "ses_1")
    row = hybrid.row() | change
    hybrid.remote.publish_end(SECOND, hybrid.row()["pack"], hybrid.signed(row), [])
    with pytest.raises(InvalidTurn, match=said):
        find_end(hybrid.remote, [SECOND], hybrid.reader)


@pytest.mark.parametrize("change", [{"lineage": "c" * 64}, {"layout": "c" * 32}], ids=["lineage", "layout"])
def test_a_state_of_another_model_is_left_alone(change: dict[str, str], hybrid: Roaming) -> None:
    send_end(hybrid.a, hybrid.remote, "ses_1")
    row = hybrid.row() | change
    hybrid.remote.publish_end(SECOND, row["pack"], hybrid.signed(row), [])
    assert find_end(hybrid.remote, [SECOND], hybrid.reader) is None


def test_a_state_beyond_the_context_is_left_alone(hybrid: Roaming) -> None:
    send_end(hybrid.a, hybrid.remote, "ses_1")
    position = hybrid.row()["position"]
    assert find_end(hybrid.remote, [SECOND], replace(hybrid.reader, context=position)) is None
    assert find_end(hybrid.remote, [FIRST, SECOND], replace(hybrid.reader, context=position + 1)) is not None


@pytest.mark.parametrize("case", ["ids", "numbers", "turn"])
def test_a_pack_that_lies_is_not_taken(case: str, hybrid: Roaming) -> None:
    """Its name fits its bytes."""
    send_end(hybrid.a, hybrid.remote, "ses_1")
    hybrid.pull()
    row = hybrid.row()
    raw = bytearray(hybrid.remote.packs.get(row["pack"], row["nbytes"]))
    at, value, said = {
        "ids": (64, np.int32(VOCABULARY).tobytes(), "the vocabulary is 0 to 499"),
        "numbers": (64 + 4 * row["position"], np.float32(np.nan).tobytes(), "not finite"),
        "turn": (raw.index(b"t2"), b"t1", "the pack of another turn"),
    }[case]
    raw[at : at + len(value)] = value
    row["pack"] = hybrid.remote.packs.put([bytes(raw)])
    hybrid.remote.publish_end(SECOND, row["pack"], hybrid.signed(row), [])
    with pytest.raises(InvalidTurn, match=said):
        hybrid.take()
    assert hybrid.found("ses_1") == (0, None)
    assert not check(hybrid.b.file.parent).damages


def _as_link(pack: Path) -> None:
    pack.rename(pack.with_name("elsewhere"))
    pack.symlink_to(pack.with_name("elsewhere"))


def _as_pipe(pack: Path) -> None:
    pack.unlink()
    os.mkfifo(pack)


def _as_folder(pack: Path) -> None:
    pack.unlink()
    pack.mkdir()


def _altered(pack: Path) -> None:
    raw = bytearray(pack.read_bytes())
    raw[-1] ^= 1
    pack.write_bytes(raw)


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "altered": (_altered, "is not what its name says"),
    "cut off": (lambda pack: os.truncate(pack, 100), "has 100 bytes, its row says"),
    "ten gigabytes": (lambda pack: os.truncate(pack, 10 << 30), "has 10737418240 bytes"),
    "gone": (Path.unlink, "is not there"),
    "a link": (_as_link, "is no file"),
    "a pipe": (_as_pipe, "has 0 bytes"),
    "a folder": (_as_folder, "is no file|its row says"),
}


@pytest.mark.skipif(os.name != "posix", reason="links and pipes are POSIX's")
@pytest.mark.parametrize("case", BROKEN)
def test_a_pack_that_is_not_its_name_is_not_taken(case: str, hybrid: Roaming) -> None:
    change, said = BROKEN[case]
    send_end(hybrid.a, hybrid.remote, "ses_1")
    hybrid.pull()
    change(hybrid.packs()[0])
    with pytest.raises(InvalidTurn, match=said):
        hybrid.take()
    assert hybrid.found("ses_1") == (0, None)


@pytest.mark.parametrize("name", ["", "..", "/etc/passwd", "../" * 20 + "etc", "A" * 64, "0" * 63 + "\n"])
def test_a_pack_has_no_other_name(name: str, hybrid: Roaming) -> None:
    for do in (hybrid.remote.packs.there, hybrid.remote.packs.remove, lambda one: hybrid.remote.packs.get(one, 1)):
        with pytest.raises(InvalidTurn, match="is not the name of a pack"):
            do(name)


def test_a_damaged_pack_is_put_again(hybrid: Roaming) -> None:
    name = hybrid.remote.packs.put([b"some ", b"bytes"])
    assert name == hashlib.blake2b(b"some bytes", digest_size=32).hexdigest()
    assert hybrid.remote.packs.there(name)
    [file] = hybrid.packs()
    file.write_bytes(b"other bytes")
    hybrid.remote.packs.put([b"some bytes"])
    assert hybrid.remote.packs.get(name, 10) == b"some bytes"
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)


KILLED = """
import os, signal, sys
from pathlib import Path
from ssmd.sessions.remote import ends, folder
from ssmd.sessions.store import Store
def killed(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)
if {at!r} == "row":
    folder.FolderRemote.publish_end = killed
else:
    folder.os.replace = killed
store = Store.open(Path({data!r}))
ends.send_end(store, folder.FolderRemote.open(Path({remote!r}), create=False), "ses_1")
"""


@pytest.mark.parametrize("at", ["row", "pack"])
def test_a_kill_before_the_row_leaves_no_state(at: str, hybrid: Roaming) -> None:
    """The next daemon sends it again. A pack, or a part of one, that is left over is swept when it is a day old."""
    program = KILLED.format(at=at, data=str(hybrid.a.file.parent), remote=str(hybrid.root))
    killed = subprocess.run([sys.executable, "-c", program], check=False)
    assert killed.returncode == -signal.SIGKILL
    [left] = hybrid.packs()
    assert left.name.startswith(".part-") is (at == "pack")
    assert hybrid.remote.end(SECOND) is None
    assert hybrid.remote.sweep() == (0, 0)  # another machine may be writing its row
    send_end(hybrid.a, hybrid.remote, "ses_1")
    hybrid.pull()
    hybrid.take()
    hybrid.chat.say("t3", "t2", "And then?", "It rests.")
    unnamed = hybrid.remote.packs.put([b"a pack without a row"])
    for file in hybrid.packs():
        os.utime(file, (0, left.stat().st_mtime - SWEPT_S - 60))
    count = 1 + (at == "pack")
    environment = {**os.environ, "SSMD_DATA_DIR": str(hybrid.a.file.parent), "SSMD_REMOTE": str(hybrid.root)}
    for words, removed in ((["--dry-run"], False), ([], True)):
        done = commands.ssmd("session", "sweep", "--json", *words, env=environment)
        assert done.returncode == 0, done.stderr
        said = json.loads(done.stdout)
        assert (said["files"], said["removed"], hybrid.remote.packs.there(unnamed)) == (count, removed, not removed)
    assert [file.name for file in hybrid.packs()] == [hybrid.row()["pack"]]
    hybrid.take()


def test_a_sweep_bears_files_that_go(hybrid: Roaming, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other machines rename and remove what it has listed."""
    names = hybrid.remote._names

    def more(folder: Path) -> Any:
        yield from names(folder)
        yield "gone"

    monkeypatch.setattr(hybrid.remote, "_names", more)
    assert hybrid.remote.sweep() == (0, 0)


def test_a_sweep_removes_nothing_it_cannot_judge(hybrid: Roaming, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that cannot be read now may name any pack."""
    send_end(hybrid.a, hybrid.remote, "ses_1")
    monkeypatch.setattr(packs_module, "SWEPT_S", -60)

    def fail(*_: object) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(folder_module, "read_file", fail)
    with pytest.raises(RemoteError, match="Input/output error"):
        hybrid.remote.sweep()
    assert len(hybrid.packs()) == 1


def test_a_conversation_rests_before_its_state_goes() -> None:
    now = [100.0]
    ends = RestingEnds(lambda: now[0])
    assert ends.wait_s == float("inf")
    ends.note("ses_1")
    now[0] += 9
    ends.note("ses_2")
    assert (ends.take(), ends.wait_s) == ([], 1)
    now[0] += 1
    assert (ends.take(), ends.take(), ends.wait_s) == (["ses_1"], [], 9)
    ends.note("ses_2")
    now[0] += 9
    assert ends.take() == []
    assert ends.take(all_=True) == ["ses_2"]


def test_fetched_or_read_again_whichever_is_sooner() -> None:
    """22.6 MB and 3,000 tokens at 100 Mbit/s, where reading takes 1.5 ms a token: from 1,206 tokens on."""
    assert fetching_is_sooner(22_600_000, 3000, 12.5e6, 1.5)
    assert fetching_is_sooner(22_600_000, 1206, 12.5e6, 1.5)
    assert not fetching_is_sooner(22_600_000, 1205, 12.5e6, 1.5)
    assert not fetching_is_sooner(46_000_000, 2000, 12.5e6, 1.45)  # rows of a transformer
    assert not fetching_is_sooner(1, 0, 12.5e6, 1.5)
    assert not fetching_is_sooner(1, -5, 12.5e6, 1.5)


def test_the_bandwidth_is_that_of_earlier_packs() -> None:
    bandwidth = Bandwidth()
    assert bandwidth.bytes_per_s == 12.5e6
    bandwidth.add(100_000, 0.05)  # a small one says little
    assert bandwidth.bytes_per_s == pytest.approx(12.0e6, rel=0.05)
    for _ in range(30):
        bandwidth.add(20_000_000, 0.2)
    assert bandwidth.bytes_per_s == pytest.approx(100e6, rel=0.1)


def test_a_request_fetches_the_state_if_that_is_sooner(hybrid: Roaming) -> None:
    send_end(hybrid.a, hybrid.remote, "ses_1")
    link, said = hybrid.link(), hybrid.said()
    link.bring(said, hybrid.b.domain, None, replace(hybrid.reader, ms_per_token=1e-6))
    assert [t.id for t in hybrid.b.turns("ses_1")] == ["t1", "t2"]
    assert hybrid.found("ses_1") == (0, None)  # reading is sooner
    hybrid.chat.say("t3", "t2", "And then?", "It rests.")
    send(hybrid.a, hybrid.remote)
    send_end(hybrid.a, hybrid.remote, "ses_1")
    link.bring(hybrid.said(), hybrid.b.domain, None, hybrid.reader)
    assert hybrid.found("ses_1", "t3") == (len(hybrid.chat.ends["t3"][1]), "ses_1")


def test_a_request_takes_the_text_if_the_state_lies(hybrid: Roaming) -> None:
    send_end(hybrid.a, hybrid.remote, "ses_1")
    _altered(hybrid.packs()[0])
    link = hybrid.link()
    link.bring(hybrid.said(), hybrid.b.domain, None, hybrid.reader)
    assert [t.id for t in hybrid.b.turns("ses_1")] == ["t1", "t2"]
    assert hybrid.found("ses_1") == (0, None)
    assert link.problem == ""


def test_a_state_that_does_not_come_is_read_again(hybrid: Roaming, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a server that stops answering: the request has its text, and waits no longer than reading takes."""
    monkeypatch.setattr(link_module, "LEAST_S", 0.05)
    send_end(hybrid.a, hybrid.remote, "ses_1")
    ended = threading.Event()
    monkeypatch.setattr(hybrid.remote.packs, "get", lambda name, nbytes: ended.wait(60))
    link, position = hybrid.link(), len(hybrid.chat.ends["t2"][1])
    started = time.monotonic()
    link.bring(hybrid.said(), hybrid.b.domain, None, replace(hybrid.reader, ms_per_token=500 / position))
    assert 0.5 <= time.monotonic() - started < 30
    ended.set()
    assert [t.id for t in hybrid.b.turns("ses_1")] == ["t1", "t2"]
    assert (hybrid.found("ses_1"), link.problem) == ((0, None), "")


def test_the_thread_sends_what_has_rested(hybrid: Roaming) -> None:
    """A daemon that starts notes the ends that the one before it may not have sent. One that stops sends at once."""
    now = [0.0]
    link = Link(hybrid.a, lambda: hybrid.remote, lambda: now[0])
    link.start()
    hybrid.chat.say("t3", "t2", "And then?", "It rests.")
    until(lambda: "t3" in hybrid.remote.turns("ses_1"))
    assert not hybrid.packs()

    def sent() -> bool:
        now[0] += 10  # it may be noted after the first step
        assert hybrid.a.shares is not None
        hybrid.a.shares()
        return hybrid.remote.ends("ses_1") == ["t3"]

    until(sent)
    Chat(hybrid.a, "ses_2").say("o1", None, "Another.", "Yes.")
    until(lambda: "o1" in hybrid.remote.turns("ses_2"))
    assert hybrid.remote.ends("ses_2") == []
    link.close()
    assert hybrid.remote.ends("ses_2") == ["o1"]
