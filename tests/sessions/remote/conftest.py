"""A PostgreSQL server for the tests of one process, and a remote of each kind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Cluster, cluster, missing
from remotes import DatabasePlace, FolderPlace, Place

from ssmd.sessions.remote.remote import Remote


@pytest.fixture(scope="session")
def server() -> Iterator[Cluster]:
    """Run a server; skip the test where none can run."""
    if why := missing():
        pytest.skip(why)
    with cluster() as made:
        yield made


@pytest.fixture
def database(server: Cluster, tmp_path: Path) -> Iterator[DatabasePlace]:
    """Return an empty database, and a folder for bytes."""
    made = DatabasePlace(server, tmp_path / "remote")
    yield made
    server.empty(made.database)


@pytest.fixture(params=["folder", "postgres"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """Make an empty place, of each kind."""
    if request.param == "folder":
        return FolderPlace(tmp_path / "remote")
    found: DatabasePlace = request.getfixturevalue("database")
    return found


@pytest.fixture
def remote(place: Place) -> Iterator[Remote]:
    """Open a new remote, of each kind."""
    opened = place.open(create=True)
    yield opened
    opened.close()
