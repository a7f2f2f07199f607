"""Discovery of a running daemon: `daemon.json` beside the lock in its data directory, for this user's commands.

Only the lock decides if a daemon runs: the system releases it however the process ends. The file is trusted only if
its process holds the lock, and if no other user can have read or written it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import stat
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from ssmd.machine import privatefile
from ssmd.machine.lockfile import LOCK_FILE, holder

FILE = "daemon.json"
MAX_BYTES = 16 << 10
ADVICE = "use it, stop it with `ssmd stop`, or choose another directory with --data-dir"
_NEW = f".{FILE}-new"
_URL = re.compile(r"http://(?:([0-9.]{7,15})|\[([0-9A-Fa-f:.]{2,45})\]):([0-9]{1,5})", re.ASCII)
_TOKEN = re.compile(r"[A-Za-z0-9_-]{32,512}", re.ASCII)
_NEVER = 1e12  # seconds
_VERSION = re.compile(r"[!-~]{1,64}", re.ASCII)


class DaemonError(ValueError):
    """A daemon that cannot be found or asked, or that refused; the message says what to do.

    status, code: of its answer, None without one.
    """

    def __init__(self, message: str, *, status: int | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


@dataclass(frozen=True)
class Address:
    """The address of a running daemon, and its identity."""

    url: str | None  # as http://127.0.0.1:7763; None if it listens at a socket
    socket: Path | None
    pid: int
    version: str
    started_at: float  # seconds since 1970
    token: str = field(repr=False)  # proves that a command belongs to the user that started the daemon

    @property
    def place(self) -> str:
        """Return the daemon's place as messages name it."""
        return self.url if self.url is not None else f"the socket {self.socket}"


def announce(data_dir: Path, address: Address) -> None:
    """Write the daemon's address to its file. Only the holder of the directory's lock may. Raises OSError."""
    written = {**asdict(address), "socket": None if address.socket is None else str(address.socket)}
    new = data_dir / _NEW
    with contextlib.suppress(FileNotFoundError):  # left by a daemon that was killed
        new.unlink()
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | privatefile.PLAIN, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(written, file)
        new.replace(data_dir / FILE)
    except BaseException:
        with contextlib.suppress(OSError):
            new.unlink()
        raise


def withdraw(data_dir: Path) -> None:
    """Remove the file of `announce`, or of a killed daemon before. Only the holder of the lock may."""
    with contextlib.suppress(OSError):  # a file that stays is not trusted
        (data_dir / FILE).unlink()


def url_of(sockets: Iterable[socket.socket]) -> str | None:
    """Return the URL of a daemon that listens at these sockets, for clients here; loopback is preferred."""
    found: dict[bool, str] = {}
    for one in sockets:
        host, port = one.getsockname()[:2]
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - it is replaced
        found.setdefault(_is_loopback(host), f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")
    return found.get(True) or found.get(False)


def running(data_dir: Path) -> int | None:
    """Return the id of the process that uses the directory, a daemon or a repair; 0 if unknown; None if there is none.

    Raises DaemonError if the directory is another user's, or cannot be read.
    """
    try:
        found = data_dir.stat()
        if not privatefile.owned(found):
            raise DaemonError(f"{data_dir} belongs to user {found.st_uid}; only that user can use its daemon")
        return holder(data_dir / LOCK_FILE)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as err:
        raise DaemonError(f"cannot look for a daemon in {data_dir}: {err.strerror or err}") from err


def check_alone(data_dir: Path) -> None:
    """Check that no daemon runs on a directory. Raises DaemonError that says where it is."""
    try:
        process, found = running(data_dir), find(data_dir)
    except DaemonError:  # an unusable directory or lock raises its own error when it is used
        return
    if process is not None:
        number = f" (process {process})" if process else ""
        where = "it is starting or repairing" if found is None else f"it is at {found.place}"
        raise DaemonError(f"another ssmd daemon{number} uses {data_dir}: {where}; {ADVICE}")


def find(data_dir: Path) -> Address | None:
    """Return the address of the daemon on a data directory; None if none runs, or its file is not there (yet).

    Raises DaemonError for a directory of another user, and for a file that a running daemon cannot have written.
    """
    process = running(data_dir)
    if not process:
        return None
    file = data_dir / FILE
    try:
        address = _read(privatefile.read_secret(file, MAX_BYTES + 1))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as err:
        reason = err.strerror or str(err) if isinstance(err, OSError) else str(err)
        raise DaemonError(
            f"{file} is not trusted ({reason}); stop the daemon, which is process {process}, and start it again"
        ) from None
    return address if address.pid == process else None


def _read(text: bytes) -> Address:
    """Parse the file's text. Raises ValueError, which quotes nothing of the text, and RecursionError."""
    if len(text) > MAX_BYTES:
        raise ValueError(f"it is larger than {MAX_BYTES} bytes")
    try:
        values: Any = json.loads(text)
    except ValueError:
        raise ValueError("it is not JSON") from None
    names = [one.name for one in fields(Address)]
    if not isinstance(values, dict) or not values.keys() >= set(names):
        raise ValueError(f"it does not name {', '.join(names)}")
    url, path, pid, version, started_at, token = (values[name] for name in names)
    if type(pid) is not int or pid <= 0:
        raise ValueError("its `pid` is not a positive number")
    if not isinstance(version, str) or not _VERSION.fullmatch(version):
        raise ValueError("its `version` is not 1 to 64 printable characters")
    if type(started_at) not in (int, float) or not 0 <= started_at < _NEVER:
        raise ValueError("its `started_at` is not a time")
    if not isinstance(token, str) or not _TOKEN.fullmatch(token):
        raise ValueError("its `token` is not valid")
    if (url is None) == (path is None):
        raise ValueError("it must name a `url` or a `socket`, and not both")
    if url is not None and not (isinstance(url, str) and _is_here(url)):
        raise ValueError("its `url` is not an address of this computer")
    if path is not None and not (isinstance(path, str) and _is_own_socket(path)):
        raise ValueError("its `socket` is not a socket of this user")
    return Address(url, None if path is None else Path(path), pid, version, float(started_at), token)


def _is_here(url: str) -> bool:
    """Return True if a request to this http URL stays on this computer."""
    found = _URL.fullmatch(url)
    if found is None or not 0 < int(found[3]) < 1 << 16:
        return False
    host = found[1] or found[2]
    return _is_loopback(host) or _is_own(host)


def _is_loopback(host: str) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        packed = socket.inet_pton(family, host)
    except OSError:
        return False
    return packed[0] == 127 if family == socket.AF_INET else packed == bytes(15) + b"\1"


def _is_own(host: str) -> bool:
    """Return True if an address belongs to this computer: only then a socket can be bound to it."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as one:
            one.bind((host, 0))
    except OSError:
        return False
    return host.strip("0.:") != ""  # 0.0.0.0 and :: are not addresses to send to


def _is_own_socket(path: str) -> bool:
    try:
        found = os.lstat(path)
    except (OSError, ValueError):  # Windows has no Unix sockets, so none is found there
        return False
    return os.path.isabs(path) and stat.S_ISSOCK(found.st_mode) and privatefile.owned(found)
