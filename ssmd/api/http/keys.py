"""The API keys: one without a name, or those of a file, a line each; who asks is known by the key that came.

Beside them the daemon's own token counts, which it makes anew at every start and writes down for its user's commands
(ssmd/daemon/discovery.py). Whoever has it sees all sessions, and alone may stop the daemon.

Of a key nothing is held but its hash. It is compared with all of them, each in constant time: neither how long a wrong
one is nor which it resembles shows in the time that the answer takes.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import math
import os
import re
import secrets
import stat
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ssmd.config import KEY, Settings, SettingsError
from ssmd.engine.terms import Rejected
from ssmd.machine import privatefile
from ssmd.sessions.domain import EVERYBODY, NOBODY, Domain

log = logging.getLogger(__name__)
MAX_FILE_BYTES = 256 << 10
MAX_KEYS = 256
READ_ONLY = "read-only"
TICKETS = "/ssmd/v1/tickets"
REDEEM = f"{TICKETS}/redeem"
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_CALLER, _LOOK = "ssmd.caller", "ssmd.look"  # in a scope

TICKET_S, KEY_S = 60.0, 43_200.0
MOST_TICKETS, MOST_KEYS = 64, 256  # of one key: of more the oldest goes


@dataclass(frozen=True)
class Caller:
    """Who asks. domain: what of the store is there for that. several: there are keys of other names.

    own: it is a command of the user whose daemon this is. by: the digest of the key that this came with, or that what
    came was made with; b"" where none is asked for. until: when what came ends, by the clock of the grants.
    """

    domain: Domain = NOBODY
    several: bool = False
    read_only: bool = False
    own: bool = False
    by: bytes = field(default=b"", repr=False, compare=False)
    until: float = field(default=math.inf, compare=False)

    @property
    def name(self) -> str:
        """The key's name; "" where keys have none."""
        return self.domain.owner


@dataclass(frozen=True)
class Key:
    """A key, by the hash of what clients send. read_only: nothing may be changed or generated with it."""

    name: str
    digest: bytes
    read_only: bool = False


class Keys:
    """The keys in force. Used from any thread; none at all: everybody may ask.

    A name is a trust domain: it has sessions of its own. The first one also has what is nobody's.
    """

    def __init__(
        self, keys: Sequence[Key] = (), file: Path | None = None, *, share: bool = False, token: str | None = None
    ) -> None:
        """file: what `reread` reads. share: all names see all sessions. token: the daemon's own."""
        self._keys = tuple(keys)
        self._file = file
        self._share = share
        self._token = None if token is None else digest_of(token)
        self._lock = threading.Lock()
        self._grants = Grants()

    @staticmethod
    def of(settings: Settings, token: str | None = None) -> Keys:
        """The keys that the settings name, and the daemon's own token. Raises SettingsError."""
        if settings.api_keys_file is not None:
            keys = read_keys(settings.api_keys_file)
            return Keys(keys, settings.api_keys_file, share=settings.share_sessions, token=token)
        if settings.api_key is None:
            return Keys(token=token)
        return Keys([Key("", digest_of(settings.api_key.get_secret_value()))], token=token)

    def reread(self) -> None:
        """Take the keys that stand in the file now; if it cannot be read, those of before stay."""
        if self._file is None:
            return
        with self._lock:  # of two the later one reads later
            try:
                self._keys = read_keys(self._file)
            except SettingsError as err:
                log.error("the API keys stay as they are: %s", err)
                return
            names = len({key.name for key in self._keys})
        log.info("%d API keys of %d names are in force", len(self._keys), names)

    def caller(self, authorization: str) -> Caller:
        """Who asks with this header. Raises Rejected."""
        keys = self._keys
        scheme, _, given = authorization.partition(" ")
        digest, found = digest_of(given.strip()), None
        bearer = scheme.lower() == "bearer"
        if self._token is not None and hmac.compare_digest(digest, self._token) and bearer:
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
            raise Rejected(f"{what}; send it as: Authorization: Bearer <key>", status=401, code="invalid_api_key")
        return self._of(found, keys)

    def ticket(self, caller: Caller) -> str:
        """A ticket for the rights of who asks, but for that to stop the daemon."""
        return self._grants.ticket(caller.by, caller.until)

    def redeem(self, ticket: str) -> tuple[str, float] | None:
        """(key, seconds for which it is good) for a ticket; None if it is none, or the key that made it is gone."""
        return self._grants.redeem(ticket, lambda grant: self._granted(grant) is not None)

    def _granted(self, grant: Grant) -> Caller | None:
        """Who asks with a key that a ticket gave: the one whose key made that, if it is in force still."""
        keys = self._keys
        if not grant.by:  # none was asked for
            return None if keys else Caller(EVERYBODY, until=grant.until)
        if grant.by == self._token:
            return Caller(EVERYBODY, by=grant.by, until=grant.until)
        found = next((key for key in keys if key.digest == grant.by), None)
        return None if found is None else replace(self._of(found, keys), until=grant.until)

    def _of(self, found: Key, keys: Sequence[Key]) -> Caller:
        several = any(key.name != found.name for key in keys)
        return Caller(self._domain(found.name, keys[0].name), several, found.read_only, by=found.digest)

    def _domain(self, name: str, first: str) -> Domain:
        """What a name sees, and what it writes."""
        if not name:  # the one key that has none
            return EVERYBODY
        return Domain(name, None if self._share else (name, "") if name == first else (name,))


def set_caller(scope: Any, caller: Caller, look: Callable[[], Caller]) -> None:
    """Note in an ASGI scope who asks. look: finds that out anew, or raises Rejected."""
    scope[_CALLER], scope[_LOOK] = caller, look


def caller_of(scope: Mapping[str, Any]) -> Caller:
    """Who asks, as the guard found out: of a request, or its ASGI scope."""
    found = scope[_CALLER]
    assert isinstance(found, Caller)
    return found


def name_of(scope: Mapping[str, Any]) -> str:
    """Return the name of a request's key; "" if the key has no name, or was refused."""
    found = scope.get(_CALLER)
    return found.name if isinstance(found, Caller) else ""


def is_in_force(scope: Mapping[str, Any]) -> bool:
    """Whether the key that came with a request is still good, and for the same."""
    try:
        return bool(scope[_LOOK]() == scope[_CALLER])
    except Rejected:
        return False


def read_keys(file: Path) -> tuple[Key, ...]:
    """The keys in a file, in its order. Raises SettingsError; it names lines, and quotes none."""
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
            raise SettingsError(f"{where}: this key stands above already")
        keys[key.digest] = key
    if not 1 <= len(keys) <= MAX_KEYS:
        raise SettingsError(f"the keys file {file} holds {len(keys)} keys; 1 to {MAX_KEYS} are possible")
    return tuple(keys.values())


def _read(file: Path) -> str:
    """The text of a file that nobody else can read or change. Raises SettingsError."""
    try:
        with os.fdopen(os.open(file, os.O_RDONLY | privatefile.NOWAIT), "rb") as opened:
            found = os.fstat(opened.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise SettingsError(f"the keys file {file} is no file")
            if privatefile.of_another_user(found):
                raise SettingsError(f"the keys file {file} belongs to user {found.st_uid}; use one of your own")
            if privatefile.others_read(found) or privatefile.others_write(found):
                raise SettingsError(
                    f"the keys file {file} can be read or written by other users of this computer; take other keys, "
                    f"after: chmod 600 {file}"
                )
            text = opened.read(MAX_FILE_BYTES + 1)
    except OSError as err:
        raise SettingsError(f"the keys file {file} cannot be read: {err.strerror or err}") from err
    if len(text) > MAX_FILE_BYTES:
        raise SettingsError(f"the keys file {file} is larger than {MAX_FILE_BYTES} bytes")
    try:
        return text.decode()
    except UnicodeDecodeError as err:
        raise SettingsError(f"the keys file {file} is no text: a byte at {err.start} is not UTF-8") from None


@dataclass(frozen=True)
class Grant:
    """What a ticket or a key of this digest stands for. by: the digest of the key that it was made with, and whose
    rights it has. until: by the clock. least: a key that it gives, or is, ends then at the latest.
    """

    digest: bytes
    by: bytes
    until: float
    least: float = math.inf


class Grants:
    """All tickets and the keys made of them. From any thread. clock: seconds, never going back.

    They are held in memory alone, by nothing but their hashes.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._tickets: list[Grant] = []
        self._keys: list[Grant] = []

    def ticket(self, by: bytes, until: float = math.inf) -> str:
        """Make a ticket. until: when the key ends that it is made with."""
        ticket = secrets.token_urlsafe(32)
        with self._lock:
            self._add(self._tickets, Grant(digest_of(ticket), by, self._clock() + TICKET_S, until), MOST_TICKETS)
        return ticket

    def redeem(self, ticket: str, is_good: Callable[[Grant], bool]) -> tuple[str, float] | None:
        """(key, seconds for which it is good) for a ticket, which is good for this once; None for any other.

        is_good: whether the key is in force that it was made with.
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
        """Keep one more; what is over goes, and the oldest of more than `most` of the same key."""
        now = self._clock()
        among[:] = [one for one in among if one.until > now]
        mine = [one for one in among if one.by == grant.by]
        if len(mine) >= most:
            among.remove(mine[0])
        among.append(grant)

    def find(self, digest: bytes) -> Grant | None:
        """What a key of this digest stands for, if it is one of these and good still."""
        with self._lock:
            found = _find(self._keys, digest)
            return None if found is None or self._clock() >= found.until else found


def digest_of(secret: str) -> bytes:
    """The hash that is held of a secret."""
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).digest()


def _find(among: list[Grant], digest: bytes) -> Grant | None:
    """The one of this digest. All are compared, each in constant time."""
    found = None
    for grant in among:
        found = grant if hmac.compare_digest(digest, grant.digest) else found
    return found
