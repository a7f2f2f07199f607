"""File systems without shared memory or locks, or that turn read-only: a daemon and commands over a shim of these.

Network file systems, and those that a container or a virtual machine shares with its host, refuse one or both. After
errors of a disk, Linux refuses all writes, also through files that are open.
"""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from conftest import TinyArtifacts
from daemon import CHAT, soon
from noted import note_all
from serving import Served

from ssmd.sessions.rows import database
from ssmd.sessions.rows.faults import errors
from ssmd.sessions.store import Store
from ssmd.sessions.turn import StoreError

COMPILER = shutil.which("gcc") or shutil.which("cc")
pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or COMPILER is None, reason="needs a C compiler and LD_PRELOAD of Linux"
)
SESSIONS = "/ssmd/v1/sessions"
# The command, which waits a moment for a lock in place of 10 s.
IMPATIENT = "import sys; from ssmd.cli import main, session; session.BUSY_MS = 500; sys.argv[0] = 'ssmd'; main()"
LIBRARY = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static int refused(int fd, const char *what, const char *ending) {
    char link[64], path[4096];
    const char *refuses = getenv("REFUSES"), *folder = getenv("FOLDER");
    if (fd < 0 || !refuses || !folder || strcmp(refuses, what)) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    size_t end = strlen(ending);
    return !strncmp(path, folder, strlen(folder)) && (size_t)length > end && !strcmp(path + length - end, ending);
}

#define MMAP(name) \
    void *name(void *at, size_t size, int protection, int flags, int fd, off_t offset) { \
        void *(*real)(void *, size_t, int, int, int, off_t) = dlsym(RTLD_NEXT, #name); \
        if (refused(fd, "memory", "-shm")) { errno = ENODEV; return MAP_FAILED; } \
        return real(at, size, protection, flags, fd, offset); \
    }
MMAP(mmap)
MMAP(mmap64)

#define FCNTL(name) \
    int name(int fd, int command, ...) { \
        int (*real)(int, int, ...) = dlsym(RTLD_NEXT, #name); \
        va_list rest; \
        va_start(rest, command); \
        void *given = va_arg(rest, void *); \
        va_end(rest); \
        int locks = command == F_SETLK || command == F_SETLKW || command == F_GETLK; \
        if (locks && refused(fd, "locks", "")) { errno = ENOLCK; return -1; } \
        if (locks && refused(fd, "locks with EIO", "")) { errno = EIO; return -1; } \
        return real(fd, command, given); \
    }
FCNTL(fcntl)
FCNTL(fcntl64)

/* A file system that turned read-only: its flags and `access` do not show it. */
static int read_only(const char *path) {
    const char *refuses = getenv("REFUSES"), *folder = getenv("FOLDER"), *while_there = getenv("WHILE_THERE");
    return path && refuses && folder && while_there && !strcmp(refuses, "writes")
        && !strncmp(path, folder, strlen(folder)) && !access(while_there, F_OK);
}
static int read_only_fd(int fd) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = fd < 3 ? -1 : readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return read_only(path);
}

#define OPEN(name) \
    int name(const char *path, int flags, ...) { \
        int (*real)(const char *, int, ...) = dlsym(RTLD_NEXT, #name); \
        va_list rest; \
        va_start(rest, flags); \
        int mode = va_arg(rest, int); \
        va_end(rest); \
        int writes = (flags & O_ACCMODE) != O_RDONLY || (flags & O_CREAT && access(path, F_OK)); \
        if (writes && read_only(path)) { errno = EROFS; return -1; } \
        return real(path, flags, mode); \
    }
OPEN(open)
OPEN(open64)

#define WRITE(name, of, ...) \
    of name(int fd, __VA_ARGS__) { \
        if (read_only_fd(fd)) { errno = EROFS; return -1; } \
        return ((of (*)(int, __VA_ARGS__))dlsym(RTLD_NEXT, #name))
WRITE(write, ssize_t, const void *data, size_t size)(fd, data, size); }
WRITE(pwrite, ssize_t, const void *data, size_t size, off_t at)(fd, data, size, at); }
WRITE(pwrite64, ssize_t, const void *data, size_t size, off_t at)(fd, data, size, at); }
WRITE(ftruncate, int, off_t size)(fd, size); }
WRITE(ftruncate64, int, off_t size)(fd, size); }

#define NAME(name) \
    int name(const char *path) { \
        if (read_only(path)) { errno = EROFS; return -1; } \
        return ((int (*)(const char *))dlsym(RTLD_NEXT, #name))(path); \
    }
NAME(unlink)
NAME(rmdir)
int rename(const char *old, const char *new) {
    if (read_only(new)) { errno = EROFS; return -1; }
    return ((int (*)(const char *, const char *))dlsym(RTLD_NEXT, "rename"))(old, new);
}
int mkdir(const char *path, mode_t mode) {
    if (read_only(path)) { errno = EROFS; return -1; }
    return ((int (*)(const char *, mode_t))dlsym(RTLD_NEXT, "mkdir"))(path, mode);
}

int fsync(int fd) {
    if (refused(fd, "fsync", "-wal")) { errno = EIO; return -1; }
    return ((int (*)(int))dlsym(RTLD_NEXT, "fsync"))(fd);
}
int fdatasync(int fd) {
    if (refused(fd, "fsync", "-wal")) { errno = EIO; return -1; }
    return ((int (*)(int))dlsym(RTLD_NEXT, "fdatasync"))(fd);
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library that refuses to the processes it is loaded into what the variable REFUSES names, in FOLDER."""
    folder = tmp_path_factory.mktemp("library")
    (folder / "odd.c").write_text(LIBRARY)
    assert COMPILER is not None
    built = [COMPILER, "-shared", "-fPIC", "-O1", "-o", str(folder / "odd.so"), str(folder / "odd.c"), "-ldl"]
    subprocess.run(built, check=True)
    return folder / "odd.so"


class Machine:
    """Commands over one data directory. refuses: what its file system refuses."""

    def __init__(self, library: Path, path: Path) -> None:
        self.data = path / "data"
        self.remounted = path / "read-only"  # writes are refused while this file is there
        self._library = library

    def _environment(self, refuses: str) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("SSMD_")}
        own = {"SSMD_DATA_DIR": str(self.data), "SSMD_PORT": "0", "XDG_CONFIG_HOME": str(self.data.parent / "config")}
        shim = {"LD_PRELOAD": str(self._library), "REFUSES": refuses, "FOLDER": str(self.data)}
        shim["WHILE_THERE"] = str(self.remounted)
        return {**kept, **own, **(shim if refuses else {}), "PYTHONPATH": os.pathsep.join(sys.path)}

    def ssmd(self, *arguments: str, refuses: str) -> tuple[int, str, str]:
        """Run a command: (exit code, stdout, stderr)."""
        command = [sys.executable, "-c", IMPATIENT, *arguments]
        env = self._environment(refuses)
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
        return done.returncode, done.stdout, done.stderr

    @contextmanager
    def daemon(self, artifact: Path, *, refuses: str) -> Iterator[Served]:
        """Serve until SIGTERM, which must end it with code 0."""
        note_all([str(artifact)], self.data)
        command = [sys.executable, "-m", "ssmd", "serve", "--threads", "1", str(artifact)]
        with subprocess.Popen(command, env=self._environment(refuses), stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                line = process.stdout.readline()
                assert " serves " in line, line
                yield Served(int(line.rpartition(":")[2].partition("/")[0]))
                process.terminate()
                assert process.wait(30) == 0
            finally:
                process.kill()


def chat(served: Served, artifact: Path, content: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}]
    answer = served.ask("POST", CHAT, {"model": artifact.name, "messages": messages, "max_tokens": 4})
    assert answer.status == 200, answer.body
    return dict(answer.json["usage"]["ssmd"])


def test_a_store_without_shared_memory_is_used_alone(artifacts: TinyArtifacts, library: Path, tmp_path: Path) -> None:
    artifact, machine = artifacts["llama-f32"], Machine(library, tmp_path)
    with machine.daemon(artifact, refuses="memory") as served:
        with ThreadPoolExecutor(4) as several:  # each has connections of its own
            told = list(several.map(lambda n: chat(served, artifact, f"Hello {n}"), range(4)))
        assert [one["stored"] for one in told] == [True] * 4
        assert not (machine.data / f"{database.FILE}-shm").exists()
        code, out, err = machine.ssmd("session", "list", refuses="memory")
        assert (code, out, err.count("\n")) == (1, "", 1)
        assert "uses it alone, as its file system has no memory that processes share" in err
        assert "`ssmd stop`" in err
        assert "SSMD_DATA_DIR" in err
        code, out, err = machine.ssmd("doctor", refuses="memory")
        assert f"ok  data directory {machine.data}: only the daemon can read its store" in out
        assert served.ask("DELETE", f"/ssmd/v1/sessions/{told[0]['session']}").status == 200
        assert served.ask("GET", "/health").json["status"] == "ok"
        assert len(served.ask("GET", "/ssmd/v1/sessions").json["data"]) == 3
    code, out, err = machine.ssmd("session", "list", "--json", refuses="memory")
    assert (code, len(json.loads(out)), err) == (0, 3, "")
    code, out, err = machine.ssmd("backup", str(tmp_path / "copy"), refuses="memory")
    assert code == 0, err
    with closing(sqlite3.connect(machine.data / database.FILE)) as raw:
        (root,) = raw.execute("SELECT rootpage FROM sqlite_master WHERE name = 'piece'").fetchone()
    with (machine.data / database.FILE).open("r+b") as file:
        file.seek((root - 1) * database.PAGE_BYTES)
        file.write(bytes(database.PAGE_BYTES))
    code, out, err = machine.ssmd("session", "check", "--repair", refuses="memory")
    assert (machine.data / f"{database.FILE}.damaged-1").exists(), (code, out, err)
    for folder in (machine.data, tmp_path / "copy"):  # later, or elsewhere, on a local disk
        with closing(Store.open(folder)) as store:
            assert {session.id for session in store.sessions()} == {one["session"] for one in told[1:]}


@pytest.mark.parametrize("refuses", ["locks", "locks with EIO"])
def test_a_disk_without_locks_is_named(library: Path, tmp_path: Path, refuses: str) -> None:
    """SQLite reports ENOLCK as a lock of another process."""
    code, out, err = Machine(library, tmp_path).ssmd("session", "list", refuses=refuses)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "its file system cannot lock files" in err
    assert "move the data directory to a local disk, and name it with --data-dir or SSMD_DATA_DIR" in err


def test_a_daemon_on_a_disk_turned_read_only_heals(artifacts: TinyArtifacts, library: Path, tmp_path: Path) -> None:
    """Answers go on, what is not stored is said so, and all that was stored is there."""
    artifact, machine = artifacts["llama-f32"], Machine(library, tmp_path)
    with machine.daemon(artifact, refuses="writes") as served:
        first = chat(served, artifact, "Hello")
        assert first["stored"] is True
        machine.remounted.touch()
        lost = [chat(served, artifact, f"Hello {n}") for n in range(3)]
        assert [one["stored"] for one in lost] == [False] * 3
        health = served.ask("GET", "/health").json
        assert (health["status"], health["reason"]) == ("degraded", "read_only")
        assert "remount it read-write" in health["message"]
        assert [one["id"] for one in served.ask("GET", SESSIONS).json["data"]] == [first["session"]]
        removed = served.ask("DELETE", f"{SESSIONS}/{first['session']}")
        assert removed.status == 503
        assert "its file system is read-only" in removed.error["message"]
        code, out, err = machine.ssmd("session", "rm", first["session"], refuses="writes")
        assert (code, out, err.count("\n")) == (1, "", 1)
        assert "its file system is read-only" in err
        machine.remounted.unlink()
        assert chat(served, artifact, "Hello again")["stored"] is True

        def well() -> bool:  # a connection of before may fail at the states of one more turn
            stored = chat(served, artifact, "And again")["stored"]
            return bool(stored) and served.ask("GET", "/health").json["status"] == "ok"

        soon(well)
        there = len(served.ask("GET", SESSIONS).json["data"])
        assert there >= 3
    log = (machine.data / "daemon.log").read_text()
    assert "Traceback" not in log
    code, out, err = machine.ssmd("session", "check", "--json", refuses="")
    assert (code, json.loads(out)["sessions"]) == (0, there)


@pytest.mark.full  # test_each_extended_error_says_what_to_do sees the same words
def test_a_disk_that_confirms_no_write_is_named(artifacts: TinyArtifacts, library: Path, tmp_path: Path) -> None:
    artifact, machine = artifacts["llama-f32"], Machine(library, tmp_path)
    with machine.daemon(artifact, refuses="") as served:
        chat(served, artifact, "Hello")
    with machine.daemon(artifact, refuses="fsync") as served:
        assert chat(served, artifact, "Hello again")["stored"] is False
        assert served.ask("GET", "/health").json["status"] == "degraded"
    log = (machine.data / "daemon.log").read_text()
    assert "the disk did not confirm a write (SQLITE_IOERR_FSYNC), so it may be broken" in log


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("SQLITE_BUSY_RECOVERY", "is being recovered by another process after a crash"),
        ("SQLITE_BUSY_SNAPSHOT", "is locked by another process that writes"),
        ("SQLITE_IOERR_RDLOCK", "its file system cannot lock files (SQLITE_IOERR_RDLOCK)"),
        ("SQLITE_IOERR_SHMMAP", "has no memory that processes share; move the data directory"),
        ("SQLITE_IOERR_SHMOPEN", "has no memory that processes share; move the data directory"),
        ("SQLITE_IOERR_SHMSIZE", "is the disk full or broken?"),  # a quota, for example
        ("SQLITE_IOERR_FSYNC", "the disk did not confirm a write (SQLITE_IOERR_FSYNC)"),
        ("SQLITE_IOERR_READ", "reading or writing failed (SQLITE_IOERR_READ)"),
        ("SQLITE_CANTOPEN_ISDIR", "a folder has the name of the file"),
        ("SQLITE_CANTOPEN", "check the rights of the file and of its directory"),
        ("SQLITE_READONLY_CANTLOCK", "a file beside it, `-shm` or `-wal`, cannot be written"),
        ("SQLITE_READONLY_DIRECTORY", "check the rights of the file and of its directory"),
        ("SQLITE_READONLY_DBMOVED", "was moved while it was in use"),
    ],
)
def test_each_extended_error_says_what_to_do(tmp_path: Path, code: str, said: str) -> None:
    file = tmp_path / database.FILE
    file.touch()
    error = sqlite3.OperationalError("disk I/O error")
    error.sqlite_errorcode, error.sqlite_errorname = getattr(sqlite3, code), code
    with pytest.raises(StoreError) as raised, errors(file):
        raise error
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


def test_connections_of_a_read_only_disk_leave_the_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite opens them for reading, and they stay so when the disk can be written again: no write meets them."""
    engine, file = database.open_database(tmp_path, busy_ms=1000), tmp_path / database.FILE
    opened = sqlite3.connect

    def read_only(path: str, **options: Any) -> Any:
        return opened(f"file:{path}?mode=ro", **{**options, "uri": True})

    def write(table: str) -> None:
        with database.writing(engine, file) as connection:
            connection.exec_driver_sql(f"CREATE TABLE {table} (id)")

    write("turn")  # one of the store's
    with monkeypatch.context() as patched, ExitStack() as stack:
        stack.enter_context(database.reading(engine, file))
        patched.setattr(sqlite3, "connect", read_only)
        for _ in range(4):
            stack.enter_context(database.reading(engine, file))
    for n in range(12):
        write(f"made_{n}")
    monkeypatch.setattr(sqlite3, "connect", read_only)
    engine.dispose()
    with pytest.raises(StoreError, match="attempt to write a readonly database"):
        write("not_made")
    engine.dispose()
