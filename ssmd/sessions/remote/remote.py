"""A remote: the place through which machines share conversations. Turns are rows that never change, found by chain."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from ssmd.sessions.remote.retention import Retention, RetentionCounts
from ssmd.sessions.rows.outbox import Mark
from ssmd.sessions.turn import Domain, StoreError

MAX_BODY_BYTES = 64 << 20  # bytes of a turn
MAX_ROW_BYTES = 64 << 10  # bytes of a state's row
MAX_COUNT = 10**12  # of a mark. No daemon writes a higher one, or one below 0: such a mark is read as 0
RemoteState = Literal["sent", "waiting", "off"]  # of a stored turn; off: it stays here


class RemoteError(StoreError):
    """A remote that cannot be used now. Nothing is lost: the outbox keeps what it has not got. The message says why."""

    reason = "unreachable"

    def __init__(self, message: str, *, lasting: bool = False, refused: bool = False) -> None:
        """lasting: a user has to mend it, such as a folder that holds no remote.

        refused: it can be read, but takes nothing: it is read-only or full.
        """
        super().__init__(message)
        self.lasting, self.refused = lasting, refused


class InvalidTurn(StoreError):
    """A turn of a remote that is not taken. The message says what is wrong with it."""


class UnknownVersion(InvalidTurn):
    """A turn of another version of ssmd, which is left as it is."""


@dataclass(frozen=True)
class TurnPlace:
    """The place of a turn in a remote."""

    session: str
    turn: str


@dataclass(frozen=True)
class RemoteTurn:
    """A turn as a remote keeps it. chain: of the conversation up to its answer, by which requests find it.

    body: the turn itself, which only daemons read: a newer one may write what an older one leaves alone.
    """

    place: TurnPlace
    owner: str
    chain: bytes
    body: bytes


class MarkGone(RemoteError):
    """The remote's mark of a machine is lower than what it had confirmed: it was put back from a backup."""


@dataclass(frozen=True)
class RemoteSize:
    """The amounts that a remote keeps. turn_bytes: of the bodies of turns. machines: those that have sent something."""

    sessions: int
    turns: int
    turn_bytes: int
    states: int
    tombstones: int
    machines: int


@dataclass(frozen=True)
class Quota:
    """The bytes of bodies and packs that a machine may have in a remote, and those that it has."""

    limit: int
    used: int


@dataclass(frozen=True)
class ReplyClaim:
    """A request that this machine may answer, by its key. No other claim has the same token and fence."""

    key: bytes
    token: str
    fence: int


@dataclass(frozen=True)
class ReplyRow:
    """A key that was claimed before. request: hash of its request. answer: JSON; None while a machine works on it."""

    request: bytes
    fence: int
    session: str
    turns: tuple[str, ...]
    answer: bytes | None


class Replies(Protocol):
    """The answers of a remote by `Idempotency-Key`, and the claims of the machines that work on one.

    All methods raise RemoteError. A claim ends by itself after `lease_s`, by the remote's own clock.
    """

    def claim(
        self, key: bytes, request: bytes, token: str, *, lease_s: float, lasts_s: float, over: int = 0
    ) -> ReplyClaim | ReplyRow:
        """Take a key to answer its request; else return its row, which has an answer or is another machine's.

        token: a random name of the attempt. over: fence of a row whose answer cannot be read, and is to be replaced.
        """

    def renew(self, claim: ReplyClaim, lease_s: float) -> bool:
        """Prolong a claim. Returns False if another machine has the key by now."""

    def record(self, claim: ReplyClaim, session: str, turns: Sequence[str], answer: bytes) -> bool:
        """Keep the answer to a claimed key. Returns False if another machine has the key by now: nothing is kept."""

    def release(self, claim: ReplyClaim) -> None:
        """Give a key back without an answer, if it is still this machine's."""


class Blobs(Protocol):
    """The packs of a remote, each named by the BLAKE2b-256 of its bytes. All methods raise RemoteError."""

    def there(self, name: str) -> bool:
        """Return True if there is a pack of this name. Its bytes are checked when they are read."""

    def put(self, parts: Sequence[bytes | memoryview]) -> str:
        """Keep a pack, given in parts, durably. Returns its name."""

    def get(self, name: str, nbytes: int) -> bytes:
        """Return a pack of so many bytes. Raises InvalidTurn if it is not there, or not what its name says."""

    def names(self) -> list[tuple[str, int]]:
        """List the packs that are whole, by name and size in bytes."""


class Remote(Protocol):
    """A place through which machines share conversations. All methods raise RemoteError; each can be called again."""

    @property
    def name(self) -> str:
        """Return the folder's path, or the database's address, for messages."""

    @property
    def identity(self) -> str:
        """Return a name that the remote keeps when it is put back from a backup, and that no other one has."""

    def mark_of(self, machine: str) -> int:
        """Return the mark that a machine has set; 0 without one."""

    def set_mark(self, machine: str, mark: int) -> None:
        """Keep a machine's mark, unless a higher one is kept."""

    def close(self) -> None:
        """Close what is open. Calls that are under way end."""

    def known(self, chains: Sequence[bytes], domain: Domain) -> list[TurnPlace]:
        """Find turns at the last of these chains that any turn has, among those that the domain sees."""

    def fetch(self, place: TurnPlace) -> bytes | None:
        """Return the body of a turn; None if the remote does not have it. Raises InvalidTurn if it was altered."""

    def turns(self, session: str) -> list[str]:
        """List the turns of a session, in no order."""

    def sessions(self) -> list[str]:
        """List the sessions that have turns or states, in no order."""

    def size(self) -> RemoteSize:
        """Count what is kept."""

    def publish(self, turns: Sequence[RemoteTurn], last: Mark | None = None) -> int:
        """Keep turns. One that is kept already stays as it is, and one that is buried is not kept.

        last: the machine's last mark, which is raised by one together with that. Returns the new one; 0 without `last`.
        Raises MarkGone, and keeps nothing, if the remote's is lower.
        """

    def discard(self, place: TurnPlace) -> None:
        """Remove a turn that cannot be believed, so that it can be published again."""

    def bury(self, session: str, turn: str | None) -> None:
        """Remove a turn, or with None a whole session, for good."""

    def buried(self) -> Collection[str]:
        """Return the sessions and the turns that were buried."""

    @property
    def packs(self) -> Blobs | None:
        """Return the packs that hold states; None if this remote keeps none."""

    @property
    def replies(self) -> Replies | None:
        """Return the answers by key; None if this remote keeps none."""

    def end(self, place: TurnPlace) -> bytes | None:
        """Read the row that describes a turn's end state; None if no machine sent one. Raises InvalidTurn."""

    def ends(self, session: str) -> list[str]:
        """List the turns of a session that have a state, in no order."""

    def publish_end(
        self, place: TurnPlace, pack: str, row: bytes, replaced: Sequence[str], *, machine: str = "", nbytes: int = 0
    ) -> None:
        """Keep the row of a turn's state, whose pack is there. Then remove those of the turns `replaced`.

        machine: the one whose quota the state counts for. nbytes: of the pack.
        """

    def quota(self, machine: str) -> Quota | None:
        """Count the bytes of a machine that has a quota; None without one."""

    def sweep(self, *, dry_run: bool = False) -> tuple[int, int]:
        """Remove packs that no row names and that are a day old. Returns how many, and their bytes."""

    def used(self, place: TurnPlace) -> None:
        """Note that the state of a turn was fetched, for the remote's retention."""

    def retain(self, limits: Retention, *, dry_run: bool = False) -> RetentionCounts:
        """Remove the states beyond limits, rows first. Their turns stay. Returns what went, and what stays."""
