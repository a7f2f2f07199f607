"""Opening of a store's database: it is made or migrated to the newest schema, even on a full disk."""

from __future__ import annotations

import os
from pathlib import Path

from sqlalchemy import Connection, Engine, inspect, text

from ssmd.machine import lockfile
from ssmd.sessions.rows import database, disk_space
from ssmd.sessions.rows.database import DiskFull
from ssmd.sessions.turn import StoreError

HEAD = "0011"  # the newest revision; a test compares it with the files


def open_store(data_dir: Path, *, busy_ms: int) -> tuple[Engine, Path]:
    """Open the database in `data_dir`; create (0700, 0600) or migrate it as needed. Raises StoreError.

    A database of a newer version is refused and left as it is. So is one of an older version whose daemon still runs.
    """
    try:
        return _open(data_dir, busy_ms)
    except DiskFull:  # the log's index takes 32 kB
        if not disk_space.cut(data_dir, disk_space.FOR_REMOVAL) and not disk_space.cut(data_dir, 0):
            raise
        return _open(data_dir, busy_ms)


def _open(data_dir: Path, busy_ms: int) -> tuple[Engine, Path]:
    file = data_dir / database.FILE
    engine = database.open_database(data_dir, busy_ms=busy_ms)
    try:
        with database.reading(engine, file) as connection:
            revision = current(connection)
        if revision != HEAD:
            if revision is not None:
                _check_unused(data_dir, file)
            with database.migrating(engine, file) as connection:
                upgrade(connection, file)
    except BaseException:
        engine.dispose()
        raise
    return engine, file


def _check_unused(data_dir: Path, file: Path) -> None:
    """Raise StoreError if another process, a daemon of an older version, still writes the old schema."""
    try:
        holder = lockfile.holder(data_dir / lockfile.LOCK_FILE)
    except OSError:  # then no daemon can have locked it
        return
    if holder not in (None, os.getpid()):
        process = f" (process {holder})" if holder else ""
        raise StoreError(
            f"{file} is of an older ssmd, whose daemon{process} still runs; nothing was changed: end that daemon "
            "first, with `ssmd stop`"
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
    """Bring the tables to HEAD inside the caller's transaction. Raises StoreError on an unknown revision."""
    revision = current(connection)
    if revision == HEAD:
        return
    from alembic import command  # 0.2 s to import, and only needed for a migration
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    config = Config()
    config.set_main_option("script_location", str(migrations_dir()).replace("%", "%%"))
    known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
    if revision is not None and revision not in known:
        raise StoreError(
            f"{file} was written by a newer ssmd (revision {revision!r}; this one knows up to {HEAD}); "
            "nothing was changed: install the newer version, or use another data directory"
        )
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
