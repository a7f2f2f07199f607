"""A remote in a folder, such as one of a NAS that several machines mount.

    ssmd-remote.json                       {"format": 1}
    sessions/<2 digits>/<session>/<turn>   a line of JSON: format, chain, owner, BLAKE2b-256 of the body; then the body
    chains/<2 digits>/<chain>/<session>~<turn>~<digest of the owner>    an empty file
    buried/<session or turn>               an empty file

A file is written under another name, flushed, and then gets its own, which it keeps: so a reader finds all of it or
nothing. The turn comes before its chain, which makes it known; the tombstone comes before all that it removes. So a
kill at any moment leaves what the next call completes. Names and contents are other machines' word: each is checked.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import secrets
import stat
from collections.abc import Collection, Iterator, Sequence
from itertools import islice
from pathlib import Path

from ssmd.machine.folder import close_to_others, make_private, others_open
from ssmd.machine.privatefile import NOFOLLOW, NOLINK, of_another_user
from ssmd.sessions.domain import Domain
from ssmd.sessions.remote.remote import InvalidTurn, RemoteError, RemoteTurn, TurnPlace, UnknownVersion
from ssmd.sessions.turn import ID_PATTERN

FORMAT = 1
MAX_BODY_BYTES = 64 << 20
MARK = "ssmd-remote.json"
_MAX_HEAD = 4096
_MAX_FOUND = 256  # turns of one chain that are looked at
_MAX_NAMES = 1_000_000  # files of one folder that are looked at
_PART = ".part-"  # begins the name of a file that is not whole yet
_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_WORDS = {
    errno.ENOSPC: "its disk is full",
    errno.EDQUOT: "its disk is full",
    errno.EROFS: "it is read-only",
    errno.EACCES: "this user may not write there",
    errno.ENOENT: "it is not there; is it mounted?",
}


class FolderRemote:
    """A remote in a folder. Safe to use from several threads, processes and machines."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @staticmethod
    def open(root: Path, *, create: bool) -> FolderRemote:
        """Open the remote in a folder. create: make an empty folder one. Raises RemoteError."""
        remote = FolderRemote(root)
        with remote._errors():
            found = root.stat()
            if not stat.S_ISDIR(found.st_mode):
                raise RemoteError(f"the remote {root} is a file: name a folder", lasting=True)
            if os.name == "posix" and (found.st_mode & _OTHERS or of_another_user(found)):
                raise RemoteError(
                    f"other users can write to the remote {root}, and so into the conversations of this one: make it "
                    f"yours alone with `chmod 700 {root}`",
                    lasting=True,
                )
            if others_open(root):
                close_to_others(root)
            if not (root / MARK).exists():
                remote._create(create)
            remote._check_format()
        return remote

    def _create(self, create: bool) -> None:
        if not create:
            raise RemoteError(f"{self.root} holds no remote any more; is it mounted? Or name the folder that has it")
        if any(not name.name.startswith(_PART) for name in self.root.iterdir()):
            said = f"{self.root} is not a remote, and not empty: name an empty folder, or one of a remote"
            raise RemoteError(said, lasting=True)
        self._write(self.root, MARK, json.dumps({"format": FORMAT}).encode() + b"\n")

    def _check_format(self) -> None:
        try:
            found = json.loads(_read(self.root / MARK, _MAX_HEAD))["format"]
        except (ValueError, TypeError, KeyError) as err:
            raise RemoteError(f"{self.root / MARK} is not of a remote: {err}", lasting=True) from err
        if found != FORMAT:
            raise RemoteError(
                f"the remote {self.root} is of format {found!r}, and this version of ssmd knows {FORMAT}: use the "
                "version that made it, or another folder",
                lasting=True,
            )

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
                raw = _read(folder / place.turn, MAX_BODY_BYTES + _MAX_HEAD)
            except FileNotFoundError:
                return None
        return _body_of(raw, place)

    def turns(self, session: str) -> list[str]:
        """List the turns of a session, in no order."""
        with self._errors():
            if self._is_buried(session):
                return []
            return [name for name in islice(self._names(self._session(session)), _MAX_NAMES) if _is_id(name)]

    def publish(self, turns: Sequence[RemoteTurn]) -> None:
        """Keep turns. One that is kept already stays as it is, and one that is buried is not kept."""
        with self._errors():
            for turn in turns:
                place = turn.place
                if self._is_gone(place):
                    continue
                chain, name = self._chain(turn.chain), f"{place.session}~{place.turn}~{_tag(turn.owner)}"
                try:
                    self._keep(self._session(place.session), place, turn)
                    self._folder(chain)
                    self._touch(chain, name)
                except FileNotFoundError:
                    if not self._is_gone(place):
                        raise
                if self._is_gone(place):  # buried meanwhile, by a machine that may not have seen all of this
                    (chain / name).unlink(missing_ok=True)
                    self.bury(place.session, None if self._is_buried(place.session) else place.turn)

    def _is_gone(self, place: TurnPlace) -> bool:
        return self._is_buried(place.session) or self._is_buried(place.turn)

    def _keep(self, folder: Path, place: TurnPlace, turn: RemoteTurn) -> None:
        self._folder(folder)
        try:
            _body_of(_read(folder / place.turn, MAX_BODY_BYTES + _MAX_HEAD), place)
            return
        except UnknownVersion:
            return
        except (OSError, InvalidTurn):  # it is not there, or damaged
            pass
        head = {"format": FORMAT, "chain": turn.chain.hex(), "owner": turn.owner, "blake2b": _digest(turn.body)}
        self._write(folder, place.turn, json.dumps(head).encode() + b"\n" + turn.body)

    def bury(self, session: str, turn: str | None) -> None:
        """Remove a turn, or with None a whole session, for good."""
        with self._errors():
            buried = self.root / "buried"
            self._folder(buried)
            self._touch(buried, session if turn is None else turn)
            folder = self._session(session)
            names = list(islice(self._names(folder), _MAX_NAMES))
            for name in names if turn is None else {turn} & set(names):
                self._remove(folder, TurnPlace(session, name))
            if turn is None:
                with contextlib.suppress(OSError):  # it was never there, or a turn is being written
                    folder.rmdir()

    def _remove(self, folder: Path, place: TurnPlace) -> None:
        """Remove a turn: first what makes it known."""
        if _is_id(place.turn):
            with contextlib.suppress(OSError, InvalidTurn):
                head, _ = _parted(_read(folder / place.turn, MAX_BODY_BYTES + _MAX_HEAD), place)
                chain = self._chain(bytes.fromhex(str(head["chain"])))
                if self._is_folder(chain):
                    (chain / f"{place.session}~{place.turn}~{_tag(str(head['owner']))}").unlink(missing_ok=True)
        elif not place.turn.startswith(_PART):
            return
        (folder / place.turn).unlink(missing_ok=True)

    def buried(self) -> Collection[str]:
        """Return the sessions and the turns that were buried."""
        with self._errors():
            if not (self.root / MARK).exists():
                raise RemoteError(f"{self.root} holds no remote any more; is it mounted?")
            return {name for name in islice(self._names(self.root / "buried"), _MAX_NAMES) if _is_id(name)}

    def _is_buried(self, name: str) -> bool:
        return os.path.lexists(self.root / "buried" / name)

    def _session(self, session: str) -> Path:
        return self.root / "sessions" / hashlib.blake2b(session.encode(), digest_size=1).hexdigest() / session

    def _chain(self, chain: bytes) -> Path:
        return self.root / "chains" / chain[:1].hex() / chain.hex()

    def _is_folder(self, folder: Path) -> bool:
        """Return True if a folder below the root is there. Raises RemoteError if a link leads out of the remote."""
        at = self.root
        for part in folder.relative_to(self.root).parts:
            at = at / part
            try:
                found = os.lstat(at)
            except FileNotFoundError:
                return False
            if not stat.S_ISDIR(found.st_mode) or getattr(found, "st_reparse_tag", False):
                raise RemoteError(f"{at} is not a folder of the remote: a link may lead elsewhere")
        return True

    def _names(self, folder: Path) -> Iterator[str]:
        """Yield the names in a folder below the root; none if it is not there."""
        if self._is_folder(folder):
            with os.scandir(folder) as entries:
                yield from (entry.name for entry in entries)

    def _folder(self, folder: Path) -> None:
        """Make a folder below the root, unless it is there."""
        if not self._is_folder(folder):
            if not (self.root / MARK).exists():  # the folder is not mounted any more
                raise RemoteError(f"{self.root} holds no remote any more; is it mounted?")
            make_private(folder)
            for one in (folder.parent, folder.parent.parent):
                _flush(one)

    def _touch(self, folder: Path, name: str) -> None:
        if not os.path.lexists(folder / name):
            os.close(os.open(folder / name, os.O_WRONLY | os.O_CREAT | NOLINK, 0o600))
            _flush(folder)

    def _write(self, folder: Path, name: str, data: bytes) -> None:
        """Write a file, which appears whole or not at all."""
        part = folder / f"{_PART}{secrets.token_hex(8)}"
        try:
            with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | NOLINK, 0o600), "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, folder / name)
        finally:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
        _flush(folder)

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as err:
            why = _WORDS.get(err.errno or 0, err.strerror or str(err))
            raise RemoteError(f"the remote {self.root} cannot be used: {why}") from err


def _is_id(name: str) -> bool:
    return ID_PATTERN.fullmatch(name) is not None


def _tag(owner: str) -> str:
    return hashlib.blake2b(owner.encode("utf-8", "replace"), digest_size=8).hexdigest()


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=32).hexdigest()


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
    if head.get("blake2b") != _digest(body):
        raise InvalidTurn(f"turn {place.turn!r} of the remote is not what its digest says: it was altered")
    return body


def _read(path: Path, most: int) -> bytes:
    """Return the first `most` bytes of a file. Raises OSError for a link or a device, at once."""
    descriptor = os.open(path, os.O_RDONLY | NOFOLLOW)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, f"{path} is not a file")
        return file.read(most)


def _flush(folder: Path) -> None:
    """Flush the names in a folder to the disk, where the system can."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            with contextlib.suppress(OSError):  # a file system that cannot flush a folder
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
