"""A remote in a folder, such as one of a NAS that several machines mount.

    ssmd-remote.json                       {"format": 1}
    sessions/<2 digits>/<session>/<turn>   a line of JSON: format, chain, owner, BLAKE2b-256 of the body; then the body
    chains/<2 digits>/<chain>/<session>~<turn>~<digest of the owner>    an empty file
    ends/<2 digits>/<session>/<turn>       a state's row: a line of JSON with its pack, as of a turn; then the row
    packs/<2 digits>/<BLAKE2b-256>         the bytes of a state
    buried/<session or turn>               an empty file

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
import re
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
MAX_ROW_BYTES = 64 << 10  # of a state's row
SWEPT_S = 24 * 3600  # s: age of a pack without a row from which `sweep` takes it, by the folder's clock
_MAX_HEAD = 4096
_MAX_FOUND = 256  # turns of one chain that are looked at
_MAX_NAMES = 1_000_000  # files of one folder that are looked at
_PART = ".part-"  # begins the name of a file that is not whole yet
_PACK = re.compile("[0-9a-f]{64}")
_NO_FILE = (errno.EINVAL, errno.ELOOP, errno.EISDIR)  # of `_read`: a device, a link, a folder
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
        self.packs = FolderPacks(self)

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
            ends = self._ends(session)
            for name in list(islice(self._names(ends), _MAX_NAMES)):
                if turn in (None, name):
                    self._remove_end(ends, name)
            if turn is None:
                with contextlib.suppress(OSError):
                    ends.rmdir()

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

    def end(self, place: TurnPlace) -> bytes | None:
        """Read the row that describes a turn's end state; None if no machine sent one. Raises InvalidTurn."""
        with self._errors():
            folder = self._ends(place.session)
            if self._is_gone(place) or not self._is_folder(folder):
                return None
            try:
                raw = _read(folder / place.turn, MAX_ROW_BYTES)
            except FileNotFoundError:
                return None
        return _body_of(raw, place)

    def ends(self, session: str) -> list[str]:
        """List the turns of a session that have a state, in no order."""
        with self._errors():
            return [name for name in islice(self._names(self._ends(session)), _MAX_NAMES) if _is_id(name)]

    def publish_end(self, place: TurnPlace, pack: str, row: bytes, replaced: Sequence[str]) -> None:
        """Keep the row of a turn's state, whose pack is there. Then remove those of the turns `replaced`."""
        with self._errors():
            folder = self._ends(place.session)
            if not self._is_gone(place):
                before = self._pack_of(folder, place.turn) if self._is_folder(folder) else None
                self._folder(folder)
                head = {"format": FORMAT, "pack": pack, "blake2b": _digest(row)}
                self._write(folder, place.turn, json.dumps(head).encode() + b"\n" + row)
                if before is not None and before != pack:
                    self.packs.remove(before)
                for turn in replaced:
                    self._remove_end(folder, turn)
            if self._is_gone(place):  # buried meanwhile, by a machine that may not have seen this
                self._remove_end(folder, place.turn)
                self.packs.remove(pack)

    def _ends(self, session: str) -> Path:
        return self.root / "ends" / hashlib.blake2b(session.encode(), digest_size=1).hexdigest() / session

    def _pack_of(self, folder: Path, turn: str) -> str | None:
        """Return the pack that a state's row names, of any version; None without one. Raises OSError."""
        try:
            head, _ = _parted(_read(folder / turn, MAX_ROW_BYTES), TurnPlace(folder.name, turn))
        except InvalidTurn:
            return None
        except OSError as err:
            if err.errno in (errno.ENOENT, *_NO_FILE):
                return None
            raise  # a row that cannot be read now may name any pack
        pack = str(head.get("pack"))
        return pack if _PACK.fullmatch(pack) else None

    def _remove_end(self, folder: Path, name: str) -> None:
        """Remove a state's row and then its pack, which no other row names."""
        if not self._is_folder(folder):
            return
        pack = self._pack_of(folder, name) if _is_id(name) else None
        if _is_id(name) or name.startswith(_PART):
            (folder / name).unlink(missing_ok=True)
        if pack is not None:
            self.packs.remove(pack)

    def sweep(self, *, dry_run: bool = False) -> tuple[int, int]:
        """Remove packs that no row names and that are older than SWEPT_S. Returns how many, and their bytes.

        Those are left by a kill between a pack and its row, or while a pack was written.
        """
        packs, count, nbytes = self.root / "packs", 0, 0
        with self._errors():
            if not self._is_folder(packs):
                return 0, 0
            clock = packs / f"{_PART}{secrets.token_hex(8)}"  # its time is the folder's own clock
            os.close(os.open(clock, os.O_WRONLY | os.O_CREAT | os.O_EXCL | NOLINK, 0o600))
            now = clock.lstat().st_mtime
            clock.unlink()
            found = [one for part in self._folders(packs) for one in self._about(part)]
            ends = [one for part in self._folders(self.root / "ends") for one in self._folders(part)]
            named = {self._pack_of(one, path.name) for one in ends for path, _ in self._about(one) if _is_id(path.name)}
            for path, about in found:
                name = path.name
                ours = _PACK.fullmatch(name) or name.startswith(_PART)
                if ours and name not in named and now - about.st_mtime > SWEPT_S:
                    count, nbytes = count + 1, nbytes + about.st_size
                    if not dry_run:
                        path.unlink(missing_ok=True)
        return count, nbytes

    def _folders(self, folder: Path) -> list[Path]:
        """List the folders in a folder below the root. Links are left out."""
        return [path for path, about in self._about(folder) if stat.S_ISDIR(about.st_mode)]

    def _about(self, folder: Path) -> list[tuple[Path, os.stat_result]]:
        """List what a folder below the root contains. Other machines rename and remove files meanwhile."""
        found = []
        with contextlib.suppress(FileNotFoundError):  # the folder itself
            for name in islice(self._names(folder), _MAX_NAMES):
                with contextlib.suppress(FileNotFoundError):
                    found.append((folder / name, (folder / name).lstat()))
        return found

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

    def _write(self, folder: Path, name: str, *parts: bytes | memoryview) -> None:
        """Write a file, which appears whole or not at all."""
        part = folder / f"{_PART}{secrets.token_hex(8)}"
        try:
            with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | NOLINK, 0o600), "wb") as file:
                for data in parts:
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


class FolderPacks:
    """The packs of a remote in a folder: a file each, named by the BLAKE2b-256 of its bytes. The remote's Blobs."""

    def __init__(self, remote: FolderRemote) -> None:
        self._remote = remote

    def there(self, name: str) -> bool:
        """Return True if there is a pack of this name. Its bytes are checked when they are read."""
        with self._remote._errors():
            return self._remote._is_folder(self._folder(name)) and os.path.lexists(self._folder(name) / name)

    def put(self, parts: Sequence[bytes | memoryview]) -> str:
        """Keep a pack, given in parts, durably. Returns its name. One that is there is read, and written if damaged."""
        running = hashlib.blake2b(digest_size=32)
        for part in parts:
            running.update(part)
        name = running.hexdigest()
        try:
            self.get(name, sum(map(len, parts)))
        except InvalidTurn:
            with self._remote._errors():
                self._remote._folder(self._folder(name))
                self._remote._write(self._folder(name), name, *parts)
        return name

    def get(self, name: str, nbytes: int) -> bytes:
        """Return a pack of so many bytes. Raises InvalidTurn if it is not there, or not what its name says."""
        what = f"the pack {name[:12]!r} of the remote"
        try:
            if not self._remote._is_folder(self._folder(name)):
                raise InvalidTurn(f"{what} is not there")
            descriptor = os.open(self._folder(name) / name, os.O_RDONLY | NOFOLLOW)
            with os.fdopen(descriptor, "rb") as file:
                found = os.fstat(descriptor)
                if not stat.S_ISREG(found.st_mode) or found.st_size != nbytes:
                    raise InvalidTurn(f"{what} has {found.st_size} bytes, its row says {nbytes}")
                data = file.read(nbytes)
        except FileNotFoundError as err:
            raise InvalidTurn(f"{what} is not there") from err
        except OSError as err:
            if err.errno in (errno.ELOOP, errno.EISDIR):
                raise InvalidTurn(f"{what} is no file") from err
            with self._remote._errors():
                raise
        if len(data) != nbytes or _digest(data) != name:
            raise InvalidTurn(f"{what} is not what its name says: it was altered")
        return data

    def remove(self, name: str) -> None:
        """Remove a pack that no row names any more, if it is there."""
        with self._remote._errors():
            if self._remote._is_folder(self._folder(name)):
                (self._folder(name) / name).unlink(missing_ok=True)

    def _folder(self, name: str) -> Path:
        if not _PACK.fullmatch(name):
            raise InvalidTurn(f"{name[:80]!r} is not the name of a pack")
        return self._remote.root / "packs" / name[:2]


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
