"""`ssmd bench`: the speed and memory of an artifact on this machine."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ssmd.cli import options

if TYPE_CHECKING:
    from ssmd.model.artifact import Artifact
    from ssmd.runtime.bench import Progress, Report


def bench(
    model: options.Model = None,
    position: Annotated[
        int, typer.Option(help="Tokens of history that everything is measured after.", min=0, metavar="N")
    ] = 0,
    repeats: Annotated[
        int, typer.Option(help="Rounds; each has every bucket once and 20 decode steps.", min=1, max=1000, metavar="N")
    ] = 5,
    explain: Annotated[
        bool, typer.Option("--explain", help="Print the times by which the runtime chose its kernels on this device.")
    ] = False,
    retune: Annotated[
        bool,
        typer.Option(
            "--retune",
            help="Measure the kernels again first. If others are faster now, stored sessions resume `portable`.",
        ),
    ] = False,
    runtime: options.Runtime = None,
    device: options.Device = None,
    threads: options.Threads = None,
    models_dir: options.ModelsDir = None,
    as_json: options.Json = False,
) -> None:
    """Measure load, prefill, decode, save and restore, and how many reads of the weights a decode step takes.

    Run it twice where an artifact was never loaded before: the first load prepares the weights and takes more memory.
    """
    from ssmd.config import Settings
    from ssmd.installed import resolve
    from ssmd.machine.cache import tuned_anew
    from ssmd.model.artifact import Artifact
    from ssmd.model.made import is_made_here
    from ssmd.runtime.bench import bench as measure
    from ssmd.runtime.loading import check_first_load
    from ssmd.runtime.protocol import get_runtime

    settings = Settings(models_dir=models_dir, runtime=runtime, device=device, threads=threads)
    artifact = Artifact.open(resolve(model, settings.models_dir, settings.runtime, settings.device))
    loader = get_runtime(artifact.manifest.runtime)
    if not is_made_here(artifact.path, settings.data_dir):
        check_first_load(artifact, loader, settings.device)
    with _shown() as progress, tuned_anew(artifact.manifest.build) if retune else nullcontext():
        report = measure(
            artifact,
            loader,
            device=settings.device,
            threads=settings.threads,
            position=position,
            repeats=repeats,
            progress=progress,
        )
    if as_json:
        typer.echo(json.dumps(_fields(artifact, report), indent=1))
    else:
        _print(artifact, report)
        if explain or retune:
            _print_forms(report)


@contextmanager
def _shown() -> Iterator[Progress]:
    """Show the rounds done so far, on a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    # It is drawn between rounds only: a thread that refreshes it would be measured too.
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal, auto_refresh=False
    ) as bar:
        task = bar.add_task("loading", total=None)
        bar.refresh()

        def show(done: int, of: int) -> None:
            bar.update(task, description="measuring", completed=done, total=of)
            bar.refresh()

        yield show


def _fields(artifact: Artifact, report: Report) -> dict[str, Any]:
    """Return the fields that --json prints; docs/notes/benchmarks.md lists them."""
    manifest = artifact.manifest
    return {
        "name": manifest.name,
        "path": str(artifact.path),
        "build": manifest.build,
        "runtime": manifest.runtime,
        "quantization": manifest.quantization,
        "producer": report.producer,
        "threads": report.threads,
        "cpu": report.cpu,
        "load_average": report.load_average,
        "position": report.position,
        "repeats": report.repeats,
        "load_ms": {"first": report.load_first_ms, "again": report.load_again_ms},
        "prefill": [{"bucket": p.bucket, "ms": p.ms, "tokens_per_s": p.tokens_per_s} for p in report.prefill],
        "decode": {"steps": report.decode_steps, "p50_ms": report.tbt_p50_ms, "p95_ms": report.tbt_p95_ms},
        "together": [{"streams": t.streams, "p50_ms": t.ms, "tokens_per_s": t.tokens_per_s} for t in report.together],
        "save_ms": report.save_ms,
        "restore_ms": report.restore_ms,
        "state_bytes": {"fixed": report.fixed_bytes, "a_token": report.token_bytes, "at_position": report.state_bytes},
        "weights": {"bytes": report.weights_bytes, "read_ms": report.weights_read_ms},
        "decode_per_read": report.decode_per_read,
        "memory_bytes": {
            "loaded": report.resident_bytes,
            "most": report.most_resident_bytes,
            "together": report.resident_together_bytes,
        },
        "forms": [vars(one) for one in report.form_times],
    }


def _print(artifact: Artifact, report: Report) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from ssmd.machine.size import show_size

    manifest = artifact.manifest
    load = "unknown" if report.load_average is None else f"{report.load_average[0]:.1f}"
    typer.echo(f"{manifest.name}  build {manifest.build[:12]}, {manifest.quantization}; {artifact.path}")
    typer.echo(f"{report.producer}; load average before: {load}")
    after = f" after {report.position:,} tokens" if report.position else ""
    state = show_size(report.state_bytes)
    tokens_per_s, gb_per_s = 1e3 / report.tbt_p50_ms, report.weights_bytes / report.weights_read_ms / 1e6
    rows = [
        ("load, the first in this process", report.load_first_ms, ""),
        ("load again", report.load_again_ms, ""),
        *((f"prefill of {p.bucket}{after}", p.ms, f"{p.tokens_per_s:.0f} tokens/s") for p in report.prefill),
        (f"decode step{after}", report.tbt_p50_ms, f"{tokens_per_s:.1f} tokens/s; p95 {report.tbt_p95_ms:.2f} ms"),
        *((f"of {t.streams} streams{after}", t.ms, f"{t.tokens_per_s:.1f} tokens/s") for t in report.together),
        ("one read of the weights", report.weights_read_ms, f"{show_size(report.weights_bytes)}, {gb_per_s:.1f} GB/s"),
        ("save", report.save_ms, state),
        ("restore", report.restore_ms, state),
    ]
    table = Table(box=None, pad_edge=False)
    table.add_column("", no_wrap=True)
    table.add_column("ms", justify="right", no_wrap=True)
    table.add_column("")
    for name, ms, note in rows:
        table.add_row(*map(Text, (name, f"{ms:.2f}" if ms < 100 else f"{ms:.0f}", note)))
    console = Console() if sys.stdout.isatty() else Console(width=1000)
    console.print(table)
    sizes = (report.resident_bytes, report.most_resident_bytes, report.resident_together_bytes)
    loaded, most, several = ("unknown" if size is None else show_size(size) for size in sizes)
    typer.echo(f"a decode step takes {report.decode_per_read:.2f} x one read of the weights")
    typer.echo(f"state: {show_size(report.fixed_bytes)} and {report.token_bytes:,} bytes a token")
    typer.echo(f"memory: {loaded} when loaded, {most} at most, {several} with {report.together[-1].streams} streams")


def _print_forms(report: Report) -> None:
    """Print the forms of each kernel with their times, the chosen one first."""
    if not report.form_times:
        typer.echo("forms of kernels: none were measured; this runtime has one form for this device")
    for kernel, times in groupby(report.form_times, key=lambda one: one.kernel):
        found = sorted(times, key=lambda one: (not one.chosen, one.us))
        typer.echo(f"{kernel}: " + ", ".join(f"{one.form}{'*' * one.chosen} {one.us:.2f} us" for one in found))
