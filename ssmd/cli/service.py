"""`ssmd service`: the daemon started by the system, with the machine or at login."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ssmd.cli import options
from ssmd.cli.output import fail

if TYPE_CHECKING:
    from ssmd.machine.services.service import Definition, Manager

app = typer.Typer(help="The daemon as a service of this computer.", no_args_is_help=True)
System = Annotated[bool, typer.Option("--system", help="A service of the machine, not of this user; needs root.")]
PATHS = frozenset(
    f"SSMD_{name}" for name in ("DATA_DIR", "MODELS_DIR", "CACHE_DIR", "CONFIG", "SOCKET", "API_KEYS_FILE")
)
FOLDERS = ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME")  # they decide where ssmd's folders are
START_S = 60.0  # longest wait until the daemon answers
SYSTEM_S = 8.0  # time in which a failing service of the machine fails: its data directory cannot be read
DOWN_S = 1.0  # shorter than a manager's wait before it restarts the daemon
LOOK_S = 0.2
NOT_RUNNING = 3  # exit code, as in systemctl and the LSB


@app.command("install")
def install(
    config_file: options.Config = None,
    data_dir: options.DataDir = None,
    models_dir: options.ModelsDir = None,
    system: System = False,
    show: Annotated[bool, typer.Option("--print", help="Print what would be written, and do nothing.")] = False,
) -> None:
    """Have the daemon started when you log in (--system: with the machine), and start it now.

    It serves every installed model as it is asked for. What the variables SSMD_... say now holds for the service too;
    a key has to be in the settings file. Installed again, it takes on what has changed.
    """
    from ssmd.config import Settings

    if system:  # it does not use root's own settings
        os.environ["XDG_CONFIG_HOME"] = "/etc"
    flags = {"SSMD_DATA_DIR": data_dir, "SSMD_MODELS_DIR": models_dir}
    given = {name: str(path.absolute()) for name, path in flags.items() if path is not None}
    definition = _definition(given, system=system)
    settings = Settings(data_dir=data_dir, models_dir=models_dir)
    settings.check_exposure()
    manager = _manager(system, ask=not show)
    if show:
        typer.echo(manager.text(definition), nl=False)
        return
    if system:
        _check_reachable(definition.command[0])
    else:
        _check_alone(manager, settings.data_dir)
    changed = manager.install(definition)
    if not changed and not system and _is_of_another_version(settings.data_dir):
        manager.stop()
        manager.start()
        changed = True
    _wait(manager, system)
    said = "is installed and runs" if changed else "was installed already, and runs"
    typer.echo(f"the service {said}; it starts {manager.when}: {manager.file}")
    if manager.name == "systemd" and not system:
        typer.echo("to run it while you are not logged in: loginctl enable-linger", err=True)


@app.command("uninstall")
def uninstall(system: System = False) -> None:
    """Stop the service and remove it. Sessions, models and settings stay."""
    manager = _manager(system)
    typer.echo(f"removed {manager.file}" if manager.uninstall() else "the service was not installed")


@app.command("status")
def status(system: System = False) -> None:
    """Show if the service is installed and runs. Exit code 0 if it runs, 3 if not."""
    manager = _manager(system)
    found = manager.status()
    if not found.installed:
        typer.echo("not installed; install it with: ssmd service install")
        raise typer.Exit(NOT_RUNNING)
    pid = "" if found.pid is None else f", process {found.pid}"
    starts = f"starts {manager.when}" if found.starts else "is not started by itself"
    typer.echo(f"{found.state}{pid}; {starts}: {manager.file}")
    if not found.running:
        typer.echo("its last messages: ssmd service logs", err=True)
        raise typer.Exit(NOT_RUNNING)


@app.command("start")
def start(system: System = False) -> None:
    """Start the service, and wait until it answers."""
    manager = _installed(system)
    manager.start()
    _wait(manager, system)


@app.command("stop")
def stop(system: System = False) -> None:
    """Stop the service, until it is started or the machine is. What it answers has 10 s to come to its end."""
    manager = _installed(system)
    if sys.platform == "win32":
        from ssmd.cli.daemon import stop as end

        end(data_dir=manager.data_dir())
    manager.stop()


@app.command("logs")
def logs(
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what comes, until Ctrl-C.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", help="Show so many of the last lines.", min=0)] = 50,
    system: System = False,
) -> None:
    """Show what the service wrote, also where it could not start."""
    manager = _installed(system)
    command = manager.log(lines, follow=follow)
    if command is None:
        from ssmd.cli.daemon import logs as own

        own(follow=follow, lines=lines, data_dir=manager.data_dir())
    elif code := subprocess.run(command, check=False).returncode:
        raise typer.Exit(code)


def _manager(system: bool, *, ask: bool = True) -> Manager:
    from ssmd.machine.services.here import here

    return here(system=system, ask=ask)


def _installed(system: bool) -> Manager:
    manager = _manager(system)
    if not manager.status().installed:
        fail("the service is not installed; install it with: ssmd service install")
    return manager


def _wait(manager: Manager, system: bool) -> None:
    """Wait until the daemon announces its address; a service of the machine must have run for SYSTEM_S.

    Fails with the daemon's last line if it ends before.
    """
    from ssmd.daemon.discovery import find
    from ssmd.daemon.place import data_dir

    where = manager.data_dir() or data_dir(None)
    until = time.monotonic() + (SYSTEM_S if system else START_S)
    ran = time.monotonic()
    while time.monotonic() < until:
        now = manager.status()
        if now.running:
            ran = time.monotonic()
            if not system and where.exists() and (found := find(where)) and now.pid in (None, found.pid):
                return
        elif time.monotonic() - ran > DOWN_S:
            fail(f"the service is installed, and its daemon has ended: {_last(manager, where)}")
        time.sleep(LOOK_S)


def _last(manager: Manager, data_dir: Path) -> str:
    """Return the last line that the daemon wrote, or advice where to look."""
    from ssmd.daemon.logfile import Reader

    if command := manager.log(20, follow=False):
        shown = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
        lines = [line for line in shown.stdout.splitlines() if "error: " in line]
    else:
        try:
            lines = [line for line in Reader(data_dir).last(1) if " ended: " in line]
        except OSError:
            lines = []
    return lines[-1] if lines else "see `ssmd service logs`, or run `ssmd serve`"


def _is_of_another_version(data_dir: Path) -> bool:
    """Return True if the running daemon was started before an upgrade."""
    from ssmd import __version__
    from ssmd.daemon.discovery import find

    found = find(data_dir)
    return found is not None and found.version != __version__


def _definition(more: dict[str, str], *, system: bool) -> Definition:
    """Define the command of the service: this installation, with the present values of the variables."""
    from ssmd.config import SECRETS, environment, variables
    from ssmd.machine.services.service import Definition
    from ssmd.machine.variables import OTHERS

    now = environment()
    kept = {name: value for name in (*variables(), *OTHERS) if (value := now.get(name))}
    for name in SECRETS:
        if (variable := f"SSMD_{name.upper()}") in kept:
            fail(
                f"{variable} is set, and other users can read a service's variables: put the key into the settings "
                "file (`ssmd config path`), and unset the variable"
            )
    for name in PATHS & kept.keys():  # the service has another working directory
        kept[name] = os.path.abspath(os.path.expanduser(kept[name]))
    if not system:  # the system's manager may have other folders
        kept |= {name: value for name in FOLDERS if os.path.isabs(value := now.get(name, ""))}
    # -P: a file in its working directory, such as a random.py in a home, must not be imported as a module
    return Definition((sys.executable, "-P", "-m", "ssmd", "serve"), kept | more)


def _check_reachable(python: str) -> None:
    """Fail if a service of the machine could not read this installation: it runs as a user of its own."""
    for folder in Path(python).parents:
        if not folder.stat().st_mode & 0o001:
            fail(
                f"the service would run as a user of its own, which cannot read {folder}; install ssmd where every "
                "user can read it, such as /opt/ssmd, or leave --system out"
            )


def _check_alone(manager: Manager, data_dir: Path) -> None:
    """Fail if a daemon that is not the service holds the data directory."""
    from ssmd.daemon.discovery import find

    found, service = find(data_dir) if data_dir.exists() else None, manager.status()
    if found is not None and not (service.running and service.pid in (None, found.pid)):
        fail(
            f"a daemon (ssmd {found.version}, process {found.pid}) runs already at {found.place}; "
            "stop it first: ssmd stop"
        )
