"""The SQLite file of the session store: its creation, the settings of its connections, and its errors.

This file has everything that depends on SQLite; store.py uses only SQLAlchemy.

Chosen by measurement (20 MB in rows of 4 MiB, one transaction, an ordinary cloud disk, two cores): `synchronous=FULL`
costs 10 ms over NORMAL (34-45 ms against 21-24 ms), so a turn that was reported as stored survives a power cut too.
Pages of 16 KiB write large rows 10 % faster than 4 KiB; 32 and 64 KiB gain another 15 % but make every small turn
write two and four times as much. Moving the log into the file takes as long again as the commit, so commits do not do
it (unless the log grows past 128 MiB): `settle` does, once the answer is out. A log that was moved whole begins anew,
and its header costs the next commit an fsync of its own: `settle` does that too.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import sqlite3
import stat
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine, event
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import ConnectionPoolEntry, PoolResetState

from ssmd.machine.folder import close_to_others, make_private, others_open
from ssmd.machine.network import read_at
from ssmd.machine.privatefile import NOLINK
from ssmd.sessions.rows import erasure
from ssmd.sessions.rows.faults import (
    SHARING,
    DiskFull,
    NoSharedMemory,
    StoreLocked,
    disk_full,
    errors,
    held_alone,
    no_shared_memory,
    read_only_disk,
    replaced,
    unusable_store,
)
from ssmd.sessions.turn import StoreError

log = logging.getLogger(__name__)
FILE = "sessions.sqlite3"
APPLICATION_ID = 0x73736D64  # "ssmd": tells our file from other SQLite files
PAGE_BYTES = 16384
WRITER_PATIENCE_S = 30.0  # s that a thread waits for others of its process to end their writes
_POOLED = 5  # connections that wait for their next use
_LOG_PAGES = (128 << 20) // PAGE_BYTES
_PAGES_AT_ONCE = 64
_HEADER = b"SQLite format 3\x00"
_READ = "PRAGMA schema_version"
_FILE_HEADER_BYTES = 100  # with the number of pages, of free ones, and of changes
_INDEX_HEADER_BYTES = 136  # https://www.sqlite.org/walformat.html#the_wal_index_header


class _Connection(sqlite3.Connection):
    """A connection that tracks its cursors, because SQLite does not report open statements to Python."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.cursors = weakref.WeakSet[sqlite3.Cursor]()

    def cursor(self, *args: Any, **kwargs: Any) -> Any:
        made = super().cursor(*args, **kwargs)
        self.cursors.add(made)
        return made


class _OpenFile:
    """The database file and its log as an engine opened them, so that their removal or replacement is noticed.

    Each `stat` call costs some microseconds. Writes to a file without a name are lost when the process ends. Writes to
    a file that another program wrote over (`cp` of a backup) ruin it. Only a move of the log changes the file, and
    the log's index counts the moves: a file that changed without one was written over.

    Descriptors stay open until SQLite has closed its own. POSIX drops all locks of a process on a file when the
    process closes any descriptor of that file. Another process would then take itself for the last one, and remove
    the log.
    """

    def __init__(self, file: Path, descriptor: int) -> None:
        self._file = file
        self._path = str(file)  # `Path.stat` takes twice the time
        self._log, self._index = f"{file}-wal", f"{file}-shm"
        self._descriptor: int | None = descriptor
        self._identity = _identity(os.fstat(descriptor))
        self._sides: tuple[tuple[int, int] | None, ...] = (None, None)
        self._connections: set[int] = set()
        self._counter: tuple[int, os.stat_result] | None = None  # the log's index: its descriptor, and its file
        self._seen: tuple[bytes, bytes] | None = None  # as `_content` returned it last
        self._overwritten = False
        self._lock = threading.Lock()  # for the descriptors, and for what was seen
        self.writer = threading.RLock()  # held by the thread that writes

    def check(self, *, written: bool = False) -> None:
        """Raise ReplacedFile unless the name leads to the same file.

        written: in a write transaction, which began with `check_content`. Its connection has the log open, so its name
        and its index's name must lead to the same files too.
        """
        try:
            found = _identity(os.stat(self._path))
        except FileNotFoundError as err:
            raise replaced(self._file, f"{err.filename} was removed") from None
        except OSError as err:  # of a failing disk, for example
            raise unusable_store(self._file, err) from err
        if found != self._identity:
            raise replaced(self._file, "another file was put in its place")
        if written:
            self._check_sides()
        else:
            self.check_content()

    def check_content(self) -> None:
        """Raise ReplacedFile if another program wrote over the file."""
        with self._lock:
            found, seen = self._content(), self._seen
            if found is not None:
                self._overwritten |= seen is not None and seen[0] == found[0] and seen[1] != found[1]
                self._seen = found
        if self._overwritten:
            raise replaced(self._file, "another file was written over it", "restart the daemon to use that one")

    def note_content(self) -> None:
        """Note the file as it is after a commit, or a move of the log. Never raises."""
        with self._lock:
            self._seen = None
            with contextlib.suppress(StoreError):
                self._seen = self._content()

    def _content(self) -> tuple[bytes, bytes] | None:
        """Return (moves of the log so far, beginning and size of the file); None if that is unknown just now."""
        if self._counter is None or self._descriptor is None:
            return None
        try:
            moves = self._moves(self._counter[0])
            beginning = read_at(self._descriptor, 0, _FILE_HEADER_BYTES)
            size = os.fstat(self._descriptor).st_size
            again = self._moves(self._counter[0])
        except OSError as err:
            raise unusable_store(self._file, err) from err
        return None if moves is None or moves != again else (moves, beginning + size.to_bytes(8, "big"))

    @staticmethod
    def _moves(index: int) -> bytes | None:
        """Return the log's salts and how much of it was moved into the file; None while more of it is being moved."""
        raw = read_at(index, 0, _INDEX_HEADER_BYTES)
        salts, moved, moving = raw[32:40], raw[96:100], raw[128:132]
        return salts + moved if moved == moving and len(raw) == _INDEX_HEADER_BYTES else None

    def _check_sides(self) -> None:
        for side, known, now in zip((self._log, self._index), self._sides, self._sides_now(), strict=True):
            if now != known and known is not None:
                raise replaced(self._file, f"{side} was {'removed' if now is None else 'replaced'}")

    def look(self) -> None:
        """Raise ReplacedFile if the file or its log lost its name. For a thread that writes nothing."""
        self.check()
        if self._connections:
            self._check_sides()

    def connected(self, connection: sqlite3.Connection) -> None:
        """Note a connection that has read. The first one has opened the log, or made it."""
        if not self._connections:
            self.note_sides()
        self._connections.add(id(connection))

    def disconnected(self, connection: sqlite3.Connection) -> None:
        """Forget a connection. SQLite removes the log with the last one."""
        self._connections.discard(id(connection))

    def note_sides(self) -> None:
        """Note which files the log and its index are. None without a name: a journal that is no log has neither."""
        with self._lock:
            self._sides = self._sides_now()
            self._open_counter()

    def _open_counter(self) -> None:
        if self._counter is not None and _identity(self._counter[1]) != self._sides[1]:  # of earlier connections
            os.close(self._counter[0])
            self._counter = self._seen = None
        if self._counter is None and self._sides[1] is not None and sys.platform != "win32":  # it is locked there
            with contextlib.suppress(OSError):  # it was removed this moment, which `check` notices
                index = os.open(self._index, os.O_RDONLY | NOLINK)
                self._counter = index, os.fstat(index)

    def _sides_now(self) -> tuple[tuple[int, int] | None, ...]:
        return tuple(map(self._named, (self._log, self._index)))

    def _named(self, side: str) -> tuple[int, int] | None:
        try:
            return _identity(os.stat(side))
        except FileNotFoundError:
            return None
        except OSError as err:
            raise unusable_store(self._file, err) from err

    def read(self, at: int, nbytes: int) -> bytes:
        """Read bytes of the file from offset `at`. For one thread at a time: the holder of the write lock."""
        with self._lock:
            if self._descriptor is None:  # the engine was disposed of, and is used again
                self._descriptor = os.open(self._file, os.O_RDONLY | NOLINK)
            return read_at(self._descriptor, at, nbytes)

    def leave(self) -> None:
        """Empty the log of a file that was written over: SQLite would else move it into that file, and ruin it."""
        with contextlib.suppress(StoreError):
            self.look()
        with contextlib.suppress(StoreError, OSError):
            if self._overwritten and self._named(self._log) == self._sides[0]:
                os.truncate(self._log, 0)

    def close(self) -> None:
        """Close the descriptors if all connections are closed. Idempotent."""
        with self._lock:
            if self._connections:  # of a thread that still reads, while the process ends
                return
            for descriptor in (self._descriptor, None if self._counter is None else self._counter[0]):
                if descriptor is not None:
                    os.close(descriptor)
            self._descriptor = self._counter = self._seen = None


def _identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


def open_database(data_dir: Path, *, busy_ms: int) -> Engine:
    """Open an engine over `data_dir`'s database. Creates a missing one. Raises StoreError; makes no tables.

    If the file system has no memory that processes share, this process uses the database alone.
    """
    try:
        return _open(data_dir, busy_ms, alone=False)
    except NoSharedMemory:
        if sys.platform == "win32":
            raise
        said = "session store %s: its file system has no memory that processes share, so this process uses it alone"
        log.info(said, data_dir / FILE)
        return _open(data_dir, busy_ms, alone=True)


def _open(data_dir: Path, busy_ms: int, *, alone: bool) -> Engine:
    """Open an engine. alone: SQLite locks out all other processes, and keeps its index of the log in its own memory."""
    file = data_dir / FILE
    try:
        opened = _OpenFile(file, _prepare(data_dir, file))
    except OSError as err:
        if err.errno == errno.EROFS:
            raise read_only_disk(file) from err
        raise StoreError(f"cannot use {file} for sessions: {err.strerror}; check that you may write there") from err
    engine = create_engine(
        URL.create("sqlite", database=str(file)),
        creator=lambda: sqlite3.connect(
            place(file, alone), uri=alone, timeout=busy_ms / 1000, check_same_thread=False, factory=_Connection
        ),
        execution_options={"ssmd_file": opened, "ssmd_alone": alone},
        pool_size=_POOLED,
        max_overflow=-1,  # threads bound them: one that plans a request holds a connection while it tokenizes
    )
    event.listen(engine, "connect", lambda connection, _: opened.check())
    event.listen(engine, "connect", _on_connect)
    event.listen(engine, "connect", lambda connection, _: opened.connected(connection))
    event.listen(engine, "close", lambda connection, _: opened.disconnected(connection))
    event.listen(engine, "engine_disposed", lambda _: opened.close())
    event.listen(engine, "begin", _on_begin)
    event.listen(engine, "commit", _on_commit)
    event.listen(engine, "reset", _on_reset)
    try:
        with errors(file):
            _create(engine, busy_ms)
        if alone:  # of the attempt to share it: no process uses that file now
            with contextlib.suppress(OSError):
                file.with_name(f"{file.name}-shm").unlink()
        with errors(file), _bare(engine) as cursor:
            cursor.execute(_READ).fetchall()  # a new file has its log only now
            opened.note_sides()
    except StoreLocked as err:
        engine.dispose()
        raise held_alone(err, file) from err
    except BaseException:
        engine.dispose()
        raise
    return engine


def is_alone(engine: Engine) -> bool:
    """Return True if all connections to an engine's file must use `place` with `alone`."""
    return bool(engine.get_execution_options()["ssmd_alone"])


def place(file: Path, alone: bool) -> str:
    """Return the path of a file, or if this process uses it alone the URI, by which SQLite opens it."""
    return f"{file.absolute().as_uri()}?vfs=unix-excl" if alone else str(file)


@contextlib.contextmanager
def reading(engine: Engine, file: Path) -> Iterator[Connection]:
    """Open a read transaction: one consistent view of everything."""
    with errors(file), engine.connect() as connection, connection.begin():
        yield connection


@contextlib.contextmanager
def writing(engine: Engine, file: Path) -> Iterator[Connection]:
    """Open a write transaction, all or nothing. It takes the write lock first, so that its reads stay true.

    Threads of this process wait for one another for WRITER_PATIENCE_S. SQLite's own wait is for other processes.
    """
    try:
        with _writer(engine, file), errors(file), _transaction(engine) as connection:
            yield connection
        _open_file(engine).note_content()  # a commit that found a long log has moved it
    except DiskFull:  # the failed rows stand in the log, and others need the space
        with contextlib.suppress(StoreError):
            shorten_log(engine, file)
        raise


@contextlib.contextmanager
def _transaction(engine: Engine) -> Iterator[Connection]:
    """Begin a write transaction, on a connection that can write.

    While a file system is read-only SQLite opens the file for reading, and such a connection never writes, also later.
    It leaves the pool, and another takes its place.
    """
    for others in reversed(range(_POOLED + 1)):
        with engine.connect() as connection:
            connection = connection.execution_options(ssmd_write=True)
            with connection.begin() as transaction:
                if _can_write(connection) or not others:  # of a disk that still is read-only the write itself fails
                    yield connection
                    return
                transaction.rollback()
            connection.invalidate()


def _can_write(connection: Connection) -> bool:
    """Return True if a connection can write. It is tried once: a transaction begins on one that only reads, too."""
    if "ssmd_writes" not in connection.info:
        try:
            connection.exec_driver_sql("DELETE FROM turn WHERE 0")
        except DBAPIError as err:  # of another error, as that no table was made yet, the write itself says more
            if getattr(err.orig, "sqlite_errorcode", 0) == sqlite3.SQLITE_READONLY:
                return False
        connection.info["ssmd_writes"] = True
    return True


@contextlib.contextmanager
def _writer(engine: Engine, file: Path) -> Iterator[None]:
    lock = _open_file(engine).writer
    if not lock.acquire(timeout=WRITER_PATIENCE_S):
        raise StoreLocked(
            f"session store {file}: another request has been writing for {WRITER_PATIENCE_S:.0f} s; try again when it "
            "is done"
        )
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def sparing(engine: Engine, file: Path) -> Iterator[Connection]:
    """Open a write transaction for removals on a full disk: it writes next to nothing. `shrink` comes next.

    It does not overwrite what it frees. So it owes the erasing, which giving the space back does.
    """
    with writing(engine, file) as connection:
        connection.exec_driver_sql("PRAGMA secure_delete=FAST")
        try:
            erasure.owe(connection)
            yield connection
        finally:
            connection.exec_driver_sql("PRAGMA secure_delete=ON")


def check_file(engine: Engine) -> None:
    """Check that the open file still has its name. Raises ReplacedFile, or StoreError if it cannot be examined."""
    _open_file(engine).look()


def close(engine: Engine) -> None:
    """Close all connections, and the file."""
    _open_file(engine).leave()
    engine.dispose()


def settle(engine: Engine, file: Path, *, idle: bool) -> None:
    """Move the log into the file. After a removal, also erase its leftovers and give the space back to the disk.

    Another process that reads or writes can prevent this. That is not an error: the next call does it.
    """
    with errors(file), _bare(engine) as cursor:
        if erasure.is_owed(cursor):
            erasure.erase(cursor, file, _open_file(engine).read, idle=idle)
            return
        _check_growth(cursor, file)
        ((busy, pages, moved),) = cursor.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
        if idle and not busy and pages == moved > 1:
            _begin_log(cursor)


def _begin_log(cursor: Any) -> None:
    """Begin a log that was moved whole anew, with one page. Else the next commit has to make its header durable first.

    Does nothing while another process writes, which begins it, or on a full disk.
    """
    (busy_ms,) = cursor.execute("PRAGMA busy_timeout").fetchone()
    cursor.execute("PRAGMA busy_timeout=0").fetchall()
    try:
        cursor.execute(f"PRAGMA application_id={APPLICATION_ID}")  # the value that it has
    except sqlite3.OperationalError as err:
        if err.sqlite_errorcode & 0xFF not in erasure.NOT_NOW:
            raise
    finally:
        cursor.execute(f"PRAGMA busy_timeout={busy_ms}").fetchall()


def move_log(engine: Engine, file: Path) -> int:
    """Move the log into the file, as far as other processes permit.

    Returns the bytes of the log that the next commits can use; 0 while a part of it is not moved.
    """
    with errors(file), _bare(engine) as cursor:
        _check_growth(cursor, file)
        ((busy, pages, moved),) = cursor.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
        log = file.with_name(f"{file.name}-wal")
        return log.stat().st_size if not busy and pages == moved and log.exists() else 0


def give_back(engine: Engine, file: Path) -> None:
    """Give free pages and the log's bytes back to the disk, as far as other processes permit."""
    with errors(file), _bare(engine) as cursor:
        erasure.empty_log(cursor, file)


def shorten_log(engine: Engine, file: Path) -> bool:
    """Move the log into the file and give its bytes back to the disk; False if readers prevent it."""
    with errors(file), _bare(engine) as cursor:
        return erasure.truncate_log(cursor, file, idle=True)


def _check_growth(cursor: Any, file: Path) -> None:
    """Raise DiskFull if the log does not fit into the file. A partial move would keep its space from all processes."""
    if not erasure.log_fits(cursor, file):
        raise disk_full(file)


def shrink(engine: Engine, file: Path) -> None:
    """Give free pages back to the disk a few at a time, so that the log stays short, as far as others permit."""
    with errors(file), _bare(engine) as cursor:
        left = -1
        while erasure.truncate_log(cursor, file):
            before, (left,) = left, cursor.execute("PRAGMA freelist_count").fetchone()
            if left in (0, before):
                break
            cursor.executescript(f"PRAGMA incremental_vacuum({_PAGES_AT_ONCE})")


def free_bytes(connection: Connection) -> int:
    """Count the free bytes of the file, which the next rows take."""
    return int(connection.exec_driver_sql("PRAGMA freelist_count").scalar_one()) * PAGE_BYTES


def _prepare(data_dir: Path, file: Path) -> int:
    """Make the directory (0700) and the file (0600), and return the file's descriptor.

    SQLite gives its side files the mode of the file.
    """
    make_private(data_dir)
    ours = file.exists() or next(data_dir.iterdir(), None) is None
    if ours and others_open(data_dir):
        close_to_others(data_dir)
    # NOLINK: a link planted in a shared directory must not redirect where conversations are written.
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | NOLINK, 0o600)
    try:
        if stat.S_IMODE(os.fstat(descriptor).st_mode) & 0o077:
            file.chmod(0o600)
        head = os.read(descriptor, len(_HEADER))
        if head and head != _HEADER:
            raise StoreError(f"{file} is not a database; move it away to start with an empty one")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _create(engine: Engine, busy_ms: int) -> None:
    with _bare(engine) as cursor:
        (application,) = cursor.execute("PRAGMA application_id").fetchone()
        (objects,) = cursor.execute("SELECT count(*) FROM sqlite_master").fetchone()
        # If the creation of our file was interrupted, it has no id yet, and is empty.
        if application != APPLICATION_ID and (application or objects):
            raise StoreError(
                f"{engine.url.database} is another program's database; give ssmd a data directory of its own"
            )
        if cursor.execute("PRAGMA journal_mode").fetchone() == ("wal",):
            return
        # Order matters: the first write, which is the change to WAL, fixes page size and auto_vacuum.
        cursor.execute(f"PRAGMA page_size={PAGE_BYTES}")
        cursor.execute("PRAGMA auto_vacuum=INCREMENTAL")
        cursor.execute(f"PRAGMA application_id={APPLICATION_ID}")
        # The change to WAL needs the file for itself, and does not wait for another process that makes it too.
        deadline = time.monotonic() + busy_ms / 1000
        while True:
            try:
                if cursor.execute("PRAGMA journal_mode=WAL").fetchone() != ("wal",):
                    raise NoSharedMemory(no_shared_memory(Path(str(engine.url.database))))
                cursor.execute("SELECT count(*) FROM sqlite_master").fetchone()  # the first read maps the log's index
                return
            except sqlite3.OperationalError as err:
                if err.sqlite_errorcode in SHARING or time.monotonic() > deadline:
                    raise
                time.sleep(0.01)


@contextlib.contextmanager
def _bare(engine: Engine) -> Iterator[Any]:
    """Open a cursor outside any transaction, for statements that cannot run inside one.

    Raises ReplacedFile, and StoreError if the file cannot be examined meanwhile.
    """
    _open_file(engine).check()
    connection = engine.raw_connection()
    try:
        cursor = connection.cursor()
        try:
            yield cursor
            _open_file(engine).note_content()
        finally:
            cursor.close()
    except OSError as err:
        raise unusable_store(Path(str(engine.url.database)), err) from err
    finally:
        connection.close()


def _open_file(engine: Engine) -> _OpenFile:
    opened = engine.get_execution_options()["ssmd_file"]
    assert isinstance(opened, _OpenFile)
    return opened


def _on_connect(connection: sqlite3.Connection, _: ConnectionPoolEntry) -> None:
    connection.isolation_level = None  # only _on_begin begins transactions
    connection.text_factory = _as_it_is
    for setting in (
        "foreign_keys=ON",
        "synchronous=FULL",
        "secure_delete=ON",
        f"wal_autocheckpoint={_LOG_PAGES}",
        "trusted_schema=OFF",
        "cell_size_check=ON",
    ):
        connection.execute(f"PRAGMA {setting}")
    connection.execute(_READ).fetchall()  # the first read opens the log


def _as_it_is(data: bytes) -> str:
    """Decode text, also invalid UTF-8, so that one altered row does not hide the others."""
    return data.decode("utf-8", "surrogateescape")


def _on_begin(connection: Connection) -> None:
    options = connection.get_execution_options()
    write = options.get("ssmd_write", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")
    if write:  # the first row that is written may begin the log anew
        options["ssmd_file"].check_content()


def _on_commit(connection: Connection) -> None:
    options = connection.get_execution_options()
    if options.get("ssmd_write", False):
        options["ssmd_file"].check(written=True)


def _on_reset(connection: _Connection, _: ConnectionPoolEntry, __: PoolResetState) -> None:
    """Close the statements of a connection that goes back to the pool.

    An open statement outlives the transaction. The next user of the connection would then read an old snapshot, without
    the turns committed since. If one cannot be closed, the pool discards the connection.
    """
    for cursor in tuple(connection.cursors):
        cursor.close()
