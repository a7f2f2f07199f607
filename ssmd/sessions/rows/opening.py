"""Opening of a store's database: its tables are made if there are none, even on a full disk."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

from sqlalchemy import Connection, Engine, inspect, text

from ssmd.sessions.rows import database, disk_space
from ssmd.sessions.rows.faults import DiskFull
from ssmd.sessions.turn import StoreError

HEAD = "0015"  # the newest revision; a test compares it with the files
UPGRADED = ("0011", "0012", "0013", "0014")  # earlier revisions that are upgraded when a database is opened
_LOOK_MS = 200  # longest wait for a lock to read the revision: readers wait only if a process uses the file alone


def open_store(data_dir: Path, *, busy_ms: int) -> tuple[Engine, Path]:
    """Open the database in `data_dir`; create it (0700, 0600) if there is none. Raises StoreError.

    One of an earlier revision in UPGRADED is upgraded. One of any other is refused and left as it is.
    """
    try:
        return _open(data_dir, busy_ms)
    except DiskFull:  # the log's index takes 32 kB
        if not disk_space.cut(data_dir, disk_space.FOR_REMOVAL) and not disk_space.cut(data_dir, 0):
            raise
        return _open(data_dir, busy_ms)


def _open(data_dir: Path, busy_ms: int) -> tuple[Engine, Path]:
    file = data_dir / database.FILE
    _refuse_emptied(file)
    check_revision(file, busy_ms=busy_ms)
    engine = database.open_database(data_dir, busy_ms=busy_ms)
    try:
        with database.reading(engine, file) as connection:
            revision = current(connection)
        if revision != HEAD:
            with database.writing(engine, file) as connection:
                upgrade(connection, file)
    except BaseException:
        engine.dispose()
        raise
    return engine, file


def _refuse_emptied(file: Path) -> None:
    """Raise StoreError if a database that was in use has 0 bytes. SQLite would remove its log, and begin anew.

    A new file has a header before it has a log.
    """
    log = file.with_name(f"{file.name}-wal")
    with contextlib.suppress(OSError):  # what is not there was not emptied
        if file.stat().st_size == 0 and log.exists():
            raise StoreError(
                f"session store {file} has 0 bytes, and {log.name} is beside it: another program emptied it; put a "
                "backup in its place, or move both away to start with an empty one"
            )


def check_revision(file: Path, *, busy_ms: int) -> None:
    """Raise StoreError if a database is of a revision that is refused. Changes neither the file nor its log.

    A connection that may write would change both: it moves the log into the file when it closes. What cannot be read
    here is found when the database is opened.
    """
    revision = None
    with contextlib.suppress(sqlite3.Error, UnicodeDecodeError):  # SQLite's words quote a damaged schema
        place = f"{file.absolute().as_uri()}?mode=ro"
        with contextlib.closing(sqlite3.connect(place, uri=True, timeout=min(busy_ms, _LOOK_MS) / 1000)) as raw:
            if raw.execute("PRAGMA application_id").fetchone() == (database.APPLICATION_ID,):
                (revision,) = raw.execute("SELECT version_num FROM alembic_version").fetchone() or (None,)
    _refuse_other(revision, file)


def _refuse_other(revision: str | None, file: Path) -> None:
    if revision not in (None, HEAD, *UPGRADED):
        raise StoreError(
            f"{file} was written by another version of ssmd (revision {revision!r}; this one reads {HEAD!r}); nothing "
            "was changed. To take its sessions along, run `ssmd session export --all --into DIR` with the version that "
            "wrote it, move the file away, and run `ssmd session import DIR/*.ssmd` with this one"
        )


def migrations_dir() -> Path:
    """Return the folder of the revisions: inside the package if installed from a wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parents[2]
    for folder in (package / "migrations", package.parent / "migrations"):
        if (folder / "env.py").is_file():
            return folder
    raise StoreError(f"the database revisions are missing from {package / 'migrations'}; install ssmd again")


def current(connection: Connection) -> str | None:
    """Read the database's revision, None if it has no tables yet."""
    if not inspect(connection).has_table("alembic_version"):
        return None
    revision: str | None = connection.execute(text("SELECT version_num FROM alembic_version")).scalar()
    return revision


def upgrade(connection: Connection, file: Path) -> None:
    """Make the tables of HEAD that are missing, in the caller's transaction. Raises StoreError on other revisions."""
    revision = current(connection)
    _refuse_other(revision, file)
    if revision == HEAD:  # another process made them meanwhile
        return
    from alembic import command  # 0.2 s to import, and only needed to make tables
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(migrations_dir()).replace("%", "%%"))
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
