"""The speed of a remote in PostgreSQL, in parts, each of which prints a table.

    benchmarks/remote_speed.py answers [--model NAME]

answers: TTFT and commit of a request. Four daemons take turns: without a remote, with one, with one that refuses
connections, and with one that is silent. outbox: s from a commit until the remote has its turn. known: ms of the
look-up of a conversation among 10 million turns. fleet: rows, bytes, requests and CPU a turn, behind PgBouncer.

The server is a real one, with its data in a temporary folder and fsync on. In `outbox` and `fleet` machines are stores
and links of the real code, without models, in one process. In `fleet` 1 conversation in 50 goes on elsewhere.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import http.client
import json
import os
import random
import secrets
import socket
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import numpy as np
from cluster import Cluster
from conftest import opened
from daemon_process import DaemonProcess, conditions
from keeping import BUILD, LINEAGE, PRODUCER, RECURRENT, VOCABULARY, Chat, new_store, user
from pooler import Pooler

from ssmd.sessions.checkpoint import Maker, Scope
from ssmd.sessions.remote.ends import RemoteReader
from ssmd.sessions.remote.link import Link
from ssmd.sessions.remote.postgres.postgres import PostgresRemote
from ssmd.sessions.remote.sharing import open_remote
from ssmd.sessions.turn import EVERYBODY
from ssmd.text.messages import Message

SERVER = ("fsync=on", "log_statement=none", "shared_buffers=1GB", "max_wal_size=4GB", "maintenance_work_mem=512MB")
BODY = 64  # bytes of a body in `known`
CHAINS = 8  # of a request that is looked up
ROAM = 50  # one turn in so many goes on at another machine
FIRST = 4  # requests that are not counted
PARAGRAPH = (
    "The river rises in the hills, turns to the south at the old bridge, and reaches the sea by the lighthouse. "
)


def percentiles(values: list[float], *which: float) -> list[float]:
    return [float(x) for x in np.percentile(np.array(values), which)]


def answers(name: str, requests: int) -> None:
    artifact = Path(name) if Path(name).is_dir() else opened()[name]
    with tempfile.TemporaryDirectory() as at, contextlib.ExitStack() as held:
        on, gone = Cluster(*SERVER), Cluster(*SERVER)
        held.callback(on.close)
        held.callback(gone.close)
        silent = held.enter_context(socket.create_server(("127.0.0.1", 0), backlog=64))
        (Path(at) / "packs").mkdir(mode=0o700)
        ways = {
            "off": (),
            "on": ("--remote", on.url(on.database(), packs=str(Path(at) / "packs"))),
            "refuses": ("--remote", gone.url(gone.database())),
            "silent": ("--remote", f"postgresql://ssmd@127.0.0.1:{silent.getsockname()[1]}/ssmd"),
        }
        gone.end()
        daemons = {
            way: held.enter_context(DaemonProcess(artifact, Path(at) / way, *options)) for way, options in ways.items()
        }
        time.sleep(5)  # for the daemons' idle work
        found: dict[tuple[str, str], list[tuple[float, float]]] = {}
        for i in range(FIRST + requests):
            for way in random.Random(i).sample(sorted(daemons), len(daemons)):
                said: list[dict[str, str]] = []
                for kind in ("first turn", "next turn", "turn of elsewhere"):
                    if kind == "turn of elsewhere":  # the remote is asked for it, unless it was away just now
                        said = [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": "Elsewhere."}]
                    said.append({"role": "user", "content": f"How is the weather on day {i} in Bonn, and why?"})
                    times, text = asked(daemons[way], said, i)
                    said.append({"role": "assistant", "content": text})
                    if i >= FIRST:
                        found.setdefault((kind, way), []).append(times)
        print(f"# remote_speed answers: {artifact.name} of {artifact.parent.name}; {conditions()}; {requests} each\n")
        print("| | remote | TTFT p50, ms | p95 | of `off` | after the last token p50, ms | p95 | of `off` |")
        print("| --- | --- | --- | --- | --- | --- | --- | --- |")
        for (kind, way), rows in sorted(found.items(), key=lambda one: (one[0][0], list(ways).index(one[0][1]))):
            cells = []
            for part in (0, 1):
                p50, p95 = percentiles([one[part] for one in rows], 50, 95)
                [base] = percentiles([one[part] for one in found[kind, "off"]], 50)
                cells += [f"{p50:.1f}", f"{p95:.1f}", f"{p50 / base:.2f}"]
            print(f"| {kind} | {way} | {' | '.join(cells)} |")


def asked(daemon: DaemonProcess, said: list[dict[str, str]], seed: int) -> tuple[tuple[float, float], str]:
    """Send a request. Returns its TTFT, and the ms from its last token to its end, in which it is stored; its text."""
    model = daemon.get("/v1/models")[1]["data"][0]["id"]
    body = {"model": model, "messages": said, "max_tokens": 12, "seed": seed, "store": True}
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", daemon.port, timeout=60)) as connection:
        began = time.perf_counter()
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
        answer = json.loads(connection.getresponse().read())
        took_ms = (time.perf_counter() - began) * 1e3
    own = answer["usage"]["ssmd"]
    decoded_ms = (own["tbt_ms"] or 0.0) * (answer["usage"]["completion_tokens"] - 1)
    return (own["ttft_ms"], took_ms - own["ttft_ms"] - decoded_ms), answer["choices"][0]["message"]["content"] or ""


class Machine:
    """A machine without a model: a store, and a link to the remote."""

    def __init__(self, at: Path, url: str) -> None:
        self.store = new_store(at)  # not in several threads at once: Alembic makes the first
        self.link = Link(self.store, lambda: open_remote(self.store, url), acknowledges=True)
        self.chat = Chat(self.store, f"ses_{secrets.token_hex(12)}", RECURRENT)
        self.last: str | None = None
        self.said: list[Message] = []

    def connect(self) -> None:
        """Open the remote, and begin to send."""
        self.link.connect()
        self.link.start()

    def say(self, then: Any) -> None:
        """Commit a turn of some 3 kB; `then` is called when the remote has it."""
        turn = f"gen_{secrets.token_hex(12)}"
        question, reply = f"{turn}: {PARAGRAPH * 4}", PARAGRAPH * 4
        self.chat.say(turn, self.last, question, reply)
        self.link.when_sent([turn], then)
        self.said += [user(question), Message("assistant", reply)]
        self.last = turn

    def close(self) -> None:
        self.link.close()
        self.store.close()


def every_second(machines: list[Machine], seconds: int, each_s: float = 1.0) -> tuple[list[float], float]:
    """Let each machine commit a turn every `each_s`. Returns s until each was sent, and s in all."""
    took: list[float] = []
    began = time.monotonic()

    def live(machine: Machine, first_s: float) -> None:
        for n in range(int(seconds / each_s)):
            time.sleep(max(0.0, began + first_s + n * each_s - time.monotonic()))
            said = time.monotonic()
            machine.say(lambda said=said: took.append(time.monotonic() - said))

    threads = [threading.Thread(target=live, args=(one, each_s * n / len(machines))) for n, one in enumerate(machines)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    work_s = time.monotonic() - began
    deadline = time.monotonic() + 60
    while len(took) < len(machines) * int(seconds / each_s) and time.monotonic() < deadline:
        time.sleep(0.05)
    return took, work_s


def outbox(count: int, seconds: int) -> None:
    with tempfile.TemporaryDirectory() as at, contextlib.ExitStack() as held:
        server = Cluster(*SERVER, f"max_connections={3 * count + 20}")
        held.callback(server.close)
        url = server.url(server.database())
        machines = [Machine(Path(at) / f"m{n}", url) for n in range(count)]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(Machine.connect, machines))
        for one in machines:
            held.callback(one.close)
        took, _ = every_second(machines, seconds)
        p50, p99 = percentiles(took, 50, 99)
        print(f"# remote_speed outbox: {conditions()}\n")
        print(
            "| machines, a turn a second each | turns | p50, s | p99, s | longest, s |\n| --- | --- | --- | --- | --- |"
        )
        print(f"| {count} | {len(took):,} | {p50:.3f} | {p99:.3f} | {max(took):.3f} |")


def known(rows: int) -> None:
    with contextlib.ExitStack() as held:
        server = Cluster(*SERVER, "autovacuum=off", "synchronous_commit=off")
        held.callback(server.close)
        database = server.database()
        remote = PostgresRemote.open(server.url(database), create=True)
        held.callback(remote.close)
        keys = ("ALTER TABLE ssmd.turn DROP CONSTRAINT turn_pkey", "DROP INDEX ssmd.turn_chain, ssmd.turn_machine")
        made = f"""INSERT INTO ssmd.turn (role, session, turn, owner, chain, machine, format, digest, body)
            SELECT 'ssmd', 'ses_' || substr(md5((n / 20)::text), 1, 24), 'gen_' || substr(md5(n::text), 1, 24), '',
                sha256(n::text::bytea), md5((n % 1000)::text), 1, sha256(body), body
            FROM (SELECT n, decode(repeat(md5(n::text), {BODY // 16}), 'hex') AS body
                FROM generate_series(1, {rows}) n) m"""
        again = (
            "ALTER TABLE ssmd.turn ADD PRIMARY KEY (session, role, turn)",
            "CREATE INDEX turn_chain ON ssmd.turn (chain, role, owner)",
            "CREATE INDEX turn_machine ON ssmd.turn (machine, role)",
            "VACUUM ANALYZE ssmd.turn",
            "CHECKPOINT",
        )
        for statement in (*keys, made, *again):
            server.admin(statement, database)
        sizes = "SELECT pg_table_size('ssmd.turn') / 1e9, pg_indexes_size('ssmd.turn') / 1e9"
        [(table, indexes)] = server.admin(sizes, database)
        print(f"# remote_speed known: {rows:,} turns, bodies of {BODY} bytes: table {table:.2f} GB, indexes", end=" ")
        print(f"{indexes:.2f} GB; requests with {CHAINS} chains, one of which is there; {conditions()}\n")
        print("| requests at a time | requests | p50, ms | p99, ms | longest, ms |\n| --- | --- | --- | --- | --- |")
        digest = hashlib.sha256

        def look(seed: int) -> float:
            rng = random.Random(seed)
            chains = [rng.randbytes(32) for _ in range(CHAINS)]
            chains[rng.randrange(CHAINS)] = digest(str(rng.randint(1, rows)).encode()).digest()
            began = time.perf_counter()
            assert len(remote.known(chains, EVERYBODY)) == 1
            return (time.perf_counter() - began) * 1e3

        for threads in (1, 4):
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(look, range(-100, 0)))
                took = list(pool.map(look, range(10_000 * threads, 10_000 * threads + 3000)))
            p50, p99 = percentiles(took, 50, 99)
            print(f"| {threads} | {len(took):,} | {p50:.2f} | {p99:.2f} | {max(took):.1f} |", flush=True)


def cpu_s(server: Cluster) -> float:
    """Return the CPU seconds of a server's processes that live, and of those that ended."""
    assert server.process is not None
    found = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if server.process.pid == int(fields[1]):
                found += int(fields[11]) + int(fields[12])
            elif server.process.pid == int(stat.parent.name):
                found += sum(map(int, fields[11:15]))
    return found / os.sysconf("SC_CLK_TCK")


def fleet(count: int, seconds: int) -> None:
    """Machines that say a turn each 20 s through PgBouncer; a fiftieth of the turns goes on elsewhere."""
    each_s = 20.0
    with tempfile.TemporaryDirectory() as at, contextlib.ExitStack() as held:
        server = Cluster(*SERVER)
        held.callback(server.close)
        database = server.database()
        pooler = held.enter_context(Pooler(server, connections=20, clients=3 * count))
        url = pooler.url(database)
        PostgresRemote.open(server.url(database), create=True).close()
        machines = [Machine(Path(at) / f"m{n}", url) for n in range(count)]
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(Machine.connect, machines))
        held.callback(lambda: list(ThreadPoolExecutor(16).map(Machine.close, machines)))
        look = (
            "SELECT xact_commit, pg_current_wal_lsn() - '0/0', (SELECT coalesce(sum(pg_total_relation_size(oid)), 0) "
            "FROM pg_class WHERE relnamespace = 'ssmd'::regnamespace AND relkind = 'r') FROM pg_stat_database "
            f"WHERE datname = '{database}'"
        )
        server.admin("SELECT pg_stat_force_next_flush()", database)
        time.sleep(2)
        before, before_cpu = server.admin(look, database)[0], cpu_s(server)
        took, work_s = every_second(machines, seconds, each_s)
        roamed = roam(machines, len(took) // ROAM)
        time.sleep(2)
        after, cpu = server.admin(look, database)[0], cpu_s(server) - before_cpu
        turns, connections = len(took), pooler.clients()
        commits, wal, size = (float(b - a) for a, b in zip(before, after, strict=True))
        p50, p99 = percentiles(took, 50, 99)
        kept = server.admin("SELECT count(*), avg(length(body)) FROM ssmd.turn", database)[0]
        print(f"# remote_speed fleet: {count:,} machines, {turns:,} turns in {work_s:.0f} s; {conditions()}\n")
        print("| | |\n| --- | --- |")
        print(f"| connections of the machines to PgBouncer; of PgBouncer to PostgreSQL | {connections}; 20 at most |")
        print(f"| turns a second | {turns / work_s:.0f} |")
        print(f"| until the remote has a turn: p50, p99, s | {p50:.2f}, {p99:.2f} |")
        print(f"| rows in `ssmd.turn` | {kept[0]:,} |")
        print(f"| bytes of a turn's body, as sent | {float(kept[1]):,.0f} |")
        print(f"| bytes of tables and indexes, a turn | {size / turns:,.0f} |")
        print(f"| bytes of write-ahead log, a turn | {wal / turns:,.0f} |")
        print(f"| transactions, a turn | {commits / turns:.1f} |")
        print(f"| CPU of the server, ms a turn | {1e3 * cpu / turns:.2f} |")
        print(f"| conversations that went on at another machine | {sum(roamed)} of {len(roamed)} |")


def roam(machines: list[Machine], count: int) -> list[bool]:
    """Let conversations go on at the next machine. Returns for each if its turns came there."""
    maker = Maker(Scope(RECURRENT.digest(), LINEAGE, BUILD), PRODUCER, RECURRENT)
    reader = RemoteReader(maker, VOCABULARY)

    def move(n: int) -> bool:
        here, there = machines[n % len(machines)], machines[(n + 1) % len(machines)]
        there.link.bring([*here.said, user("And then?")], there.store.domain, None, reader)
        with there.store.reading() as connection:
            found = connection.exec_driver_sql("SELECT count(*) FROM turn WHERE id = ?", (here.last,)).scalar_one()
        return bool(found)

    return [move(n) for n in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("answers", "outbox", "known", "fleet"))
    parser.add_argument("--model", default="mamba-f32", help="an artifact's folder, or a tiny one of the tests")
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--machines", type=int)
    parser.add_argument("--seconds", type=int)
    parser.add_argument("--rows", type=int, default=10_000_000)
    asked_for = parser.parse_args()
    if asked_for.part == "answers":
        answers(asked_for.model, asked_for.requests)
    elif asked_for.part == "outbox":
        outbox(asked_for.machines or 30, asked_for.seconds or 30)
    elif asked_for.part == "known":
        known(asked_for.rows)
    else:
        fleet(asked_for.machines or 1000, asked_for.seconds or 60)


if __name__ == "__main__":
    main()
