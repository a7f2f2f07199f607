"""The terminal of a chat: its prompt, the text typed ahead, and the control characters kept from it.

While an answer is written, typed text is neither echoed nor lost: the terminal keeps it for the next prompt. Ctrl-C
comes as a signal, and does not discard the text typed before it. From Enter until the prompt has left the terminal,
Ctrl-C is a byte in the text typed ahead, so it is looked for there.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import typer
from rich.cells import cell_len

from ssmd.cli.session import plain
from ssmd.machine import modes

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.key_binding import KeyBindings

# A model's answer must not be able to steer the terminal.
_CONTROLS = dict.fromkeys([c for c in (*range(32), *range(127, 160)) if chr(c) not in "\n\t"], "\ufffd")
HISTORY = "chat_history"  # in the data directory
BLOCK = '"""'
_FENCE = re.compile(r"[ \t]*(?:(?:[-*+]|[0-9]{1,9}[.)])[ \t]+|>[ \t]?)*(`{3,}|~{3,})(.*)")
_OPEN = "([{\u201c\u2018\u3008\u300a\u300c\u300e\u3010\u3014\uff08\uff3b\uff5b\u200d"  # no line ends with one of these
_CLOSED = (  # no line begins with one of these
    ")]}.,:;!?%\u201d\u2019\u2026\u3001\u3002\u3005\u3009\u300b\u300d\u300f\u3011\u3015\u30fb\u30fc"
    "\uff01\uff05\uff09\uff0c\uff0e\uff1a\uff1b\uff1f\uff3d\uff5d\uff5e"
)
_READS = 8  # reads of 1 KiB: more than a terminal buffers of unread text


class Screen:
    """Writes an answer as it comes. A terminal gets no control characters, and each line ends between two words.

    If output goes elsewhere, or to a terminal that wraps by itself, the text is not wrapped.
    """

    def __init__(self) -> None:
        self._wrap = WordWrap(_write, _columns) if modes.draws() else None

    def __enter__(self) -> Screen:
        return self

    def __exit__(self, *_: object) -> None:
        if self._wrap is not None:
            self._wrap.end()

    def show(self, text: str) -> None:
        """Write the next piece of text; an unfinished word may be held until the next piece."""
        text = text.translate(_CONTROLS) if sys.stdout.isatty() else text
        (_write if self._wrap is None else self._wrap.add)(text)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _columns() -> int:
    """Return the terminal's width now; 0 if it is unknown."""
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns
    except (OSError, ValueError):
        return 0


class WordWrap:
    """Wraps text that comes in pieces: it breaks the line in place of spaces before a word that would not fit.

    A word is held until it ends. A word of more than half a line, such as an address, is written as it comes, and the
    terminal wraps it. Between two wide characters a line may end without a space. Fenced code and tables stay.
    """

    def __init__(self, write: Callable[[str], None], columns: Callable[[], int]) -> None:
        """columns: returns the terminal's width, called for each word, as windows are resized; 0 breaks no line."""
        self._write, self._columns = write, columns
        self._out: list[str] = []
        self._line: list[str] = []  # characters of the line so far, unwrapped
        self._table: bool | None = None  # the line is a table's row; None before its first character other than a space
        self._column = 0
        self._spaces = self._word = ""
        self._long = False  # the word is being written as it comes
        self._fence = ""  # opening fence of the code block that the text is in

    def add(self, text: str) -> None:
        """Take the next piece."""
        for char in text:
            self._take(char)
        self._flush()

    def end(self) -> None:
        """Write the held word and spaces."""
        self._put_end()
        self._flush()

    def _flush(self) -> None:
        if self._out:
            self._write("".join(self._out))
            self._out = []

    def _take(self, char: str) -> None:
        if char == "\n":
            self._put_end()
            self._out.append("\n")
            self._fence = _fence_after("".join(self._line), self._fence)
            self._line, self._table = [], None
            self._column, self._long = 0, False
            return
        self._line.append(char)
        if self._table is None and char != " ":
            self._table = char == "|"
        if self._fence or self._table:
            self._put()
            self._out.append(self._spaces + char)
            self._spaces = ""
        elif char in " \t":
            self._put()
            self._spaces += char
            self._long = False
        else:
            if self._word and _may_part(self._word[-1], char):
                self._put()
            self._word += char
            if self._long or 2 * cell_len(self._word) > self._columns():
                self._put()
                self._long = True

    def _put_end(self) -> None:
        """Write the word, and the spaces after it unless they would begin a new line."""
        self._put()
        columns = self._columns()
        if self._fence or not columns or self._column + len(self._spaces) <= columns:
            self._out.append(self._spaces)
        self._spaces = ""

    def _put(self) -> None:
        """Write the word, in a new line if it does not fit into this one."""
        if not self._word:
            return
        columns, width = self._columns(), cell_len(self._word)
        at = self._column
        for space in self._spaces:
            at += 8 - at % 8 if space == "\t" else 1
        if self._column and not self._long and at + width > columns >= width:
            self._out.append("\n")
            at = 0
        else:
            self._out.append(self._spaces)
        self._out.append(self._word)
        self._column = at + width
        if columns and self._column > columns:  # the terminal has gone on in its next line
            self._column %= columns
        self._spaces = self._word = ""


def _may_part(one: str, next: str) -> bool:
    """Return whether a line may end between two adjacent characters, without a space."""
    wide = 2 in (cell_len(one), cell_len(next))
    return wide and cell_len(next) > 0 and one not in _OPEN and next not in _CLOSED


def _fence_after(line: str, fence: str) -> str:
    """Return the opening fence of the code block after this line, "" outside of code. fence: the one before it."""
    found = _FENCE.fullmatch(line)
    if found is None:
        return fence
    marks, info = found[1], found[2].strip()
    if not fence:
        return "" if "`" in info else marks
    return "" if marks.startswith(fence) and not info else fence


def show_thinking(on: bool) -> None:
    """Show or remove "Thinking…" on a terminal, in place of the model's reasoning."""
    if modes.draws():
        sys.stdout.write("Thinking…" if on else "\r\x1b[K")
        sys.stdout.flush()


class MessageSource(Protocol):
    """A source of the user's messages."""

    def read(self, default: str = "") -> str:
        """Read a message. default: text at the prompt already. Raises EOFError, and KeyboardInterrupt on Ctrl-C."""

    def interrupted(self) -> bool:
        """Return True if a Ctrl-C after the message came as a byte, and remove it from the text typed ahead."""


class Lines:
    """Reads messages of one line each: for redirected output, or a terminal on which no prompt can be drawn."""

    def read(self, default: str = "") -> str:
        if default:
            sys.stderr.write(f"Enter alone sends: {plain(default)}\n")
        sys.stderr.write("> ")
        sys.stderr.flush()
        before = signal.signal(signal.SIGINT, signal.default_int_handler)  # only here Ctrl-C raises
        try:
            line = sys.stdin.readline()
        finally:
            signal.signal(signal.SIGINT, before)
        if not line:
            raise EOFError
        return line.rstrip("\r\n") or default

    def interrupted(self) -> bool:
        return False  # here Ctrl-C always comes as a signal


class Prompt:
    """Reads messages of one or more lines: pasted, or typed with Alt-Enter or between triple quotes."""

    def __init__(self, history: Path | None, words: Sequence[str], silence: Callable[[], None]) -> None:
        """history: file of the messages typed before; None: keep none.

        words: completions for Tab. silence: called when the prompt has left the terminal.
        """
        from prompt_toolkit import PromptSession
        from prompt_toolkit.completion import WordCompleter
        from prompt_toolkit.output import create_output
        from prompt_toolkit.output.vt100 import Vt100_Output

        from ssmd.cli.chat.history import ChatHistory

        output = create_output()
        if isinstance(output, Vt100_Output):
            output.enable_cpr = False  # a terminal that does not report its cursor's place would delay the answer
        self._silence = silence
        self._default = ""
        self._history = ChatHistory(history)
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
            """Pass Ctrl-C to the prompt while it is shown; after Enter, to the handler before."""
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
        """Print a problem of the history file once, while no prompt is shown."""
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
    """Return the prompt's keys. given: returns True if the prompt began with text; Ctrl-C then leaves the prompt."""
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
    """Return True if a message begins with triple quotes and has no closing ones."""
    return text.lstrip().startswith(BLOCK) and text.count(BLOCK) < 2


def unquoted(text: str) -> str | None:
    """Return the message between triple quotes; None if it has none around it."""
    bare = text.strip()
    if len(bare) < 2 * len(BLOCK) or not (bare.startswith(BLOCK) and bare.endswith(BLOCK)):
        return None
    return bare[len(BLOCK) : -len(BLOCK)].strip("\r\n")
