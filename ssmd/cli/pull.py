"""`ssmd pull`: a source checkpoint fetched from the Hugging Face hub."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ssmd.cli import options
from ssmd.cli.failure import INTERRUPTED

if TYPE_CHECKING:
    from ssmd.config import Settings
    from ssmd.hub import HubFile
    from ssmd.sources import Pulled


def pull(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Such as ibm-granite/granite-4.0-h-350m.")],
    revision: Annotated[str, typer.Option(help="Branch, tag or commit.", metavar="REV")] = "main",
    to: Annotated[
        Path | None, typer.Option(help="A new folder to fetch into, instead of the data directory.", metavar="DIR")
    ] = None,
    data_dir: options.DataDir = None,
    as_json: options.Json = False,
) -> None:
    """Fetch a source checkpoint from the Hugging Face hub; the same command goes on where a broken one stopped.

    Only safetensors, json, tokenizer and chat template; pickled weights are refused. HF_ENDPOINT names another hub,
    HF_TOKEN is sent to that hub alone, with HF_HUB_OFFLINE=1 nothing is fetched.
    """
    from ssmd.config import Settings

    settings = Settings(data_dir=data_dir)
    settings.prepare()
    done = fetch(name, revision, settings, to, quiet=as_json)
    if as_json:
        fields = {"name": done.name, "revision": done.revision, "commit": done.commit, "path": str(done.path)}
        typer.echo(json.dumps({**fields, "fetched": done.fetched, "files": done.files}, indent=1))
        return
    typer.echo(f"{done.path}; try: ssmd build {name if to is None else done.path}")


def fetch(name: str, revision: str, settings: Settings, to: Path | None = None, *, quiet: bool = False) -> Pulled:
    """Pull, with bars on a terminal, and say which commit it is. `quiet`: nothing on stdout."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    from ssmd.size import show_size
    from ssmd.sources import pull as pull_source

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    try:
        with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
            tasks = {}

            def progress(file: HubFile, here: int) -> None:
                if file.name not in tasks:
                    tasks[file.name] = bar.add_task(file.name, total=file.size)
                    bar.reset(tasks[file.name], completed=here)  # what an earlier run fetched is no speed of this one
                bar.update(tasks[file.name], completed=here)

            done = pull_source(name, revision, settings.data_dir, progress, to)
    except KeyboardInterrupt:
        typer.echo("stopped; what came is kept, and the same command goes on from there", err=True)
        sys.exit(INTERRUPTED)
    if not quiet:
        said = f"{len(done.files)} files, {show_size(done.nbytes)}" if done.fetched else "is here already"
        typer.echo(f"{name} {revision} is {done.commit}: {said}")
    return done
