"""A LaunchAgent of macOS, or (`system`) a LaunchDaemon. Not tested on a Mac: tests only read its plist back."""

from __future__ import annotations

import os
import plistlib
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ssmd.machine.services.service import NOT_ROOT, Definition, ServiceError, Status, asked, removed, written

LABEL = "io.ssmd.daemon"
THROTTLE_S = 10  # shortest time between two starts
STOP_S = 30  # longest time to stop before the service is killed
LOOK_S = 0.2  # time between checks if it has stopped


@dataclass(frozen=True)
class Launchd:
    """launchctl for this user's login, or for the machine."""

    file: Path
    domain: str  # as launchctl calls it
    output: Path
    name: str = "launchd"

    @staticmethod
    def here(*, system: bool, ask: bool = True) -> Launchd:
        """Return the manager. Raises ServiceError. ask: as for systemd."""
        user = getattr(os, "getuid", int)()
        if not system:
            home = Path.home()
            agent = home / "Library" / "LaunchAgents" / f"{LABEL}.plist"
            return Launchd(agent, f"gui/{user}", home / "Library" / "Logs" / "ssmd.log")
        if ask and user:
            raise ServiceError(NOT_ROOT)
        return Launchd(Path("/Library/LaunchDaemons") / f"{LABEL}.plist", "system", Path("/var/log/ssmd.log"))

    @property
    def when(self) -> str:
        """The time of the service's start, as words for a message."""
        return "with the machine" if self.domain == "system" else "when you log in"

    @property
    def _target(self) -> str:
        return f"{self.domain}/{LABEL}"

    def text(self, definition: Definition) -> str:
        """Return the property list: the service starts at once, and again if it failed."""
        said: dict[str, Any] = {
            "Label": LABEL,
            "ProgramArguments": list(definition.command),
            "EnvironmentVariables": dict(sorted(definition.environment.items())),
            "RunAtLoad": True,
            "KeepAlive": {"SuccessfulExit": False},
            "ThrottleInterval": THROTTLE_S,
            "ExitTimeOut": STOP_S,
            "Umask": 0o077,
            "SoftResourceLimits": {"Core": 0},
            "HardResourceLimits": {"Core": 0},
            "StandardErrorPath": str(self.output),
        }
        try:
            return plistlib.dumps(said).decode()
        except ValueError as err:
            raise ServiceError(f"a variable or path cannot be written into a property list: {err}") from err

    def install(self, definition: Definition) -> bool:
        """Write the property list and load it; a loaded service is loaded again."""
        new, before = written(self.file, self.text(definition)), self.status()
        if not new and before.running:
            return False
        self._unload()
        asked(["launchctl", "enable", self._target])
        asked(["launchctl", "bootstrap", self.domain, str(self.file)])
        return True

    def _unload(self) -> None:
        """Unload the service, and wait until it has ended: it can be loaded again only then."""
        asked(["launchctl", "bootout", self._target], fails=False)
        deadline = time.monotonic() + STOP_S
        while asked(["launchctl", "print", self._target], fails=False).returncode == 0:
            if time.monotonic() > deadline:
                raise ServiceError(f"{self._target} does not end; look at it with: launchctl print {self._target}")
            time.sleep(LOOK_S)

    def uninstall(self) -> bool:
        """Unload the service, and remove the property list."""
        self._unload()
        return removed(self.file)

    def status(self) -> Status:
        """Return launchd's state of the service."""
        shown = asked(["launchctl", "print", self._target], fails=False).stdout
        state = re.search(r"^\s*state = (.+)$", shown, re.MULTILINE)
        pid = re.search(r"^\s*pid = (\d+)$", shown, re.MULTILINE)
        there = self.file.exists()
        return Status(there, pid is not None, state[1] if state else "not loaded", int(pid[1]) if pid else None, there)

    def data_dir(self) -> Path | None:
        """Return the data directory that the written property list names; None if it names none."""
        if not self.file.exists():
            return None
        variables = plistlib.loads(self.file.read_bytes())["EnvironmentVariables"]
        return Path(variables["SSMD_DATA_DIR"]) if "SSMD_DATA_DIR" in variables else None

    def start(self) -> None:
        """Start the service; load it first if it was stopped."""
        if not asked(["launchctl", "print", self._target], fails=False).stdout:
            asked(["launchctl", "bootstrap", self.domain, str(self.file)])
        asked(["launchctl", "kickstart", self._target])

    def stop(self) -> None:
        """Unload the service: launchd would restart a service that is only killed."""
        asked(["launchctl", "bootout", self._target])

    def log(self, lines: int, *, follow: bool) -> Sequence[str]:
        """Return the command that shows its stderr."""
        return ["tail", "-n", str(lines), *(["-f"] if follow else []), str(self.output)]
