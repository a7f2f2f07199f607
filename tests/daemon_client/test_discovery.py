"""Finding a running daemon, and everything that is not taken for one."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from standing import held_elsewhere

from ssmd.daemon.discovery import FILE, MAX_BYTES, Address, DaemonError, announce, find, running, url_of, withdraw
from ssmd.machine.lockfile import LOCK_FILE, holder
from ssmd.sessions.rows.lock import DirectoryLock

TOKEN = "t" * 43
HERE = Address("http://127.0.0.1:7763", None, os.getpid(), "0.1.0", 1764000000.5, TOKEN)
NOT_HERE = (
    *(
        "https://127.0.0.1:7763",
        "http://127.0.0.1",
        "http://127.0.0.1:0",
        "http://[::1]:70000",
        "http://127.0.0.1:77\n",
    ),
    *("http://203.0.113.9:7763", "http://localhost:7763", "http://127.0.0.1:7763/v1", "http://a@127.0.0.1:7763"),
    *("http://0.0.0.0:7763", "http://[::]:7763", "http://[2001:db8::9]:7763", "http://128.0.0.1:7763", "", 7763),
)
NO_JSON = (b"", b"{", b"[]", b"{}", b"\xff\xfe", b"[" * 9000, b"1" * 9000, b" " * (MAX_BYTES + 1))


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Path]:
    """A data directory that this process has locked."""
    lock = DirectoryLock.take(tmp_path, "wait")
    yield tmp_path
    lock.release()


def forge(data_dir: Path, **changed: Any) -> None:
    """A file as `announce` writes it, but for some fields."""
    announce(data_dir, HERE)
    file = data_dir / FILE
    file.write_text(json.dumps({**json.loads(file.read_text()), **changed}))


def test_it_is_found_where_it_says(held: Path) -> None:
    assert find(held) is None  # it is starting
    announce(held, HERE)
    assert find(held) == HERE
    assert running(held) == os.getpid()
    assert (held / FILE).stat().st_mode & 0o777 == 0o600
    assert TOKEN not in repr(find(held))
    withdraw(held)
    withdraw(held)
    assert find(held) is None
    assert sorted(p.name for p in held.iterdir()) == [LOCK_FILE]


def test_at_a_socket(held: Path) -> None:
    path = held / "ssmd.sock"
    at = Address(None, path, os.getpid(), "0.1.0", 1764000000.0, TOKEN)
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(path))
        announce(held, at)
        assert find(held) == at
    path.unlink()
    path.write_text("")
    with pytest.raises(DaemonError, match="socket"):
        find(held)


def test_where_none_runs(tmp_path: Path) -> None:
    for data_dir in (tmp_path, tmp_path / "none", Path(__file__)):
        assert find(data_dir) is None
        assert running(data_dir) is None


def test_what_one_left_that_was_killed(tmp_path: Path) -> None:
    """Also while another process has the lock, which repairs, say, or starts."""
    announce(tmp_path, HERE)
    assert find(tmp_path) is None  # the lock is free, whatever process has that number today
    with held_elsewhere(tmp_path) as pid:
        assert find(tmp_path) is None
        assert running(tmp_path) == pid
    assert find(tmp_path) is None
    lock = DirectoryLock.take(tmp_path, "wait")
    (tmp_path / ".daemon.json-new").symlink_to(tmp_path / "elsewhere")
    announce(tmp_path, HERE)
    assert find(tmp_path) == HERE
    assert not (tmp_path / "elsewhere").exists()
    lock.release()


@pytest.mark.parametrize(
    "changed",
    [
        *(
            {"url": url}
            for url in ("https://127.0.0.1:7763", "http://127.0.0.1", "http://127.0.0.1:0", "http://[::1]:70000")
        ),
        *(
            {"url": url}
            for url in ("http://203.0.113.9:7763", "http://localhost:7763", "http://127.0.0.1:7763/v1", 7763)
        ),
        *(
            {"url": url}
            for url in ("http://a@127.0.0.1:7763", "http://0.0.0.0:7763", "http://[::]:7763", "http://127.0.0.1:77\n")
        ),
        *({"url": url} for url in ("http://[2001:db8::9]:7763", "http://128.0.0.1:7763", "")),
        {"url": None},
        {"socket": "/dev/null"},
        *({"url": None, "socket": path} for path in ("ssmd.sock", "/nowhere/ssmd.sock", "/dev/null", "\0", 3)),
        *({"token": token} for token in ("", "short", "t" * 40 + "\r\nx: y", None, 7)),
        *({"pid": pid} for pid in ("7", True, 1.0, None, -1)),
        *({"version": version} for version in ("", "1\x1b[2J", None, "9" * 65)),
        *({"started_at": time} for time in ("x", None, float("nan"), float("inf"), 10**400, -1)),
    ],
    ids=repr,
)
def test_a_field_that_no_daemon_writes(held: Path, changed: dict[str, Any]) -> None:
    forge(held, **changed)
    with pytest.raises(
        DaemonError, match=rf"daemon.json is not trusted \(.*process {os.getpid()}, and start it"
    ) as said:
        find(held)
    assert TOKEN not in str(said.value)
    assert "\x1b" not in str(said.value)


def test_fields_of_a_later_version_do_no_harm(held: Path) -> None:
    forge(held, more={"new": 1})
    assert find(held) == HERE


@pytest.mark.parametrize("text", NO_JSON)
def test_a_file_that_is_none(held: Path, text: bytes) -> None:
    announce(held, HERE)
    (held / FILE).write_bytes(text)
    with pytest.raises(DaemonError, match="is not trusted"):
        find(held)


def test_a_file_that_others_may_have_read_or_written(held: Path) -> None:
    announce(held, HERE)
    for mode in (0o640, 0o604, 0o620, 0o602):
        (held / FILE).chmod(mode)
        with pytest.raises(DaemonError, match="by others"):
            find(held)
    (held / FILE).chmod(0o600)
    (held / FILE).rename(held / "elsewhere")
    (held / FILE).symlink_to(held / "elsewhere")
    with pytest.raises(DaemonError, match="symbolic"):
        find(held)
    (held / FILE).unlink()
    os.mkfifo(held / FILE, 0o600)  # is not waited for
    with pytest.raises(DaemonError, match="not a regular file"):
        find(held)


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="files are given away by root alone")
def test_what_belongs_to_another_user(held: Path) -> None:
    announce(held, HERE)
    os.chown(held / FILE, 12345, 12345)
    with pytest.raises(DaemonError, match="by others"):
        find(held)
    os.chown(held / FILE, 0, 0)
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(held / "ssmd.sock"))
        forge(held, url=None, socket=str(held / "ssmd.sock"))
        assert find(held) is not None
        os.chown(held / "ssmd.sock", 12345, 12345)
        with pytest.raises(DaemonError, match="socket` is not a socket of this user"):
            find(held)
    os.chown(held, 12345, 12345)
    with pytest.raises(DaemonError, match="belongs to user 12345"):
        find(held)


def test_a_directory_that_is_closed(tmp_path: Path) -> None:
    """As another user's is, for any user but root."""
    looked = (
        "import os, pathlib, sys; from ssmd.daemon.discovery import find\n"
        "os.getuid() or os.setuid(54321)\n"
        "find(pathlib.Path(sys.argv[1]))"
    )
    closed = tmp_path / "closed"
    (closed / "data").mkdir(parents=True)
    closed.chmod(0)
    done = subprocess.run([sys.executable, "-c", looked, str(closed / "data")], capture_output=True, text=True)
    closed.chmod(0o700)
    assert "DaemonError: cannot look for a daemon in" in done.stderr
    assert "Permission denied" in done.stderr


def test_who_looks_keeps_nobody_from_starting(tmp_path: Path) -> None:
    """A look takes the lock for a moment, and many look: screens do so all the time."""
    DirectoryLock.take(tmp_path, "wait").release()
    looks = [0] * 4
    end = threading.Event()

    def look(i: int) -> None:
        while not end.is_set():
            running(tmp_path)
            looks[i] += 1

    threads = [threading.Thread(target=look, args=(i,)) for i in range(len(looks))]
    for thread in threads:
        thread.start()
    try:
        for _ in range(200):
            DirectoryLock.take(tmp_path, "wait").release()
    finally:
        end.set()
        for thread in threads:
            thread.join()
    assert min(looks) > 10


def test_two_looks_do_not_see_each_other(tmp_path: Path) -> None:
    """Neither is the holder, nor is a killed process whose number is still in the file."""
    (tmp_path / LOCK_FILE).write_text("4711\n")
    fcntl = pytest.importorskip("fcntl")
    with (tmp_path / LOCK_FILE).open() as other:
        fcntl.flock(other, fcntl.LOCK_SH)
        assert holder(tmp_path / LOCK_FILE) is None
        fcntl.flock(other, fcntl.LOCK_EX)
        assert holder(tmp_path / LOCK_FILE) == 4711


def test_a_lock_that_stays_is_not_waited_for_long(held: Path) -> None:
    begin = time.monotonic()
    with pytest.raises(Exception, match="another ssmd daemon"):
        DirectoryLock.take(held, "wait")
    assert time.monotonic() - begin < 2


@pytest.mark.parametrize(
    ("hosts", "url"),
    [
        (["127.0.0.1"], "http://127.0.0.1:{}"),
        (["0.0.0.0"], "http://127.0.0.1:{}"),
        (["::1"], "http://[::1]:{}"),
        (["::"], "http://[::1]:{}"),
        (["127.0.0.2", "::1"], "http://127.0.0.2:{}"),
    ],
)
def test_the_url_of_its_sockets(hosts: list[str], url: str, held: Path) -> None:
    sockets = [socket.create_server((h, 0), family=socket.AF_INET6 if ":" in h else socket.AF_INET) for h in hosts]
    try:
        found = url_of(sockets)
        assert found == url.format(sockets[0].getsockname()[1])
        announce(held, Address(found, None, os.getpid(), "0.1.0", 0.0, TOKEN))
        assert find(held) is not None
    finally:
        for one in sockets:
            one.close()


def test_an_address_of_this_computer_that_is_no_loopback(held: Path) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        try:
            one.connect(("203.0.113.9", 9))  # sends nothing
        except OSError:
            pytest.skip("this computer has no other address")
        own = one.getsockname()[0]
    with socket.create_server((own, 0)) as server:
        found = url_of([server])
    assert found is not None
    assert own in found
    announce(held, Address(found, None, os.getpid(), "0.1.0", 0.0, TOKEN))
    assert find(held) is not None
