"""A remote in a folder, such as one of a NAS that several machines mount.

    ssmd-remote.json                       {"format": 1}
    sessions/<2 digits>/<session>/<turn>   a line of JSON: format, chain, owner, BLAKE2b-256 of the body; then the body
    chains/<2 digits>/<chain>/<session>~<turn>~<digest of the owner>    an empty file
    ends/<2 digits>/<session>/<turn>       a state's row: a line of JSON with its pack, as of a turn; then the row
    packs/<2 digits>/<BLAKE2b-256>         the bytes of a state
    buried/<session or turn>               an empty file
    machines/<random name>                 how often the machine has sent something

A file is written under another name, flushed, and then gets its own, which it keeps: so a reader finds all of it or
nothing. The turn comes before its chain, which makes it known; the tombstone comes before all that it removes. So a
kill at any moment leaves what the next call completes. A pack comes before its row, and goes after it: a kill between
leaves a pack that no row names, for `sweep`. Names and contents are other machines' word: each is checked.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import secrets
import stat
from collections.abc import Collection, Sequence
from itertools import islice
from pathlib import Path

from ssmd.machine.privatefile import NOLINK
from ssmd.sessions.remote.packs import FORMAT, MAX_NAMES, PACK, PART, FolderPacks, MountedFolder, digest_of, read_file
from ssmd.sessions.remote.remote import (
    MAX_BODY_BYTES,
    MAX_COUNT,
    MAX_ROW_BYTES,
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
from ssmd.sessions.turn import ID_PATTERN, Domain

MARK = "ssmd-remote.json"
_MAX_HEAD = 4096
_MAX_FOUND = 256  # turns of one chain that are looked at
_NO_FILE = (errno.EINVAL, errno.ELOOP, errno.EISDIR)  # of `read_file`: a device, a link, a folder


class FolderRemote(MountedFolder):
    """A remote in a folder. Safe to use from several threads, processes and machines."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, MARK, "the remote")
        self.packs, self.replies = FolderPacks(self), None

    @staticmethod
    def open(root: Path, *, create: bool) -> FolderRemote:
        """Open the remote in a folder. create: make an empty folder one. Raises RemoteError."""
        remote = FolderRemote(root)
        remote.prepare(create=create)
        return remote

    @property
    def name(self) -> str:
        return str(self.root)

    @property
    def identity(self) -> str:
        return str(self.root.absolute())

    def mark_of(self, machine: str) -> int:
        """Return the mark that a machine has set; 0 without one."""
        with self._errors():
            try:
                folder = self.root / "machines"
                found = int(read_file(folder / machine, _MAX_HEAD)) if self._is_folder(folder) else 0
            except (FileNotFoundError, ValueError):
                return 0
        return found if 0 <= found <= MAX_COUNT else 0

    def set_mark(self, machine: str, mark: int) -> None:
        """Keep a machine's mark, unless a higher one is kept."""
        if self.mark_of(machine) < mark:
            with self._errors():
                folder = self.root / "machines"
                self._folder(folder)
                self._write(folder, machine, f"{mark}\n".encode())

    def close(self) -> None:
        """Close nothing: a folder keeps no connection."""

    def known(self, chains: Sequence[bytes], domain: Domain) -> list[TurnPlace]:
        """Find turns at the last of these chains that any turn has, among those that the domain sees."""
        owners = None if domain.sees is None else set(map(_tag, domain.sees))
        with self._errors():
            for chain in reversed(chains):
                places = []
                for name in islice(self._names(self._chain(chain)), _MAX_FOUND):
                    session, turn, owner = [*name.split("~"), "", ""][:3]
                    if _is_id(session) and _is_id(turn) and (owners is None or owner in owners):
                        places.append(TurnPlace(session, turn))
                found = [place for place in places if not self._is_gone(place)]
                if found:
                    return sorted(found, key=lambda place: (place.session, place.turn))
        return []

    def fetch(self, place: TurnPlace) -> bytes | None:
        """Return the body of a turn; None if the remote does not have it. Raises InvalidTurn if it was altered."""
        with self._errors():
            if self._is_gone(place):
                return None
            folder = self._session(place.session)
            if not self._is_folder(folder):
                return None
            try:
                raw = read_file(folder / place.turn, MAX_BODY_BYTES + _MAX_HEAD)
            except FileNotFoundError:
                return None
        return _body_of(raw, place)

    def turns(self, session: str) -> list[str]:
        """List the turns of a session, in no order."""
        with self._errors():
            if self._is_buried(session):
                return []
            return [name for name in islice(self._names(self._session(session)), MAX_NAMES) if _is_id(name)]

    def sessions(self) -> list[str]:
        """List the sessions that have turns or states, in no order."""
        with self._errors():
            roots = [self.root / name for name in ("sessions", "ends")]
            found = {one.name for root in roots for part in self._folders(root) for one in self._folders(part)}
            return [name for name in found if _is_id(name) and not self._is_buried(name)]

    def size(self) -> RemoteSize:
        """Count what is kept."""
        sessions, turns, nbytes, states = 0, 0, 0, 0
        for session in self.sessions():
            with self._errors():
                own = [about.st_size for path, about in self._about(self._session(session)) if _is_id(path.name)]
            sessions, turns, nbytes = sessions + bool(own), turns + len(own), nbytes + sum(own)
            states += len(self.ends(session))
        with self._errors():
            machines = len(self._about(self.root / "machines"))
        return RemoteSize(sessions, turns, nbytes, states, len(self.buried()), machines)

    def publish(self, turns: Sequence[RemoteTurn], last: Mark | None = None) -> int:
        """Keep turns. One that is kept already stays as it is, and one that is buried is not kept.

        last: raised by one after that. Returns the new mark; 0 without `last`. Raises MarkGone.
        """
        mark = 0
        if last is not None:
            mark = self.mark_of(last.machine) + 1
            if mark <= last.confirmed:
                raise MarkGone(f"{self.name} is older than it was, as from a backup")
        with self._errors():
            for turn in turns:
                place = turn.place
                if self._is_gone(place):
                    continue
                chain, name = self._chain(turn.chain), f"{place.session}~{place.turn}~{_tag(turn.owner)}"
                try:
                    self._keep(self._session(place.session), place, turn, "" if last is None else last.machine)
                    self._folder(chain)
                    self._touch(chain, name)
                except FileNotFoundError:
                    if not self._is_gone(place):
                        raise
                if self._is_gone(place):  # buried meanwhile, by a machine that may not have seen all of this
                    (chain / name).unlink(missing_ok=True)
                    self.bury(place.session, None if self._is_buried(place.session) else place.turn)
        if last is not None:
            self.set_mark(last.machine, mark)
        return mark

    def _is_gone(self, place: TurnPlace) -> bool:
        return self._is_buried(place.session) or self._is_buried(place.turn)

    def _keep(self, folder: Path, place: TurnPlace, turn: RemoteTurn, machine: str) -> None:
        self._folder(folder)
        try:
            _body_of(read_file(folder / place.turn, MAX_BODY_BYTES + _MAX_HEAD), place)
            return
        except UnknownVersion:
            return
        except (OSError, InvalidTurn):  # it is not there, or damaged
            pass
        head = {"format": FORMAT, "chain": turn.chain.hex(), "owner": turn.owner, "blake2b": digest_of(turn.body)}
        head |= {"machine": machine} if machine else {}
        self._write(folder, place.turn, json.dumps(head).encode() + b"\n" + turn.body)

    def discard(self, place: TurnPlace) -> None:
        """Remove a turn that cannot be believed, so that it can be published again."""
        with self._errors():
            folder = self._session(place.session)
            if self._is_folder(folder):
                self._remove(folder, place)

    def bury(self, session: str, turn: str | None) -> None:
        """Remove a turn, or with None a whole session, for good."""
        with self._errors():
            buried = self.root / "buried"
            self._folder(buried)
            self._touch(buried, session if turn is None else turn)
            folder = self._session(session)
            names = list(islice(self._names(folder), MAX_NAMES))
            for name in names if turn is None else {turn} & set(names):
                self._remove(folder, TurnPlace(session, name))
            if turn is None:
                with contextlib.suppress(OSError):  # it was never there, or a turn is being written
                    folder.rmdir()
            ends = self._ends(session)
            for name in list(islice(self._names(ends), MAX_NAMES)):
                if turn in (None, name):
                    self._remove_end(ends, name)
            if turn is None:
                with contextlib.suppress(OSError):
                    ends.rmdir()

    def _remove(self, folder: Path, place: TurnPlace) -> None:
        """Remove a turn: first what makes it known."""
        if _is_id(place.turn):
            with contextlib.suppress(OSError, InvalidTurn):
                head, _ = _parted(read_file(folder / place.turn, MAX_BODY_BYTES + _MAX_HEAD), place)
                chain = self._chain(bytes.fromhex(str(head["chain"])))
                if self._is_folder(chain):
                    (chain / f"{place.session}~{place.turn}~{_tag(str(head['owner']))}").unlink(missing_ok=True)
        elif not place.turn.startswith(PART):
            return
        (folder / place.turn).unlink(missing_ok=True)

    def end(self, place: TurnPlace) -> bytes | None:
        """Read the row that describes a turn's end state; None if no machine sent one. Raises InvalidTurn."""
        with self._errors():
            folder = self._ends(place.session)
            if self._is_gone(place) or not self._is_folder(folder):
                return None
            try:
                raw = read_file(folder / place.turn, MAX_ROW_BYTES)
            except FileNotFoundError:
                return None
        return _body_of(raw, place)

    def ends(self, session: str) -> list[str]:
        """List the turns of a session that have a state, in no order."""
        with self._errors():
            return [name for name in islice(self._names(self._ends(session)), MAX_NAMES) if _is_id(name)]

    def publish_end(
        self, place: TurnPlace, pack: str, row: bytes, replaced: Sequence[str], *, machine: str = "", nbytes: int = 0
    ) -> None:
        """Keep the row of a turn's state, whose pack is there. Then remove those of the turns `replaced`."""
        with self._errors():
            folder = self._ends(place.session)
            if not self._is_gone(place):
                before = self._pack_of(folder, place.turn) if self._is_folder(folder) else None
                self._folder(folder)
                head = {"format": FORMAT, "pack": pack, "blake2b": digest_of(row), "machine": machine, "nbytes": nbytes}
                self._write(folder, place.turn, json.dumps(head).encode() + b"\n" + row)
                if before is not None and before != pack:
                    self.packs.remove(before)
                for turn in replaced:
                    self._remove_end(folder, turn)
            if self._is_gone(place):  # buried meanwhile, by a machine that may not have seen this
                self._remove_end(folder, place.turn)
                self.packs.remove(pack)

    def quota(self, machine: str) -> Quota | None:
        """Count the bytes of a machine that has a quota; None without one. Reads the heads of all turns and states."""
        with self._errors():
            limit = self._limit(machine)
            if limit is None:
                return None
            used = 0
            for kind in ("sessions", "ends"):
                sessions = [one for part in self._folders(self.root / kind) for one in self._folders(part)]
                for path, about in [one for session in sessions for one in self._about(session) if _is_id(one[0].name)]:
                    if not stat.S_ISREG(about.st_mode):
                        continue
                    with contextlib.suppress(FileNotFoundError, InvalidTurn):
                        head, _ = _parted(read_file(path, _MAX_HEAD), TurnPlace(path.parent.name, path.name))
                        if head.get("machine") == machine:
                            nbytes = head.get("nbytes")
                            used += about.st_size + (nbytes if isinstance(nbytes, int) else 0)
        return Quota(limit, used)

    def _limit(self, machine: str) -> int | None:
        """Return a machine's quota in bytes, from the file of its name or else that of all; None without one."""
        folder = self.root / "quotas"
        for name in (machine, "all"):
            with contextlib.suppress(FileNotFoundError):
                if self._is_folder(folder):
                    said = read_file(folder / name, _MAX_HEAD).decode("utf-8", "replace").strip()
                    if not said.isdecimal():
                        raise RemoteError(f"{folder / name} is not a number of bytes: correct it", refused=True)
                    return int(said)
        return None

    def _ends(self, session: str) -> Path:
        return self.root / "ends" / hashlib.blake2b(session.encode(), digest_size=1).hexdigest() / session

    def _pack_of(self, folder: Path, turn: str) -> str | None:
        """Return the pack that a state's row names, of any version; None without one. Raises OSError."""
        try:
            head, _ = _parted(read_file(folder / turn, MAX_ROW_BYTES), TurnPlace(folder.name, turn))
        except InvalidTurn:
            return None
        except OSError as err:
            if err.errno in (errno.ENOENT, *_NO_FILE):
                return None
            raise  # a row that cannot be read now may name any pack
        pack = str(head.get("pack"))
        return pack if PACK.fullmatch(pack) else None

    def _remove_end(self, folder: Path, name: str) -> None:
        """Remove a state's row and then its pack, which no other row names."""
        if not self._is_folder(folder):
            return
        pack = self._pack_of(folder, name) if _is_id(name) else None
        if _is_id(name) or name.startswith(PART):
            (folder / name).unlink(missing_ok=True)
        if pack is not None:
            self.packs.remove(pack)

    def sweep(self, *, dry_run: bool = False) -> tuple[int, int]:
        """Remove packs that no row names and that are older than SWEPT_S. Returns how many, and their bytes."""

        def named() -> set[str | None]:
            ends = [one for part in self._folders(self.root / "ends") for one in self._folders(part)]
            return {self._pack_of(one, path.name) for one in ends for path, _ in self._about(one) if _is_id(path.name)}

        return self.packs.sweep(named, dry_run=dry_run)

    def used(self, place: TurnPlace) -> None:
        """Note that the state of a turn was fetched, for the remote's retention: the time of its row is that."""
        with self._errors(), contextlib.suppress(FileNotFoundError):
            folder = self._ends(place.session)
            if self._is_folder(folder) and stat.S_ISREG((folder / place.turn).lstat().st_mode):
                os.utime(folder / place.turn)

    def retain(self, limits: Retention, *, dry_run: bool = False) -> RetentionCounts:
        """Remove the states beyond limits, rows first. Their turns stay. Returns what went, and what stays.

        A state that is written or fetched meanwhile stays, unless that is at the very moment of its removal.
        """
        sizes, states, times = dict(self.packs.names()), list[KeptState](), dict[TurnPlace, float]()
        with self._errors():
            now = self._now()
            for ends in [one for part in self._folders(self.root / "ends") for one in self._folders(part)]:
                for path, about in self._about(ends):
                    place, pack = TurnPlace(ends.name, path.name), self._pack_of(ends, path.name)
                    if _is_id(place.session) and _is_id(place.turn) and pack is not None:
                        states.append(KeptState(place, pack, now - about.st_mtime, sizes.get(pack, 0)))
                        times[place] = about.st_mtime
            leaving = limits.leaving(states)
            if dry_run:
                return RetentionCounts.of(states, leaving)
            gone = [one for one in leaving if self._retire(one.place, times[one.place])]
        return RetentionCounts.of(states, gone)

    def _now(self) -> float:
        """Return the folder's own time, in s."""
        clock = self.root / f"{PART}{secrets.token_hex(8)}"
        os.close(os.open(clock, os.O_WRONLY | os.O_CREAT | os.O_EXCL | NOLINK, 0o600))
        try:
            return clock.lstat().st_mtime
        finally:
            clock.unlink()

    def _retire(self, place: TurnPlace, time: float) -> bool:
        """Remove a state that was last used then. Returns False if it was used since."""
        folder = self._ends(place.session)
        try:
            if not self._is_folder(folder) or (folder / place.turn).lstat().st_mtime != time:
                return False
        except FileNotFoundError:
            return False
        self._remove_end(folder, place.turn)
        return True

    def buried(self) -> Collection[str]:
        """Return the sessions and the turns that were buried."""
        with self._errors():
            if not (self.root / MARK).exists():
                raise RemoteError(f"{self.root} holds no remote any more; is it mounted?")
            return {name for name in islice(self._names(self.root / "buried"), MAX_NAMES) if _is_id(name)}

    def _is_buried(self, name: str) -> bool:
        return os.path.lexists(self.root / "buried" / name)

    def _session(self, session: str) -> Path:
        return self.root / "sessions" / hashlib.blake2b(session.encode(), digest_size=1).hexdigest() / session

    def _chain(self, chain: bytes) -> Path:
        return self.root / "chains" / chain[:1].hex() / chain.hex()


def _is_id(name: str) -> bool:
    return ID_PATTERN.fullmatch(name) is not None


def _tag(owner: str) -> str:
    return hashlib.blake2b(owner.encode("utf-8", "replace"), digest_size=8).hexdigest()


def _parted(raw: bytes, place: TurnPlace) -> tuple[dict[str, object], bytes]:
    """Return the head of a file, of any version, and the body."""
    line, _, body = raw.partition(b"\n")
    try:
        head = json.loads(line[:_MAX_HEAD])
    except (ValueError, RecursionError) as err:
        raise InvalidTurn(f"turn {place.turn!r} of the remote is damaged: it has no head") from err
    if not isinstance(head, dict):
        raise InvalidTurn(f"turn {place.turn!r} of the remote is damaged: it has no head")
    return head, body


def _body_of(raw: bytes, place: TurnPlace) -> bytes:
    if len(raw) >= MAX_BODY_BYTES + _MAX_HEAD:
        raise InvalidTurn(f"turn {place.turn!r} of the remote has more than {MAX_BODY_BYTES} bytes")
    head, body = _parted(raw, place)
    if head.get("format") != FORMAT:
        raise UnknownVersion(f"turn {place.turn!r} of the remote is of another version: its format is not {FORMAT}")
    if head.get("blake2b") != digest_of(body):
        raise InvalidTurn(f"turn {place.turn!r} of the remote is not what its digest says: it was altered")
    return body
