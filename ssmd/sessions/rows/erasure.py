"""Erasure of removed text: until its bytes are in no page of the database file and in no frame of its log.

`secure_delete` zeroes a deleted row, and a freed page. But SQLite sometimes moves rows between pages to fill them
evenly. Then copies stay behind in the unused middle of a page, and deleting the row does not reach them. So the pages
of the tables with text are searched, and if one has a copy of anything the tables are written again.
"""

from __future__ import annotations

import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from sqlalchemy import Connection

TEXT_TABLES = ("session", "turn", "reply", "receipt")
PAGES_AT_ONCE = 2048  # pages rewritten in one go, 32 MiB: one to two seconds, in which nothing else can be written
IDLE_WAIT_MS = 200  # longest wait for readers when no request waits for the erasure
_LEAF, _INTERIOR = 0x0D, 0x05  # pages of a table's b-tree: https://www.sqlite.org/fileformat2.html#b_tree_pages
NOT_NOW = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_FULL)


def owe(connection: Connection) -> None:
    """Note in the file that an erasure is owed, in the transaction that removes text. Any process may then do it."""
    (owed,) = connection.exec_driver_sql("PRAGMA user_version").one()
    connection.exec_driver_sql(f"PRAGMA user_version={owed % 0x7FFFFFFF + 1}")


def is_owed(cursor: Any) -> bool:
    return bool(cursor.execute("PRAGMA user_version").fetchone()[0])


Read = Callable[[int, int], bytes]  # of (offset, bytes)


def erase(cursor: Any, file: Path, read: Read, *, idle: bool) -> None:
    """Do the owed erasure and give the space back to the disk. If another process prevents it, it stays owed.

    read: reads the file through a descriptor that stays open: closing one would drop this process's locks on the file.
    idle: no request waits, so that much text may be rewritten too. The cursor is outside of a transaction.
    """
    try:
        (owed,) = cursor.execute("PRAGMA user_version").fetchone()
        if not empty_log(cursor, file, idle=idle):
            return
        copied, pages = _look_through(cursor, read)
        if copied:
            if pages > PAGES_AT_ONCE and not idle:
                return
            _rewrite(cursor)
            if not empty_log(cursor, file, idle=idle):
                return
        cursor.execute("BEGIN IMMEDIATE")
        if cursor.execute("PRAGMA user_version").fetchone() == (owed,):  # nothing was removed meanwhile
            cursor.execute("PRAGMA user_version=0")
        cursor.execute("COMMIT")
    except sqlite3.OperationalError as err:
        if err.sqlite_errorcode & 0xFF not in NOT_NOW:
            raise
        if cursor.connection.in_transaction:
            cursor.execute("ROLLBACK")
        if err.sqlite_errorcode & 0xFF == sqlite3.SQLITE_FULL:  # the failed rows stand in the log
            truncate_log(cursor, file, idle=True)
    finally:
        if cursor.connection.in_transaction:
            cursor.execute("ROLLBACK")


def empty_log(cursor: Any, file: Path, *, idle: bool = False) -> bool:
    """Move the whole log into the file, and cut free pages off its end. Return False if other processes prevent it.

    It waits for them as long as the connection waits for a lock. If idle it waits only a moment, because the store's
    writer may be needed. SQLite's own wait for readers keeps the write lock meanwhile, so this tries again and again.
    """
    if not log_fits(cursor, file):  # the log would only grow
        return False
    cursor.executescript("PRAGMA incremental_vacuum")  # execute() would stop after the first page
    return truncate_log(cursor, file, idle=idle)


def log_fits(cursor: Any, file: Path) -> bool:
    """Return True if the disk has room for the pages that moving the log adds to the file."""
    pages, size = (cursor.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "page_size"))
    return bool(pages * size - file.stat().st_size <= shutil.disk_usage(file.parent).free)


def truncate_log(cursor: Any, file: Path, *, idle: bool = False) -> bool:
    """Move the whole log into the file, as `empty_log` does after it has given free pages back.

    Returns False too if it does not fit: a partial move would keep its space from all processes.
    """
    if not log_fits(cursor, file):
        return False
    (busy_ms,) = cursor.execute("PRAGMA busy_timeout").fetchone()
    deadline = time.monotonic() + (min(busy_ms, IDLE_WAIT_MS) if idle else busy_ms) / 1000
    cursor.execute("PRAGMA busy_timeout=0").fetchall()
    try:
        while True:
            ((busy, *_),) = cursor.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            if not busy or time.monotonic() >= deadline:
                return not busy
            time.sleep(0.01)
    finally:
        cursor.execute(f"PRAGMA busy_timeout={busy_ms}").fetchall()


def _look_through(cursor: Any, read: Read) -> tuple[bool, int]:
    """Search the pages of the text tables. Return (True if an unused middle holds data or is invalid, pages)."""
    (size,) = cursor.execute("PRAGMA page_size").fetchone()
    copied, pages = False, 0
    cursor.execute("BEGIN IMMEDIATE")  # no process changes a page meanwhile
    try:
        names = ",".join("?" * len(TEXT_TABLES))
        query = f"SELECT rootpage FROM sqlite_master WHERE type = 'table' AND name IN ({names})"  # noqa: S608 - only ?
        roots = [row[0] for row in cursor.execute(query, TEXT_TABLES)]
        for root in roots:
            for middle in _middles(read, root, size):
                copied, pages = copied or any(middle), pages + 1
    except (ValueError, IndexError):
        copied = True
    finally:
        cursor.execute("ROLLBACK")
    return copied, pages


def _middles(read: Read, root: int, size: int) -> Iterator[bytes]:
    """Yield the unused bytes between the cell pointers and the cells, for each page of a table."""
    waiting, seen = [root], set[int]()
    while waiting:
        number = waiting.pop()
        if number in seen:
            raise ValueError
        seen.add(number)
        page = read((number - 1) * size, size)
        head = {_LEAF: 8, _INTERIOR: 12}[page[0]] if page[0] in (_LEAF, _INTERIOR) else 0
        cells, first = int.from_bytes(page[3:5], "big"), int.from_bytes(page[5:7], "big") or 65536
        end = head + 2 * cells
        if not head or not end <= first <= size:
            raise ValueError
        yield page[end:first]
        if head == 12:
            places = [int.from_bytes(page[at : at + 2], "big") for at in range(head, end, 2)]
            waiting += [int.from_bytes(page[at : at + 4], "big") for at in (8, *places)]


def _rewrite(cursor: Any) -> None:
    """Write the tables with text again, row after row, so that no row is moved."""
    cursor.execute("PRAGMA foreign_keys=OFF")  # else emptying a table would remove the rows that refer to it
    try:
        cursor.execute("BEGIN IMMEDIATE")
        for table in TEXT_TABLES:
            cursor.execute(f"CREATE TABLE rewritten AS SELECT * FROM {table}")  # noqa: S608 - names of our own
            cursor.execute(f"DELETE FROM {table}")  # noqa: S608 - as above
            cursor.execute(f"INSERT INTO {table} SELECT * FROM rewritten")  # noqa: S608 - as above
            cursor.execute("DROP TABLE rewritten")
        cursor.execute("COMMIT")
    finally:
        if cursor.connection.in_transaction:
            cursor.execute("ROLLBACK")
        cursor.execute("PRAGMA foreign_keys=ON")
