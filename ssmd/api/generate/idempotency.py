"""Idempotent requests: a repeated request gets the earlier answer, and no turn is written twice.

A repeat is recognised in two ways. A client can name its request with `Idempotency-Key`. The OpenAI SDKs send no such
header, but count their retries in `x-stainless-retry-count`. Such a retry repeats the last request with the same body,
byte for byte. A request without either header is never a repeat: its client wants another answer.

While the first attempt runs, the second waits for its end. Other servers answer 409, but an SDK retries within seconds
and then gives up, and an answer here may take minutes.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from collections import OrderedDict, deque
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial

from starlette.datastructures import Headers

from ssmd.api.generate.answer import Delivery
from ssmd.api.generate.fair_reading import FairPool
from ssmd.api.http.body import brief
from ssmd.engine.host.host import Host
from ssmd.engine.persist.replay import can_replay
from ssmd.engine.request import Event, Finish, Request
from ssmd.engine.terms import Rejection
from ssmd.sessions.remote.claims import Claims, Held, RemoteReply, UnderWay
from ssmd.sessions.reply import Reply, ReplyKey
from ssmd.sessions.turn import Domain, StoreError

HEADER = "Idempotency-Key"
NAMED_LASTS = timedelta(hours=24)
RETRY_LASTS = timedelta(minutes=10)
FAILURE_LASTS_S = 120.0  # the longest that the OpenAI SDK lets a server delay its retry
ELSEWHERE_S = 600.0  # s that a request waits while another machine answers it
LOOK_S = 0.25  # s between looks if that has ended
MOST_FAILURES = 10_000  # most failures that are kept; of more the oldest are forgotten
OVERTAKEN = Rejection(
    f"another machine answered the request with this {HEADER} meanwhile: send it again to get that answer",
    status=409,
    code="answered_elsewhere",
)
_NAME = re.compile(r"[\x20-\x7e]{1,255}")
_RETRY = re.compile(r"[1-9][0-9]{0,3}")
_RETRIED = frozenset({408, 409, 429})  # and all from 500 on


@dataclass(frozen=True)
class RequestIdentity:
    """The identity of a request, by which a repeat is recognised."""

    key: ReplyKey
    again: bool  # the SDK says that this is a retry

    @property
    def repeats(self) -> bool:
        """Return True if the request may have been answered before."""
        return self.again or self.key.named


def read_mark(headers: Headers, body: bytes, owner: str, path: str) -> RequestIdentity:
    """Return a request's mark. Raises Rejection.

    owner: name of the API key; the same request of another owner gets another mark. path: of the endpoint; the same
    body asks another one for something else.
    """
    names = headers.getlist(HEADER)
    if len(names) > 1 or any(not _NAME.fullmatch(name) for name in names):
        raise Rejection(
            f"{HEADER} must be given once, with 1 to 255 printable ASCII characters (got {brief(', '.join(names))})",
            code="invalid_value",
            param=HEADER,
        )
    whole = hashlib.sha256(path.encode() + b"\n")
    whole.update(body)
    digest = whole.digest()
    domain = hashlib.sha256(owner.encode()).digest()
    what = b"name " + names[0].encode() if names else b"body " + digest
    key = hashlib.blake2b(what, digest_size=32, key=domain, person=b"ssmd.reply.1").digest()
    again = _RETRY.fullmatch(headers.get("x-stainless-retry-count", "")) is not None
    return RequestIdentity(ReplyKey(key, digest, NAMED_LASTS if names else RETRY_LASTS, named=bool(names)), again)


class Attempt:
    """A request under way. `ended` is set when its turn is written, or certain not to be written."""

    def __init__(self, repeats: Repeats, mark: RequestIdentity) -> None:
        self.mark = mark
        self.ended = asyncio.Event()
        self.accepted = ""  # the id of its answer, if that goes on without its client
        self.held: Held | None = None  # its claim in the remote
        self._repeats = repeats
        self._generation = ""

    def follow(self, delivery: Delivery, generation: str) -> None:
        """End this attempt when its generation ends. generation: its id."""
        self._generation = generation
        delivery.last.add_done_callback(lambda last: self.end(last.result()))

    def end(self, how: Event | Rejection | None = None) -> None:
        """End this attempt. `how`: its last event or its refusal; None if it was answered from an earlier attempt."""
        if self.ended.is_set():
            return
        self.ended.set()
        self._repeats.forget(self)
        self._repeats.give_up(self, stored=isinstance(how, Finish) and how.usage.stored)
        if isinstance(how, Rejection):
            failed = how.status >= 500 or how.status in _RETRIED
        else:
            failed = how is not None and not (isinstance(how, Finish) and how.usage.stored)
        if failed:
            self._repeats.remember_failure(self.mark.key.digest, self._generation)


class Repeats:
    """The attempts of an endpoint. Used in the event loop only."""

    def __init__(self, host: Host, pool: FairPool) -> None:
        """Begin without attempts. pool: of the store."""
        self._host, self._pool = host, pool
        self._running: dict[bytes, list[Attempt]] = {}
        # (time, id of the generation or "") by body, that which failed last at the end. Each allows one retry.
        self._failures: OrderedDict[bytes, deque[tuple[float, str]]] = OrderedDict()
        self._failed = 0  # failures in all

    def accepted(self, mark: RequestIdentity) -> str:
        """Return the id of the answer that an attempt under way was accepted with; "" without one. Raises Rejection."""
        running = self._running.get(mark.key.digest, [])
        if not mark.repeats or not running or (not mark.key.named and mark.key.digest in self._failures):
            return ""
        if running[-1].mark.key.body != mark.key.body:
            raise _reused()
        return running[-1].accepted

    async def enter(
        self, mark: RequestIdentity, delivery: Delivery, client: str, elsewhere: Domain | None = None
    ) -> tuple[Attempt, Reply | None]:
        """Return a new attempt, which the caller ends, and the stored reply to the request that it repeats, or None.

        A complete reply is to be replayed; one that broke off is to be replaced. elsewhere: the domain of a request
        that another machine may have answered; None asks no other. Raises Rejection, and ClientGone or AnswerStopped
        while it waits.
        """
        key, failed = mark.key, list[str]()
        if key.named:
            while running := self._running.get(key.digest):
                if running[-1].mark.key.body != key.body:
                    raise _reused()
                await delivery.unless_gone(running[-1].ended)
        elif mark.again:
            failed = self._take_failure(key.digest)
            if not failed and (running := self._running.get(key.digest)):
                await delivery.unless_gone(running[-1].ended)
                failed = self._take_failure(key.digest)
        attempt = Attempt(self, mark)
        self._running.setdefault(key.digest, []).append(attempt)
        if not mark.repeats:
            return attempt, None
        try:
            writer = self._host.writer
            reply = None
            if writer is not None:
                reply = await self._pool.run(partial(writer.reply, key), client, delivery=delivery)
            if reply is not None and reply.body != key.body:
                raise _reused()
            if elsewhere is not None and key.named and (reply is None or not reply.complete):
                reply = await self._elsewhere(attempt, elsewhere, delivery, client) or reply
        except StoreError as err:  # the request may have run before, so it must not run now
            attempt.end()
            raise Rejection(str(err), status=503, code="store_error", retry_after_s=1) from err
        except BaseException:
            attempt.end()
            raise
        if reply is not None and reply.complete and failed and reply.answer["id"] not in failed:
            return attempt, None  # a later request with this body failed, and was not written
        return attempt, reply

    async def _elsewhere(self, attempt: Attempt, domain: Domain, delivery: Delivery, client: str) -> Reply | None:
        """Return the answer of another machine, after it has ended; None if the request is to be answered here.

        Then the attempt has a claim on it, if the remote could be asked. Raises Rejection, ClientGone, AnswerStopped.
        """
        link = None if self._host.writer is None else self._host.writer.remote
        key, over, ends = attempt.mark.key, 0, time.monotonic() + ELSEWHERE_S
        while link is not None:
            claims = link.claims

            def ask(claims: Claims = claims, over: int = over) -> Held | RemoteReply | UnderWay | None:
                found = claims.claim(key, domain, over)
                if isinstance(found, Held):
                    attempt.held = found
                    if attempt.ended.is_set():  # its client left meanwhile
                        claims.end(found, stored=False)
                return found

            found = await self._pool.run(ask, client, delivery=delivery)
            if isinstance(found, RemoteReply):
                if can_replay(found.reply):
                    return found.reply
                over = found.fence
            elif not isinstance(found, UnderWay):
                return None
            elif found.body != key.body:
                raise _reused()
            elif time.monotonic() > ends:
                raise Rejection(
                    f"another machine still answers the request with this {HEADER}: send it again later",
                    status=503,
                    code="answered_elsewhere",
                    retry_after_s=30,
                )
            else:
                again = asyncio.Event()
                asyncio.get_running_loop().call_later(LOOK_S, again.set)
                await delivery.unless_gone(again)
        return None

    async def overtaken(self, attempt: Attempt, domain: Domain, delivery: Delivery, client: str) -> Reply | None:
        """Return the answer of another machine that took over a request, after it was answered here; else None."""
        if attempt.held is None or not attempt.held.lost:
            return None
        attempt.held = None
        return await self._elsewhere(attempt, domain, delivery, client)

    def give_up(self, attempt: Attempt, *, stored: bool) -> None:
        """Note in the remote that an attempt ended. Returns at once."""
        writer = self._host.writer
        if attempt.held is not None and writer is not None and writer.remote is not None:
            writer.remote.claims.end(attempt.held, stored=stored)

    def forget(self, attempt: Attempt) -> None:
        running = self._running[attempt.mark.key.digest]
        running.remove(attempt)
        if not running:
            del self._running[attempt.mark.key.digest]

    def remember_failure(self, digest: bytes, generation: str = "") -> None:
        """Note that an attempt failed, so that one retry runs anew. Takes the same time however many failed before."""
        now = time.monotonic()
        self._failures.setdefault(digest, deque()).append((now, generation))
        self._failures.move_to_end(digest)
        self._failed += 1
        while self._failed > MOST_FAILURES or self._oldest()[-1][0] < now - FAILURE_LASTS_S:
            first = next(iter(self._failures))
            self._failures[first].popleft()
            self._failed -= 1
            if not self._failures[first]:
                del self._failures[first]

    def _oldest(self) -> deque[tuple[float, str]]:
        return next(iter(self._failures.values()))

    def _take_failure(self, digest: bytes) -> list[str]:
        """Remove and return the generation id of a failed attempt without a retry so far, in a list; [] without one.

        A commit that was given up counts as failed.
        """
        mine, oldest = self._failures.get(digest, deque()), time.monotonic() - FAILURE_LASTS_S
        found: list[str] = []
        while mine and not found:
            at, generation = mine.popleft()
            self._failed -= 1
            if at >= oldest:
                found.append(generation)
        if not mine:
            self._failures.pop(digest, None)
        return found


def in_place_of(request: Request, mark: RequestIdentity, broken: Reply | None) -> Request:
    """Return the request with its reply key, in the session of the attempt that it replaces."""
    if broken is None:
        return replace(request, key=mark.key)
    key = replace(mark.key, replaces=broken.turns)
    return replace(request, key=key, session=request.session or broken.session)


def _reused() -> Rejection:
    return Rejection(
        f"this {HEADER} came before with another body, or at another endpoint; a new request needs a new one",
        status=422,
        code="idempotency_key_reused",
        param=HEADER,
    )
