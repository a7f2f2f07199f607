"""`ssmd config` and `ssmd version`: the settings in effect, and where each comes from."""

from __future__ import annotations

import json
import math
from typing import Annotated, Any

import typer

from ssmd import __version__
from ssmd.cli import options
from ssmd.cli.output import USAGE, fail
from ssmd.machine.duration import show_duration
from ssmd.machine.spelling import did_you_mean, printable

app = typer.Typer(help="The settings that count here.", no_args_is_help=True)
MOST_WIDE = 40  # characters of a value up to which its column grows
DURATIONS, FOR_EVER = ("keep_alive",), "-1"  # in the settings file's form; JSON has no infinity
MOST_CHARS = 4096  # characters of a value or a path that are printed


@app.command("show")
def show(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME...]", help="Only these settings, such as port.")
    ] = None,
    runtime: options.Runtime = None,
    device: options.Device = None,
    threads: options.Threads = None,
    config_file: options.Config = None,
    data_dir: options.DataDir = None,
    models_dir: options.ModelsDir = None,
    quota: options.Quota = None,
    offline: options.Offline = False,
    as_json: options.Json = False,
) -> None:
    """Show every setting, its value, and where that comes from: an option, a variable, the settings file, or the
    default. A key is never shown."""
    from ssmd.config import SECRETS, Settings, origin

    flags: dict[str, Any] = {
        "data_dir": data_dir,
        "device": device,
        "models_dir": models_dir,
        "offline": offline or None,
        "quota": quota,
        "runtime": runtime,
        "threads": threads,
    }
    settings, given = Settings(**flags), [name for name, value in flags.items() if value is not None]
    for name in names or []:
        if name not in Settings.model_fields:
            meant = did_you_mean(name, Settings.model_fields) or f"; there are: {', '.join(Settings.model_fields)}"
            fail(f"there is no setting {printable(name)}{meant}", USAGE)
    rows = []
    for name, value in settings.model_dump(mode="json").items():
        if not names or name in names:
            if value == math.inf:
                value = FOR_EVER
            elif name in DURATIONS and value is not None and not as_json:
                value = show_duration(value)
            came, hidden = origin(name, given), name in SECRETS and value is not None
            rows.append({"name": name, "value": None if hidden else value, "hidden": hidden, "from": came.kind})
            rows[-1]["where"] = None if came.kind == "default" else came.where
    if as_json:
        typer.echo(json.dumps(rows, indent=1))
        return
    lines = [(str(row["name"]), _written(row), str(row["where"] or row["from"])) for row in rows]
    width = max(len(name) for name, _, _ in lines)
    wide = min(MOST_WIDE, max(len(value) for _, value, _ in lines))
    for name, value, where in lines:
        typer.echo(f"{name:<{width}}  {value:<{wide}}  {printable(where, MOST_CHARS)}")


def _written(row: dict[str, Any]) -> str:
    """Format a value as in the settings file; "-" for None, and a key is hidden."""
    if row["hidden"]:
        return "(set; not shown)"
    return "-" if row["value"] is None else printable(json.dumps(row["value"], ensure_ascii=False), MOST_CHARS)


@app.command("path")
def path(config_file: options.Config = None) -> None:
    """Print the path of the settings file, which need not exist."""
    from ssmd.config import config_file as place

    typer.echo(str(place()))
    if not place().exists():
        typer.echo("there is no such file yet; docs/configuration.md lists its settings", err=True)


def version() -> None:
    """Print the version."""
    typer.echo(f"ssmd {__version__}")
