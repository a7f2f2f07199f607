"""Progress of long work: on a terminal a bar that goes again, in a pipe nothing of it."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys

SHOW = """
import os, sys, time
from ssmd.machine.progress import hushed, show_progress, staged, tell
tell(1, 2)  # nobody watches
with show_progress("one [b]two[/b]\\x1b[31m"):
    tell(0, 4)
    time.sleep(0.3)
    tell(3, 4)
    time.sleep(0.3)
    print("line", flush=True)
    sys.stderr.write("note\\n")
    with show_progress("another"):
        tell(4, 4)
        time.sleep(0.3)
    tell(0, 0)
    time.sleep(0.3)
with staged(lambda line: print(line, flush=True), "stage"):
    tell(1, 2)
    os.write(2, b"noise\\n")
    print("more noise")
    time.sleep(0.5)
"""


def on_a_terminal(code: str, **extra: str) -> list[str]:
    """All that was written to it, less what moves the cursor and colours, by frames and lines."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100", **extra}
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    )
    os.close(theirs)
    written = b""
    while True:
        try:
            part = os.read(ours, 1 << 16)
        except OSError:  # its end, on Linux
            break
        if not part:
            break
        written += part
    os.close(ours)
    assert process.wait() == 0, written
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written.decode())
    return [line.rstrip() for line in re.split(r"[\r\n]+", plain) if line.strip()]


def test_on_a_terminal() -> None:
    lines = on_a_terminal(SHOW)
    bars = [line for line in lines if "one [b]two[/b]\\x1b[31m" in line]
    assert len(bars) >= 3, lines
    assert any(" 0 % " in line for line in bars)
    assert any(" 75 % " in line for line in bars)
    assert any(" 100 % " in line for line in bars), "what is inside tells the bar that is there"
    assert "%" not in bars[-1], "and takes it back"
    assert not any("another" in line for line in lines)
    assert "note" in lines, "what is written meanwhile stands above it"
    assert "line" in "".join(lines)
    stage = lines[lines.index("stage …") :]
    assert any("stage " in line and " 50 % " in line for line in stage[1:]), stage
    assert re.match(r"    [0-9]\.[0-9] s, peak memory ", stage[-1]), stage
    assert not any("noise" in line for line in lines)


def test_on_a_terminal_that_can_do_nothing() -> None:
    assert "\x1b" not in "".join(
        on_a_terminal("from ssmd.machine.progress import show_progress\nwith show_progress('x'): pass", TERM="dumb")
    )


def test_in_a_pipe_there_is_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", SHOW], capture_output=True, text=True, check=True)
    assert done.stderr == "note\n"
    first, second, third = done.stdout.splitlines()
    assert (first, second) == ("line", "stage …")
    assert re.match(r"    [0-9]\.[0-9] s, peak memory ", third), third


def test_an_error_leaves_the_terminal_as_it_was() -> None:
    code = """
from ssmd.machine.progress import staged
try:
    with staged(print, "x"):
        print("last words")
        raise ValueError
except ValueError:
    print("on")
"""
    lines = on_a_terminal(code)
    assert lines[-1] == "on"
    assert any("last words" in line for line in lines), "of what failed the end is told"
