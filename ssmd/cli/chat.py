"""A chat in the terminal: a message, an answer as it comes, and the next message, until Ctrl-D."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import typer

from ssmd.cli import terminal
from ssmd.cli.chat_commands import COMMANDS, Over, unknown
from ssmd.cli.session import plain
from ssmd.cli.talk import Room, Said, Show, Talk
from ssmd.cli.turn_tree import words
from ssmd.daemon.discovery import DaemonError
from ssmd.daemon.said import number, of, text
from ssmd.machine import modes
from ssmd.machine.spelling import json_text

ROOM = 0.15  # share of the context: with less left the user gets a note
ENDED = 128  # and the number of the signal that ends a chat


@dataclass
class Chat:
    """A talk with who types. stats: tell of each answer what it took. as_json: each answer is an object.

    listed: the ids of the sessions that were shown last, for whoever names one by its number.
    """

    talk: Talk
    typed: terminal.Typed
    stats: bool = False
    as_json: bool = False
    listed: list[str] = field(default_factory=list)
    _default: str = ""  # what stands at the next prompt already
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
            except Over:
                break
            except KeyboardInterrupt:
                editing, self._editing = self._editing, False
                typer.echo("(the last message stays)" if editing else "(Ctrl-D ends the chat)", err=True)
        session = self.talk.session
        if session is not None:
            session = plain(session)
            typer.echo(f"session {session}; continue with: ssmd run --session {session} (or -c)", err=True)

    def _take(self, text: str) -> None:
        """Do what was typed: a command, or a message."""
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
        """Have a message at the next prompt that takes the place of the last one."""
        self._default, self._editing = _typed(text), True

    def ask(self, how: Callable[[Show], Said], message: str = "") -> None:
        """Write an answer as it comes. message: what is to stand at the next prompt again if there is none."""
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
            err = DaemonError("the session was removed; what was said goes on in a new one")
        again = "; your message is kept: Enter sends it again" if message else ""
        self._default = _typed(message)
        typer.echo(f"error: {plain(str(err))}{again}", err=True)


def _typed(message: str) -> str:
    """A message as it is typed: one that begins with a slash is no command."""
    return f"/{message}" if message.startswith("/") else message


@contextlib.contextmanager
def interruptible(talk: Talk) -> Iterator[list[int]]:
    """Ctrl-C stops the answer, wherever it comes; the list tells whether it did."""
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
    """Leave as one leaves a block when this process is told to end: the terminal is as before, and no file is left.

    What it was started to ignore, as by nohup, it still ignores.
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


def as_json(said: Said) -> str:
    """An answer as one object in one line."""
    return json_text({"text": said.text, "session": said.session, "usage": said.usage})


def notes(talk: Talk, said: Said, before: Room | None = None, more: str = "") -> Iterator[str]:
    """Yield notes on the context after an answer. before: the room after the previous answer. more: the command that
    continues an answer.
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
        yield f"(the context is {100 * (1 - room.left / room.context):.0f} % full, {left}; then the oldest messages go)"
    if said.finish == "length" and more:
        why = talk.ended()
        yield f"(cut: {why})" if why else f"(cut at its longest; {more} goes on with it)"


def stats_line(said: Said) -> str:
    """What an answer took."""
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
