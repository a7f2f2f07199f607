"""`ssmd session tree|fork`: a session with all its branches, and a new session that begins at one of its turns."""

from __future__ import annotations

from typing import Annotated

import typer

from ssmd.cli import options
from ssmd.cli.session import Id, _summary, _turn, open_store, plain
from ssmd.cli.turn_tree import Node, drawn, said_by, short_ids, whole_id
from ssmd.machine.spelling import json_text


def tree(session_id: Id, data_dir: options.DataDir = None, as_json: options.Json = False) -> None:
    """Show a session's turns and branches. A star marks the turn it goes on from, + those that need not be read again.

    Each line has the beginning of a turn's id, what was asked, what was answered, and how the answer ended.
    """
    with open_store(data_dir) as store:
        session, turns, kept = store.session(session_id), store.turns(session_id), store.resumable(session_id)
    if as_json:
        told = [_turn(t) | {"depth": t.depth, "resumable": t.id in kept, "head": t.id == session.head} for t in turns]
        typer.echo(json_text(_summary(session) | {"tree": told}, 1))
        return
    nodes = [
        Node(t.id, t.parent, tuple(m.to_json() for m in t.messages), said_by(t.answer), t.finish, t.complete)
        for t in turns
    ]
    fork = f", forked at {short_ids([t.id for t in turns])[session.base]}" if session.base else ""
    lines = drawn(nodes, session.head, kept)
    typer.echo(f"{session.id}  {plain(session.info.model)}  {next(lines)}{fork}")
    for line in lines:
        typer.echo(line)


def fork(
    session_id: Id,
    turn: Annotated[
        str | None,
        typer.Option("--turn", metavar="TURN", help="Where to begin: a turn's id or its beginning. Default: the head."),
    ] = None,
    data_dir: options.DataDir = None,
    as_json: options.Json = False,
) -> None:
    """Begin a new session at a turn of another one. Nothing is copied; both go on by themselves."""
    with open_store(data_dir) as store:
        wanted = turn if turn is None else whole_id(turn, [t.id for t in store.turns(session_id)])
        made = store.fork(session_id, wanted)
    if as_json:
        typer.echo(json_text(_summary(made)))
        return
    many = "turn" if made.turns == 1 else "turns"
    typer.echo(f"{made.id}: {made.turns} {many}, begins at {made.base}")
