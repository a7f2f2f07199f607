"""The tables of a remote in PostgreSQL, in the schema `ssmd`, and the steps that make them, one machine at a time.

Rows say nothing that a daemon needs but a body: so a newer body needs no step. Names are opaque text in C's order.
"""

from __future__ import annotations

import time

from sqlalchemy import Connection, text

from ssmd.sessions.remote.postgres import leases
from ssmd.sessions.remote.postgres.server import OLDEST, Server
from ssmd.sessions.remote.remote import RemoteError

MIGRATE_S = 60.0  # s that a machine has for the steps
_LOOK_S = 0.2  # s between looks for the steps of another machine
_BEGINNING = (
    "CREATE SCHEMA IF NOT EXISTS ssmd",
    """CREATE TABLE ssmd.remote (
        single boolean PRIMARY KEY DEFAULT true CHECK (single),
        format integer NOT NULL,
        name uuid NOT NULL DEFAULT gen_random_uuid(),
        packs boolean NOT NULL DEFAULT false,
        at timestamptz NOT NULL DEFAULT now())""",
    """CREATE TABLE ssmd.lease (
        name text COLLATE "C" PRIMARY KEY,
        holder text NOT NULL,
        fence bigint NOT NULL,
        until timestamptz NOT NULL)""",
    "INSERT INTO ssmd.remote (format) VALUES (0)",
)
STEPS: tuple[tuple[str, ...], ...] = (  # the first makes a remote of format 1
    (
        """CREATE TABLE ssmd.turn (
            session text COLLATE "C" NOT NULL,
            turn text COLLATE "C" NOT NULL,
            owner text COLLATE "C" NOT NULL,
            chain bytea NOT NULL,
            format integer NOT NULL,
            digest bytea NOT NULL,
            body bytea NOT NULL,
            at timestamptz NOT NULL DEFAULT now(),
            PRIMARY KEY (session, turn))""",
        "CREATE INDEX turn_chain ON ssmd.turn (chain, owner)",
        """CREATE TABLE ssmd.ending (
            session text COLLATE "C" NOT NULL,
            turn text COLLATE "C" NOT NULL,
            pack text COLLATE "C" NOT NULL,
            format integer NOT NULL,
            digest bytea NOT NULL,
            body bytea NOT NULL,
            at timestamptz NOT NULL DEFAULT now(),
            PRIMARY KEY (session, turn))""",
        """CREATE TABLE ssmd.tombstone (
            name text COLLATE "C" PRIMARY KEY,
            at timestamptz NOT NULL DEFAULT now())""",
    ),
    (
        """CREATE TABLE ssmd.reply (
            key bytea PRIMARY KEY,
            request bytea NOT NULL,
            token text COLLATE "C" NOT NULL,
            fence bigint NOT NULL,
            until timestamptz NOT NULL,
            expires timestamptz NOT NULL,
            session text COLLATE "C",
            turns text[] COLLATE "C",
            answer bytea,
            digest bytea)""",
        "CREATE INDEX reply_expires ON ssmd.reply (expires)",
        "CREATE INDEX reply_session ON ssmd.reply (session)",
    ),
    (
        """CREATE TABLE ssmd.machine (
            name text COLLATE "C" PRIMARY KEY,
            mark bigint NOT NULL,
            at timestamptz NOT NULL DEFAULT now())""",
    ),
)
FORMAT = len(STEPS)
_MARK = text("SELECT to_regclass('ssmd.remote') IS NOT NULL")
_OTHERS = text("SELECT EXISTS (SELECT FROM pg_class WHERE relnamespace = to_regnamespace('ssmd'))")
_FORMAT = text("SELECT format FROM ssmd.remote")


def prepare(server: Server, *, create: bool) -> None:
    """Bring a database to this version's tables. create: make an empty one a remote. Raises RemoteError."""
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
    """Return the format of a remote. Raises RemoteError if it is newer than this version knows, or is no remote."""
    found = server.read(lambda connection: connection.scalar(_FORMAT) if connection.scalar(_MARK) else None)
    if found is None:
        raise RemoteError(f"{server.name} holds no remote any more: is it another database?")
    if found > FORMAT:
        raise RemoteError(
            f"the remote {server.name} is of format {found}, and this version of ssmd knows {FORMAT}: use the version "
            "that made it, or another database",
            lasting=True,
        )
    return int(found)


def _migrate(server: Server, lease: leases.Lease, found: int) -> None:
    """Do the steps from a format on, each whole or not at all. Another machine's lease ends them."""

    def step(connection: Connection) -> bool:
        if not leases.holds(connection, lease):
            return False
        moved = text("UPDATE ssmd.remote SET format = format + 1 WHERE format = :found")
        if not connection.execute(moved, {"found": found}).rowcount:
            return False  # it was done meanwhile, or by an attempt whose answer was lost
        for statement in STEPS[found]:
            connection.exec_driver_sql(statement)
        return True

    while found < FORMAT and server.write(step):
        found += 1
    leases.release(server, lease)
