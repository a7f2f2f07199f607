"""A unit of systemd: of this user, or (`system`) of the machine, which runs as a dynamic user of systemd."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ssmd.machine.services.service import (
    DESCRIPTION,
    NAME,
    NOT_ROOT,
    Definition,
    ServiceError,
    Status,
    asked,
    removed,
    written,
)

UNIT = f"{NAME}.service"
SYSTEM_DATA = f"/var/lib/{NAME}"
# A dynamic user of systemd has no home, and so no folder of settings.
_OF_THE_MACHINE = {
    "HOME": SYSTEM_DATA,
    "SSMD_CACHE_DIR": f"/var/cache/{NAME}",
    "SSMD_DATA_DIR": SYSTEM_DATA,
    "XDG_CONFIG_HOME": "/etc",
}
# Settings that a user's manager can apply without rights. They need no namespaces: some distributions forbid users
# to make these.
_USER = """\
NoNewPrivileges=yes
LockPersonality=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
RestrictNamespaces=yes
RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX AF_NETLINK
SystemCallArchitectures=native
SystemCallFilter=@system-service
SystemCallErrorNumber=EPERM
LimitCORE=0
UMask=0077
"""
# Runtimes make machine code (no MemoryDenyWriteExecute) and open GPUs and NPUs (no PrivateDevices).
_SYSTEM = (
    _USER
    + f"""\
DynamicUser=yes
StateDirectory={NAME}
StateDirectoryMode=0700
CacheDirectory={NAME}
CapabilityBoundingSet=
DevicePolicy=closed
DeviceAllow=char-drm rw
DeviceAllow=char-accel rw
DeviceAllow=char-nvidia-frontend rw
SupplementaryGroups={{groups}}
PrivateTmp=yes
ProtectSystem=strict
ProtectHome={{home}}
ProtectClock=yes
ProtectControlGroups=yes
ProtectHostname=yes
ProtectKernelLogs=yes
ProtectKernelModules=yes
ProtectKernelTunables=yes
ProtectProc=invisible
RemoveIPC=yes
"""
)


@dataclass(frozen=True)
class Systemd:
    """systemctl for this user, or for the machine."""

    file: Path
    system: bool
    name: str = "systemd"

    @staticmethod
    def here(*, system: bool, ask: bool = True) -> Systemd:
        """Return the manager. Raises ServiceError if `ask` is True and systemd does not answer.

        ask: False if only a unit is written, which does not need systemd.
        """
        if system:
            found = Systemd(Path("/etc/systemd/system") / UNIT, True)
            if ask and sys.platform != "win32" and os.getuid():
                raise ServiceError(NOT_ROOT)
        else:
            found = Systemd(Path.home() / ".config" / "systemd" / "user" / UNIT, False)
        if not ask:
            return found
        state = asked([*found._systemctl, "is-system-running"], fails=False)
        if state.stdout.strip() in ("", "offline", "unknown"):
            said = " ".join(state.stderr.split())[:300] or state.stdout.strip()
            whose = "of the machine" if system else "of this user"
            raise ServiceError(f"no systemd {whose} can be asked here ({said}); start the daemon with: ssmd serve")
        return found if system else found._where_it_looks()

    def _where_it_looks(self) -> Systemd:
        """Return the manager with this user's unit folder, as systemd reports it: a shell's variables may differ."""
        shown = asked([*self._systemctl, "show", "--property=UnitPath", "--value"]).stdout
        folder = next((one for one in shlex.split(shown) if one.endswith("/systemd/user")), self.file.parent)
        return replace(self, file=Path(folder) / UNIT)

    @property
    def when(self) -> str:
        """The time of the service's start, as words for a message."""
        return "with the machine" if self.system else "when you log in"

    @property
    def _systemctl(self) -> list[str]:
        return ["systemctl", "--no-pager"] if self.system else ["systemctl", "--user", "--no-pager"]

    def text(self, definition: Definition) -> str:
        """Return the text of the unit."""
        environment = dict(definition.environment)
        if self.system:
            environment = _OF_THE_MACHINE | environment
        lines = [
            "# Written by `ssmd service install`; changes of yours belong into `systemctl edit`.",
            "[Unit]",
            f"Description={DESCRIPTION}",
            "StartLimitIntervalSec=300",
            "StartLimitBurst=5",
            "",
            "[Service]",
            "Type=exec",
            f"ExecStart={' '.join(_quoted(word).replace('$', '$$') for word in definition.command)}",
            *(f"Environment={_quoted(f'{name}={value}')}" for name, value in sorted(environment.items())),
            "Restart=on-failure",
            "RestartSec=2",
            "TimeoutStopSec=30",
            (_SYSTEM.format(home=_home(definition), groups=_groups()) if self.system else _USER).rstrip(),
            "",
            "[Install]",
            f"WantedBy={'multi-user.target' if self.system else 'default.target'}",
            "",
        ]
        return "\n".join(lines)

    def install(self, definition: Definition) -> bool:
        """Write the unit, enable it and start the daemon. A daemon that runs with another unit text is restarted."""
        new = written(self.file, self.text(definition))
        before = self.status()
        if not new and before.running and before.starts:
            return False
        asked([*self._systemctl, "daemon-reload"])
        asked([*self._systemctl, "enable", UNIT])
        asked([*self._systemctl, "reset-failed", UNIT], fails=False)
        asked([*self._systemctl, "restart" if new else "start", UNIT])
        return True

    def uninstall(self) -> bool:
        """Stop the daemon and remove the unit, even if the unit's file was removed while the daemon ran on."""
        if not self.status().installed:
            return False
        asked([*self._systemctl, "stop", UNIT], fails=False)
        asked([*self._systemctl, "disable", UNIT], fails=False)
        removed(self.file)
        asked([*self._systemctl, "daemon-reload"])
        asked([*self._systemctl, "reset-failed", UNIT], fails=False)
        return True

    def status(self) -> Status:
        """Return systemd's state of the unit."""
        names = ("LoadState", "ActiveState", "SubState", "Result", "MainPID", "UnitFileState")
        shown = asked([*self._systemctl, "show", UNIT, f"--property={','.join(names)}"]).stdout
        found = dict(line.partition("=")[::2] for line in shown.splitlines())
        active, result = found.get("ActiveState", "unknown"), found.get("Result", "success")
        state = f"{active} ({result if active == 'failed' else found.get('SubState', '')})"
        pid = int(found.get("MainPID") or 0) or None
        there = self.file.exists() or pid is not None
        return Status(there, active == "active", state, pid, found.get("UnitFileState") == "enabled")

    def data_dir(self) -> Path | None:
        """Return the data directory that the written unit names; None if it names none."""
        if self.file.exists():
            found = re.search(r'^Environment="SSMD_DATA_DIR=(.*)"$', self.file.read_text("utf-8"), re.MULTILINE)
            return Path(re.sub(r"\\(.)", r"\1", found[1]).replace("%%", "%")) if found else None
        return None

    def start(self) -> None:
        """Start the unit."""
        asked([*self._systemctl, "reset-failed", UNIT], fails=False)
        asked([*self._systemctl, "start", UNIT])

    def stop(self) -> None:
        """Stop the unit."""
        asked([*self._systemctl, "stop", UNIT])

    def log(self, lines: int, *, follow: bool) -> Sequence[str] | None:
        """Return the command that shows the journal's lines; None if no journal is kept."""
        journal = ["journalctl", *([] if self.system else ["--user"]), "-u", UNIT, "--no-pager", "-n"]
        if not asked([*journal, "1", "-q"], fails=False).stdout.strip():
            return None
        return [*journal, str(lines), *(["-f"] if follow else [])]


def _home(definition: Definition) -> str:
    """Return the access that the service needs to home directories."""
    return "read-only" if definition.command[0].startswith(("/home/", "/root/", "/run/user/")) else "yes"


def _groups() -> str:
    """Return the groups on this machine that may open GPUs and NPUs: a unit with an unknown group does not start."""
    if sys.platform == "win32":
        return ""
    import grp

    return " ".join(g.gr_name for g in grp.getgrall() if g.gr_name in ("render", "video"))


def _quoted(word: str) -> str:
    """Return a word quoted for systemd, with its specifiers escaped. Raises ServiceError if a unit cannot hold it."""
    if any(c in word for c in "\n\r\0"):
        raise ServiceError(f"{word!r} contains a line end or null character, which a unit cannot hold")
    if any("\ud800" <= c <= "\udfff" for c in word):
        raise ServiceError(f"{word!r} is not valid UTF-8, which a unit must be")
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{escaped}"'
