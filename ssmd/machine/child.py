"""Child processes for work on untrusted bytes. A child gets jobs over pipes and limits itself (confinement.py).

It is killed when a job takes too long, and started again for the next job. A message is a JSON object and bytes, each
of a limited length. Nothing in a child's messages is executed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import IO, Any

from ssmd.machine.confinement import allow_processor, confine, end_with
from ssmd.machine.crash import crash
from ssmd.machine.size import show_size

log = logging.getLogger(__name__)
MAX_HEAD = 64 << 10
MAX_BODY = 1 << 32
PATIENCE = 6  # limit of a job's wall time, as a multiple of its processor time: a busy machine takes longer
AT_ONCE_S = 0.1  # a child that is killed within this time is assumed not to have started the job
ENDING_S = 1.0  # longest wait for the exit code of a child that stopped answering
_LENGTHS = struct.Struct("<IQ")  # lengths in bytes of the JSON and of the body
_FROM_OUTSIDE = (-signal.SIGTERM, -9)  # exit codes of a child that something outside killed
_ENVIRONMENT = ("LANG", "LC_ALL", "TZ", "PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "SYSTEMROOT", "TMPDIR", "TEMP")
_BOOT = (
    "import json, runpy, sys; sys.path[:] = json.loads(sys.argv.pop(1)); "
    "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)


class ChildError(RuntimeError):
    """A child failed to do a job: it exceeded a limit, crashed, or was ended. The message says which."""


class UnavailableChild(ChildError):
    """A child that the system did not start, or that could not do its opening job. No job is at fault."""


class KilledChild(ChildError):
    """A child that was killed from outside while it did a job, as by the kernel for want of memory."""


class _UnstartedJob(ChildError):
    """A child was ended before it started a job, so that another child may try it."""


class _UnopenedChild(UnavailableChild, _UnstartedJob):
    """A child that was ended from outside before its opening job."""


@dataclass(frozen=True)
class Packet:
    head: Mapping[str, Any]
    body: bytes = b""


def command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module with this process's Python and path, isolated from the environment."""
    path = [entry or os.getcwd() for entry in sys.path]
    return [sys.executable, "-I", "-c", _BOOT, json.dumps(path), module, *arguments]


def environment() -> dict[str, str]:
    """Return a child's environment: a few harmless variables, no secrets, and one thread for libraries."""
    told = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    return told | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def kill_with_children(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that began a session of its own, and the processes in that session.

    On Windows only the process itself is killed; its children see that it is gone.
    """
    with contextlib.suppress(OSError):
        if sys.platform == "win32":
            process.kill()
        else:
            os.killpg(process.pid, signal.SIGKILL)


def send(stream: IO[bytes], message: Packet) -> None:
    """Write a message. Raises OSError."""
    head = json.dumps(message.head).encode()
    stream.write(_LENGTHS.pack(len(head), len(message.body)) + head)
    stream.write(message.body)
    stream.flush()


def receive(stream: IO[bytes], *, most: int, most_head: int = MAX_HEAD) -> Packet | None:
    """Read a message with a body of at most `most` bytes; None at the stream's end. Raises ValueError if invalid."""
    lengths = stream.read(_LENGTHS.size)
    if len(lengths) < _LENGTHS.size:
        return None
    head, body = _LENGTHS.unpack(lengths)
    if head > most_head or body > most:
        raise ValueError(f"a message of {head} and {body} bytes")
    read = stream.read(head), stream.read(body)
    if (len(read[0]), len(read[1])) != (head, body):
        return None
    fields = json.loads(read[0])
    if not isinstance(fields, dict):
        raise ValueError("a message without fields")
    return Packet(fields, read[1])


class Child:
    """A child process that runs `module` and gets jobs one after the other. Used from many threads.

    memory: bytes. opening: the first job of each child. opening_s: its limit of processor time. An answer to the
    opening job with an `error` ends the child. So does one that differs from the first child's; it fails the next job.
    """

    def __init__(self, module: str, memory: int, opening: Packet, opening_s: float) -> None:
        self._module, self._memory = module, memory
        self._opening, self._opening_s = opening, opening_s
        self._process: subprocess.Popen[bytes] | None = None
        self._opened: Mapping[str, Any] | None = None
        self._closed = False
        # One thread gives the jobs, so they take turns. It also starts the child, which ends with that thread.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ssmd-child")

    def open(self) -> Packet:
        """Start the child and return its answer to the opening job. Raises ChildError."""
        return self._in_turn(self._open)

    def ask(self, job: Packet, seconds: float) -> Packet:
        """Return the child's answer to a job. seconds: limit of processor time.

        Raises ChildError; the next job gets a new child.
        """
        return self._in_turn(lambda: self._asked(job, seconds))

    def close(self) -> None:
        """Kill the child at once. Callers that wait for it get ChildError."""
        self._closed = True
        process = self._process
        if process is not None:
            process.kill()
        with contextlib.suppress(RuntimeError):  # it was closed before
            self._thread.submit(self._reap)
        self._thread.shutdown(wait=False)

    @property
    def process_id(self) -> int | None:
        """The child's process id; None while no child runs."""
        process = self._process
        return None if process is None else process.pid

    def _in_turn(self, work: Callable[[], Packet]) -> Packet:
        try:
            job = self._thread.submit(work)
        except RuntimeError as err:
            raise ChildError("it was ended") from err
        return job.result()

    # The methods below run in that one thread.

    def _open(self) -> Packet:
        if self._closed:
            raise ChildError("it was ended")
        arguments = (str(os.getpid()), str(self._memory))
        try:
            self._process = subprocess.Popen(
                command(self._module, *arguments),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=None if log.isEnabledFor(logging.DEBUG) else subprocess.DEVNULL,
                env=environment(),
                start_new_session=True,  # a terminal's Ctrl-C is not for it
            )
        except OSError as err:
            raise UnavailableChild(f"no process could be started for it: {err}") from err
        try:
            answer = self._exchange(self._process, self._opening, self._opening_s)
        except ChildError as err:
            kind = _UnopenedChild if isinstance(err, _UnstartedJob) else UnavailableChild
            raise kind(str(err)) from err
        if "error" in answer.head:
            self._reap()
        elif self._opened is None:
            self._opened = answer.head
        return answer

    def _asked(self, job: Packet, seconds: float) -> Packet:
        try:
            return self._tried(job, seconds)
        except _UnstartedJob:
            return self._tried(job, seconds)

    def _tried(self, job: Packet, seconds: float) -> Packet:
        if self._process is not None and self._process.poll() is not None:
            self._reap()
        if self._process is None:
            answer = self._open()
            if answer.head != self._opened:
                self._reap()
                said = answer.head.get("said", "it is not what it was")
                raise UnavailableChild(f"it was ended before, and cannot be opened again: {said}")
        assert self._process is not None
        return self._exchange(self._process, job, seconds)

    def _exchange(self, process: subprocess.Popen[bytes], job: Packet, seconds: float) -> Packet:
        assert process.stdin is not None
        assert process.stdout is not None
        late = threading.Event()

        def kill() -> None:
            late.set()
            process.kill()

        deadline = threading.Timer(PATIENCE * seconds, kill)
        deadline.daemon = True
        deadline.start()
        answer, odd, sent, began = None, "", False, time.monotonic()
        try:
            if not self._closed:
                send(process.stdin, Packet({**job.head, "seconds": seconds}, job.body))
                sent = True
                answer = receive(process.stdout, most=(4 << 20) + 16 * len(job.body))
        except OSError:  # it is gone
            pass
        except (ValueError, RecursionError) as err:
            odd = f"it answered with {err}"
        finally:
            deadline.cancel()
        if answer is None:
            at_once = time.monotonic() - began < AT_ONCE_S
            by_itself = not (odd or self._closed or late.is_set())
            if by_itself:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(ENDING_S)
            why = self._ended(process, seconds, late.is_set())
            killed = by_itself and process.returncode in _FROM_OUTSIDE
            if by_itself and (not sent or (at_once and killed)):
                raise _UnstartedJob(why)
            raise KilledChild(why) if killed else ChildError(odd or why)
        return answer

    def _reap(self) -> None:
        if self._process is not None:
            self._ended(self._process, 0, late=False)

    def _ended(self, process: subprocess.Popen[bytes], seconds: float, late: bool) -> str:
        """Kill the process, wait for its end, and return the reason why it did not answer."""
        process.kill()
        for stream in (process.stdin, process.stdout):
            assert stream is not None
            with contextlib.suppress(OSError):  # bytes that are not written yet
                stream.close()
        code, self._process = process.wait(), None
        if self._closed:
            return "it was ended"
        if late:
            return f"it was not done after {PATIENCE * seconds:.0f} s"
        if sys.platform != "win32" and code == -signal.SIGXCPU:
            return f"it took more than {seconds:g} s of processor time"
        crashed = crash(code)
        name = crashed.name if crashed else f"exit code {code}"
        return f"it took more than {show_size(self._memory)} of memory, or crashed ({name})"


def answer_jobs(work: Callable[[Packet], Packet], *, most_head: int = MAX_HEAD) -> None:
    """Answer jobs from the standard input until it ends, within limits. For a child, of the arguments PARENT MEMORY.

    most_head: bytes of the JSON of a job, at most.
    """
    parent, memory = (int(argument) for argument in sys.argv[1:3])
    end_with(parent)
    asked, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1):  # text that a library prints must not mix with the answers
        os.dup2(nothing, descriptor)
    confine(memory)
    while (job := receive(asked, most=MAX_BODY, most_head=most_head)) is not None:
        allow_processor(job.head["seconds"])
        send(answers, work(job))
