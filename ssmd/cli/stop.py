"""`ssmd stop`: the end of the running daemon, or of one of its loaded models."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from ssmd.cli import options
from ssmd.cli.completion import models
from ssmd.cli.failure import fail

if TYPE_CHECKING:
    from ssmd.daemon.client import Client

_LOOK_S = 0.05
_LOOKS = 100  # for a model that answers nobody


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
    from ssmd.cli.running import needed, reached
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
    """Unload a model, or what is loaded under a name for whatever runtime, and say what came of it."""
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
            fail(f"{row['id']} is being loaded for a request that waits for it; stop it when it is there")
        path = f"/ssmd/v1/models/{quote(row['id'], safe='@')}/unload"
        done = client.send("POST", path, holds=answers.UNLOADED)
        for _ in range(_LOOKS):
            if done["state"] != "unloading" or done["queue"]["running"]:
                break
            time.sleep(_LOOK_S)
            done = client.send("POST", path, holds=answers.UNLOADED)
        said = "unloaded {}" if done["state"] != "unloading" else "{} goes as soon as it answers nobody any more"
        typer.echo(said.format(plain(row["id"])))
