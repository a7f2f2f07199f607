"""Ending a daemon, and waiting until its data directory is free."""

from __future__ import annotations

import time
from pathlib import Path

from ssmd.daemon.client import Client
from ssmd.daemon.discovery import DaemonError, running

STOP = "/ssmd/v1/stop"
LONGEST_S = 45.0  # running requests get 10 s, a step of the model 10 s more, answers and readers 10 s; and a reserve
_LOOK_S = 0.05


def end(client: Client, data_dir: Path) -> None:
    """End a daemon, and return when its process does not use the directory any more.

    Raises DaemonError if it refuses, or takes longer than LONGEST_S.
    """
    client.send("POST", STOP)
    process, deadline = client.address.pid, time.monotonic() + LONGEST_S
    while running(data_dir) == process:
        if time.monotonic() > deadline:
            raise DaemonError(
                f"process {process} has not ended within {LONGEST_S:.0f} s; end it with: kill -9 {process}"
            )
        time.sleep(_LOOK_S)
