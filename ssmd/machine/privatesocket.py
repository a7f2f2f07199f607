"""A Unix socket that only its own user can connect to: a file of mode 0600, removed when the socket is closed."""

from __future__ import annotations

import errno
import os
import socket
import stat
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PROBE_S = 1.0  # longest wait for a connection that shows if a process listens
_CREDENTIALS = struct.Struct("3i")  # process, user and group


def process_at(one: socket.socket) -> int | None:
    """Return the id of the process that connected a Unix socket; None if the system does not report it."""
    if sys.platform != "linux" or one.family != socket.AF_UNIX:
        return None
    process, _, _ = _CREDENTIALS.unpack(one.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return int(process)


if sys.platform == "win32":

    def listen_privately(path: Path, backlog: int) -> socket.socket:
        """Raise OSError: Python has no Unix sockets on Windows."""
        raise OSError(errno.ENOSYS, "Python has no Unix sockets on Windows")

    def connect(path: Path, timeout_s: float | None) -> socket.socket:
        """Raise OSError: Python has no Unix sockets on Windows."""
        raise OSError(errno.ENOSYS, "Python has no Unix sockets on Windows")

else:
    import fcntl

    def listen_privately(path: Path, backlog: int) -> socket.socket:
        """Listen at `path`. A socket that an ended process left there is replaced.

        Raises OSError that describes any other file there.
        """
        with _alone_in(path.parent):
            _make_way(path)
            one = PrivateSocket(path)
            try:
                before = os.umask(0o177)
                try:
                    one.bind(str(path))  # follows no link
                finally:
                    os.umask(before)
                one.made = path.lstat()
                one.listen(backlog)
            except BaseException:
                one.close()
                raise
        return one

    class PrivateSocket(socket.socket):
        """A socket that removes its file when it is closed, unless another file has replaced it."""

        def __init__(self, path: Path) -> None:
            super().__init__(socket.AF_UNIX, socket.SOCK_STREAM)
            self._path = path
            self.made: os.stat_result | None = None

        def close(self) -> None:
            made, self.made = self.made, None
            with suppress(OSError):
                if made is not None and os.path.samestat(self._path.lstat(), made):
                    self._path.unlink()
            super().close()

    @contextmanager
    def _alone_in(folder: Path) -> Iterator[None]:
        """Lock a folder against other daemons that begin to listen there. Check that no user can swap files in it.

        Raises OSError.
        """
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            found = os.fstat(descriptor)
            if found.st_uid not in (0, os.getuid()):
                raise OSError(errno.EPERM, f"the folder {folder} belongs to another user")
            if found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
                raise OSError(errno.EPERM, f"every user may exchange files in the folder {folder}")
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise OSError(errno.EBUSY, "another daemon begins to listen in this folder; try again") from None
            yield
        finally:
            os.close(descriptor)

    def _make_way(path: Path) -> None:
        """Remove this user's socket if no process listens at it. Raises OSError for anything else at that path."""
        try:
            found = path.lstat()
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(found.st_mode):
            raise OSError(errno.EEXIST, "the file there is not a socket; move it away, or choose another path")
        if found.st_uid != os.getuid():
            raise OSError(errno.EPERM, "the socket there belongs to another user")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(_PROBE_S)
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink()
                return
            except OSError:  # it is busy, or a socket of another kind
                pass
        raise OSError(errno.EADDRINUSE, "another process listens there; stop it")

    def connect(path: Path, timeout_s: float | None) -> socket.socket:
        """Return a connection to the socket at `path`. Raises OSError."""
        one = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            one.settimeout(timeout_s)
            one.connect(str(path))
        except BaseException:
            one.close()
            raise
        return one
