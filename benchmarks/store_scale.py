"""A store with many sessions: how long it takes to list them, to match a long prompt, and to commit a turn.

    python benchmarks/store_scale.py [--sessions 10000] [--turns 20] [--forks 1000] [--lists MODEL | --plan MODEL]
    python benchmarks/store_scale.py --owners 20 --turns 3

Fills a store in a temporary folder: one session is committed turn by turn, the others are copies of its rows under ids,
keys and hashes of their own; checkpoints are tiny, but as many rows as real ones. Medians, ms.

With --lists only pages, searches and looks are measured, then commands, and a daemon that serves MODEL, a folder.
With --plan all sessions are of one agent, and begin with the same system prompt of BEGINNING tokens or a tenth of them.
The planning of requests is measured with MODEL, a folder whose context must hold that: ms of processor time.
With --owners only commits that make room are measured, of one owner and of so many, in ms of processor time and
instructions of SQLite's machine. The owner that writes used its sessions last: the search passes all the others.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from daemon_process import SSMD, DaemonProcess, conditions
from engine.test_engine import ask
from engines import OwnEngine
from keeping import HYBRID, Chat, answer, find, user
from sqlalchemy import Connection, event

from ssmd.engine.request import Request
from ssmd.model.artifact import Artifact
from ssmd.runtime.protocol import get_runtime
from ssmd.sessions.rows.turns import seal
from ssmd.sessions.store import Store
from ssmd.sessions.turn import conversation
from ssmd.text.messages import Message

REPEATS = 21
TICK = 10  # instructions of SQLite's machine that are counted at once
BEGINNING = 20_000  # tokens
SPREAD = 400  # tokens by which the same turns of two sessions may lie apart


def fill(store: Store, sessions: int, turns: int) -> None:
    """The rows of session `s`, again and again. Raw SQL: by commits it would take most of an hour."""
    chat = Chat(store, "s", HYBRID)
    for i in range(turns):
        chat.say(f"t{i}", f"t{i - 1}" if i else None, f"question {i}", "yes", tokens=40)
    with closing(sqlite3.connect(store.file, isolation_level=None)) as raw:
        raw.executescript("PRAGMA synchronous=OFF; PRAGMA cache_size=-400000; PRAGMA wal_autocheckpoint=20000")
        rows = {t: raw.execute(f"SELECT * FROM {t}").fetchall() for t in TABLES}
        columns = {t: [c[1] for c in raw.execute(f"PRAGMA table_info({t})")] for t in TABLES}
        step = {t: max(int(r[0]) for r in rows[t]) for t in ("checkpoint", "segment")}
        for start in range(1, sessions, 250):
            raw.execute("BEGIN")
            for number in range(start, min(start + 250, sessions)):
                for table in TABLES:
                    names = columns[table]
                    copies = [_copy(dict(zip(names, row, strict=True)), table, number, step) for row in rows[table]]
                    places = ", ".join(f":{n}" for n in names)
                    raw.executemany(f"INSERT INTO {table} VALUES ({places})", copies)
            raw.execute("COMMIT")
        raw.execute(f"UPDATE total SET nbytes = nbytes * {sessions}")


TABLES = ("session", "turn", "checkpoint", "piece", "segment", "checkpoint_segment", "turn_checkpoint")


def _copy(row: dict[str, Any], table: str, number: int, step: dict[str, int]) -> dict[str, Any]:
    def moved(name: str, kind: str) -> None:
        if row.get(name) is not None:
            row[name] += step[kind] * number

    if table == "session":
        row |= {"id": f"s{number}", "head": f"{row['head']}-{number}", "last_used_at": row["last_used_at"] + number}
    elif table == "turn":
        row |= {"seq": None, "id": f"{row['id']}-{number}", "session": f"s{number}", "chain": secrets.token_bytes(32)}
        row |= {n: None if row[n] is None else f"{row[n]}-{number}" for n in ("parent", "stem", "root")}
        row["checksum"] = seal(row)
    elif table == "checkpoint":
        row |= {"key": secrets.token_bytes(32), "anchor": secrets.token_bytes(32)}
        moved("id", "checkpoint")
        moved("parent", "checkpoint")
    elif table == "segment":
        moved("id", "segment")
    else:
        moved("checkpoint", "checkpoint")
        moved("segment", "segment")
        if "turn" in row:
            row["turn"] = f"{row['turn']}-{number}"
    return row


def median_ms(work: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    times = []
    for _ in range(REPEATS):
        started = clock()
        work()
        times.append((clock() - started) * 1e3)
    return statistics.median(times)


def measure(store: Store, forks: int) -> None:
    print(f"list of the 100 used last      {median_ms(lambda: store.sessions(100)):8.2f}")
    print(f"list of all sessions           {median_ms(store.sessions):8.2f}")
    chat = Chat(store, "long", HYBRID)
    for i in range(50):
        chat.say(f"long{i}", f"long{i - 1}" if i else None, f"a long question {i}", f"reply {i}", tokens=20)
    messages = [*conversation(list(chat.turns.values())), user("and then?")]
    ids = [*chat.turns["long49"].ids.own.tolist(), 7, 7]

    def matched() -> None:
        with store.snapshot() as stored:
            echoed = stored.echoed(messages)
        assert echoed is not None
        assert echoed.turn == "long49"

    print(f"match of {len(messages):4} messages         {median_ms(matched):8.2f}")
    for i in range(forks):  # every second one begins as the prompt does
        session, turn = ("long", f"long{i % 50}") if i % 2 else ("s", f"t{i % len(store.turns('s'))}")
        store.fork(session, turn)
    if forks:
        print(f"the list with {forks} forks more  {median_ms(store.sessions):8.2f}")
        print(f"the match with these forks     {median_ms(matched):8.2f}")

    def found() -> None:
        at = find(store, chat.scope, ids, "long")
        assert at is not None
        assert at.position == len(ids) - 3

    print(f"the ids of its {len(chat.turns)} turns        {median_ms(lambda: store.path('long49')):8.2f}")
    print(f"the checkpoint to go on from   {median_ms(found):8.2f}")
    print(f"one session                    {median_ms(lambda: store.session('long')):8.2f}")
    print(f"bytes stored                   {median_ms(store.bytes_stored):8.2f}")
    numbers = iter(range(10**6))

    def commit() -> None:
        i = next(numbers)
        one = replace(chat.info, id=f"new{i}")
        new, checkpoints = Chat(store, one.id, HYBRID).make(f"new{i}", None, [user(f"new {i}")], "yes")
        store.commit([new], [chat.encode(c) for c in checkpoints], session=one)

    print(f"commit, no quota               {median_ms(commit):8.2f}")
    store.quota = store.bytes_stored() * 2
    print(f"commit, far below the quota    {median_ms(commit):8.2f}")
    store.quota = store.bytes_stored()
    print(f"commit, at the quota, thinning {median_ms(commit):8.2f}")
    started = time.perf_counter()
    done = store.collect(store.bytes_stored() // 2)
    took = time.perf_counter() - started
    print(f"gc to one half: {done.checkpoints} checkpoints of {len(done.sessions)} sessions in {took:.1f} s")
    store.quota = store.bytes_stored()
    print(f"commit, at the quota, emptying {median_ms(commit):8.2f}")


def measure_owners(store: Store, owners: int, sessions: int) -> None:
    """Measure commits that empty a session, by one owner and by the last of several with equally many sessions."""
    ticks = 0

    def tick() -> int:
        nonlocal ticks
        ticks += 1
        return 0

    def count(connection: Connection) -> None:
        raw: Any = connection.connection.dbapi_connection
        raw.set_progress_handler(tick, TICK)

    event.listen(store._engine, "begin", count)
    print("| owners | CPU ms | instructions | the first, CPU ms |\n| --- | --- | --- | --- |")
    for many in (1, owners):
        with store.writing() as connection:
            connection.exec_driver_sql("UPDATE session SET retained = 1")  # else the first commit thins out for all
            last = connection.exec_driver_sql("SELECT max(id) FROM checkpoint").scalar_one()
            for table, place in (("session", f"rowid * {many} / {sessions}"), ("checkpoint", f"id * {many} / {last}")):
                connection.exec_driver_sql(f"UPDATE {table} SET owner = printf('key%03d', min({place}, {many - 1}))")
            # Its very first session has nothing to give, so that the search for the next one passes all others.
            connection.exec_driver_sql(f"UPDATE session SET owner = 'key{many - 1:03d}', retained = 2 WHERE id = 's'")
        ms, counts = [], []
        for i in range(REPEATS + 1):
            store.quota = store.bytes_stored()
            chat = Chat(store, f"{many}-{i}", HYBRID, owner=f"key{many - 1:03d}")
            begun, ticks = time.process_time(), 0
            chat.say(f"{many}-{i}", None, f"new {many} {i}", "yes")
            ms.append((time.process_time() - begun) * 1e3)
            counts.append(ticks * TICK)
        usual = statistics.median(ms[1:]), statistics.median(counts[1:])
        print(f"| {many} | {usual[0]:.1f} | {usual[1]:,.0f} | {ms[0]:.0f} |", flush=True)


def measure_lists(store: Store) -> None:
    """Measure pages and looks within the store: ms of processor time, so that a busy machine tells the same."""
    ids = store.ids()
    print("| in the store | CPU ms |\n| --- | --- |")
    for name, work in {
        "the 100 used last": lambda: store.sessions(101),
        "a page in the middle": lambda: store.sessions(101, ids[len(ids) // 2]),
        "the last page": lambda: store.sessions(101, ids[-102]),
        "a search that finds 100": lambda: store.search("question", 100),
        "a search that finds nothing, of 0.5 s": lambda: store.search("nowhere", 100, within_s=0.5),
        "ids that begin as one does": lambda: store.ids(ids[9][:-1]),
        "one session": lambda: store.session(ids[-1]),
        "counts, for /metrics": store.count,
        "match of a prompt": lambda: match(store),
        "look for sessions to be counted, when idle": store.settle,
        "look for states without a turn, when idle": store.sweep,
        "a fork": lambda: store.fork(ids[5]),
        "room for one state": lambda: store.collect(store.bytes_stored() - 1),
    }.items():
        print(f"| {name} | {median_ms(work, time.process_time):.1f} |")


def measure_plans(model: Path, sessions: int, turns: int, tokens: int, data_dir: Path) -> None:
    """Print the time that a plan takes beside so many sessions, and beside one."""
    artifact = Artifact.open(model)
    program = get_runtime("litert").load(artifact, threads=1)
    store = Store.open(data_dir, busy_ms=60_000)
    engine = OwnEngine(artifact, program, store, "24h")
    engine.start()
    system = Message("system", "keep the light " * (tokens // 3))
    kept: dict[bool, tuple[Message, ...]] = {}
    for stored in (True, False):
        talk: tuple[Message, ...] = (system, user(f"a first question, stored {stored}"))
        for n in range(turns):
            said = ask(engine, *talk, store=stored, max_tokens=8).text
            talk = (*talk, answer(said), user(f"question {n}"))
        kept[stored] = talk
    assert engine.writer is not None
    engine.writer.flush()
    alone = _plans(engine, system, kept)
    engine.shutdown(0)
    spread(store, sessions, turns)
    engine = OwnEngine(artifact, program, store, "24h")
    engine.start()
    many = _plans(engine, system, kept)
    engine.shutdown(0)
    store.close()
    for name, (ms, length, found) in many.items():
        print(f"| {name} | {length:,} | {found:,} | {alone[name][0]:.1f} | {ms:.1f} |", flush=True)


def _plans(
    engine: OwnEngine, system: Message, kept: dict[bool, tuple[Message, ...]]
) -> dict[str, tuple[float, int, int]]:
    """Return (ms, tokens of the prompt, tokens of the state that it starts from) of each kind of request."""
    planned = {}
    for name, request in {
        "next turn": Request(kept[True]),
        "next turn, `store: false`": Request(kept[False], store=False),
        "new session": Request((system, user("another question"))),
        "new session, `store: false`": Request((system, user("another question")), store=False),
        "edit of the first question": Request((system, user("an edit"), *kept[True][2:])),
    }.items():
        made = engine._planner.plan(request)
        ms = median_ms(lambda asked=request: engine._planner.plan(asked), time.thread_time)  # type: ignore[misc]
        planned[name] = ms, len(made.ids), 0 if made.found is None else made.found.position
    return planned


def spread(store: Store, sessions: int, turns: int) -> None:
    """Copy the rows of the stored session, without states. The copies share its beginning, and so its anchors.

    Their turns have other lengths: their states lie up to SPREAD tokens further on.
    """
    drawn = random.Random(0)
    with closing(sqlite3.connect(store.file, isolation_level=None)) as raw:
        raw.executescript("PRAGMA synchronous=OFF; PRAGMA cache_size=-400000; PRAGMA wal_autocheckpoint=20000")
        raw.row_factory = sqlite3.Row
        one = dict(raw.execute("SELECT * FROM session").fetchone())
        path = [dict(r) for r in raw.execute("SELECT * FROM turn ORDER BY seq")]
        ends = [dict(r) for r in raw.execute("SELECT * FROM checkpoint WHERE kind NOT LIKE 'sealed%' ORDER BY id")]
        links = [dict(r) for r in raw.execute("SELECT * FROM turn_checkpoint")]
        step = max(int(row["id"]) for row in raw.execute("SELECT id FROM checkpoint"))
        first = min(row["position"] for row in ends if row["kind"] in ("turn", "user"))
        for start in range(1, sessions, 250):
            raw.execute("BEGIN")
            for number in range(start, min(start + 250, sessions)):
                _insert(raw, "session", _copy(dict(one), "session", number, {}) | {"root": f"{path[0]['id']}-{number}"})
                for row in path:
                    _insert(raw, "turn", _copy(dict(row), "turn", number, {}) | {"session": f"s{number}"})
                more = drawn.randrange(SPREAD)
                own = {row["id"] for row in ends if row["position"] >= first}  # the others are of the beginning
                for row in ends:
                    if row["id"] in own:
                        copy = row | {"id": row["id"] + step * number, "key": secrets.token_bytes(32), "parent": None}
                        _insert(raw, "checkpoint", copy | {"position": row["position"] + more})
                for link in links:
                    if link["checkpoint"] in own:
                        moved = {"turn": f"{link['turn']}-{number}", "checkpoint": link["checkpoint"] + step * number}
                        _insert(raw, "turn_checkpoint", moved)
            raw.execute("COMMIT")


def _insert(raw: sqlite3.Connection, table: str, row: dict[str, Any]) -> None:
    raw.execute(f"INSERT INTO {table} ({', '.join(row)}) VALUES ({', '.join(f':{n}' for n in row)})", row)


def match(store: Store) -> None:
    with store.snapshot() as stored:
        assert stored.echoed([user("question 0"), answer("yes"), user("and then?")]) is not None


def measure_commands(data_dir: Path, one: str) -> None:
    """Measure commands: processor time, and most memory."""
    print("\n| command | CPU s | MiB | output, MB |\n| --- | --- | --- | --- |")
    for words in (
        *(["session", "list"], ["session", "list", "--all"], ["session", "list", "--json"]),
        *(["session", "list", "--search", "nowhere"], ["session", "show", one[:-1]], ["session", "tree", one]),
        *(["session", "gc", "--dry-run"], ["session", "check"], ["session", "rm", one]),
    ):
        with tempfile.TemporaryFile() as out:
            env = {**os.environ, "SSMD_DATA_DIR": str(data_dir)}
            process = subprocess.Popen([*SSMD, *words], env=env, stdout=out, stderr=out)
            _, status, used = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            seconds, size = used.ru_utime + used.ru_stime, os.fstat(out.fileno()).st_size
        shown = " ".join(words).replace(one, "ID")
        print(f"| {shown} | {seconds:.1f} | {used.ru_maxrss >> 10} | {size / 1e6:.2f} |", flush=True)


def measure_daemon(model: Path, data_dir: Path, middle: str) -> None:
    """Measure a daemon's start and its answers: processor time of its process."""
    print("\n| the daemon | CPU ms |\n| --- | --- |")
    with tempfile.TemporaryDirectory() as empty, DaemonProcess(model, Path(empty) / "data") as daemon:
        print(f"| start, with an empty store | {_cpu_ms(daemon):.0f} |")
    with DaemonProcess(model, data_dir) as daemon:
        print(f"| start | {_cpu_ms(daemon):.0f} |")
        page = "/ssmd/v1/sessions?limit=100"
        for path in ("/health", "/metrics", page, f"{page}&after={middle}", f"{page}&search=question"):
            size = len(json.dumps(daemon.get(path)[1]))
            before = _cpu_ms(daemon)
            for _ in range(REPEATS):
                daemon.get(path)
            took = (_cpu_ms(daemon) - before) / REPEATS
            print(f"| GET {path.replace(middle, 'MIDDLE')} ({size / 1e3:.1f} kB) | {took:.1f} |")
        before = _cpu_ms(daemon)
        for number in range(REPEATS):
            daemon.chat([{"role": "user", "content": f"Hello {number}"}], max_tokens=2)
        print(f"| a chat of two tokens | {(_cpu_ms(daemon) - before) / REPEATS:.1f} |")
        print(f"\nresident memory: {sum(daemon.resident_mb()):.0f} MB")


def _cpu_ms(daemon: DaemonProcess) -> float:
    assert daemon.process is not None
    fields = Path(f"/proc/{daemon.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * 1e3 / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lists", type=Path, metavar="MODEL")
    parser.add_argument("--plan", type=Path, metavar="MODEL")
    parser.add_argument("--owners", type=int)
    parser.add_argument("--sessions", type=int, default=10_000)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--forks", type=int, default=1000)
    asked = parser.parse_args()
    if asked.plan is not None:
        print(f"{asked.sessions} sessions of {asked.turns} turns; medians of {REPEATS}; {conditions()}\n")
        print("| request | prompt | state at | ms beside one session | beside all |\n| --- | --- | --- | --- | --- |")
        for tokens in (BEGINNING // 10, BEGINNING):
            with tempfile.TemporaryDirectory() as folder:
                measure_plans(asked.plan, asked.sessions, asked.turns, tokens, Path(folder))
        return
    with tempfile.TemporaryDirectory() as folder:
        store = Store.open(Path(folder), busy_ms=60_000)
        started = time.perf_counter()
        fill(store, asked.sessions, asked.turns)
        store.settle()
        took, size = time.perf_counter() - started, store.file.stat().st_size
        print(f"{asked.sessions} sessions of {asked.turns} turns, {size / 1e6:.0f} MB, filled in {took:.0f} s")
        print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; medians of {REPEATS}, ms")
        if asked.owners is not None:
            measure_owners(store, asked.owners, asked.sessions)
            store.close()
            return
        if asked.lists is None:
            measure(store, asked.forks)
            store.close()
            return
        measure_lists(store)
        ids = store.ids()
        store.close()
        measure_daemon(asked.lists, Path(folder), ids[len(ids) // 2])
        measure_commands(Path(folder), ids[7])


if __name__ == "__main__":
    main()
