"""The output of commands: rows of text, and one line on stderr for a failure. docs/commands.md has the exit codes."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

import typer

from ssmd.machine.spelling import printable

FAILED, USAGE, INTERRUPTED = 1, 2, 130
MOST_CHARS = 4000  # characters of the error line: answers and files may contain anything


@contextmanager
def plain_errors() -> Iterator[None]:
    """Exit with one line on the errors that ssmd itself or the operating system raises. A bug keeps its traceback.

    An error with a true attribute `usage` means a wrong command line.
    """
    try:
        yield
    except BrokenPipeError:  # the reader of our output has stopped
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(FAILED)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except Exception as err:
        if not (type(err).__module__.startswith("ssmd") or isinstance(err, OSError)):
            raise
        fail(str(err), USAGE if getattr(err, "usage", False) else FAILED)


def fail(message: str, code: int = FAILED) -> NoReturn:
    """End the command with one line, made safe for a terminal."""
    typer.echo(f"error: {printable(' '.join(message.splitlines()), MOST_CHARS)}", err=True)
    sys.exit(code)


def counted(n: int, noun: str) -> str:
    """Return a number with its noun, which is in the plural if it is not 1."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}{'es' if noun.endswith('ch') else 's'}"


def lines(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield each row as a line. Every column is as wide as its longest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
