"""The network as this process sees it: hosts, private sockets, the other ends of connections, and descriptors left.

A private Unix socket is one that only its own user can connect to: a file of mode 0600, removed when the socket is
closed. Hosts, addresses and origins are as settings and requests write them.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import re
import select
import socket
import stat
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

_PROBE_S = 1.0  # longest wait for a connection that shows if a process listens
_CREDENTIALS = struct.Struct("3i")  # process, user and group
_HOSTNAME = re.compile(r"(?=.{1,253}\Z)[A-Za-z0-9_]([A-Za-z0-9_-]{0,62})(\.[A-Za-z0-9_-]{1,63})*\.?")
_APP_ORIGIN = re.compile(r"(?!https?:)[a-z][a-z0-9+.-]{0,31}://[A-Za-z0-9._-]{1,253}(:[0-9]{1,5})?|file://")
MOST = 10_240  # descriptors to raise the limit to: macOS refuses more; elsewhere the hard limit may be a billion
_UNKNOWN = 1024  # descriptors assumed to be open if they cannot be counted


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


def has_hung_up(one: socket.socket) -> bool:
    """Return True if the other end closed the connection, or half of it, even with bytes unread. Linux only."""
    if sys.platform != "linux":
        return False
    polled = select.poll()
    polled.register(one, select.POLLRDHUP)
    return bool(polled.poll(0))


def address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return a host's IP address; None if the host is a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def place_of(host: str) -> str:
    """Return an IPv4 address, or the /64 network of an IPv6 address. Other texts, such as a process, are unchanged."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:  # a process
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    link = "" if address.scope_id is None else f"%{address.scope_id}"
    return f"{ipaddress.IPv6Address(int(address) >> 64 << 64)}/64{link}"


def is_hostname(name: str) -> bool:
    """Return True if a text can be the name of a host."""
    # A dotted number that is not an address is a typing error, not a name.
    return _HOSTNAME.fullmatch(name) is not None and not re.fullmatch(r"[0-9.]+", name)


def bracketed(host: str) -> str:
    """Write a host as a Host header does: IPv6 in brackets, lower case."""
    return f"[{host}]" if ":" in host else host.lower().rstrip(".")


def origin(text: str) -> str:
    """Return an origin as browsers write it. Apps and extensions have their own schemes (`app://obsidian.md`).

    Raises ValueError, which gives examples.
    """
    if "*" in text:
        raise ValueError(f"{text!r} has a star for a part of an origin; name each origin, or use '*' alone for all")
    if _APP_ORIGIN.fullmatch(text):
        return text
    try:
        parts = urlsplit(text)
        host = parts.hostname or ""
        bare = parts.scheme in ("http", "https") and parts.path in ("", "/")
        bare = bare and (address(host) is not None or is_hostname(host))
        port = parts.port
    except ValueError:
        host, bare, port = "", False, None
    if not bare or parts.query or parts.fragment or "@" in parts.netloc:
        raise ValueError(f"{text!r} is not an origin; expected for example 'https://chat.example', 'app://name' or '*'")
    shown = "" if port in (None, {"http": 80, "https": 443}[parts.scheme]) else f":{port}"
    return f"{parts.scheme}://{bracketed(host)}{shown}"


def raise_limit() -> None:
    """Raise the soft limit to the hard one, at most to MOST: shells give 256 (macOS) or 1,024 (Linux)."""
    if sys.platform != "win32":
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
        if soft != resource.RLIM_INFINITY and soft < wanted:
            with contextlib.suppress(OSError, ValueError):  # a system with a limit of its own; then as it was
                resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def left() -> int:
    """Return how many more descriptors this process may open, at most MOST."""
    if sys.platform == "win32":
        return MOST
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        taken = len(os.listdir("/dev/fd"))
    except OSError:
        taken = min(_UNKNOWN, soft // 2)
    return max(0, (MOST if soft == resource.RLIM_INFINITY else min(soft, MOST)) - taken)


def read_at(descriptor: int, at: int, nbytes: int) -> bytes:
    """Return at most `nbytes` bytes of an open file from offset `at`. For one thread at a time. Raises OSError."""
    if sys.platform != "win32":
        return os.pread(descriptor, nbytes, at)
    os.lseek(descriptor, at, os.SEEK_SET)
    return os.read(descriptor, nbytes)
