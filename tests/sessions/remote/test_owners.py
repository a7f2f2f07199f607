"""Several owners in one database: a role reads, blocks and removes nothing of another one, whatever ids it guesses."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster
from pooler import PROGRAM, Pooler
from remotes import DatabasePlace, turn
from sessions.remote.test_contract import (
    at_once,
    test_a_buried_session_never_returns,
    test_a_buried_turn_leaves_the_others,
    test_a_domain_sees_the_turns_of_its_owners,
    test_a_session_buried_while_it_is_sent_is_gone,
    test_a_state_takes_the_place_of_the_one_before,
    test_a_turn_is_found_by_the_last_chain,
    test_a_turn_of_a_newer_version_is_left_alone,
    test_a_turn_that_is_published_twice_is_kept_once,
    test_an_altered_turn_is_refused_and_written_again,
    test_what_was_published_first_stays,
)

from ssmd.sessions.remote import packs as packs_module
from ssmd.sessions.remote.postgres import leases
from ssmd.sessions.remote.postgres import postgres as statements
from ssmd.sessions.remote.postgres.address import read_address
from ssmd.sessions.remote.postgres.postgres import PostgresRemote
from ssmd.sessions.remote.postgres.server import Server
from ssmd.sessions.remote.remote import Quota, RemoteError, RemoteTurn, ReplyClaim, ReplyRow, TurnPlace
from ssmd.sessions.remote.retention import Retention
from ssmd.sessions.rows.outbox import Mark
from ssmd.sessions.turn import EVERYBODY

__all__ = (  # run here too: `remote` is bob's, and ann's has the same ids, some of them removed
    "test_a_buried_session_never_returns",
    "test_a_buried_turn_leaves_the_others",
    "test_a_domain_sees_the_turns_of_its_owners",
    "test_a_session_buried_while_it_is_sent_is_gone",
    "test_a_state_takes_the_place_of_the_one_before",
    "test_a_turn_is_found_by_the_last_chain",
    "test_a_turn_of_a_newer_version_is_left_alone",
    "test_a_turn_that_is_published_twice_is_kept_once",
    "test_an_altered_turn_is_refused_and_written_again",
    "test_what_was_published_first_stays",
)
DOCS = Path(__file__).parents[3] / "docs" / "remote.md"
GRANTS, REMOVAL, QUOTA = re.findall(r"```sql\n(.*?)```", DOCS.read_text("utf-8"), re.DOTALL)
WRITABLE = ("role", "turn", "ending", "tombstone", "reply", "lease", "machine")
TABLES = (*WRITABLE, "quota")
FIRST = TurnPlace("ses_1", "t1")
SECRET = RemoteTurn(FIRST, "", turn("t1").chain, b"the words of ann")


def connect(server: Cluster, role: str) -> Any:
    """Connect to the owners' database as a person with psql would."""
    import psycopg

    where = f"host={server.sockets} port={server.port} user={role} dbname=ssmd"
    return contextlib.closing(psycopg.connect(where, autocommit=True))


@pytest.fixture
def database(server: Cluster, tmp_path: Path) -> Iterator[DatabasePlace]:
    """Set up a database by the commands of docs/remote.md, and return bob's place in it."""
    server.admin("CREATE DATABASE ssmd OWNER ssmd TEMPLATE template0")
    PostgresRemote.open(server.url("ssmd"), create=True).close()  # `ssmd store init`
    server.admin(GRANTS, "ssmd")
    yield DatabasePlace(server, tmp_path / "bob", "ssmd", "bob")
    server.cut_off("ssmd")
    server.admin("DROP DATABASE ssmd")
    server.admin("DROP ROLE IF EXISTS ann, bob, ssmd_owners")


@pytest.fixture
def ann(database: DatabasePlace, tmp_path: Path) -> Iterator[PostgresRemote]:
    """Return ann's remote, with turns, a state, a tombstone, an answer, a lease and a mark."""
    opened = PostgresRemote.open(DatabasePlace(database.server, tmp_path / "ann", "ssmd", "ann").setting, create=True)
    assert opened.packs is not None
    opened.publish([SECRET, *(turn(f"t{i}") for i in range(2, 20))], Mark("", "laptop", 0))
    opened.publish_end(FIRST, opened.packs.put([b"the state of ann"]), b"row of ann", [])
    opened.bury("ses_9", None)
    opened.bury("ses_1", "t3")
    opened.replies.claim(bytes(32), bytes(32), "ann", lease_s=60, lasts_s=60)
    yield opened
    opened.close()


@pytest.fixture
def place(ann: PostgresRemote, database: DatabasePlace) -> DatabasePlace:
    """Return bob's place, in a database in which ann's remote is."""
    return database


@pytest.fixture
def bob(remote: PostgresRemote) -> PostgresRemote:
    return remote


def everything(remote: PostgresRemote) -> tuple[object, ...]:
    assert remote.packs is not None
    names = sorted(remote.sessions()), sorted(remote.turns("ses_1")), remote.ends("ses_1"), sorted(remote.buried())
    bodies = remote.fetch(FIRST), remote.end(FIRST), remote.known([SECRET.chain], EVERYBODY), remote.packs.names()
    return (*names, *bodies, remote.size(), remote.mark_of("laptop"), remote.identity)


def nothing(remote: PostgresRemote) -> bool:
    """Return True if a remote has nothing of ann's."""
    return everything(remote)[:-1] == ([], [], [], [], None, None, [], [], type(remote.size())(0, 0, 0, 0, 0, 0), 0)


def test_a_role_sees_nothing_of_another_one(ann: PostgresRemote, bob: PostgresRemote) -> None:
    before = everything(ann)
    assert nothing(bob)
    assert bob.identity != ann.identity
    assert "ses_1" in before[0]  # type: ignore[operator]


def test_ids_of_another_role_can_be_used_and_removed(ann: PostgresRemote, bob: PostgresRemote) -> None:
    """Bob guesses all of ann's names, writes and removes them, and takes every lease and key."""
    before = everything(ann)
    assert bob.packs is not None
    bob.publish([RemoteTurn(FIRST, "", SECRET.chain, b"the words of bob")], Mark("", "laptop", 0))
    bob.publish_end(FIRST, bob.packs.put([b"the state of bob"]), b"row of bob", ["t2"])
    assert (bob.fetch(FIRST), bob.end(FIRST)) == (b"the words of bob", b"row of bob")
    assert bob.known([SECRET.chain], EVERYBODY) == [FIRST]
    bob.set_mark("laptop", 99)
    claim = bob.replies.claim(bytes(32), bytes(32), "bob", lease_s=60, lasts_s=60)
    assert claim == ReplyClaim(bytes(32), "bob", 1)
    assert bob.replies.record(ReplyClaim(bytes(32), "ann", 1), "ses_1", ["t1"], b"{}") is False
    bob.replies.release(ReplyClaim(bytes(32), "ann", 1))
    bob.bury("ses_1", "t2")
    bob.bury("ses_1", None)
    assert bob.sweep() == (0, 0)
    assert everything(ann) == before
    assert ann.replies.renew(ReplyClaim(bytes(32), "ann", 1), 60)


def test_a_lease_of_one_role_does_not_hold_up_another(
    ann: PostgresRemote, bob: PostgresRemote, database: DatabasePlace
) -> None:
    server = Server(read_address(database.setting))
    held = leases.acquire(server, "sweep", 60)
    assert held is not None
    with pytest.raises(RemoteError, match="another machine sweeps"):
        bob.sweep()
    assert ann.sweep() == (0, 0)
    assert server.write(lambda connection: leases.holds(connection, held))
    server.close()


def test_a_sweep_takes_packs_of_its_own_role(
    ann: PostgresRemote, bob: PostgresRemote, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert bob.packs is not None
    assert ann.packs is not None
    monkeypatch.setattr(packs_module, "SWEPT_S", -60)
    bob.packs.put([b"left by a kill"])
    assert bob.sweep() == (1, 14)
    assert len(ann.packs.names()) == 1


# As a person with psql and the role's password.
REFUSED = {
    "a row in another's name": "INSERT INTO ssmd.tombstone (role, name) VALUES ('ann', 'ses_1')",
    "a row given to another": "UPDATE ssmd.tombstone SET role = 'ann' WHERE name = 'mine'",
    "a row that is there": "INSERT INTO ssmd.tombstone (role, name) VALUES ('ann', 'ses_9')",
    "copy in": "COPY ssmd.turn FROM STDIN",
    "no policies": "SET row_security = off; SELECT * FROM ssmd.turn",
    "policies dropped": "DROP POLICY own ON ssmd.turn",
    "a policy": "CREATE POLICY more ON ssmd.turn USING (true)",
    "security off": "ALTER TABLE ssmd.turn DISABLE ROW LEVEL SECURITY",
    "all rows": "TRUNCATE ssmd.turn",
    "the role of another": "SET ROLE ann",
    "the session of another": "SET SESSION AUTHORIZATION ann",
    "the role of the tables": "SET ROLE ssmd",
    "a function": "CREATE FUNCTION ssmd.sha256(bytea) RETURNS bytea LANGUAGE sql AS 'SELECT $1'",
    "a trigger": "CREATE TRIGGER t AFTER INSERT ON ssmd.turn EXECUTE FUNCTION suppress_redundant_updates_trigger()",
    "a reference": "CREATE TEMP TABLE t (role text, name text, FOREIGN KEY (role, name) REFERENCES ssmd.tombstone)",
    "a quota": "UPDATE ssmd.quota SET nbytes = 1 WHERE role = 'bob'",
    "a quota of another": "INSERT INTO ssmd.quota VALUES ('ann', '', 1)",
    "the format": "UPDATE ssmd.remote SET format = 9",
    "another remote": "DELETE FROM ssmd.remote",
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_role_cannot_pass_by_the_policies(
    case: str, ann: PostgresRemote, bob: PostgresRemote, place: DatabasePlace
) -> None:
    import psycopg

    before = everything(ann)
    bob.bury("mine", None)
    with connect(place.server, "bob") as connection, pytest.raises(psycopg.Error) as failed:
        connection.execute(REFUSED[case])
    assert failed.value.sqlstate in ("42501", "0A000", "42809", "42P16")
    assert "duplicate" not in str(failed.value)
    assert everything(ann) == before


@pytest.mark.parametrize("table", WRITABLE)
def test_rows_of_another_role_are_not_there(table: str, ann: PostgresRemote, place: DatabasePlace) -> None:
    """By SELECT, COPY, UPDATE, DELETE, and as the group that both roles are in."""
    leases.acquire(ann._server, "sweep", 60)
    count = f"SELECT count(*) FROM ssmd.{table} WHERE role = 'ann'"
    [(there,)] = place.sql(count)
    assert there
    with connect(place.server, "bob") as connection:
        for role in ("bob", "ssmd_owners"):
            connection.execute(f"SET ROLE {role}")
            assert connection.execute(f"SELECT * FROM ssmd.{table}").fetchall() == []
            with connection.cursor().copy(f"COPY ssmd.{table} TO STDOUT") as copied:
                assert b"".join(copied) == b""
            assert connection.execute(f"UPDATE ssmd.{table} SET role = CURRENT_USER").rowcount == 0
            assert connection.execute(f"DELETE FROM ssmd.{table}").rowcount == 0
            seen = connection.execute(f"SELECT count(*) FROM pg_stats WHERE tablename = '{table}'").fetchone()
            assert seen == (0,)
    assert place.sql(count) == [(there,)]


def test_a_quota_of_a_role_is_seen_by_it_alone(ann: PostgresRemote, place: DatabasePlace) -> None:
    """It is set as docs/remote.md says, by the owner of the tables."""
    with connect(place.server, "ssmd") as connection:
        connection.execute(QUOTA)
    quota = ann.quota("laptop")
    assert quota is not None
    assert quota.limit == 5_000_000_000
    assert quota.used > len(SECRET.body)
    bob = place.open(create=True)
    assert bob.quota("laptop") is None
    bob.close()
    with connect(place.server, "bob") as connection:
        assert connection.execute("SELECT * FROM ssmd.quota").fetchall() == []


def test_each_table_has_a_policy_and_its_keys_a_role(ann: PostgresRemote, place: DatabasePlace) -> None:
    walled = {name for (name,) in place.sql("SELECT relname FROM pg_class WHERE relkind = 'r' AND relrowsecurity")}
    tables = {name for (name,) in place.sql("SELECT tablename FROM pg_tables WHERE schemaname = 'ssmd'")}
    assert walled == tables - {"remote"} == set(TABLES)
    wanted = "(role = CURRENT_USER)"
    found = place.sql("SELECT tablename, cmd, qual, with_check FROM pg_policies WHERE schemaname = 'ssmd'")
    assert sorted(found) == sorted((table, "ALL", wanted, wanted) for table in TABLES)
    keys = place.sql("SELECT indexdef FROM pg_indexes WHERE schemaname = 'ssmd' AND indexdef LIKE '%UNIQUE%'")
    assert sum("role" in str(key) for (key,) in keys) == len(TABLES)


@pytest.fixture(params=["ssmd", "admin"], ids=["the owner of the tables", "a superuser"])
def free(request: pytest.FixtureRequest, ann: PostgresRemote, place: DatabasePlace) -> Iterator[PostgresRemote]:
    """Return the remote of a role that policies do not bind: its statements alone do."""
    place.sql("UPDATE ssmd.role SET packs = false WHERE role = 'ann'")
    place.setting = place.server.url("ssmd", user=request.param, packs=str(place.packs))
    opened = PostgresRemote.open(place.setting, create=True)
    assert place.sql("SELECT packs FROM ssmd.role WHERE role = 'ann'") == [(False,)]
    yield opened
    opened.close()


def rows_of_ann(place: DatabasePlace) -> list[object]:
    return [place.sql(f"SELECT t::text FROM ssmd.{table} AS t WHERE role = 'ann' ORDER BY 1") for table in TABLES]


def test_a_role_without_walls_uses_its_own_rows(ann: PostgresRemote, free: PostgresRemote) -> None:
    assert nothing(free)
    test_ids_of_another_role_can_be_used_and_removed(ann, free)


def test_a_role_without_walls_removes_its_own_rows(
    ann: PostgresRemote, free: PostgresRemote, place: DatabasePlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ann's machine was killed before it removed what its tombstone names: that is for ann's next one."""
    assert free.packs is not None
    ann.publish([turn("x1", "ses_6")])
    ann.publish_end(TurnPlace("ses_6", "x1"), "1" * 64, b"row", [])
    ann.replies.claim(bytes(31) + b"6", bytes(32), "six", lease_s=60, lasts_s=60)
    ann.replies.record(ReplyClaim(bytes(31) + b"6", "six", 1), "ses_6", ["x1"], b"{}")
    place.sql("INSERT INTO ssmd.tombstone VALUES ('ann', 'ses_6')")
    place.sql("UPDATE ssmd.ending SET at = now() - interval '9 days' WHERE role = 'ann'")
    before = rows_of_ann(place)
    same = free.packs.put([b"the state of ann"])
    free.publish_end(TurnPlace("ses_7", "t1"), same, b"row", [])
    free.publish_end(TurnPlace("ses_1", "t2"), free.packs.put([b"another"]), b"row", ["t1"])
    free.publish_end(FIRST, free.packs.put([b"the state of another"]), b"row", [])
    assert free.packs.there(same)  # it is named by ann's row of this turn too
    free.used(FIRST)
    free.bury("ses_6", None)
    assert free.retain(Retention(nbytes=0)).states == 3
    monkeypatch.setattr(packs_module, "SWEPT_S", -60)
    free.packs.put([b"the state of ann"])
    assert free.sweep() == (1, 16)
    assert rows_of_ann(place) == before


def test_tombstones_and_quotas_of_another_role_do_not_count(
    ann: PostgresRemote, free: PostgresRemote, place: DatabasePlace
) -> None:
    ann.bury("ses_5", None)
    place.sql("INSERT INTO ssmd.quota VALUES ('ann', '', 5)")
    free.publish([turn("x1", "ses_5"), turn("x2", "ses_5")])
    free.replies.claim(bytes(31) + b"5", bytes(32), "five", lease_s=60, lasts_s=60)
    assert free.replies.record(ReplyClaim(bytes(31) + b"5", "five", 1), "ses_5", ["x1"], b"{}")
    free.bury("ses_5", "x2")
    assert (free.sessions(), free.turns("ses_5")) == (["ses_5"], ["x1"])
    assert isinstance(free.replies.claim(bytes(31) + b"5", bytes(32), "b", lease_s=60, lasts_s=60), ReplyRow)
    assert free.quota("laptop") is None
    place.sql("INSERT INTO ssmd.quota SELECT role, '', 7 FROM ssmd.role WHERE role <> 'ann'")
    assert free.quota("laptop") == Quota(7, 0)


def test_answers_and_leases_of_another_role_do_not_count(
    ann: PostgresRemote, free: PostgresRemote, place: DatabasePlace
) -> None:
    keys = [bytes(31) + bytes([n]) for n in range(1, 5)]
    for key in keys[:2]:
        for remote, name in ((ann, "ann"), (free, "free")):
            remote.replies.claim(key, bytes(32), name, lease_s=60, lasts_s=60)
            remote.replies.record(ReplyClaim(key, name, 1), f"ses_{name}", ["t1"], b"{}")
    assert free.replies.renew(ReplyClaim(keys[0], "ann", 1), 60) is False
    place.sql(
        f"UPDATE ssmd.reply SET expires = now() - interval '1 day' WHERE role = 'ann' AND key = '\\x{keys[0].hex()}'"
    )
    place.sql(
        f"UPDATE ssmd.reply SET expires = now() - interval '1 day' WHERE role <> 'ann' AND key = '\\x{keys[1].hex()}'"
    )
    before = rows_of_ann(place)
    free.replies.claim(keys[2], bytes(32), "free", lease_s=60, lasts_s=60)  # removes what is expired
    found = free.replies.claim(keys[0], bytes(32), "again", lease_s=60, lasts_s=60)
    assert isinstance(found, ReplyRow)
    assert found.session == "ses_free"
    assert rows_of_ann(place) == before
    lease = leases.acquire(ann._server, "sweep", 60)
    assert lease is not None
    before = rows_of_ann(place)
    assert not free._server.write(lambda connection: leases.holds(connection, lease))
    leases.release(free._server, lease)
    assert rows_of_ann(place) == before


def test_two_roles_cannot_have_one_folder(ann: PostgresRemote, place: DatabasePlace, tmp_path: Path) -> None:
    with pytest.raises(RemoteError, match="belongs to another database, or another role of it") as failed:
        PostgresRemote.open(place.server.url("ssmd", user="bob", packs=str(tmp_path / "ann")), create=True)
    assert failed.value.lasting


def test_a_role_that_may_not_or_is_not_known_is_told(database: DatabasePlace) -> None:
    with pytest.raises(RemoteError, match="holds no remote any more of the role 'bob'"):
        database.open()
    database.sql("UPDATE ssmd.remote SET format = 0")  # as before a newer version's tables
    with pytest.raises(RemoteError, match="has no right to do that there"):
        database.open(create=True)
    database.sql("REVOKE USAGE ON SCHEMA ssmd FROM ssmd_owners")
    with pytest.raises(RemoteError, match="has no right to do that there"):
        database.open(create=True)
    database.sql("REVOKE CONNECT ON DATABASE ssmd FROM ssmd_owners")
    with pytest.raises(RemoteError, match=r"permission denied|has no right"):
        database.open(create=True)


def test_a_removed_person_leaves_nothing(ann: PostgresRemote, remote: PostgresRemote, place: DatabasePlace) -> None:
    before = everything(ann)
    remote.publish([SECRET], Mark("", "laptop", 0))
    remote.publish_end(FIRST, "0" * 64, b"row", [])
    remote.bury("ses_2", None)
    remote.replies.claim(bytes(32), bytes(32), "bob", lease_s=60, lasts_s=60)
    leases.acquire(remote._server, "sweep", 60)
    place.sql("INSERT INTO ssmd.quota VALUES ('bob', '', 5)")
    remote.close()
    place.server.cut_off("ssmd")
    place.sql(REMOVAL)
    assert [place.sql(f"SELECT count(*) FROM ssmd.{table} WHERE role = 'bob'") for table in TABLES] == [[(0,)]] * 8
    assert everything(ann) == before


def test_lookups_use_their_indexes(ann: PostgresRemote, place: DatabasePlace) -> None:
    """Also where another role has as many turns with the same chains, and for a role of which no row was counted."""
    for role in ("ann", "bob"):
        place.sql(
            "INSERT INTO ssmd.turn (role, session, turn, owner, chain, format, digest, body) "
            f"SELECT '{role}', 'ses_' || n / 20, 'gen_' || n, '', sha256(n::text::bytea), 1, '', 'x' "
            "FROM generate_series(1, 20000) n"
        )
    place.sql("ANALYZE ssmd.turn")
    lookups = {
        statements._KNOWN: ("turn_chain", "(chain = asked.chain) AND (role = CURRENT_USER)"),
        statements._FETCH: ("turn_pkey", "(session = 'ses_1'::text) AND (role = CURRENT_USER) AND (turn = 'gen_20'"),
        statements._TURNS: ("turn_pkey", "(session = 'ses_1'::text) AND (role = CURRENT_USER)"),
    }
    for statement, (index, condition) in lookups.items():
        asked = str(statement).replace(":chains", "ARRAY[sha256('7'), sha256('9')]").replace(":all", "true")
        asked = asked.replace(":owners", "'{}'").replace(":most", "256").replace(":session", "'ses_1'")
        asked = asked.replace(":turn", "'gen_20'")
        for role in ("bob", "ssmd"):
            with connect(place.server, role) as connection:
                plan = "\n".join(line for (line,) in connection.execute(f"EXPLAIN {asked}").fetchall())
            assert f"using {index} on turn" in plan or f"Bitmap Index Scan on {index}" in plan, plan
            assert condition in plan
            assert "Seq Scan on turn" not in plan


@pytest.mark.skipif(PROGRAM is None, reason="pgbouncer is not installed")
def test_roles_behind_a_pooler_do_not_meet(ann: PostgresRemote, place: DatabasePlace, server: Cluster) -> None:
    """They come in turns, over one connection each to the server."""
    before = everything(ann)
    with Pooler(server, connections=1, roles=("ann", "bob")) as pooler:
        parted = {role: pooler.url("ssmd", user=role) for role in ("ann", "bob")}
        place.setting = parted["bob"]
        place.open(create=True).close()

        def live(remote: Any) -> None:
            for n in range(20):
                one = RemoteTurn(TurnPlace("ses_1", f"t{n}"), "", turn(f"t{n}").chain, b"the words of bob")
                remote.publish([one])
                assert remote.fetch(one.place) == one.body

        def look(_: object) -> None:
            other = PostgresRemote.open(parted["ann"], create=False)
            for _ in range(20):
                assert other.fetch(FIRST) == SECRET.body
            other.close()

        assert not at_once(place, [live, look, live, look])
    assert everything(ann) == before


@pytest.mark.skipif(shutil.which("pg_dump") is None, reason="pg_dump is not in PATH")
def test_the_owner_of_the_tables_saves_all_rows(ann: PostgresRemote, place: DatabasePlace) -> None:
    """Without an option, as before there were policies. A person's own dump is refused by PostgreSQL."""
    where = ["pg_dump", "-h", str(place.server.sockets), "-p", str(place.server.port), "--data-only", "ssmd"]
    dumps = [
        subprocess.run([*where, "-U", role], capture_output=True, text=True, check=False) for role in ("ssmd", "bob")
    ]
    assert dumps[0].returncode == 0, dumps[0].stderr
    assert SECRET.body.hex() in dumps[0].stdout
    assert dumps[1].returncode != 0
    assert SECRET.body.hex() not in dumps[1].stdout


@pytest.mark.skipif(shutil.which("pg_restore") is None, reason="pg_restore is not in PATH")
def test_a_database_restored_elsewhere_has_its_walls(ann: PostgresRemote, place: DatabasePlace, tmp_path: Path) -> None:
    """By the command of docs/remote.md, into an empty database: each role finds its own remote there, and no other."""
    before, server = everything(ann), place.server
    [words] = re.findall(r"^pg_restore (.*) -d ssmd ", DOCS.read_text("utf-8"), re.MULTILINE)
    where = ["-h", str(server.sockets), "-p", str(server.port), "-U", "admin"]
    server.admin("CREATE DATABASE other OWNER ssmd TEMPLATE template0")
    try:
        for program, *rest in (
            ("pg_dump", "--format=custom", "--file", str(tmp_path / "dump"), "ssmd"),
            ("pg_restore", *words.split(), "-d", "other", str(tmp_path / "dump")),
        ):
            done = subprocess.run([program, *where, *rest], capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
        hers = PostgresRemote.open(server.url("other", user="ann", packs=str(tmp_path / "ann")), create=False)
        assert everything(hers) == before
        his = PostgresRemote.open(
            server.url("other", user="bob", packs=place.setting.partition("packs=")[2]), create=True
        )
        assert nothing(his)
        his.bury("ses_1", None)
        assert everything(hers) == before
        hers.close()
        his.close()
    finally:
        server.cut_off("other")
        server.admin("DROP DATABASE other")
