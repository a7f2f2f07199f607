"""A remote that is put back from an older backup: machines send what it lost, and their tombstones first."""

from __future__ import annotations

import re
import shutil
import subprocess
import threading
import time
from pathlib import Path
from typing import Protocol

import pytest
from keeping import LINEAGE, SPECS, VOCABULARY, Chat
from remotes import DatabasePlace, FolderPlace, Place, turn
from sessions.remote.test_roaming import until

from ssmd.sessions.remote import link as link_module
from ssmd.sessions.remote.ends import send_end
from ssmd.sessions.remote.link import Link
from ssmd.sessions.remote.recovery import mark_of, recover
from ssmd.sessions.remote.remote import MarkGone, Remote, RemoteError, TurnPlace
from ssmd.sessions.remote.sending import purge, send
from ssmd.sessions.remote.sharing import pull_session
from ssmd.sessions.rows import outbox
from ssmd.sessions.store import Store

DOCS = Path(__file__).parents[3] / "docs" / "remote.md"


class Backup(Protocol):
    def restore(self) -> None: ...


class FolderBackup:
    """A copy of the folder."""

    def __init__(self, place: FolderPlace, at: Path) -> None:
        self._place, self._at = place, at
        shutil.copytree(place.root, at)

    def restore(self) -> None:
        shutil.rmtree(self._place.root)
        shutil.copytree(self._at, self._place.root)


class DatabaseBackup:
    """A dump by pg_dump, and then a copy of the folder or bucket for bytes."""

    def __init__(self, place: DatabasePlace, at: Path) -> None:
        self._place, self._at = place, at
        at.mkdir()
        self._run("pg_dump", "--format=custom", "--file", str(at / "dump"))
        place.save_packs(at / "packs")

    def restore(self) -> None:
        self._place.server.cut_off(self._place.database)
        [words] = re.findall(r"^pg_restore (.*) -d ssmd ", DOCS.read_text("utf-8"), re.MULTILINE)
        self._run("pg_restore", *words.split(), "--exit-on-error", str(self._at / "dump"))
        self._place.restore_packs(self._at / "packs")

    def _run(self, program: str, *words: str) -> None:
        server = self._place.server
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not in PATH")
        where = ["-h", str(server.sockets), "-p", str(server.port), "-U", "admin", "-d", self._place.database]
        done = subprocess.run([program, *where, *words], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


def backup(place: Place, at: Path) -> Backup:
    return FolderBackup(place, at) if isinstance(place, FolderPlace) else DatabaseBackup(place, at)  # type: ignore[arg-type]


def shared(remote: Remote) -> dict[str, list[str]]:
    return {session: sorted(remote.turns(session)) for session in ("ses_1", "ses_2", "ses_3", "ses_4", "ses_5")}


def test_machines_send_again_what_a_backup_has_not(
    stores: tuple[Store, Store], remote: Remote, place: Place, tmp_path: Path
) -> None:
    """Also turns of a machine that is gone, which this one has fetched. What was removed does not come back."""
    a, b = stores
    one = Chat(a, "ses_1", SPECS["hybrid"])
    one.say("t1", None, "Tell me of a river.", "It flows.")
    Chat(a, "ses_3").say("r1", None, "Remove me.", "Later.")
    two = Chat(a, "ses_4")
    two.say("s1", None, "And a lake?", "It is still.")
    two.say("s2", "s1", "Remove this turn.", "Later.")
    send(a, remote)
    old = backup(place, tmp_path / "backup")
    one.say("t2", "t1", "Where to?", "To the sea.")
    Chat(b, "ses_2").say("o1", None, "Tell me of a hill.", "It is high.")
    Chat(b, "ses_5").say("p1", None, "Only this machine knows this.", "Yes.")
    a.delete("ses_3")
    a.remove_turn("s2", {})
    send(a, remote)
    send(b, remote)
    assert send_end(a, remote, "ses_1")
    pull_session(a, remote, "ses_2", {LINEAGE: VOCABULARY})
    whole = shared(remote)
    assert whole == {"ses_1": ["t1", "t2"], "ses_2": ["o1"], "ses_3": [], "ses_4": ["s1"], "ses_5": ["p1"]}
    assert recover(a, remote) == []
    old.restore()
    assert shared(remote) == {"ses_1": ["t1"], "ses_2": [], "ses_3": ["r1"], "ses_4": ["s1", "s2"], "ses_5": []}
    assert recover(a, remote) == ["ses_1", "ses_2"]
    assert shared(remote) == {"ses_1": ["t1"], "ses_2": [], "ses_3": [], "ses_4": ["s1"], "ses_5": []}
    send(a, remote)
    assert shared(remote) == {**whole, "ses_5": []}
    assert recover(a, remote) == []
    assert recover(b, remote) == ["ses_5"]
    send(b, remote)
    assert shared(remote) == whole


def test_a_linked_store_recovers_by_itself(
    stores: tuple[Store, Store], remote: Remote, place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state of a conversation's end comes back too. The next turn finds out."""
    monkeypatch.setattr(link_module, "REST_S", 0.1)
    chat, a = Chat(stores[0], "ses_1", SPECS["hybrid"]), stores[0]
    old = backup(place, tmp_path / "backup")
    chat.say("t1", None, "Tell me of a river.", "It flows.")
    link = Link(a, lambda: place.open())
    link.connect()
    link.start()
    until(lambda: remote.end(TurnPlace("ses_1", "t1")) is not None)
    old.restore()
    assert remote.turns("ses_1") == []
    Chat(a, "ses_2").say("o1", None, "Another.", "Yes.")
    link._wake.set()
    until(lambda: remote.turns("ses_1") == ["t1"] and remote.end(TurnPlace("ses_1", "t1")) is not None)
    until(lambda: remote.turns("ses_2") == ["o1"])
    link.close()


def test_tombstones_are_sent_before_turns(stores: tuple[Store, Store], database: DatabasePlace, tmp_path: Path) -> None:
    """Here the database takes no turn at first."""
    a, remote = stores[0], database.open(create=True)
    Chat(a, "ses_3").say("r1", None, "Remove me.", "Later.")
    send(a, remote)
    old = DatabaseBackup(database, tmp_path / "backup")
    a.delete("ses_3")
    Chat(a, "ses_1").say("t1", None, "Tell me of a river.", "It flows.")
    send(a, remote)
    old.restore()
    database.sql(
        "CREATE FUNCTION ssmd.fail() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'no' "
        "USING ERRCODE = 'disk_full'; END $$"
    )
    database.sql("CREATE TRIGGER fail BEFORE INSERT ON ssmd.turn FOR EACH ROW EXECUTE FUNCTION ssmd.fail()")
    Chat(a, "ses_2").say("o1", None, "Another.", "Yes.")
    with pytest.raises(RemoteError, match="disk is full"):
        send(a, remote)
    assert remote.turns("ses_3") == []
    database.sql("DROP TRIGGER fail ON ssmd.turn")
    send(a, remote)
    assert (remote.turns("ses_1"), remote.turns("ses_2"), remote.turns("ses_3")) == (["t1"], ["o1"], [])
    remote.close()


def test_a_remote_that_is_put_back_while_rows_are_sent(
    stores: tuple[Store, Store], remote: Remote, place: Place, tmp_path: Path
) -> None:
    """After the turns are there and before this machine has noted it: the next look finds it."""
    a = stores[0]
    old = backup(place, tmp_path / "backup")
    Chat(a, "ses_1").say("t1", None, "Tell me of a river.", "It flows.")
    send(a, remote)
    Chat(a, "ses_2").say("o1", None, "Another.", "Yes.")
    waits = [old]

    def put_back(turns: set[str]) -> None:
        while waits:
            waits.pop().restore()

    send(a, remote, published=put_back)
    assert (remote.turns("ses_1"), remote.turns("ses_2")) == ([], [])
    assert recover(a, remote) == ["ses_1", "ses_2"]
    send(a, remote)
    assert (remote.turns("ses_1"), remote.turns("ses_2")) == (["t1"], ["o1"])
    assert recover(a, remote) == []


def test_turns_of_a_remote_that_was_put_back_are_not_kept(
    stores: tuple[Store, Store], remote: Remote, place: Place, tmp_path: Path
) -> None:
    """Where the mark before them is gone: else the next mark would hide what was lost. Sending mends it by itself."""
    a = stores[0]
    old = backup(place, tmp_path / "backup")
    Chat(a, "ses_1").say("t1", None, "Tell me of a river.", "It flows.")
    send(a, remote)
    old.restore()
    mark = mark_of(a, remote)
    with pytest.raises(MarkGone, match="older than it was"):
        remote.publish([turn("o1", "ses_2")], mark)
    assert (remote.turns("ses_2"), remote.mark_of(mark.machine)) == ([], 0)
    Chat(a, "ses_3").say("p1", None, "Another.", "Yes.")
    send(a, remote)
    assert (remote.turns("ses_1"), remote.turns("ses_3")) == (["t1"], ["p1"])
    mark = mark_of(a, remote)
    assert remote.publish([turn("o1", "ses_2")], mark) == mark.confirmed + 1 == remote.mark_of(mark.machine)


def test_what_was_sent_after_a_kill_counts_too(
    stores: tuple[Store, Store], remote: Remote, place: Place, tmp_path: Path
) -> None:
    """The kill came between the remote's count and this machine's: the next count must be higher than both."""
    a = stores[0]
    Chat(a, "ses_1").say("t1", None, "Tell me of a river.", "It flows.")
    send(a, remote)
    mark = mark_of(a, remote)
    for _ in range(3):  # three kills
        remote.publish([], mark)
    old = backup(place, tmp_path / "backup")
    Chat(a, "ses_2").say("o1", None, "Tell me of a lake.", "It is still.")
    send(a, remote)
    old.restore()
    assert recover(a, remote) == ["ses_2"]


def test_a_removal_that_the_remote_lost_is_sent_again(
    stores: tuple[Store, Store], remote: Remote, place: Place, tmp_path: Path
) -> None:
    """Also where nothing but tombstones was sent since the backup."""
    a = stores[0]
    Chat(a, "ses_1").say("t1", None, "Tell me of a river.", "It flows.")
    send(a, remote)
    old = backup(place, tmp_path / "backup")
    a.delete("ses_1")
    send(a, remote)
    old.restore()
    assert remote.turns("ses_1") == ["t1"]
    recover(a, remote)
    assert (remote.turns("ses_1"), set(remote.buried())) == ([], {"ses_1"})


def test_another_remote_gets_no_older_turns(stores: tuple[Store, Store], remote: Remote, tmp_path: Path) -> None:
    """It has no mark of this machine, as one that lost it."""
    a, other = stores[0], FolderPlace(tmp_path / "other")
    Chat(a, "ses_1").say("t1", None, "Tell me of a river.", "It flows.")
    send(a, remote)
    Chat(a, "ses_2").say("o1", None, "Another.", "Yes.")
    second = other.open(create=True)
    send(a, second)
    purge(a, second)
    assert (second.turns("ses_1"), second.turns("ses_2")) == ([], ["o1"])
    assert mark_of(a, remote).confirmed == mark_of(a, second).confirmed == 1


def test_marks_of_a_copied_machine_go_up_alone(stores: tuple[Store, Store], remote: Remote) -> None:
    """As where a data directory was copied: two daemons have one name. Neither takes the other's for a loss."""
    machine = mark_of(stores[0], remote).machine
    remote.set_mark(machine, 7)
    remote.set_mark(machine, 5)
    assert remote.mark_of(machine) == 7
    assert remote.mark_of("another") == 0


@pytest.mark.parametrize("sent", [0, 1], ids=["the first turn", "a later turn"])
@pytest.mark.parametrize("written", [-1, -(2**63), 2**63 - 1])
def test_a_mark_that_is_no_count_is_replaced(
    written: int, sent: int, stores: tuple[Store, Store], remote: Remote, place: Place
) -> None:
    """Another user of the remote can write any number. Turns go all the same, and sending ends."""
    store, machine = stores[0], mark_of(stores[0], remote).machine
    for n in range(sent):
        Chat(store, f"ses_{n}").say(f"o{n}", None, "Tell me of a lake.", "It is still.")
        send(store, remote)
    if isinstance(place, FolderPlace):
        (place.root / "machines").mkdir(exist_ok=True, mode=0o700)
        (place.root / "machines" / machine).write_text(f"{written}\n")
    else:
        assert isinstance(place, DatabasePlace)
        row = f"('ssmd', '{machine}', {written})"
        change = "ON CONFLICT (role, name) DO UPDATE SET mark = excluded.mark"
        place.sql(f"INSERT INTO ssmd.machine VALUES {row} {change}")
    Chat(store, "ses_9").say("t1", None, "Tell me of a river.", "It flows.")
    ends = time.monotonic() + 5
    send(store, remote, lambda: time.monotonic() > ends)
    assert remote.turns("ses_9") == ["t1"]
    with store.reading() as connection:
        assert outbox.waiting(connection) == 0
    assert remote.mark_of(machine) == mark_of(store, remote).confirmed > 0


def test_a_remote_opens_while_it_is_restored(database: DatabasePlace, tmp_path: Path) -> None:
    """A daemon that starts meanwhile finds the tables whole, so that it does not refuse to start for good."""
    database.open(create=True).close()
    old, over, faults = DatabaseBackup(database, tmp_path / "backup"), threading.Event(), list[str]()

    def open_again() -> None:
        while not over.is_set():
            try:
                database.open().close()
            except RemoteError as err:
                faults.extend([str(err)] if err.lasting else [])

    thread = threading.Thread(target=open_again)
    thread.start()
    for _ in range(4):
        old.restore()
    over.set()
    thread.join()
    assert faults == []
