"""The link between a store and a remote: a thread that empties the outbox, and the look-up for a request.

A request is never kept waiting for long by a remote: it is asked for ASK_S at most, and then not again for OFFLINE_S.
A state is fetched if that is sooner than reading again, and given up when reading would have ended.
"""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from ssmd.sessions.match import Echo
from ssmd.sessions.remote.allowance import Allowance
from ssmd.sessions.remote.arrivals import fetch_path, receive
from ssmd.sessions.remote.claims import Claims
from ssmd.sessions.remote.ends import EndBody, RemoteReader, find_end, send_end, take_end
from ssmd.sessions.remote.recovery import recover
from ssmd.sessions.remote.remote import (
    Blobs,
    InvalidTurn,
    Remote,
    RemoteError,
    RemoteState,
    TurnPlace,
)
from ssmd.sessions.remote.sending import purge, send
from ssmd.sessions.remote.signing import read_key
from ssmd.sessions.rows import outbox
from ssmd.sessions.store import Store
from ssmd.sessions.turn import Domain, StoreError, UnknownSession
from ssmd.text.messages import Message

log = logging.getLogger(__name__)
ASK_S = 0.15  # s that a request waits for the remote to say whether it has its conversation
FETCH_S = 5.0  # s that it then waits for the turns
OFFLINE_S = 30.0  # s after a failure in which requests do not ask, and nothing is sent
LOOK_S = 60.0  # s between looks for what other machines have removed
CLOSE_S = 2.0  # s that a daemon which ends goes on sending
REST_S = 10.0  # s after the last turn of a conversation until the state of its end is sent
SETTLE_S = 0.2  # s after a turn until it is sent, so that its answer goes out first
REMEMBERED = 16  # conversations whose end a daemon sends that the one before it did not
ENDS_ASKED = 4  # last turns of a fetched path that are asked for a state
FIRST_BYTES_PER_S = 12.5e6  # of a remote, until packs were fetched: 100 Mbit/s
FIRST_MS_PER_TOKEN = 1.5  # of reading, until the model has read something
ACK_S = 5.0  # s that an answer waits until the remote has its turn, where the remote acknowledges
LEAST_S = 1.0  # s that a fetch may take, however soon reading would end
MOST_S = 30.0  # s that a fetch may take, however many tokens its row names
MAX_ASKED = 64  # chains of a request that are looked up, the last ones
_T = TypeVar("_T")


class _TookLong(RemoteError):
    """An answer of the remote that did not come in time."""


class Bandwidth:
    """Bytes a second of a remote: measured on packs that were fetched, from a first estimate on. Thread-safe."""

    def __init__(self) -> None:
        self._nbytes, self._seconds = FIRST_BYTES_PER_S, 1.0
        self._lock = threading.Lock()

    def add(self, nbytes: int, seconds: float) -> None:
        """Count a pack. Old ones count less and less."""
        with self._lock:
            self._nbytes, self._seconds = 0.9 * self._nbytes + nbytes, 0.9 * self._seconds + seconds

    @property
    def bytes_per_s(self) -> float:
        with self._lock:
            return self._nbytes / self._seconds


def fetching_is_sooner(nbytes: int, tokens: int, bytes_per_s: float, ms_per_token: float) -> bool:
    """Return True if fetching a state takes less than MOST_S, and less than reading the tokens that it saves."""
    return nbytes / bytes_per_s < min(MOST_S, tokens * ms_per_token / 1e3)


class RestingEnds:
    """Conversations with new turns, until they have rested for REST_S: then the state of their end is sent."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since: dict[str, float] = {}

    def note(self, session: str) -> None:
        """Note that a conversation went on, now."""
        self._since[session] = self._clock()

    def take(self, *, all_: bool = False) -> list[str]:
        """Return those that have rested, or all of them, and forget them."""
        now = self._clock()
        found = [one for one, since in self._since.items() if all_ or now - since >= REST_S]
        for one in found:
            del self._since[one]
        return found

    @property
    def wait_s(self) -> float:
        """Return the seconds until the next one has rested."""
        now = self._clock()
        return min((max(0.0, since + REST_S - now) for since in self._since.values()), default=math.inf)


class _Acknowledgement:
    """An answer that waits until the remote has its turns. Thread-safe."""

    def __init__(self, turns: frozenset[str], then: Callable[[], None]) -> None:
        self.turns, self._then = turns, then
        self.stop: Callable[[], None] = lambda: None  # ends its timer
        self._ended = threading.Semaphore()

    def end(self) -> None:
        """Let the answer go, once."""
        if self._ended.acquire(blocking=False):
            self.stop()
            self._then()


class Link:
    """A store's link to a remote. Thread-safe."""

    def __init__(
        self,
        store: Store,
        opened: Callable[[], Remote],
        clock: Callable[[], float] = time.monotonic,
        *,
        acknowledges: bool = False,
    ) -> None:
        """Share what is written from now on; `start` begins to send it.

        opened: opens the remote; called again after it could not be reached. It raises RemoteError.
        clock: in s, by which conversations rest. acknowledges: answers wait until the remote has their turns.
        """
        self.acknowledges = acknowledges
        self._waiting: list[_Acknowledgement] = []
        self._store = store
        self._open = opened
        self._remote: Remote | None = None
        self._wake = threading.Event()
        self._hurry = threading.Event()  # an answer waits for the remote, or the daemon ends
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._offline_until = 0.0  # monotonic s; requests do not ask before it
        self._unsent_until = 0.0  # monotonic s; no answer waits for the remote before it
        self._ends_at = math.inf  # monotonic s
        self._problem = ""
        self._late: list[threading.Thread] = []  # look-ups that did not come in time
        self._fetched = set[TurnPlace]()  # turns whose state was fetched, to be noted in the remote
        self._fetching = threading.Lock()  # held while a state is in memory, which may take MAX_PACK_BYTES
        self._resting, self._allowance = RestingEnds(clock), Allowance()  # for the thread alone
        self._bandwidth = Bandwidth()
        self.claims = Claims(store, self)
        self._thread = threading.Thread(target=self._run, name="ssmd-remote", daemon=True)
        store.shares = self._wake.set

    def connect(self) -> None:
        """Open the remote. Raises RemoteError; KeyRefused if this machine cannot sign what it sends."""
        read_key(self._store.file.parent)
        self._opened()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Send what waits, for CLOSE_S at most, and end the thread. The rest is sent by the next daemon."""
        self._ends_at = time.monotonic() + CLOSE_S
        self._stopped.set()
        self._wake.set()
        self._hurry.set()
        if self._thread.is_alive():
            self._thread.join(2 * CLOSE_S)
        self.claims.close(self._remote)
        if (remote := self._remote) is not None:
            remote.close()

    @property
    def problem(self) -> str:
        """Return why turns wait: "unreachable", "key_refused", "over_quota", "outbox_full", or "" if they do not."""
        with contextlib.suppress(StoreError), self._store.reading() as connection:
            if outbox.waiting(connection) >= outbox.MAX_WAITING:
                return "outbox_full"
        return self._problem

    @property
    def waiting(self) -> int:
        """Return about how many turns and tombstones are still to be sent."""
        with self._store.reading() as connection:
            return outbox.waiting(connection)

    def state(self, turns: Sequence[str]) -> RemoteState:
        """Return how stored turns stand: sent, waiting, or off if they stay here."""
        try:
            with self._store.reading() as connection:
                if any(outbox.waits(connection, turn) for turn in turns):
                    return "waiting"
                return "sent" if outbox.standings(connection, turns) == {"shared"} else "off"
        except StoreError:
            return "off"

    def when_sent(self, turns: Sequence[str], then: Callable[[], None]) -> None:
        """Call `then` once: when the remote has stored turns, or after ACK_S; at once if they stay, or it is away."""
        one = _Acknowledgement(frozenset(turns), then)
        with self._lock:
            away = self._remote is None or time.monotonic() < self._unsent_until
            if not away:
                self._waiting.append(one)
        if away:
            one.end()
            return
        self._hurry.set()
        timer = threading.Timer(ACK_S, self._give_up, [one])
        timer.daemon = True
        timer.start()
        one.stop = timer.cancel
        self._acknowledge()

    def _acknowledge(self) -> None:
        """End what waits for turns that have left the outbox."""
        with self._lock:
            found = list(self._waiting)
        if found:
            done = []
            with contextlib.suppress(StoreError), self._store.reading() as connection:
                done = [one for one in found if not any(outbox.waits(connection, turn) for turn in one.turns)]
            for one in done:
                self._end(one)

    def _give_up(self, one: _Acknowledgement) -> None:
        """Let an answer go that waited for long. The next ones do not, until something is sent again."""
        with self._lock:
            if one in self._waiting:
                self._unsent_until = max(self._unsent_until, time.monotonic() + OFFLINE_S)
        self._end(one)

    def _went(self) -> None:
        """Note that rows have left the outbox."""
        with self._lock:
            self._unsent_until = 0.0
        self._acknowledge()

    def _end(self, one: _Acknowledgement) -> None:
        with self._lock, contextlib.suppress(ValueError):
            self._waiting.remove(one)
        one.end()

    def bring(self, messages: Sequence[Message], domain: Domain, session: str | None, reader: RemoteReader) -> None:
        """Fetch the conversation that a request continues, if the remote has more of it than this store.

        session: only that of this session. reader: the model that the request is for. Raises nothing: without the
        remote the request is answered from what is here.
        """
        echo = Echo.of(messages)
        try:
            with self._store.of(domain).snapshot() as stored:
                found = None
                with contextlib.suppress(UnknownSession):
                    found = stored.echoed(messages, session)
            here = 0 if found is None else found.length
            chains = [c.said for n, c in zip(echo.lengths, echo.chains, strict=True) if n > here][-MAX_ASKED:]
            remote = self._remote
            if chains and remote is not None and self._may_ask():
                self._fetch(remote, chains, domain, session, reader)
        except StoreError as err:
            self.failed(err)

    def ask(self, seconds: float, work: Callable[[Remote], _T]) -> _T | None:
        """Do work on the remote, for so long at most; None if the remote is away. Raises RemoteError."""
        remote = self._remote
        return self._within(seconds, partial(work, remote)) if remote is not None and self._may_ask() else None

    def _fetch(
        self, remote: Remote, chains: Sequence[bytes], domain: Domain, session: str | None, reader: RemoteReader
    ) -> None:
        vocabularies = {reader.maker.scope.lineage: reader.vocabulary}
        for place in self._within(ASK_S, lambda: remote.known(chains, domain)):
            if session is not None and place.session != session:
                continue
            try:
                path = self._within(FETCH_S, partial(fetch_path, self._store, remote, place))
                if path:
                    written = receive(self._store, domain, path, vocabularies)
                    log.info("%d turns of session %s came from the remote", len(written), path[-1][0])
                    places = [TurnPlace(its, body.turn.id) for its, body in path[: -ENDS_ASKED - 1 : -1]]
                    self._fetch_end(remote, places, domain, reader)
                    return
            except InvalidTurn as err:
                log.warning("a turn of the remote is not taken: %s", err)

    def _fetch_end(self, remote: Remote, places: Sequence[TurnPlace], domain: Domain, reader: RemoteReader) -> None:
        """Fetch the state of the first of these turns that has one, if that is sooner than to read its tokens.

        Raises RemoteError. Whatever else fails, the turns are here, and are read again.
        """
        packs = remote.packs
        if packs is None:
            return
        try:
            body = self._within(FETCH_S, lambda: find_end(remote, places, reader))
            if body is None:
                return
            ms_per_token = FIRST_MS_PER_TOKEN if reader.ms_per_token is None else reader.ms_per_token
            tokens = body.position - self._position(body, domain, reader)
            bytes_per_s = self._bandwidth.bytes_per_s
            if not fetching_is_sooner(body.nbytes, tokens, bytes_per_s, ms_per_token):
                log.debug("the state of turn %s is not fetched: to read %d tokens is sooner", body.turn, tokens)
                return
            within_s = min(MOST_S, max(LEAST_S, tokens * ms_per_token / 1e3))
            began = time.monotonic()
            if not self._fetching.acquire(timeout=within_s - body.nbytes / bytes_per_s):
                log.debug("the state of turn %s is not fetched: another one is fetched meanwhile", body.turn)
                return
            try:
                if self._may_ask():
                    self._take_end(packs, body, domain, reader, within_s - (time.monotonic() - began))
            finally:
                self._fetching.release()
        except RemoteError:
            raise
        except (StoreError, MemoryError) as err:
            log.warning("a state of the remote is not taken, its turns are read again: %r", err)

    def _take_end(self, packs: Blobs, body: EndBody, domain: Domain, reader: RemoteReader, within_s: float) -> None:
        """Fetch a state and store it, or give it up. Raises RemoteError, StoreError, MemoryError."""
        began = time.monotonic()
        try:
            pack = self._within(within_s, lambda: packs.get(body.pack, body.nbytes))
            take_end(self._store.of(domain), body, pack, reader)
        except _TookLong:
            log.warning("the state of turn %s is read again: it did not come within %.1f s", body.turn, within_s)
        except RemoteError as err:  # of the folder for bytes; turns may come all the same
            log.warning("the state of turn %s is read again: %s", body.turn, err)
            return
        else:
            with self._lock:
                self._fetched.add(body.place)
        self._bandwidth.add(body.nbytes, time.monotonic() - began)

    def _position(self, body: EndBody, domain: Domain, reader: RemoteReader) -> int:
        """Return the position from which a turn's ids would be read without the remote's state."""
        with self._store.of(domain).snapshot() as stored:
            one = stored.turn(body.turn)
            found, *_ = stored.resume(reader.maker.scope, one.ids, one.stem, body.session)
        return 0 if found is None else found.start

    def _may_ask(self) -> bool:
        with self._lock:
            self._late = [thread for thread in self._late if thread.is_alive()]
            return not self._late and time.monotonic() >= self._offline_until

    def _within(self, seconds: float, work: Callable[[], _T]) -> _T:
        """Do a piece of work in a thread, which a file system may hold up. Raises RemoteError if it takes longer."""
        done: queue.SimpleQueue[tuple[_T | None, BaseException | None]] = queue.SimpleQueue()

        def run() -> None:
            try:
                done.put((work(), None))
            except BaseException as err:
                done.put((None, err))

        thread = threading.Thread(target=run, name="ssmd-remote-ask", daemon=True)
        thread.start()
        try:
            found, err = done.get(timeout=seconds)
        except queue.Empty:
            with self._lock:
                self._late.append(thread)
            raise _TookLong(f"the remote did not answer within {seconds:g} s") from None
        if err is not None:
            raise err
        return found  # type: ignore[return-value]

    def _opened(self) -> Remote:
        with self._lock:
            remote = self._remote
        if remote is None:
            remote = self._open()
            with self._lock:
                self._remote = remote
        return remote

    def failed(self, err: StoreError) -> None:
        """Note that the remote failed, or the store. Requests do not ask for OFFLINE_S, unless it can be read."""
        reached, until = not isinstance(err, RemoteError), time.monotonic() + OFFLINE_S
        answers = isinstance(err, RemoteError) and err.refused
        with self._lock:
            before, self._problem = self._problem, self._problem if reached else err.reason
            known = bool(before) and before == self._problem
            self._unsent_until = until
            if not answers:
                self._offline_until = until
            remote, self._remote = self._remote, self._remote if reached or answers else None
            waiting, self._waiting = self._waiting, [] if not reached else self._waiting
        if not reached:
            for one in waiting:
                one.end()
        if remote is not None and not (reached or answers):
            remote.close()
        level = logging.DEBUG if known else logging.WARNING
        log.log(level, "nothing is sent to the remote for %.0f s, what was said waits here: %s", OFFLINE_S, err)

    def _well(self) -> None:
        with self._lock:
            before, self._problem = self._problem, ""
        if before:
            log.warning("the remote takes what waits again")

    def _remember(self) -> None:
        """Note the conversations that were used last, whose ends the daemon before this one may not have sent."""
        with contextlib.suppress(StoreError):
            for session in self._store.sessions(REMEMBERED):
                self._resting.note(session.id)

    def _note_fetched(self, remote: Remote) -> None:
        """Note in the remote which states were fetched, so that its retention keeps them. Raises nothing."""
        with self._lock:
            places, self._fetched = self._fetched, set()
        with contextlib.suppress(RemoteError):  # such as one that is read-only
            for place in places:
                remote.used(place)

    def _send_ends(self, remote: Remote) -> None:
        """Send the states of ends that have rested; of all that are noted if the daemon ends. Raises nothing.

        If one cannot be sent, all rest again, and that one is the last of them: a disk that is too full for a state
        may have room for text.
        """
        ends = self._resting.take(all_=self._stopped.is_set())
        for n, session in enumerate(ends):
            if time.monotonic() > self._ends_at:
                return
            try:
                send_end(self._store, remote, session, self._allowance)
            except RemoteError as err:
                log.warning("the state of session %s is not sent to the remote now: %s", session, err)
                for one in (*ends[n + 1 :], session):
                    self._resting.note(one)
                return
            except StoreError as err:
                log.warning("the state of session %s is not sent to the remote: %s", session, err)

    def _is_over(self) -> bool:
        return time.monotonic() > self._ends_at

    def _run(self) -> None:
        looked = -LOOK_S
        self._remember()
        while True:
            self._wake.clear()
            self._hurry.clear()
            last, wait_s = self._stopped.is_set(), LOOK_S
            try:
                remote = self._opened()
                if time.monotonic() - looked >= LOOK_S:
                    for session in recover(self._store, remote):
                        self._resting.note(session)
                    purge(self._store, remote)
                    looked = time.monotonic()
                record = partial(self.claims.record, remote)
                try:
                    send(self._store, remote, self._is_over, self._resting.note, self._went, record, self._allowance)
                except RemoteError as err:
                    if err.refused:  # what this machine uses stays, though nothing goes
                        self._note_fetched(remote)
                    raise
                self._well()
                self._note_fetched(remote)
                self._send_ends(remote)
                wait_s = min(wait_s, self._resting.wait_s)
            except StoreError as err:
                self.failed(err)
                wait_s = OFFLINE_S
            except Exception:
                log.exception("sending to the remote failed")
                wait_s = OFFLINE_S
            if last:
                return
            if wait_s == OFFLINE_S:
                self._stopped.wait(wait_s)
            elif self._wake.wait(wait_s):
                self._hurry.wait(SETTLE_S)
