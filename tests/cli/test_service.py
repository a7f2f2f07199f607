"""`ssmd service` with a real systemd of a user: installed, killed, stopped, installed anew, removed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import commands
import pytest
from conftest import TinyArtifacts
from daemon import soon

BOOTED = Path("/run/systemd/system")  # without it systemd thinks that another one began the machine
PROGRAM = next((p for p in map(Path, ("/usr/lib/systemd/systemd", "/lib/systemd/systemd")) if p.exists()), None)
START_S = 60  # of a daemon
CGROUPS = tuple(map(Path, ("/sys/fs/cgroup/systemd", "/sys/fs/cgroup/unified", "/sys/fs/cgroup")))


class Machine:
    """A user's systemd, with directories of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        names = {"HOME": "home", "SSMD_DATA_DIR": "data", "SSMD_MODELS_DIR": "models", "XDG_RUNTIME_DIR": "run"}
        self.environment = {**os.environ, **{name: str(folder / place) for name, place in names.items()}}
        self.environment |= {"SSMD_PORT": "0"}
        self.environment.pop("XDG_CONFIG_HOME", None)
        for place in names.values():
            (folder / place).mkdir(mode=0o700)

    def ssmd(self, *words: str, fails: int = 0, **more: str) -> str:
        """Run a command and return stdout and stderr. `fails`: the exit code to expect."""
        done = commands.ssmd(*words, env={**self.environment, **more})
        assert done.returncode == fails, done.stdout + done.stderr
        return done.stdout + done.stderr

    @property
    def running(self) -> bool:
        """Report if the user's systemd answers."""
        asked = ["systemctl", "--user", "is-system-running"]
        return "running" in subprocess.run(asked, env=self.environment, capture_output=True, text=True).stdout

    def serves(self, pid: int) -> bool:
        """Report if the daemon of that process has written its address."""
        with suppress(OSError, ValueError):
            return bool(json.loads((self.folder / "data" / "daemon.json").read_text())["pid"] == pid)
        return False

    @property
    def pid(self) -> int:
        """Of the daemon, as systemd has it; 0 if it does not run."""
        asked = ["systemctl", "--user", "show", "ssmd", "-p", "MainPID", "--value"]
        return int(subprocess.run(asked, env=self.environment, capture_output=True, text=True, check=True).stdout)


def _apart() -> None:
    """Give the process about to be a systemd control groups that it may divide."""
    for place in CGROUPS:
        with suppress(OSError):
            if not (place / "cgroup.procs").exists():
                continue
            own = place / f"ssmd-test-{os.getpid()}"
            own.mkdir()
            (own / "cgroup.procs").write_text(str(os.getpid()))


@pytest.fixture
def machine(artifacts: TinyArtifacts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    if PROGRAM is None or shutil.which("systemctl") is None:
        pytest.skip("needs systemd")
    made = not BOOTED.exists()
    if made and os.getuid():
        pytest.skip("needs a machine that systemd booted, or root")
    BOOTED.mkdir(parents=True, exist_ok=True)
    one = Machine(tmp_path_factory.mktemp("sd"))
    (one.folder / "models" / "tiny").mkdir()  # where there is none a first daemon makes one
    (one.folder / "models" / "tiny" / "litert-cpu-f32").symlink_to(artifacts["llama-f32"])
    manager = subprocess.Popen(
        [PROGRAM, "--user", "--log-target=null"], env=one.environment, preexec_fn=_apart, stderr=subprocess.DEVNULL
    )
    try:
        with suppress(AssertionError):
            soon(lambda: one.running or manager.poll() is not None, START_S)
        if not one.running:
            pytest.skip("no systemd of a user can be started here")
        yield one
    finally:
        subprocess.run(["systemctl", "--user", "exit"], env=one.environment, capture_output=True, check=False)
        try:
            manager.wait(40)
        except subprocess.TimeoutExpired:
            manager.kill()
            manager.wait()
        for place in CGROUPS:
            for group in sorted(place.glob(f"ssmd-test-{manager.pid}/**/"), reverse=True):
                with suppress(OSError):
                    group.rmdir()
        if made:
            with suppress(OSError):
                BOOTED.rmdir()


def test_from_install_to_uninstall(machine: Machine) -> None:
    assert "not installed" in machine.ssmd("service", "status", fails=3)
    assert "not installed" in machine.ssmd("service", "stop", fails=1)
    (machine.folder / "home" / "random.py").write_text("raise SystemExit('this is none of ours')")
    assert "is installed and runs; it starts when you log in" in machine.ssmd("service", "install")
    assert machine.serves(machine.pid)
    assert "was installed already" in machine.ssmd("service", "install")
    soon(lambda: "process" in machine.ssmd("service", "status"), START_S)
    first = machine.pid
    soon(lambda: machine.serves(first), START_S)
    assert f"process {first}" in machine.ssmd("ps")
    assert f"process {first}: ssmd" in machine.ssmd("service", "logs")

    os.kill(first, signal.SIGKILL)  # it is started again
    soon(lambda: machine.pid not in (0, first), START_S)
    soon(lambda: machine.serves(machine.pid), START_S)

    second = machine.pid
    machine.ssmd("service", "install", SSMD_MAX_QUEUE="7")  # what changed is taken on
    soon(lambda: machine.pid not in (0, second), START_S)
    soon(lambda: machine.serves(machine.pid), START_S)

    machine.ssmd("stop")  # a daemon that the user stops is not restarted
    assert "inactive" in machine.ssmd("service", "status", fails=3)
    machine.ssmd("service", "start")
    assert machine.serves(machine.pid)
    machine.ssmd("service", "stop")
    assert machine.pid == 0
    assert "removed" in machine.ssmd("service", "uninstall")
    assert "the service was not installed" in machine.ssmd("service", "uninstall")
    assert Path(machine.folder, "data", "daemon.log").exists()


def test_what_cannot_be_a_service(machine: Machine) -> None:
    assert "put the key into the settings file" in machine.ssmd("service", "install", fails=1, SSMD_API_KEY="k" * 20)
    assert "API key" in machine.ssmd("service", "install", fails=1, SSMD_HOST="0.0.0.0")
    assert "did you mean" in machine.ssmd("service", "install", fails=1, SSMD_PROT="1")
    assert not list(Path(machine.folder, "home").rglob("*.service"))

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        said = machine.ssmd("service", "install", fails=1, SSMD_PORT=port, XDG_CONFIG_HOME="where the shell is")
        assert f"cannot listen on 127.0.0.1 port {port}: Address already in use" in said
        assert f"port {port}: Address already in use" in machine.ssmd("service", "logs", "-n", "3")
    [file] = Path(machine.folder, "home").rglob("user/*.service")
    soon(lambda: machine.pid != 0, START_S)
    file.unlink()  # by hand, while it runs
    assert "process" in machine.ssmd("service", "status")
    assert "removed" in machine.ssmd("service", "uninstall")
    assert machine.pid == 0

    command = [sys.executable, "-m", "ssmd", "serve"]
    with subprocess.Popen(command, env=machine.environment, stdout=subprocess.DEVNULL) as daemon:
        try:
            soon(lambda: machine.serves(daemon.pid), START_S)
            said = machine.ssmd("service", "install", fails=1)
            assert f"process {daemon.pid}" in said
            assert "stop it first: ssmd stop" in said
        finally:
            daemon.terminate()


def test_a_unit_is_printed_where_none_can_be_installed(tmp_path: Path) -> None:
    environment = {**os.environ, "HOME": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path), "PATH": str(tmp_path)}
    for command in ("install", "status"):
        asked = [sys.executable, "-m", "ssmd", "service", command]
        done = subprocess.run(asked, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 1
        assert "systemctl is not installed here" in done.stderr
    for more in ([], ["--system"]) if sys.platform == "linux" else ([],):
        shown = subprocess.run(
            [sys.executable, "-m", "ssmd", "service", "install", "--print", *more],
            env=environment | {"SSMD_PORT": "7999"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert (shown.returncode, shown.stderr) == (0, "")
        assert 'Environment="SSMD_PORT=7999"' in shown.stdout
        assert ("DynamicUser=yes" in shown.stdout) == bool(more)
        assert "LimitCORE=0" in shown.stdout.splitlines()
    assert not list(tmp_path.rglob("*.service"))
