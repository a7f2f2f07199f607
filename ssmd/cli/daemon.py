"""`ssmd ps|stop|logs`: show the running daemon's work, stop it or unload one of its models, and show its log."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ssmd import __version__
from ssmd.cli import options
from ssmd.cli.completion import models
from ssmd.cli.output import fail
from ssmd.daemon import said

if TYPE_CHECKING:
    from ssmd.daemon.client import Client
    from ssmd.daemon.discovery import Address

METRICS = "/ssmd/v1/metrics"
_WAITING = ("waiting", "loading")  # phases of requests that the queue counts as waiting

_LOOK_S = 0.05
_LOOKS = 100  # most looks for an idle model to be unloaded
_FOLLOW_S = 0.25


def ps(data_dir: options.DataDir = None, as_json: options.Json = False) -> None:
    """Show what the running daemon does. The models that it has loaded, and the requests that it works on."""
    from ssmd.daemon.place import data_dir as place

    client = needed(place(data_dir))
    found = client.get(METRICS)
    found = found if isinstance(found, dict) else {}
    if as_json:
        at = {"url": client.address.url, "socket": client.address.socket and str(client.address.socket)}
        typer.echo(json.dumps({**at, "pid": client.address.pid, **found}, indent=1))
        return
    for line in _told(found, client.address):
        typer.echo(line)


def _told(found: Mapping[str, Any], address: Address) -> list[str]:
    """Return the lines of `ssmd ps`. Fields that a daemon of another version does not send are left out."""
    from ssmd.cli.output import lines
    from ssmd.cli.session import plain

    state = f": {said.text(found, 'state')}" if said.text(found, "state") else ""
    why = f" ({said.text(found, 'reason')})" if said.text(found, "reason") else ""
    since = said.ago(time.time() - address.started_at)
    head = f"ssmd {address.version} at {address.place}, process {address.pid}, for {since}{state}{why}{_memory(found)}"
    models = [_model(one) for one in said.each(found, "models") if one.get("state") != "unloaded"]
    requests = [_request(one) for one in said.each(found, "running")]
    told = [head]
    if models:
        names = ("model", "runtime", "device", "quantization", "state", "memory", "until")
        told += ["", *lines([names, *models])]
    elif "models" in found:
        told.append("no model is loaded; the first request for one loads it")
    if requests:
        told += ["", *lines([("request", "session", "model", "phase", "tokens", "tokens/s", "first token"), *requests])]
    waiting = said.number(said.of(found, "queue").get("waiting")) or 0
    more = waiting - sum(one.get("phase") in _WAITING for one in said.each(found, "running"))
    if more > 0:
        told.append(f"{more:.0f} more {'waits for its' if more == 1 else 'wait for their'} turn")
    warm = said.of(found, "warm")
    if begun := said.number(warm.get("requests")):
        many = "request" if begun == 1 else "requests"
        tokens = said.number(warm.get("tokens")) or 0
        told += ["", f"warm beginnings: {tokens:.0f} tokens of {begun:.0f} {many} were not read again since the start"]
    return [plain(line) for line in told]


def _model(one: Mapping[str, Any]) -> tuple[str, ...]:
    more = said.text(one, "problem") or said.text(one, "stage")
    what = (said.text(one, key) or said.UNKNOWN for key in ("id", "runtime", "device", "quantization"))
    state = said.text(one, "state") or said.UNKNOWN
    state = f"{state}: {more}" if more else state
    return (*what, state, said.size(one.get("resident_bytes")), said.until(one, time.time()))


def _request(one: Mapping[str, Any]) -> tuple[str, ...]:
    tokens, rate, first = (said.number(one.get(key)) for key in ("tokens", "tokens_per_s", "ttft_ms"))
    return (
        *(said.text(one, key) or said.UNKNOWN for key in ("id", "session", "model")),
        said.phase(one),
        said.UNKNOWN if tokens is None else f"{tokens:.0f}",
        said.UNKNOWN if rate is None else f"{rate:.1f}",
        said.UNKNOWN if first is None else f"{first:.0f} ms",
    )


def _memory(found: Mapping[str, Any]) -> str:
    memory = said.of(found, "memory")
    used, budget = said.number(memory.get("used_bytes")), said.number(memory.get("budget_bytes"))
    if used is None:
        return ""
    return f", {said.size(used)}{'' if budget is None else f' of {said.size(budget)}'} for models"


def stop(
    model: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="Unload this model, and let the daemon run on.", autocompletion=models),
    ] = None,
    data_dir: options.DataDir = None,
) -> None:
    """Stop the running daemon, or unload a model. What it answers has 10 s to come to its end; the command waits until
    it is gone.

    Exit code 0 also if no daemon runs: then there is nothing left to do.
    """
    from ssmd.daemon.ending import end
    from ssmd.daemon.place import data_dir as place

    where = place(data_dir)
    if model is not None:
        _unload(needed(where), model)
        return
    client = reached(where)
    if client is None:
        typer.echo(f"no daemon runs on {where}", err=True)
        return
    end(client, where)
    typer.echo(f"the daemon at {client.address.place}, process {client.address.pid}, has ended")


def _unload(client: Client, model: str) -> None:
    """Unload a model by id, or all loaded models of a name, and print the result."""
    from urllib.parse import quote

    from ssmd.cli.session import plain
    from ssmd.daemon import answers

    there = client.get("/ssmd/v1/models", holds=answers.LOADED)["data"]
    named = [row for row in there if model in (row["id"], row["name"])]
    mine = [row for row in named if row["state"] in ("loaded", "loading", "unloading")]
    if not mine:
        if not named:
            fail(f"the daemon has no model {model!r}; `ssmd list` shows those that are installed")
        typer.echo(f"{model} is not loaded", err=True)
    for row in mine:
        if row["state"] == "loading":
            fail(f"{row['id']} is being loaded for a request that waits for it; stop it once it is loaded")
        path = f"/ssmd/v1/models/{quote(row['id'], safe='@')}/unload"
        done = client.send("POST", path, holds=answers.UNLOADED)
        for _ in range(_LOOKS):
            if done["state"] != "unloading" or done["queue"]["running"]:
                break
            time.sleep(_LOOK_S)
            done = client.send("POST", path, holds=answers.UNLOADED)
        said = "unloaded {}" if done["state"] != "unloading" else "{} is unloaded once its requests have ended"
        typer.echo(said.format(plain(row["id"])))


def logs(
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what comes, until Ctrl-C.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", help="Show so many of the last lines.", min=0)] = 50,
    data_dir: options.DataDir = None,
) -> None:
    """Show the daemon's log. It holds no conversation and no key; of 4 MB each this file is kept and the one before."""
    from ssmd.cli.session import plain
    from ssmd.daemon.discovery import running
    from ssmd.daemon.logfile import FILE, Reader
    from ssmd.daemon.place import data_dir as place

    where = place(data_dir)
    reader = Reader(where)
    try:
        found = reader.last(lines)
    except (FileNotFoundError, PermissionError) as err:
        running(where)  # raises for a directory of another user
        if isinstance(err, PermissionError):
            raise
        fail(f"there is no {where / FILE}: no daemon has run there that keeps a log; start one with: ssmd serve")
    while True:
        for line in found:
            typer.echo(plain(line))
        if not follow:
            break
        time.sleep(_FOLLOW_S)
        found = list(reader.more())


def reached(data_dir: Path) -> Client | None:
    """Return a client of the daemon on a data directory; None if none runs.

    Raises DaemonError for a daemon that does not answer. For one of another version, prints a note to stderr.
    """
    from ssmd.daemon.client import Client
    from ssmd.daemon.discovery import DaemonError, find, running

    found = find(data_dir)
    if found is None:
        if (process := running(data_dir)) is None:
            return None
        who, end = (f"process {process}", f"; or end it: kill {process}") if process else ("a process", "")
        state = "does not answer yet (starting, stopping or repairing)"
        raise DaemonError(f"{who} uses {data_dir} and {state}; try again in a few seconds{end}")
    if found.version != __version__:
        typer.echo(f"note: the daemon is ssmd {found.version}, this command {__version__}", err=True)
    return Client(found)


def needed(data_dir: Path) -> Client:
    """Return a client of the daemon on a data directory. Raises DaemonError if none runs or answers."""
    from ssmd.daemon.discovery import DaemonError

    client = reached(data_dir)
    if client is None:
        raise DaemonError(f"no daemon runs on {data_dir}; start one with: ssmd serve")
    return client
