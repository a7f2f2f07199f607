"""Ending a daemon, and waiting until its data directory is free."""

from __future__ import annotations

import time
from pathlib import Path

from ssmd.daemon.client import Client
from ssmd.daemon.discovery import DaemonError, running

STOP = "/ssmd/v1/stop"
# After a drain: running requests get 10 s, a step of the model 10 s more, answers and readers 10 s; and a reserve.
LONGEST_S = 45.0
_LOOK_S = 0.05


def end(client: Client, data_dir: Path) -> None:
    """End a daemon, and return when its process does not use the directory any more.

    Raises DaemonError if it refuses, or takes longer than its drain and LONGEST_S.
    """
    drain_s = client.send("POST", STOP).get("drain_s")
    within_s = LONGEST_S + (drain_s if isinstance(drain_s, int | float) else 0.0)
    process, deadline = client.address.pid, time.monotonic() + within_s
    while running(data_dir) == process:
        if time.monotonic() > deadline:
            raise DaemonError(
                f"process {process} has not ended within {within_s:.0f} s; end it with: kill -9 {process}"
            )
        time.sleep(_LOOK_S)
