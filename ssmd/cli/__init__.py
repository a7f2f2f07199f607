"""The command `ssmd`. Commands import what is heavy inside themselves, so that --help stays quick."""

from __future__ import annotations

import os
import stat
from typing import Annotated

import typer

from ssmd import __version__
from ssmd.cli import (
    bench,
    build,
    doctor,
    graph,
    pull,
    run,
    serve,
    session,
    session_keep,
    session_move,
    session_tree,
    show,
    verify,
)
from ssmd.cli import list as listing
from ssmd.cli.failure import plain_errors

app = typer.Typer(
    name="ssmd",
    help="Runs state-space and hybrid language models on this machine and never re-reads a conversation.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("serve")(serve.serve)
app.command("run")(run.run)
app.command("build")(build.build)
app.command("pull")(pull.pull)
app.command("list")(listing.list_models)
app.command("show")(show.show)
app.command("verify")(verify.verify)
app.command("bench")(bench.bench)
app.command("doctor")(doctor.doctor)
session.app.command("tree")(session_tree.tree)
session.app.command("fork")(session_tree.fork)
session.app.command("export")(session_move.export)
session.app.command("import")(session_move.import_)
session_keep.add_to(session.app)
app.add_typer(session.app, name="session")
app.add_typer(graph.app, name="graph")


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"ssmd {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def main() -> None:
    os.umask(os.umask(0) | stat.S_IWOTH)  # what every user may write would be refused by the next command
    with plain_errors():
        app()
