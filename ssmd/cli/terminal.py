"""The terminal that a chat is held in: its prompt, what is typed while an answer comes, and what it is not told.

While an answer is written nothing of what is typed is shown or lost: the terminal keeps it, unechoed, for the prompt
that comes next. Ctrl-C reaches the program by a signal, and does not throw away what was typed before it. From Enter
until the prompt has left the terminal it is a byte among those typed ahead, and is looked for there.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.key_binding import KeyBindings

# A model's answer must not be able to steer the terminal.
_CONTROLS = dict.fromkeys([c for c in (*range(32), *range(127, 160)) if chr(c) not in "\n\t"], "\ufffd")
HISTORY = "chat_history"  # in the data directory
MAX_HISTORY_BYTES = 1 << 20
BLOCK = '"""'
_READS = 8  # of 1 KiB: more than a terminal keeps of what nobody read
_PASTES, _NO_PASTES = "\x1b[?2004h", "\x1b[?2004l"  # bracketed paste: pasted lines come with a mark around them


def show(text: str) -> None:
    """Write an answer's text, as it comes: to a terminal without what would steer it."""
    sys.stdout.write(text.translate(_CONTROLS) if sys.stdout.isatty() else text)
    sys.stdout.flush()


class Typed(Protocol):
    """Where a person's messages come from."""

    def read(self, default: str = "") -> str:
        """One message. default: what stands there already. Raises EOFError, and KeyboardInterrupt on Ctrl-C."""

    def interrupted(self) -> bool:
        """Whether Ctrl-C was typed after the message and came as a byte; it is taken out of what was typed ahead."""


class Lines:
    """Messages that are a line each: of a terminal whose output goes elsewhere."""

    def read(self, default: str = "") -> str:
        sys.stderr.write("> ")
        sys.stderr.flush()
        before = signal.signal(signal.SIGINT, signal.default_int_handler)  # here alone it breaks something off
        try:
            line = sys.stdin.readline()
        finally:
            signal.signal(signal.SIGINT, before)
        if not line:
            raise EOFError
        return line.rstrip("\r\n")

    def interrupted(self) -> bool:
        return False  # here it always is a signal


class Prompt:
    """Messages of as many lines as are pasted, or typed with Alt-Enter or between triple quotes."""

    def __init__(self, history: Path | None, words: Sequence[str]) -> None:
        """history: the file that keeps what was typed; None: nothing does. words: that Tab completes."""
        from prompt_toolkit import PromptSession
        from prompt_toolkit.completion import WordCompleter
        from prompt_toolkit.history import FileHistory, InMemoryHistory
        from prompt_toolkit.output import create_output
        from prompt_toolkit.output.vt100 import Vt100_Output

        output = create_output()
        if isinstance(output, Vt100_Output):
            output.enable_cpr = False  # where a terminal does not tell its cursor's place, an answer would wait for it
        self._session: PromptSession[str] = PromptSession(
            history=InMemoryHistory() if history is None else FileHistory(str(_private(history))),
            completer=WordCompleter(list(words), sentence=True),
            complete_while_typing=False,
            key_bindings=_keys(),
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

        signal.signal(signal.SIGINT, interrupt)
        try:
            return self._session.prompt("> ", default=default, handle_sigint=False)
        finally:
            signal.signal(signal.SIGINT, before)

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


def _keys() -> KeyBindings:
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
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt, style="class:aborting")

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


def _private(file: Path) -> Path:
    """A history that this user alone can read, of which the older half goes when it is long. Raises OSError."""
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
    with os.fdopen(os.open(file, flags, 0o600), "r+b") as opened:
        if hasattr(os, "fchmod"):
            os.fchmod(opened.fileno(), 0o600)
        if os.fstat(opened.fileno()).st_size > MAX_HISTORY_BYTES:
            opened.seek(-MAX_HISTORY_BYTES // 2, os.SEEK_END)
            rest = opened.read(MAX_HISTORY_BYTES)
            begin = rest.find(b"\n# ")  # of an entry
            opened.seek(0)
            opened.write(rest[begin:] if begin >= 0 else b"")
            opened.truncate()
    return file


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep what is typed for the next prompt, unechoed, whenever no prompt is there; at the end all is as before."""
    try:
        import termios
    except ImportError:  # Windows: its console echoes nothing that nobody reads
        yield
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    silent: list[Any] = [*before]
    silent[0] = before[0] & ~termios.ICRNL  # Enter comes as the prompt would have got it
    silent[3] = before[3] & ~(termios.ECHO | termios.ICANON) | termios.NOFLSH
    silent[6] = [*before[6]]
    silent[6][termios.VMIN], silent[6][termios.VTIME] = 1, 0
    termios.tcsetattr(descriptor, termios.TCSANOW, silent)
    try:
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSANOW, before)
        sys.stdout.write(_NO_PASTES)  # also where a signal broke off a prompt
        sys.stdout.flush()


@contextlib.contextmanager
def pasting() -> Iterator[None]:
    """What is pasted while an answer comes stays one message, too."""
    if not sys.stdout.isatty():
        yield
        return
    sys.stdout.write(_PASTES)
    sys.stdout.flush()
    try:
        yield
    finally:
        sys.stdout.write(_NO_PASTES)
        sys.stdout.flush()
