"""The messages typed in earlier chats, in a file of this user alone. Imports prompt_toolkit, which is heavy."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path

from prompt_toolkit.history import History

from ssmd.machine import privatefile

MAX_BYTES = 1 << 20


class ChatHistory(History):
    """The messages of this chat and of earlier ones. problem: why no more is written to the file, or "".

    Entries have the form of prompt_toolkit's FileHistory: `# time`, then each line after a plus.
    """

    def __init__(self, file: Path | None) -> None:
        """Read the file; None stores nothing. An unreadable or unwritable file is a problem, and is left as it is."""
        super().__init__()
        self.problem = ""
        self._file = file
        self._before: list[str] = []
        if file is not None:
            try:
                self._before = list(_entries(_shortened(file)))
            except OSError as err:
                self._give_up(err)

    def load_history_strings(self) -> Iterable[str]:
        return reversed(self._before)

    def store_string(self, string: str) -> None:
        if self._file is None:
            return
        lines = "".join(f"+{line}\n" for line in string.split("\n"))
        try:
            with os.fdopen(_opened(self._file, os.O_WRONLY | os.O_APPEND), "ab") as file:
                file.write(f"\n# {datetime.now()}\n{lines}".encode(errors="replace"))
        except OSError as err:
            self._give_up(err)

    def _give_up(self, err: OSError) -> None:
        why = "it is a link" if err.errno == errno.ELOOP else err.strerror or err
        self.problem = f"messages are not kept for later chats: {self._file}: {why}"
        self._file = None


def _opened(file: Path, flags: int) -> int:
    """Open the file, made if needed, for this user alone. Raises OSError at once if it is not a regular, own file."""
    descriptor = os.open(file, flags | os.O_CREAT | privatefile.NOFOLLOW, 0o600)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise PermissionError("it is not a regular file")
        if privatefile.of_another_user(found):
            raise PermissionError(f"it belongs to user {found.st_uid}")
        privatefile.close_to_others(descriptor)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _shortened(file: Path) -> bytes:
    """Return the file's contents. Of a long file the older half is removed. Raises OSError."""
    with os.fdopen(_opened(file, os.O_RDWR), "r+b") as opened:
        if os.fstat(opened.fileno()).st_size <= MAX_BYTES:
            return opened.read(MAX_BYTES)
        opened.seek(-MAX_BYTES // 2, os.SEEK_END)
        rest = opened.read(MAX_BYTES)
        begin = rest.find(b"\n# ")  # of an entry
        rest = rest[begin:] if begin >= 0 else b""
        opened.seek(0)
        opened.write(rest)
        opened.truncate()
    return rest


def _entries(text: bytes) -> Iterator[str]:
    """Yield the entries, the oldest first."""
    lines: list[str] = []
    for line in [*text.decode(errors="replace").split("\n"), ""]:
        if line.startswith("+"):
            lines.append(line[1:])
        elif lines:
            yield "\n".join(lines)
            lines = []
