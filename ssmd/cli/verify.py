"""`ssmd verify`: compares an artifact's results with those of its reference."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

import typer

from ssmd.cli import options

if TYPE_CHECKING:
    from ssmd.model.artifact import Manifest


def verify(
    model: options.Model = None,
    runtime: options.Runtime = None,
    device: options.Device = None,
    threads: options.Threads = None,
    models_dir: options.ModelsDir = None,
    as_json: options.Json = False,
) -> None:
    """Replay an artifact's golden values and print the error of every step. Exit code 1 if it is out of tolerance."""
    from ssmd.config import Settings
    from ssmd.installed import resolve
    from ssmd.machine.progress import show_progress
    from ssmd.model.artifact import Artifact
    from ssmd.model.made import is_made_here
    from ssmd.runtime.loading import load
    from ssmd.runtime.verify import verify as replay

    settings = Settings(models_dir=models_dir, runtime=runtime, device=device, threads=threads)
    artifact = Artifact.open(resolve(model, settings.models_dir, settings.runtime, settings.device))
    made_here = is_made_here(artifact.path, settings.data_dir)
    with show_progress(f"loading {artifact.manifest.name}"):
        program = load(artifact, made_here=made_here, device=settings.device, threads=settings.threads)
    try:
        with show_progress("replaying golden values"):
            report = replay(artifact, program)
        producer = program.producer
    finally:
        program.close()
    if as_json:
        fields = {
            "path": str(artifact.path),
            "producer": producer,
            "golden": artifact.manifest.golden,
            "steps": [asdict(step) for step in report.steps],
            "tolerance": report.tolerance,
            "passed": report.passed,
        }
        typer.echo(json.dumps(fields, indent=1))
        sys.exit(0 if report.passed else 1)
    typer.echo(f"{artifact.path}  ({producer})")
    if artifact.manifest.golden == "itself":
        typer.echo("its golden values are its own results from when it was refitted; for its graph: ssmd graph verify")
    typer.echo("position  call     max error  rms error  rms, in standard deviations of the reference")
    for step in report.steps:
        errors = f"{step.max_error:>9.3g}  {step.rms_error:>9.3g}  {step.rms_relative:.3g}"
        typer.echo(f"{step.position:>8}  {step.call:<7}  {errors}")
    worst = report.worst
    verdict = "passed" if report.passed else "FAILED"
    typer.echo(
        f"{verdict}: worst rms {worst.rms_relative:.3g} at position {worst.position}, allowed {report.tolerance:g}"
    )
    if not report.passed:
        typer.echo(f"error: {_why(artifact.manifest, report.tolerance)}", err=True)
        sys.exit(1)


def _why(manifest: Manifest, tolerance: float) -> str:
    """Return the cause of a failure: the build recorded the loss by quantization and piecewise linear functions."""
    from ssmd.runtime.verify import segments_of

    lost = manifest.quality.get("golden", {}).get("rms", 0.0)
    segments = segments_of(manifest)
    owed = {
        "its quantization": "bits" if manifest.quantization != "f32" else "",
        f"ActiBA with {segments} segments": "segments" if segments else "",
    }
    causes = {cause: more for cause, more in owed.items() if more}
    if lost <= tolerance or not causes:
        return "this artifact does not compute what its model does here; build it again"
    return (
        f"{' and '.join(causes)} lose{'s' if len(causes) == 1 else ''} that much of the model, {lost:.3g} when it was "
        f"built; build it with more {' or more '.join(causes.values())}"
    )
