"""The commands of a chat: what begins with a slash is one of these, and never goes to the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

import typer

from ssmd.cli.session import plain
from ssmd.cli.turn_tree import Node, drawn, said_by, whole_id, words
from ssmd.machine.spelling import meant, nearest
from ssmd.text.messages import Message

if TYPE_CHECKING:
    from ssmd.cli.chat import Chat

_LISTED = 20


class Over(Exception):
    """The chat is to end."""


@dataclass(frozen=True)
class Command:
    """What a slash calls. run: does it, with what follows its name; raises ValueError. takes, tells: for /help."""

    run: Callable[[Chat, str], None]
    takes: str
    tells: str


def unknown(name: str) -> str:
    """What is said of a command that there is not."""
    near = nearest(name, COMMANDS)
    advice = f"did you mean /{near}?" if near else "/help lists those that there are"
    return f"there is no command /{name[:40]}; {advice} (to send a line that begins with a slash: //{name[:40]} …)"


def _help(chat: Chat, argument: str) -> None:
    for name, command in COMMANDS.items():
        if name not in _ALSO:
            typer.echo(f"  {f'/{name} {command.takes}':22}{command.tells}")
    typer.echo('Alt-Enter begins a new line; so does Enter after """, until another """ ends the message.')
    typer.echo("Pasted lines are one message. A message that begins with a slash is typed with two, or after a space.")


def _session(chat: Chat, argument: str) -> None:
    if argument:
        _kept(chat)
        _go_to(chat, argument)
        return
    talk = chat.talk
    turns = sum(m["role"] == "assistant" for m in talk.messages)
    name = talk.session or ("nothing is kept (--no-store)" if not talk.keep else "a new one: nothing is kept yet")
    typer.echo(f"session: {plain(name)}\nmodel: {plain(talk.model)}\nturns: {turns}")
    if talk.room is not None and talk.room.context:
        used, context = talk.room.context - talk.room.left, talk.room.context
        typer.echo(f"context: {used:,} of {context:,} tokens, {100 * used / context:.0f} % full")


def _sessions(chat: Chat, argument: str) -> None:
    _kept(chat)
    if argument:
        _go_to(chat, argument)
        return
    found = chat.talk.daemon.last_sessions(_LISTED)
    chat.listed = [one["id"] for one in found]
    if not found:
        typer.echo("no session is kept here yet")
    for number, one in enumerate(found, 1):
        used = datetime.fromtimestamp(one["last_used"]).astimezone().strftime("%Y-%m-%d %H:%M")
        mark = "*" if one["id"] == chat.talk.session else " "
        turns = f"{one['turn_count']} {'turn' if one['turn_count'] == 1 else 'turns'}"
        typer.echo(
            f"{mark}{number:3} {plain(one['id']):28} {plain(one['model']):16} {turns:9} {used}  {plain(one['title'])}"
        )


def _go_to(chat: Chat, given: str) -> None:
    """By its id, the beginning of that, or its number in the list."""
    if given.isdecimal() and len(given) < 4:
        if not chat.listed:
            chat.listed = [one["id"] for one in chat.talk.daemon.last_sessions(_LISTED)]
        if not 1 <= int(given) <= len(chat.listed):
            raise ValueError(f"the list has {len(chat.listed)} sessions, no number {given}; /sessions shows it")
        given = chat.listed[int(given) - 1]
    _arrived(chat, chat.talk.go_to(given))


def _arrived(chat: Chat, session: dict[str, Any]) -> None:
    turns = sum(m["role"] == "assistant" for m in chat.talk.messages)
    typer.echo(f"session {plain(session['id'])}: {turns} {'turn' if turns == 1 else 'turns'}")
    for message in chat.talk.messages[-2:]:
        typer.echo(f"  {plain(message['role'])}: {words(message['content'])}")


def _tree(chat: Chat, argument: str) -> None:
    found = chat.talk.daemon.session(_kept(chat, begun=True))
    nodes = []
    for turn in found["turns"]:
        *asked, answer = turn["messages"]
        said = said_by(Message.from_json(answer))
        finish, complete = plain(turn["finish_reason"]), turn["complete"]
        nodes.append(Node(turn["id"], turn["parent"], tuple(asked), said, finish, complete))
    for line in drawn(nodes, found["head"]):
        typer.echo(line)


def _fork(chat: Chat, argument: str) -> None:
    session = _kept(chat, begun=True)
    turn = None
    if argument:
        turn = whole_id(argument, [one["id"] for one in chat.talk.daemon.session(session)["turns"]])
    _arrived(chat, chat.talk.fork(turn))


def _regen(chat: Chat, argument: str) -> None:
    _asked(chat)
    chat.ask(chat.talk.again)


def _more(chat: Chat, argument: str) -> None:
    why = chat.talk.ended()
    if why:
        raise ValueError(why)
    chat.ask(chat.talk.more)


def _edit(chat: Chat, argument: str) -> None:
    chat.edit(_asked(chat))


def _system(chat: Chat, argument: str) -> None:
    if argument:
        chat.talk.instruct("" if argument == '""' else argument.strip('"'))
    system = chat.talk.system
    none = 'there is no system prompt; /system TEXT sets one, /system "" takes it away'
    typer.echo(none if system is None else plain(system, lines=True))


def _set(chat: Chat, argument: str) -> None:
    name, _, value = argument.partition(" ")
    if not name:
        for line in chat.talk.manner.lines():
            typer.echo(line)
        return
    if not value.strip():
        raise ValueError(f"/set {name} needs a value, or default")
    chat.talk.manner = chat.talk.manner.changed(name, value.strip())


def _stats(chat: Chat, argument: str) -> None:
    chat.stats = not chat.stats
    typer.echo(f"each answer tells what it took: {'yes' if chat.stats else 'no'}")


def _model(chat: Chat, argument: str) -> None:
    daemon, models = chat.talk.daemon, chat.talk.daemon.models()
    if argument and not daemon.serves(argument):
        asked = f"there is no model {argument[:80]!r} here"
        raise ValueError(f"{asked}; {meant(argument, models)}there are: {', '.join(models)}")
    if argument:
        chat.talk.model = argument
    typer.echo(f"model: {plain(chat.talk.model)}; there are: {plain(', '.join(models))}")


def _quit(chat: Chat, argument: str) -> None:
    raise Over


def _kept(chat: Chat, *, begun: bool = False) -> str:
    """The session; begun: one that there is already. Raises ValueError."""
    if not chat.talk.keep:
        raise ValueError("nothing is kept: this chat was begun with --no-store")
    if begun and chat.talk.session is None:
        raise ValueError("nothing is kept of this chat yet; say something first")
    return chat.talk.session or ""


def _asked(chat: Chat) -> str:
    """What was asked last. Raises ValueError."""
    asked = chat.talk.last_question()
    if asked is None:
        raise ValueError("nothing was asked yet")
    return asked


COMMANDS: dict[str, Command] = {
    "help": Command(_help, "", "this list (also /?)"),
    "session": Command(
        _session,
        "[ID]",
        "which session this is, and how full its context; go on with another, by id, its beginning or number",
    ),
    "sessions": Command(_sessions, "", "the sessions used last"),
    "tree": Command(_tree, "", "the turns and branches of this session"),
    "fork": Command(_fork, "[TURN]", "go on in a new session that begins at a turn"),
    "regen": Command(_regen, "", "another answer, beside the last one"),
    "more": Command(_more, "", "go on with an answer that was cut at its longest, or stopped"),
    "edit": Command(_edit, "", "ask something else in place of the last message: a branch"),
    "system": Command(_system, "[TEXT]", "show or set the system prompt"),
    "set": Command(_set, "[NAME VALUE]", "show or set temperature and the like; VALUE default undoes it"),
    "stats": Command(_stats, "", "tell of each answer what it took, or no longer"),
    "model": Command(_model, "[NAME]", "show or change the model; the conversation goes on"),
    "quit": Command(_quit, "", "end the chat (also /bye, /exit, Ctrl-D)"),
}
_ALSO = {"?": "help", "bye": "quit", "exit": "quit"}
COMMANDS |= {name: COMMANDS[same] for name, same in _ALSO.items()}
