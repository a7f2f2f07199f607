"""Brings the database's tables to this version, with the Alembic revisions in `migrations/`."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Connection, inspect, text

from ssmd.sessions.turn import StoreError

HEAD = "0011"  # the newest revision; a test compares it with the files


def migrations_dir() -> Path:
    """Where the revisions are: inside the package when it was installed from a wheel, beside it in a checkout."""
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
    """Bring the tables to HEAD inside the caller's transaction. Raises StoreError on a revision that is not known."""
    revision = current(connection)
    if revision == HEAD:
        return
    from alembic import command  # 0.2 s to import, and only needed when something is to be done
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
