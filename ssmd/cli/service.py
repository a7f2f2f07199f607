"""`ssmd service`: the daemon started by the system, with the machine or at login."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ssmd.cli import options
from ssmd.cli.failure import fail

if TYPE_CHECKING:
    from ssmd.machine.services.service import Definition, Manager

app = typer.Typer(help="The daemon as a service of this computer.", no_args_is_help=True)
System = Annotated[bool, typer.Option("--system", help="A service of the machine, not of this user; needs root.")]
PATHS = frozenset(
    f"SSMD_{name}" for name in ("DATA_DIR", "MODELS_DIR", "CACHE_DIR", "CONFIG", "SOCKET", "API_KEYS_FILE")
)
NOT_RUNNING = 3  # as systemctl and the LSB have it


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

    flags = {"SSMD_DATA_DIR": data_dir, "SSMD_MODELS_DIR": models_dir}
    definition = _definition({name: str(path.absolute()) for name, path in flags.items() if path is not None})
    settings = Settings(data_dir=data_dir, models_dir=models_dir)
    settings.check_exposure()
    manager = _manager(system)
    if show:
        typer.echo(manager.text(definition), nl=False)
        return
    if system:
        _check_reachable(definition.command[0])
    else:
        _check_alone(manager, settings.data_dir)
    changed = manager.install(definition)
    said = "is installed and runs" if changed else "was installed as it is, and runs"
    typer.echo(f"the service {said}; it starts {manager.when}: {manager.file}")
    if manager.name == "systemd" and not system:
        typer.echo("to have it run while nobody is logged in: loginctl enable-linger", err=True)


@app.command("uninstall")
def uninstall(system: System = False) -> None:
    """Stop the service and remove it. Sessions, models and settings stay."""
    manager = _manager(system)
    typer.echo(f"removed {manager.file}" if manager.uninstall() else "no such service was installed")


@app.command("status")
def status(system: System = False) -> None:
    """Say whether the service is installed and runs. Exit code 0 if it runs, 3 if not."""
    manager = _manager(system)
    found = manager.status()
    if not found.installed:
        typer.echo("not installed; install it with: ssmd service install")
        raise typer.Exit(NOT_RUNNING)
    pid = "" if found.pid is None else f", process {found.pid}"
    starts = f"starts {manager.when}" if found.starts else "is not started by itself"
    typer.echo(f"{found.state}{pid}; {starts}: {manager.file}")
    if not found.running:
        typer.echo("what it said last: ssmd service logs", err=True)
        raise typer.Exit(NOT_RUNNING)


@app.command("start")
def start(system: System = False) -> None:
    """Start the service."""
    _installed(system).start()


@app.command("stop")
def stop(system: System = False) -> None:
    """Stop the service, until it is started or the machine is. What it answers has 10 s to come to its end."""
    manager = _installed(system)
    if sys.platform == "win32":
        from ssmd.cli.stop import stop as end

        end()
    manager.stop()


@app.command("logs")
def logs(
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what comes, until Ctrl-C.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", help="Show so many of the last lines.", min=0)] = 50,
    system: System = False,
) -> None:
    """Show what the service wrote, also where it could not start."""
    command = _installed(system).log(lines, follow=follow)
    if command is None:
        from ssmd.cli.logs import logs as own

        own(follow=follow, lines=lines)
    elif code := subprocess.run(command, check=False).returncode:
        raise typer.Exit(code)


def _manager(system: bool) -> Manager:
    from ssmd.machine.services.here import here

    return here(system=system)


def _installed(system: bool) -> Manager:
    manager = _manager(system)
    if not manager.file.exists():
        fail("the service is not installed; install it with: ssmd service install")
    return manager


def _definition(more: dict[str, str]) -> Definition:
    """What the service runs: this installation, with the settings that the variables have now."""
    from ssmd.config import SECRETS, variables
    from ssmd.machine.services.service import Definition
    from ssmd.machine.variables import OTHERS

    kept = {name: value for name in (*variables(), *OTHERS) if (value := os.environ.get(name))}
    for name in SECRETS:
        if (variable := f"SSMD_{name.upper()}") in kept:
            fail(
                f"{variable} is set, and others can read what a service is started with: put the key into the settings "
                "file (`ssmd config path`), and unset the variable"
            )
    for name in PATHS & kept.keys():  # the service has another working directory
        kept[name] = os.path.abspath(os.path.expanduser(kept[name]))
    return Definition((sys.executable, "-m", "ssmd", "serve"), kept | more)


def _check_reachable(python: str) -> None:
    """A service of the machine runs as a user of its own, which has to be able to read this installation."""
    for folder in Path(python).parents:
        if not folder.stat().st_mode & 0o001:
            fail(
                f"the service would run as a user of its own, who cannot look into {folder}; install ssmd where every "
                "user can read it, such as /opt/ssmd, or leave --system out"
            )


def _check_alone(manager: Manager, data_dir: Path) -> None:
    """Refuse beside a daemon that somebody started by hand: it holds the data directory."""
    from ssmd.daemon.discovery import find

    found = find(data_dir) if data_dir.exists() else None
    if found is not None and found.pid != manager.status().pid:
        fail(
            f"a daemon (ssmd {found.version}, process {found.pid}) runs already at {found.place}; "
            "end it first: ssmd stop"
        )
