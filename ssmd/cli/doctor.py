"""`ssmd doctor`: what works here, what does not, and what to do about it."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ssmd.cli import options

if TYPE_CHECKING:
    from ssmd.config import Settings


def doctor(
    data_dir: options.DataDir = None,
    models_dir: options.ModelsDir = None,
    as_json: options.Json = False,
) -> None:
    """Check runtimes, data directory and models. Exit code 1 if a model cannot be served from here."""
    import sys

    from ssmd import __version__
    from ssmd.config import Settings, config_file

    settings = Settings(data_dir=data_dir, models_dir=models_dir)
    report: dict[str, Any] = {
        "version": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "settings_file": str(config_file()) if config_file().exists() else None,
        "data_dir": {"path": str(settings.data_dir), "problem": _data_problem(settings)},
        "models_dir": str(settings.models_dir),
        "runtimes": _runtimes(),
        "models": _models(settings.models_dir),
    }
    usable_devices = any(not d["problem"] for r in report["runtimes"] for d in r["devices"])
    servable = any(not m["problem"] for m in report["models"])
    report["ok"] = usable_devices and servable and report["data_dir"]["problem"] is None
    if as_json:
        typer.echo(json.dumps(report, indent=1))
    else:
        _print(report)
    sys.exit(0 if report["ok"] else 1)


def _data_problem(settings: Settings) -> str | None:
    from ssmd.config import SettingsError

    if not settings.data_dir.exists():  # made when something is first kept
        return None
    try:
        settings.prepare()
    except SettingsError as err:
        return str(err)
    return None


def _runtimes() -> list[dict[str, Any]]:
    from ssmd.runtime import RuntimeUnavailable, get_runtime, runtime_names

    found = []
    for name in runtime_names():
        entry: dict[str, Any] = {"name": name, "problem": None, "devices": []}
        try:
            devices = get_runtime(name).devices()
        except RuntimeUnavailable as err:
            entry["problem"] = str(err)
        else:
            entry["devices"] = [
                {"name": d.name, "description": d.description, "problem": d.why_not or None} for d in devices
            ]
        found.append(entry)
    return found


def _models(folder: Path) -> list[dict[str, Any]]:
    from ssmd.models import installed, unusable

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
