"""`ssmd rm`: the removal of an installed model's artifacts."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ssmd.cli import completion, options
from ssmd.cli.output import fail

if TYPE_CHECKING:
    from ssmd.installed import InstalledModel


def remove(
    model: Annotated[
        str,
        typer.Argument(metavar="NAME", help="Name of an installed model.", autocompletion=completion.models),
    ],
    runtime: Annotated[str | None, typer.Option(help="Remove this runtime's artifact alone.", metavar="NAME")] = None,
    quant: Annotated[
        str | None, typer.Option(help="Remove its artifacts in this quantization alone.", metavar="NAME")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    data_dir: options.DataDir = None,
    models_dir: options.ModelsDir = None,
    as_json: options.Json = False,
) -> None:
    """Remove an installed model. Its conversations stay, and go on when it is installed again."""
    from ssmd.config import Settings
    from ssmd.installed import discard, removable
    from ssmd.machine.size import show_size
    from ssmd.model.artifact import NAME_PATTERN

    if not re.fullmatch(NAME_PATTERN, model):
        fail(f"{model!r} is not a valid model name; `ssmd list` shows the installed models", 2)
    settings = Settings(data_dir=data_dir, models_dir=models_dir)
    found = removable(model, settings.models_dir, runtime, quant)
    sizes = [_size(one.path) for one in found]
    for one, size in zip(found, sizes, strict=True):
        typer.echo(f"{one.path}: {show_size(size)}", err=True)
    _tell_of_daemon(settings.data_dir, found)
    if not yes:
        if not sys.stdin.isatty():
            fail("refusing to remove without confirmation; pass --yes", 2)
        typer.confirm("Remove this?", abort=True, err=True)
    discard(found)
    if as_json:
        typer.echo(json.dumps({"removed": [str(one.path) for one in found], "bytes": sum(sizes)}))
        return
    typer.echo(f"removed {model}, {show_size(sum(sizes))}; its conversations stay, for when it is installed again")


def _size(folder: Path) -> int:
    """Return the bytes of all files in a folder. Follows no link."""
    return sum((Path(at) / name).lstat().st_size for at, _, names in os.walk(folder) for name in names)


def _tell_of_daemon(data_dir: Path, found: Sequence[InstalledModel]) -> None:
    """Print a note if the running daemon has one of them loaded. A daemon that does not answer is ignored."""
    from ssmd.cli.daemon import METRICS, reached
    from ssmd.daemon.discovery import DaemonError

    try:
        client = reached(data_dir)
        said = client.get(METRICS) if client is not None else None
    except DaemonError:
        return
    if not isinstance(said, dict):
        return
    models = said.get("models")
    models = [one for one in models if isinstance(one, dict)] if isinstance(models, list) else []
    loaded = [one.get("build") for one in models if one.get("state") not in ("unloaded", "failed")]
    manifests = [one.manifest for one in found if one.manifest is not None]
    if any(one.build in loaded or one.name == said.get("program") for one in manifests):
        typer.echo("note: the running daemon has it loaded, and answers with it until it unloads it", err=True)
