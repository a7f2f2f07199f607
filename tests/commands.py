"""The command `ssmd`, each time in a process of its own, forked from one that has imported what every command imports.

That takes a quarter of the processor time of `python -m ssmd`: most of a short command's life is imports. What reads
the environment when it is imported (huggingface_hub) is left to the command. Run as a script this file is that process.
Windows cannot fork: there each command is a process from its beginning.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from noted import note_all

_OF_WINDOWS = ("SYSTEMROOT", "PATH", "TEMP", "USERPROFILE", "LOCALAPPDATA", "APPDATA", "PYTHONPATH", "PYTHONUTF8")
_ONE_AT_A_TIME = threading.Lock()
_IMPORTED = (
    "ssmd.cli",
    *("ssmd.config", "ssmd.installed", "ssmd.families.registry", "ssmd.refit.catalog", "ssmd.model.smollm2"),
    *("httpx2", "rich.console", "typer.rich_utils"),
)


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
        process = _forker()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(asked) + "\n")
        process.stdin.flush()
        code = json.loads(process.stdout.readline())
        out, err = ((folder / name).read_text() for name in ("out", "err"))
        if code is None:
            raise TimeoutError(f"ssmd {' '.join(arguments)} had not ended after {timeout} s: {out}{err}")
        return subprocess.CompletedProcess(["ssmd", *arguments], code, out, err)


def _started(
    arguments: tuple[str, ...], env: Mapping[str, str], given: str, timeout: float, before: str
) -> subprocess.CompletedProcess[str]:
    words = ["ssmd", *arguments]
    program = f"{before}\nimport runpy, sys\nsys.argv = {words!r}\nrunpy.run_module('ssmd', run_name='__main__')"
    inherited = {name: os.environ[name] for name in _OF_WINDOWS if name in os.environ}
    try:
        return subprocess.run(
            [sys.executable, "-c", program],
            env={**inherited, **env},
            input=given,
            capture_output=True,
            encoding="utf-8",
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired as err:
        raise TimeoutError(f"ssmd {' '.join(arguments)} had not ended after {timeout} s: {err.stdout!r}") from err


@functools.cache
def _forker() -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    atexit.register(_stop, process)
    return process


def _stop(process: subprocess.Popen[str]) -> None:
    with process:  # closes its standard input, which ends it, and waits
        pass


def _serve() -> dict[str, Any] | None:
    """Forks for each line of standard input and answers with the exit status. Returns what to run, in the fork."""
    for name in _IMPORTED:
        __import__(name)
    for line in sys.stdin:
        asked: dict[str, Any] = json.loads(line)
        child = os.fork()
        if not child:
            return asked
        print(json.dumps(_ended(child, asked["timeout"])), flush=True)
    return None


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
    folder = Path(asked["folder"])
    for descriptor, name, flags in ((0, "in", os.O_RDONLY), (1, "out", os.O_WRONLY), (2, "err", os.O_WRONLY)):
        opened = os.open(folder / name, flags | os.O_CREAT, 0o600)
        os.dup2(opened, descriptor)
        os.close(opened)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - without what the parent read ahead
    os.environ.clear()
    os.environ.update(asked["env"])
    os.chdir(asked["cwd"])
    if asked["file_limit"] is not None:
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (asked["file_limit"],) * 2)
    exec(asked["before"], {})
    sys.argv = ["ssmd", *asked["arguments"]]
    runpy.run_module("ssmd", run_name="__main__")


if __name__ == "__main__":
    given = _serve()
    if given is not None:
        _become(given)
