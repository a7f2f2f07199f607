"""Files for each system's service manager, read by that system's own tools where they are installed."""

from __future__ import annotations

import plistlib
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from ssmd.machine.services.launchd import Launchd
from ssmd.machine.services.service import Definition, ServiceError, asked, removed, written
from ssmd.machine.services.systemd import Systemd
from ssmd.machine.services.windows import TaskScheduler

ODD = "/a b/ü \"q\" 100% $HOME 'x' \\n"
DEFINITION = Definition((sys.executable, "-m", "ssmd", "serve"), {"SSMD_DATA_DIR": ODD, "SSMD_PORT": "7999"})
verifies = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")


def unit(tmp_path: Path, *, system: bool, definition: Definition = DEFINITION) -> Path:
    file = tmp_path / "ssmd.service"
    written(file, Systemd(file, system).text(definition))
    return file


@verifies
@pytest.mark.parametrize("system", [False, True])
def test_systemd_finds_nothing_wrong(system: bool, tmp_path: Path) -> None:
    file = unit(tmp_path, system=system)
    done = subprocess.run(["systemd-analyze", "verify", file], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    file.write_text(file.read_text() + "Wrong=1\n")  # it can
    done = subprocess.run(["systemd-analyze", "verify", file], capture_output=True, text=True, check=False)
    assert "Wrong" in done.stderr


@verifies
@pytest.mark.parametrize(("system", "most"), [(True, 2.0), (False, 6.7)])
def test_the_exposure_that_systemd_reckons(system: bool, most: float, tmp_path: Path) -> None:
    command = ["systemd-analyze", "security", "--offline=true", f"--threshold={most * 10:.0f}"]
    file = unit(tmp_path, system=system)
    done = subprocess.run([*command, file], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-200:]
    done = subprocess.run([*command[:-1], "--threshold=10", file], capture_output=True, text=True, check=False)
    assert done.returncode != 0


def test_words_and_values_come_back_as_they_were_from_systemd(tmp_path: Path) -> None:
    text = unit(
        tmp_path, system=False, definition=Definition(("/a b/$x/100%", "-m"), {"SSMD_DATA_DIR": ODD})
    ).read_text()
    assert 'ExecStart="/a b/$$x/100%%" "-m"\n' in text
    assert 'Environment="SSMD_DATA_DIR=/a b/ü \\"q\\" 100%% $HOME \'x\' \\\\n"\n' in text
    for value, why in (("a\nExecStart=/bin/evil", "line end"), ("/d\udcff", "UTF-8")):
        with pytest.raises(ServiceError, match=why):
            Systemd(tmp_path / "u", False).text(Definition(("/x",), {"SSMD_PIN": value}))


def test_where_an_installed_service_keeps_its_data(tmp_path: Path) -> None:
    managers = (
        Systemd(tmp_path / "unit", False),
        Launchd(tmp_path / "plist", "gui/501", tmp_path),
        TaskScheduler(tmp_path / "task", "me"),
    )
    for manager in managers:
        assert manager.data_dir() is None, "nothing is installed"
        for variables, expected in ((DEFINITION.environment, Path(ODD)), ({"SSMD_PORT": "1"}, None)):
            encoding = "utf-16" if manager.name == "the Task Scheduler" else "utf-8"
            written(manager.file, manager.text(Definition(DEFINITION.command, variables)), encoding=encoding)
            assert manager.data_dir() == expected, manager


def test_a_service_of_the_machine_has_its_own_data(tmp_path: Path) -> None:
    text = unit(tmp_path, system=True, definition=Definition(("/opt/python",), {})).read_text()
    assert 'Environment="SSMD_DATA_DIR=/var/lib/ssmd"\n' in text
    assert 'Environment="HOME=/var/lib/ssmd"\n' in text, "a user that systemd makes up has no other"
    assert 'Environment="XDG_CONFIG_HOME=/etc"\n' in text
    assert "DynamicUser=yes\n" in text
    assert "ProtectHome=yes\n" in text
    text = unit(tmp_path, system=True, definition=Definition(("/home/me/python",), {})).read_text()
    assert "ProtectHome=read-only\n" in text


def test_launchds_property_list(tmp_path: Path) -> None:
    agent = Launchd(tmp_path / "agent.plist", "gui/501", tmp_path / "ssmd.log")
    found = plistlib.loads(agent.text(DEFINITION).encode())
    assert found["ProgramArguments"] == [sys.executable, "-m", "ssmd", "serve"]
    assert found["EnvironmentVariables"]["SSMD_DATA_DIR"] == ODD
    assert (found["RunAtLoad"], found["KeepAlive"]) == (True, {"SuccessfulExit": False})
    assert found["SoftResourceLimits"] == found["HardResourceLimits"] == {"Core": 0}
    with pytest.raises(ServiceError, match="property list"):
        agent.text(Definition(("/x",), {"SSMD_PIN": "a\x01"}))


def test_the_task_of_windows(tmp_path: Path) -> None:
    task = TaskScheduler(tmp_path / "service.xml", "PC\\me & you")
    python = "C:\\Program Files\\Python\\python.exe"
    assert written(task.file, task.text(Definition((python, "-m", "ssmd", "serve"), {})), encoding="utf-16")
    root = ElementTree.fromstring(task.file.read_bytes())
    names = {"t": "http://schemas.microsoft.com/windows/2004/02/mit/task"}
    assert root.findtext(".//t:LogonTrigger/t:UserId", namespaces=names) == "PC\\me & you"
    assert root.findtext(".//t:Command", namespaces=names) == "C:\\Program Files\\Python\\pythonw.exe"
    assert root.findtext(".//t:Arguments", namespaces=names) == "-m ssmd serve"


def test_python_sets_the_variables_of_a_task_when_it_starts(tmp_path: Path) -> None:
    """This runs what Windows would run, except for the module."""
    task = TaskScheduler(tmp_path / "service.xml", "me")
    root = ElementTree.fromstring(task.text(DEFINITION).partition("\n")[2])
    names = {"t": "http://schemas.microsoft.com/windows/2004/02/mit/task"}
    line = root.findtext(".//t:Arguments", namespaces=names)
    assert line is not None
    assert "%" not in line, "it would be one of Windows' variables"
    program = line.removeprefix('-P -c "').removesuffix('"')
    shown = "print(os.environ['SSMD_DATA_DIR'], sys.argv)"
    program = program.replace("runpy.run_module('ssmd', run_name='__main__')", shown)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == f"{ODD} {['ssmd', 'serve']}\n"


def test_a_definition_is_written_whole_once_and_removed_once(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "ssmd.service"
    assert written(file, "a")
    assert not written(file, "a")
    assert written(file, "b")
    assert file.read_text() == "b"
    assert [p.name for p in file.parent.iterdir()] == ["ssmd.service"]
    assert removed(file)
    assert not removed(file)
    (tmp_path / "taken").write_text("")
    with pytest.raises(ServiceError, match="cannot be written"):
        written(tmp_path / "taken" / "ssmd.service", "a")


def test_what_a_manager_answers() -> None:
    assert asked([sys.executable, "-c", "print(1)"]).stdout == "1\n"
    with pytest.raises(ServiceError, match="says: no such unit"):
        asked([sys.executable, "-c", "import sys; print('no such unit', file=sys.stderr); sys.exit(5)"])
    with pytest.raises(ServiceError, match="nosuchmanager is not installed here"):
        asked(["nosuchmanager"])
