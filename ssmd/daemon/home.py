"""A data directory that is one daemon's alone: the lock, what tells commands where it is, and its log."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ssmd.daemon import discovery
from ssmd.daemon.logfile import LogFile
from ssmd.sessions.rows.lock import DirectoryLock

log = logging.getLogger(__name__)


@dataclass
class Home:
    """A locked data directory. log: None if it cannot be written."""

    data_dir: Path
    log: LogFile | None
    _address: discovery.Address | None = None
    _warned: bool = False

    def ready(self, address: discovery.Address, said: str) -> None:
        """Tell commands where the daemon is. A full disk is no reason not to serve: then they do not find it."""
        self._address = address
        self._announce(address)
        if self.log is not None:
            self.log.note(f"process {os.getpid()}: {said}")

    def look(self) -> None:
        """Tell commands again where the daemon is, if somebody removed what told them. Costs a look at one name."""
        if self._address is not None and not os.path.lexists(self.data_dir / discovery.FILE):
            self._announce(self._address)

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
    file = None
    try:
        discovery.withdraw(data_dir)
        try:
            file = LogFile(data_dir)
            logging.getLogger().addHandler(file)
        except OSError as err:
            log.warning("no log is kept: %s", err)
        yield Home(data_dir, file)
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
        discovery.withdraw(data_dir)
        lock.release()
