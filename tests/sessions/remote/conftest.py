"""A PostgreSQL server for the tests of one process, and a remote of each kind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Cluster, cluster, missing
from remotes import KINDS, DatabasePlace, Place, place_of

from ssmd.sessions.remote.remote import Remote


@pytest.fixture(scope="session")
def server() -> Iterator[Cluster]:
    """Run a server; skip the test where none can run."""
    if why := missing():
        pytest.skip(why)
    with cluster() as made:
        yield made


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """Make an empty place, of each kind."""
    made = place_of(request.param, tmp_path / "remote", request)
    yield made
    if isinstance(made, DatabasePlace):
        made.server.empty(made.database)


@pytest.fixture
def remote(place: Place) -> Iterator[Remote]:
    """Open a new remote, of each kind."""
    opened = place.open(create=True)
    yield opened
    opened.close()
