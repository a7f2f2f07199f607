"""The download of a file from a hub or a package index: resumable, limited to the listed size, checked by its hash."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

import filelock
import httpx2

from ssmd.hub import hub
from ssmd.hub.hub import HubError, HubFile, HubUnreachable
from ssmd.machine.privatefile import NOLINK, owned
from ssmd.machine.size import show_size

WAITS_S = (0.5, 1.0, 2.0, 4.0)  # waits before each further attempt; then the download fails
ENOUGH_BYTES = 1 << 20  # least bytes of an attempt that is not counted as failed: a server may send very slowly
READ_BACK_BYTES = 1 << 20
LOCK = ".lock"  # lock file in a folder that is being filled
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class NoDiskSpace(HubError):
    """A full disk. The bytes received so far are kept, and the same request continues from there."""


Progress = Callable[[HubFile, int], None]  # the file, and how many of its bytes are here


class FileSource(Protocol):
    """A server that lists files and has them. name: the model or package. lister: "the hub" or "the index"."""

    @property
    def name(self) -> str: ...

    @property
    def lister(self) -> str: ...

    def url(self, name: str) -> str:
        """Return the address of a file."""

    def refusal(self, response: httpx2.Response, file: str) -> HubError:
        """Return the error for an answer that is neither 200 nor 206 to a request for `file`."""


def download(listing: FileSource, file: HubFile, path: Path, progress: Progress) -> None:
    """Download a file to `path`, after the bytes that are in it already. Raises HubError, and keeps the bytes then.

    Only `path` is written, with at most `file.size` bytes. If the hash is wrong, the bytes are removed.
    """
    with _opened(path) as descriptor:
        part = _Part(descriptor, file)
        part.read_back()
        resumed = part.size > 0
        while True:
            progress(file, part.size)
            _complete(listing, part, progress)
            if part.is_right():
                break
            part.restart()
            if not resumed:
                raise HubError(
                    f"{listing.name}: what came as {file.name} has another hash than {listing.lister} lists: it was "
                    "damaged on the way or is not the file; nothing of it is kept, try again"
                )
            resumed = False  # the old bytes may have been damaged: start again from the beginning
        os.fsync(descriptor)


def _complete(listing: FileSource, part: _Part, progress: Progress) -> None:
    failed, url = 0, listing.url(part.file.name)
    most = part.size  # bytes that were here once: without ranges a server may begin again and again
    while part.size < part.file.size:
        try:
            _receive(listing, part, progress)
        except (httpx2.HTTPError, HubUnreachable) as err:
            failed = 1 if part.size - most >= ENOUGH_BYTES else failed + 1
            most = max(most, part.size)
            if failed > len(WAITS_S):
                raise HubUnreachable(
                    f"{listing.name}: {part.file.name} broke off {failed} times{hub.through(url)} ({hub.reason(err)}); "
                    f"{part.size} of {part.file.size} bytes are kept, and the same command goes on from there"
                ) from err
            time.sleep(WAITS_S[failed - 1])


def _receive(listing: FileSource, part: _Part, progress: Progress) -> None:
    """Request the missing bytes once."""
    file = part.file
    with hub.request(listing.url(file.name), 0 if part.whole else part.size) as response:
        if response.status_code == 416:
            part.whole = True  # the bytes that are here stay until others come
            raise HubUnreachable(f"{response.url.host} does not have the rest of {file.name}")
        if response.status_code == 200 and part.size:
            part.restart()  # the server does not support ranges
        if response.status_code not in (200, 206):
            raise listing.refusal(response, file.name)
        announced = _announced(response, part)
        if announced is not None and announced != file.size:
            raise HubError(
                f"{listing.name}: {listing.lister} lists {file.name} with {file.size} bytes and sends {announced}: the "
                "two disagree, so nothing was put in place"
            )
        for chunk in hub.parts(response):
            if part.size + len(chunk) > file.size:
                raise HubError(
                    f"{listing.name}: more comes as {file.name} than the {file.size} bytes that {listing.lister} lists"
                )
            part.add(chunk)
            progress(file, part.size)
    if part.size < file.size:
        raise HubUnreachable(f"the answer ended {file.size - part.size} bytes early")


def _announced(response: httpx2.Response, part: _Part) -> int | None:
    """Return the whole file's size by this answer; None if it has none. Raises HubError if its range is another one."""
    try:
        if response.status_code == 206:
            unit, _, rest = response.headers.get("content-range", "").partition(" ")
            span, _, whole = rest.partition("/")
            if unit != "bytes" or int(span.partition("-")[0]) != part.size:
                raise ValueError("another range")
            return None if whole == "*" else int(whole)
        length = response.headers.get("content-length")
        return None if length is None else int(length)
    except ValueError as err:
        raise HubError(f"{response.url.host} answers with another part of {part.file.name} than requested") from err


class _Part:
    """The bytes of a file that were received, and their hash so far.

    whole: the server did not have the rest alone, so the next request is for the whole file.
    """

    def __init__(self, descriptor: int, file: HubFile) -> None:
        self._descriptor = descriptor
        self.file = file
        self.whole = False
        self._begin()

    def _begin(self) -> None:
        self.size = 0
        if self.file.sha256 is not None:
            self._hash = hashlib.sha256()
        else:  # git hashes a blob with its size before it
            self._hash = hashlib.sha1(b"blob %d\0" % self.file.size, usedforsecurity=False)

    def read_back(self) -> None:
        """Hash the bytes of an earlier download. All of them are removed if they are more than the file has."""
        if os.fstat(self._descriptor).st_size > self.file.size:
            self.restart()
        while chunk := os.read(self._descriptor, READ_BACK_BYTES):
            self._hash.update(chunk)
            self.size += len(chunk)

    def restart(self) -> None:
        os.ftruncate(self._descriptor, 0)
        os.lseek(self._descriptor, 0, os.SEEK_SET)
        self._begin()

    def add(self, chunk: bytes) -> None:
        left = memoryview(chunk)
        try:
            while left:
                left = left[os.write(self._descriptor, left) :]
        except OSError as err:
            if err.errno in NO_ROOM:
                raise NoDiskSpace(
                    f"no room on the disk for {self.file.name} ({err.strerror}): free "
                    f"{show_size(self.file.size - self.size)} and more; the same command goes on from here"
                ) from err
            raise
        self._hash.update(chunk)
        self.size += len(chunk)

    def is_right(self) -> bool:
        return self._hash.hexdigest() == (self.file.sha256 or self.file.blob)


def check_room(missing: int, folder: Path, other: str, what: str = "fetched", *, beside: int = 0) -> None:
    """Check that `missing` bytes fit on the disk of a folder. Raises NoDiskSpace.

    other: names another disk. what: the verb for the message, such as "downloaded". beside: further bytes, which the
    verb names.
    """
    free = shutil.disk_usage(folder).free
    if missing + beside > free:
        raise NoDiskSpace(
            f"no room: {show_size(missing + beside - free)} more needed; {show_size(missing)} are to be {what} and the "
            f"disk of {folder.parent} has {show_size(free)} free: make room, or choose another disk with {other}"
        )


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | NOLINK, 0o666)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def held(partial: Path, name: str) -> Iterator[None]:
    """Lock the folder that `name` is downloaded into, for this process only. Raises HubError.

    It is made if needed, and removed at the end if it is empty.
    """
    with suppress(FileExistsError):
        partial.mkdir()
    found = partial.lstat()
    if not stat.S_ISDIR(found.st_mode) or not owned(found):
        raise HubError(f"{partial} is in the way and not a folder of yours: remove it")
    lock = filelock.FileLock(partial / LOCK, timeout=0)
    try:
        lock.acquire()
    except filelock.Timeout as err:
        raise HubError(f"another ssmd fetches {name} right now into {partial}: wait for it") from err
    try:
        yield
    finally:
        lock.release()
        if partial.is_dir() and not any(p.stat().st_size for p in partial.iterdir()):
            shutil.rmtree(partial, ignore_errors=True)
