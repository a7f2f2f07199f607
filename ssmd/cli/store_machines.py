"""`ssmd store key`, `machines`, `trust`, `distrust`: the machines whose states serve here as this one's own."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Annotated

import typer

from ssmd.cli import options
from ssmd.cli.output import counted, lines
from ssmd.cli.session import open_store

Key = Annotated[str, typer.Argument(metavar="KEY", help="The machine's key: `ssmd store key` shows it there.")]


def key(
    new: Annotated[bool, typer.Option("--new", help="Make another one, as after a theft.")] = False,
    data_dir: options.DataDir = None,
    as_json: options.Json = False,
) -> None:
    """Show this machine's public key. It signs with it what it sends to a remote. The first call makes the key."""
    from ssmd.sessions.remote.signing import FILE, KeyRefused, new_key, own_key, read_key

    with open_store(data_dir) as store:
        before = None
        if new:
            try:
                before = read_key(store.file.parent)
            except KeyRefused as err:
                typer.echo(f"{err}", err=True)
        made = new_key(store) if new else own_key(store)
        file = store.file.parent / FILE
    if as_json:
        typer.echo(json.dumps({"key": made.public, "file": str(file)}))
        return
    typer.echo(made.public)
    if new:
        old = "ssmd store distrust " + ("OLD_KEY" if before is None else before.public)
        typer.echo(f"on each machine that trusted this one: {old}", err=True)
        typer.echo(f"on each one that is to trust it: ssmd store trust {made.public}", err=True)


def machines(data_dir: options.DataDir = None, as_json: options.Json = False) -> None:
    """List the machines that are trusted here, and how many states are stored because of each."""
    from ssmd.machine.spelling import printable
    from ssmd.sessions.rows.trust import trusted

    with open_store(data_dir) as store, store.reading() as connection:
        found = trusted(connection)
    since = {one.key: datetime.fromtimestamp(one.trusted_at / 1e6, UTC).isoformat(timespec="seconds") for one in found}
    if as_json:
        fields = ("key", "name", "states")
        rows = [{**{name: getattr(one, name) for name in fields}, "trusted_at": since[one.key]} for one in found]
        typer.echo(json.dumps({"machines": rows}))
        return
    if not found:
        typer.echo("no machine is trusted here; `ssmd store trust KEY` trusts one", err=True)
    for line in lines([(one.key, since[one.key], counted(one.states, "state"), printable(one.name)) for one in found]):
        typer.echo(line)


def trust(
    machine: Key,
    name: Annotated[str, typer.Option("--name", help="A name for it, such as laptop.", metavar="NAME")] = "",
    data_dir: options.DataDir = None,
    as_json: options.Json = False,
) -> None:
    """Trust a machine: states that it vouches for serve all conversations here, as this machine's own.

    It can then plant states here, which may say anything, and so can each machine that it trusts. Compare the key with
    what `ssmd store key` shows on that machine.
    """
    from ssmd.sessions.rows import trust as rows

    with open_store(data_dir) as store, store.writing() as connection:
        rows.trust(connection, machine, name)
        public = rows.check_key(machine)
    typer.echo(json.dumps({"key": public, "trusted": True}) if as_json else f"{public} is trusted here")


def distrust(machine: Key, data_dir: options.DataDir = None, as_json: options.Json = False) -> None:
    """End the trust in a machine, and remove its states and all that grew from them. Their text stays."""
    from ssmd.sessions.rows import trust as rows

    with open_store(data_dir) as store:
        with store.writing() as connection:
            removed = rows.distrust(connection, machine)
            public = rows.check_key(machine)
        store.settle()
    said = f"{public} is not trusted any more, {counted(removed, 'state')} removed"
    typer.echo(json.dumps({"key": public, "trusted": False, "states": removed}) if as_json else said)
