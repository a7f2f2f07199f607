"""The daemon that runs here, as commands meet it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ssmd import __version__

if TYPE_CHECKING:
    from ssmd.daemon.client import Client


def reached(data_dir: Path) -> Client | None:
    """A client of the daemon on a data directory; None if none runs. Raises DaemonError if one does that cannot be
    asked. One of another version is asked all the same, and a line says so.
    """
    from ssmd.daemon.client import Client
    from ssmd.daemon.discovery import DaemonError, find, running

    found = find(data_dir)
    if found is None:
        if (process := running(data_dir)) is None:
            return None
        who, end = (f"process {process}", f"; or end it: kill {process}") if process else ("a process", "")
        raise DaemonError(f"{who} uses {data_dir} and answers nobody: it starts, ends, or repairs; try again soon{end}")
    if found.version != __version__:
        typer.echo(f"note: the daemon is ssmd {found.version}, this command {__version__}", err=True)
    return Client(found)


def needed(data_dir: Path) -> Client:
    """A client of the daemon on a data directory. Raises DaemonError if none can be asked."""
    from ssmd.daemon.discovery import DaemonError

    client = reached(data_dir)
    if client is None:
        raise DaemonError(f"no daemon runs on {data_dir}; start one with: ssmd serve")
    return client
