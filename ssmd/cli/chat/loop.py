"""A chat in the terminal: a message, an answer as it comes, and the next message, until Ctrl-D."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import typer

from ssmd.cli.chat import terminal
from ssmd.cli.chat.talk import ChatReply, ContextRoom, Show, Talk
from ssmd.cli.output import counted
from ssmd.cli.session import plain, whole_id
from ssmd.cli.session_tree import Node, drawn, said_by, words
from ssmd.daemon.discovery import DaemonError
from ssmd.daemon.said import number, of, text
from ssmd.machine import modes
from ssmd.machine.spelling import json_text, meant, nearest
from ssmd.text.messages import Message

ROOM = 0.15  # share of the context: with less left the user gets a note
ENDED = 128  # and the number of the signal that ends a chat

_LISTED = 20


@dataclass
class Chat:
    """A chat with a user. stats: print the usage after each answer. as_json: print each answer as an object.

    listed: ids of the sessions shown last, so that the user can give a session's number.
    """

    talk: Talk
    typed: terminal.MessageSource
    stats: bool = False
    as_json: bool = False
    listed: list[str] = field(default_factory=list)
    _default: str = ""  # text that the next prompt begins with
    _editing: bool = False

    def run(self) -> None:
        """Chat until Ctrl-D or /quit."""
        typer.echo("Ctrl-C stops an answer, Ctrl-D ends the chat; /help tells more.", err=True)
        while True:
            default, self._default = self._default, ""
            self.talk.unstop()
            try:
                self._take(self.typed.read(default))
            except EOFError:
                typer.echo("")
                break
            except EndOfChat:
                break
            except KeyboardInterrupt:
                editing, self._editing = self._editing, False
                typer.echo("(the last message stays)" if editing else "(Ctrl-D ends the chat)", err=True)
        session = self.talk.session
        if session is not None:
            session = plain(session)
            typer.echo(f"session {session}; continue with: ssmd run --session {session} (or -c)", err=True)

    def _take(self, text: str) -> None:
        """Run the typed command, or send the typed message."""
        editing, self._editing = self._editing, False
        message = terminal.unquoted(text)
        if message is None and text.startswith("/") and not text.startswith("//"):
            self._command(text)
            return
        if message is None:
            bare = text.lstrip(" ")
            message = text[1:] if text.startswith("//") else bare if bare.startswith("/") else text
        if message.strip():
            self.ask(lambda show: (self.talk.edited if editing else self.talk.say)(message, show), message)
            self._editing = editing and bool(self._default)  # it is sent again in the same place

    def _command(self, text: str) -> None:
        name, argument = [*text[1:].split(None, 1), "", ""][:2]
        try:
            if name not in COMMANDS:
                raise ValueError(unknown(name))
            COMMANDS[name].run(self, argument.strip())
        except ValueError as err:  # a DaemonError is one
            typer.echo(f"error: {plain(str(err))}", err=True)

    def edit(self, text: str) -> None:
        """Put a text into the next prompt; the message sent from there replaces the last one."""
        self._default, self._editing = _typed(text), True

    def ask(self, how: Callable[[Show], ChatReply], message: str = "") -> None:
        """Write an answer as it comes. message: the user's line, put back at the next prompt if no answer comes."""
        shown, before = False, self.talk.room

        def show(text: str) -> None:
            nonlocal shown
            shown = True
            screen.show(text)

        try:
            if self.typed.interrupted():
                self.talk.stop()
            with modes.pasting(), terminal.Screen() as screen:
                said = how((lambda text: None) if self.as_json else show)
        except DaemonError as err:
            if shown:
                typer.echo("")
            self._failed(err, message)
            return
        if self.as_json:
            typer.echo(as_json(said))
        else:
            typer.echo("" if said.whole else " …")
        for note in notes(self.talk, said, before, more="/more"):
            typer.echo(note, err=True)
        if self.stats:
            typer.echo(stats_line(said), err=True)

    def _failed(self, err: DaemonError, message: str) -> None:
        if err.code == "session_not_found":
            self.talk.session = None
            err = DaemonError("the session was removed; the conversation continues in a new one")
        again = "; your message is kept: Enter sends it again" if message else ""
        self._default = _typed(message)
        typer.echo(f"error: {plain(str(err))}{again}", err=True)


def _typed(message: str) -> str:
    """Return a message as it has to be typed, so that a leading slash does not make it a command."""
    return f"/{message}" if message.startswith("/") else message


@contextlib.contextmanager
def interruptible(talk: Talk) -> Iterator[list[int]]:
    """Let Ctrl-C stop the answer at any moment. The yielded list is not empty if it was pressed."""
    came: list[int] = []

    def stop(number: int, frame: Any) -> None:
        came.append(number)
        talk.stop()

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield came
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into an exception, so that blocks clean up: terminal modes, temporary files.

    Signals that the process was started to ignore, as by nohup, stay ignored.
    """
    names = ("SIGTERM", "SIGHUP")
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
    numbers = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]
    before = [signal.signal(number, lambda number, _: sys.exit(ENDED + number)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def as_json(said: ChatReply) -> str:
    """Format an answer as one object in one line."""
    return json_text({"text": said.text, "session": said.session, "usage": said.usage})


def notes(talk: Talk, said: ChatReply, before: ContextRoom | None = None, more: str = "") -> Iterator[str]:
    """Yield notes on the context after an answer.

    before: the room after the previous answer. more: the command that continues an answer.
    """
    room, unread = talk.room, 0 if before is None else before.unread
    first = talk.first_read()
    if said.usage is None or room is None:
        first = None
    elif first is not None and room.unread > unread:
        yield (
            f"(no room for the oldest {room.unread} messages: the model reads on from {words(first['content'])!r}; "
            "all of them are kept)"
        )
    elif room.left < ROOM * room.context and (before is None or before.left >= ROOM * before.context):
        left = f"{room.left:,} of {room.context:,} tokens are left"
        yield f"(the context is {100 * (1 - room.left / room.context):.0f} % full, {left}; then old messages drop out)"
    if said.finish == "length" and more:
        why = talk.ended()
        yield f"(cut: {why})" if why else f"(cut at its limit; {more} continues it)"


def stats_line(said: ChatReply) -> str:
    """Format an answer's token counts, times and storage in one line."""
    stored = "stored" if said.stored else "not stored"
    if said.usage is None:
        return f"[stopped; {stored}]"
    own, details = of(said.usage, "ssmd"), of(said.usage, "prompt_tokens_details")
    counted = (said.usage.get("prompt_tokens"), details.get("cached_tokens"), said.usage.get("completion_tokens"))
    fed, cached, generated = (f"{number(one) or 0:.0f}" for one in counted)
    tbt_ms = number(own.get("tbt_ms")) or 0
    rate = f", {1e3 / tbt_ms:.1f} tokens/s" if tbt_ms > 0 else ""
    return (
        f"[{fed} prompt tokens, {cached} cached ({plain(text(own, 'resume'))}), "
        f"{generated} generated; first after {number(own.get('ttft_ms')) or 0:.0f} ms{rate}; {stored}]"
    )


class EndOfChat(Exception):
    """The end of the chat."""


@dataclass(frozen=True)
class Command:
    """A slash command."""

    run: Callable[[Chat, str], None]  # gets the text after the command's name; raises ValueError
    takes: str  # its arguments, for /help
    tells: str  # its purpose, for /help


def unknown(name: str) -> str:
    """Return the message for an unknown command."""
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
    for n, one in enumerate(found, 1):
        used = datetime.fromtimestamp(one["last_used"]).astimezone().strftime("%Y-%m-%d %H:%M")
        mark = "*" if one["id"] == chat.talk.session else " "
        turns = counted(one["turn_count"], "turn")
        typer.echo(
            f"{mark}{n:3} {plain(one['id']):28} {plain(one['model']):16} {turns:9} {used}  {plain(one['title'])}"
        )


def _go_to(chat: Chat, given: str) -> None:
    """Go to a session by its id, the beginning of that, or its number in the list."""
    if given.isdecimal() and len(given) < 4:
        if not chat.listed:
            chat.listed = [one["id"] for one in chat.talk.daemon.last_sessions(_LISTED)]
        if not 1 <= int(given) <= len(chat.listed):
            raise ValueError(f"the list has {len(chat.listed)} sessions, no number {given}; /sessions shows it")
        given = chat.listed[int(given) - 1]
    _arrived(chat, chat.talk.go_to(given))


def _arrived(chat: Chat, session: dict[str, Any]) -> None:
    turns = sum(m["role"] == "assistant" for m in chat.talk.messages)
    typer.echo(f"session {plain(session['id'])}: {counted(turns, 'turn')}")
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
        turn = whole_id("turns", argument, [one["id"] for one in chat.talk.daemon.session(session)["turns"]])
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
    none = 'there is no system prompt; /system TEXT sets one, /system "" removes it'
    typer.echo(none if system is None else plain(system, lines=True))


def _set(chat: Chat, argument: str) -> None:
    name, _, value = argument.partition(" ")
    if not name:
        for line in chat.talk.options.lines():
            typer.echo(line)
        return
    if not value.strip():
        raise ValueError(f"/set {name} needs a value, or default")
    chat.talk.options = chat.talk.options.changed(name, value.strip())


def _stats(chat: Chat, argument: str) -> None:
    chat.stats = not chat.stats
    typer.echo(f"usage after each answer: {'yes' if chat.stats else 'no'}")


def _model(chat: Chat, argument: str) -> None:
    daemon, models = chat.talk.daemon, chat.talk.daemon.models()
    if argument and not daemon.serves(argument):
        asked = f"there is no model {argument[:80]!r} here"
        raise ValueError(f"{asked}; {meant(argument, models)}there are: {', '.join(models)}")
    if argument:
        chat.talk.model = argument
    typer.echo(f"model: {plain(chat.talk.model)}; there are: {plain(', '.join(models))}")


def _quit(chat: Chat, argument: str) -> None:
    raise EndOfChat


def _kept(chat: Chat, *, begun: bool = False) -> str:
    """Return the session's id, or "". begun: it must be stored already. Raises ValueError."""
    if not chat.talk.keep:
        raise ValueError("nothing is stored: this chat was started with --no-store")
    if begun and chat.talk.session is None:
        raise ValueError("this chat is not stored yet; send a message first")
    return chat.talk.session or ""


def _asked(chat: Chat) -> str:
    """Return the last question. Raises ValueError before the first question."""
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
    "more": Command(_more, "", "continue an answer that was cut at its limit, or stopped"),
    "edit": Command(_edit, "", "ask something else in place of the last message: a branch"),
    "system": Command(_system, "[TEXT]", "show or set the system prompt"),
    "set": Command(_set, "[NAME VALUE]", "show or set temperature and the like; VALUE default undoes it"),
    "stats": Command(_stats, "", "show or hide the usage after each answer"),
    "model": Command(_model, "[NAME]", "show or change the model; the conversation goes on"),
    "quit": Command(_quit, "", "end the chat (also /bye, /exit, Ctrl-D)"),
}
_ALSO = {"?": "help", "bye": "quit", "exit": "quit"}
COMMANDS |= {name: COMMANDS[same] for name, same in _ALSO.items()}
