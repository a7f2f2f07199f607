"""`ssmd build`: a source checkpoint turned into an artifact that a runtime can load."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ssmd.cli import options
from ssmd.cli.making import (
    BuildFailed,
    alone,
    check_target,
    check_texts,
    converter_of,
    fetch,
    hint,
    keep_defaults,
    name_of,
    needs_of,
    noted,
    removed,
    smollm2_source,
    source_of,
)

if TYPE_CHECKING:
    from ssmd.build.builder import Quantization
    from ssmd.config import Settings
    from ssmd.hub.pull import Look, Purpose


_ON_A_HUB = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)


class Quant(StrEnum):
    int8 = "int8"
    int4 = "int4"
    f16 = "f16"
    f32 = "f32"


def build(
    checkpoint: Annotated[
        str,
        typer.Argument(
            metavar="CHECKPOINT",
            help="A Hugging Face folder with safetensors, a GGUF file, a model's name on the hub, or: smollm2",
        ),
    ],
    runtime: options.Target = None,
    quant: Annotated[
        Quant | None, typer.Option(help="How weights are stored; else int8, and f16 for the NPU.", show_default=False)
    ] = None,
    buckets: options.Buckets = None,
    context: options.Context = None,
    name: Annotated[str | None, typer.Option(help="Name of the model; else the folder's.", metavar="NAME")] = None,
    revision: Annotated[
        str | None, typer.Option(help="Branch, tag or commit of a name on the hub; else main.", metavar="REV")
    ] = None,
    models_dir: options.ModelsDir = None,
    xamba: Annotated[
        str | None,
        typer.Option(help="Rewrites of an OpenVINO graph: cumba, reduba, actiba=SEGMENTS.", metavar="PASSES"),
    ] = None,
    variant: Annotated[
        str | None,
        typer.Option(help="Of a Core ML artifact: stateful (the usual one) or stateless.", metavar="VARIANT"),
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option(help="An option of a runtime from elsewhere.", metavar="NAME=VALUE")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the artifact if it exists.")] = False,
    keep_source: options.KeepSource = False,
    anyway: Annotated[bool, typer.Option("--anyway", help="Build even if memory seems too small.")] = False,
    offline: options.Offline = False,
) -> None:
    """Build an artifact from a source checkpoint. What ssmd has a stripped graph of needs no build: `ssmd pull`.

    A name such as ibm-granite/granite-4.0-h-350m is a folder if there is one, else a model on the Hugging Face hub: it
    is pulled unless that was done before, and removed after the build.
    """
    from ssmd.build.builder import Needs, Packer, check_needs, check_packages
    from ssmd.build.builder import build as build_artifact
    from ssmd.config import Settings
    from ssmd.hub.pull import Purpose
    from ssmd.model import smollm2
    from ssmd.runtime.info import info_of, targets

    lengths = None if buckets is None else lengths_of("--buckets", buckets)
    asked = None if context is None else lengths_of("--context", context)
    name = name_of(name or (smollm2.NAME if checkpoint == smollm2.NAME else _own_name(checkpoint)))
    settings = Settings(models_dir=models_dir, offline=offline or None)
    target = runtime or targets()[0]
    own = {name: value for name, value in (("xamba", xamba), ("variant", variant)) if value is not None}
    own |= dict(map(_named, option or ()))
    if len(own) > 1:
        raise BuildFailed(f"{' and '.join(own)}: a build takes one of its runtime's options", usage=True)
    converter = converter_of(target, *next(iter(own.items()), ()))
    quantization: Quantization = converter.quantizations[0] if quant is None else quant.value
    folder_name = f"{converter.runtime}-{converter.device_class}-{quantization}"
    settings.prepare_models()
    out = settings.models_dir / name / (folder_name + _suffix(converter.runtime, own))
    if out.exists() and not force:
        raise BuildFailed(f"{out} exists already; --force replaces it, --name builds another")
    if not _is_fetched(checkpoint, revision):
        if revision is not None:
            raise BuildFailed(
                f"--revision is for a model on the hub; {checkpoint} is a folder or not such a name", usage=True
            )
        with source_of(Path(checkpoint)) as source:
            check_target(source.config, target)  # refuses an unusable checkpoint before packages are needed
    if not isinstance(converter, Packer):
        check_packages(converter)  # before anything is fetched
    tiers = None if asked is None else tiers_of(asked, converter.tiers)

    def look(config: Mapping[str, Any]) -> Purpose:
        check_target(config, target)
        needs = needs_of(converter, config, quantization, lengths, tiers)
        if not anyway:
            check_needs(Needs(needs.memory, 0), out.parent)
        return Purpose(settings.models_dir, needs.disk, temporary=not keep_source)

    with (
        _source(checkpoint, revision, settings, look, keep=keep_source) as path,
        source_of(path) as source,
        alone(out),
        _interruptible() as progress,
    ):
        check_texts(source)
        made = converter.build if isinstance(converter, Packer) else partial(build_artifact, converter, anyway=anyway)
        artifact = made(
            source,
            out,
            name=name,
            quantization=quantization,
            buckets=lengths,
            tiers=tiers,
            replace=force,
            progress=progress,
        )
        keep_defaults(source.path, _whose(checkpoint), artifact.path, typer.echo)
        noted(artifact.path, settings)
    for line in _idle_passes(artifact.manifest.conversion.get("xamba", {})):
        typer.echo(line)
    sizes = {name: file.size for name, file in artifact.manifest.files.items()}
    if said := info_of(artifact.manifest.runtime).first_load(artifact.manifest.device_class, sizes):
        typer.echo(said)
    typer.echo(f"{artifact.path}: {sum(sizes.values()) / 1e6:.1f} MB; {hint(artifact.manifest, name, out)}")


def _own_name(checkpoint: str) -> str:
    """Return the name of a folder, or that of a GGUF file without its ending."""
    path = Path(checkpoint).resolve()
    return path.stem if path.suffix.lower() == ".gguf" and path.is_file() else path.name


def _named(option: str) -> tuple[str, str]:
    """Return the name and the value of --option. Raises BuildFailed."""
    name, equals, value = option.partition("=")
    if not (name and equals):
        raise BuildFailed(f"--option {option}: expected NAME=VALUE", usage=True)
    return name, value


def _suffix(runtime: str, own: Mapping[str, str]) -> str:
    """Return what a runtime's build options add to the name of an artifact's folder."""
    from ssmd.runtime.info import info_of

    known = info_of(runtime).build_options
    return "".join(known[name].suffix(value) for name, value in own.items())


def _idle_passes(xamba: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each requested rewrite that replaced nothing, with the reason from the manifest's report."""
    reports = [report for name, report in xamba.items() if name != "passes"]
    for kind, sought in (("cumba", "CumSum"), ("reduba", "ReduceSum"), ("actiba", "SiLU or softplus")):
        made = [report[kind] for report in reports if kind in report]
        if made and not any(one["replaced"][kind] for one in made):
            left = sorted({f"{node['operation']}: {node['why']}" for one in made for node in one["left"]})
            absent = f"no {sought} is in the graph (docs/notes/xamba.md)"
            yield f"{kind}: nothing to replace: {'; '.join(left) or absent}"


def _whose(checkpoint: str) -> str:
    """Return the name of a checkpoint: its own on the hub, else its folder's."""
    return Path(checkpoint).resolve().name if Path(checkpoint).exists() else checkpoint


@contextmanager
def _source(checkpoint: str, revision: str | None, settings: Settings, look: Look, *, keep: bool) -> Iterator[Path]:
    """Yield the folder of the source checkpoint; one that was fetched for this build is removed afterwards.

    A model on a hub that is not here is pulled first, if `look` takes it.
    """
    from ssmd.hub.pull import find, used_up
    from ssmd.model import smollm2

    if not _is_fetched(checkpoint, revision):
        yield Path(checkpoint)
        return
    if checkpoint == smollm2.NAME and revision is None:
        with smollm2_source(settings, typer.echo) as folder:
            yield folder
        return
    revision = revision or "main"
    source = find(checkpoint, revision, settings.data_dir)
    if source is None:
        source = fetch(checkpoint, revision, settings, look=look)
    else:
        typer.echo(f"{checkpoint} {revision} was pulled as {source.commit}; `ssmd pull` looks for a newer one")
    with used_up(source, keep=keep):
        yield source.path
    if not source.path.exists():
        typer.echo(removed(source))


def _is_fetched(checkpoint: str, revision: str | None) -> bool:
    """Return True if it is not a folder here, but SmolLM2 or a model's name on the hub."""
    from ssmd.model import smollm2

    if Path(checkpoint).exists():
        return False
    return (checkpoint == smollm2.NAME and revision is None) or bool(_ON_A_HUB.fullmatch(checkpoint))


@contextmanager
def _interruptible() -> Iterator[Callable[[str], None]]:
    """Yield a function that prints lines of progress. A Ctrl-C that got lost ends the build at the next line.

    They get lost: the converters import optional packages under a bare `except`, and PyTorch calls Python from C++.
    """
    pressed = False

    def note(*_: object) -> None:
        nonlocal pressed
        pressed = True
        raise KeyboardInterrupt

    def progress(line: str) -> None:
        if pressed:
            raise KeyboardInterrupt
        typer.echo(line)

    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # otherwise the parent wants it ignored, as for a job in the background
        signal.signal(signal.SIGINT, note)
    try:
        yield progress
    finally:
        signal.signal(signal.SIGINT, before)


def lengths_of(option: str, text: str) -> list[int]:
    try:
        return sorted({int(part) for part in text.split(",")})
    except ValueError as err:
        raise BuildFailed(
            f"{option} {text!r}: expected token counts separated by commas, such as 16,64,256", usage=True
        ) from err


def tiers_of(asked: list[int], usual: tuple[int, ...]) -> list[int]:
    """Return the requested capacities; for a single one also the usual ones below it."""
    return asked if len(asked) > 1 else [*(n for n in usual if n < asked[0]), asked[0]]
