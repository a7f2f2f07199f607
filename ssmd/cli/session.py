"""`ssmd session`: the conversations kept here: list, show, rm. Works while the daemon runs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ssmd.cli import completion, options
from ssmd.machine.spelling import json_text

if TYPE_CHECKING:
    from ssmd.sessions.store import Store
    from ssmd.sessions.turn import Session, Turn
    from ssmd.text.messages import Message

app = typer.Typer(help="The conversations kept here.", no_args_is_help=True)
SHOWN = 100  # sessions of a list
BUSY_MS = 10_000  # a daemon may be writing a turn

Id = Annotated[str, typer.Argument(metavar="ID", help="The session's id.", autocompletion=completion.sessions)]


@contextmanager
def open_store(data_dir: Path | None) -> Iterator[Store]:
    """The store, for as long as the command runs."""
    from ssmd.config import Settings
    from ssmd.sessions.store import Store

    settings = Settings(data_dir=data_dir)
    settings.prepare()
    store = Store.open(settings.data_dir, busy_ms=BUSY_MS, quota=settings.quota)
    try:
        yield store
    finally:
        store.close()


@app.command("list")
def list_sessions(
    everything: Annotated[bool, typer.Option("--all", help="All, not only the 100 used last.")] = False,
    search: Annotated[
        str | None, typer.Option(help="Only those that have all these words, in title or text.", metavar="WORDS")
    ] = None,
    data_dir: options.DataDir = None,
    as_json: options.Json = False,
) -> None:
    """List the sessions, the one used last first. Size: its checkpoints; shared: what of them others need too. Key: the
    name of the API key whose it is.

    The 100 used last, unless with --all; --json always has all of them.
    """
    limited = not (everything or as_json)
    with open_store(data_dir) as store:
        most = SHOWN + 1 if limited else None
        if search is None:
            sessions = store.sessions(most)
        else:
            sessions = list(store.search(search, sys.maxsize if most is None else most).sessions)
    more = limited and len(sessions) > SHOWN
    if more:
        sessions.pop()
    if as_json:
        typer.echo(json_text([_summary(s) for s in sessions], 1))
        return
    if not sessions:
        typer.echo("no session is kept here yet" if search is None else "no session has all these words", err=True)
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    names = ["id", "model", "turns", "size", "shared", "last used", ""]
    owned = any(s.info.owner for s in sessions)
    rows = []
    for s in sessions:
        used = _used(s).astimezone().strftime("%Y-%m-%d %H:%M")
        sizes = _size(s.nbytes), _size(s.nbytes - s.own_nbytes) if s.nbytes > s.own_nbytes else ""
        pinned = "pinned" if s.info.pinned else ""
        owner = [plain(s.info.owner)] if owned else []
        rows.append((s.id, plain(s.info.model), str(s.turns), *sizes, used, pinned, *owner, plain(s.title)))
    table = Table(box=None, pad_edge=False)
    for i, name in enumerate([*names, "key"] if owned else names):
        table.add_column(name, no_wrap=True, min_width=max(len(name), *(len(row[i]) for row in rows)))
    table.add_column("title", no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, row))  # Text: what users and models wrote is not to be read as markup
    # A file or a pipe gets whole lines; a narrow terminal loses titles first, ids never.
    console = Console() if sys.stdout.isatty() else Console(width=1000)
    console.print(table)
    if more:
        typer.echo(f"those are the {SHOWN} used last; --all lists the others too", err=True)


@app.command("show")
def show(session_id: Id, data_dir: options.DataDir = None, as_json: options.Json = False) -> None:
    """Show a session and the conversation that leads to its current turn."""
    with open_store(data_dir) as store:
        session = store.session(session_id)
        path = store.path(session.head)
        everything = store.turns(session_id) if as_json else []
    if as_json:
        turns = [_turn(t) for t in everything]
        typer.echo(json_text(_summary(session) | {"tree": turns}, 1))
        return
    branches = f", {session.turns - len(path)} on other branches" if session.turns > len(path) else ""
    imported = ", imported" if session.info.imported else ""
    owner = f", of {plain(session.info.owner)}" if session.info.owner else ""
    model = plain(session.info.model)
    typer.echo(f"{session.id}  {model}  {len(path)} turns{branches}{imported}{owner}, {_size(session.nbytes)}")
    for turn in path:
        for message in turn.messages:
            typer.echo(f"\n{message.role}: {_shown(message)}")
        cut = "" if turn.complete else "  [cut off]"
        typer.echo(f"\n{turn.answer.role}: {_shown(turn.answer)}{cut}")


@app.command("rename")
def rename(
    session_id: Id,
    title: Annotated[
        str | None, typer.Argument(help="Its new title; left out: how its first message begins.", metavar="TITLE")
    ] = None,
    data_dir: options.DataDir = None,
    as_json: options.Json = False,
) -> None:
    """Give a session a title."""
    with open_store(data_dir) as store:
        session = store.rename(session_id, title)
    typer.echo(json_text(_summary(session), 1) if as_json else plain(session.title))


@app.command("rm")
def remove(
    session_ids: Annotated[
        list[str],
        typer.Argument(metavar="ID...", help="The sessions to remove.", autocompletion=completion.sessions),
    ],
    data_dir: options.DataDir = None,
    as_json: options.Json = False,
) -> None:
    """Remove sessions: their text, and the states that no other session uses. It cannot be undone."""
    with open_store(data_dir) as store:
        for session_id in session_ids:
            store.session(session_id)  # a wrong id among them: nothing is removed
        for session_id in dict.fromkeys(session_ids):
            store.delete(session_id)
            if not as_json:
                typer.echo(f"removed {session_id}")
    if as_json:
        typer.echo(json.dumps({"removed": list(dict.fromkeys(session_ids))}))


def _shown(message: Message) -> str:
    """What a message says, and what it calls, a line each."""
    calls = [f"calls {plain(call.name)}({plain(call.arguments)})" for call in message.tool_calls]
    said = [plain(message.content, lines=True)] if message.content or not calls else []
    return "\n".join([*said, *calls])


def _summary(session: Session) -> dict[str, Any]:
    return {
        "id": session.id,
        "model": session.info.model,
        "lineage": session.info.lineage,
        "turns": session.turns,
        "head": session.head,
        "base": session.base,
        "bytes": session.nbytes,
        "own_bytes": session.own_nbytes,
        "pinned": session.info.pinned,
        "imported": session.info.imported is not None,
        "owner": session.info.owner or None,
        "created_at": session.created_at.isoformat(),
        "last_used_at": _used(session).isoformat(),
        "title": session.title,
    }


def _used(session: Session) -> datetime:
    """When it was used last. Its order may be ahead of the clock, where that was once ahead of itself."""
    return min(session.last_used_at, datetime.now(UTC))


def _turn(turn: Turn) -> dict[str, Any]:
    return {
        "id": turn.id,
        "parent": turn.parent,
        "messages": [m.to_json() for m in turn.messages],
        "answer": turn.answer.to_json(),
        "prompt_tokens": turn.prompt_tokens,
        "finish": turn.finish,
        "complete": turn.complete,
        "created_at": turn.created_at.isoformat(),
    }


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e6:.1f} MB"


def plain(text: str, *, lines: bool = False) -> str:
    """Take control characters out: a stored reply, or an imported file, must not be able to steer the terminal."""
    return "".join(c if c.isprintable() or (lines and c in "\n\t") else "\ufffd" for c in text)
