"""Access to the API: the keys that identify callers, and the log with a line for each request.

There is one key without a name, or those of a file, one a line. The daemon's own token is accepted too. The daemon
makes a new one at every start and stores it for its user's commands (ssmd/daemon/discovery.py). A caller with that
token sees all sessions, and only such a caller may stop the daemon.

Keys are held only as hashes. A request's key is compared with all of them, each in constant time. So the response time
reveals neither the length of a wrong key nor which key it resembles.

The log's line is written when the answer has ended. No text of a client is in it. The path is the route's own template,
or `?` for an unknown one. A line has no query, no header, and no model that is not installed here. A thread writes the
lines, so that a slow reader of stdout holds up no answer.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import logging
import math
import os
import queue
import re
import secrets
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ssmd.config import KEY, Settings, SettingsError
from ssmd.engine.request import Usage
from ssmd.engine.terms import Rejection
from ssmd.machine import privatefile, textfile
from ssmd.machine.spelling import printable
from ssmd.sessions.turn import EVERYBODY, NOBODY, Domain

METHODS = frozenset({"GET", "HEAD", "POST", "PATCH", "PUT", "DELETE", "OPTIONS"})
MOST_WAITING = 10_000  # limit on lines that wait to be written; further ones are left out, and counted
_CLOSE_S = 2.0
_ENTRY = "ssmd.access"  # key in a scope
_SESSION = "session"  # name of a path's parameter
Fields = dict[str, Any]


@dataclass
class Entry:
    """The facts of a request, collected until its line is written. whole: the answer was sent to its end."""

    begun: float = field(default_factory=time.perf_counter)
    status: int | None = None
    headers: dict[bytes, bytes] = field(default_factory=dict)  # of the answer
    code: str | None = None
    received: int = 0
    sent: int = 0
    whole: bool = False
    answer: str | None = None
    model: str | None = None
    usage: Usage | None = None


class AccessLog:
    """Writes a line for each request. slow_s: time in seconds from which on a request is marked as slow."""

    def __init__(self, stream: TextIO, *, as_json: bool, slow_s: float) -> None:
        self._stream, self._as_json, self._slow_s = stream, as_json, slow_s
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._left_out = 0
        self._thread = threading.Thread(target=self._run, name="ssmd-access", daemon=True)
        self._thread.start()

    @staticmethod
    def of(settings: Settings) -> AccessLog | None:
        """Return the log on stdout, or None if the settings do not enable it."""
        if not settings.access_log:
            return None
        return AccessLog(sys.stdout, as_json=settings.access_log_format == "json", slow_s=settings.slow_request)

    async def answer(self, app: ASGIApp, routes: Sequence[Route], scope: Scope, receive: Receive, send: Send) -> None:
        """Let `app` answer a request, and write its line once that has ended, also by an exception."""
        entry = scope[_ENTRY] = Entry()

        async def receive_counted() -> Message:
            message = await receive()
            entry.received += len(message.get("body", b""))
            return message

        async def send_counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                entry.status, entry.headers = message["status"], dict(message["headers"])
            else:
                entry.sent += len(message.get("body", b""))
                entry.whole = not message.get("more_body", False)
            await send(message)

        try:
            await app(scope, receive_counted, send_counted)
        finally:
            self._write(entry, scope, routes)

    def _write(self, entry: Entry, scope: Scope, routes: Sequence[Route]) -> None:
        if self._lines.qsize() >= MOST_WAITING:
            self._left_out += 1
            return
        fields = _fields(entry, scope, routes, self._slow_s)
        self._lines.put(json.dumps(fields) if self._as_json else _line(fields))

    def close(self) -> None:
        """Write the waiting lines, for at most _CLOSE_S."""
        self._lines.put(None)
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            with contextlib.suppress(OSError, ValueError):  # stdout was closed
                left_out, self._left_out = self._left_out, 0
                if left_out:
                    note = {"left_out": left_out}
                    self._stream.write(f"{json.dumps(note) if self._as_json else _line(note)}\n")
                self._stream.write(f"{line}\n")
                self._stream.flush()


def note(scope: Mapping[str, Any], **known: Any) -> None:
    """Set fields of a request's entry; do nothing without an access log."""
    if (entry := scope.get(_ENTRY)) is not None:
        for name, value in known.items():
            setattr(entry, name, value)


def _fields(entry: Entry, scope: Scope, routes: Sequence[Route], slow_s: float) -> Fields:
    taken_s = time.perf_counter() - entry.begun
    template, parts = _place(scope, routes)
    succeeded = entry.status is not None and entry.status < 400
    usage = entry.usage
    fields: Fields = {
        "time": datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "method": scope["method"] if scope["method"] in METHODS else "?",
        "path": template,
        "status": entry.status,
        "ms": round(taken_s * 1e3, 1),
        "received": entry.received,
        "sent": entry.sent,
        "request": entry.headers.get(b"x-request-id", b"").decode() or None,
        "key": name_of(scope) or None,
        "error": entry.code,
        "answer": entry.answer,
        "session": entry.headers.get(b"x-ssmd-session", b"").decode() or (parts.get(_SESSION) if succeeded else None),
        "model": None if entry.model is None else printable(entry.model),
    }
    if usage is not None:
        fields |= {
            "ttft_ms": round(usage.ttft_ms, 1),
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "generated_tokens": usage.completion_tokens,
        }
    if not entry.whole:
        fields["broken_off"] = True
    if (taken_s if usage is None else usage.ttft_ms / 1e3) >= slow_s:
        fields["slow"] = True
    return {name: value for name, value in fields.items() if value is not None or name == "status"}


def _place(scope: Scope, routes: Sequence[Route]) -> tuple[str, Mapping[str, Any]]:
    """Return (template of the route, parameters in its path); ("?", {}) if no route matches."""
    best: tuple[str, Mapping[str, Any]] = ("?", {})
    for route in routes:
        match, found = route.matches(scope)
        if match is Match.FULL:
            return route.path_format, found["path_params"]
        if match is Match.PARTIAL:  # the method differs
            best = route.path_format, found["path_params"]
    return best


def _line(fields: Fields) -> str:
    return " ".join(_words(fields))


def _words(fields: Fields) -> Iterator[str]:
    for name, value in fields.items():
        if value is True:
            yield name
        elif name in ("time", "method", "path"):
            yield str(value)
        elif name == "status":
            yield "-" if value is None else str(value)
        else:
            yield f"{name}={value}"


log = logging.getLogger(__name__)
IN_KEY_HEADER = "x-api-key"
MAX_FILE_BYTES = 256 << 10
MAX_KEYS = 256
READ_ONLY = "read-only"
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_CALLER, _LOOK = "ssmd.caller", "ssmd.look"  # in a scope
TICKET_S, KEY_S = 60.0, 43_200.0
MOST_TICKETS, MOST_KEYS = 64, 256  # most of one key; beyond that the oldest is dropped


@dataclass(frozen=True)
class Caller:
    """The caller of a request, as its key identifies it."""

    domain: Domain = NOBODY  # the part of the store that it can read and write
    several: bool = False  # keys of other names exist
    read_only: bool = False
    own: bool = False  # it sent the daemon's own token: a command of the user that started the daemon
    # The digest of its key, or of the key that made its granted key; b"" if the daemon has no keys.
    by: bytes = field(default=b"", repr=False, compare=False)
    until: float = field(default=math.inf, compare=False)  # when its granted key expires, by the clock of the grants

    @property
    def name(self) -> str:
        """Return the key's name; "" if keys have none."""
        return self.domain.owner


@dataclass(frozen=True)
class Key:
    """A key, held as the hash of the text that clients send. read_only: it allows no change and no generation."""

    name: str
    digest: bytes
    read_only: bool = False


class Keys:
    """The keys in force. Used from any thread. Without keys every client is allowed.

    A name is a trust domain with sessions of its own. The first name also has the sessions without an owner.
    """

    def __init__(
        self, keys: Sequence[Key] = (), file: Path | None = None, *, share: bool = False, token: str | None = None
    ) -> None:
        """file: the keys file that `reread` reads. share: all names see all sessions. token: the daemon's own."""
        self._keys = tuple(keys)
        self._file = file
        self._share = share
        self._token = None if token is None else digest_of(token)
        self._lock = threading.Lock()
        self._grants = Grants()

    @staticmethod
    def of(settings: Settings, token: str | None = None) -> Keys:
        """Return the keys that the settings name, and the daemon's own token. Raises SettingsError."""
        if settings.api_keys_file is not None:
            keys = read_keys(settings.api_keys_file)
            return Keys(keys, settings.api_keys_file, share=settings.share_sessions, token=token)
        if settings.api_key is None:
            return Keys(token=token)
        return Keys([Key("", digest_of(settings.api_key.get_secret_value()))], token=token)

    def reread(self) -> None:
        """Read the keys file again. If it is invalid or unreadable, log it and keep the present keys."""
        if self._file is None:
            return
        with self._lock:  # of two calls, the later one also reads later
            try:
                self._keys = read_keys(self._file)
            except SettingsError as err:
                log.error("the API keys are unchanged: %s", err)
                return
            names = len({key.name for key in self._keys})
        log.info("%d API keys of %d names are in force", len(self._keys), names)

    @property
    def names(self) -> frozenset[str]:
        """Return the names that have a key."""
        return frozenset(key.name for key in self._keys)

    def caller(self, authorization: str) -> Caller:
        """Return the caller that an Authorization header identifies. Raises Rejection.

        A key of another header comes with the scheme IN_KEY_HEADER.
        """
        keys = self._keys
        scheme, _, given = authorization.partition(" ")
        digest, found = digest_of(given.strip()), None
        bearer = scheme.lower() in ("bearer", IN_KEY_HEADER)
        own = self._token is not None and hmac.compare_digest(digest, self._token)
        if own and bearer and scheme != IN_KEY_HEADER:  # a command of the daemon's user sends it, no client does
            return Caller(EVERYBODY, own=True, by=digest)
        granted = self._grants.find(digest) if bearer else None
        if granted is not None and (caller := self._granted(granted)) is not None:
            return caller
        if not keys:
            return Caller(EVERYBODY)
        for key in keys:
            found = key if hmac.compare_digest(digest, key.digest) else found
        if found is None or not bearer:
            what = "the API key is wrong" if given else "an API key is needed"
            raise Rejection(
                f"{what}; send it as Authorization: Bearer <key>, or as x-api-key: <key>",
                status=401,
                code="invalid_api_key",
            )
        return self._of(found, keys)

    def ticket(self, caller: Caller) -> str:
        """Make a ticket for the caller's rights, except the right to stop the daemon."""
        return self._grants.ticket(caller.by, caller.until)

    def redeem(self, ticket: str) -> tuple[str, float] | None:
        """Redeem a ticket: (key, seconds it lasts). None if the ticket is invalid, or its maker's key is revoked."""
        return self._grants.redeem(ticket, lambda grant: self._granted(grant) is not None)

    def _granted(self, grant: Grant) -> Caller | None:
        """Return the caller of a granted key: that of the key behind it; None if that is not in force any more."""
        keys = self._keys
        if not grant.by:  # made while the daemon had no keys
            return None if keys else Caller(EVERYBODY, until=grant.until)
        if grant.by == self._token:
            return Caller(EVERYBODY, by=grant.by, until=grant.until)
        found = next((key for key in keys if key.digest == grant.by), None)
        return None if found is None else replace(self._of(found, keys), until=grant.until)

    def _of(self, found: Key, keys: Sequence[Key]) -> Caller:
        several = any(key.name != found.name for key in keys)
        return Caller(self._domain(found.name, keys[0].name), several, found.read_only, by=found.digest)

    def _domain(self, name: str, first: str) -> Domain:
        """Return the domain of a key's name. first: the name of the first key."""
        if not name:  # the only key, which has no name
            return EVERYBODY
        return Domain(name, None if self._share else (name, "") if name == first else (name,))


def set_caller(scope: Any, caller: Caller, look: Callable[[], Caller]) -> None:
    """Note the caller in an ASGI scope. look: identifies the caller again, or raises Rejection."""
    scope[_CALLER], scope[_LOOK] = caller, look


def caller_of(scope: Mapping[str, Any]) -> Caller:
    """Return the caller that the guard noted in a request or its ASGI scope."""
    found = scope[_CALLER]
    assert isinstance(found, Caller)
    return found


def name_of(scope: Mapping[str, Any]) -> str:
    """Return the name of a request's key; "" if the key has no name, or was refused."""
    found = scope.get(_CALLER)
    return found.name if isinstance(found, Caller) else ""


def is_in_force(scope: Mapping[str, Any]) -> bool:
    """Return True if a request's key is still valid and identifies the same caller."""
    try:
        return bool(scope[_LOOK]() == scope[_CALLER])
    except Rejection:
        return False


def read_keys(file: Path) -> tuple[Key, ...]:
    """Return a file's keys in its order. Raises SettingsError, which names lines but quotes none."""
    keys: dict[bytes, Key] = {}
    for number, line in enumerate(_read(file).split("\n"), 1):
        fields = line.split()
        if not fields or fields[0].startswith("#"):
            continue
        where = f"line {number} of the keys file {file}"
        if len(fields) not in (2, 3) or fields[2:] not in ([], [READ_ONLY]):
            raise SettingsError(f"{where}: expected a name, a key and perhaps `{READ_ONLY}`, with spaces between")
        if not _NAME.fullmatch(fields[0]):
            raise SettingsError(f"{where}: a name is 1 to 64 letters, digits, _ or -")
        if not KEY.fullmatch(fields[1]):
            raise SettingsError(f"{where}: a key is 8 to 512 printable ASCII characters")
        key = Key(fields[0], digest_of(fields[1]), len(fields) == 3)
        if key.digest in keys:
            raise SettingsError(f"{where}: a line above has the same key")
        keys[key.digest] = key
    if not 1 <= len(keys) <= MAX_KEYS:
        raise SettingsError(f"the keys file {file} holds {len(keys)} keys; 1 to {MAX_KEYS} are possible")
    return tuple(keys.values())


def first_key(file: Path) -> str | None:
    """Return the text of a file's first key that may generate; None if all are read-only. Raises SettingsError."""
    read_keys(file)
    lines = [line.split() for line in _read(file).split("\n")]
    return next((line[1] for line in lines if len(line) == 2 and not line[0].startswith("#")), None)


def _read(file: Path) -> str:
    """Return the text of a file that no other user can read or write. Raises SettingsError."""
    try:
        with os.fdopen(os.open(file, os.O_RDONLY | privatefile.NOWAIT), "rb") as opened:
            found = os.fstat(opened.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise SettingsError(f"the keys file {file} is not a file")
            if privatefile.of_another_user(found):
                raise SettingsError(f"the keys file {file} belongs to user {found.st_uid}; use one of your own")
            if privatefile.others_read(found) or privatefile.others_write(found):
                raise SettingsError(
                    f"the keys file {file} can be read or written by other users of this computer; run: "
                    f"chmod 600 {file}, then replace the keys"
                )
            text = opened.read(MAX_FILE_BYTES + 1)
    except OSError as err:
        raise SettingsError(f"the keys file {file} cannot be read: {err.strerror or err}") from err
    if len(text) > MAX_FILE_BYTES:
        raise SettingsError(f"the keys file {file} is larger than {MAX_FILE_BYTES} bytes")
    try:
        return textfile.decode(text)
    except UnicodeDecodeError as err:
        where = f"a byte at {err.start} is not {err.encoding.upper()}"
        raise SettingsError(f"the keys file {file} is not text: {where}") from None


@dataclass(frozen=True)
class Grant:
    """A ticket, or a key made of one."""

    digest: bytes
    by: bytes  # digest of the key that made it, whose rights it has
    until: float  # when it expires, by the clock of the grants
    least: float = math.inf  # of a ticket: the key made of it expires then at the latest


class Grants:
    """All tickets and the keys made of them. Used from any thread. clock: monotonic seconds.

    They are held only in memory, and only as hashes.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._tickets: list[Grant] = []
        self._keys: list[Grant] = []

    def ticket(self, by: bytes, until: float = math.inf) -> str:
        """Make a ticket. by: digest of the key that makes it. until: when that key expires."""
        ticket = secrets.token_urlsafe(32)
        with self._lock:
            self._add(self._tickets, Grant(digest_of(ticket), by, self._clock() + TICKET_S, until), MOST_TICKETS)
        return ticket

    def redeem(self, ticket: str, is_good: Callable[[Grant], bool]) -> tuple[str, float] | None:
        """Redeem a ticket, once: (key, seconds it lasts). None for an unknown, used or expired ticket.

        is_good: returns True if the key behind the grant is still in force.
        """
        with self._lock:
            found = _find(self._tickets, digest_of(ticket))
            if found is None:
                return None
            self._tickets.remove(found)
            now = self._clock()
            if now >= found.until or now >= found.least or not is_good(found):
                return None
            key = secrets.token_urlsafe(32)
            until = min(now + KEY_S, found.least)
            self._add(self._keys, Grant(digest_of(key), found.by, until), MOST_KEYS)
            return key, until - now

    def _add(self, among: list[Grant], grant: Grant, most: int) -> None:
        """Add a grant. Drop the expired ones, and the oldest of the same key beyond `most`."""
        now = self._clock()
        among[:] = [one for one in among if one.until > now]
        mine = [one for one in among if one.by == grant.by]
        if len(mine) >= most:
            among.remove(mine[0])
        among.append(grant)

    def find(self, digest: bytes) -> Grant | None:
        """Return the grant of a key's digest; None if it is unknown or expired."""
        with self._lock:
            found = _find(self._keys, digest)
            return None if found is None or self._clock() >= found.until else found


def digest_of(secret: str) -> bytes:
    """Return the hash that stands for a secret."""
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).digest()


def _find(among: list[Grant], digest: bytes) -> Grant | None:
    """Return the grant of this digest, or None. All are compared, each in constant time."""
    found = None
    for grant in among:
        found = grant if hmac.compare_digest(digest, grant.digest) else found
    return found
