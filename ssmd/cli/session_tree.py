"""`ssmd session tree|fork`: a session with all its branches, and a new session that begins at one of its turns."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ssmd.cli import options
from ssmd.cli.output import counted
from ssmd.cli.session import Id, _summary, _turn, has_answer, open_store, plain, read_session, whole_id
from ssmd.machine.spelling import json_text

if TYPE_CHECKING:
    from ssmd.text.messages import Message

_WORDS = 40  # characters of each text that are shown
_SHORT_ID = 13  # least characters of a shown id, such as turn_0123abcd


def tree(session_id: Id, data_dir: options.DataDir = None, as_json: options.Json = False) -> None:
    """Show a session's turns and branches. A star marks the turn it goes on from, + those that need not be read again.

    Each line has the beginning of a turn's id, what was asked, what was answered, and how the answer ended.
    """
    with open_store(data_dir) as store:
        session = read_session(store, session_id)
        turns, kept = store.turns(session.id), store.resumable(session.id)
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
        session = read_session(store, session_id)
        wanted = turn if turn is None else whole_id("turns", turn, [t.id for t in store.turns(session.id)])
        made = store.fork(session.id, wanted)
    if as_json:
        typer.echo(json_text(_summary(made)))
        return
    typer.echo(f"{made.id}: {counted(made.turns, 'turn')}, begins at {made.base}")


@dataclass(frozen=True)
class Node:
    """A turn: its input messages, its answer, and how that ended."""

    id: str
    parent: str | None
    asked: tuple[Mapping[str, Any], ...]
    answer: str
    finish: str
    complete: bool


def drawn(nodes: Sequence[Node], head: str, kept: Collection[str] = ()) -> Iterator[str]:
    """Yield the numbers of turns and branches, then a line for each turn. A star marks the head, + those in `kept`."""
    short = short_ids([one.id for one in nodes])
    parents = {one.parent for one in nodes}
    branches = sum(one.id not in parents for one in nodes)
    yield f"{counted(len(nodes), 'turn')}, {counted(branches, 'branch')}"
    for rails, one in _railed(nodes):
        marks = ("*" if one.id == head else "-") + ("+" if one.id in kept else " ")
        yield f"{rails}{marks} {short[one.id]}  {_said(one)}"


def said_by(answer: Message) -> str:
    """Return an assistant's text, and its calls with their arguments."""
    calls = [f"calls {call.name}({call.arguments})" for call in answer.tool_calls]
    return " ".join([*([answer.said] if answer.said else []), *calls])


def _railed(nodes: Sequence[Node]) -> Iterator[tuple[str, Node]]:
    """Yield each turn with the rails before it. A conversation goes straight down; branches are moved to the right."""
    children: dict[str | None, list[Node]] = {}
    for node in nodes:
        children.setdefault(node.parent, []).append(node)
    waiting: list[tuple[str, str, Node]] = []  # rails of its own line, of those below, turn

    def put(above: str | None, rails: str) -> None:
        below = children.get(above, [])
        for i, node in reversed(list(enumerate(below))):
            if len(below) == 1:
                waiting.append((rails, rails, node))
            else:
                last = i == len(below) - 1
                waiting.append((rails + ("`-" if last else "|-"), rails + ("  " if last else "| "), node))

    put(None, "")
    while waiting:
        own, rails, node = waiting.pop()
        yield own, node
        put(node.id, rails)


def _said(node: Node) -> str:
    asked = f"{plain(node.asked[-1]['role'])}: {words(node.asked[-1]['content'])}" if node.asked else "(no message)"
    more = f" (and {len(node.asked) - 1} before)" if len(node.asked) > 1 else ""
    if not has_answer(node.finish):
        return f"{asked}{more}  (no answer)"
    end = node.finish if node.complete else f"{node.finish}, incomplete"
    return f"{asked}{more}  assistant: {words(node.answer)}  [{end}]"


def words(text: str) -> str:
    """Return the beginning of a text, in one line."""
    line = plain(" ".join(text.split()))
    return line if len(line) <= _WORDS else line[: _WORDS - 3].rstrip() + "..."


def short_ids(ids: Sequence[str]) -> dict[str, str]:
    """Shorten each id to the fewest characters that differ from all others."""
    length = _SHORT_ID
    while len({i[:length] for i in ids}) < len(ids):
        length += 1
    return {i: i[:length] for i in ids}
