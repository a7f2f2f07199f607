"""A folder that several machines mount, and the packs in one: the bytes of states, a file each.

    <mark>                                 {"format": 1}
    packs/<2 digits>/<BLAKE2b-256>         the bytes of a state

A file is written under another name, flushed, and then gets its own, which it keeps: so a reader finds all of it or
nothing. Names and contents are other machines' word: each is checked.
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
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import islice
from pathlib import Path

from ssmd.machine.folder import close_to_others, make_private, others_open
from ssmd.machine.privatefile import NOFOLLOW, NOLINK, of_another_user
from ssmd.sessions.remote.remote import InvalidTurn, RemoteError

FORMAT = 1
SWEPT_S = 24 * 3600  # s: age of a pack without a row from which `sweep` takes it, by the folder's clock
PART = ".part-"  # begins the name of a file that is not whole yet
MAX_NAMES = 1_000_000  # files of one folder that are looked at
PACK = re.compile("[0-9a-f]{64}")
MAX_MARK = 4096  # bytes of the mark of a folder or bucket
_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_REFUSED = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
_WORDS = {
    errno.ENOSPC: "its disk is full",
    errno.EDQUOT: "its disk is full",
    errno.EROFS: "it is read-only",
    errno.EACCES: "this user may not write there",
    errno.ENOENT: "it is not there; is it mounted?",
}


class MountedFolder:
    """A folder that several machines mount. Safe to use from several threads, processes and machines."""

    def __init__(self, root: Path, mark: str, what: str) -> None:
        """mark: name of the file by which the folder is known. what: the name of such a folder in messages."""
        self.root, self.mark, self.what = root, mark, what

    def prepare(self, *, create: bool, of: str = "") -> None:
        """Look if the folder is what it is to be. create: make an empty folder one. Raises RemoteError.

        of: name of the role's remote, in a database, that the folder belongs to.
        """
        root = self.root
        with self._errors():
            found = root.stat()
            if not stat.S_ISDIR(found.st_mode):
                raise RemoteError(f"{self.what} {root} is a file: name a folder", lasting=True)
            if os.name == "posix" and (found.st_mode & _OTHERS or of_another_user(found)):
                raise RemoteError(
                    f"other users can write to {self.what} {root}, and so into the conversations of this one: make it "
                    f"yours alone with `chmod 700 {root}`",
                    lasting=True,
                )
            if others_open(root):
                close_to_others(root)
            if not (root / self.mark).exists():
                self._create(create, of)
            self._check_mark(of)

    def _create(self, create: bool, of: str) -> None:
        if not create:
            raise RemoteError(f"{self.root} holds no remote any more; is it mounted? Or name the folder that has it")
        full = any(not name.name.startswith(PART) for name in self.root.iterdir())
        if (self.root / self.mark).exists():  # another machine has made it since
            return
        if full:
            said = f"{self.root} is not a remote, and not empty: name an empty folder, or one of a remote"
            raise RemoteError(said, lasting=True)
        self._write(self.root, self.mark, mark_of(of))

    def _check_mark(self, of: str) -> None:
        check_mark(read_file(self.root / self.mark, MAX_MARK), of, f"{self.what} {self.root}")

    def _folders(self, folder: Path) -> list[Path]:
        """List the folders in a folder below the root. Links are left out."""
        return [path for path, about in self._about(folder) if stat.S_ISDIR(about.st_mode)]

    def _about(self, folder: Path) -> list[tuple[Path, os.stat_result]]:
        """List what a folder below the root contains. Other machines rename and remove files meanwhile."""
        found = []
        with contextlib.suppress(FileNotFoundError):  # the folder itself
            for name in islice(self._names(folder), MAX_NAMES):
                with contextlib.suppress(FileNotFoundError):
                    found.append((folder / name, (folder / name).lstat()))
        return found

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
            try:
                entries = os.scandir(folder)
            except FileNotFoundError:  # another machine has removed it since
                return
            with entries:
                yield from (entry.name for entry in entries)

    def _folder(self, folder: Path) -> None:
        """Make a folder below the root, unless it is there."""
        if not self._is_folder(folder):
            if not (self.root / self.mark).exists():  # the folder is not mounted any more
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
        part = folder / f"{PART}{secrets.token_hex(8)}"
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
            refused = err.errno in _REFUSED
            raise RemoteError(f"{self.what} {self.root} cannot be used: {why}", refused=refused) from err


class FolderPacks:
    """The packs of a remote in a folder: a file each, named by the BLAKE2b-256 of its bytes. The remote's Blobs."""

    def __init__(self, at: MountedFolder) -> None:
        self._at = at

    def prepare(self, *, create: bool, of: str) -> None:
        """Look if the folder is the one of a database. create: make an empty folder it. Raises RemoteError."""
        self._at.prepare(create=create, of=of)

    def close(self) -> None:
        """Close nothing: a folder keeps no connection."""

    def there(self, name: str) -> bool:
        """Return True if there is a pack of this name. Its bytes are checked when they are read."""
        with self._at._errors():
            return self._at._is_folder(self._folder(name)) and os.path.lexists(self._folder(name) / name)

    def put(self, parts: Sequence[bytes | memoryview]) -> str:
        """Keep a pack, given in parts, durably. Returns its name. One that is there is read, and written if damaged."""
        name = name_of(parts)
        try:
            self.get(name, sum(map(len, parts)))
        except InvalidTurn:
            with self._at._errors():
                self._at._folder(self._folder(name))
                self._at._write(self._folder(name), name, *parts)
        else:
            with self._at._errors():
                os.utime(self._folder(name) / name)  # its row comes next: `sweep` takes old ones
        return name

    def get(self, name: str, nbytes: int) -> bytes:
        """Return a pack of so many bytes. Raises InvalidTurn if it is not there, or not what its name says."""
        what = f"the pack {name[:12]!r} of the remote"
        try:
            if not self._at._is_folder(self._folder(name)):
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
            with self._at._errors():
                raise
        if len(data) != nbytes or digest_of(data) != name:
            raise InvalidTurn(f"{what} is not what its name says: it was altered")
        return data

    def names(self) -> list[tuple[str, int]]:
        """List the packs that are whole, by name and size in bytes."""
        with self._at._errors():
            files = [one for part in self._at._folders(self._at.root / "packs") for one in self._at._about(part)]
        return sorted((path.name, about.st_size) for path, about in files if PACK.fullmatch(path.name))

    def remove(self, name: str) -> None:
        """Remove a pack that no row names any more, if it is there."""
        with self._at._errors():
            if self._at._is_folder(self._folder(name)):
                (self._folder(name) / name).unlink(missing_ok=True)

    def sweep(self, named: Callable[[], Collection[str | None]], *, dry_run: bool = False) -> tuple[int, int]:
        """Remove packs that no row names and that are older than SWEPT_S. Returns how many, and their bytes.

        Those are left by a kill between a pack and its row, or while a pack was written. named: reads the packs that
        rows name.
        """
        at, packs, count, nbytes = self._at, self._at.root / "packs", 0, 0
        with at._errors():
            if not at._is_folder(packs):
                return 0, 0
            clock = packs / f"{PART}{secrets.token_hex(8)}"  # its time is the folder's own clock
            os.close(os.open(clock, os.O_WRONLY | os.O_CREAT | os.O_EXCL | NOLINK, 0o600))
            now = clock.lstat().st_mtime
            clock.unlink()

            def old(about: os.stat_result) -> bool:
                return now - about.st_mtime > SWEPT_S

            found = [one for part in at._folders(packs) for one in at._about(part)]  # before the rows are read
            rows = named()
            for path, about in found:
                ours = PACK.fullmatch(path.name) or path.name.startswith(PART)
                if not ours or path.name in rows or not old(about):
                    continue
                if not dry_run:
                    with contextlib.suppress(FileNotFoundError):
                        if not old(path.lstat()):  # another machine put it again meanwhile
                            continue
                        path.unlink()
                count, nbytes = count + 1, nbytes + about.st_size
        return count, nbytes

    def _folder(self, name: str) -> Path:
        return self._at.root / folder_of(name)


def folder_of(name: str) -> str:
    """Return the folder of a pack, below the place's root. Raises InvalidTurn if it is not the name of one."""
    if not PACK.fullmatch(name):
        raise InvalidTurn(f"{name[:80]!r} is not the name of a pack")
    return f"packs/{name[:2]}"


def name_of(parts: Sequence[bytes | memoryview]) -> str:
    """Return the name of a pack that is given in parts."""
    running = hashlib.blake2b(digest_size=32)
    for part in parts:
        running.update(part)
    return running.hexdigest()


def mark_of(database: str) -> bytes:
    """Return the mark of a place for packs: of a database, or with "" of the remote itself."""
    return json.dumps({"format": FORMAT} | ({"of": database} if database else {})).encode() + b"\n"


def check_mark(raw: bytes, of: str, what: str) -> None:
    """Check that a mark is of this format and of a database. what: the name of the place. Raises RemoteError."""
    try:
        found = json.loads(raw)
        version, its = found["format"], found.get("of", "")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as err:
        raise RemoteError(f"the mark in {what} is not of a remote: {err}", lasting=True) from err
    if version != FORMAT:
        raise RemoteError(
            f"{what} is of format {version!r}, and this version of ssmd knows {FORMAT}: use the version that made it, "
            "or another place",
            lasting=True,
        )
    if its != of:
        raise RemoteError(f"{what} belongs to another database, or another role of it: name its own", lasting=True)


def digest_of(data: bytes) -> str:
    """Return the BLAKE2b-256 of bytes, in hex."""
    return hashlib.blake2b(data, digest_size=32).hexdigest()


def read_file(path: Path, most: int) -> bytes:
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
