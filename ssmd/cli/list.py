"""`ssmd list`: the models installed here."""

from __future__ import annotations

import json

import typer

from ssmd.cli import options


def list_models(models_dir: options.ModelsDir = None, as_json: options.Json = False) -> None:
    """List the models installed here, broken ones with the reason."""
    from ssmd.config import Settings
    from ssmd.installed import installed

    folder = Settings(models_dir=models_dir).models_dir
    found = installed(folder)
    if as_json:
        rows = [
            {
                "name": one.name,
                "path": str(one.path),
                "bytes": one.nbytes,
                "problem": one.problem or None,
                **(
                    {}
                    if one.manifest is None
                    else {
                        "family": one.manifest.family,
                        "runtime": one.manifest.runtime,
                        "device_class": one.manifest.device_class,
                        "quantization": one.manifest.quantization,
                        "context": one.manifest.context,
                        "lineage": one.manifest.lineage,
                        "build": one.manifest.build,
                    }
                ),
            }
            for one in found
        ]
        typer.echo(json.dumps(rows, indent=1))
        return
    if not found:
        typer.echo(f"no model is installed in {folder}; a first one comes with: ssmd pull smollm2", err=True)
        return
    lines = [("name", "runtime", "device", "quantization", "context", "size", "")]
    for one in found:
        m = one.manifest
        what = ("?",) * 4 if m is None else (m.runtime, m.device_class, m.quantization, str(m.context or "unbounded"))
        problem = f"broken: {one.problem}" if one.problem else ""
        lines.append((one.name, *what, f"{one.nbytes / 1e6:.1f} MB", problem))
    widths = [max(len(line[i]) for line in lines) for i in range(6)]
    for line in lines:
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(line, [*widths, 0], strict=True)).rstrip())
