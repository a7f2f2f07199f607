"""The store's one thread: encodes checkpoints while tokens flow, and commits a turn before its client gets the end."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

from ssmd.engine.decode.generation import Then
from ssmd.engine.metrics import Metrics, Pace, StoreHealth
from ssmd.engine.request import Retention
from ssmd.model.state import StateSpec
from ssmd.sessions.checkpoint import Maker, NewCheckpoint
from ssmd.sessions.line import Line, Passage
from ssmd.sessions.remote.link import Link
from ssmd.sessions.reply import NewReply, Reply, ReplyKey
from ssmd.sessions.rows.blobs import EncodedCheckpoint, encode
from ssmd.sessions.rows.faults import DiskFull, ReplacedFile, StoreLocked
from ssmd.sessions.store import CommitResult, Patience, Store
from ssmd.sessions.turn import NewTurn, SessionInfo, StoreError, TurnRemoved
from ssmd.text.messages import Message

log = logging.getLogger(__name__)
COMMIT_PATIENCE_S = 2.0  # s a client waits for its turn to be stored with the state at its end
TEXT_PATIENCE_S = 10.0  # s for its text alone; a commit that the disk has begun to make durable is waited for
MAX_QUEUED_BYTES = 1 << 30
IDLE_S = 0.5
LOOK_S = 60.0  # s between looks for work that other processes left
LOOSE_S = 600.0  # s an unlinked state stays after its last use, for a repeated request
SEALED_S = 24 * 3600.0  # s a sealed state stays after its last use
LOG_BYTES = 64 << 20  # bytes in the log from which it is moved into the file, before a commit has to do that
AHEAD_BYTES = 4 << 20  # size from which a prompt's checkpoint is written while the answer is still generated


class StoreTimeout(StoreError):
    """A write that takes longer than a client waits for the end of its answer."""

    reason = "late"


class _CommitStatus(Patience):
    """The standing of a commit towards its client, which gets one result that stays true. Thread-safe.

    then: as in `Writer.commit`; called after `well` or `lost`. well: called if all is stored. lost: called with a
    StoreError, and True if the text is lost too.
    """

    def __init__(self, then: Then, well: Callable[[], None], lost: Callable[[StoreError, bool], None]) -> None:
        self._then, self._well, self._lost = then, well, lost
        self._lock = threading.Lock()
        self._asked = time.monotonic()
        self._told = self._sure = self._overdue = False
        self._began: float | None = None  # monotonic s when it began to write states, with the database's lock
        self.text = False  # the text is durable
        self.late = False  # its client has waited for the state long enough
        self._over = self._after(COMMIT_PATIENCE_S, self._hurry)  # set: its patience does not end any more

    @property
    def waited_s(self) -> float:
        return time.monotonic() - self._asked

    @property
    def wrote_s(self) -> float:
        """Return the seconds since the last attempt began to write states, without its wait for another process."""
        return 0.0 if self._began is None else time.monotonic() - self._began

    @property
    def given_up(self) -> bool:
        """Return True if its client got the result that nothing is stored."""
        return self._told and not self.text

    def begin(self) -> None:
        """Begin to write.

        Raises StoreTimeout if the client has its result, or would have it if an attempt had not hung.
        """
        with self._lock:
            self._sure, self._began = False, None
            overdue = self._overdue
        if overdue:
            self._give_up()
        if self._told:
            raise StoreTimeout("the client got its result before the turn was written")

    def stop(self) -> bool:
        """Return True if its client has waited long enough for the states that are being written."""
        if self._began is None:
            self._began = time.monotonic()
        return self.late

    def sure(self) -> None:
        """Note that the write becomes durable next. Raises StoreTimeout if its client got another result meanwhile."""
        with self._lock:
            if self._told or (self.text and self.late):
                raise StoreTimeout("a turn was given up before it was written")
            self._sure = True

    def text_is_there(self) -> None:
        """Note that the text is durable, without the state so far."""
        with self._lock:
            self.text, self._sure = True, False
        if self.late:
            self.end(True, err=_late())

    def end(self, stored: bool, state_stored: bool = False, err: StoreError | None = None) -> None:
        """Send the client the result, unless it has one."""
        with self._lock:
            first, self._told = not self._told, True
            self.text |= stored
        self._over.set()
        if err is not None and (first or not isinstance(err, StoreTimeout)):
            self._lost(err, first and not stored)
        if first:
            if stored and err is None:
                self._well()
            self._then(stored, state_stored)

    def _hurry(self) -> None:
        with self._lock:
            self.late = True
            if not self.text and not self._told:
                self._over = self._after(TEXT_PATIENCE_S - COMMIT_PATIENCE_S, self._give_up)
            text_alone = self.text and not self._sure
        if text_alone:
            self.end(True, err=_late())

    def _give_up(self) -> None:
        with self._lock:
            self._overdue = True
            if self._told or self._sure or self.text:
                return
            self._told = True
        self._lost(StoreTimeout(f"the store took more than {TEXT_PATIENCE_S:.0f} s"), True)
        self._then(False, False)

    def _after(self, seconds: float, work: Callable[[], None]) -> threading.Event:
        """Start a timer. Return the event that stops it: the timer itself refers to this object, and to its turn."""
        timer = threading.Timer(seconds, work)
        timer.daemon = True
        timer.start()
        return timer.finished


def _once(within_s: float, then: Callable[[bool], None]) -> Callable[[bool], None]:
    """Return a function that calls `then` with its argument, once; a timer calls it with False after `within_s`."""
    told = threading.Semaphore()

    def tell(done: bool) -> None:
        if told.acquire(blocking=False):
            over.set()
            then(done)

    timer = threading.Timer(within_s, tell, [False])
    over = timer.finished  # not the timer, which refers to `tell`
    timer.daemon = True
    timer.start()
    return tell


def _late() -> StoreTimeout:
    return StoreTimeout(f"the state of a turn took more than {COMMIT_PATIENCE_S:.0f} s")


class PendingCheckpoint:
    """A checkpoint on its way into the store: encoded on the writer's thread, written by the commit of its turn."""

    def __init__(self, checkpoint: NewCheckpoint) -> None:
        self.checkpoint = checkpoint
        self.nbytes = sum(t.nbytes for t in checkpoint.state.tensors.values())
        self.encoded: EncodedCheckpoint | None = None
        self.ms = 0.0  # spent on encoding
        self.ahead = False  # written before its turn
        self.stored: int | None = None  # the id under which it waits for its turn


class Writer:
    """Does a store's work in order, in one thread, for all engines that use the store.

    `MAX_QUEUED_BYTES` bounds the states that wait to be encoded. Beyond it a checkpoint is left out, with a warning,
    and its turn is stored as text.
    """

    def __init__(self, store: Store, metrics: Metrics, retention: Retention = "24h") -> None:
        """retention: of the states of requests with "store": false that say nothing of it."""
        self.store = store
        self.retention = retention
        self.remote: Link | None = None  # through which the store's turns are shared
        self._metrics = metrics
        self.condition = StoreHealth(metrics)
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._queued_bytes = 0
        self._ahead: Counter[int] = Counter()  # checkpoint ids, by how many turns may still link them
        self._swept = -LOOK_S  # monotonic s of the last sweep
        self._unsettled = True  # the last process may have left work undone
        self._logged = 0  # bytes of states that stand in the log
        self.pace = Pace()
        self._noticed = ""  # the fault that the last look found
        self._began = time.time_ns() // 1000
        self._thread = threading.Thread(target=self._run, name="ssmd-writer", daemon=True)
        self._thread.start()

    def encode(
        self,
        checkpoint: NewCheckpoint,
        made: Maker,
        above: Sequence[PendingCheckpoint] = (),
        *,
        at_once: bool = False,
    ) -> PendingCheckpoint | None:
        """Start encoding a checkpoint; None if too much is waiting already.

        above: those that it grows from, which are written before it. at_once: write it when it is encoded, however
        small it is.
        """
        pending = PendingCheckpoint(checkpoint)
        with self._lock:
            if self._queued_bytes + pending.nbytes > MAX_QUEUED_BYTES:
                return None
            self._queued_bytes += pending.nbytes

        def work() -> None:
            try:
                started = time.perf_counter()
                pending.encoded = encode(checkpoint, scope=made.scope, producer=made.producer, spec=made.spec)
                pending.ms = (time.perf_counter() - started) * 1e3
            finally:
                with self._lock:
                    self._queued_bytes -= pending.nbytes
            if at_once or (checkpoint.kind != "turn" and pending.encoded.nbytes >= AHEAD_BYTES):
                for one in (*above, pending):
                    if one.stored is None and one.encoded is not None:
                        self._write_ahead(one, one.encoded)

        self._work.put(work)
        return pending

    def publish(self, checkpoints: Sequence[PendingCheckpoint]) -> None:
        """Write checkpoints before their turn, so that other requests find them. From any thread."""

        def work() -> None:
            for one in checkpoints:
                if one.stored is None and one.encoded is not None:
                    self._write_ahead(one, one.encoded)

        if checkpoints:
            self._work.put(work)

    def _write_ahead(self, pending: PendingCheckpoint, encoded: EncodedCheckpoint) -> None:
        try:
            placed = self.store.keep(encoded)
        except StoreError as err:  # the commit tries again, and reports it
            log.debug("a checkpoint was not written ahead: %s", err)
            return
        self._unsettled = True
        if placed.id is not None:
            pending.encoded = encoded.without_data()
            pending.stored = placed.id
            self._ahead[placed.id] += 1
        self._logged += placed.nbytes
        if placed.nbytes:
            pending.ahead = True
            self._metrics.checkpoint(placed.nbytes, pending.ms)

    def commit(
        self,
        session: SessionInfo,
        turns: Sequence[NewTurn],
        checkpoints: Sequence[PendingCheckpoint],
        then: Then,
        reply: NewReply | None = None,
        heard: Mapping[str, Sequence[Message]] | None = None,
    ) -> None:
        """Write all in one transaction, then call `then(stored, state_stored)`, once.

        If the states fail, or take COMMIT_PATIENCE_S, only the text is written. If the last states took long, the text
        is written first. A write that cannot begin to be durable within TEXT_PATIENCE_S is not done at all.
        """

        def lost(err: StoreError, text: bool) -> None:
            self.condition.failed(err, turns=len(turns) if text else 0)

        standing = _CommitStatus(then, self.condition.well, lost)

        def write(some: Sequence[EncodedCheckpoint]) -> CommitResult:
            return self.store.commit(turns, some, session=session, reply=reply, heard=heard, patience=standing)

        def attach(some: Sequence[EncodedCheckpoint]) -> CommitResult:
            return self.store.attach(turns, some, session=session, reply=reply, patience=standing)

        def work() -> None:
            self._forget(checkpoints)
            if standing.given_up:
                return
            pending = [p for p in checkpoints if p.encoded is not None]
            try:
                done = self._commit(standing, [p.encoded for p in pending if p.encoded is not None], write, attach)
            except StoreError as err:
                standing.end(standing.text, err=err)
                return
            except Exception as err:  # the client gets a result, and the log the error
                standing.end(standing.text, err=StoreError(f"the store's writer failed: {err}"))
                raise
            finally:
                if standing.text:
                    self._unsettled = True
            if heard:
                self._metrics.healed("turns", len(heard))
            self._logged += done.nbytes
            for p, one in zip(done.checkpoints, pending, strict=False):
                if p.why_not:
                    self._metrics.checkpoint_left_out()
                    level = logging.WARNING if done.full is None else logging.DEBUG  # the condition reports a full disk
                    log.log(level, "session %s: a checkpoint was left out: %s", session.id, p.why_not)
                elif p.nbytes or not one.ahead:
                    self._metrics.checkpoint(p.nbytes, one.ms)
            self._metrics.stored_bytes(self.store.bytes_stored(), self.store.quota)

        self._work.put(work)

    def _commit(
        self,
        standing: _CommitStatus,
        states: Sequence[EncodedCheckpoint],
        write: Callable[[Sequence[EncodedCheckpoint]], CommitResult],
        attach: Callable[[Sequence[EncodedCheckpoint]], CommitResult],
    ) -> CommitResult:
        """Write turns with or without their states, and send the client the result.

        Raises StoreError if no text is stored.
        """
        nbytes = sum(e.nbytes for e in states if e.has_data)
        wait_s = self.pace.wait_s(nbytes)
        failed: StoreError | None = None
        if states and not standing.late and standing.waited_s + wait_s < COMMIT_PATIENCE_S / 2:
            try:
                done = self._timed(standing, nbytes, states, write)
                standing.end(True, done.ends, done.full)
                return done
            except (StoreLocked, TurnRemoved):
                raise
            except StoreError as err:
                failed = _late() if standing.late else err
        ahead = [e for e in states if not e.has_data]  # these are only linked
        try:
            done = write(ahead)
        except StoreError as err:
            if not ahead or isinstance(err, (StoreTimeout, StoreLocked, TurnRemoved)):
                raise
            ahead = []
            done = write(())
        if not states:
            standing.end(True, err=done.full)
            return done
        standing.text_is_there()
        if failed is None and not standing.late:
            try:
                done = self._timed(standing, nbytes, states, attach)
                standing.end(True, done.ends)
                return done
            except StoreError as err:
                failed = _late() if standing.late else err
        standing.end(True, err=failed or _late())
        self._metrics.checkpoint_left_out(len(states) - len(ahead))
        return CommitResult((), done.full)

    def _timed(
        self,
        standing: _CommitStatus,
        nbytes: int,
        states: Sequence[EncodedCheckpoint],
        write: Callable[[Sequence[EncodedCheckpoint]], CommitResult],
    ) -> CommitResult:
        """Write states, and note the time they took, or the time they were given."""
        try:
            done = write(states)
        except StoreError:
            if standing.late and standing.wrote_s >= COMMIT_PATIENCE_S / 2:
                self.pace.note(nbytes, standing.wrote_s)
            raise
        if done.full is None:
            self.pace.note(nbytes, standing.wrote_s)
        return done

    def keep(
        self,
        checkpoints: Sequence[PendingCheckpoint],
        used: int | None,
        then: Callable[[bool], None],
        *,
        sealed: bool = False,
    ) -> None:
        """Write states that belong to no turn, for prompts that begin alike. Then call `then(written)`, once.

        `then` is called after COMMIT_PATIENCE_S at the latest. used: id of the checkpoint that they grew from.
        They stay for LOOSE_S after their last use, sealed ones for SEALED_S, and take a share of the quota at most.
        """
        tell = _once(COMMIT_PATIENCE_S, then)

        def work() -> None:
            self._forget(checkpoints)
            self._unsettled = True
            again, made, written = [] if used is None else [used], list[int](), False
            try:
                kept = 0
                for pending in checkpoints:
                    if pending.encoded is not None:
                        placed = self.store.keep(pending.encoded)
                        if placed.id is not None:
                            (again if placed.was_there and not pending.ahead else made).append(placed.id)
                        kept += placed.id is not None
                        if placed.nbytes:
                            self._metrics.checkpoint(placed.nbytes, pending.ms)
                self.store.bound_loose(again, made, keep=self._ahead, sealed=sealed)
                written = kept == len(checkpoints)
            except StoreError as err:
                log.warning("the state of a prompt is not kept: %s", err)
            finally:
                tell(written)
            self._metrics.stored_bytes(self.store.bytes_stored(), self.store.quota)

        self._work.put(work)

    def drop_sealed_of_others(self, owners: Collection[str]) -> None:
        """Remove the sealed states of all owners but these: their keys are gone. From any thread."""

        def work() -> None:
            try:
                self.store.drop_sealed_of_others(owners)
            except StoreError as err:
                log.warning("the states of keys that are gone were not removed: %s", err)

        self._work.put(work)

    def hold(self, checkpoint: int | PendingCheckpoint) -> Callable[[], None]:
        """Keep a checkpoint that may belong to no turn from being removed. Return the function that ends that.

        One on its way into the store is kept if it is written by all earlier work. Both from any thread.
        """
        held: list[int] = []

        def begin() -> None:
            number = checkpoint if isinstance(checkpoint, int) else checkpoint.stored
            if number is not None:
                held.append(number)
                self._ahead[number] += 1

        self._work.put(begin)
        return partial(self._work.put, lambda: self._let_go(held))

    def abandon(self, checkpoints: Sequence[PendingCheckpoint]) -> None:
        """Forget checkpoints that get no turn."""
        self._work.put(lambda: self._forget(checkpoints))

    def drop(self, pending: PendingCheckpoint | None) -> None:
        """Remove a checkpoint that was written at once, unless a turn links to it. From any thread."""
        if pending is None:
            return

        def work() -> None:
            self._forget([pending])
            if pending.stored is not None and pending.stored not in self._ahead:
                try:
                    self.store.drop_loose([pending.stored])
                except StoreError as err:  # the next sweep removes it
                    log.debug("a checkpoint was not removed: %s", err)

        self._work.put(work)

    def _forget(self, checkpoints: Sequence[PendingCheckpoint]) -> None:
        self._let_go([p.stored for p in checkpoints if p.stored is not None])

    def _let_go(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._ahead[number] -= 1
            if not self._ahead[number]:
                del self._ahead[number]

    def rewrite(self, turn: str, ids: Line, text: Passage, checkpoint: PendingCheckpoint) -> None:
        """Write the state after a turn as later requests render it. No request waits for it or needs it."""

        def work() -> None:
            if checkpoint.encoded is None:
                return
            try:
                placed = self.store.rewrite(turn, ids, text, checkpoint.encoded)
            except StoreError as err:
                log.warning("turn %s is not rerendered: %s", turn, err)
                return
            self._unsettled = True
            if placed is not None:
                self._metrics.checkpoint(placed.nbytes, checkpoint.ms)
                self._metrics.stored_bytes(self.store.bytes_stored(), self.store.quota)

        self._work.put(work)

    def heal(self, checkpoint_id: int, spec: StateSpec) -> None:
        """Remove a damaged checkpoint, so that it is not found again. spec: of its state. From any thread."""

        def work() -> None:
            try:
                gone = self.store.drop_damaged(checkpoint_id, spec)
            except StoreError as err:  # it is found again, and passed over again
                log.warning("checkpoint %s is damaged and could not be removed: %s", checkpoint_id, err)
                return
            if gone:
                self._unsettled = True
                self._metrics.healed("checkpoints", gone)
                log.warning("%d damaged checkpoints were removed; their prompts are read again", gone)

        self._work.put(work)

    def reply(self, key: ReplyKey) -> Reply | None:
        """Return the stored reply to a request. Waits until all earlier turns are written. Raises StoreError."""
        self.flush()
        return self.store.reply(key)

    def look(self) -> None:
        """Note in the store's health if its file was removed, replaced or put back. From any thread; takes 10 µs."""
        try:
            self.store.look()
        except StoreError as err:
            self._noticed = err.reason
            self.condition.noticed(err)
        else:
            if self.condition.reason in (self._noticed, ReplacedFile.reason):
                self.condition.well()
            self._noticed = ""

    def after(self, work: Callable[[], None], within_s: float | None = None) -> None:
        """Call `work` on the writer's thread once all earlier work is done. From any thread.

        within_s: call it after so many seconds at the latest, then on a thread of its own.
        """
        self._work.put(work if within_s is None else partial(_once(within_s, lambda _: work()), True))

    def count_warm(self, tokens: int) -> None:
        """Count a request that starts from a warm beginning. tokens: those that it does not read."""
        self._metrics.warm_begun(tokens)

    def flush(self) -> None:
        """Wait until all earlier work is done or has failed."""
        done = threading.Event()
        self._work.put(done.set)
        while self._thread.is_alive() and not done.wait(timeout=0.1):
            pass

    def close(self) -> None:
        """Finish the queued work, then stop the thread."""
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        while True:
            try:
                work = self._work.get(timeout=IDLE_S if self._unsettled else LOOK_S)
            except queue.Empty:
                work = self._settle
            if work is None:
                break
            try:
                try:
                    work()
                finally:
                    del work  # this frees the states that were written
                if self._logged >= LOG_BYTES and self._work.empty():
                    self._move_log()
            except Exception:
                log.exception("the store's writer failed at a piece of work")
        if self._unsettled:
            self._settle()

    def _move_log(self) -> None:
        self._logged = 0
        try:
            self.store.move_log()
        except StoreError as err:
            log.debug("the store's log is not moved into its file yet: %s", err)

    def _settle(self) -> None:
        """Move commits from the log into the database file, and do owed work, while no work is queued."""
        self._unsettled = False
        self._logged = 0
        try:
            if time.monotonic() - self._swept >= LOOK_S:
                if self._swept < 0:  # the first time
                    self.store.drop_unopenable(self._began)
                self._swept = time.monotonic()
                self.store.sweep(LOOSE_S, SEALED_S, keep=self._ahead)
            self._unsettled = self.store.settle()
            if self.store.room.restock() and self.condition.reason == DiskFull.reason:
                self.condition.well()
        except StoreError as err:
            log.warning("the store's log was not moved into its file: %s", err)
