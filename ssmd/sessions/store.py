"""The session store: sessions, their turns and their checkpoints in one database. Safe to use from several threads."""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine

from ssmd.model.state import Part, State, StateSpec
from ssmd.sessions.domain import EVERYBODY, Domain
from ssmd.sessions.line import Line, Passage
from ssmd.sessions.reply import NewReply, Reply, ReplyKey
from ssmd.sessions.rows import checkpoints as checkpoint_rows
from ssmd.sessions.rows import commits, database, disk_space, erasure, holding, opening, retention, tree
from ssmd.sessions.rows import replies as reply_rows
from ssmd.sessions.rows import sessions as session_rows
from ssmd.sessions.rows import turns as turn_rows
from ssmd.sessions.rows.blobs import Encoded, joined
from ssmd.sessions.rows.checkpoints import Placed
from ssmd.sessions.rows.database import DiskFull, disk_full
from ssmd.sessions.rows.parts import read_parts
from ssmd.sessions.rows.snapshot import Snapshot
from ssmd.sessions.turn import NewTurn, Session, SessionInfo, Turn
from ssmd.text.messages import Message

_ASK_EACH = 20  # instructions of SQLite: to insert one row takes some 30, so that each large one is stopped at


@dataclass(frozen=True)
class Committed:
    """What a commit did, checkpoint by checkpoint in the order they were given. full: why it is the text alone."""

    checkpoints: tuple[Placed, ...]
    full: DiskFull | None = None
    ends: bool = False  # whether the state at the end of each turn is stored

    @property
    def nbytes(self) -> int:
        return sum(p.nbytes for p in self.checkpoints)


class Patience:
    """How long a caller waits for a write; this one waits as long as it takes. Called on the thread that writes."""

    def begin(self) -> None:
        """Begin an attempt; the one before came to nothing. A StoreError that it raises ends the write."""

    def stop(self) -> bool:
        """Return whether to give up the states that are being written. Asked from the first statement on, often."""
        return False

    def sure(self) -> None:
        """Note that all is written, and becomes durable next. A StoreError that it raises takes everything back."""


PATIENT = Patience()


class Store:
    """All methods raise StoreError, which says what to do; whatever was not finished has then left no trace."""

    def __init__(self, engine: Engine, file: Path, quota: int | None = None) -> None:
        self._engine = engine
        self.quota = quota
        self.file = file
        self.domain = EVERYBODY
        self.room = disk_space.Room(engine, file)

    @staticmethod
    def open(data_dir: Path, *, busy_ms: int = 2000, quota: int | None = None) -> Store:
        """Open the store in `data_dir`; create (0700, 0600) or migrate it as needed.

        busy_ms: how long to wait for another process that writes. quota: no commit leaves more bytes of checkpoints
        than these. A database of a newer version is refused untouched.
        """
        return Store(*opening.open_store(data_dir, busy_ms=busy_ms), quota)

    def of(self, domain: Domain) -> Store:
        """The store as a trust domain has it: sessions that it does not see are not there, and new ones are its own."""
        scoped = copy.copy(self)
        scoped.domain = domain
        return scoped

    def reading(self) -> AbstractContextManager[Connection]:
        """A read transaction, for what takes several reads of one moment."""
        return database.reading(self._engine, self.file)

    def writing(self) -> AbstractContextManager[Connection]:
        """Open a write transaction, all or nothing."""
        return database.writing(self._engine, self.file)

    @contextmanager
    def snapshot(self) -> Iterator[Snapshot]:
        """The store at this moment, for a request that has to know several things of it that belong together."""
        with self.reading() as connection:
            yield Snapshot(connection, self.domain)

    def load_in(self, connection: Connection, checkpoint_id: int, spec: StateSpec) -> State:
        """Read the state of a checkpoint within a read transaction, as `load` does."""
        position, parts = read_parts(connection, checkpoint_id, spec)
        return joined(parts, spec, position)

    def close(self) -> None:
        self._engine.dispose()

    def commit(
        self,
        turns: Sequence[NewTurn],
        checkpoints: Sequence[Encoded] = (),
        *,
        session: SessionInfo,
        reply: NewReply | None = None,
        heard: Mapping[str, Sequence[Message]] | None = None,
        patience: Patience = PATIENT,
    ) -> Committed:
        """Write turns (siblings, the first becomes the head) and their checkpoints in one transaction, all or nothing.

        The session is created if it is new. A checkpoint whose key is stored already is linked to, not written again.
        One whose parent was removed meanwhile, or for which the quota has no room, is left out, and all that have data
        are if the disk has none; the result says so, and the turns are written all the same. reply: what the request is
        answered with if it comes again; the turns that it replaces are removed. heard: what was said in turns
        that were found altered, as the client says it again; those above come first. patience: is asked to stop
        only where states have data to be written.
        """
        commits.check(session, turns, checkpoints)

        def write(some: Sequence[Encoded]) -> list[Placed]:
            patience.begin()
            with database.writing(self._engine, self.file) as connection:
                with _stoppable(connection, patience if any(c.has_data for c in some) else PATIENT):
                    placed = commits.write(connection, session, turns, some, self.quota, reply, heard or {})
                patience.sure()
                return placed

        full = None if self._has_room(checkpoints) else disk_full(self.file)
        if full is None:
            try:
                placed = write(checkpoints)
            except DiskFull as err:
                full = err
        if full is not None:  # the words are little
            there = [c for c in checkpoints if not c.has_data]
            done = iter(self.room.for_words(lambda: write(there)))
            refused = Placed(None, why_not="the disk is full")
            placed = [refused if c.has_data else next(done) for c in checkpoints]
        self.room.tidy()
        return Committed(tuple(placed), full, commits.ends_placed(turns, checkpoints, placed))

    def attach(
        self,
        turns: Sequence[NewTurn],
        checkpoints: Sequence[Encoded],
        *,
        session: SessionInfo,
        reply: NewReply | None = None,
        patience: Patience = PATIENT,
    ) -> Committed:
        """Write checkpoints of turns that were committed without them, as `commit` does, and tell so in their reply."""
        commits.check(session, turns, checkpoints)
        self._check_room(checkpoints)
        patience.begin()
        with database.writing(self._engine, self.file) as connection:
            with _stoppable(connection, patience):
                placed = commits.attach(connection, session.id, turns, checkpoints, self.quota, reply)
            patience.sure()
        self.room.tidy()
        return Committed(tuple(placed), None, commits.ends_placed(turns, checkpoints, placed))

    def _has_room(self, checkpoints: Sequence[Encoded]) -> bool:
        return self.room.holds(sum(c.nbytes for c in checkpoints), self.quota)

    def _check_room(self, checkpoints: Sequence[Encoded]) -> None:
        if not self._has_room(checkpoints):
            raise disk_full(self.file)

    def keep(self, checkpoint: Encoded) -> Placed:
        """Write a checkpoint ahead of its turn. The turn's commit, given it `without_data`, then only links it.

        What no commit links is gone at the next `sweep`. Where quota or disk have no room it is left to the commit.
        """
        if not self._has_room([checkpoint]):
            return Placed(None, why_not="the disk is full")
        with database.writing(self._engine, self.file) as connection:
            return retention.place_ahead(connection, checkpoint, self.quota)

    def sweep(self, unused_s: float = 0.0, *, keep: Collection[int] = ()) -> int:
        """Remove checkpoints that no turn links to, of requests that came to nothing. Returns how many.

        unused_s: those that were written in the last so many seconds stay: whoever repeats such a request goes on from
        them. keep: ids of those whose turn may still come.
        """
        with self.reading() as connection:
            if not set(checkpoint_rows.unlinked(connection, unused_s)) - set(keep):
                return 0
        with database.writing(self._engine, self.file) as connection:
            loose = set(checkpoint_rows.unlinked(connection, unused_s)) - set(keep)
            checkpoint_rows.sweep(connection, loose)
            if loose:  # states tell what was said
                erasure.owe(connection)
        return len(loose)

    def bound_loose(self, used: int | None = None, *, keep: Collection[int] = ()) -> int:
        """Let checkpoints go that no turn links to, the one used longest ago first, as far as they take more than their
        share of the quota. Returns how many. used: one that was just gone on from. keep: as for `sweep`.
        """
        with database.writing(self._engine, self.file) as connection:
            gone = checkpoint_rows.bound(connection, self.quota, used, keep)
            if gone:
                erasure.owe(connection)
        return gone

    def drop_damaged(self, checkpoint_id: int, spec: StateSpec) -> int:
        """Remove a checkpoint that cannot be read, and all that stand on what is damaged of it. Returns how many."""
        with database.writing(self._engine, self.file) as connection:
            return commits.drop(connection, checkpoint_id, spec)

    def rewrite(self, turn_id: str, ids: Line, text: Passage, checkpoint: Encoded) -> Placed | None:
        """Give a turn the ids and the text that later requests render for it, and the state after them.

        None, and nothing is changed, if the turn is not there any more or was continued meanwhile.
        """
        self._check_room([checkpoint])
        with database.writing(self._engine, self.file) as connection:
            return commits.rewrite(connection, turn_id, ids, text, checkpoint, self.quota)

    def adopt(
        self,
        session: SessionInfo,
        turns: Sequence[NewTurn],
        checkpoints: Sequence[Encoded],
        *,
        head: str,
        title: str | None = None,
    ) -> Committed:
        """Write a whole session from elsewhere in one transaction; parents stand before their children in `turns`.

        title: one that was given to it there.
        """
        self._check_room(checkpoints)
        with database.writing(self._engine, self.file) as connection:
            quota = self.quota
            return Committed(
                tuple(commits.adopt(connection, session, turns, checkpoints, quota, head=head, title=title))
            )

    def taken(self, session_id: str, turn_ids: Sequence[str] = ()) -> bool:
        """Whether one of these ids is in use, the session's also as the origin of checkpoints that outlived it."""
        with self.reading() as connection:
            return turn_rows.taken(connection, session_id, turn_ids)

    @contextmanager
    def parts(self, checkpoint_id: int, spec: StateSpec) -> Iterator[tuple[int, Iterator[Part]]]:
        """(position, parts) of a checkpoint's state, for Program.fill. Only when all were read without a StoreError is
        it sure that they belong together.
        """
        with self.reading() as connection:
            position, parts = read_parts(connection, checkpoint_id, spec)
            with closing(parts):  # a thread reads ahead: it must be done with the connection, however this ends
                yield position, parts

    def load(self, checkpoint_id: int, spec: StateSpec) -> State:
        """The whole state of a checkpoint, in the dtypes of `spec`; every stored byte was verified."""
        with self.reading() as connection:
            return self.load_in(connection, checkpoint_id, spec)

    def reply(self, key: ReplyKey) -> Reply | None:
        """What the request of this key was answered with, if its turns are still there and its time is not over."""
        with self.reading() as connection:
            return reply_rows.find_reply(connection, key)

    def sessions(self, limit: int | None = None, after: str | None = None) -> list[Session]:
        """The sessions used last first: all, or at most `limit`; from the beginning, or those that follow `after`.

        Raises UnknownSession if there is no session `after`, any more.
        """
        with self.reading() as connection:
            return session_rows.read_sessions(connection, self.domain, limit, after)

    def newest(self) -> Session | None:
        """Read the session used last, if there is one."""
        return next(iter(self.sessions(1)), None)

    def session(self, session_id: str) -> Session:
        """Read one session. Raises UnknownSession."""
        with self.reading() as connection:
            return self.session_in(connection, session_id)

    def session_in(self, connection: Connection, session_id: str) -> Session:
        """Read one session within a read transaction. Raises UnknownSession."""
        return session_rows.read_session(connection, session_id, self.domain)

    def pin(self, session_id: str, pinned: bool = True) -> Session:
        """Exempt a session from retention, or no longer; of a fork also what it began with. Raises UnknownSession."""
        with database.writing(self._engine, self.file) as connection:
            session_rows.pin_session(connection, session_id, self.domain, pinned)
            return self.session_in(connection, session_id)

    def rename(self, session_id: str, title: str | None) -> Session:
        """Give a session a title; None: back to how its first user message begins. Raises UnknownSession."""
        with database.writing(self._engine, self.file) as connection:
            session_rows.rename_session(connection, session_id, self.domain, title)
            return self.session_in(connection, session_id)

    def search(
        self, text: str, limit: int, after: str | None = None, *, within_s: float = math.inf
    ) -> session_rows.Found:
        """Find the sessions that have all words of a text, as `find` among the rows does. Raises UnknownSession."""
        return session_rows.find(self.reading, self.domain, text, limit, after, within_s)

    def collect(self, quota: int | None = None, *, dry_run: bool = False) -> retention.Collected:
        """Let checkpoints go until those left take at most `quota` bytes (default: the store's own), and give the
        space back to the disk. Pinned sessions keep theirs, even above the quota. dry_run: only say what would go."""
        limit = self.quota if quota is None else quota
        return commits.collect(self._engine, self.file, self.room, limit, dry_run=dry_run)

    def turns(self, session_id: str) -> list[Turn]:
        """The tree of a session: all its turns, parents before their children. Raises UnknownSession."""
        with self.reading() as connection:
            session_rows.session_row(connection, session_id, self.domain)
            return turn_rows.read_tree(connection, session_id)

    def usages(self, session_id: str) -> dict[str, Mapping[str, Any]]:
        """What the answers of a session's turns took, by turn, as far as that is kept yet."""
        with self.reading() as connection:
            return reply_rows.read_usages(connection, session_id)

    def path(self, turn_id: str) -> list[Turn]:
        """Read the turns from the root to this one. Raises UnknownSession."""
        with self.snapshot() as stored:
            found = stored.path(turn_id)
            if self.domain.sees is not None:
                stored.info(found[-1].session)
            return found

    def fork(self, session_id: str, turn_id: str | None = None) -> Session:
        """A new session that begins at a turn of this one, by default its head; nothing is copied.

        Raises UnknownSession, UnknownTurn if this session has no such turn, StoreError on an id that is none.
        """
        now = turn_rows.to_micros(datetime.now(UTC))
        with database.writing(self._engine, self.file) as connection:
            origin = session_rows.session_row(connection, session_id, self.domain)
            used = session_rows.after_all(connection, now)
            at, owner = origin.head if turn_id is None else turn_id, self.domain.owner
            made = tree.insert_fork(connection, origin, at, owner, now, used)
            return self.session_in(connection, made)

    def resumable(self, session_id: str) -> set[str]:
        """Turns of a session whose end was kept as a state. Raises UnknownSession."""
        with self.reading() as connection:
            session_rows.session_row(connection, session_id, self.domain)
            return tree.resumable(connection, session_id)

    def delete(self, session_id: str) -> None:
        """Remove a session, what only it needed of the checkpoints, and their bytes on disk. Raises UnknownSession.

        Turns that a fork of it stands on stay, as the fork's.
        """
        try:
            with database.writing(self._engine, self.file) as connection:
                session_rows.remove_session(connection, session_id, self.domain)
        except DiskFull:  # in parts then, as what goes is written to the log first
            while self.room.removing(lambda connection: retention.empty(connection, session_id)):
                pass
            self.room.removing(lambda connection: session_rows.remove_session(connection, session_id, self.domain))
        database.settle(self._engine, self.file, idle=False)
        self.room.restock()

    def settle(self) -> bool:
        """Move what was committed from the log into the file, count what sharing changed in sessions' sizes, and erase
        for good what was removed if that was not possible at once: when nobody waits for it.

        Whether sessions are left to be counted.
        """
        return commits.settle(self._engine, self.file, self.room)

    def move_log(self) -> None:
        """Move what was committed from the log into the file, and no more."""
        database.move_log(self._engine, self.file)

    def count(self) -> tuple[int, int]:
        """Count the sessions, of all owners: (all, those that are pinned)."""
        with self.reading() as connection:
            return session_rows.count_sessions(connection)

    def bytes_stored(self) -> int:
        """Count the bytes of all checkpoints as they are stored."""
        with self.reading() as connection:
            return holding.stored_bytes(connection)


@contextmanager
def _stoppable(connection: Connection, patience: Patience) -> Iterator[None]:
    """Ask while statements run inside whether to stop. One that is stopped fails, and its transaction is given up."""
    raw: Any = connection.connection.dbapi_connection
    if patience is not PATIENT:
        raw.set_progress_handler(patience.stop, _ASK_EACH)
    try:
        yield
    finally:
        raw.set_progress_handler(None, 0)
