"""Random damage to a database, as by a bad disk or an attacker: its pages, its rows and its log."""

from __future__ import annotations

import contextlib
import random
import shutil
import sqlite3
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ssmd.sessions.rows.database import FILE, PAGE_BYTES

PAGE, BLOCK = PAGE_BYTES, 512
# Values that a column gets. `{}` is its name.
VALUES = (
    *("NULL", "''", "x''", "0", "-1", "1", "1000000", "1 << 62", "9e99", "'text'", "x'ff00'", "CAST(x'ff' AS TEXT)"),
    *("zeroblob(length({}))", "substr({}, 2)", "{} + 1", "{} || {}", "CAST({} AS TEXT)", "CAST({} AS BLOB)"),
    *("hex({})", "'../../x'", "char(0)", "randomblob(32)", "'[]'", "'null'", "-(1 << 62)", "0.5"),
)


@dataclass(frozen=True)
class Stores:
    """Data directories to damage and to take foreign parts from. closed: as a daemon leaves it; killed: with its log.

    earlier: as `killed`, some turns before; other: of other conversations.
    """

    closed: Path
    killed: Path
    earlier: Path
    other: Path


@dataclass(frozen=True)
class Damaged:
    """kind: "pages", "rows" or "log". column: the one that was altered, if it was one."""

    kind: str
    what: str
    column: str = ""


def inflict(rng: random.Random, stores: Stores, folder: Path) -> Damaged:
    """Make `folder` a damaged copy of one of the stores."""
    while True:
        kind = rng.choices(["pages", "rows", "log"], [7, 8, 5])[0]
        origin = stores.killed if kind == "log" or rng.random() < 0.3 else stores.closed
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(origin, folder)
        if kind == "rows":
            done = _rows(rng, folder / FILE)
        else:
            file = folder / (f"{FILE}-wal" if kind == "log" else FILE)
            before = file.read_bytes()
            what = (_log if kind == "log" else _pages)(rng, stores, file)
            after = file.read_bytes() if file.exists() else b""
            done = Damaged(kind, f"{origin.name}: {what}") if after != before else None
        if done is not None:
            return done


def _pages(rng: random.Random, stores: Stores, file: Path) -> str:
    data = bytearray(file.read_bytes())
    pages = len(data) // PAGE
    page, other = rng.randrange(pages), rng.randrange(pages)
    here, there = slice(page * PAGE, page * PAGE + PAGE), slice(other * PAGE, other * PAGE + PAGE)
    at = rng.randrange(len(data) // BLOCK) * BLOCK

    def foreign(store: Path) -> None:
        found = (store / FILE).read_bytes()[here]
        data[here] = found.ljust(PAGE, b"\0")

    def swap() -> None:
        data[here], data[there] = data[there], data[here]

    def put(start: int, new: bytes) -> None:
        data[start : start + len(new)] = new

    def flip() -> None:
        for _ in range(rng.choice([1, 1, 8])):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)

    def cut() -> None:
        del data[rng.choice([page * PAGE, at, rng.randrange(len(data))]) :]

    ways: dict[str, Callable[[], None]] = {
        f"page {page} zeroed": lambda: put(page * PAGE, bytes(PAGE)),
        f"block at {at} zeroed": lambda: put(at, bytes(BLOCK)),
        f"block at {at} scrambled": lambda: put(at, rng.randbytes(BLOCK)),
        "bits flipped": flip,
        f"pages {page} and {other} swapped": swap,
        f"page {page} copied to {other}": lambda: put(other * PAGE, bytes(data[here])),
        "cut": cut,
        "longer": lambda: data.extend(rng.randbytes(rng.randrange(1, 3 * PAGE))),
        f"page {page} of an earlier moment": lambda: foreign(stores.earlier),
        f"page {page} of another store": lambda: foreign(stores.other),
        "header altered": lambda: put(rng.randrange(100), rng.randbytes(rng.choice([1, 2, 4]))),
    }
    what = rng.choice(list(ways))
    ways[what]()
    file.write_bytes(data)
    return what


def _log(rng: random.Random, stores: Stores, file: Path) -> str:
    data = bytearray(file.read_bytes())
    frame = 24 + PAGE
    number = rng.randrange((len(data) - 32) // frame)
    start = 32 + number * frame

    def flip() -> None:
        for _ in range(rng.choice([1, 1, 8])):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)

    def cut() -> None:
        del data[rng.choice([start, start + 24, rng.randrange(len(data))]) :]

    def foreign(store: Path) -> None:
        data[:] = (store / file.name).read_bytes()

    def renumber() -> None:
        data[start : start + 4] = struct.pack(">I", rng.choice([0, 1, 2, 3, 1 << 20, 1 << 31]))

    def drop() -> None:
        del data[start : start + frame]

    def swap() -> None:
        other = 32 + rng.randrange((len(data) - 32) // frame) * frame
        data[start : start + frame], data[other : other + frame] = (
            data[other : other + frame],
            data[start : start + frame],
        )

    def zero() -> None:
        data[start : start + frame] = bytes(frame)

    ways: dict[str, Callable[[], None]] = {
        "bits flipped": flip,
        "cut": cut,
        "that of an earlier moment": lambda: foreign(stores.earlier),
        "that of another store": lambda: foreign(stores.other),
        f"frame {number} of another page": renumber,
        f"frame {number} left out": drop,
        f"frame {number} and another swapped": swap,
        f"frame {number} zeroed": zero,
        "scrambled": lambda: data.__setitem__(slice(None), rng.randbytes(len(data))),
        "gone": data.clear,
        "twice": lambda: data.extend(data[32:]),
    }
    what = rng.choice(list(ways))
    ways[what]()
    if what == "gone":
        file.unlink()
    else:
        file.write_bytes(data)
    if rng.random() < 0.3:  # an index that is of no log
        file.with_name(f"{FILE}-shm").write_bytes(rng.randbytes(32768))
    return what


def _rows(rng: random.Random, file: Path) -> Damaged | None:
    with contextlib.closing(sqlite3.connect(file, isolation_level=None)) as raw:
        raw.execute("PRAGMA foreign_keys = OFF")
        raw.execute("PRAGMA ignore_check_constraints = ON")
        query = "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"
        tables = [name for (name,) in raw.execute(query)]
        table = rng.choice(tables)
        columns = [c[1] for c in raw.execute(f"PRAGMA table_info({table})")]
        column = rng.choice(columns)
        keys = [c[1] for c in raw.execute(f"PRAGMA table_info({table})") if c[5]] or ["rowid"]
        rows = raw.execute(f"SELECT {', '.join(keys)} FROM {table}").fetchall()
        if not rows:
            return None
        where = " AND ".join(f"{key} IS ?" for key in keys)
        some = rows if rng.random() < 0.2 else rng.sample(rows, min(len(rows), rng.choice([1, 1, 1, 2])))
        way = rng.choices(["set", "copy", "swap", "delete", "again"], [12, 3, 3, 3, 1])[0]
        changed = 0
        try:
            if way == "set":
                value = rng.choice(VALUES).format(column, column)
                way = f"{column} = {value}"
                for row in some:
                    with contextlib.suppress(sqlite3.Error):
                        changed += raw.execute(f"UPDATE {table} SET {column} = {value} WHERE {where}", row).rowcount
            elif way == "delete":
                column = ""
                for row in some:
                    changed += raw.execute(f"DELETE FROM {table} WHERE {where}", row).rowcount
            elif way == "again":
                others = [c for c in columns if c not in ("id", "seq")]
                names, column = ", ".join(others), ""
                changed = raw.execute(
                    f"INSERT INTO {table} ({names}) SELECT {names} FROM {table} WHERE {where}", some[0]
                ).rowcount
            else:
                changed = _exchange(raw, table, column, where, rng.choice(rows), rng.choice(rows), both=way == "swap")
        except sqlite3.Error:  # a unique index forbids it
            return None
        what = f"{table}.{column}: {way}, {len(some)} rows" if column else f"{table}: {way}, {len(some)} rows"
        return Damaged("rows", what, f"{table}.{column}" if column else table) if changed else None


def _exchange(
    raw: sqlite3.Connection, table: str, column: str, where: str, a: tuple[Any, ...], b: tuple[Any, ...], *, both: bool
) -> int:
    """Give row `b` the value of `a` in a column, and with `both` also the other way round."""
    [one], [other] = (raw.execute(f"SELECT {column} FROM {table} WHERE {where}", row).fetchone() for row in (a, b))
    if one == other:
        return 0
    put = f"UPDATE {table} SET {column} = ? WHERE {where}"
    raw.execute("BEGIN")
    if both:
        raw.execute(put, (None if isinstance(one, int) else b"\0" * 32, *a))
    changed = raw.execute(put, (one, *b)).rowcount
    if both:
        changed += raw.execute(put, (other, *a)).rowcount
    raw.execute("COMMIT")
    return changed
