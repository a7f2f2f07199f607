"""`ssmd store`: makes, checks, copies, measures and clears a remote, and says which machines are trusted."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ssmd.cli import options
from ssmd.cli.output import FAILED, USAGE, counted, fail, lines
from ssmd.cli.session import open_store

if TYPE_CHECKING:
    from ssmd.sessions.remote.remote import Quota, Remote

app = typer.Typer(help="The remote, through which machines share conversations (docs/remote.md).", no_args_is_help=True)
_SHOWN = 50  # faults that are shown; all are in --json


@contextmanager
def _remote(data_dir: Path | None, named: str | None, *, create: bool = False) -> Iterator[Remote]:
    """Open the remote of the option or the settings. create: make an empty place one."""
    from ssmd.config import Settings
    from ssmd.sessions.remote.sharing import open_at

    settings = Settings(data_dir=data_dir, remote=named)
    if settings.remote is None:
        fail("no remote is set: name it with --remote DIR|URL, or in the setting SSMD_REMOTE", USAGE)
    with closing(open_at(settings.remote, create=create)) as remote:
        yield remote


@app.command()
def init(remote: options.Remote = None, data_dir: options.DataDir = None, as_json: options.Json = False) -> None:
    """Make an empty folder or database a remote. Bring the tables of an older one to this version.

    A daemon does the same when it starts, if its role may make tables.
    """
    with _remote(data_dir, remote, create=True) as there:
        name = there.name
        if there.packs is not None:
            there.packs.there("0" * 64)  # raises RemoteError if the place for bytes is lost, or away
    typer.echo(json.dumps({"remote": name}) if as_json else f"{name} is a remote")


@app.command()
def check(remote: options.Remote = None, data_dir: options.DataDir = None, as_json: options.Json = False) -> None:
    """Read the whole remote: each turn against its digest, each state against its pack, each pack against its name.

    Says what is damaged or missing, and what to do. Changes nothing. Ends with 1 if something is damaged.
    """
    from ssmd.machine.size import show_size
    from ssmd.machine.spelling import printable
    from ssmd.sessions.remote.survey import REMEDIES
    from ssmd.sessions.remote.survey import check as look

    with _remote(data_dir, remote) as there:
        found, name, packs = look(there), there.name, there.packs is not None
    if as_json:
        faults = [
            {**vars(one), "loses_text": REMEDIES[one.kind][0], "remedy": REMEDIES[one.kind][1]} for one in found.faults
        ]
        counts = {"turns": found.turns, "states": found.states, "bytes": found.nbytes, "newer": found.newer}
        typer.echo(json.dumps({"remote": name, **counts, "packs": packs, "sound": found.sound, "faults": faults}))
    else:
        for one in found.faults[:_SHOWN]:
            where = f"session {one.session}" if one.session else f"pack {one.pack[:12]}"
            typer.echo(f"{where}: {printable(one.said, 300)}; {REMEDIES[one.kind][1]}")
        if len(found.faults) > _SHOWN:
            typer.echo(f"and {len(found.faults) - _SHOWN} more, which --json has")
        read = f"{counted(found.turns, 'turn')}, {counted(found.states, 'state')}, {show_size(found.nbytes)}"
        newer = f", {found.newer} of a newer version" if found.newer else ""
        bare = "" if packs else "; no place for bytes is named, so that no state was read"
        unnamed = sum(one.kind == "pack_unnamed" for one in found.faults)
        damaged = len(found.faults) - unnamed
        verdict = "all sound" if found.sound else f"{damaged} damaged or missing"
        typer.echo(f"{name}: {read}{newer}: {verdict}{bare}")
    if not found.sound:
        sys.exit(FAILED)


@app.command()
def copy(
    source: Annotated[str, typer.Argument(metavar="FROM", help="The remote that is copied: a folder or a database.")],
    target: Annotated[str, typer.Argument(metavar="TO", help="An empty folder or database, or a remote.")],
    as_json: options.Json = False,
) -> None:
    """Copy a remote into another one, such as a folder into a database. Removed conversations stay removed in both.

    The same command goes on after a kill, and copies what is new. Then set `remote` to the copy on each machine.
    """
    from ssmd.machine.progress import show_progress
    from ssmd.machine.size import show_size
    from ssmd.sessions.remote.sharing import open_at
    from ssmd.sessions.remote.survey import copy as copy_all

    with closing(open_at(source, create=False)) as here, closing(open_at(target, create=True)) as there:
        with show_progress("copying"):
            done = copy_all(here, there)
        name, bare = there.name, None in (here.packs, there.packs)
    if as_json:
        typer.echo(json.dumps({"to": name, **{("bytes" if k == "nbytes" else k): v for k, v in vars(done).items()}}))
    else:
        for said in done.refused[:_SHOWN]:
            typer.echo(f"not copied: {said}", err=True)
        said = f"{counted(done.turns, 'turn')}, {counted(done.states, 'state')}, {show_size(done.nbytes)}"
        said = f"{said} and {counted(done.tombstones, 'tombstone')} copied to {name}; {done.there} were there"
        typer.echo(said + ("; no states, as an address names no place for bytes" if bare else ""))
    if done.refused:
        sys.exit(FAILED)


@app.command()
def retain(
    days: Annotated[
        float | None, typer.Option(help="Remove states that were not written or fetched for so many days.", min=0)
    ] = None,
    size: Annotated[
        str | None, typer.Option("--size", help="Remove states until all take no more, such as 20GB.", metavar="SIZE")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be removed.")] = False,
    remote: options.Remote = None,
    data_dir: options.DataDir = None,
    as_json: options.Json = False,
) -> None:
    """Remove states from the remote, those first that were not used for longest. No turn is removed.

    A conversation whose state is gone is read again on the next machine. Daemons may go on meanwhile.
    """
    from ssmd.machine.size import parse_size, show_size
    from ssmd.sessions.remote.retention import Retention

    if days is None and size is None:
        fail("say which states go: --days N, or --size SIZE, or both", USAGE)
    try:
        limits = Retention(None if days is None else days * 86400, None if size is None else parse_size(size))
    except ValueError as err:
        fail(f"--size {size}: {err}", USAGE)
    with _remote(data_dir, remote) as there:
        done, name = there.retain(limits, dry_run=dry_run), there.name
    if as_json:
        gone = {"states": done.states, "bytes": done.nbytes, "removed": not dry_run}
        typer.echo(json.dumps({"remote": name, **gone, "kept": done.kept, "kept_bytes": done.kept_bytes}))
        return
    said = f"{counted(done.states, 'state')}, {show_size(done.nbytes)}, {'would be removed' if dry_run else 'removed'}"
    typer.echo(f"{said} from {name}; {counted(done.kept, 'state')}, {show_size(done.kept_bytes)}, kept")


@app.command()
def stats(remote: options.Remote = None, data_dir: options.DataDir = None, as_json: options.Json = False) -> None:
    """Count what the remote has, and what waits here to be sent to it."""
    from datetime import UTC, datetime

    from ssmd.machine.size import show_size
    from ssmd.sessions.rows import outbox

    with _remote(data_dir, remote) as there, open_store(data_dir) as store:
        size, name = there.size(), there.name
        packs = [] if there.packs is None else there.packs.names()
        with store.reading() as connection:
            waiting, oldest = outbox.waiting(connection), outbox.oldest(connection)
            mark = outbox.read_mark(connection, there.identity)
        quota = None if mark is None else there.quota(mark.machine)
    state_bytes = sum(nbytes for _, nbytes in packs)
    since = None if oldest is None else datetime.fromtimestamp(oldest / 1e6, UTC).isoformat(timespec="seconds")
    if as_json:
        own = {"machine": mark.machine if mark else None, "quota": vars(quota) if quota else None}
        more = {"packs": len(packs), "pack_bytes": state_bytes, "waiting": waiting, "oldest_waiting": since, **own}
        typer.echo(json.dumps({"remote": name, **vars(size), **more}))
        return
    rows = [
        ("remote", name),
        ("sessions", str(size.sessions)),
        ("turns", f"{size.turns}, {show_size(size.turn_bytes)}"),
        ("states", f"{size.states}, {show_size(state_bytes)} in {counted(len(packs), 'pack')}"),
        ("tombstones", str(size.tombstones)),
        ("machines", str(size.machines)),
        *([("this machine", _machine(mark.machine, quota))] if mark is not None else []),
        ("waiting here", f"{waiting}" + (f", the oldest turn is of {since}" if since else "")),
    ]
    for line in lines(rows):
        typer.echo(line)


def _machine(name: str, quota: Quota | None) -> str:
    from ssmd.machine.size import show_size

    return name if quota is None else f"{name}, {show_size(quota.used)} of {show_size(quota.limit)}"
