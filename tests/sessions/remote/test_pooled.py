"""A database behind PgBouncer, which gives each transaction another connection, keeps what a remote promises."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Cluster
from pooler import PROGRAM, Pooler
from remotes import DatabasePlace, turn
from sessions.remote.test_contract import (
    at_once,
    test_a_buried_session_never_returns,
    test_a_new_remote_is_made_by_one_of_many,
    test_a_turn_is_found_by_the_last_chain,
    test_a_turn_that_is_published_twice_is_kept_once,
    test_what_was_published_first_stays,
)

from ssmd.sessions.remote.postgres import leases
from ssmd.sessions.remote.postgres.address import read_address
from ssmd.sessions.remote.postgres.server import Server

__all__ = (  # run here too, at this file's `place`
    "test_a_buried_session_never_returns",
    "test_a_new_remote_is_made_by_one_of_many",
    "test_a_turn_is_found_by_the_last_chain",
    "test_a_turn_that_is_published_twice_is_kept_once",
    "test_what_was_published_first_stays",
)
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="pgbouncer is not installed")


@pytest.fixture
def place(server: Cluster, database: DatabasePlace) -> Iterator[DatabasePlace]:
    with Pooler(server, connections=3) as pooler:
        database.setting = pooler.url(database.database, packs=str(database.packs))
        yield database


def test_a_lease_is_held_by_its_row_behind_a_pooler(place: DatabasePlace) -> None:
    """Eight machines ask at once, over three connections: one gets it, and no connection holds it."""
    place.open(create=True).close()
    given = []

    def ask(_: object) -> None:
        server = Server(read_address(place.setting))
        if leases.acquire(server, "sweep", 60) is not None:
            given.append(1)
        server.close()

    assert not at_once(place, [ask] * 8)
    assert len(given) == 1
    server = Server(read_address(place.setting))
    assert leases.acquire(server, "sweep", 60) is None
    server.close()


def test_a_pooler_that_restarts_is_reached_again(place: DatabasePlace, server: Cluster, tmp_path: Path) -> None:

    with Pooler(server, connections=3) as first:
        port = first.port
        place.setting = first.url(place.database, packs=str(place.packs))
        opened = place.open(create=True)
        opened.publish([turn("t1")])
    with Pooler(server, connections=3, port=port):
        opened.publish([turn("t2")])
        assert sorted(opened.turns("ses_1")) == ["t1", "t2"]
    opened.close()
