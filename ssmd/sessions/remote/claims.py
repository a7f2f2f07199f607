"""Claims of this machine on requests with an `Idempotency-Key`, in a remote that keeps replies.

A claim is prolonged as long as its request is answered here, and until the remote has the turn. Then its answer is
recorded. A claim that another machine has by now is lost: its answer is not recorded, and is not given again here.
"""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from ssmd.sessions.remote.body import read_body
from ssmd.sessions.remote.remote import InvalidTurn, Remote, RemoteError, Replies, ReplyClaim, ReplyRow, TurnPlace
from ssmd.sessions.reply import Reply, ReplyKey
from ssmd.sessions.rows import outbox, replies
from ssmd.sessions.store import Store
from ssmd.sessions.turn import Domain, StoreError

log = logging.getLogger(__name__)
LEASE_S = 30.0  # s after its last sign until a machine that answers counts as gone, by the database's clock
RENEW_S = 6.0  # s between signs
MAX_CLAIMS = 10_000  # claims that are held at once: more requests are answered without one
CLAIM_S = 1.0  # s that a request with a key waits for the remote to give it
READ_S = 5.0  # s that it then waits for the turns of another machine's answer
_KEPT_BACK = ("over_quota", "key_refused")  # turns wait for a user, for days perhaps: other machines answer meanwhile
_T = TypeVar("_T")


class Claiming(Protocol):
    """A link to a remote as claims use it."""

    def ask(self, seconds: float, work: Callable[[Remote], _T]) -> _T | None:
        """Do work on the remote, for so long at most; None if the remote is away. Raises RemoteError."""

    def failed(self, err: StoreError) -> None:
        """Note that the remote failed."""

    @property
    def problem(self) -> str:
        """Return why turns wait, or ""."""


@dataclass(eq=False)
class Held:
    """A claim, from the request on until its answer is recorded. ended: nothing is answered under it any more."""

    key: ReplyKey
    claim: ReplyClaim
    ended: bool = False
    stored: bool = False
    lost: bool = False


@dataclass(frozen=True)
class RemoteReply:
    """The answer that another machine gave. fence: of its row, to replace it if it cannot be given again."""

    reply: Reply
    fence: int


@dataclass(frozen=True)
class UnderWay:
    """A request that another machine answers now. body: hash of it."""

    body: bytes


class Claims:
    """The claims of a daemon. Thread-safe."""

    def __init__(self, store: Store, link: Claiming) -> None:
        self._store, self._link = store, link
        self._held: list[Held] = []
        self._lock = threading.Lock()
        self._wake, self._stopped = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    def claim(self, key: ReplyKey, domain: Domain, over: int = 0) -> Held | RemoteReply | UnderWay | None:
        """Claim a request, or return how another machine answered it; None if the remote is away, or keeps no replies.

        Raises nothing: without the remote a request is answered from what is here. over: fence of a row to replace.
        """
        with self._lock:
            if len(self._held) >= MAX_CLAIMS:
                return None
        try:
            return self._claim(key, domain, over)
        except StoreError as err:
            self._link.failed(err)
            return None

    def _claim(self, key: ReplyKey, domain: Domain, over: int) -> Held | RemoteReply | UnderWay | None:
        token, asked = secrets.token_hex(16), threading.Event()  # set when the request waits no longer

        def take(remote: Remote) -> ReplyClaim | ReplyRow | None:
            if remote.replies is None:
                return None
            seconds = key.lasts.total_seconds()
            found = remote.replies.claim(key.digest, key.body, token, lease_s=LEASE_S, lasts_s=seconds, over=over)
            if asked.is_set() and isinstance(found, ReplyClaim):
                remote.replies.release(found)
            return found

        try:
            found = self._link.ask(CLAIM_S, take)
        finally:
            asked.set()
        if isinstance(found, ReplyClaim):
            return self._hold(Held(key, found))
        if found is None:
            return None
        if found.answer is None or found.request != key.body:
            return UnderWay(found.request)
        reply = self._link.ask(READ_S, lambda remote: read_reply(remote, found, domain))
        if reply is None:  # its turns were removed, or altered: nothing was answered
            log.warning("an answer of the remote cannot be given again, so that its request is answered anew")
            return None if over == found.fence else self._claim(key, domain, found.fence)
        return RemoteReply(reply, found.fence)

    def _hold(self, held: Held) -> Held:
        with self._lock:
            self._held.append(held)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="ssmd-remote-claims", daemon=True)
                self._thread.start()
        return held

    def end(self, held: Held, *, stored: bool) -> None:
        """Note that a request is answered. stored: its turn is, so that its answer is recorded once the turn is sent.

        Returns at once.
        """
        held.stored = stored
        held.ended = True
        self._wake.set()

    def record(self, remote: Remote, sent: set[str]) -> None:
        """Record the answers whose turns the remote has. sent: turns that it has and that still stand in the outbox.

        Called before these leave the outbox. Raises RemoteError, StoreError.
        """
        if remote.replies is None:
            return
        with self._lock:
            held = list(self._held)
        for one in held:
            if one.lost:
                self._drop(one)
                continue
            with self._store.reading() as connection:
                reply = replies.find_reply(connection, one.key)
                if reply is None or reply.body != one.key.body or not reply.complete:
                    continue
                if any(outbox.waits(connection, turn) for turn in set(reply.turns) - sent):
                    continue
                if outbox.standing(connection, reply.session) != "shared":
                    continue
            answer = json.dumps(reply.answer).encode()
            if remote.replies.record(one.claim, reply.session, reply.turns, answer):
                self._forget(one)
            else:
                self._lose(one)

    def close(self, remote: Remote | None) -> None:
        """Give back what is not answered, and end the thread."""
        self._stopped.set()
        self._wake.set()
        with self._lock:
            held, self._held = self._held, []
        if remote is not None and remote.replies is not None:
            for one in held:
                with contextlib.suppress(StoreError):
                    remote.replies.release(one.claim)

    def _forget(self, one: Held) -> None:
        with self._lock, contextlib.suppress(ValueError):
            self._held.remove(one)

    def _lose(self, one: Held) -> None:
        """Note that another machine has a request by now. What was answered here is not given again."""
        one.lost = True
        log.warning("a request with an Idempotency-Key is answered by another machine by now")
        self._drop(one)

    def _drop(self, one: Held) -> None:
        with self._store.writing() as connection:
            replies.drop_reply(connection, one.key.digest)

    def _stays(self, one: Held) -> bool:
        """Return True if an answer that ended is never recorded: it broke off, or its turns are not sent."""
        with self._store.reading() as connection:
            reply = replies.find_reply(connection, one.key)
            if reply is None or not reply.complete:
                return True
            return not any(outbox.waits(connection, turn) for turn in reply.turns)

    def _run(self) -> None:
        while not self._stopped.is_set():
            self._wake.wait(RENEW_S)
            self._wake.clear()
            with self._lock:
                held = list(self._held)
            for one in held:
                with contextlib.suppress(StoreError):  # the remote is away: the claim runs out, unless it comes back
                    self._look_after(one)

    def _look_after(self, one: Held) -> None:
        if one.ended and one.lost:
            self._drop(one)
            self._forget(one)
        elif one.ended and (not one.stored or self._stays(one) or self._link.problem in _KEPT_BACK):
            self._forget(one)
            self._link.ask(CLAIM_S, lambda at: _of(at).release(one.claim))
        elif not one.lost and self._link.ask(CLAIM_S, lambda at: _of(at).renew(one.claim, LEASE_S)) is False:
            self._lose(one)


def _of(remote: Remote) -> Replies:
    assert remote.replies is not None, "a claim is of a remote that keeps replies"
    return remote.replies


def read_reply(remote: Remote, row: ReplyRow, domain: Domain) -> Reply | None:
    """Read the answer of a row, with the text of its turns; None if one of them is gone. Raises RemoteError."""
    texts = []
    try:
        answer = json.loads(row.answer or b"")
        for turn in row.turns:
            place = TurnPlace(row.session, turn)
            raw = remote.fetch(place)
            if raw is None:
                return None
            body = read_body(raw, place)
            _, answered = body.turn.said
            if not domain.has(body.session.owner) or len(answered) != 1:
                return None
            texts.append(answered[0].content)
    except RemoteError:
        raise
    except (InvalidTurn, ValueError, RecursionError):
        return None
    if not texts or not isinstance(answer, dict):
        return None
    return Reply(row.request, row.session, row.turns, tuple(texts), True, answer)
