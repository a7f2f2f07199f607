"""The tables of a remote in PostgreSQL, in the schema `ssmd`, and the steps that make them, one machine at a time.

Rows say nothing that a daemon needs but a body: so a newer body needs no step. Names are opaque text in C's order.
Each row has the database role that wrote it in its key. A role is a remote of its own: its rows are bound by policies,
and its statements name it too, as superusers and the owner of the tables pass by policies. No key of turns begins with
the role: for one with few rows by its statistics PostgreSQL would read all of them, and not look for the chain.
"""

from __future__ import annotations

import time

from sqlalchemy import Connection, text

from ssmd.sessions.remote.postgres import leases
from ssmd.sessions.remote.postgres.server import OLDEST, Server
from ssmd.sessions.remote.remote import RemoteError

MIGRATE_S = 60.0  # s that a machine has for the steps
_LOOK_S = 0.2  # s between looks for the steps of another machine
FIRST = 4  # format that the first step makes. Those below were never released, and are refused


def _walled(table: str) -> tuple[str, str]:
    """Return the statements by which a role sees and changes its own rows of a table alone.

    The role that owns the tables is not bound, so that its `pg_dump` has all rows: it could take the wall down anyway.
    """
    own = "role = CURRENT_USER"
    return (
        f"ALTER TABLE ssmd.{table} ENABLE ROW LEVEL SECURITY",
        f"CREATE POLICY own ON ssmd.{table} USING ({own}) WITH CHECK ({own})",
    )


_ROLE = 'role text COLLATE "C" NOT NULL DEFAULT CURRENT_USER'  # the database role that wrote a row
_BEGINNING = (
    "CREATE SCHEMA IF NOT EXISTS ssmd",
    """CREATE TABLE ssmd.remote (
        single boolean PRIMARY KEY DEFAULT true CHECK (single),
        format integer NOT NULL,
        at timestamptz NOT NULL DEFAULT now())""",
    f"""CREATE TABLE ssmd.lease (
        {_ROLE},
        name text COLLATE "C" NOT NULL,
        holder text NOT NULL,
        fence bigint NOT NULL,
        until timestamptz NOT NULL,
        PRIMARY KEY (role, name))""",
    *_walled("lease"),
    "INSERT INTO ssmd.remote (format) VALUES (0)",
)
_TABLES = ("role", "turn", "ending", "tombstone", "reply", "machine", "quota")
STEPS: tuple[tuple[str, ...], ...] = (
    (
        f"""CREATE TABLE ssmd.role (
            {_ROLE} PRIMARY KEY,
            name uuid NOT NULL DEFAULT gen_random_uuid(),
            packs boolean NOT NULL DEFAULT false,
            at timestamptz NOT NULL DEFAULT now())""",
        f"""CREATE TABLE ssmd.turn (
            {_ROLE},
            session text COLLATE "C" NOT NULL,
            turn text COLLATE "C" NOT NULL,
            owner text COLLATE "C" NOT NULL,
            chain bytea NOT NULL,
            machine text COLLATE "C" NOT NULL DEFAULT '',
            format integer NOT NULL,
            digest bytea NOT NULL,
            body bytea NOT NULL,
            at timestamptz NOT NULL DEFAULT now(),
            PRIMARY KEY (session, role, turn))""",
        "CREATE INDEX turn_chain ON ssmd.turn (chain, role, owner)",
        "CREATE INDEX turn_machine ON ssmd.turn (machine, role)",
        f"""CREATE TABLE ssmd.ending (
            {_ROLE},
            session text COLLATE "C" NOT NULL,
            turn text COLLATE "C" NOT NULL,
            pack text COLLATE "C" NOT NULL,
            machine text COLLATE "C" NOT NULL DEFAULT '',
            nbytes bigint NOT NULL DEFAULT 0,
            format integer NOT NULL,
            digest bytea NOT NULL,
            body bytea NOT NULL,
            at timestamptz NOT NULL DEFAULT now(),
            PRIMARY KEY (session, role, turn))""",
        "CREATE INDEX ending_machine ON ssmd.ending (machine, role)",
        f"""CREATE TABLE ssmd.tombstone (
            {_ROLE},
            name text COLLATE "C" NOT NULL,
            at timestamptz NOT NULL DEFAULT now(),
            PRIMARY KEY (role, name))""",
        f"""CREATE TABLE ssmd.reply (
            {_ROLE},
            key bytea NOT NULL,
            request bytea NOT NULL,
            token text COLLATE "C" NOT NULL,
            fence bigint NOT NULL,
            until timestamptz NOT NULL,
            expires timestamptz NOT NULL,
            session text COLLATE "C",
            turns text[] COLLATE "C",
            answer bytea,
            digest bytea,
            PRIMARY KEY (role, key))""",
        "CREATE INDEX reply_expires ON ssmd.reply (role, expires)",
        "CREATE INDEX reply_session ON ssmd.reply (role, session)",
        f"""CREATE TABLE ssmd.machine (
            {_ROLE},
            name text COLLATE "C" NOT NULL,
            mark bigint NOT NULL,
            at timestamptz NOT NULL DEFAULT now(),
            PRIMARY KEY (role, name))""",
        f"""CREATE TABLE ssmd.quota (
            {_ROLE},
            machine text COLLATE "C" NOT NULL DEFAULT '',
            nbytes bigint NOT NULL CHECK (nbytes >= 0),
            PRIMARY KEY (role, machine))""",
        *(one for table in _TABLES for one in _walled(table)),
    ),
)
FORMAT = FIRST + len(STEPS) - 1
_MARK = text("SELECT to_regclass('ssmd.remote') IS NOT NULL")
_OTHERS = text("SELECT EXISTS (SELECT FROM pg_class WHERE relnamespace = to_regnamespace('ssmd'))")
_FORMAT = text("SELECT format FROM ssmd.remote")
_JOINED = text("SELECT CURRENT_USER, EXISTS (SELECT FROM ssmd.role WHERE role = CURRENT_USER)")
_JOIN = text("INSERT INTO ssmd.role DEFAULT VALUES ON CONFLICT DO NOTHING")


def prepare(server: Server, *, create: bool) -> None:
    """Bring a database to this version's tables. Raises RemoteError.

    create: make an empty one a remote, and one without this role a remote of it too.
    """
    version, others, marked = server.read(
        lambda connection: (
            int(connection.exec_driver_sql("SHOW server_version_num").scalar_one()) // 10_000,
            connection.scalar(_OTHERS),
            connection.scalar(_MARK),  # after the others: another machine may make it between the two
        )
    )
    if version < OLDEST:
        said = f"the remote {server.name} is PostgreSQL {version}: it has to be {OLDEST} or newer"
        raise RemoteError(said, lasting=True)
    if not marked:
        if others:
            said = f"the schema `ssmd` of {server.name} is not of a remote: name another database"
            raise RemoteError(said, lasting=True)
        if not create:
            raise RemoteError(f"{server.name} holds no remote any more: is it another database?")
        _begin(server)
    ends = time.monotonic() + MIGRATE_S
    while (found := format_of(server)) != FORMAT:
        lease = leases.acquire(server, "migrate", MIGRATE_S)
        if lease is not None:
            _migrate(server, lease, found)
        elif time.monotonic() > ends:
            raise RemoteError(
                f"another machine brings the tables of {server.name} to a newer version, and does not end"
            )
        else:
            time.sleep(_LOOK_S)
    _join(server, create=create)


def _join(server: Server, *, create: bool) -> None:
    """Find the row of this role, which has the name of its remote. create: make it."""
    role, joined = server.read(lambda connection: connection.execute(_JOINED).one())
    if joined:
        return
    if not create:
        raise RemoteError(
            f"{server.name} holds no remote any more of the role {role!r}: is it another database? If not, make it one "
            "with `ssmd store init`"
        )
    server.write(lambda connection: connection.execute(_JOIN))


def _begin(server: Server) -> None:
    """Make the tables that steps need. Of several machines at once one does."""

    def begin(connection: Connection) -> None:
        for statement in _BEGINNING:
            connection.exec_driver_sql(statement)

    try:
        server.write(begin)
    except RemoteError:
        if not server.read(lambda connection: connection.scalar(_MARK)):
            raise


def format_of(server: Server) -> int:
    """Return the format of a remote; 0 before its first step. Raises RemoteError if this version does not know it."""
    found = server.read(lambda connection: connection.scalar(_FORMAT) if connection.scalar(_MARK) else None)
    if found is None:
        raise RemoteError(f"{server.name} holds no remote any more: is it another database?")
    if found > FORMAT:
        raise RemoteError(
            f"the remote {server.name} is of format {found}, and this version of ssmd knows {FORMAT}: use the version "
            "that made it, or another database",
            lasting=True,
        )
    if 0 < found < FIRST:
        raise RemoteError(
            f"the remote {server.name} is of format {found}, of a version before the first release: name an empty "
            "database, and send to it with `ssmd session push --all` on each machine",
            lasting=True,
        )
    return int(found)


def _migrate(server: Server, lease: leases.Lease, found: int) -> None:
    """Do the steps from a format on, each whole or not at all. Another machine's lease ends them."""

    def step(connection: Connection) -> bool:
        if not leases.holds(connection, lease):
            return False
        moved = text("UPDATE ssmd.remote SET format = :next WHERE format = :found")
        if not connection.execute(moved, {"found": found, "next": max(FIRST, found + 1)}).rowcount:
            return False  # it was done meanwhile, or by an attempt whose answer was lost
        for statement in STEPS[max(FIRST, found + 1) - FIRST]:
            connection.exec_driver_sql(statement)
        return True

    while found < FORMAT and server.write(step):
        found = max(FIRST, found + 1)
    leases.release(server, lease)
