"""`ssmd doctor`: what works here, what does not, and what to do about it."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ssmd.cli import options

if TYPE_CHECKING:
    from ssmd.config import Settings


def doctor(
    runtime: Annotated[
        str | None,
        typer.Argument(
            metavar="RUNTIME",
            help="Look closer at the artifacts of one: coreml, openvino or npu.",
            callback=options.known_runtime,
        ),
    ] = None,
    report: Annotated[
        Path | None, typer.Option(help="With RUNTIME: write what was found to a file, to be sent.", metavar="FILE")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="With RUNTIME: execute there; an artifact for the NPU on cpu.", metavar="NAME")
    ] = None,
    data_dir: options.DataDir = None,
    models_dir: options.ModelsDir = None,
    as_json: options.Json = False,
) -> None:
    """Check runtimes, data directory and models. Exit code 1 if a model cannot be served from here."""
    import sys

    from ssmd import __version__
    from ssmd.config import Settings, config_file

    settings = Settings(data_dir=data_dir, models_dir=models_dir)
    if runtime is not None:
        _look(runtime, settings.models_dir, report, device, as_json)
        return
    found: dict[str, Any] = {
        "version": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "settings_file": str(config_file()) if config_file().exists() else None,
        "data_dir": {"path": str(settings.data_dir), "problem": _data_problem(settings)},
        "models_dir": str(settings.models_dir),
        "runtimes": _runtimes(),
        "models": _models(settings.models_dir),
    }
    usable_devices = any(not d["problem"] for r in found["runtimes"] for d in r["devices"])
    servable = any(not m["problem"] for m in found["models"])
    found["ok"] = usable_devices and servable and found["data_dir"]["problem"] is None
    if as_json:
        typer.echo(json.dumps(found, indent=1))
    else:
        _print(found)
    sys.exit(0 if found["ok"] else 1)


class LookError(ValueError):
    """A closer look that cannot be taken; the message says why."""


def _look(runtime: str, models_dir: Path, report: Path | None, device: str | None, as_json: bool) -> None:
    """The runtime's own look at its artifacts, where it has one: `look` of its module `doctor`."""
    from importlib import import_module
    from importlib.metadata import entry_points

    from ssmd.installed import installed, is_for
    from ssmd.model.artifact import Artifact
    from ssmd.runtime.protocol import runtime_names

    packages = {e.name: e.module.partition(".")[0] for e in entry_points(group="ssmd.runtimes")}
    package = packages.get("openvino" if runtime == "npu" else runtime)
    if package is None:
        raise LookError(f"no runtime is named {runtime!r}; there are: {', '.join(runtime_names())}")
    try:
        module = import_module(f"{package}.doctor")
    except ModuleNotFoundError as err:
        if err.name != f"{package}.doctor":
            raise
        raise LookError(f"there is no closer look at {runtime}; `ssmd doctor` says what works") from err
    if report is not None and not report.parent.is_dir():  # before minutes of work
        raise LookError(f"there is no folder {report.parent} to write the report to")
    mine = [one for one in installed(models_dir) if one.manifest and is_for(one.manifest, runtime)]
    artifacts = [Artifact.open(one.path) for one in mine if not one.problem]
    found = module.look(artifacts, (lambda line: None) if as_json else typer.echo, device)
    for one in mine:
        if one.problem:
            typer.echo(f"{one.path}: {one.problem}", err=True)
    if not mine:
        typer.echo(f"no artifact of {runtime} is in {models_dir}; ssmd build --runtime {runtime} makes one", err=True)
    if as_json:
        typer.echo(json.dumps(found, indent=1))
    if report is not None:
        report.write_text(json.dumps(found, indent=1) + "\n")
        typer.echo(f"written to {report}", err=True)
    if any(one.problem for one in mine) or not found["ok"]:
        raise typer.Exit(1)


def _data_problem(settings: Settings) -> str | None:
    from ssmd.config import SettingsError

    if not os.path.exists(settings.data_dir):  # made when something is first kept
        above = next(p for p in settings.data_dir.parents if os.path.exists(p))
        return None if os.access(above, os.W_OK | os.X_OK) else f"it cannot be made: {above} cannot be written"
    try:
        settings.prepare()
    except SettingsError as err:
        return str(err)
    return None


def _runtimes() -> list[dict[str, Any]]:
    from ssmd.runtime.protocol import RuntimeUnavailable, get_runtime, runtime_names

    found = []
    for name in runtime_names():
        entry: dict[str, Any] = {"name": name, "problem": None, "devices": []}
        try:
            devices = get_runtime(name).devices()
        except RuntimeUnavailable as err:
            entry["problem"] = str(err)
        except Exception as err:
            entry["problem"] = f"it cannot say which devices it has ({type(err).__name__}: {err})"
        else:
            entry["devices"] = [
                {"name": d.name, "description": d.description, "problem": d.why_not or None} for d in devices
            ]
        found.append(entry)
    return found


def _models(folder: Path) -> list[dict[str, Any]]:
    from ssmd.installed import installed, unusable

    return [
        {
            "name": one.name,
            "path": str(one.path),
            "problem": one.problem or (unusable(one.manifest) if one.manifest else "") or None,
        }
        for one in installed(folder)
    ]


def _print(report: dict[str, Any]) -> None:
    typer.echo(f"ssmd {report['version']}, Python {report['python']}, {report['platform']}")
    typer.echo(f"settings file  {report['settings_file'] or 'none'}")
    _line(report["data_dir"]["problem"], f"data directory {report['data_dir']['path']}")
    for runtime in report["runtimes"]:
        if runtime["problem"]:
            _line(runtime["problem"], f"runtime {runtime['name']}")
        for device in runtime["devices"]:
            _line(device["problem"], f"runtime {runtime['name']} on {device['name']} ({device['description']})")
    if not report["models"]:
        _line("none; a first one comes with: ssmd pull smollm2", f"models in {report['models_dir']}")
    for model in report["models"]:
        _line(model["problem"], f"model {model['name']} ({model['path']})")


def _line(problem: str | None, what: str) -> None:
    typer.echo(f"{'  ok ' if problem is None else '  no '} {what}{'' if problem is None else f': {problem}'}")
