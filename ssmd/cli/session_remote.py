"""`ssmd session push`, `pull`, `local`, `sweep`: conversations to the remote and from it. The daemon may run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ssmd.cli import completion, options
from ssmd.cli.output import USAGE, counted, fail
from ssmd.cli.session import Id, _size, open_store, read_session
from ssmd.cli.session_move import _local_models

if TYPE_CHECKING:
    from ssmd.sessions.remote.remote import Remote
    from ssmd.sessions.store import Store


@contextmanager
def _remote(data_dir: Path | None, named: str | None) -> Iterator[tuple[Store, Remote]]:
    """Open the store, and the remote of the option or the settings."""
    from ssmd.config import Settings
    from ssmd.sessions.remote.sharing import open_remote

    settings = Settings(data_dir=data_dir, remote=named)
    if settings.remote is None:
        fail("no remote is set: name it with --remote DIR|URL, or in the setting SSMD_REMOTE", USAGE)
    with open_store(data_dir) as store, closing(open_remote(store, settings.remote)) as remote:
        yield store, remote


def push(
    session_ids: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ID...]", help="The sessions' ids.", autocompletion=completion.sessions),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Send all sessions but imported and local ones.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be sent.")] = False,
    remote: options.Remote = None,
    data_dir: options.DataDir = None,
    as_json: options.Json = False,
) -> None:
    """Send sessions to the remote, also those from before it was set. Their text goes, their states do not.

    First it says how many turns and bytes go. Every user with access to the remote can read them.
    """
    from ssmd.sessions.remote.sending import send
    from ssmd.sessions.remote.sharing import discard_altered, share, shareable

    if bool(session_ids) == everything:
        fail("name sessions, or all of them with --all", USAGE)
    with _remote(data_dir, remote) as (store, there):
        ids = None if everything else [read_session(store, one).id for one in session_ids or ()]
        found = shareable(store, ids)
        turns, nbytes = sum(one.turns for one in found), sum(one.nbytes for one in found)
        if not as_json:
            amount = f"{counted(turns, 'turn')} of {counted(len(found), 'session')}, {_size(nbytes)}"
            typer.echo(f"{amount}, to {there.name}")
        if not dry_run:
            for one in found:
                share(store, one.session)
                discard_altered(store, there, one.session)
                send(store, there)
    if as_json:
        typer.echo(json.dumps({"sessions": len(found), "turns": turns, "bytes": nbytes, "sent": not dry_run}))


def pull(
    session_id: Annotated[str, typer.Argument(metavar="ID", help="The session's whole id.")],
    remote: options.Remote = None,
    data_dir: options.DataDir = None,
    models_dir: options.ModelsDir = None,
    as_json: options.Json = False,
) -> None:
    """Fetch all turns of a session that the remote has and this machine has not, branches included."""
    from ssmd.config import Settings
    from ssmd.sessions.remote.sharing import pull_session

    models = _local_models(Settings(data_dir=data_dir, models_dir=models_dir).models_dir)
    with _remote(data_dir, remote) as (store, there):
        written = pull_session(store, there, session_id, {lineage: m.vocabulary for lineage, m in models.items()})
    news = f"{session_id}: {counted(written, 'new turn')}"
    typer.echo(json.dumps({"id": session_id, "turns": written}) if as_json else news)


def local(
    session_id: Id,
    data_dir: options.DataDir = None,
    as_json: options.Json = False,
) -> None:
    """Keep a session on this machine: no turn of it is sent from now on. `ssmd session push` ends that.

    What was sent before stays in the remote until the session is removed.
    """
    from ssmd.sessions.remote.sharing import keep_local

    with open_store(data_dir) as store:
        session = read_session(store, session_id)
        keep_local(store, session.id)
    typer.echo(json.dumps({"id": session.id, "local": True}) if as_json else f"{session.id} stays on this machine")


def sweep(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be removed.")] = False,
    remote: options.Remote = None,
    data_dir: options.DataDir = None,
    as_json: options.Json = False,
) -> None:
    """Remove from the remote the parts of states that a crash left there, once they are a day old.

    No conversation and no state in use is removed. Other machines may go on meanwhile.
    """
    with _remote(data_dir, remote) as (_, there):
        count, nbytes = there.sweep(dry_run=dry_run)
    if as_json:
        typer.echo(json.dumps({"files": count, "bytes": nbytes, "removed": not dry_run}))
    else:
        amount = f"{counted(count, 'file')}, {_size(nbytes)}"
        typer.echo(f"{amount}, {'would be removed' if dry_run else 'removed'} from {there.name}")
