"""A daemon as benchmarks/daemon_process.py has it, forked from a process that has the imports, as commands are."""

from __future__ import annotations

import sys

import commands
import daemon_process
from daemon_process import SSMD


class DaemonProcess(daemon_process.DaemonProcess):
    """Another `program` than `ssmd` is a process from its beginning. before: Python that its process runs first."""

    before = ""

    def spawn(self) -> None:
        if sys.platform != "linux" or tuple(self._command[: len(SSMD)]) != SSMD:
            super().spawn()
            return
        with self._log.open("ab") as log:
            self.process = commands.start(
                *self._command[len(SSMD) :], env=self._environment, log=log, before=self.before
            )
