"""Packs in a bucket: one that is lost, altered, forged or cut off is refused; a failing bucket delays no request."""

from __future__ import annotations

import contextlib
import hashlib
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from buckets import BUCKET, KEY, SECRET, BucketServer, Door
from keeping import BUILD, LINEAGE, PRODUCER, SPECS, VOCABULARY, Chat, find, new_store, user
from modules import MODULES
from remotes import BucketPlace, altered, turn

from ssmd.model.state import StateSpec
from ssmd.sessions.checkpoint import Maker, Scope
from ssmd.sessions.remote import bucket as bucket_module
from ssmd.sessions.remote import packs as packs_module
from ssmd.sessions.remote.bucket import WHOLE, BucketPacks
from ssmd.sessions.remote.ends import RemoteReader, send_end
from ssmd.sessions.remote.link import Link
from ssmd.sessions.remote.postgres.address import BucketAddress
from ssmd.sessions.remote.postgres.postgres import MARK, PostgresRemote
from ssmd.sessions.remote.remote import InvalidTurn, RemoteError, TurnPlace
from ssmd.sessions.remote.sending import send

LARGE = bytes(range(256)) * (12 << 12)  # 12 MiB: three parts, two requests to read
FIRST = TurnPlace("ses_1", "t1")


class Prefix:
    """A prefix of the bucket, and the packs in it, which are reached through a door."""

    def __init__(self, bucket: BucketServer, door: Door, name: str) -> None:
        self.bucket, self.door, self.name = bucket, door, name

    def open(self) -> BucketPacks:
        """Open it, as another machine does."""
        return BucketPacks(BucketAddress(BUCKET, self.name, None), MARK)

    def key(self, pack: str) -> str:
        return f"{self.name}/packs/{pack[:2]}/{pack}"


@pytest.fixture
def door(opened_bucket: BucketServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Door]:
    made = Door(opened_bucket.port)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{made.port}")
    yield made
    made.close()


@pytest.fixture
def prefix(opened_bucket: BucketServer, door: Door, tmp_path: Path) -> Prefix:
    return Prefix(opened_bucket, door, f"by/{hashlib.blake2b(str(tmp_path).encode(), digest_size=8).hexdigest()}")


@pytest.fixture
def packs(prefix: Prefix) -> BucketPacks:
    made = prefix.open()
    made.prepare(create=True, of="db")
    return made


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let requests be given up soon."""
    for name in ("ANSWER_S", "PIECE_S"):
        monkeypatch.setattr(bucket_module, name, 0.7)


def within(seconds: float, work: Callable[[], object], said: str) -> RemoteError:
    """Do what has to fail before a time is over. Returns the error."""
    began = time.monotonic()
    with pytest.raises(RemoteError, match=said) as failed:
        work()
    assert time.monotonic() - began < seconds
    return failed.value


@pytest.mark.parametrize("data", [b"a state", LARGE[:WHOLE], LARGE], ids=["small", "whole", "parts"])
def test_a_pack_comes_back_as_it_was_put(data: bytes, packs: BucketPacks, prefix: Prefix) -> None:
    """It has the name of a folder's pack. Put again it is whole again."""
    name = packs.put([memoryview(data)[:5], data[5:]])
    assert name == hashlib.blake2b(data, digest_size=32).hexdigest()
    assert prefix.bucket.keys(prefix.name) == [prefix.key(name), f"{prefix.name}/{MARK}"]
    assert (packs.get(name, len(data)), packs.there(name), packs.names()) == (data, True, [(name, len(data))])
    prefix.bucket.call("PUT", prefix.key(name), altered(data))
    packs.put([data])
    assert packs.get(name, len(data)) == data
    for _ in range(2):
        packs.remove(name)
    assert (packs.there(name), packs.names()) == (False, [])


CHANGED: dict[str, tuple[bytes | None, str]] = {
    "altered": (altered(LARGE), "is not what its name says"),
    "cut off": (LARGE[:100], "has 100 bytes, its row says"),
    "empty": (b"", "has 0 bytes"),
    "longer": (LARGE + b"x", "bytes, its row says"),
    "gone": (None, "is not there"),
}


@pytest.mark.parametrize("case", CHANGED)
def test_an_object_that_is_not_its_name_is_refused(case: str, packs: BucketPacks, prefix: Prefix) -> None:
    data, said = CHANGED[case]
    name = packs.put([LARGE])
    if data is None:
        prefix.bucket.call("DELETE", prefix.key(name))
    else:
        prefix.bucket.call("PUT", prefix.key(name), data)
    with pytest.raises(InvalidTurn, match=said):
        packs.get(name, len(LARGE))


def test_an_object_that_is_too_large_is_not_read(packs: BucketPacks, prefix: Prefix) -> None:
    name = packs.put([b"a state"])
    prefix.bucket.call("PUT", prefix.key(name), LARGE)
    before = prefix.door.returned
    with pytest.raises(InvalidTurn, match=r"has \d+ bytes, its row says 7"):
        packs.get(name, 7)
    assert prefix.door.returned - before < 4096


def test_an_answer_without_end_is_not_read(opened_bucket: BucketServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says that the object has 100 bytes, and goes on for ever."""
    head = (
        b"HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 0-99/100\r\nETag: x\r\nContent-Length: 99999999999\r\n"
    )
    head += b"Last-Modified: Sun, 29 Nov 2026 12:00:00 GMT\r\n\r\n"
    sent = [0]
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            client, _ = listening.accept()
            with client, contextlib.suppress(OSError):  # the reader goes away
                client.recv(1 << 16)
                client.sendall(head)
                while sent[0] < 1 << 30:
                    client.sendall(bytes(1 << 16))
                    sent[0] += 1 << 16

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{listening.getsockname()[1]}")
        packs = BucketPacks(BucketAddress(BUCKET, "", None), MARK)
        with pytest.raises(InvalidTurn, match="is not what its name says"):
            packs.get("0" * 64, 100)
        thread.join(30)
    assert 0 < sent[0] < 64 << 20


@pytest.mark.parametrize("name", ["", "..", "/etc/passwd", "../" * 20 + "etc", "A" * 64, "0" * 63 + "\n"])
def test_a_pack_has_no_other_name(name: str, packs: BucketPacks) -> None:
    for do in (packs.there, packs.remove, lambda one: packs.get(one, 1)):
        with pytest.raises(InvalidTurn, match="is not the name of a pack"):
            do(name)


def test_other_objects_are_left_alone(packs: BucketPacks, prefix: Prefix, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are no packs to a list, and a sweep does not take them. A name that no client can have is an error."""
    for key in ("letter.txt", "packs/ab/letter", f"packs/ab/{'0' * 64}", f"packs/ab/more/{'0' * 64}"):
        prefix.bucket.call("PUT", f"{prefix.name}/{key}", b"mine")
    name = packs.put([b"a state"])
    monkeypatch.setattr(packs_module, "SWEPT_S", -60)
    assert packs.names() == [(name, 7)]
    assert packs.sweep(lambda: [name]) == (0, 0)
    assert len(prefix.bucket.keys(prefix.name)) == 6
    prefix.bucket.call("PUT", f"{prefix.name}/packs/.part-0", b"x")  # the clock of a sweep that was killed
    assert packs.sweep(lambda: [name]) == (1, 1)
    prefix.bucket.call("PUT", f"{prefix.name}/packs/..%2Fup", b"x")
    for do in (packs.names, lambda: packs.sweep(lambda: [name])):
        with pytest.raises(RemoteError, match="an object that is not of a remote"):
            do()
    assert packs.get(name, 7) == b"a state"


def test_a_sweep_takes_what_no_row_names(with_bucket: BucketPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    remote = PostgresRemote.open(with_bucket.setting, create=True)
    assert remote.packs is not None
    kept, left = remote.packs.put([b"kept"]), remote.packs.put([b"left by a kill"])
    remote.publish_end(FIRST, kept, b"row", [])
    assert remote.sweep() == (0, 0)  # it is young: its row may come
    monkeypatch.setattr(packs_module, "SWEPT_S", -60)
    assert remote.sweep(dry_run=True) == remote.sweep() == (1, 14)
    assert (remote.packs.there(kept), remote.packs.there(left)) == (True, False)
    assert len(with_bucket.bucket.keys(with_bucket.prefix + "/")) == 2  # with the mark
    remote.close()


def test_a_sweep_spares_what_is_put_again(packs: BucketPacks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another machine sends the same pack between the list and the removal, and its row comes next."""
    monkeypatch.setattr(packs_module, "SWEPT_S", 0.5)
    name, other = packs.put([b"a state"]), packs.put([b"another"])
    time.sleep(2.1)  # a bucket counts in seconds

    def rows() -> list[str | None]:
        packs.put([b"a state"])
        return []

    assert packs.sweep(rows) == (1, 7)
    assert (packs.there(name), packs.there(other)) == (True, False)


@pytest.mark.parametrize("data", [b"a state", LARGE], ids=["small", "parts"])
def test_two_machines_put_one_pack_at_once(data: bytes, packs: BucketPacks, prefix: Prefix) -> None:
    both, names = threading.Barrier(4), list[str]()

    def put() -> None:
        other = prefix.open()
        both.wait()
        names.append(other.put([data]))

    threads = [threading.Thread(target=put) for _ in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert len(names) == 4
    assert packs.names() == [(names[0], len(data))]
    assert packs.get(names[0], len(data)) == data


PUTS = """
import sys
from ssmd.sessions.remote.bucket import BucketPacks
from ssmd.sessions.remote.postgres.address import BucketAddress
BucketPacks(BucketAddress(sys.argv[1], sys.argv[2], None), "x").put([bytes(range(256)) * (12 << 12)])
"""


def test_a_kill_between_parts_leaves_no_pack(packs: BucketPacks, prefix: Prefix) -> None:
    """The parts stay until the bucket's own rule removes them, and the next put is whole."""
    prefix.door.silent_after = prefix.door.passed + (6 << 20)
    process = subprocess.Popen([sys.executable, "-c", PUTS, BUCKET, prefix.name])
    deadline = time.monotonic() + 60
    while prefix.door.mode != "silent":
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait(60)
    prefix.door.mode, prefix.door.silent_after = "open", None
    [left] = [key for key in prefix.bucket.uploads() if key.startswith(prefix.name)]
    name = left.rpartition("/")[2]
    assert (packs.names(), packs.there(name)) == ([], False)
    assert packs.put([LARGE]) == name
    assert packs.get(name, len(LARGE)) == LARGE


def test_a_silent_bucket_is_given_up(hasty: None, prefix: Prefix, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next calls fail at once, for a while. Then it is used again."""
    packs = prefix.open()
    packs.prepare(create=True, of="db")
    name = packs.put([LARGE])
    steps: list[Callable[[], object]] = [
        *(lambda: packs.put([b"x"]), lambda: packs.put([LARGE + b"x"]), lambda: packs.get(name, len(LARGE))),
        *(lambda: packs.there(name), packs.names, lambda: packs.remove(name), lambda: packs.sweep(list)),
    ]
    for step in steps:
        prefix.door.mode = "silent"
        within(5, step, "did not answer in time")
        within(0.3, step, "it is asked again in (29|30) s")
        prefix.door.mode = "open"
        packs._away_until = 0.0
    monkeypatch.setattr(bucket_module, "AWAY_S", 0.2)
    prefix.door.mode = "silent"
    within(5, lambda: packs.there(name), "did not answer in time")
    prefix.door.mode = "open"
    time.sleep(0.3)
    assert packs.get(name, len(LARGE)) == LARGE


@pytest.mark.parametrize("call", ["reading", "writing"])
def test_a_bucket_that_stops_halfway_is_given_up(
    call: str, hasty: None, prefix: Prefix, monkeypatch: pytest.MonkeyPatch
) -> None:
    if call == "reading":
        monkeypatch.setattr(bucket_module, "PIECE_S", 60.0)  # nothing comes for ANSWER_S
    packs = prefix.open()
    name = packs.put([LARGE])
    if call == "writing":
        prefix.door.silent_after = prefix.door.passed + (2 << 20)
        within(2, lambda: packs.put([LARGE + b"x"]), "did not answer in time")
    else:
        prefix.door.quiet_after = prefix.door.returned + (2 << 20)
        within(2, lambda: packs.get(name, len(LARGE)), "did not answer in time")


def test_a_slow_bucket_is_waited_for(hasty: None, prefix: Prefix, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each wait is shorter than the limit, all together are longer."""
    packs, data = prefix.open(), LARGE[: 1 << 19]
    name = packs.put([data])
    prefix.door.mode = "slow"
    monkeypatch.setattr(bucket_module, "PIECE_S", 60.0)
    slow = prefix.open()
    began = time.monotonic()
    assert slow.get(name, len(data)) == data
    assert time.monotonic() - began > 0.7


def test_a_bucket_that_is_away_is_named(packs: BucketPacks, prefix: Prefix) -> None:
    prefix.door.close()
    failed = within(8, lambda: packs.put([b"x"]), r"s3://conversations/by/\w+ cannot be used: it cannot be reached")
    assert not failed.lasting


def test_a_bucket_that_is_gone_is_named(opened_bucket: BucketServer) -> None:
    opened_bucket.call("PUT", "", bucket="of-a-day")
    packs = BucketPacks(BucketAddress("of-a-day", "", None), MARK)
    packs.prepare(create=True, of="db")
    name = packs.put([b"a state"])
    for key in (MARK, f"packs/{name[:2]}/{name}", ""):
        opened_bucket.call("DELETE", key, bucket="of-a-day")
    steps: list[Callable[[], object]] = [
        *(lambda: packs.put([b"x"]), lambda: packs.get(name, 7), packs.names, lambda: packs.sweep(list)),
        lambda: packs.prepare(create=True, of="db"),
    ]
    for step in steps:
        assert within(8, step, "cannot be used: there is no such bucket").lasting


def test_refused_keys_are_named_and_not_shown(packs: BucketPacks, prefix: Prefix) -> None:
    """The answer has them; it may be in no message."""
    name = packs.put([b"a state"])
    prefix.door.mode = "denied"
    steps: dict[str, Callable[[], object]] = {
        "not that of the access key": packs.names,
        "not allow this with these keys": lambda: packs.there(name),  # an answer without a body
        "the secret key is": lambda: packs.get(name, 7),
    }
    for said, step in steps.items():
        failed = within(8, step, said)
        assert failed.lasting
        assert KEY not in str(failed)
        assert SECRET not in str(failed)
        assert failed.__suppress_context__


def test_a_call_that_hangs_does_not_keep_a_process(packs: BucketPacks, prefix: Prefix) -> None:
    """A daemon that ends closes the remote, and waits for no call."""
    prefix.door.mode = "silent"
    program = (
        "import sys, threading, time\nfrom ssmd.sessions.remote.bucket import BucketPacks\n"
        "from ssmd.sessions.remote.postgres.address import BucketAddress\n"
        "packs = BucketPacks(BucketAddress(sys.argv[1], sys.argv[2], None), 'x')\n"
        "threading.Thread(target=packs.there, args=('0' * 64,), daemon=True).start()\n"
        "time.sleep(1)\npacks.close()\nprint('ends')"
    )
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", program, BUCKET, prefix.name], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "ends\n", "")
    assert time.monotonic() - began < bucket_module.ANSWER_S - 1


def test_a_closed_remote_ends_a_long_read(packs: BucketPacks, prefix: Prefix) -> None:
    name, failed = packs.put([LARGE]), list[str]()

    def read() -> None:
        try:
            packs.get(name, len(LARGE))
        except RemoteError as err:
            failed.append(str(err))

    prefix.door.mode = "slow"
    thread = threading.Thread(target=read)
    thread.start()
    time.sleep(0.5)
    packs.close()
    thread.join(20)  # all of it would take 30 s
    assert not thread.is_alive()
    assert re.search("was closed", failed[0])


class Conversation:
    """A store with a conversation whose text and state are in a remote, and one that has nothing."""

    def __init__(self, place: BucketPlace, at: Path, spec: StateSpec) -> None:
        self.a, self.b, self.place = new_store(at / "a"), new_store(at / "b"), place
        self.a.shares = lambda: None
        self.chat = Chat(self.a, "ses_1", spec)
        self.chat.say("t1", None, "Tell me of a river.", "It flows.")
        self.reader = RemoteReader(Maker(Scope(spec.digest(), LINEAGE, BUILD), PRODUCER, spec), VOCABULARY)
        remote = place.open(create=True)
        send(self.a, remote)
        assert send_end(self.a, remote, "ses_1")
        remote.close()
        [pack] = place.pack_rows()
        self.pack = pack.removeprefix("packs/")

    def asked(self) -> int:
        """Ask the second machine to go on. Returns the tokens that it need not read."""
        link = Link(self.b, lambda: self.place.open())
        link.connect()
        messages = [m for t in self.a.turns("ses_1") for m in t.conversation] + [user("And then?")]
        link.bring(messages, self.b.domain, None, replace(self.reader, ms_per_token=1000.0))
        assert [t.id for t in self.b.turns("ses_1")] == ["t1"]
        assert link.problem == ""
        link.close()
        state = find(self.b, self.reader.maker.scope, self.chat.turns["t1"].ids.own, "ses_1")
        return 0 if state is None else state.position


@pytest.mark.parametrize("case", ["sound", "lost", "altered", "silent", "shut", "denied"])
def test_a_request_has_its_text_whatever_the_bucket_does(
    case: str, hasty: None, with_bucket: BucketPlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, door = Conversation(with_bucket, tmp_path, SPECS["hybrid"]), Door(with_bucket.bucket.port)
    if case == "lost":
        with_bucket.lose_pack(one.pack)
    elif case == "altered":
        with_bucket.alter_pack(one.pack)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{door.port}")
    opened = PostgresRemote.open(with_bucket.setting, create=False)
    monkeypatch.setattr(with_bucket, "open", lambda: opened)
    door.mode = case if case in ("silent", "shut", "denied") else "open"
    began = time.monotonic()
    assert one.asked() == (len(one.chat.ends["t1"][1]) if case == "sound" else 0)
    assert time.monotonic() - began < 10
    door.close()


@pytest.mark.parametrize("mode", ["silent", "shut"])
def test_a_daemon_starts_without_the_bucket(
    mode: str, hasty: None, with_bucket: BucketPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It shares text, and states from when the bucket is back."""
    door = Door(with_bucket.bucket.port)
    door.mode = mode
    monkeypatch.setattr(bucket_module, "AWAY_S", 0.2)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{door.port}")
    began = time.monotonic()
    remote = PostgresRemote.open(with_bucket.setting, create=True)
    assert time.monotonic() - began < 8
    remote.publish([turn("t1")])
    assert remote.packs is not None
    time.sleep(0.3)
    door.mode = "open"
    assert remote.packs.get(remote.packs.put([b"a state"]), 7) == b"a state"
    remote.close()
    door.close()


def test_a_removal_goes_on_without_the_bucket(
    hasty: None, with_bucket: BucketPlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a bucket that is away would keep all turns back. What it has is removed by the next sweep."""
    one, door = Conversation(with_bucket, tmp_path, SPECS["hybrid"]), Door(with_bucket.bucket.port)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{door.port}")
    remote = with_bucket.open()
    door.mode = "silent"
    one.a.delete("ses_1")
    Chat(one.a, "ses_2").say("o1", None, "Another.", "Yes.")
    send(one.a, remote)
    assert (remote.turns("ses_1"), remote.turns("ses_2")) == ([], ["o1"])
    assert with_bucket.pack_rows() == {f"packs/{one.pack}"}
    door.mode = "open"
    remote.close()
    monkeypatch.setattr(packs_module, "SWEPT_S", -60)
    swept = with_bucket.open()
    assert swept.sweep()[0] == 1
    assert with_bucket.pack_rows() == set()
    swept.close()
    door.close()


def test_without_a_bucket_obstore_is_not_imported() -> None:
    """Else each start of a daemon would wait for it."""
    tops = re.compile("^(import|from) obstore", re.MULTILINE)
    assert not [module for module, file in MODULES.items() if tops.search(file.read_text("utf-8"))]


def test_a_missing_client_is_named(opened_bucket: BucketServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(
        RemoteError, match=r"a bucket for bytes needs obstore: (.* install |scripts/setup remote)"
    ) as failed:
        BucketPacks(BucketAddress(BUCKET, "", None), MARK)
    assert failed.value.lasting
