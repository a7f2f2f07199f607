"""`ssmd list`: the models installed here."""

from __future__ import annotations

import json

import typer

from ssmd.cli import options, table


def list_models(models_dir: options.ModelsDir = None, as_json: options.Json = False) -> None:
    """List the models installed here, broken ones with the reason."""
    from ssmd.config import Settings
    from ssmd.installed import installed

    folder = Settings(models_dir=models_dir).models_dir
    found = installed(folder)
    if as_json:
        described = [
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
        typer.echo(json.dumps(described, indent=1))
        return
    if not found:
        typer.echo(f"no model is installed in {folder}; a first one comes with: ssmd pull smollm2", err=True)
        return
    rows = [("name", "runtime", "device", "quantization", "context", "size", "")]
    for one in found:
        m = one.manifest
        what = ("?",) * 4 if m is None else (m.runtime, m.device_class, m.quantization, str(m.context or "unbounded"))
        problem = f"broken: {one.problem}" if one.problem else ""
        rows.append((one.name, *what, f"{one.nbytes / 1e6:.1f} MB", problem))
    for line in table.lines(rows):
        typer.echo(line)
