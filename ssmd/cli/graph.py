"""`ssmd graph`: makes stripped graphs, and checks existing ones."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ssmd.cli import options
from ssmd.cli.build import Quant

if TYPE_CHECKING:
    from ssmd.build.stripping import Label

app = typer.Typer(
    help="Stripped graphs: models without their weights, for those who have them (docs/stripped-graph.md).",
    no_args_is_help=True,
)


@app.command()
def make(
    config: Annotated[
        Path,
        typer.Argument(
            metavar="CONFIG", help="A config.json, or a file that has it as `config`, with `origin` and `provenance`."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder that the graph is written into.", metavar="DIR")] = Path(),
    runtime: options.Target = None,
    quant: Annotated[Quant | None, typer.Option(help="How weights are stored.", show_default=False)] = None,
    buckets: options.Buckets = None,
    context: options.Context = None,
    name: Annotated[str | None, typer.Option(help="Name of the model; else the file's.", metavar="NAME")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the graph if it exists.")] = False,
) -> None:
    """Make the stripped graph of a config; needs PyTorch and the converters.

    Two models with made-up weights are converted: what is left without these must be the same, refitted it must have
    the files of the build, and the runtime must compute what PyTorch does.
    """
    import tempfile

    from ssmd.build.builder import Packer, check_packages, targeted
    from ssmd.build.stripping import make as make_graph
    from ssmd.build.stripping import makes_late
    from ssmd.cli.build import lengths_of, tiers_of
    from ssmd.cli.making import converter_of, name_of
    from ssmd.families.registry import family_of
    from ssmd.machine.progress import staged
    from ssmd.machine.size import show_size
    from ssmd.refit.catalog import file_name
    from ssmd.runtime.info import targets

    fields, label = _labelled(config, name)
    runtime = runtime or targets()[0]
    converter = converter_of(runtime)
    if isinstance(converter, Packer):
        raise typer.BadParameter(f"runtime {runtime} packs weights as they are and has no graphs: ssmd build")
    check_packages(converter)
    lengths = None if buckets is None else lengths_of("--buckets", buckets)
    tiers = None if context is None else tiers_of(lengths_of("--context", context), converter.tiers)
    family = family_of(fields)
    target = targeted(converter, family, family.parse(fields), None if quant is None else quant.value, lengths, tiers)
    if target.quantization == "int4" and not makes_late(converter, "int4", family.bindings(family.parse(fields))):
        raise typer.BadParameter(
            f"no refit makes int4 of {'experts' if 'int4' in converter.late else f'runtime {converter.runtime}'}: "
            "build it with `ssmd build --quant int4`"
        )
    name_of(label.name)
    file = out / file_name(label.name, converter.runtime, converter.device_class, target.quantization)
    if file.exists() and not force:
        raise typer.BadParameter(f"{file} exists already; --force replaces it")
    with tempfile.TemporaryDirectory(prefix="ssmd-") as scratch:
        made = make_graph(
            converter, fields, target, Path(scratch), label=label, stage=lambda what: staged(typer.echo, what)
        )
    out.mkdir(parents=True, exist_ok=True)
    made.save(file)
    holes = sum(len(f.holes) for f in made.header.files)
    typer.echo(
        f"{file}: {show_size(file.stat().st_size)}, {holes} holes; the runtime's logits are "
        f"{max(made.header.golden.rms):.2g} standard deviations off PyTorch's"
    )


def _labelled(file: Path, name: str | None) -> tuple[dict[str, Any], Label]:
    from ssmd.build.stripping import Label
    from ssmd.model.source import read_json

    fields = read_json(file)
    default = file.resolve().parent.name if file.name == "config.json" else file.stem
    if not isinstance(fields.get("config"), dict):
        return fields, Label(name or default)
    return fields["config"], Label(name or default, str(fields.get("origin", "")), str(fields.get("provenance", "")))


@app.command()
def verify(
    graphs: Annotated[
        list[Path] | None, typer.Argument(metavar="[GRAPH]…", help="Files; else all that come with ssmd.")
    ] = None,
) -> None:
    """Refit graphs with the weights that their golden values are of, run them and compare. Exit code 1 if one differs.

    Needs neither PyTorch nor a converter, but the graph's runtime. A graph of another runtime is named and skipped.
    """
    import tempfile

    from ssmd.machine.progress import show_progress
    from ssmd.refit.catalog import files as graph_files
    from ssmd.refit.catalog import verified
    from ssmd.refit.graphfile import StrippedGraph
    from ssmd.runtime.protocol import RuntimeUnavailable

    failed = False
    files = graphs or graph_files()
    width = max((len(f.name) for f in files), default=0)
    typer.echo(f"{'graph':<{width}}  {'rms':>7}  allowed  at the worst position, in standard deviations of the logits")
    for file in files:
        graph = StrippedGraph.open(file)
        with tempfile.TemporaryDirectory(prefix="ssmd-") as scratch:
            try:
                with show_progress(f"verify {file.name}"):
                    steps = verified(graph, Path(scratch) / "model")
            except RuntimeUnavailable as err:
                typer.echo(f"{file.name:<{width}}  skipped: {err}")
                continue
        step, allowed = max(steps, key=lambda s: s[0].rms_relative / s[1])
        passed = step.rms_relative <= allowed
        failed = failed or not passed
        verdict = "passed" if passed else f"FAILED at position {step.position}"
        typer.echo(f"{file.name:<{width}}  {step.rms_relative:>7.2g}  {allowed:>7.2g}  {verdict}")
    if failed:
        typer.echo("error: such a graph does not compute what its model does here: do not use it", err=True)
        sys.exit(1)
