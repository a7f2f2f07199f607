"""Having a daemon end, and waiting until its data directory is free."""

from __future__ import annotations

import time
from pathlib import Path

from ssmd.daemon.client import Client
from ssmd.daemon.discovery import DaemonError, running

STOP = "/ssmd/v1/stop"
LONGEST_S = 45.0  # what runs has 10 s, a step of the model 10 s more, answers and readers 10 s; and some
_LOOK_S = 0.05


def end(client: Client, data_dir: Path) -> None:
    """Have a daemon end, and return when another process, or none, uses the directory. Raises DaemonError after too
    long, and where it refuses.
    """
    client.send("POST", STOP)
    process, deadline = client.address.pid, time.monotonic() + LONGEST_S
    while running(data_dir) == process:
        if time.monotonic() > deadline:
            raise DaemonError(
                f"process {process} has not ended within {LONGEST_S:.0f} s; end it with: kill -9 {process}"
            )
        time.sleep(_LOOK_S)
