"""A remote in PostgreSQL over a server that is killed, hangs, is full, read-only or newer; its folder; its leases."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Cluster
from modules import MODULES
from remotes import DatabasePlace, turn

from ssmd.sessions.remote import packs as packs_module
from ssmd.sessions.remote.postgres import leases, schema
from ssmd.sessions.remote.postgres import server as server_module
from ssmd.sessions.remote.postgres.address import read_address
from ssmd.sessions.remote.postgres.postgres import PostgresRemote
from ssmd.sessions.remote.postgres.server import Server
from ssmd.sessions.remote.remote import InvalidTurn, RemoteError, TurnPlace
from ssmd.sessions.turn import EVERYBODY, Domain

FIRST = TurnPlace("ses_1", "t1")


@pytest.fixture
def remote(database: DatabasePlace) -> Iterator[PostgresRemote]:
    opened = PostgresRemote.open(database.setting, create=True)
    yield opened
    opened.close()


@pytest.fixture
def connected(remote: PostgresRemote, database: DatabasePlace) -> Iterator[Server]:
    """Return connections of another machine to the same database."""
    made = Server(read_address(database.setting))
    yield made
    made.close()


def test_a_server_that_is_killed_is_used_again(remote: PostgresRemote, server: Cluster) -> None:
    """Kept turns are there after it, and the connections are made anew."""
    remote.publish([turn("t1")])
    server.end(signal.SIGKILL)
    with pytest.raises(RemoteError, match="cannot be used") as failed:
        remote.publish([turn("t2")])
    assert not failed.value.lasting
    server.start()
    remote.publish([turn("t2")])
    assert sorted(remote.turns("ses_1")) == ["t1", "t2"]


def test_an_ended_connection_fails_no_call(remote: PostgresRemote, database: DatabasePlace, server: Cluster) -> None:
    """As after a restart of the server, or where a firewall forgets connections."""
    for name in ("t1", "t2"):
        remote.publish([turn(name)])
        server.cut_off(database.database)
    assert sorted(remote.turns("ses_1")) == ["t1", "t2"]


def test_a_server_that_hangs_is_given_up(
    remote: PostgresRemote, database: DatabasePlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote.publish([turn("t1")])
    found = database.sql("SELECT pid FROM pg_stat_activity WHERE usename = 'ssmd'")
    monkeypatch.setattr(server_module, "ANSWER_S", 0.3)
    pids = [int(str(pid)) for (pid,) in found]
    assert pids
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        for _ in pids:
            remote.turns("ses_1")  # with a new connection, once the kept one was given up
        assert time.monotonic() - began < 10
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def test_a_server_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes the connection, as PgBouncer does before a server that is away. Else no daemon would start."""
    monkeypatch.setattr(server_module, "ANSWER_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def welcome() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(b"R\0\0\0\x08\0\0\0\0Z\0\0\0\x05I")  # it is let in, and the server is ready
                while connection.recv(1 << 16):
                    pass

        threading.Thread(target=welcome, daemon=True).start()
        url, failed = f"postgresql://ssmd@127.0.0.1:{listening.getsockname()[1]}/ssmd?sslmode=disable", []

        def opened() -> None:
            with pytest.raises(RemoteError, match="cannot be used") as found:
                PostgresRemote.open(url, create=True)
            failed.append(found.value.lasting)

        thread = threading.Thread(target=opened, daemon=True)
        thread.start()
        thread.join(20)
        assert failed == [False]


@pytest.mark.parametrize(
    ("state", "said"), [("disk_full", "its disk is full"), ("too_many_connections", "no room for another connection")]
)
def test_a_server_without_room_is_named(state: str, said: str, remote: PostgresRemote, database: DatabasePlace) -> None:
    """The error is the server's own, raised by a trigger in place of a full disk. It shows no text of a turn."""
    database.sql(
        f"CREATE FUNCTION ssmd.fail() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION '%', NEW.body "
        f"USING ERRCODE = '{state}'; END $$"
    )
    database.sql("CREATE TRIGGER fail BEFORE INSERT ON ssmd.turn FOR EACH ROW EXECUTE FUNCTION ssmd.fail()")
    with pytest.raises(RemoteError, match=said) as failed:
        remote.publish([turn("t1")])
    assert "body of" not in str(failed.value)
    assert failed.value.__suppress_context__


def test_a_read_only_server_still_answers(remote: PostgresRemote, database: DatabasePlace, server: Cluster) -> None:
    remote.publish([turn("t1")])
    server.admin(f"ALTER DATABASE {database.database} SET default_transaction_read_only = on")
    server.cut_off(database.database)
    try:
        with pytest.raises(RemoteError, match="it is read-only"):
            remote.publish([turn("t2")])
        assert remote.known([turn("t1").chain], EVERYBODY) == [FIRST]
    finally:
        server.admin(f"ALTER DATABASE {database.database} RESET default_transaction_read_only")


def test_a_newer_remote_is_refused(remote: PostgresRemote, database: DatabasePlace) -> None:
    database.sql("UPDATE ssmd.remote SET format = 5")
    said = "is of format 5, and this version of ssmd knows 4"
    with pytest.raises(RemoteError, match=said) as failed:
        PostgresRemote.open(database.setting, create=True)
    assert failed.value.lasting
    with pytest.raises(RemoteError, match=said):
        remote.buried()  # a daemon that runs meanwhile looks each minute


def test_a_schema_of_something_else_is_refused(database: DatabasePlace) -> None:
    database.sql("CREATE SCHEMA ssmd AUTHORIZATION ssmd")
    database.sql("CREATE TABLE ssmd.letters (text text)")
    with pytest.raises(RemoteError, match="is not of a remote: name another database"):
        PostgresRemote.open(database.setting, create=True)


def test_an_older_server_is_refused(database: DatabasePlace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema, "OLDEST", 99)
    with pytest.raises(RemoteError, match="it has to be 99 or newer"):
        PostgresRemote.open(database.setting, create=True)


def test_a_database_of_no_encoding_is_used(server: Cluster) -> None:
    """Servers that were set up without a locale have such ones."""
    remote = PostgresRemote.open(server.url(server.encoded("SQL_ASCII")), create=True)
    remote.publish([turn("t1", owner="ann")])
    assert remote.known([turn("t1").chain], Domain("ann", ("ann",))) == [FIRST]
    assert (remote.turns("ses_1"), remote.fetch(FIRST)) == (["t1"], turn("t1").body)
    remote.bury("ses_1", None)
    assert remote.buried() == {"ses_1"}
    remote.close()


def test_names_that_are_no_ids_are_passed_over(remote: PostgresRemote, database: DatabasePlace) -> None:
    remote.publish([turn("t1")])
    for session, name in (("..", "t1"), ("ses_1", "../t1"), ("ses_1", "t 1")):
        database.sql(
            f"INSERT INTO ssmd.turn SELECT role, '{session}', '{name}', owner, chain, machine, format, digest, body "
            "FROM ssmd.turn WHERE turn = 't1' LIMIT 1"
        )
    database.sql("INSERT INTO ssmd.tombstone VALUES ('ssmd', 'no id')")
    assert remote.known([turn("t1").chain], EVERYBODY) == [FIRST]
    assert (remote.turns("ses_1"), remote.buried()) == (["t1"], set())


def test_a_body_beyond_the_limit_is_not_read(
    remote: PostgresRemote, database: DatabasePlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote.publish([turn("t1")])
    monkeypatch.setattr("ssmd.sessions.remote.postgres.postgres.MAX_BODY_BYTES", 3)
    with pytest.raises(InvalidTurn, match="more than 3 bytes"):
        remote.fetch(FIRST)


def test_a_lease_goes_to_one_machine(remote: PostgresRemote, connected: Server, database: DatabasePlace) -> None:
    """The next one has a higher fence, and the first one's writes find that."""
    first = leases.acquire(connected, "sweep", 60)
    assert first is not None
    assert leases.acquire(connected, "sweep", 60) is None
    with pytest.raises(RemoteError, match="another machine sweeps this remote"):
        remote.sweep()
    database.sql("UPDATE ssmd.lease SET until = now() - interval '1 second'")  # a machine slept
    second = leases.acquire(connected, "sweep", 60)
    assert second is not None
    assert second.fence > first.fence
    assert [connected.write(lambda c, one=one: leases.holds(c, one)) for one in (first, second)] == [False, True]  # type: ignore[misc]
    leases.release(connected, first)
    assert leases.acquire(connected, "sweep", 60) is None
    leases.release(connected, second)
    assert remote.sweep() == (0, 0)


@pytest.mark.parametrize("found", [1, 3])
def test_a_remote_before_the_first_release_is_refused(
    found: int, remote: PostgresRemote, database: DatabasePlace
) -> None:
    database.sql(f"UPDATE ssmd.remote SET format = {found}")
    with pytest.raises(RemoteError, match=f"is of format {found}, of a version before the first release") as failed:
        PostgresRemote.open(database.setting, create=True)
    assert failed.value.lasting


def test_a_lost_lease_stops_a_migration(connected: Server, database: DatabasePlace) -> None:
    """A machine that slept in between makes no table, though it believes in its lease."""
    database.sql("DROP TABLE ssmd.role, ssmd.turn, ssmd.ending, ssmd.tombstone, ssmd.reply, ssmd.machine, ssmd.quota")
    database.sql("UPDATE ssmd.remote SET format = 0")
    lease = leases.acquire(connected, "migrate", 0.01)
    assert lease is not None
    time.sleep(0.05)
    assert leases.acquire(connected, "migrate", 60) is not None
    schema._migrate(connected, lease, 0)
    assert schema.format_of(connected) == 0
    assert database.sql("SELECT to_regclass('ssmd.turn')") == [(None,)]


def test_a_guarded_write_holds_the_lease_to_its_end(connected: Server, remote: PostgresRemote) -> None:
    """Else another machine could take it between the look at the fence and the commit."""
    lease = leases.acquire(connected, "migrate", 0.01)
    assert lease is not None
    time.sleep(0.05)
    order: list[str] = []
    looked = threading.Event()

    def guarded(connection: object) -> None:
        assert leases.holds(connection, lease)  # type: ignore[arg-type]
        looked.set()
        time.sleep(0.4)
        order.append("written")

    writer = threading.Thread(target=lambda: connected.write(guarded))
    writer.start()
    looked.wait(10)
    assert leases.acquire(connected, "migrate", 60) is not None
    order.append("taken")
    writer.join()
    assert order == ["written", "taken"]


def test_bytes_are_kept_in_the_database_s_own_folder(
    remote: PostgresRemote, database: DatabasePlace, server: Cluster, tmp_path: Path
) -> None:
    other = server.database()
    try:
        with pytest.raises(RemoteError, match="belongs to another database"):
            PostgresRemote.open(server.url(other, packs=str(database.packs)), create=True)
    finally:
        server.empty(other)
    database.packs.rename(tmp_path / "mounted")
    database.packs.mkdir(mode=0o700)  # the mount point
    again = PostgresRemote.open(database.setting, create=False)
    assert again.packs is not None
    remote.publish([turn("t1")])
    with pytest.raises(RemoteError, match="is it mounted"):
        again.packs.put([b"state"])
    assert again.fetch(FIRST) == turn("t1").body
    assert not list(database.packs.iterdir())
    again.close()


def test_a_sweep_takes_what_no_row_names(
    remote: PostgresRemote, database: DatabasePlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert remote.packs is not None
    kept, left = remote.packs.put([b"kept"]), remote.packs.put([b"left by a kill"])
    remote.publish_end(FIRST, kept, b"row", [])
    assert remote.sweep() == (0, 0)  # it is young: its row may come
    monkeypatch.setattr(packs_module, "SWEPT_S", -60)
    assert remote.sweep(dry_run=True) == remote.sweep() == (1, 14)
    assert (remote.packs.there(kept), remote.packs.there(left)) == (True, False)
    database.sql("INSERT INTO ssmd.tombstone VALUES ('ssmd', 'ses_1')")  # the machine was killed before it saw that
    assert remote.sweep(dry_run=True) == remote.sweep() == (1, 4)
    assert not database.rows()


def test_a_removal_is_on_disk_whatever_the_role_says(
    remote: PostgresRemote, database: DatabasePlace, server: Cluster
) -> None:
    """Else a crash of the server could bring the rows of a removed session back."""
    database.sql(
        "CREATE FUNCTION ssmd.look() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF current_setting("
        "'synchronous_commit') = 'off' THEN RAISE EXCEPTION 'it is not sure'; END IF; RETURN NULL; END $$"
    )
    for table in ("turn", "tombstone"):
        database.sql(f"CREATE TRIGGER look AFTER INSERT OR DELETE ON ssmd.{table} EXECUTE FUNCTION ssmd.look()")
    server.admin(f"ALTER DATABASE {database.database} SET synchronous_commit = off")
    server.cut_off(database.database)
    try:
        remote.publish([turn("t1"), turn("t2", "ses_2")])
        remote.bury("ses_1", None)
    finally:
        server.admin(f"ALTER DATABASE {database.database} RESET synchronous_commit")
    database.sql("INSERT INTO ssmd.tombstone VALUES ('ssmd', 'ses_2')")
    remote.publish([turn("t2", "ses_2")])  # as after a kill between the turn and the look for its tombstone
    assert not database.rows()


def test_without_a_database_psycopg_is_not_imported() -> None:
    """Else each start of a daemon would wait for it."""
    tops = re.compile("^(import|from) psycopg", re.MULTILINE)
    assert not [module for module, file in MODULES.items() if tops.search(file.read_text("utf-8"))]
