"""The command `ssmd`. Commands import heavy modules in their functions, so that --help stays quick."""

from __future__ import annotations

import os
import stat
import sys
from typing import Annotated

import typer

from ssmd.cli import (
    backup,
    bench,
    build,
    completion,
    config,
    daemon,
    doctor,
    graph,
    options,
    pull,
    rm,
    run,
    serve,
    service,
    session,
    session_move,
    session_remote,
    session_tree,
    show,
    store,
    store_machines,
    tray,
    verify,
    warm,
)
from ssmd.cli.launch import launch
from ssmd.cli.output import plain_errors

app = typer.Typer(
    name="ssmd",
    help="Runs state-space and hybrid language models on this machine and never re-reads a conversation.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # drawing boxes takes as long as all the rest of --help
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("serve", short_help="Serve models to OpenAI clients.")(serve.serve)
app.command("run")(run.run)
app.command("launch", short_help="Start a coding agent that uses the daemon.")(launch.launch)
app.command("ps")(daemon.ps)
app.command("stop")(daemon.stop)
app.command("warm", short_help="Keep the beginning of an agent's prompts read.")(warm.warm)
app.command("logs")(daemon.logs)
app.command("tray", short_help="Show the daemon in the desktop's tray.")(tray.tray)
app.command("build")(build.build)
app.command("pull", short_help="Fetch a model and make it ready to run.")(pull.pull)
app.command("list", short_help="List the models installed here.")(show.list_models)
app.command("show", short_help="Show what an artifact is made of.")(show.show)
app.command("rm")(rm.remove)
app.command("verify", short_help="Replay an artifact's golden values.")(verify.verify)
app.command("backup", short_help="Copy all sessions into a folder.")(backup.backup)
app.command("bench", short_help="Measure how fast an artifact is here.")(bench.bench)
app.command("doctor", short_help="Say what works here, and what to do next.")(doctor.doctor)
app.command("version")(config.version)
app.command("completion")(completion.completion)
session.app.command("tree")(session_tree.tree)
session.app.command("fork")(session_tree.fork)
session.app.command("export")(session_move.export)
session.app.command("import")(session_move.import_)
for _command in (session_remote.push, session_remote.pull, session_remote.local, session_remote.sweep):
    session.app.command(_command.__name__)(_command)
store.app.command("key")(store_machines.key)
store.app.command("machines")(store_machines.machines)
store.app.command("trust")(store_machines.trust)
store.app.command("distrust")(store_machines.distrust)
session.add_to(session.app)
app.add_typer(session.app, name="session")
app.add_typer(store.app, name="store", short_help="Check, copy, measure and clear the remote; trust machines.")
app.add_typer(graph.app, name="graph", short_help="Stripped graphs: models without their weights.")
app.add_typer(config.app, name="config")
app.add_typer(service.app, name="service")


def _version(asked: bool) -> None:
    if asked:
        config.version()
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    config_file: options.Config = None,
) -> None:
    pass


def _open_closed() -> None:
    """Open the null device for each of the three streams that a shell closed: no file of ours may take its number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - until the process ends


def main() -> None:
    _open_closed()
    os.umask(os.umask(0) | stat.S_IWOTH)  # the next command would refuse files that every user may write
    completion.prepare()
    with plain_errors():
        app()
