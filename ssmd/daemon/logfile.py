"""The daemon's log in its data directory: two files of a bounded size, for this user alone, and their reader.

It has the lines of stderr, and when the daemon began and ended. A full disk only costs lines.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
from collections.abc import Iterator
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

from ssmd.machine import privatefile

FILE = "daemon.log"
BEFORE = f"{FILE}.1"
MOST_BYTES = 4 << 20  # of each file
MAX_LINE_CHARS = 4000


class OneLine(logging.Formatter):
    """A line for each record; the lines of a traceback follow behind a mark.

    So no text from a client becomes a line of its own, steers a terminal or fills a disk.
    """

    def __init__(self, fmt: str = "%(asctime)s %(levelname)s %(name)s: %(message)s") -> None:
        super().__init__(fmt)

    def formatMessage(self, record: logging.LogRecord) -> str:
        return _plain(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:
        return _behind(super().formatException(ei))

    def formatStack(self, stack_info: str) -> str:
        return _behind(super().formatStack(stack_info))


def _behind(text: str) -> str:
    return "\n".join(f"  | {_plain(line)}" for line in text.split("\n"))


def _plain(text: str) -> str:
    """Return the text with invisible characters escaped, cut to MAX_LINE_CHARS."""
    text = text if len(text) <= MAX_LINE_CHARS else text[:MAX_LINE_CHARS] + "…"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class LogFile(RotatingFileHandler):
    """Writes records to the log of a data directory. Raises OSError if the log cannot be opened."""

    def __init__(self, data_dir: Path) -> None:
        super().__init__(
            data_dir / FILE, maxBytes=MOST_BYTES, backupCount=1, encoding="utf-8", errors="backslashreplace"
        )
        self.setFormatter(OneLine())

    def note(self, text: str) -> None:
        """Write a line that stderr does not need."""
        self.handle(logging.LogRecord("ssmd", logging.INFO, "", 0, "%s", (text,), None))

    def handleError(self, record: logging.LogRecord) -> None:
        """Do nothing: stderr has the line."""

    def close(self) -> None:
        with contextlib.suppress(OSError):  # of earlier writes that failed
            super().close()

    def _open(self) -> Any:
        descriptor = os.open(self.baseFilename, os.O_WRONLY | os.O_APPEND | os.O_CREAT | privatefile.NOFOLLOW, 0o600)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise PermissionError(f"{self.baseFilename} is not a regular file")
            privatefile.close_to_others(descriptor)
            return open(descriptor, "a", encoding=self.encoding, errors=self.errors, newline="\n")
        except BaseException:
            os.close(descriptor)
            raise


class Reader:
    """The lines of a data directory's log, the last ones and then new ones. Raises OSError."""

    def __init__(self, data_dir: Path) -> None:
        self._file = data_dir / FILE
        self._before = data_dir / BEFORE
        self._at = 0  # bytes of the file that were read
        self._inode: int | None = None

    def last(self, lines: int) -> list[str]:
        """Return the last lines, also of the file before this one if these are too few.

        Raises FileNotFoundError if there is no log.
        """
        found = _lines(self._take())
        if len(found) < lines:
            with contextlib.suppress(FileNotFoundError):
                found = [*_lines(_rest(self._before, 0)[0]), *found]
        return found[len(found) - min(lines, len(found)) :]

    def more(self) -> Iterator[str]:
        """Yield the whole lines that came since, also from a new file that replaced this one."""
        try:
            now = self._file.lstat()
        except FileNotFoundError:
            return
        if now.st_ino != self._inode or now.st_size < self._at:
            with contextlib.suppress(FileNotFoundError):
                rest, _, inode = _rest(self._before, self._at)
                if inode == self._inode:
                    yield from _lines(rest)
            self._at = 0
        yield from _lines(self._take())

    def _take(self) -> bytes:
        text, begin, self._inode = _rest(self._file, self._at)
        text = text[: text.rfind(b"\n") + 1]
        self._at = begin + len(text)
        return text


def _rest(file: Path, at: int) -> tuple[bytes, int, int]:
    """Read a file from offset `at`, at most its last 2 * MOST_BYTES bytes.

    Returns (bytes, offset of the first one, inode). Raises PermissionError if it is not a regular file.
    """
    descriptor = os.open(file, os.O_RDONLY | privatefile.NOFOLLOW)
    with os.fdopen(descriptor, "rb") as opened:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise PermissionError(f"{file} is not a regular file")
        begin = max(at, found.st_size - 2 * MOST_BYTES)
        opened.seek(begin)
        return opened.read(2 * MOST_BYTES), begin, found.st_ino


def _lines(text: bytes) -> list[str]:
    return text.decode("utf-8", "replace").split("\n")[:-1]
