"""`ssmd serve`: the daemon."""

from __future__ import annotations

import gc
import shlex
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from ssmd.cli import options


def serve(
    model: options.Model = None,
    runtime: options.Runtime = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on; beyond loopback a key is needed.")] = None,
    port: Annotated[int | None, typer.Option(help="Port; 0 takes any free one. Default 7763.")] = None,
    socket: Annotated[
        Path | None, typer.Option(help="Listen at this Unix socket, for this user alone, and at no port.")
    ] = None,
    also_listen: Annotated[
        int | None, typer.Option(help="A second port, such as 11434, where Ollama's clients look.", metavar="PORT")
    ] = None,
    browse: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
    device: options.Device = None,
    threads: options.Threads = None,
    max_running: Annotated[int | None, typer.Option(help="Choices that decode at the same time.", metavar="N")] = None,
    max_queue: Annotated[int | None, typer.Option(help="Requests that may wait.", metavar="N")] = None,
    config_file: options.Config = None,
    data_dir: options.DataDir = None,
    models_dir: options.ModelsDir = None,
    remote: options.Remote = None,
    keep_alive: Annotated[
        str | None,
        typer.Option(help="How long a model stays after its last request; 0 not at all, -1 for ever.", metavar="TIME"),
    ] = None,
    memory_budget: Annotated[
        str | None, typer.Option(help="Memory that loaded models may take, such as 4GiB.", metavar="SIZE")
    ] = None,
    preload: Annotated[str | None, typer.Option(help="Models to load at the start.", metavar="NAME,NAME")] = None,
    pin: Annotated[
        str | None, typer.Option(help="Models to load at the start and never to unload.", metavar="NAME,NAME")
    ] = None,
    default: Annotated[
        list[str] | None,
        typer.Option(
            help="Default of a sampling option, such as temperature=0.7. May be repeated.",
            metavar="NAME=VALUE",
        ),
    ] = None,
    quota: options.Quota = None,
    no_store: options.NoStore = False,
    offline: options.Offline = False,
    yes: options.Yes = False,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
    access_log: Annotated[
        bool, typer.Option("--access-log", help="Print a line for each request, without any text of clients.")
    ] = False,
    access_log_format: Annotated[
        str | None, typer.Option(help="Format of the access log: text or json.", metavar="FORMAT")
    ] = None,
) -> None:
    """Serve MODEL, or every installed model as it is asked for, to OpenAI clients (default http://127.0.0.1:7763/v1).

    Every option is also an environment variable (SSMD_PORT, SSMD_API_KEY, ...) and a key of the settings file.
    """
    flags = locals()
    gc.disable()  # until the daemon is ready: all objects that the start makes stay
    from ssmd import server
    from ssmd.cli.pull import first_model
    from ssmd.config import Settings

    if socket is not None and (host is not None or port is not None or also_listen is not None):
        raise typer.BadParameter("--socket replaces a port: leave --host, --port and --also-listen out")
    if socket is not None and browse:
        raise typer.BadParameter("--open opens a page at a port, and a browser cannot reach a socket: leave one out")
    settings = Settings(**options.given(flags))
    server.start_logging(settings.log_level)
    run = f"{_program()} run" + ("" if data_dir is None else f" --data-dir {shlex.quote(str(data_dir.absolute()))}")
    named = first_model(model, settings, yes=yes, ask=False)  # under `docker run -t` no user can answer
    announce = partial(typer.echo, err=settings.access_log)  # with an access log, stdout has only its lines
    server.serve(settings, named, keep=not no_store, announce=announce, run=run, browse=browse)


def _program() -> str:
    """Return this program's command as a shell in any folder takes it."""
    own = Path(sys.argv[0])
    if own.name == "__main__.py":
        return f"{shlex.quote(sys.executable)} -m ssmd"
    found = shutil.which(own.name)
    if own.name == sys.argv[0] or (found is not None and Path(found).resolve() == own.resolve()):
        return own.name
    return shlex.quote(str(own.absolute()))
