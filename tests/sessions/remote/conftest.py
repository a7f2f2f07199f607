"""A PostgreSQL server and a bucket for the tests of one process, and a remote of each kind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import buckets
import pytest
from buckets import BucketServer
from cluster import Cluster, cluster, missing
from keeping import new_store
from remotes import BucketPlace, DatabasePlace, FolderPlace, Place

from ssmd.sessions.remote.remote import Remote
from ssmd.sessions.store import Store


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[tuple[Store, Store]]:
    """Return the stores of two machines, which share what is said."""
    both = new_store(tmp_path / "a"), new_store(tmp_path / "b")
    for one in both:
        one.shares = lambda: None
    yield both
    for one in both:
        one.close()


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


@pytest.fixture(scope="session")
def bucket() -> Iterator[BucketServer]:
    """Run a server with a bucket; skip the test where none can run."""
    if why := buckets.missing():
        pytest.skip(why)
    with buckets.bucket_server() as made:
        yield made


@pytest.fixture
def opened_bucket(bucket: BucketServer, monkeypatch: pytest.MonkeyPatch) -> BucketServer:
    """Return the bucket, whose keys the environment has."""
    for name, value in bucket.environment.items():
        monkeypatch.setenv(name, value)
    return bucket


@pytest.fixture
def with_bucket(server: Cluster, opened_bucket: BucketServer, tmp_path: Path) -> Iterator[BucketPlace]:
    """Return an empty database, and an empty prefix of the bucket."""
    made = BucketPlace(server, opened_bucket, tmp_path / "remote")
    yield made
    server.empty(made.database)


@pytest.fixture(params=["folder", "postgres", "bucket"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """Make an empty place, of each kind."""
    if request.param == "folder":
        return FolderPlace(tmp_path / "remote")
    found: DatabasePlace = request.getfixturevalue("database" if request.param == "postgres" else "with_bucket")
    return found


@pytest.fixture
def remote(place: Place) -> Iterator[Remote]:
    """Open a new remote, of each kind."""
    opened = place.open(create=True)
    yield opened
    opened.close()
