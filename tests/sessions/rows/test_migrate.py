"""The database's revision: tables are made once, opened again without change, and those of another one refused."""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from keeping import Chat

from ssmd.sessions.files.backup import back_up
from ssmd.sessions.fsck.repair import check, repair
from ssmd.sessions.rows import opening
from ssmd.sessions.rows.database import APPLICATION_ID, FILE, PAGE_BYTES
from ssmd.sessions.rows.schema import metadata
from ssmd.sessions.store import Store
from ssmd.sessions.turn import StoreError

ROOT = Path(__file__).parents[3]


def test_head_is_the_newest_revision() -> None:
    config = Config()
    config.set_main_option("script_location", str(opening.migrations_dir()))
    assert ScriptDirectory.from_config(config).get_heads() == [opening.HEAD]


def test_revisions_make_the_tables_of_the_schema(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    with store.reading() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True, "compare_server_default": True})
        assert compare_metadata(context, metadata) == []
        assert opening.current(connection) == opening.HEAD
    store.close()
    # Alembic does not compare these.
    with sqlite3.connect(tmp_path / FILE) as raw:
        tables = dict(raw.execute("SELECT name, sql FROM sqlite_master WHERE type = 'table'").fetchall())
    raw.close()
    for table in metadata.tables.values():
        assert ("AUTOINCREMENT" in tables[table.name]) == table.dialect_options["sqlite"]["autoincrement"]
        assert ("WITHOUT ROWID" in tables[table.name]) == (not table.dialect_options["sqlite"]["with_rowid"])


def test_what_is_chosen_at_creation(tmp_path: Path) -> None:
    Store.open(tmp_path).close()
    raw = sqlite3.connect(tmp_path / FILE)
    asked = {n: raw.execute(f"PRAGMA {n}").fetchone()[0] for n in ("page_size", "auto_vacuum", "journal_mode")}
    assert asked == {"page_size": PAGE_BYTES, "auto_vacuum": 2, "journal_mode": "wal"}
    assert raw.execute("PRAGMA application_id").fetchone() == (APPLICATION_ID,)
    raw.close()


def test_what_every_connection_keeps_to(tmp_path: Path) -> None:
    store = Store.open(tmp_path, busy_ms=1234)
    with store.reading() as connection:
        asked = {
            n: connection.exec_driver_sql(f"PRAGMA {n}").scalar()
            for n in ("foreign_keys", "synchronous", "secure_delete", "busy_timeout")
        }
    assert asked == {"foreign_keys": 1, "synchronous": 2, "secure_delete": 1, "busy_timeout": 1234}
    store.close()


def test_opening_again_changes_nothing(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    Chat(store, "s").say("t1", None, "hi", "hello")
    store.close()
    before = (tmp_path / FILE).read_bytes()
    for _ in range(2):
        Store.open(tmp_path).close()
    assert (tmp_path / FILE).read_bytes() == before


def test_a_migration_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All tables are made in one transaction; half of them would be worse than none."""
    broken = tmp_path / "migrations"
    (broken / "versions").mkdir(parents=True)
    (broken / "env.py").write_text((ROOT / "migrations" / "env.py").read_text())
    text = (ROOT / "migrations" / "versions" / "0011_sessions.py").read_text()
    (broken / "versions" / "0011_sessions.py").write_text(f"{text}    op.execute('NO SUCH STATEMENT')\n")
    with monkeypatch.context() as patch:
        patch.setattr(opening, "migrations_dir", lambda: broken)
        with pytest.raises(StoreError, match="syntax error"):
            Store.open(tmp_path / "data")
    raw = sqlite3.connect(tmp_path / "data" / FILE)
    assert raw.execute("SELECT count(*) FROM sqlite_master").fetchone() == (0,)
    raw.close()
    Store.open(tmp_path / "data").close()


def raw_database(folder: Path, *statements: str) -> None:
    folder.mkdir(mode=0o700, exist_ok=True)
    raw = sqlite3.connect(folder / FILE, isolation_level=None)
    for statement in statements:
        raw.execute(statement)
    raw.close()


def test_a_file_whose_making_was_broken_off_is_made(tmp_path: Path) -> None:
    """SIGKILL can leave the first page without our id on it."""
    begun = (f"PRAGMA page_size={PAGE_BYTES}", "PRAGMA auto_vacuum=INCREMENTAL", "CREATE TABLE t (x)", "DROP TABLE t")
    raw_database(tmp_path, *begun)
    assert (tmp_path / FILE).stat().st_size >= PAGE_BYTES
    store = Store.open(tmp_path)
    Chat(store, "s").say("t1", None, "hi", "hello")
    store.close()
    raw = sqlite3.connect(tmp_path / FILE)
    assert raw.execute("PRAGMA application_id").fetchone() == (APPLICATION_ID,)
    raw.close()


@pytest.mark.parametrize("statement", ["CREATE TABLE t (x)", "PRAGMA application_id=7"])
def test_another_programs_database_is_refused_untouched(statement: str, tmp_path: Path) -> None:
    raw_database(tmp_path, statement)
    before = (tmp_path / FILE).read_bytes()
    with pytest.raises(StoreError, match="another program's database"):
        Store.open(tmp_path)
    assert (tmp_path / FILE).read_bytes() == before


def files(folder: Path) -> dict[str, bytes]:
    """Return the bytes of the database and of its log."""
    return {p.name: p.read_bytes() for p in folder.iterdir() if not p.name.endswith("-shm")}


@pytest.mark.parametrize("revision", ["0001", "0010", "9999", "later"])
def test_another_revision_is_refused_with_its_log(revision: str, tmp_path: Path) -> None:
    """Its process was killed: a part of the rows is in the log alone. The last connection would move it."""
    store = Store.open(tmp_path / "made")
    Chat(store, "s").say("t1", None, "hi", "hello")
    with store.writing() as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = ?", (revision,))
    left = tmp_path / "left"
    left.mkdir(mode=0o700)
    for name, data in files(tmp_path / "made").items():
        (left / name).write_bytes(data)
    store.close()
    before = files(left)
    assert len(before[f"{FILE}-wal"]) > PAGE_BYTES
    for _ in range(2):
        with pytest.raises(
            StoreError, match=rf"'{revision}'.*nothing was changed.*ssmd session export --all --into DIR"
        ):
            Store.open(left)
        assert files(left) == before


def test_the_first_database_is_refused_untouched(tmp_path: Path) -> None:
    """It is not in WAL mode, which opening would change."""
    shutil.copy(ROOT / "tests" / "data" / "sessions-0001.sqlite", tmp_path / FILE)
    before = files(tmp_path)
    for refused in (Store.open, check, repair, lambda data: back_up(data, tmp_path.parent / "backup")):
        with pytest.raises(StoreError, match=r"'0001'.*nothing was changed"):
            refused(tmp_path)
        assert files(tmp_path) == before


def test_the_wheel_carries_the_revisions(wheel: Path, tmp_path: Path) -> None:
    """From an unpacked wheel, away from the checkout, a store is made."""
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    program = (
        "import pathlib, ssmd; from ssmd.sessions import store; from ssmd.sessions.rows import opening; "
        "store.Store.open(pathlib.Path('data')).close(); print(opening.migrations_dir())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()) == tmp_path / "site" / "ssmd" / "migrations"
