"""`ssmd doctor`: a report of what works here and what does not, with the next step."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ssmd.cli import options
from ssmd.machine.spelling import printable

if TYPE_CHECKING:
    from ssmd.config import Settings
    from ssmd.model.artifact import Manifest
    from ssmd.runtime.devices import RuntimeStatus

BUSY_MS = 2000  # longest wait for a daemon that writes

MOST_CHARS = 1000  # characters of a printed line: reasons come from libraries and files
FULL_BYTES = 32 << 20  # free disk below which states are not stored


def doctor(
    runtime: Annotated[
        str | None,
        typer.Argument(
            metavar="RUNTIME",
            help="Look closer at the artifacts of one, if it can: coreml, openvino, npu.",
            callback=options.known_runtime,
        ),
    ] = None,
    report: Annotated[
        Path | None, typer.Option(help="With RUNTIME: write what was found to a file, to be sent.", metavar="FILE")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="With RUNTIME: execute there; an artifact for the NPU on cpu.", metavar="NAME")
    ] = None,
    config_file: options.Config = None,
    data_dir: options.DataDir = None,
    models_dir: options.ModelsDir = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Every device, and all that is known of it.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Say what works here and what to do next: runtimes, models, settings, data directory, daemon, disk and memory.

    Every runtime's library is loaded for real, in a process of its own. Exit code 1 if no model can answer here.
    """
    from ssmd.cli.usable_settings import usable
    from ssmd.config import Settings

    if runtime is not None:
        _look(runtime, Settings(data_dir=data_dir, models_dir=models_dir).models_dir, report, device, as_json)
        return
    settings, wrong = usable(data_dir=data_dir, models_dir=models_dir)
    found = examined(settings, wrong)
    if as_json:
        typer.echo(json.dumps(found, indent=1))
    else:
        for line in lines(found, verbose=verbose):
            typer.echo(line)
    raise typer.Exit(0 if found["ok"] else 1)


def examined(settings: Settings, wrong: str) -> dict[str, Any]:
    """Examine everything, in the form that --json prints. `wrong`: the problem of the settings, or ""."""
    from ssmd import __version__
    from ssmd.config import config_file
    from ssmd.machine.memory import available
    from ssmd.runtime.devices import find

    runtimes = find()
    found: dict[str, Any] = {
        "version": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "settings_file": str(config_file()) if config_file().exists() else None,
        "settings_problem": wrong or None,
        "daemon": _daemon(settings.data_dir),
        "data_dir": _data_dir(settings),
        "memory": {"available_bytes": available()},
        "models_dir": str(settings.models_dir),
        "runtimes": [
            {
                "name": one.name,
                "problem": one.problem or None,
                "why_not": one.why_not or None,
                "devices": [
                    {"name": d.name, "description": d.description, "problem": d.why_not or None} for d in one.devices
                ],
            }
            for one in runtimes
        ],
        **_models(settings.models_dir, {one.name: one for one in runtimes}),
    }
    usable = any(not one["why_not"] for one in found["runtimes"])
    servable = any(not one["problem"] for one in found["models"])
    sound = not (wrong or found["data_dir"]["problem"] or found["models_problem"])
    found["ok"] = usable and servable and sound
    return found


def _daemon(data_dir: Path) -> dict[str, Any] | None:
    """Describe the daemon that runs on the data directory, without its token; None if none runs."""
    from ssmd.daemon.discovery import DaemonError, find, running

    nowhere = {"url": None, "socket": None, "pid": None, "version": None, "started_at": None}
    try:
        address = find(data_dir)
        process = None if address else running(data_dir)
    except DaemonError as err:
        return {**nowhere, "problem": str(err)}
    if address is not None:
        told = {"url": address.url, "socket": None if address.socket is None else str(address.socket)}
        told |= {"version": address.version}
        return {**nowhere, **told, "pid": address.pid, "started_at": address.started_at, "problem": None}
    if process is None:
        return None
    return {
        **nowhere,
        "pid": process or None,
        "problem": "it uses the data directory and does not announce an address",
    }


def _data_dir(settings: Settings) -> dict[str, Any]:
    import shutil

    folder = settings.data_dir
    problem = _data_problem(settings)
    stored, damage = (None, None) if problem else _stored(folder)
    above = next(p for p in (folder, *folder.parents) if os.path.exists(p))
    try:
        free = shutil.disk_usage(above).free
    except OSError:
        free = None
    sizes = {"free_bytes": free, "stored_bytes": stored, "quota_bytes": settings.quota}
    return {"path": str(folder), "problem": problem or damage, "open_to_others": _open_to_others(folder), **sizes}


def _open_to_others(folder: Path) -> bool:
    """Return True if other users can open the data directory because its disk keeps no permissions."""
    from ssmd.machine.folder import others_open

    try:
        return others_open(folder)
    except OSError:  # it does not exist yet
        return False


def _data_problem(settings: Settings) -> str | None:
    from ssmd.config import SettingsError

    if not os.path.exists(settings.data_dir):  # it is made when something is first stored
        above = next(p for p in settings.data_dir.parents if os.path.exists(p))
        return None if os.access(above, os.W_OK | os.X_OK) else f"it cannot be made: {above} cannot be written"
    try:
        settings.prepare()
    except SettingsError as err:
        return str(err)
    return None


def _stored(data_dir: Path) -> tuple[int | None, str | None]:
    """Return the bytes of stored checkpoints and None, or None and the problem of the store.

    The store is only read. Both are None if the daemon uses it alone, on a disk without memory that processes share.
    """
    from ssmd.sessions.rows import database, holding, opening
    from ssmd.sessions.rows.faults import StoreHeldAlone
    from ssmd.sessions.turn import StoreError

    file = data_dir / database.FILE
    if not file.exists():
        return 0, None
    try:
        opening.check_revision(file, busy_ms=BUSY_MS)
        engine = database.open_database(data_dir, busy_ms=BUSY_MS)
        try:
            with database.reading(engine, file) as connection:
                return holding.stored_bytes(connection) if opening.current(connection) else 0, None
        finally:
            engine.dispose()
    except StoreError as err:
        return None, None if isinstance(err, StoreHeldAlone) and err.process else str(err)


def _models(folder: Path, runtimes: Mapping[str, RuntimeStatus]) -> dict[str, Any]:
    """Describe the installed models, and why they cannot be served. `runtimes`: those found here, by name."""
    from ssmd.installed import ModelError, installed
    from ssmd.runtime.devices import why_not

    def unusable(manifest: Manifest) -> str:
        found = runtimes.get(manifest.runtime)
        if found is None or found.problem:
            return found.problem if found else f"there is no runtime {manifest.runtime!r} here"
        return why_not(manifest.runtime, found.devices, manifest.device_class)

    try:
        there = installed(folder)
    except ModelError as err:
        return {"models": [], "models_problem": str(err)}
    models = [
        {
            "name": one.name,
            "path": str(one.path),
            "runtime": one.manifest and one.manifest.runtime,
            "quantization": one.manifest and one.manifest.quantization,
            "bytes": one.nbytes,
            "problem": one.problem or (unusable(one.manifest) if one.manifest else "") or None,
        }
        for one in there
    ]
    return {"models": models, "models_problem": None}


class LookError(ValueError):
    """A closer look that cannot be taken; the message says why."""


def _look(runtime: str, models_dir: Path, report: Path | None, device: str | None, as_json: bool) -> None:
    """Run the runtime's own examination of its artifacts, if it has one: `look` of its module `doctor`."""
    from importlib import import_module

    from ssmd.installed import installed, is_for
    from ssmd.model.artifact import Artifact
    from ssmd.refit import catalog
    from ssmd.runtime.info import package_of, runtime_names, target_of

    package = package_of(target_of(runtime)[0].name)
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
        way = f"ssmd pull smollm2 --runtime {runtime}" if catalog.names(runtime) else f"ssmd build --runtime {runtime}"
        typer.echo(f"no artifact of {runtime} is in {models_dir}; {way} makes one", err=True)
    if as_json:
        typer.echo(json.dumps(found, indent=1))
    if report is not None:
        report.write_text(json.dumps(found, indent=1) + "\n", newline="\n")
        typer.echo(f"written to {report}", err=True)
    if any(one.problem for one in mine) or not found["ok"]:
        raise typer.Exit(1)


def lines(found: dict[str, Any], *, verbose: bool = False) -> Iterator[str]:
    """Yield the lines of the report; `verbose`: a line for every device, and reasons in full."""
    servable = [model for model in found["models"] if not model["problem"]]
    usable = [one for one in found["runtimes"] if not one["why_not"]]
    yield _line(f"ssmd {found['version']} {_verdict(found, usable, servable)}")
    yield _line(f"next: {_next(found, usable, servable)}")
    yield ""
    findings = list(_findings(found, verbose=verbose))
    yield from (_line(f"  ok  {text}") for good, text in findings if good)
    yield from (_line(f"  no  {text}") for good, text in findings if not good)
    if verbose:
        yield _line(f"Python {found['python']}, {found['platform']}")
    else:
        yield "-v: every device, and reasons in full"


def _line(text: str) -> str:
    return printable(" ".join(text.split()) if "\n" in text else text, MOST_CHARS)


def _verdict(found: dict[str, Any], usable: list[dict[str, Any]], servable: list[dict[str, Any]]) -> str:
    if found["settings_problem"]:
        return "cannot start here: its settings are refused"
    if not usable:
        return "cannot answer here yet: no runtime works"
    if found["data_dir"]["problem"]:
        return "cannot keep anything here: its data directory cannot be used"
    if not servable:
        return "cannot answer here yet: no model is ready"
    names = list(dict.fromkeys(model["name"] for model in servable))
    return f"works here: {_listed(names)} can answer, with {_listed(sorted({m['runtime'] for m in servable}))}"


def _next(found: dict[str, Any], usable: list[dict[str, Any]], servable: list[dict[str, Any]]) -> str:
    """Return the next step."""
    if found["settings_problem"]:
        return "correct the settings, as described below"
    if not usable:
        from ssmd.machine.installation import to_add
        from ssmd.runtime.info import infos

        here = sys.platform, platform.machine().lower()
        return f"install a runtime: {to_add(next(info.name for info in infos() if info.suggested(*here)))}"
    if found["data_dir"]["problem"]:
        return "make the data directory usable, or choose another one with SSMD_DATA_DIR"
    if not servable:
        from ssmd.refit import catalog

        broken = [m["name"] for m in found["models"] if m["name"] in catalog.names()]
        return f"ssmd pull {broken[0]} --force" if broken else "ssmd pull smollm2"
    name, daemon = servable[0]["name"], found["daemon"]
    if daemon and daemon["url"]:
        return f"ssmd run {name}, or an OpenAI client at {daemon['url']}/v1"
    return f"ssmd run {name}, or for OpenAI clients: ssmd serve"


def _findings(found: dict[str, Any], *, verbose: bool) -> Iterator[tuple[bool, str]]:
    """Yield the findings: (True if it is well, its description)."""
    if found["settings_problem"]:
        yield False, f"settings: {found['settings_problem']} (below, defaults stand for it)"
    elif found["settings_file"]:
        yield True, f"settings file {found['settings_file']}"
    yield from map(_model, found["models"])
    if found["models_problem"]:
        yield False, found["models_problem"]
    elif not found["models"]:
        yield False, f"models in {found['models_dir']}: none"
    for runtime in found["runtimes"]:
        yield from _devices(runtime) if verbose else [_runtime(runtime)]
    yield from _places(found)


def _model(model: dict[str, Any]) -> tuple[bool, str]:
    from ssmd.machine.size import show_size

    if model["problem"]:
        return False, f"model {model['name']} ({model['path']}): {model['problem']}"
    size = show_size(model["bytes"])
    return True, f"model {model['name']} for {model['runtime']}, {model['quantization']}, {size} ({model['path']})"


def _runtime(runtime: dict[str, Any]) -> tuple[bool, str]:
    """Describe a runtime in one line: its usable devices, the first one in detail, or why it cannot be used."""
    name, usable = runtime["name"], [d for d in runtime["devices"] if not d["problem"]]
    if runtime["why_not"]:
        return False, f"runtime {name}: {runtime['why_not'].partition('. ')[0]}"
    return True, f"runtime {name} on {_listed([d['name'] for d in usable])} ({usable[0]['description']})"


def _devices(runtime: dict[str, Any]) -> Iterator[tuple[bool, str]]:
    if runtime["problem"]:
        yield False, f"runtime {runtime['name']}: {runtime['problem']}"
    for device in runtime["devices"]:
        what = f"runtime {runtime['name']} on {device['name']} ({device['description']})"
        yield not device["problem"], what + (f": {device['problem']}" if device["problem"] else "")


def _places(found: dict[str, Any]) -> Iterator[tuple[bool, str]]:
    """Yield the findings on the data directory and its disk, on memory, and on the daemon."""
    from ssmd.machine.size import show_size

    place = found["data_dir"]
    if place["problem"]:
        yield False, f"data directory {place['path']}: {place['problem']}"
    else:
        stored, quota = place["stored_bytes"], show_size(place["quota_bytes"])
        said = "only the daemon can read its store" if stored is None else f"{show_size(stored)} stored"
        yield True, f"data directory {place['path']}: {said}, of a quota of {quota}"
    if place["open_to_others"]:
        yield (
            False,
            f"data directory {place['path']}: its disk keeps no permissions, so its other users can read everything",
        )
    if place["free_bytes"] is not None:
        free = f"disk: {show_size(place['free_bytes'])} free"
        if place["free_bytes"] < FULL_BYTES:
            yield False, f"{free}: no state can be stored; free some space, or remove sessions: ssmd session rm"
        else:
            yield True, free
    memory = found["memory"]["available_bytes"]
    if memory is not None:
        yield True, f"memory: {show_size(memory)} free"
    daemon = found["daemon"]
    if daemon is None:
        yield True, "daemon: none runs on this data directory"
    elif daemon["problem"]:
        process = f" (process {daemon['pid']})" if daemon["pid"] else ""
        yield False, f"daemon{process}: {daemon['problem']}"
    else:
        where = daemon["url"] or f"the socket {daemon['socket']}"
        minutes = max(0, time.time() - daemon["started_at"]) / 60
        since = f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.0f} h"
        other = "" if daemon["version"] == found["version"] else f"; this is {found['version']}"
        yield True, f"daemon: ssmd {daemon['version']} at {where}, process {daemon['pid']}, for {since}{other}"


def _listed(names: list[str]) -> str:
    return ", ".join(names[:-1]) + (" and " if names[1:] else "") + names[-1]
