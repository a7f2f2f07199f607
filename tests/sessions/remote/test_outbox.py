"""The outbox: a row for each turn that is to be sent, written with it, kept until the remote has it, and bounded."""

from __future__ import annotations

import contextlib
import gzip
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from keeping import BUILD, HYBRID, LINEAGE, PRODUCER, VOCABULARY, Chat, new_store, user

from ssmd.sessions.checkpoint import Maker, Scope
from ssmd.sessions.fsck.repair import check
from ssmd.sessions.remote import sending
from ssmd.sessions.remote.ends import RemoteReader, send_end
from ssmd.sessions.remote.folder import FolderRemote
from ssmd.sessions.remote.link import Link
from ssmd.sessions.remote.remote import RemoteError, TurnPlace
from ssmd.sessions.remote.sending import send
from ssmd.sessions.remote.sharing import keep_local, pull_session, share
from ssmd.sessions.rows import opening, outbox
from ssmd.sessions.rows.database import FILE
from ssmd.sessions.rows.outbox import OutboxRow
from ssmd.sessions.rows.warm import WARM
from ssmd.sessions.store import Store
from ssmd.sessions.turn import Domain, StoreError

HERE = Path(__file__).parents[2]
READER = RemoteReader(Maker(Scope(HYBRID.digest(), LINEAGE, BUILD), PRODUCER, HYBRID), VOCABULARY)


def rows(store: Store) -> list[tuple[str, str | None, bool]]:
    with store.reading() as connection:
        found: list[OutboxRow] = outbox.read(connection, 1000)
    return [(row.session, row.turn, row.buried) for row in found]


def standing(store: Store, session: str) -> str | None:
    with store.reading() as connection:
        return outbox.standing(connection, session)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = new_store(tmp_path / "data")
    made.shares = lambda: None
    return made


@pytest.fixture
def remote(tmp_path: Path) -> FolderRemote:
    (tmp_path / "remote").mkdir(mode=0o700)
    return FolderRemote.open(tmp_path / "remote", create=True)


def test_without_a_remote_nothing_is_noted(tmp_path: Path) -> None:
    store = new_store(tmp_path / "data")
    Chat(store, "ses_1").say("t1", None, "hi", "hello")
    store.delete("ses_1")
    with store.reading() as connection:
        for table in ("outbox", "remote_session"):
            assert connection.exec_driver_sql(f"SELECT count(*) FROM {table}").scalar() == 0


def test_a_turn_and_its_row_are_written_together(store: Store) -> None:
    chat = Chat(store, "ses_1")
    chat.say("t1", None, "hi", "hello")
    assert rows(store) == [("ses_1", "t1", False)]
    broken, _ = chat.make("t2", "t1", [user("more")], "\ud800")
    with pytest.raises(StoreError, match="is not Unicode"):
        store.commit([broken], session=chat.info)
    assert rows(store) == [("ses_1", "t1", False)]
    store.delete("ses_1")
    assert rows(store) == [("ses_1", None, True)]
    assert standing(store, "ses_1") == "buried"


def test_what_never_goes_has_no_row(store: Store) -> None:
    chat = Chat(store, "ses_1")
    store.shares = None
    chat.say("t1", None, "before the remote", "yes")
    store.shares = lambda: None
    chat.say("t2", "t1", "with it", "yes")  # the remote could not have what it goes on from
    Chat(store, "ses_2").imported_as("ses_2").say("i1", None, "from a file", "yes")
    warm = Chat(store, "ses_3")
    turn, _ = warm.make("w1", None, [user("a beginning")], "")
    store.commit([replace(turn, finish=WARM)], session=warm.info)
    fork = store.fork("ses_1", "t1")
    forked = Chat(store, fork.id)
    forked.info, forked.turns, forked.ends = fork.info, chat.turns, chat.ends
    forked.say("f1", "t1", "a fork of it", "yes")
    assert rows(store) == []
    share(store, "ses_1")
    assert [turn for _, turn, _ in rows(store)] == ["t1", "t2"]
    keep_local(store, "ses_1")
    chat.say("t3", "t2", "not this one", "no")
    assert rows(store) == []


def forked(store: Store, chat: Chat, name: str) -> Chat:
    """Return a fork of a conversation at its first turn, with a turn of its own."""
    made = store.fork("ses_1", "t1")
    fork = Chat(store, made.id)
    fork.info, fork.turns, fork.ends = made.info, dict(chat.turns), dict(chat.ends)
    fork.say(name, "t1", "a fork of it", "yes")
    return fork


def test_a_removal_sends_nothing_of_a_local_session(store: Store) -> None:
    """The turn that its fork needs stays here too, and so does all that the fork says then."""
    chat = Chat(store, "ses_1")
    chat.say("t1", None, "a secret", "yes")
    keep_local(store, "ses_1")
    fork = forked(store, chat, "f1")
    store.delete("ses_1")
    fork.say("f2", "f1", "more", "yes")
    assert rows(store) == [("ses_1", None, True)]
    assert standing(store, fork.info.id) is None


def test_a_removal_shares_no_fork_from_before(store: Store) -> None:
    """Its first turn goes on as one of the fork, which is removed from the remote with it. Its own turns stay."""
    store.shares = None
    chat = Chat(store, "ses_1")
    chat.say("t1", None, "before the remote", "yes")
    fork = forked(store, chat, "f1")
    empty = store.fork("ses_1", "t1")
    store.shares = lambda: None
    share(store, "ses_1")
    store.delete("ses_1")
    fork.say("f2", "f1", "more", "yes")
    assert rows(store) == [("ses_1", None, True), (fork.info.id, "t1", False)]
    store.delete(fork.info.id)
    assert (standing(store, fork.info.id), standing(store, empty.id)) == ("buried", "shared")
    assert rows(store)[1:] == [(fork.info.id, None, True), (empty.id, "t1", False)]


def test_what_is_marked_local_while_rows_are_sent_stays(
    store: Store, remote: FolderRemote, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sender has read its row by then, or is sending the bytes of its state."""
    for n in range(3):
        Chat(store, f"ses_{n}").say(f"t{n}", None, "hi", "hello")
    monkeypatch.setattr(sending, "MAX_GROUP_BYTES", 1)  # a turn each
    send(store, remote, sent_of=lambda session: keep_local(store, "ses_1"))
    assert [remote.turns(f"ses_{n}") for n in range(3)] == [["t0"], [], ["t2"]]
    assert rows(store) == []
    put = remote.packs.put

    def marked(parts: Sequence[bytes | memoryview]) -> str:
        keep_local(store, "ses_2")
        return put(parts)

    monkeypatch.setattr(remote.packs, "put", marked)
    assert [send_end(store, remote, f"ses_{n}") > 0 for n in (2, 0)] == [False, True]
    assert (remote.ends("ses_0"), remote.ends("ses_2")) == (["t0"], [])


def test_a_conversation_without_the_remote_stays_then(store: Store, remote: FolderRemote) -> None:
    """A daemon ran without `--remote`: what it wrote stays, and so does what goes on from that, until a push."""
    chat = Chat(store, "ses_1")
    chat.say("t1", None, "hi", "hello")
    store.shares = None
    chat.say("t2", "t1", "without a remote", "yes")
    link = Link(store, lambda: remote)
    chat.say("t3", "t2", "with it again", "yes")
    send(store, remote)
    assert remote.turns("ses_1") == ["t1"]
    assert (standing(store, "ses_1"), link.state(["t3"])) == ("behind", "off")
    share(store, "ses_1")
    chat.say("t4", "t3", "all of it", "yes")
    send(store, remote)
    assert sorted(remote.turns("ses_1")) == ["t1", "t2", "t3", "t4"]


def test_a_full_outbox_keeps_conversations_here(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "MAX_WAITING", 2)
    chat = Chat(store, "ses_1")
    for name, parent in (("t1", None), ("t2", "t1"), ("t3", "t2")):
        chat.say(name, parent, name, "yes")
    Chat(store, "ses_2").say("o1", None, "another", "yes")
    assert [turn for _, turn, _ in rows(store)] == ["t1", "t2"]
    assert (standing(store, "ses_1"), standing(store, "ses_2")) == ("behind", None)
    monkeypatch.undo()
    chat.say("t4", "t3", "with room again", "yes")  # without t3 it is of no use to others
    assert len(rows(store)) == 2
    share(store, "ses_1")
    chat.say("t5", "t4", "all of it", "yes")
    assert {turn for _, turn, _ in rows(store)} == {"t1", "t2", "t3", "t4", "t5"}


def test_what_cannot_be_sent_waits(store: Store, remote: FolderRemote) -> None:
    Chat(store, "ses_1").say("t1", None, "hi", "hello")
    away = remote.root.rename(remote.root.with_name("away"))
    with pytest.raises(RemoteError, match="is it mounted"):
        send(store, remote)
    assert rows(store) == [("ses_1", "t1", False)]
    away.rename(remote.root)
    assert send(store, remote) == 1
    assert (rows(store), remote.turns("ses_1")) == ([], ["t1"])


def test_a_remote_that_hangs_holds_nothing_up(store: Store, remote: FolderRemote, tmp_path: Path) -> None:
    """As a folder of a server that does not answer any more."""

    class Hanging(FolderRemote):
        asked = 0

        def known(self, chains: Sequence[bytes], domain: Domain) -> list[TurnPlace]:
            self.asked += 1
            time.sleep(3600)
            return []

    hanging = Hanging(remote.root)
    link = Link(store, lambda: hanging)
    link.connect()
    said = [user("hi"), replace(user("hello"), role="assistant"), user("more")]
    for _ in range(20):
        link.bring(said, store.domain, None, READER)
    assert hanging.asked == 1  # it is not asked again
    assert link.problem == "unreachable"


WRITER = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from keeping import Chat, open_store
from ssmd.sessions.remote import sending
from ssmd.sessions.remote.ends import RemoteReader, send_end
from ssmd.sessions.remote.folder import FolderRemote
from ssmd.sessions.remote.link import Link
store = open_store(Path({data!r}))
link = Link(store, lambda: FolderRemote.open(Path({remote!r}), create=False))
link.start()
chat, last = Chat(store, {session!r}), None
for i in range(10_000):
    name = f"{session}_{{i}}"
    chat.say(name, last, f"question {{i}}", f"answer {{i}}", tokens=1)
    last = name
    print(name, flush=True)
"""


@pytest.mark.parametrize("kills", [4, pytest.param(50, marks=pytest.mark.full)])
def test_no_kill_loses_a_turn_or_sends_a_half(kills: int, remote: FolderRemote, tmp_path: Path) -> None:
    """Each process writes and sends until SIGKILL; the next one sends what that one could not."""
    told: list[str] = []
    for kill in range(kills):
        program = WRITER.format(
            tests=str(HERE), data=str(tmp_path / "data"), remote=str(remote.root), session=f"ses_{kill}"
        )
        with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for _ in range(3 + 2 * kill):
                told.append(process.stdout.readline().strip())
            os.kill(process.pid, signal.SIGKILL)
            told += [line.strip() for line in process.stdout if line.endswith("\n")]
    store, other = Store.open(tmp_path / "data"), new_store(tmp_path / "other")
    send(store, remote)
    assert rows(store) == []
    for session in store.sessions():
        mine = [t.id for t in store.turns(session.id)]
        assert sorted(remote.turns(session.id)) == sorted(mine)
        assert pull_session(other, remote, session.id, {LINEAGE: VOCABULARY}) == len(mine)
        assert [t.id for t in other.turns(session.id)] == mine
    assert set(told) <= {t.id for s in store.sessions() for t in store.turns(s.id)}
    assert not check(tmp_path / "data").damages
    assert not check(tmp_path / "other").damages
    assert not list(remote.root.glob("chains/*/*/.part*"))


def _as_0011(folder: Path) -> Path:
    """Lay down a database of 0011, the revision before there were remotes, with its sessions."""
    folder.mkdir(mode=0o700)
    (folder / FILE).write_bytes(gzip.decompress((HERE / "data" / "sessions-0011.sqlite.gz").read_bytes()))
    return folder


@pytest.mark.parametrize("opened", [Store.open, check], ids=["open", "check"])
def test_a_database_of_0011_is_upgraded(opened: Callable[[Path], object], tmp_path: Path) -> None:
    """All its rows stay as they are; it gets the newer tables, which are empty."""
    folder = _as_0011(tmp_path / "data")
    before = _contents(folder)
    done = opened(folder)
    if isinstance(done, Store):
        done.close()
    after = _contents(folder)
    assert after.pop("receipt") == after.pop("outbox") == after.pop("remote_session") == []
    assert after.pop("remote_mark") == after.pop("buried_turn") == after.pop("trusted_machine") == []
    assert after.pop("alembic_version") == [("0015",)]
    assert before.pop("alembic_version") == [("0011",)]
    assert after == before


def _contents(folder: Path) -> dict[str, list[tuple[object, ...]]]:
    """Return all rows of all tables, in no order that matters."""
    with contextlib.closing(sqlite3.connect(folder / FILE)) as raw:
        found = raw.execute("SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite%'")
        names = [name for (name,) in found.fetchall()]
        return {name: sorted(raw.execute(f"SELECT * FROM {name}").fetchall(), key=repr) for name in names}


def test_an_upgrade_that_fails_leaves_0011(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, broken = _as_0011(tmp_path / "data"), tmp_path / "migrations"
    (broken / "versions").mkdir(parents=True)
    made = HERE.parent / "migrations"
    (broken / "env.py").write_text((made / "env.py").read_text())
    for one in (made / "versions").glob("*.py"):
        text = one.read_text()
        (broken / "versions" / one.name).write_text(
            f"{text}    op.execute('NO SUCH STATEMENT')\n" if one.name.startswith("0015") else text
        )
    before = _contents(folder)
    with monkeypatch.context() as patch:
        patch.setattr(opening, "migrations_dir", lambda: broken)
        with pytest.raises(StoreError, match="syntax error"):
            Store.open(folder)
    assert _contents(folder) == before
    Store.open(folder).close()
