"""The command `ssmd`, each time in a process of its own, forked from one that has imported what every command imports.

That takes a quarter of the processor time of `python -m ssmd`: most of a short command's life is imports, and of a
daemon's until it is ready. The table of commands is made once too. Left to the command are the runtimes' libraries and
what reads the environment when it is imported (huggingface_hub). Run as a script this file is that process. Windows
cannot fork: there each command is a process from its beginning.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from noted import note_all

_OF_WINDOWS = ("SYSTEMROOT", "PATH", "TEMP", "USERPROFILE", "LOCALAPPDATA", "APPDATA", "PYTHONPATH", "PYTHONUTF8")
_ONE_AT_A_TIME = threading.Lock()
_IMPORTED = (
    "ssmd.cli",
    *("ssmd.config", "ssmd.installed", "ssmd.families.registry", "ssmd.refit.catalog", "ssmd.model.smollm2"),
    *("httpx2", "rich.console", "typer.rich_utils", "filelock", "yaml", "numpy.random", "typer._click.decorators"),
    *("ssmd.cli.chat.loop", "ssmd.cli.chat.talk", "ssmd.cli.chat.peer", "ssmd.cli.chat.here", "encodings.utf_8_sig"),
    *(
        "ssmd.server",
        "ssmd.app",
        "ssmd.daemon.home",
        "ssmd.sessions.files.transfer",
        "ssmd_litert.runtime",
        "jinja2.sandbox",
    ),
    *("uvicorn.protocols.http.h11_impl", "uvicorn.loops.asyncio", "uvicorn.lifespan.off"),
    *("alembic.command", "alembic.ddl.sqlite", "sqlalchemy.dialects.sqlite.pysqlite"),
)
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of <linux/prctl.h>


def ssmd(
    *arguments: str,
    env: Mapping[str, str],
    given: str = "",
    timeout: float = 120,
    file_limit: int | None = None,
    before: str = "",
    foreign: bool = False,
) -> subprocess.CompletedProcess[str]:
    """The command's end, as `subprocess.run` gives it. `given`: its standard input; `file_limit`: bytes of the longest
    file that it may write; `before`: Python that its process runs first; `foreign`: whether the artifacts it is given
    are from elsewhere. Raises TimeoutError after `timeout` s."""
    if not foreign and "SSMD_DATA_DIR" in env:
        note_all(arguments, Path(env["SSMD_DATA_DIR"]))
    if not hasattr(os, "fork"):
        return _started(arguments, env, given, timeout, before)
    with tempfile.TemporaryDirectory() as place, _ONE_AT_A_TIME:
        folder = Path(place)
        (folder / "in").write_text(given)
        asked: dict[str, Any] = {"arguments": arguments, "env": dict(env), "folder": place, "cwd": str(Path.cwd())}
        asked |= {"timeout": timeout, "file_limit": file_limit, "before": before}
        process, _ = _forker()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(asked) + "\n")
        process.stdin.flush()
        code = json.loads(process.stdout.readline())
        out, err = ((folder / name).read_text() for name in ("out", "err"))
        if code is None:
            raise TimeoutError(f"ssmd {' '.join(arguments)} had not ended after {timeout} s: {out}{err}")
        return subprocess.CompletedProcess(["ssmd", *arguments], code, out, err)


def start(
    *arguments: str,
    env: Mapping[str, str],
    descriptors: int | None = None,
    log: IO[bytes] | None = None,
    before: str = "",
) -> subprocess.Popen[Any]:
    """The command as it begins. What it prints goes to `log`, else to two pipes of text. `descriptors`: how many files
    it may have open; `before`: as above."""
    said = subprocess.PIPE if log is None else log
    if sys.platform == "linux":
        asked = {"arguments": arguments, "env": dict(env), "descriptors": descriptors, "before": before}
        return _Forked(asked, subprocess.DEVNULL, said, text=log is None)
    few = [] if descriptors is None else ["sh", "-c", f'ulimit -n {descriptors}; exec "$@"', "sh"]
    words = [*few, sys.executable, "-c", _program(arguments, before)]
    return subprocess.Popen(words, env=env, stdout=said, stderr=said, text=log is None)


def start_in(terminal: int, *arguments: str, env: Mapping[str, str]) -> subprocess.Popen[Any]:
    """The command as it begins in a terminal of its own, an open file. On Linux alone."""
    asked = {"arguments": arguments, "env": dict(env), "before": "", "terminal": True}
    return _Forked(asked, terminal, terminal, text=False)


class _Forked(subprocess.Popen[Any]):
    """A process that the forking server forked. This process is its parent: the one between them ends at once,
    and this process adopts the orphan."""

    def __init__(self, asked: dict[str, Any], typed: int, said: int | IO[bytes], *, text: bool) -> None:
        self._asked = {"cwd": str(Path.cwd()), **asked}
        super().__init__(["ssmd", *asked["arguments"]], stdin=typed, stdout=said, stderr=said, text=text)

    def _execute_child(self, *given: Any) -> None:
        ends = tuple(given[10:16])  # p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite
        take_up = ctypes.CDLL(None).prctl
        with _ONE_AT_A_TIME:
            process, files = _forker()
            assert process.stdin is not None
            assert process.stdout is not None
            take_up(_SUBREAPER, 1, 0, 0, 0)
            try:
                socket.send_fds(files, [b"f"], [ends[0], ends[3], ends[5]])
                process.stdin.write(json.dumps(self._asked) + "\n")
                process.stdin.flush()
                self.pid = json.loads(process.stdout.readline())
            finally:
                take_up(_SUBREAPER, 0, 0, 0, 0)
        self._child_created = True
        self._close_pipe_fds(*ends)  # type: ignore[attr-defined]


def _started(
    arguments: tuple[str, ...], env: Mapping[str, str], given: str, timeout: float, before: str
) -> subprocess.CompletedProcess[str]:
    inherited = {name: os.environ[name] for name in _OF_WINDOWS if name in os.environ}
    try:
        return subprocess.run(
            [sys.executable, "-c", _program(arguments, before)],
            env={**inherited, **env},
            input=given,
            capture_output=True,
            encoding="utf-8",
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired as err:
        raise TimeoutError(f"ssmd {' '.join(arguments)} had not ended after {timeout} s: {err.stdout!r}") from err


def _program(arguments: tuple[str, ...], before: str) -> str:
    words = ["ssmd", *arguments]
    return f"{before}\nimport runpy, sys\nsys.argv = {words!r}\nrunpy.run_module('ssmd', run_name='__main__')"


@functools.cache
def _forker() -> tuple[subprocess.Popen[str], socket.socket]:
    """Start the forking server. Returns its process and the socket by which it gets open files."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            pass_fds=[theirs.fileno()],
        )
    atexit.register(_stop, process)
    return process, ours


def _stop(process: subprocess.Popen[str]) -> None:
    with process:  # closes its standard input, which ends it, and waits
        pass


def _serve() -> dict[str, Any] | None:
    """Forks for each line of standard input and answers with the exit status. Returns what to run, in the fork."""
    files = socket.socket(fileno=int(sys.argv[1]))
    files.set_inheritable(False)
    for name in _IMPORTED:
        __import__(name)
    _make_table_once()
    gc.freeze()  # what is here stays: no fork has to look at it, which would copy it
    for line in sys.stdin:
        asked: dict[str, Any] = json.loads(line)
        if "folder" not in asked:
            _, asked["files"], _, _ = socket.recv_fds(files, 1, 3)
            child = _forked_apart(asked["files"])
        else:
            child = os.fork()
        if not child:
            files.close()
            return asked
        print(json.dumps(_ended(child, asked["timeout"]) if "folder" in asked else child), flush=True)
    return None


def _make_table_once() -> None:
    """Make the commands of `ssmd.cli.app` here. Typer would make all 44 in each command, from their annotations."""
    import typer.main

    from ssmd.cli import app

    of = typer.main.get_command
    made = of(app)
    typer.main.get_command = lambda typer_instance: made if typer_instance is app else of(typer_instance)


def _forked_apart(files: list[int]) -> int:
    """0 in a process whose parent has ended, its number here."""
    seen, told = os.pipe()
    between = os.fork()
    if not between:
        if os.fork():
            os._exit(0)
        os.close(seen)
        os.write(told, str(os.getpid()).encode())
        os.close(told)
        return 0
    for descriptor in (told, *files):
        os.close(descriptor)
    os.waitpid(between, 0)
    number = int(os.read(seen, 16))
    os.close(seen)
    return number


def _ended(child: int, timeout: float) -> int | None:
    """The exit status of a child, negative for a signal; None for one that was killed after `timeout` seconds."""
    late = threading.Event()

    def kill() -> None:
        late.set()
        os.kill(child, signal.SIGKILL)

    timer = threading.Timer(timeout, kill)
    timer.start()
    _, status = os.waitpid(child, 0)
    timer.cancel()
    return None if late.is_set() else os.waitstatus_to_exitcode(status)


def _become(asked: dict[str, Any]) -> None:
    flags = (("in", os.O_RDONLY), ("out", os.O_WRONLY), ("err", os.O_WRONLY))
    files = asked.get("files") or [os.open(Path(asked["folder"], n), f | os.O_CREAT, 0o600) for n, f in flags]
    for descriptor, opened in enumerate(files):
        os.dup2(opened, descriptor)
        os.close(opened)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - without what the parent read ahead
    if "terminal" in asked:
        import fcntl
        import termios

        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 - the parent's is written by the block
    os.environ.clear()
    os.environ.update(asked["env"])
    os.chdir(asked["cwd"])
    for name, limit in (("RLIMIT_FSIZE", asked.get("file_limit")), ("RLIMIT_NOFILE", asked.get("descriptors"))):
        if limit is not None:
            import resource

            resource.setrlimit(getattr(resource, name), (limit, limit))
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup, which ignores it
    exec(asked["before"], {})
    sys.argv = ["ssmd", *asked["arguments"]]
    runpy.run_module("ssmd", run_name="__main__")


if __name__ == "__main__":
    given = _serve()
    if given is not None:
        _become(given)
