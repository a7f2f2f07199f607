"""A data directory that one daemon alone uses: the lock, the address file for commands, and the log."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ssmd.daemon import discovery
from ssmd.daemon.logfile import LogFile
from ssmd.machine.lockfile import LOCK_FILE, holder
from ssmd.sessions.rows.lock import DirectoryLock
from ssmd.sessions.turn import StoreError

log = logging.getLogger(__name__)


@dataclass
class Home:
    """A locked data directory. log: None if it cannot be written."""

    data_dir: Path
    lock: DirectoryLock
    log: LogFile | None = None
    _address: discovery.Address | None = None
    _warned: bool = False
    _beside: bool = False  # another daemon locked the directory after this one's lock was removed

    def ready(self, address: discovery.Address, said: str) -> None:
        """Announce the daemon's address to commands. On a full disk it serves all the same, and they do not find it."""
        self._address = address
        self._announce(address)
        if self.log is not None:
            self.log.note(f"process {os.getpid()}: {said}")

    def look(self) -> None:
        """Restore the lock and the daemon's address file if another program removed them. Costs two `stat` calls."""
        if self.lock.is_in_place():
            self._beside = False
        else:
            self._lock_again()
        if self._beside:  # the file is the other daemon's
            return
        if self._address is not None and not os.path.lexists(self.data_dir / discovery.FILE):
            self._announce(self._address)

    def _lock_again(self) -> None:
        if not self.data_dir.is_dir():  # there is nothing to lock, and the store reports it
            return
        file = self.data_dir / LOCK_FILE
        with contextlib.suppress(OSError):
            if self._beside and holder(file) is not None:
                return
        try:
            self.lock.retake("stop one of the two")
        except StoreError as err:
            if not self._beside:
                log.error("%s was removed, and cannot be locked again: %s", file, err)
            self._beside = True
            return
        self._beside = False
        log.warning("%s was removed; it is made and locked again", file)

    def _announce(self, address: discovery.Address) -> None:
        try:
            discovery.announce(self.data_dir, address)
        except OSError as err:
            if not self._warned:
                log.warning("`ssmd ps` and other commands will not find this daemon: %s", err)
            self._warned = True


@contextlib.contextmanager
def moved_in(data_dir: Path) -> Iterator[Home]:
    """Lock a data directory and log into it, until the body ends. Raises StoreError if another daemon uses it."""
    lock = DirectoryLock.take(data_dir, discovery.ADVICE)
    home, file = Home(data_dir, lock), None
    try:
        discovery.withdraw(data_dir)
        try:
            file = home.log = LogFile(data_dir)
            logging.getLogger().addHandler(file)
        except OSError as err:
            log.warning("no log is kept: %s", err)
        yield home
        if file is not None:
            file.note(f"process {os.getpid()} ended")
    except Exception as err:
        if file is not None:
            file.note(f"process {os.getpid()} ended: {err}")
        raise
    finally:
        if file is not None:
            logging.getLogger().removeHandler(file)
            file.close()
        if home.lock.is_in_place():
            discovery.withdraw(data_dir)
        home.lock.release()
