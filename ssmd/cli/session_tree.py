"""`ssmd session tree|fork`: a session with all its branches, and a new session that begins at one of its turns."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from ssmd.cli import options
from ssmd.cli.session import Id, _summary, _turn, open_store, plain

if TYPE_CHECKING:
    from ssmd.sessions.turn import Turn

_WORDS = 40  # characters of each text that are shown
_SHORT_ID = 13  # as turn_0123abcd


def tree(session_id: Id, data_dir: options.DataDir = None, as_json: options.Json = False) -> None:
    """Show a session's turns and branches. A star marks the turn it goes on from, + those that need not be read again.

    Each line has the beginning of a turn's id, what was asked, what was answered, and how the answer ended.
    """
    with open_store(data_dir) as store:
        session, turns, kept = store.session(session_id), store.turns(session_id), store.resumable(session_id)
    if as_json:
        nodes = [_turn(t) | {"depth": t.depth, "resumable": t.id in kept, "head": t.id == session.head} for t in turns]
        typer.echo(json.dumps(_summary(session) | {"tree": nodes}, indent=1, ensure_ascii=False))
        return
    short = _short_ids([t.id for t in turns])
    parents = {t.parent for t in turns}
    branches = sum(t.id not in parents for t in turns)
    fork = f", forked at {short[session.base]}" if session.base else ""
    many = "branch" if branches == 1 else "branches"
    count = f"{len(turns)} {'turn' if len(turns) == 1 else 'turns'}, {branches} {many}"
    typer.echo(f"{session.id}  {plain(session.info.model)}  {count}{fork}")
    for rails, turn in _drawn(turns):
        marks = ("*" if turn.id == session.head else "-") + ("+" if turn.id in kept else " ")
        typer.echo(f"{rails}{marks} {short[turn.id]}  {_said(turn)}")


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
        wanted = turn if turn is None else _whole_id(turn, [t.id for t in store.turns(session_id)])
        made = store.fork(session_id, wanted)
    if as_json:
        typer.echo(json.dumps(_summary(made), ensure_ascii=False))
        return
    many = "turn" if made.turns == 1 else "turns"
    typer.echo(f"{made.id}: {made.turns} {many}, begins at {made.base}")


def _drawn(turns: Sequence[Turn]) -> Iterator[tuple[str, Turn]]:
    """Each turn with what stands before it. A conversation goes straight down; its branches are moved to the right."""
    children: dict[str | None, list[Turn]] = {}
    for turn in turns:
        children.setdefault(turn.parent, []).append(turn)
    waiting: list[tuple[str, str, Turn]] = []  # rails of its own line, of those below, turn

    def put(above: str | None, rails: str) -> None:
        below = children.get(above, [])
        for i, turn in reversed(list(enumerate(below))):
            if len(below) == 1:
                waiting.append((rails, rails, turn))
            else:
                last = i == len(below) - 1
                waiting.append((rails + ("`-" if last else "|-"), rails + ("  " if last else "| "), turn))

    put(None, "")
    while waiting:
        own, rails, turn = waiting.pop()
        yield own, turn
        put(turn.id, rails)


def _said(turn: Turn) -> str:
    asked = f"{turn.messages[-1].role}: {_words(turn.messages[-1].content)}" if turn.messages else "(no message)"
    more = f" (and {len(turn.messages) - 1} before)" if len(turn.messages) > 1 else ""
    end = turn.finish if turn.complete else f"{turn.finish}, incomplete"
    return f"{asked}{more}  {turn.answer.role}: {_words(turn.answer.said)}  [{end}]"


def _words(text: str) -> str:
    line = plain(" ".join(text.split()))
    return line if len(line) <= _WORDS else line[: _WORDS - 3].rstrip() + "..."


def _short_ids(ids: Sequence[str]) -> dict[str, str]:
    """Shorten each id to as much of it as tells it from the others."""
    length = _SHORT_ID
    while len({i[:length] for i in ids}) < len(ids):
        length += 1
    return {i: i[:length] for i in ids}


def _whole_id(beginning: str, ids: Sequence[str]) -> str:
    """The id that begins so, or what was given: the store says what is wrong with it. Raises StoreError on several."""
    from ssmd.sessions.turn import StoreError

    fitting = [i for i in ids if i.startswith(beginning)]
    if len(fitting) > 1 and beginning not in ids:
        raise StoreError(
            f"{len(fitting)} turns begin with {beginning!r}: {', '.join(fitting[:3])}; give more of the id"
        )
    return fitting[0] if len(fitting) == 1 else beginning
