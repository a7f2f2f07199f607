"""Cache files: kept with a checksum against damage, dropped when in doubt."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import xxhash

from ssmd.machine import homes
from ssmd.machine.folder import make_private
from ssmd.machine.privatefile import PLAIN, others_write, owned, read_own

log = logging.getLogger(__name__)
_warned: set[Path] = set()  # folders that the log has named
_HELD = sys.platform == "win32"  # an open file can be neither renamed nor removed
_BLOCK = 1 << 20  # bytes per read; a block fits the processor's cache
_SEAL_BYTES = 4096  # most bytes of a seal
BUILD = 24  # digits of a build's hash that begin the names of its cached files


def cache_folder() -> Path:
    """Return the folder of caches: SSMD_CACHE_DIR, else the user's own.

    Weights are mapped from it, and a seal shows damage, not forgery. So if another user could write there, a folder
    with the user's data takes its place. If that one cannot be trusted either, the path leads nowhere: no cache.
    """
    chosen = Path(os.environ.get("SSMD_CACHE_DIR") or homes.caches())
    problem = _distrust(chosen)
    if not problem:
        return chosen
    private, instead = _data_folder() / "cache", ""
    with contextlib.suppress(OSError):
        make_private(private)
        instead = "" if _distrust(private) else f"{private} is used instead"
    if chosen not in _warned:
        _warned.add(chosen)
        log.warning(
            "the cache folder %s is not used: %s; %s. Set SSMD_CACHE_DIR to a folder of your own",
            *(chosen, problem, instead or "models load slower without one"),
        )
    return private if instead else Path(os.devnull) / "cache"


def _distrust(folder: Path) -> str:
    """Return why another user could have written into a folder or the folders in it; "" if none could."""
    with contextlib.suppress(OSError):  # a missing or unreadable folder: nothing is read from it
        for one in (folder, *(entry for entry in folder.iterdir() if entry.is_dir())):
            found = one.stat()
            if not owned(found):
                return f"{one} belongs to user {found.st_uid}"
            if others_write(found):
                return f"every user of this computer can write to {one} (look it through, then: chmod 700 {one})"
    return ""


def _data_folder() -> Path:
    return Path(os.environ.get("SSMD_DATA_DIR") or homes.data())


def tunings() -> Path:
    """Return the folder of tilings that runtimes measured.

    An exact resume needs them, so they are with the user's data: a cache may be emptied.
    """
    return _data_folder() / "tunings"


def forget(build: str) -> None:
    """Remove the files that runtimes keep for an artifact's build. Never raises."""
    start = f"{build[:BUILD]}*"
    for kept in (*cache_folder().glob(f"*/{start}"), *tunings().glob(start)):
        if kept.is_dir() and not kept.is_symlink():
            shutil.rmtree(kept, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                kept.unlink()


@contextmanager
def tuned_anew(build: str) -> Iterator[None]:
    """Let runtimes measure a build's tilings again; those that were not measured again stay. Never raises."""
    aside = list[tuple[Path, Path]]()
    for kept in tunings().glob(f"{build[:BUILD]}*.json"):
        with contextlib.suppress(OSError):
            aside.append((kept, kept.replace(kept.with_suffix(".before"))))
    try:
        yield
    finally:
        for kept, before in aside:
            with contextlib.suppress(OSError):
                if kept.exists():
                    before.unlink()
                else:
                    before.replace(kept)


class CachedFile:
    """A file with its seal, a second file that holds its size and checksum.

    The file is written under a temporary name and then renamed. On Windows a file that a library holds open cannot be
    renamed, so it keeps that name and the seal names it. A folder that cannot be written raises nothing: it is logged,
    with the consequences.
    """

    def __init__(self, path: Path, costs: str) -> None:
        """costs: the consequences of having no cache, for the log."""
        self.path = path
        self._seal = path.with_suffix(".json")
        self._costs = costs

    def good(self) -> bool:
        """Return True if the file matches its seal, which counts only if no other user can have written it."""
        try:
            seal = json.loads(read_own(self._seal, _SEAL_BYTES))
            if not isinstance(seal, dict):
                return False
            if _HELD:
                self.path = self.path.with_name(str(seal.get("file", self.path.name)))
            if self.path.stat().st_size != seal.get("size"):
                return False
            if "sha256" not in seal:
                return _checksum(self.path) == seal.get("xxh3")
            if _sha256(self.path) != seal["sha256"]:  # an older seal: it takes a second for each GB
                return False
            self._write_seal(_sealed(self.path))
            return True
        except (OSError, ValueError, RecursionError):
            return False

    def fresh(self, nbytes: int = 0) -> Path | None:
        """Return a new path to write `nbytes` to, for which the disk has room; None if no cache can be written."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            fresh = self.path.with_name(f"{self._seal.stem}.{os.getpid()}{self.path.suffix if _HELD else '.tmp'}")
            fresh.unlink(missing_ok=True)
            self._sweep()
            try:
                _reserve(fresh, nbytes)  # fails here, not inside a library, if it cannot be written
            finally:
                fresh.unlink(missing_ok=True)
        except OSError as err:
            log.warning("no cache in %s (%s): %s", self.path.parent, err, self._costs)
            return None
        return fresh

    def keep(self, fresh: Path) -> None:
        """Keep the file that was written to `fresh`, with a new seal."""
        try:
            if fresh.is_file():
                fresh.chmod(0o600)
                seal = _sealed(fresh)
                if _HELD:
                    self.path = fresh
                else:
                    os.replace(fresh, self.path)
                self._write_seal(seal)
        except OSError as err:
            log.warning("the cache %s could not be kept (%s)", self.path, err)
            with contextlib.suppress(OSError):
                fresh.unlink(missing_ok=True)

    def drop(self) -> None:
        for path in (self.path, self._seal):
            try:
                path.unlink(missing_ok=True)
            except (OSError, ValueError) as err:
                log.warning("the cache %s could not be removed (%s)", path, err)

    def _write_seal(self, text: str) -> None:
        self._seal.unlink(missing_ok=True)
        descriptor = os.open(self._seal, os.O_WRONLY | os.O_CREAT | os.O_EXCL | PLAIN, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(text)

    def _sweep(self) -> None:
        """Remove files that ended processes left under their temporary names. Files still in use stay."""
        for left in self.path.parent.glob(f"{self._seal.stem}.*{self.path.suffix if _HELD else '.tmp'}"):
            with contextlib.suppress(OSError):
                if _HELD or not _runs(left.name.split(".")[-2]):
                    left.unlink()


def _runs(process: str) -> bool:
    """Return True if a process with this id may exist."""
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return False
    except (OSError, ValueError, OverflowError):  # another user's process, or not a number
        pass
    return True


def _reserve(path: Path, nbytes: int) -> None:
    """Allocate a file of `nbytes` on the disk for a moment. Raises OSError if there is no room.

    No other check covers the file system, quotas and limits of this process.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | PLAIN, 0o600)
    try:
        if nbytes and not _allocated(descriptor, nbytes) and nbytes > shutil.disk_usage(path.parent).free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    finally:
        os.close(descriptor)


def _allocated(descriptor: int, nbytes: int) -> bool:
    """Allocate `nbytes` for the file. Returns False if the system or the file system cannot. Raises OSError."""
    if not hasattr(os, "posix_fallocate"):
        return False
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError as err:
        if err.errno in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
            return False
        raise
    return True


def _sealed(path: Path) -> str:
    named = {"file": path.name} if _HELD else {}
    return json.dumps({"size": path.stat().st_size, "xxh3": _checksum(path), **named})


def _checksum(path: Path) -> str:
    running, block = xxhash.xxh3_128(), memoryview(bytearray(_BLOCK))
    with path.open("rb", buffering=0) as f:
        while length := f.readinto(block):
            running.update(block[:length])
    return running.hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()
