"""`ssmd logs`: what the daemon wrote down, also one that has ended."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from ssmd.cli import options
from ssmd.cli.failure import fail

_LOOK_S = 0.25


def logs(
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what comes, until Ctrl-C.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", help="Show so many of the last lines.", min=0)] = 50,
    data_dir: options.DataDir = None,
) -> None:
    """Show the daemon's log. It holds no conversation and no key; of 4 MB each this file is kept and the one before."""
    from ssmd.cli.session import plain
    from ssmd.daemon.discovery import running
    from ssmd.daemon.logfile import FILE, Reader
    from ssmd.daemon.place import data_dir as place

    where = place(data_dir)
    reader = Reader(where)
    try:
        found = reader.last(lines)
    except (FileNotFoundError, PermissionError) as err:
        running(where)  # raises for a directory of another user
        if isinstance(err, PermissionError):
            raise
        fail(f"there is no {where / FILE}: no daemon has run there that keeps anything; start one with: ssmd serve")
    while True:
        for line in found:
            typer.echo(plain(line))
        if not follow:
            break
        time.sleep(_LOOK_S)
        found = list(reader.more())
