"""The terminal that a chat is held in: its prompt, what is typed while an answer comes, and what it is not told.

While an answer is written nothing of what is typed is shown or lost: the terminal keeps it, unechoed, for the prompt
that comes next. Ctrl-C reaches the program by a signal, and does not throw away what was typed before it. From Enter
until the prompt has left the terminal it is a byte among those typed ahead, and is looked for there.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import typer

from ssmd.cli.session import plain
from ssmd.machine import modes

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.key_binding import KeyBindings

# A model's answer must not be able to steer the terminal.
_CONTROLS = dict.fromkeys([c for c in (*range(32), *range(127, 160)) if chr(c) not in "\n\t"], "\ufffd")
HISTORY = "chat_history"  # in the data directory
BLOCK = '"""'
_READS = 8  # of 1 KiB: more than a terminal keeps of what nobody read


def show(text: str) -> None:
    """Write an answer's text, as it comes: to a terminal without what would steer it."""
    sys.stdout.write(text.translate(_CONTROLS) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def show_thinking(on: bool) -> None:
    """Tell on a terminal that the model thinks, until it speaks: the reasoning itself is folded."""
    if modes.draws():
        sys.stdout.write("Thinking…" if on else "\r\x1b[K")
        sys.stdout.flush()


class Typed(Protocol):
    """Where a person's messages come from."""

    def read(self, default: str = "") -> str:
        """One message. default: what stands there already. Raises EOFError, and KeyboardInterrupt on Ctrl-C."""

    def interrupted(self) -> bool:
        """Whether Ctrl-C was typed after the message and came as a byte; it is taken out of what was typed ahead."""


class Lines:
    """Messages that are a line each: of a terminal whose output goes elsewhere, or that nothing can be drawn on."""

    def read(self, default: str = "") -> str:
        if default:
            sys.stderr.write(f"Enter alone sends: {plain(default)}\n")
        sys.stderr.write("> ")
        sys.stderr.flush()
        before = signal.signal(signal.SIGINT, signal.default_int_handler)  # here alone it breaks something off
        try:
            line = sys.stdin.readline()
        finally:
            signal.signal(signal.SIGINT, before)
        if not line:
            raise EOFError
        return line.rstrip("\r\n") or default

    def interrupted(self) -> bool:
        return False  # here it always is a signal


class Prompt:
    """Messages of as many lines as are pasted, or typed with Alt-Enter or between triple quotes."""

    def __init__(self, history: Path | None, words: Sequence[str], silence: Callable[[], None]) -> None:
        """history: the file that keeps what was typed; None: nothing does. words: that Tab completes. silence: called
        when the prompt has left the terminal.
        """
        from prompt_toolkit import PromptSession
        from prompt_toolkit.completion import WordCompleter
        from prompt_toolkit.output import create_output
        from prompt_toolkit.output.vt100 import Vt100_Output

        from ssmd.cli.history import Kept

        output = create_output()
        if isinstance(output, Vt100_Output):
            output.enable_cpr = False  # where a terminal does not tell its cursor's place, an answer would wait for it
        self._silence = silence
        self._default = ""
        self._history = Kept(history)
        self._session: PromptSession[str] = PromptSession(
            history=self._history,
            completer=WordCompleter(list(words), sentence=True),
            complete_while_typing=False,
            key_bindings=_keys(lambda: bool(self._default)),
            multiline=True,
            prompt_continuation="  ",
            output=output,
        )

    def read(self, default: str = "") -> str:
        app = self._session.app
        before = signal.getsignal(signal.SIGINT)

        def interrupt(number: int, frame: Any) -> None:
            """To the prompt while it is there; after Enter to whoever was told of it before."""
            if app.is_running and not app.is_done and app.loop is not None:
                app.loop.call_soon_threadsafe(app.key_processor.send_sigint)
            elif callable(before):
                before(number, frame)

        self._tell()
        self._default = default
        signal.signal(signal.SIGINT, interrupt)
        try:
            return self._session.prompt("> ", default=default, handle_sigint=False)
        finally:
            signal.signal(signal.SIGINT, before)
            self._silence()
            self._tell()

    def _tell(self) -> None:
        """Say once, where no prompt stands, what became of the history."""
        if self._history.problem:
            typer.echo(f"note: {plain(self._history.problem)}", err=True)
            self._history.problem = ""

    def interrupted(self) -> bool:
        from prompt_toolkit.input.typeahead import get_typeahead, store_typeahead
        from prompt_toolkit.keys import Keys

        given = self._session.input
        typed = get_typeahead(given)
        for _ in range(_READS):
            typed += given.read_keys()
        rest = [press for press in typed if press.key != Keys.ControlC]
        store_typeahead(given, rest)
        return len(rest) < len(typed)


def _keys(given: Callable[[], bool]) -> KeyBindings:
    """given: whether something stood at the prompt already: Ctrl-C means that, and not only what was typed."""
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    keys = KeyBindings()

    @keys.add("enter")
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if _is_open(buffer.text):
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("c-c")
    @keys.add("<sigint>")
    def _(event: KeyPressEvent) -> None:
        if event.current_buffer.text and not given():
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt, style="class:aborting")

    @keys.add("c-z")
    def _(event: KeyPressEvent) -> None:
        event.app.suspend_to_background()

    return keys


def _is_open(text: str) -> bool:
    """Whether a message begins with triple quotes that no others end."""
    return text.lstrip().startswith(BLOCK) and text.count(BLOCK) < 2


def unquoted(text: str) -> str | None:
    """The message between triple quotes; None if it has none around it."""
    bare = text.strip()
    if len(bare) < 2 * len(BLOCK) or not (bare.startswith(BLOCK) and bare.endswith(BLOCK)):
        return None
    return bare[len(BLOCK) : -len(BLOCK)].strip("\r\n")
