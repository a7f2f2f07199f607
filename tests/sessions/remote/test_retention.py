"""Retention of a remote: states that were not used for long go, rows first; turns stay, and are read again."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import commands
import pytest
from keeping import BUILD, LINEAGE, PRODUCER, SPECS, VOCABULARY, Chat, user
from remotes import DatabasePlace, FolderPlace, Place, turn
from sessions.remote.test_roaming import until

from ssmd.sessions.checkpoint import Maker, Scope
from ssmd.sessions.remote.ends import RemoteReader, send_end
from ssmd.sessions.remote.link import Link
from ssmd.sessions.remote.postgres import leases
from ssmd.sessions.remote.postgres.address import read_address
from ssmd.sessions.remote.postgres.postgres import PostgresRemote
from ssmd.sessions.remote.postgres.server import Server
from ssmd.sessions.remote.remote import Remote, RemoteError, TurnPlace
from ssmd.sessions.remote.retention import Retention, RetentionCounts
from ssmd.sessions.remote.sending import send
from ssmd.sessions.remote.survey import check
from ssmd.sessions.store import Store

DAY_S = 86400.0
SPEC = SPECS["hybrid"]
READER = RemoteReader(Maker(Scope(SPEC.digest(), LINEAGE, BUILD), PRODUCER, SPEC), VOCABULARY)


def age(place: Place, session: str, days: float) -> None:
    """Let the state of a session be one that was last used so many days ago."""
    if isinstance(place, FolderPlace):
        [row] = place.root.glob(f"ends/*/{session}/*")
        os.utime(row, (time.time() - days * DAY_S,) * 2)
    else:
        assert isinstance(place, DatabasePlace)
        place.sql(f"UPDATE ssmd.ending SET at = now() - interval '{days} days' WHERE session = '{session}'")


def states(remote: Remote) -> list[str]:
    return sorted(session for session in remote.sessions() if remote.ends(session))


@pytest.fixture
def aged(remote: Remote, place: Place) -> Remote:
    """Return a remote with states of 100 bytes that were last used 0, 10, 20 and 30 days ago."""
    assert remote.packs is not None
    for n in range(4):
        one = turn(f"t{n}", f"ses_{n}")
        remote.publish([one])
        remote.publish_end(one.place, remote.packs.put([bytes([n]) * 100]), b"row", [])
        age(place, f"ses_{n}", 10 * n)
    return remote


@pytest.mark.parametrize(
    ("limits", "left"),
    [
        (Retention(idle_s=15 * DAY_S), 2),
        (Retention(nbytes=300), 3),
        (Retention(nbytes=299), 2),
        (Retention(idle_s=15 * DAY_S, nbytes=100), 1),
        (Retention(idle_s=25 * DAY_S, nbytes=1000), 3),
        (Retention(idle_s=90 * DAY_S), 4),
        (Retention(nbytes=0), 0),
    ],
    ids=["days", "size", "a byte less", "both", "days of both", "none", "all"],
)
def test_states_go_that_were_not_used_for_longest(limits: Retention, left: int, aged: Remote, place: Place) -> None:
    before, counts = place.rows(), RetentionCounts(4 - left, 100 * (4 - left), left, 100 * left)
    assert aged.retain(limits, dry_run=True) == counts
    assert place.rows() == before
    assert aged.retain(limits) == counts
    assert states(aged) == [f"ses_{n}" for n in range(left)]
    assert aged.packs is not None
    assert len(aged.packs.names()) == left
    assert sorted(aged.sessions()) == [f"ses_{n}" for n in range(4)]
    assert aged.retain(limits) == RetentionCounts(0, 0, left, 100 * left)


def test_a_fetched_or_newer_state_stays(aged: Remote) -> None:
    assert aged.packs is not None
    aged.used(TurnPlace("ses_3", "t3"))
    aged.publish_end(TurnPlace("ses_2", "t2"), aged.packs.put([b"a newer state"]), b"row", [])
    aged.used(TurnPlace("ses_9", "t9"))  # it is not there any more
    assert aged.retain(Retention(idle_s=5 * DAY_S)).states == 1
    assert states(aged) == ["ses_0", "ses_2", "ses_3"]


def test_a_state_that_is_used_during_retention_stays(
    aged: Remote, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another machine fetches it after its age was read, and before it goes."""
    other, real = place.open(), Retention.leaving

    def leaving(limits: Retention, found: Any) -> Any:
        other.used(TurnPlace("ses_3", "t3"))
        return real(limits, found)

    monkeypatch.setattr(Retention, "leaving", leaving)
    assert aged.retain(Retention(idle_s=15 * DAY_S)) == RetentionCounts(1, 100, 3, 300)
    assert states(aged) == ["ses_0", "ses_1", "ses_3"]
    other.close()


def test_a_kill_between_row_and_pack_does_no_harm(aged: Remote, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row never names a pack that retention removed: what is left is for the sweep."""
    with monkeypatch.context() as patch:
        patch.setattr(type(aged.packs), "remove", lambda packs, name: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            aged.retain(Retention(nbytes=0))
    kinds = {one.kind for one in check(aged).faults if one.kind.startswith("pack")}
    assert kinds <= {"pack_unnamed"}
    assert len(states(aged)) < 4


def test_one_machine_at_a_time_clears_a_database(database: DatabasePlace) -> None:
    remote = database.open(create=True)
    server = Server(read_address(database.setting))
    lease = leases.acquire(server, "sweep", 60)
    with pytest.raises(RemoteError, match="another machine sweeps this remote"):
        remote.retain(Retention(nbytes=0))
    assert lease is not None
    leases.release(server, lease)
    assert remote.retain(Retention(nbytes=0)) == RetentionCounts()
    server.close()
    remote.close()
    bare = PostgresRemote.open(database.server.url(database.database), create=False)
    with pytest.raises(RemoteError, match="names no place for bytes"):
        bare.retain(Retention(nbytes=0))
    bare.close()


def test_a_lost_lease_ends_retention(database: DatabasePlace, monkeypatch: pytest.MonkeyPatch) -> None:
    remote, real = database.open(create=True), Retention.leaving
    assert remote.packs is not None
    remote.publish_end(TurnPlace("ses_1", "t1"), remote.packs.put([b"state"]), b"row", [])

    def slept(limits: Retention, found: Any) -> Any:
        database.sql("UPDATE ssmd.lease SET fence = fence + 1")
        return real(limits, found)

    monkeypatch.setattr(Retention, "leaving", slept)
    with pytest.raises(RemoteError, match="another machine sweeps this remote by now"):
        remote.retain(Retention(nbytes=0))
    assert (remote.ends("ses_1"), len(remote.packs.names())) == (["t1"], 1)
    remote.close()


@pytest.mark.parametrize("removed", [False, True], ids=["fetched", "removed"])
def test_a_removed_state_is_read_again(
    removed: bool, stores: tuple[Store, Store], remote: Remote, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it goes between its row and its bytes. One that was fetched is noted as used."""
    a, b = stores
    chat = Chat(a, "ses_1", SPEC)
    chat.say("t1", None, "Tell me of a river.", "It flows.")
    send(a, remote)
    assert send_end(a, remote, "ses_1")
    age(place, "ses_1", 30)
    monkeypatch.setattr("ssmd.sessions.remote.link.fetching_is_sooner", lambda *_: True)
    link = Link(b, lambda: place.open())
    link.connect()
    packs = link._remote.packs  # type: ignore[union-attr]
    real = packs.get  # type: ignore[union-attr]

    def get(name: str, nbytes: int) -> bytes:
        if removed:
            assert remote.retain(Retention(idle_s=DAY_S)).states == 1
        return real(name, nbytes)

    monkeypatch.setattr(packs, "get", get)
    said = [m for t in a.turns("ses_1") for m in t.conversation] + [user("And then?")]
    link.bring(said, b.domain, None, READER)
    assert [one.id for one in b.turns("ses_1")] == ["t1"]
    with b.reading() as connection:
        count = connection.exec_driver_sql("SELECT count(*) FROM checkpoint").scalar_one()
    assert count == (0 if removed else 1)
    link.start()
    if not removed:
        until(lambda: remote.retain(Retention(idle_s=DAY_S), dry_run=True).states == 0)
    link.close()


def test_the_command_says_what_goes(aged: Remote, place: Place, tmp_path: Path) -> None:
    env = {**os.environ, "SSMD_DATA_DIR": str(tmp_path / "data")}

    def run(*words: str) -> Any:
        return commands.ssmd("store", "retain", "--remote", place.setting, *words, env=env)

    dry = run("--days", "15", "--dry-run")
    assert dry.returncode == 0, dry.stderr
    assert "2 states, 0.2 kB, would be removed" in dry.stdout
    assert "2 states, 0.2 kB, kept" in dry.stdout
    done = json.loads(run("--days", "15", "--json").stdout)
    counts = {"states": 2, "bytes": 200, "removed": True, "kept": 2, "kept_bytes": 200}
    assert {name: done[name] for name in counts} == counts
    assert "1 state, 0.1 kB, removed" in run("--size", "100").stdout
    for words, said in (((), "--days N, or --size SIZE"), (("--size", "a lot"), "expected bytes")):
        wrong = run(*words)
        assert wrong.returncode == 2
        assert said in wrong.stderr
    assert states(aged) == ["ses_0"]
