"""The session store: sessions, their turns and their checkpoints in one database. Safe to use from several threads."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine

from ssmd.model.state import Part, State, StateSpec
from ssmd.sessions.checkpoint import Scope, SealedLine
from ssmd.sessions.line import Line, Passage
from ssmd.sessions.reply import NewReply, Reply, ReplyKey
from ssmd.sessions.rows import checkpoints as checkpoint_rows
from ssmd.sessions.rows import commits, database, disk_space, erasure, holding, loose, opening, outbox, retention, tree
from ssmd.sessions.rows import replies as reply_rows
from ssmd.sessions.rows import sessions as session_rows
from ssmd.sessions.rows import turns as turn_rows
from ssmd.sessions.rows import warm as warm_rows
from ssmd.sessions.rows.blobs import EncodedCheckpoint, joined, read_parts
from ssmd.sessions.rows.checkpoints import CheckpointResult
from ssmd.sessions.rows.faults import DiskFull, disk_full
from ssmd.sessions.rows.partings import Parting, read_partings
from ssmd.sessions.rows.snapshot import Snapshot
from ssmd.sessions.rows.warm import WarmBeginning
from ssmd.sessions.turn import EVERYBODY, Domain, NewTurn, Session, SessionInfo, Turn, UnknownSession
from ssmd.text.messages import Message

_ASK_EACH = 20  # SQLite instructions between two calls of `stop`; to insert a row takes some 30, so each row has one


@dataclass(frozen=True)
class CommitResult:
    """The result of a commit."""

    checkpoints: tuple[CheckpointResult, ...]  # in the order they were given
    full: DiskFull | None = None  # why only the text was written
    ends: bool = False  # True if the state at the end of each turn is stored

    @property
    def nbytes(self) -> int:
        return sum(p.nbytes for p in self.checkpoints)


class Patience:
    """A caller's patience with a write. This one waits as long as it takes. Called on the thread that writes."""

    def begin(self) -> None:
        """Begin an attempt, the first one or after a failure. A StoreError that it raises ends the write."""

    def stop(self) -> bool:
        """Return True to give up the states that are being written. Called often, from the first statement on."""
        return False

    def sure(self) -> None:
        """Note that all is written, and becomes durable next. A StoreError that it raises rolls everything back."""


PATIENT = Patience()


class Store:
    """The session store. All methods raise StoreError, which says what to do; an unfinished write leaves no trace."""

    def __init__(self, engine: Engine, file: Path, quota: int | None = None) -> None:
        self._engine = engine
        self.quota = quota
        self.file = file
        self.domain = EVERYBODY
        # With a remote: called after there is something new to send. None: nothing goes into the outbox.
        self.shares: Callable[[], None] | None = None
        self.room = disk_space.DiskSpace(engine, file)

    @staticmethod
    def open(data_dir: Path, *, busy_ms: int = 2000, quota: int | None = None) -> Store:
        """Open the store in `data_dir`; create it (0700, 0600) if there is none.

        busy_ms: longest wait for another process that writes. quota: bytes of checkpoints that a commit may leave at
        most. A database of opening.UPGRADED is upgraded; one of another revision is refused and left as it is.
        """
        return Store(*opening.open_store(data_dir, busy_ms=busy_ms), quota)

    def of(self, domain: Domain) -> Store:
        """Return the store as a trust domain sees it. It hides other sessions; new sessions are the domain's."""
        scoped = copy.copy(self)
        scoped.domain = domain
        return scoped

    def reading(self) -> AbstractContextManager[Connection]:
        """Open a read transaction, for several reads of one moment."""
        return database.reading(self._engine, self.file)

    def writing(self) -> AbstractContextManager[Connection]:
        """Open a write transaction, all or nothing."""
        return database.writing(self._engine, self.file)

    @contextmanager
    def snapshot(self) -> Iterator[Snapshot]:
        """Open a snapshot of the store at this moment, for a request whose reads must agree."""
        with self.reading() as connection:
            yield Snapshot(connection, self.domain)

    def load_in(self, connection: Connection, checkpoint_id: int, spec: StateSpec) -> State:
        """Read the state of a checkpoint within a read transaction, as `load` does."""
        position, parts = read_parts(connection, checkpoint_id, spec)
        return joined(parts, spec, position)

    @property
    def alone(self) -> bool:
        """Return True if this process locks out all others, as its file system has no memory that they share."""
        return database.is_alone(self._engine)

    def look(self) -> None:
        """Check that the open file still has its name, with a few `stat` calls. Raises ReplacedFile if it has not."""
        database.check_file(self._engine)

    def close(self) -> None:
        database.close(self._engine)

    def commit(
        self,
        turns: Sequence[NewTurn],
        checkpoints: Sequence[EncodedCheckpoint] = (),
        *,
        session: SessionInfo,
        reply: NewReply | None = None,
        heard: Mapping[str, Sequence[Message]] | None = None,
        patience: Patience = PATIENT,
    ) -> CommitResult:
        """Write turns (siblings, the first becomes the head) and their checkpoints in one transaction, all or nothing.

        The session is created if it is new. A checkpoint whose key is stored already is linked to, not written again.
        A checkpoint is left out if its parent was removed meanwhile, or if the quota has no room for it. If the disk
        has no room, all with data are left out. The result reports that, and the turns are written all the same.
        reply: to answer the request with if it is repeated. The turns that it replaces are removed.
        heard: by turn id, the client's copy of turns that were found altered; ancestors first.
        patience: asked to stop only while states with data are written.
        """
        commits.check(session, turns, checkpoints)

        def write(some: Sequence[EncodedCheckpoint]) -> list[CheckpointResult]:
            patience.begin()
            with database.writing(self._engine, self.file) as connection:
                with _stoppable(connection, patience if any(c.has_data for c in some) else PATIENT):
                    placed = commits.write(connection, session, turns, some, self.quota, reply, heard or {})
                    if self.shares is None:
                        outbox.fall_behind(connection, session.id)
                    elif turns[0].finish != warm_rows.WARM:
                        outbox.add_turns(connection, session, turns)
                patience.sure()
                return placed

        full = None if self._has_room(checkpoints) else disk_full(self.file)
        if full is None:
            try:
                placed = write(checkpoints)
            except DiskFull as err:
                full = err
        if full is not None:  # the text is small
            there = [c for c in checkpoints if not c.has_data]
            done = iter(self.room.for_words(lambda: write(there)))
            refused = CheckpointResult(None, why_not="the disk is full")
            placed = [refused if c.has_data else next(done) for c in checkpoints]
        self.room.tidy()
        self._share()
        return CommitResult(tuple(placed), full, commits.ends_placed(turns, checkpoints, placed))

    def _share(self) -> None:
        if self.shares is not None:
            self.shares()

    def attach(
        self,
        turns: Sequence[NewTurn],
        checkpoints: Sequence[EncodedCheckpoint],
        *,
        session: SessionInfo,
        reply: NewReply | None = None,
        patience: Patience = PATIENT,
    ) -> CommitResult:
        """Write checkpoints of turns that were committed without them, as `commit` does, and update their reply."""
        commits.check(session, turns, checkpoints)
        self._check_room(checkpoints)
        patience.begin()
        with database.writing(self._engine, self.file) as connection:
            with _stoppable(connection, patience):
                placed = commits.attach(connection, session.id, turns, checkpoints, self.quota, reply)
            patience.sure()
        self.room.tidy()
        return CommitResult(tuple(placed), None, commits.ends_placed(turns, checkpoints, placed))

    def _has_room(self, checkpoints: Sequence[EncodedCheckpoint]) -> bool:
        return self.room.holds(sum(c.nbytes for c in checkpoints), self.quota)

    def _check_room(self, checkpoints: Sequence[EncodedCheckpoint]) -> None:
        if not self._has_room(checkpoints):
            raise disk_full(self.file)

    def keep(self, checkpoint: EncodedCheckpoint) -> CheckpointResult:
        """Write a checkpoint ahead of its turn. The turn's commit, given it `without_data`, then only links it.

        The next `sweep` removes it if no commit links it. If quota or disk have no room, it is left to the commit.
        """
        if not self._has_room([checkpoint]):
            return CheckpointResult(None, why_not="the disk is full")
        with database.writing(self._engine, self.file) as connection:
            return retention.place_ahead(connection, checkpoint, self.quota)

    def sweep(self, unused_s: float = 0.0, sealed_s: float = 0.0, *, keep: Collection[int] = ()) -> int:
        """Remove checkpoints that no turn links to, left by requests without a turn. Returns how many.

        unused_s: those used in the last so many seconds stay, for a repeated request. sealed_s: the same for sealed
        ones.
        keep: ids of those whose turn may still come.
        """
        with self.reading() as connection:
            if not set(loose.unlinked(connection, unused_s, sealed_s)) - set(keep):
                return 0
        with database.writing(self._engine, self.file) as connection:
            gone = set(loose.unlinked(connection, unused_s, sealed_s)) - set(keep)
            checkpoint_rows.sweep(connection, gone)
            if gone:  # states reveal the text
                erasure.owe(connection)
        return len(gone)

    def drop_unopenable(self, before: int) -> None:
        """Remove the states that were sealed for the memory of another process. before: microseconds since 1970."""
        with self.reading() as connection:
            numbers = loose.of_other_processes(connection, before)
        if numbers:
            self.drop_loose(numbers)

    def drop_sealed_of_others(self, owners: Collection[str]) -> None:
        """Remove the sealed checkpoints of all owners but these."""
        with self.reading() as connection:
            numbers = loose.sealed_of_others(connection, owners)
        if numbers:
            self.drop_loose(numbers)

    def drop_loose(self, checkpoints: Collection[int]) -> None:
        """Remove those of these checkpoints that no turn links to.

        No erasure is owed for them: sealed ones tell nothing, and others are of a conversation that is stored.
        """
        with database.writing(self._engine, self.file) as connection:
            checkpoint_rows.sweep(connection, checkpoints)

    def bound_loose(
        self,
        used: Collection[int] = (),
        made: Collection[int] = (),
        *,
        keep: Collection[int] = (),
        sealed: bool = False,
    ) -> int:
        """Remove the least recently used unlinked checkpoints while they exceed their share of the quota.

        Returns how many. used: ids of those that a request just went on from, or made again. made: of its new ones.
        keep: as for `sweep`. sealed: of the sealed ones.
        """
        with database.writing(self._engine, self.file) as connection:
            gone = loose.bound(connection, self.quota, used, made, keep, sealed=sealed)
            if gone and not sealed:
                erasure.owe(connection)
        return gone

    def drop_damaged(self, checkpoint_id: int, spec: StateSpec) -> int:
        """Remove a checkpoint that cannot be read, and all that depend on the damaged part. Returns how many."""
        with database.writing(self._engine, self.file) as connection:
            return commits.drop(connection, checkpoint_id, spec)

    def rewrite(self, turn_id: str, ids: Line, text: Passage, checkpoint: EncodedCheckpoint) -> CheckpointResult | None:
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
        checkpoints: Sequence[EncodedCheckpoint],
        *,
        head: str,
        title: str | None = None,
    ) -> CommitResult:
        """Write a whole session from elsewhere in one transaction; parents stand before their children in `turns`.

        title: the one it was given there.
        """
        self._check_room(checkpoints)
        with database.writing(self._engine, self.file) as connection:
            quota = self.quota
            return CommitResult(
                tuple(commits.adopt(connection, session, turns, checkpoints, quota, head=head, title=title))
            )

    def taken(self, session_id: str, turn_ids: Sequence[str] = ()) -> bool:
        """Return True if one of these ids is in use. Checkpoints may outlive the session they came from."""
        with self.reading() as connection:
            return turn_rows.taken(connection, session_id, turn_ids)

    @contextmanager
    def parts(
        self, checkpoint_id: int, spec: StateSpec, sealed: SealedLine | None = None, *, end: int | None = None
    ) -> Iterator[tuple[int, Iterator[Part]]]:
        """Open (position, parts) of a checkpoint's state, for Program.fill. sealed, end: as of `read_parts`.

        The parts belong together only if all of them were read without a StoreError.
        """
        with self.reading() as connection:
            position, parts = read_parts(connection, checkpoint_id, spec, sealed, end=end)
            with closing(parts):  # a thread reads ahead: it must be done with the connection, however this ends
                yield position, parts

    def load(self, checkpoint_id: int, spec: StateSpec) -> State:
        """Read the whole state of a checkpoint, in the dtypes of `spec`. Every stored byte was verified."""
        with self.reading() as connection:
            return self.load_in(connection, checkpoint_id, spec)

    def reply(self, key: ReplyKey) -> Reply | None:
        """Return the stored reply to the request of this key, if its turns still exist and it has not expired."""
        with self.reading() as connection:
            return reply_rows.find_reply(connection, key)

    def receive(self, turn_id: str, facts: Mapping[str, Any], running: Sequence[str] = ()) -> None:
        """Write that a request was accepted, before it has a turn. The commit of its turn removes that.

        running: the turns of all requests that have not ended, whose receipts stay.
        """
        owner = self.domain.owner

        def write() -> None:
            with self.writing() as connection:
                reply_rows.write_receipt(connection, turn_id, owner, facts, running)

        self.room.for_words(write)

    def end_receipt(self, turn_id: str, facts: Mapping[str, Any]) -> None:
        """Write how a request ended that gets no turn, unless its receipt was removed."""
        owner = self.domain.owner

        def write() -> None:
            with self.writing() as connection:
                reply_rows.end_receipt(connection, turn_id, owner, facts)

        self.room.for_words(write)

    def drop_receipt(self, turn_id: str) -> None:
        """Remove the receipt of a request that got no turn, and erase it. Raises UnknownSession without one."""
        with self.writing() as connection:
            if reply_rows.read_receipt(connection, turn_id, self.domain) is None:
                raise UnknownSession(f"there is no receipt of turn {turn_id!r}")
            reply_rows.drop_receipt(connection, turn_id)
            erasure.owe(connection)
        database.settle(self._engine, self.file, idle=False)

    def sessions(self, limit: int | None = None, after: str | None = None) -> list[Session]:
        """Read the sessions, most recently used first.

        limit: at most so many; None: all. after: only those that follow this session.
        Raises UnknownSession if session `after` does not exist any more.
        """
        with self.reading() as connection:
            return session_rows.read_sessions(connection, self.domain, limit, after)

    @contextmanager
    def each_session(self) -> Iterator[Callable[[], Iterator[Session]]]:
        """Open the list of all sessions at this moment. Each call begins it anew; a page at a time is in memory."""
        with self.reading() as connection:
            yield lambda: session_rows.iterate_sessions(connection, self.domain)

    def ids(self, beginning: str = "") -> list[str]:
        """Read the ids of the sessions that begin so, most recently used first."""
        with self.reading() as connection:
            return session_rows.read_ids(connection, self.domain, beginning)

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
        """Exempt a session from retention, or end that; of a fork also its shared beginning. Raises UnknownSession."""
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
    ) -> session_rows.SearchResult:
        """Find the sessions that have all words of a text, as `find` among the rows does. Raises UnknownSession."""
        return session_rows.find(self.reading, self.domain, text, limit, after, within_s)

    def collect(self, quota: int | None = None, *, dry_run: bool = False) -> retention.CollectionResult:
        """Remove checkpoints until those left take at most `quota` bytes (default: the store's own).

        The space goes back to the disk. Pinned sessions keep theirs, even above the quota. dry_run: only report what
        would go.
        """
        limit = self.quota if quota is None else quota
        return commits.collect(self._engine, self.file, self.room, limit, dry_run=dry_run)

    def turns(self, session_id: str) -> list[Turn]:
        """Return the tree of a session: all its turns, parents before their children. Raises UnknownSession."""
        with self.reading() as connection:
            session_rows.session_row(connection, session_id, self.domain)
            return turn_rows.read_tree(connection, session_id)

    def partings(self, turns: Sequence[Turn]) -> Mapping[str, Parting]:
        """Return where the prompts of turns differ from earlier ones of the same owner, by turn (`read_partings`)."""
        with self.reading() as connection:
            return read_partings(connection, turns, self.domain)

    def usages(self, session_id: str) -> dict[str, Mapping[str, Any]]:
        """Return the usage of each answer of a session, by turn, as far as it is still kept."""
        with self.reading() as connection:
            return reply_rows.read_usages(connection, session_id)

    def beginnings(self, lineage: str, most: int) -> list[tuple[str, Line]]:
        """Read (owner, ids) of the newest first turns of conversations with a model, at most so many, the oldest first.

        Of all owners.
        """
        with self.reading() as connection:
            return turn_rows.read_beginnings(connection, lineage, most)

    def warm(self) -> list[WarmBeginning]:
        """Read the warm beginnings, the one used last first."""
        with self.reading() as connection:
            return warm_rows.read_warm(connection, self.domain)

    def unread_warm(self, scope: Scope) -> list[tuple[str, SessionInfo]]:
        """Read (turn, session) of the warm beginnings of a model whose state is not stored. Of all owners."""
        with self.reading() as connection:
            return warm_rows.read_unread(connection, scope)

    def warm_states(self) -> frozenset[int]:
        """Read the ids of the checkpoints of all warm beginnings. Of all owners."""
        with self.reading() as connection:
            return warm_rows.read_states(connection)

    def beginning(self, session_id: str) -> tuple[Turn, int]:
        """Read the first turn of a session, and how many of its ids are tools and system messages.

        Raises UnknownSession; StoreError if their number is not known.
        """
        with self.reading() as connection:
            session_rows.session_row(connection, session_id, self.domain)
            return warm_rows.read_beginning(connection, session_id)

    def path(self, turn_id: str) -> list[Turn]:
        """Read the turns from the root to this one. Raises UnknownSession."""
        with self.snapshot() as stored:
            found = stored.path(turn_id)
            if self.domain.sees is not None:
                stored.info(found[-1].session)
            return found

    def fork(self, session_id: str, turn_id: str | None = None) -> Session:
        """Start a new session at a turn of this one, by default its head. Nothing is copied.

        Raises UnknownSession, UnknownTurn if this session has no such turn, StoreError on an invalid id.
        """
        now = turn_rows.to_micros(datetime.now(UTC))
        with database.writing(self._engine, self.file) as connection:
            origin = session_rows.session_row(connection, session_id, self.domain)
            used = session_rows.after_all(connection, now)
            at, owner = origin.head if turn_id is None else turn_id, self.domain.owner
            made = tree.insert_fork(connection, origin, at, owner, now, used)
            return self.session_in(connection, made)

    def resumable(self, session_id: str) -> set[str]:
        """Return the turns of a session whose end has a stored state. Raises UnknownSession."""
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
        except DiskFull:  # then in parts, because a removal is written to the log first
            while self.room.removing(lambda connection: retention.empty(connection, session_id)):
                pass
            self.room.removing(lambda connection: session_rows.remove_session(connection, session_id, self.domain))
        self._share()
        database.settle(self._engine, self.file, idle=False)
        self.room.restock()

    def remove_turn(self, turn_id: str, instead: Mapping[str, Any]) -> None:
        """Remove a turn and what only it needed. Its session goes too if it has no other turn. Raises UnknownSession.

        A turn that others, forks, or a conversation follow on stays, as they need it, with the facts `instead`.
        """
        only = None  # its session, if that has no other turn
        try:
            with database.writing(self._engine, self.file) as connection:
                turn = turn_rows.read_turn(connection, turn_id)
                session_rows.session_row(connection, turn.session, self.domain)
                if "conversation" in instead or reply_rows.is_followed(connection, turn_id):
                    reply_rows.forget(connection, [turn_id])
                    reply_rows.write_facts(connection, turn_id, instead)
                elif reply_rows.remove_turn(connection, turn):
                    erasure.owe(connection)
                else:
                    only = turn.session
                    session_rows.remove_session(connection, only, self.domain)
        except DiskFull:
            if only is None:
                raise
            self.delete(only)
        self._share()
        database.settle(self._engine, self.file, idle=False)
        self.room.restock()

    def settle(self) -> bool:
        """Do deferred work. Return True if sessions are left to be counted.

        It moves commits from the log into the file, and counts the sizes of sessions that sharing changed. It also
        erases removed data for good if that was not possible at once.
        """
        return commits.settle(self._engine, self.file, self.room)

    def move_log(self) -> None:
        """Move commits from the log into the file, and nothing else."""
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
    """Let `patience` interrupt statements inside. An interrupted one fails, and its transaction is rolled back."""
    raw: Any = connection.connection.dbapi_connection
    if patience is not PATIENT:
        raw.set_progress_handler(patience.stop, _ASK_EACH)
    try:
        yield
    finally:
        raw.set_progress_handler(None, 0)
