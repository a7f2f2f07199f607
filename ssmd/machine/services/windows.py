"""A task of Windows' Task Scheduler at this user's logon, which needs no special rights. Not tested on Windows."""

from __future__ import annotations

import ast
import csv
import io
import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PureWindowsPath
from xml.sax.saxutils import escape

from ssmd.machine.services.service import DESCRIPTION, NAME, Definition, ServiceError, Status, asked, removed, written

_XML = """\
<?xml version="1.0" encoding="UTF-16"?>
<Task version="1.2" xmlns="http://schemas.microsoft.com/windows/2004/02/mit/task">
  <RegistrationInfo><Description>{description}</Description></RegistrationInfo>
  <Triggers><LogonTrigger><Enabled>true</Enabled><UserId>{user}</UserId></LogonTrigger></Triggers>
  <Principals>
    <Principal id="Author">
      <UserId>{user}</UserId><LogonType>InteractiveToken</LogonType><RunLevel>LeastPrivilege</RunLevel>
    </Principal>
  </Principals>
  <Settings>
    <MultipleInstancesPolicy>IgnoreNew</MultipleInstancesPolicy>
    <DisallowStartIfOnBatteries>false</DisallowStartIfOnBatteries>
    <StopIfGoingOnBatteries>false</StopIfGoingOnBatteries>
    <ExecutionTimeLimit>PT0S</ExecutionTimeLimit>
    <RestartOnFailure><Interval>PT1M</Interval><Count>5</Count></RestartOnFailure>
  </Settings>
  <Actions Context="Author">
    <Exec><Command>{command}</Command><Arguments>{arguments}</Arguments></Exec>
  </Actions>
</Task>
"""
_STATUS, _RESULT = 3, 6  # columns of schtasks' verbose output
_RUNS = "267009"  # SCHED_S_TASK_RUNNING, the same in every language; the status column is in Windows' language


@dataclass(frozen=True)
class TaskScheduler:
    """schtasks for this user."""

    file: Path
    user: str
    name: str = "the Task Scheduler"
    when: str = "when you log on"

    @staticmethod
    def here(*, system: bool) -> TaskScheduler:
        """Return the manager. Raises ServiceError if `system`."""
        if system:
            raise ServiceError("on Windows the daemon starts with a user's logon; leave --system out")
        local = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
        user = f"{os.environ.get('USERDOMAIN', '.')}\\{os.environ.get('USERNAME', '')}"
        return TaskScheduler(local / NAME / "service.xml", user)

    def text(self, definition: Definition) -> str:
        """Return the task's XML. A task cannot set variables, so its Python sets those of the definition."""
        python = PureWindowsPath(definition.command[0])
        windowless = str(python.with_name("pythonw.exe")) if python.name.lower() == "python.exe" else str(python)
        arguments = list(definition.command[1:])
        if definition.environment:
            values = "; ".join(f"os.environ[{k!r}] = {_literal(v)}" for k, v in sorted(definition.environment.items()))
            words = arguments[arguments.index("-m") + 1 :]
            program = f"import os, runpy, sys; {values}; sys.argv = {words!r}; "
            program += "runpy.run_module('ssmd', run_name='__main__')"
            arguments = ["-P", "-c", program]
        return _XML.format(
            description=escape(DESCRIPTION),
            user=escape(self.user),
            command=escape(windowless),
            arguments=escape(subprocess.list2cmdline(arguments)),
        )

    def install(self, definition: Definition) -> bool:
        """Register the task, and run it."""
        new, before = written(self.file, self.text(definition), encoding="utf-16"), self.status()
        if not new and before.running:
            return False
        if before.running:  # a running task would not be started a second time
            asked(["schtasks", "/End", "/TN", NAME], fails=False)
        asked(["schtasks", "/Create", "/TN", NAME, "/XML", str(self.file), "/F"])
        self.start()
        return True

    def uninstall(self) -> bool:
        """End the task, and remove it."""
        asked(["schtasks", "/End", "/TN", NAME], fails=False)
        asked(["schtasks", "/Delete", "/TN", NAME, "/F"], fails=False)
        return removed(self.file)

    def status(self) -> Status:
        """Return the Task Scheduler's state of the task; it reports no process id."""
        done = asked(["schtasks", "/Query", "/TN", NAME, "/V", "/FO", "CSV", "/NH"], fails=False)
        row = next(iter(csv.reader(io.StringIO(done.stdout))), [])
        there = done.returncode == 0 and len(row) > _RESULT
        running = there and (row[_STATUS] == "Running" or row[_RESULT] == _RUNS)
        return Status(there, running, row[_STATUS] if there else "not registered", None, there)

    def data_dir(self) -> Path | None:
        """Return the data directory that the written task names; None if it names none."""
        if not self.file.exists():
            return None
        found = re.search(r"os\.environ\['SSMD_DATA_DIR'\] = ('[^']*')", self.file.read_text("utf-16"))
        return Path(ast.literal_eval(found[1])) if found else None

    def start(self) -> None:
        """Run the task."""
        asked(["schtasks", "/Run", "/TN", NAME])

    def stop(self) -> None:
        """End the task; the command `ssmd service stop` asks the daemon itself first."""
        asked(["schtasks", "/End", "/TN", NAME])

    def log(self, lines: int, *, follow: bool) -> Sequence[str] | None:
        """Return None: only the daemon's own log has its output."""
        return None


def _literal(text: str) -> str:
    """Return a text as a Python literal, without characters that a command line or the Task Scheduler would change.

    These are double quotes, % and $.
    """
    return "'" + "".join(c if c.isascii() and (c.isalnum() or c in " :/._,-") else _escaped(c) for c in text) + "'"


def _escaped(char: str) -> str:
    return "\\\\" if char == "\\" else f"\\U{ord(char):08x}"
