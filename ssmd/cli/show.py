"""`ssmd show|list`: the facts of an artifact, and the models installed here."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ssmd.cli import options, output

if TYPE_CHECKING:
    from ssmd.model.defaults import Default


def show(
    model: options.Model = None,
    runtime: options.Runtime = None,
    models_dir: options.ModelsDir = None,
    as_json: options.Json = False,
) -> None:
    """Show an artifact: family, context, buckets, what its state weighs, where it came from."""
    from ssmd.cli.session import plain
    from ssmd.config import Settings
    from ssmd.installed import resolve
    from ssmd.model.artifact import read_manifest
    from ssmd.model.defaults import defaults_of

    settings = Settings(models_dir=models_dir, runtime=runtime)
    path = resolve(model, settings.models_dir, settings.runtime)
    manifest = read_manifest(path)
    spec, defaults = manifest.spec, {**defaults_of(manifest, path), **settings.defaults}
    fixed, a_token = spec.nbytes_at(0), spec.nbytes_at(1) - spec.nbytes_at(0)
    if as_json:
        fields = {**manifest.model_dump(mode="json"), "path": str(path)}
        fields["state_bytes"] = {"fixed": fixed, "a_token": a_token}
        fields["defaults"] = {name: asdict(default) for name, default in defaults.items()}
        typer.echo(json.dumps(fields, indent=1))
        return
    rows = {
        "name": manifest.name,
        "path": str(path),
        "family": manifest.family,
        "runtime": f"{manifest.runtime}, {manifest.device_class}",
        "quantization": manifest.quantization + _calibrated(manifest.quantization_recipe),
        **_quality(manifest.quality),
        "size": f"{sum(f.size for f in manifest.files.values()) / 1e6:.1f} MB in {len(manifest.files)} files",
        "context": "unbounded" if manifest.context is None else f"{manifest.context} tokens",
        "buckets": ", ".join(map(str, manifest.buckets)),
        "vocabulary": str(manifest.vocabulary),
        "sampling": _sampling(defaults),
        "stop tokens": ", ".join(map(str, manifest.stop_tokens)),
        "state": f"{fixed} bytes and {a_token} more a token, in {len(spec.tensors)} tensors",
        "lineage": manifest.lineage,
        "build": manifest.build,
        "built with": ", ".join(f"{name} {version}" for name, version in sorted(manifest.builders.items())),
    }
    for name, value in rows.items():
        typer.echo(f"{name:<13} {plain(value)}")


def _sampling(defaults: Mapping[str, Default]) -> str:
    """Describe the defaults, grouped by source."""
    by_source: dict[str, list[str]] = {}
    for name, default in defaults.items():
        by_source.setdefault(default.source, []).append(f"{name} {default.text}")
    return "; ".join(f"{', '.join(values)} ({source})" for source, values in by_source.items()) or "temperature 1"


def _calibrated(recipe: Mapping[str, Any]) -> str:
    """Return what the weights were rounded for, if that was a text."""
    told = recipe.get("calibrated")
    tokens = told.get("tokens") if isinstance(told, dict) else None
    return f", rounded for {tokens} tokens of a text" if type(tokens) is int else ""


def _quality(quality: dict[str, dict[str, float]]) -> dict[str, str]:
    """Return the build's measurements against the f32 module, if there are any."""
    if not {"golden", "text"} <= quality.keys():
        return {}
    golden, text = quality["golden"], quality["text"]
    return {
        "logits": f"rms error {golden['rms']:.3g}, largest {golden['max']:.3g} standard deviations",
        "perplexity": f"{text['perplexity']:.4g} on {text['tokens']:.0f} tokens, {text['perplexity_f32']:.4g} in f32; "
        f"KL {text['kl']:.3g}",
    }


def list_models(
    models_dir: options.ModelsDir = None,
    available: Annotated[
        bool, typer.Option("--available", help="List the models that `ssmd pull` knows, and what they take.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """List the models installed here, broken ones with the reason."""
    from ssmd.config import Settings
    from ssmd.installed import installed

    folder = Settings(models_dir=models_dir).models_dir
    if available:
        _list_available(folder, as_json=as_json)
        return
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
        typer.echo(f"no model is installed in {folder}; get one with: ssmd pull smollm2", err=True)
        return
    rows = [("name", "runtime", "device", "quantization", "context", "size", "")]
    for one in found:
        m = one.manifest
        what = ("?",) * 4 if m is None else (m.runtime, m.device_class, m.quantization, str(m.context or "unbounded"))
        problem = f"broken: {one.problem}" if one.problem else ""
        rows.append((one.name, *what, f"{one.nbytes / 1e6:.1f} MB", problem))
    for line in output.lines(rows):
        typer.echo(line)


def _list_available(folder: Path, *, as_json: bool) -> None:
    """List the models of the catalogue: what a pull fetches, about, and takes of disk and memory for each runtime."""
    from ssmd.hub.wheel import package_bytes
    from ssmd.installed import places
    from ssmd.machine.memory import available
    from ssmd.machine.size import show_size
    from ssmd.refit import catalog
    from ssmd.runtime.info import target_for, targets

    there = {(name, path.name) for name, path in places(folder)} if folder.is_dir() else set()
    rows: list[tuple[str, str, str, dict[str, int], bool]] = []
    for name in catalog.names():
        for file in (file for runtime in targets() for file in catalog.files(runtime, name)):
            form, quantization = file.stem.partition("@")[2], catalog.quantization_of(file)
            runtime = target_for(*form.rsplit("-", 2)[:2]).name
            sizes = {"download_bytes": package_bytes(name) or catalog.download_of(name)}
            made = catalog.sizes_of(name, runtime, quantization) or (0, 0)
            sizes |= dict(zip(("bytes", "memory_bytes"), made, strict=True))
            rows.append((name, runtime, quantization, sizes, (name, form) in there))
    if as_json:
        names = ("name", "runtime", "quantization")
        found = [dict(zip(names, what, strict=True)) | sizes | {"installed": here} for *what, sizes, here in rows]
        typer.echo(json.dumps(found, indent=1))
        return
    table = [("name", "runtime", "quantization", "download", "disk", "memory", "")]
    for name, runtime, quantization, sizes, here in rows:
        download, disk_bytes, memory = map(show_size, sizes.values())
        table.append((name, runtime, quantization, download, disk_bytes, memory, "installed" if here else ""))
    for line in output.lines(table):
        typer.echo(line)
    free = available()
    memory_free = "" if free is None else f", {show_size(free)} of memory"
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    typer.echo(f"free here: {show_size(shutil.disk_usage(nearest).free)} of disk{memory_free}")
