"""`ssmd run`: chat in the terminal, or one answer to a prompt; a client of the daemon, if one runs."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from ssmd.cli import completion, options
from ssmd.cli.output import INTERRUPTED, USAGE, fail
from ssmd.machine import textfile

if TYPE_CHECKING:
    from ssmd.cli.chat.talk import Talk
    from ssmd.cli.chat.terminal import MessageSource
    from ssmd.config import Settings

MAX_STDIN_BYTES = 16 << 20  # limit on stdin: a context of a million tokens has some 5 MB
UNATTENDED_S = 20.0  # deadline for the first byte of stdin beside a prompt, if stderr is not a terminal


@options.with_sampling
def run(
    model: options.Model = None,
    prompt: Annotated[
        str | None,
        typer.Argument(help="Answer this, after the text of stdin, and exit. Without both: a chat."),
    ] = None,
    session: Annotated[
        str | None,
        typer.Option(
            help="Continue this session: its id or the beginning of that.",
            metavar="ID",
            autocompletion=completion.sessions,
        ),
    ] = None,
    last: Annotated[bool, typer.Option("--continue", "-c", help="Continue the session used last.")] = False,
    system: Annotated[str | None, typer.Option(help="System prompt of a new conversation.", metavar="TEXT")] = None,
    seed: Annotated[int | None, typer.Option(help="Same seed, same choices.", **options.INTEGER)] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="End the answer before this text. May be repeated.", metavar="TEXT")
    ] = None,
    keep_alive: Annotated[
        str | None, typer.Option(help="How long the daemon keeps the model: 5m, 0, -1 for ever.", metavar="TIME")
    ] = None,
    stats: Annotated[bool, typer.Option("--stats", help="After each answer: tokens, cached tokens, times.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Each answer as an object: text, session, usage.")] = False,
    runtime: options.Runtime = None,
    device: options.Device = None,
    threads: options.Threads = None,
    config_file: options.Config = None,
    data_dir: options.DataDir = None,
    models_dir: options.ModelsDir = None,
    no_store: options.NoStore = False,
    offline: options.Offline = False,
    yes: options.Yes = False,
    *,
    sampling: Mapping[str, float],
) -> None:
    """Chat in the terminal. Ctrl-C stops the answer, Ctrl-D ends the chat.

    If a daemon runs on the data directory it answers. Else, and with --device, --threads, --models-dir or a path, the
    model is loaded here.

    Sampling options that are left out are the model's own: `ssmd show` prints them.
    """
    from ssmd.cli.chat.loop import as_json as object_of
    from ssmd.cli.chat.loop import ended_by_signals, interruptible, notes, stats_line
    from ssmd.cli.chat.options import ChatOptions
    from ssmd.cli.chat.peer import PeerOptions, reached
    from ssmd.cli.chat.talk import Talk
    from ssmd.cli.chat.terminal import Screen, show_thinking
    from ssmd.config import Settings
    from ssmd.machine.confinement import forbid_core_dumps
    from ssmd.machine.size import show_size
    from ssmd.machine.spelling import printable

    if no_store and (session is not None or last):
        fail(f"{'--continue' if last else '--session'} needs the store, --no-store leaves it out", USAGE)
    if last and session is not None:
        fail("--continue and --session name two sessions; leave one out", USAGE)
    if model is not None and prompt is None and len(model.split()) > 1 and not os.path.lexists(model):
        model, prompt = None, model  # no model's name has spaces: `ssmd run -c "And then?"`
    if model is not None and os.sep not in model:  # a path may have any bytes
        _check_utf8("the model's name", model)
    for what, given in (("the prompt", prompt), ("--system", system), ("--session", session)):
        _check_utf8(what, given)
    for given in stop or ():
        _check_utf8("--stop", given)
    if prompt is not None and not prompt.strip():
        fail("the prompt is empty; leave it out for a chat", USAGE)
    try:
        chosen = ChatOptions(sampling, seed, tuple(stop or ()), keep_alive)
    except ValueError as err:
        fail(str(err), USAGE)
    settings = Settings(
        data_dir=data_dir,
        device=device,
        log_level="error",
        models_dir=models_dir,
        offline=offline or None,
        runtime=runtime,
        threads=threads,
    )
    if not settings.core_dumps:
        forbid_core_dumps()
    if not sys.stdin.isatty():
        text = _stdin(asked=prompt is not None)
        if prompt is not None and text.strip():  # in a `while read` loop this is the rest of the loop's lines
            n = len(text.encode())
            amount = show_size(n) if n >= 1000 else f"{n} bytes"
            typer.echo(f"note: the prompt follows {amount} of stdin", err=True)
        prompt = "\n\n".join(part for part in (text.rstrip("\r\n"), prompt or "") if part.strip())
        if not prompt:
            taken = "" if model is None else f" ({printable(model)!r} was taken for the model)"
            fail(f"stdin is empty; give a prompt{taken}: ssmd run MODEL PROMPT", USAGE)
    wanted = PeerOptions(model, runtime, device, threads, models_dir, keep=not no_store, yes=yes)
    with ended_by_signals(), reached(wanted, settings, session, last=last) as (daemon, named):
        talk = Talk(daemon, named, chosen, keep=not no_store, thinking=show_thinking)
        if last:
            used = daemon.last_sessions(1)
            if not used:
                fail("no session is kept here yet; leave --continue out")
            session = used[0]["id"]
        if session is not None:
            talk.go_to(session)
        elif system:
            talk.instruct(system)
        with interruptible(talk) as interrupted:
            if prompt is None:
                _chat(talk, settings, stats, as_json)
                return
            with Screen() as screen:
                said = talk.say(prompt, (lambda text: None) if as_json else screen.show)
        if as_json:
            typer.echo(object_of(said))
        else:
            typer.echo("" if said.whole else " …")
        for note in notes(talk, said):
            typer.echo(note, err=True)
        if stats:
            typer.echo(stats_line(said), err=True)
        if interrupted:
            sys.exit(INTERRUPTED)


def _stdin(*, asked: bool) -> str:
    """Return the text of stdin; end the command if it stays silent, is not text, or is too long.

    asked: there is a prompt. Then the wait is bounded: a caller may leave stdin open and never write to it. The command
    ends, because a script would take an answer without the input for one with it.
    """
    held, came = bytearray(), threading.Event()
    ended = threading.Thread(target=_read_stdin, args=(held, came), name="ssmd-stdin", daemon=True)
    ended.start()
    if asked and not came.wait(1):
        if sys.stderr.isatty():
            typer.echo("waiting for stdin, to read it before the prompt; Ctrl-C ends this", err=True)
        elif not came.wait(UNATTENDED_S):
            said = f"stdin was silent for {UNATTENDED_S:.0f} s; for the prompt alone add </dev/null"
            fail(f"{said}; if the input takes longer, write it to a file first and add <FILE", USAGE)
    ended.join()
    if len(held) > MAX_STDIN_BYTES:
        fail(f"stdin is longer than {MAX_STDIN_BYTES >> 20} MiB; give a part of it, as with head -c", USAGE)
    if 0 in held and textfile.encoding(held) == textfile.UTF_8:
        fail("stdin is not text: it has zero bytes; convert it first, as with pdftotext or iconv", USAGE)
    try:
        return textfile.decode(bytes(held))
    except UnicodeDecodeError as err:
        fail(f"stdin is not {err.encoding.upper()}; convert it to UTF-8 first, as with iconv", USAGE)


def _read_stdin(held: bytearray, came: threading.Event) -> None:
    """Read stdin into `held` until it ends or exceeds MAX_STDIN_BYTES. came: set at the first byte, or at the end."""
    with contextlib.suppress(OSError):
        while len(held) <= MAX_STDIN_BYTES and (part := os.read(sys.stdin.fileno(), 1 << 16)):
            held += part
            came.set()
    came.set()


def _check_utf8(what: str, text: str | None) -> None:
    """End the command if a text has bytes that Python could not read."""
    try:
        (text or "").encode()
    except UnicodeEncodeError:
        fail(f"{what} is not UTF-8; convert it first, as with iconv", USAGE)


def _chat(talk: Talk, settings: Settings, stats: bool, as_json: bool) -> None:
    from ssmd.cli.chat import terminal
    from ssmd.cli.chat.loop import COMMANDS, Chat
    from ssmd.machine import modes

    with contextlib.ExitStack() as held:
        typed: MessageSource = terminal.Lines()
        if modes.draws():
            history = None
            if talk.keep:
                settings.prepare()
                history = settings.data_dir / terminal.HISTORY
            silence = held.enter_context(modes.quiet())
            typed = terminal.Prompt(history, [f"/{name}" for name in COMMANDS], silence)
        Chat(talk, typed, stats, as_json).run()
