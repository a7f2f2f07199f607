"""A remote in PostgreSQL: rows for turns, states and tombstones; beside it a folder or bucket for the bytes of states.

A row of a turn never changes, but for one that was damaged. A tombstone comes before all that it removes; what another
machine sends meanwhile is removed by that machine. So a kill at any moment leaves what the next call completes. A pack
comes before its row, and goes after it. Rows and packs are other machines' word: each is checked. Roles of the
database do not meet here: each has the rows that it wrote, and its own folder.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, Protocol

from sqlalchemy import Connection, TextClause, text

from ssmd.sessions.remote.packs import FORMAT, FolderPacks, MountedFolder
from ssmd.sessions.remote.postgres import leases, schema
from ssmd.sessions.remote.postgres.address import BucketAddress, read_address
from ssmd.sessions.remote.postgres.replies import DatabaseReplies
from ssmd.sessions.remote.postgres.server import Server
from ssmd.sessions.remote.remote import (
    MAX_BODY_BYTES,
    MAX_COUNT,
    MAX_ROW_BYTES,
    Blobs,
    InvalidTurn,
    MarkGone,
    Quota,
    RemoteError,
    RemoteSize,
    RemoteTurn,
    TurnPlace,
    UnknownVersion,
)
from ssmd.sessions.remote.retention import KeptState, Retention, RetentionCounts
from ssmd.sessions.rows.outbox import Mark
from ssmd.sessions.turn import ID_PATTERN, Domain, StoreError

log = logging.getLogger(__name__)
MARK = "ssmd-packs.json"
SWEEP_S = 600.0  # s that a sweep may take
_AT_ONCE = 500  # states that `retain` removes in one transaction
_MAX_FOUND = 256  # turns of one chain that are looked at
_PARTS = {
    "{own}": "u.role = CURRENT_USER",
    "{gone}": "EXISTS (SELECT FROM ssmd.tombstone AS t WHERE t.role = u.role AND t.name IN (u.session, u.turn))",
    "{stands}": "NOT EXISTS (SELECT FROM ssmd.tombstone AS t WHERE t.role = u.role AND t.name = u.session)",
    "{count}": f"CASE WHEN u.mark BETWEEN 0 AND {MAX_COUNT} THEN u.mark ELSE 0 END",
    "{body}": "format, digest, CASE WHEN octet_length(body) <= :most THEN body END AS body",
    "{no_tombstone}": "NOT EXISTS (SELECT FROM ssmd.tombstone AS t WHERE t.role = CURRENT_USER"
    " AND t.name IN (:session, :turn))",
}


def _sql(statement: str) -> TextClause:
    """Return a statement with its parts. Each names the role: policies do not bind a superuser or the tables' owner."""
    for name, part in _PARTS.items():
        statement = statement.replace(name, part)
    return text(statement)


_KNOWN = _sql("""
    WITH found AS (
        SELECT one.session, one.turn, asked.n
        FROM unnest(CAST(:chains AS bytea[])) WITH ORDINALITY AS asked (chain, n)
        CROSS JOIN LATERAL (
            SELECT session, turn FROM ssmd.turn AS u
            WHERE {own} AND u.chain = asked.chain AND (:all OR u.owner = ANY(CAST(:owners AS text[]))) AND NOT {gone}
            LIMIT :most) AS one)
    SELECT session, turn FROM found WHERE n = (SELECT max(n) FROM found)""")
_FETCH = _sql("SELECT {body} FROM ssmd.turn AS u WHERE {own} AND session = :session AND turn = :turn AND NOT {gone}")
_FETCH_END = _sql(
    "SELECT {body} FROM ssmd.ending AS u WHERE {own} AND session = :session AND turn = :turn AND NOT {gone}"
)
_TURNS = _sql("SELECT turn FROM ssmd.turn AS u WHERE {own} AND session = :session AND NOT {gone} LIMIT 1000000")
_ENDS = _sql("SELECT turn FROM ssmd.ending AS u WHERE {own} AND session = :session AND NOT {gone} LIMIT 1000000")
# A damaged row is written again. One of another version stays.
_PUBLISH = _sql("""
    INSERT INTO ssmd.turn AS old (session, turn, owner, chain, machine, format, digest, body)
    SELECT :session, :turn, :owner, :chain, :machine, :format, sha256(:body), :body WHERE {no_tombstone}
    ON CONFLICT (session, role, turn) DO UPDATE
    SET owner = excluded.owner, chain = excluded.chain, digest = excluded.digest, body = excluded.body
    WHERE old.format = excluded.format AND old.digest <> sha256(old.body)""")
_PUBLISH_END = _sql("""
    INSERT INTO ssmd.ending AS old (session, turn, pack, machine, nbytes, format, digest, body)
    SELECT :session, :turn, :pack, :machine, :nbytes, :format, sha256(:body), :body WHERE {no_tombstone}
    ON CONFLICT (session, role, turn) DO UPDATE
    SET pack = excluded.pack, machine = excluded.machine, nbytes = excluded.nbytes, format = excluded.format,
        digest = excluded.digest, body = excluded.body, at = now()""")
_PACK_OF = _sql("SELECT pack FROM ssmd.ending AS u WHERE {own} AND session = :session AND turn = :turn FOR UPDATE")
_REPLACE = _sql("""
    DELETE FROM ssmd.ending AS u WHERE {own} AND session = :session AND turn = ANY(CAST(:turns AS text[]))
    RETURNING pack""")
_DISCARD = _sql("DELETE FROM ssmd.turn AS u WHERE {own} AND session = :session AND turn = :turn")
_BURY = text("INSERT INTO ssmd.tombstone (name) VALUES (:name) ON CONFLICT DO NOTHING")
_DROP_TURNS = _sql("DELETE FROM ssmd.turn AS u WHERE {own} AND session = ANY(CAST(:sessions AS text[])) AND {gone}")
_DROP_ENDS = _sql(
    "DELETE FROM ssmd.ending AS u WHERE {own} AND session = ANY(CAST(:sessions AS text[])) AND {gone} RETURNING pack"
)
_DROP_REPLIES = _sql("""
    DELETE FROM ssmd.reply AS u WHERE {own} AND session = ANY(CAST(:sessions AS text[])) AND EXISTS (
        SELECT FROM ssmd.tombstone AS t WHERE t.role = u.role AND (t.name = u.session OR t.name = ANY(u.turns)))""")
_ANY_BURIED = _sql("""
    SELECT EXISTS (SELECT FROM ssmd.tombstone AS u WHERE {own} AND name = ANY(CAST(:names AS text[])))""")
_LEFT = _sql("SELECT DISTINCT session FROM ssmd.ending AS u WHERE {own} AND {gone}")
_BURIED = _sql("SELECT name FROM ssmd.tombstone AS u WHERE {own} LIMIT 1000000")
_PACKS = _sql("SELECT pack FROM ssmd.ending AS u WHERE {own} AND NOT {gone}")
# A row is written once an hour at most because its state was fetched.
_USED = _sql("""
    UPDATE ssmd.ending AS u SET at = now()
    WHERE {own} AND session = :session AND turn = :turn AND at < now() - interval '1 hour'""")
_STATES = _sql("""
    SELECT session, turn, pack, at, CAST(extract(epoch FROM now() - at) AS double precision) AS idle_s
    FROM ssmd.ending AS u WHERE {own} AND NOT {gone}""")
_RETIRE = _sql("""
    DELETE FROM ssmd.ending AS u
    USING unnest(CAST(:sessions AS text[]), CAST(:turns AS text[]), CAST(:times AS timestamptz[]))
        AS old (session, turn, at)
    WHERE {own} AND u.session = old.session AND u.turn = old.turn AND u.at = old.at
    RETURNING u.pack""")
_SESSIONS = _sql("""
    SELECT session FROM ssmd.turn AS u WHERE {own} AND {stands}
    UNION SELECT session FROM ssmd.ending AS u WHERE {own} AND {stands}""")
_SIZE = _sql("""
    SELECT (SELECT count(DISTINCT session) FROM ssmd.turn AS u WHERE {own}),
    (SELECT count(*) FROM ssmd.turn AS u WHERE {own}),
    (SELECT coalesce(sum(octet_length(body)), 0) FROM ssmd.turn AS u WHERE {own}),
    (SELECT count(*) FROM ssmd.ending AS u WHERE {own}), (SELECT count(*) FROM ssmd.tombstone AS u WHERE {own}),
    (SELECT count(*) FROM ssmd.machine AS u WHERE {own})""")
_MARK_OF = _sql("SELECT {count} FROM ssmd.machine AS u WHERE {own} AND name = :machine")
_SET_MARK = _sql("""
    INSERT INTO ssmd.machine AS u (name, mark) VALUES (:machine, :mark)
    ON CONFLICT (role, name) DO UPDATE SET mark = greatest({count}, excluded.mark), at = now()""")
_RAISE_MARK = _sql("""
    INSERT INTO ssmd.machine AS u (name, mark) VALUES (:machine, 1)
    ON CONFLICT (role, name) DO UPDATE SET mark = {count} + 1, at = now() RETURNING mark""")
# A quota of no machine is one of each machine of the role that has none of its own.
_QUOTA = _sql("""
    SELECT u.nbytes,
        (SELECT coalesce(sum(octet_length(body)), 0) FROM ssmd.turn AS t WHERE t.role = u.role AND machine = :machine)
        + (SELECT coalesce(sum(octet_length(body) + e.nbytes), 0)
            FROM ssmd.ending AS e WHERE e.role = u.role AND machine = :machine)
    FROM ssmd.quota AS u WHERE {own} AND u.machine IN (:machine, '') ORDER BY u.machine DESC LIMIT 1""")
_NAME = _sql("SELECT CAST(name AS text) AS name, packs FROM ssmd.role AS u WHERE {own}")
_HAS_PACKS = _sql("UPDATE ssmd.role AS u SET packs = true WHERE {own} AND NOT packs")


class PostgresRemote:
    """A remote in PostgreSQL. Safe to use from several threads, processes and machines."""

    def __init__(self, server: Server, packs: DatabasePacks | None) -> None:
        """packs: None if no place for bytes is named: then no states are sent or fetched."""
        self._server, self.packs, self.replies = server, packs, DatabaseReplies(server)
        self._identity = ""

    @staticmethod
    def open(url: str, *, create: bool) -> PostgresRemote:
        """Open the remote in a database. create: make an empty one a remote. Raises RemoteError."""
        address = read_address(url)
        server = Server(address)
        try:
            schema.prepare(server, create=create)
            packs = None if address.packs is None else DatabasePacks(server, _place_of(address.packs))
            if packs is not None:
                packs.look()
        except BaseException:
            server.close()
            raise
        return PostgresRemote(server, packs)

    @property
    def name(self) -> str:
        return self._server.name

    @property
    def identity(self) -> str:
        if not self._identity:
            self._identity = str(self._server.read(lambda connection: connection.execute(_NAME).one()).name)
        return self._identity

    def mark_of(self, machine: str) -> int:
        """Return the mark that a machine has set; 0 without one."""
        return int(self._server.read(lambda connection: connection.scalar(_MARK_OF, {"machine": machine})) or 0)

    def set_mark(self, machine: str, mark: int) -> None:
        """Keep a machine's mark, unless a higher one is kept."""
        values = {"machine": machine, "mark": mark}
        self._server.write(lambda connection: connection.execute(_SET_MARK, values))

    def close(self) -> None:
        """Close its connections."""
        if self.packs is not None:
            self.packs.close()
        self._server.close()

    def known(self, chains: Sequence[bytes], domain: Domain) -> list[TurnPlace]:
        """Find turns at the last of these chains that any turn has, among those that the domain sees."""
        owners = {"all": domain.sees is None, "owners": list(domain.sees or ())}
        values = {"chains": list(chains), "most": _MAX_FOUND, **owners}
        found = self._server.read(lambda connection: connection.execute(_KNOWN, values).all())
        places = [TurnPlace(row.session, row.turn) for row in found if _is_id(row.session) and _is_id(row.turn)]
        return sorted(places, key=lambda place: (place.session, place.turn))

    def fetch(self, place: TurnPlace) -> bytes | None:
        """Return the body of a turn; None if the remote does not have it. Raises InvalidTurn if it was altered."""
        return self._body(_FETCH, place, MAX_BODY_BYTES)

    def turns(self, session: str) -> list[str]:
        """List the turns of a session, in no order."""
        return self._names(_TURNS, {"session": session})

    def sessions(self) -> list[str]:
        """List the sessions that have turns or states, in no order."""
        return self._names(_SESSIONS, {})

    def size(self) -> RemoteSize:
        """Count what is kept."""
        return RemoteSize(*map(int, self._server.read(lambda connection: connection.execute(_SIZE).one())))

    def publish(self, turns: Sequence[RemoteTurn], last: Mark | None = None) -> int:
        """Keep turns. One that is kept already stays as it is, and one that is buried is not kept.

        last: raised by one in the same transaction. Returns the new mark; 0 without `last`. Raises MarkGone.
        """
        ordered = sorted(turns, key=lambda one: (one.place.session, one.place.turn))  # no two machines wait in a circle
        common = {"format": FORMAT, "machine": "" if last is None else last.machine}
        rows = [
            {"owner": one.owner, "chain": one.chain, "body": one.body, **common, **_values(one.place)}
            for one in ordered
        ]

        def keep(connection: Connection) -> int:
            mark = 0
            if last is not None:
                mark = int(connection.execute(_RAISE_MARK, {"machine": last.machine}).scalar_one())
                if mark <= last.confirmed:
                    raise MarkGone(f"{self.name} is older than it was, as from a backup")
            if rows:
                connection.execute(_PUBLISH, rows)
            return mark

        mark = self._server.write(keep)
        self._drop_if_buried([one.place for one in turns])  # meanwhile, by a machine that did not see these
        return mark

    def discard(self, place: TurnPlace) -> None:
        """Remove a turn that cannot be believed, so that it can be published again."""
        self._server.write(lambda connection: connection.execute(_DISCARD, _values(place)))

    def bury(self, session: str, turn: str | None) -> None:
        """Remove a turn, or with None a whole session, for good."""
        name = {"name": session if turn is None else turn}
        self._server.write(lambda connection: connection.execute(_BURY, name))
        self._drop_buried({session})

    def buried(self) -> Collection[str]:
        """Return the sessions and the turns that were buried."""
        schema.format_of(self._server)
        return set(self._names(_BURIED, {}))

    def end(self, place: TurnPlace) -> bytes | None:
        """Read the row that describes a turn's end state; None if no machine sent one. Raises InvalidTurn."""
        return self._body(_FETCH_END, place, MAX_ROW_BYTES)

    def ends(self, session: str) -> list[str]:
        """List the turns of a session that have a state, in no order."""
        return self._names(_ENDS, {"session": session})

    def publish_end(
        self, place: TurnPlace, pack: str, row: bytes, replaced: Sequence[str], *, machine: str = "", nbytes: int = 0
    ) -> None:
        """Keep the row of a turn's state, whose pack is there. Then remove those of the turns `replaced`."""
        values = {"pack": pack, "format": FORMAT, "body": row, "machine": machine, "nbytes": nbytes, **_values(place)}

        def publish(connection: Connection) -> set[str]:
            before = set(connection.scalars(_PACK_OF, _values(place)))
            kept = connection.execute(_PUBLISH_END, values).rowcount > 0
            older = {"session": place.session, "turns": [turn for turn in replaced if turn != place.turn]}
            unnamed = before | set(connection.scalars(_REPLACE, older))
            return unnamed - {pack} if kept else unnamed | {pack}

        self._remove_packs(self._server.write(publish))
        self._drop_if_buried([place])

    def quota(self, machine: str) -> Quota | None:
        """Count the bytes of a machine that has a quota; None without one."""
        row = self._server.read(lambda connection: connection.execute(_QUOTA, {"machine": machine}).one_or_none())
        return None if row is None else Quota(int(row[0]), int(row[1]))

    def sweep(self, *, dry_run: bool = False) -> tuple[int, int]:
        """Remove packs that no row names and that are a day old. Returns how many, and their bytes.

        Raises RemoteError, also if another machine does it now.
        """
        packs, lease = self._swept()

        def named() -> set[str | None]:
            def read(connection: Connection) -> set[str | None]:
                _check_swept(connection, lease)
                return set(connection.scalars(_PACKS))

            return self._server.write(read)

        try:
            done = packs.sweep(named, dry_run=dry_run)
            if not dry_run:  # rows of removed sessions: their machine was killed before it saw the tombstone
                self._drop_buried(self._names(_LEFT, {}))
            return done
        finally:
            leases.release(self._server, lease)

    def used(self, place: TurnPlace) -> None:
        """Note that the state of a turn was fetched, for the remote's retention."""
        self._server.write(lambda connection: connection.execute(_USED, _values(place)))

    def retain(self, limits: Retention, *, dry_run: bool = False) -> RetentionCounts:
        """Remove the states beyond limits, rows first. Their turns stay. Returns what went, and what stays.

        A state that is written or fetched meanwhile stays. Raises RemoteError, also if another machine sweeps now.
        """
        packs, lease = self._swept()
        try:
            sizes = dict(packs.names())
            rows = self._server.read(lambda connection: connection.execute(_STATES).all())
            states = [
                KeptState(TurnPlace(row.session, row.turn), row.pack, row.idle_s, sizes.get(row.pack, 0))
                for row in rows
            ]
            leaving = limits.leaving(states)
            if dry_run:
                return RetentionCounts.of(states, leaving)
            times, gone = {TurnPlace(row.session, row.turn): row.at for row in rows}, set[str]()
            for at in range(0, len(leaving), _AT_ONCE):
                some = leaving[at : at + _AT_ONCE]
                gone |= self._retire([(one.place, times[one.place]) for one in some], lease)
            return RetentionCounts.of(states, [one for one in leaving if one.pack in gone])
        finally:
            leases.release(self._server, lease)

    def _retire(self, states: Sequence[tuple[TurnPlace, object]], lease: leases.Lease) -> set[str]:
        """Remove states that were last used then, and their packs. Returns those."""
        values = {
            "sessions": [place.session for place, _ in states],
            "turns": [place.turn for place, _ in states],
            "times": [time for _, time in states],
        }

        def retire(connection: Connection) -> set[str]:
            _check_swept(connection, lease)
            return set(connection.scalars(_RETIRE, values))

        packs = self._server.write(retire)
        self._remove_packs(packs)
        return packs

    def _swept(self) -> tuple[DatabasePacks, leases.Lease]:
        """Return the packs, and the lease of the one machine that removes some. Raises RemoteError."""
        if self.packs is None:
            raise RemoteError("the address of the remote names no place for bytes: add `?packs=DIR|s3://BUCKET`")
        lease = leases.acquire(self._server, "sweep", SWEEP_S)
        if lease is None:
            raise RemoteError("another machine sweeps this remote: try again in ten minutes")
        return self.packs, lease

    def _body(self, query: TextClause, place: TurnPlace, most: int) -> bytes | None:
        values = {"most": most, **_values(place)}
        row = self._server.read(lambda connection: connection.execute(query, values).one_or_none())
        if row is None:
            return None
        what = f"turn {place.turn!r} of the remote"
        if row.format != FORMAT:
            raise UnknownVersion(f"{what} is of another version: its format is not {FORMAT}")
        if row.body is None:
            raise InvalidTurn(f"{what} has more than {most} bytes")
        body = bytes(row.body)
        if hashlib.sha256(body).digest() != bytes(row.digest):
            raise InvalidTurn(f"{what} is not what its digest says: it was altered")
        return body

    def _names(self, query: TextClause, values: dict[str, Any]) -> list[str]:
        found = self._server.read(lambda connection: list(connection.scalars(query, values)))
        return [name for name in found if _is_id(name)]

    def _drop_if_buried(self, places: Sequence[TurnPlace]) -> None:
        names = sorted({name for place in places for name in (place.session, place.turn)})
        if self._server.read(lambda connection: connection.scalar(_ANY_BURIED, {"names": names})):
            self._drop_buried({place.session for place in places})

    def _drop_buried(self, sessions: Collection[str]) -> None:
        """Remove the rows of sessions that tombstones name, and then their packs."""
        values = {"sessions": sorted(sessions)}

        def drop(connection: Connection) -> set[str]:
            connection.execute(_DROP_TURNS, values)
            connection.execute(_DROP_REPLIES, values)
            return set(connection.scalars(_DROP_ENDS, values))

        self._remove_packs(self._server.write(drop))

    def _remove_packs(self, packs: Collection[str]) -> None:
        """Remove packs that no row names any more. Those that cannot be removed now are left to `sweep`."""
        if self.packs is not None:
            for pack in sorted(packs):
                try:
                    self.packs.remove(pack)
                except StoreError as err:
                    log.warning("a state that was removed waits for `ssmd session sweep`: %s", err)


class PackPlace(Blobs, Protocol):
    """A place for the packs of one role: a folder, or a bucket. All methods raise RemoteError."""

    def prepare(self, *, create: bool, of: str) -> None:
        """Look if the place is that of a role's remote. create: make an empty one it."""

    def close(self) -> None:
        """Close what is open."""

    def remove(self, name: str) -> None:
        """Remove a pack that no row names any more, if it is there."""

    def sweep(self, named: Callable[[], Collection[str | None]], *, dry_run: bool = False) -> tuple[int, int]:
        """Remove packs that no row names and that are a day old. Returns how many, and their bytes."""


def _place_of(packs: Path | BucketAddress) -> PackPlace:
    if isinstance(packs, Path):
        return FolderPacks(MountedFolder(packs, MARK, "the folder for bytes"))
    from ssmd.sessions.remote.bucket import BucketPacks

    return BucketPacks(packs, MARK)


class DatabasePacks:
    """The packs of a remote in PostgreSQL: in a folder or a bucket that belongs to the role. The remote's Blobs."""

    def __init__(self, server: Server, place: PackPlace) -> None:
        self._server, self._place, self._looked = server, place, False

    def look(self) -> None:
        """Look at the place. Raises RemoteError if a user has to mend it; one that is away now may come back."""
        try:
            self._prepared()
        except RemoteError as err:
            if err.lasting:
                raise

    def close(self) -> None:
        """Close what is open."""
        self._place.close()

    def there(self, name: str) -> bool:
        """Return True if there is a pack of this name. Its bytes are checked when they are read."""
        return self._prepared().there(name)

    def names(self) -> list[tuple[str, int]]:
        """List the packs that are whole, by name and size in bytes."""
        return self._prepared().names()

    def put(self, parts: Sequence[bytes | memoryview]) -> str:
        """Keep a pack, given in parts, durably. Returns its name. One that is there is mended if damaged."""
        return self._prepared().put(parts)

    def get(self, name: str, nbytes: int) -> bytes:
        """Return a pack of so many bytes. Raises InvalidTurn if it is not there, or not what its name says."""
        return self._prepared().get(name, nbytes)

    def remove(self, name: str) -> None:
        """Remove a pack that no row names any more, if it is there."""
        self._prepared().remove(name)

    def sweep(self, named: Callable[[], Collection[str | None]], *, dry_run: bool = False) -> tuple[int, int]:
        """Remove packs that no row names and that are a day old. Returns how many, and their bytes."""
        return self._prepared().sweep(named, dry_run=dry_run)

    def _prepared(self) -> PackPlace:
        """Look once if the place is the role's. Its first machine gives an empty one its mark."""
        if not self._looked:
            row = self._server.read(lambda connection: connection.execute(_NAME).one())
            self._place.prepare(create=not row.packs, of=row.name)
            if not row.packs:
                self._server.write(lambda connection: connection.execute(_HAS_PACKS))
            self._looked = True
        return self._place


def _check_swept(connection: Connection, lease: leases.Lease) -> None:
    if not leases.holds(connection, lease):
        raise RemoteError("another machine sweeps this remote by now: the rest was not removed")


def _values(place: TurnPlace) -> dict[str, str]:
    return {"session": place.session, "turn": place.turn}


def _is_id(name: str) -> bool:
    return ID_PATTERN.fullmatch(name) is not None
