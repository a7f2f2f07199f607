"""`ssmd run`: chat in the terminal, or one answer to a prompt."""

from __future__ import annotations

import queue
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Annotated

import typer

from ssmd.cli import completion, options
from ssmd.cli.failure import INTERRUPTED, fail

if TYPE_CHECKING:
    from ssmd.engine.engine import Engine
    from ssmd.engine.request import Done, Event
    from ssmd.engine.sampling import SamplingParams
    from ssmd.sessions.store import Store
    from ssmd.text.messages import Message

# A model's answer must not be able to steer the terminal.
_CONTROLS = dict.fromkeys([c for c in (*range(32), *range(127, 160)) if chr(c) not in "\n\t"], "\ufffd")
LOOK_UP_S = 0.2  # how often a wait looks up whether Ctrl-C came


def run(
    model: options.Model = None,
    prompt: Annotated[
        str | None, typer.Argument(help="Answer this and exit. Without it: stdin if that is no terminal, else a chat.")
    ] = None,
    session: Annotated[
        str | None, typer.Option(help="Continue this session.", metavar="ID", autocompletion=completion.sessions)
    ] = None,
    system: Annotated[str | None, typer.Option(help="System prompt of a new conversation.", metavar="TEXT")] = None,
    temperature: Annotated[float, typer.Option(help="0 always takes the likeliest token.")] = 0.2,
    top_p: Annotated[float, typer.Option(help="Sample among the likeliest tokens of this total probability.")] = 0.9,
    seed: Annotated[int | None, typer.Option(help="Same seed, same choices.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.", min=1)] = 2048,
    stats: Annotated[bool, typer.Option("--stats", help="After each answer: tokens, cached tokens, times.")] = False,
    runtime: options.Runtime = None,
    device: options.Device = None,
    threads: options.Threads = None,
    config_file: options.Config = None,
    data_dir: options.DataDir = None,
    models_dir: options.ModelsDir = None,
    no_store: options.NoStore = False,
    offline: options.Offline = False,
) -> None:
    """Chat in the terminal. Ctrl-C stops the answer, Ctrl-D ends the chat."""
    from ssmd.cli.pull import first_model
    from ssmd.config import Settings
    from ssmd.engine.opening import close_host, open_host
    from ssmd.engine.sampling import SamplingParams
    from ssmd.installed import resolve
    from ssmd.machine.progress import shown
    from ssmd.server import start_logging

    if no_store and session is not None:
        fail("--session needs the store, --no-store leaves it out", 2)
    try:
        sampling = SamplingParams(temperature=temperature, top_p=top_p, seed=seed)
    except ValueError as err:
        fail(str(err), 2)
    settings = Settings(
        data_dir=data_dir,
        device=device,
        log_level="error",
        models_dir=models_dir,
        offline=offline or None,
        runtime=runtime,
        threads=threads,
    )
    start_logging(settings.log_level)
    if prompt is None and not sys.stdin.isatty():
        prompt = sys.stdin.read()
        if not prompt.strip():
            fail("stdin is empty; give a prompt: ssmd run MODEL PROMPT", 2)
    chosen = str(resolve(first_model(model, settings), settings.models_dir, settings.runtime, settings.device))
    with shown(f"loading {model or 'the model'}"):
        host = open_host(settings, chosen, keep=not no_store)
    try:
        engine = host.load(host.shelf.models()[0]).result().engine
        store = None if host.writer is None else host.writer.store
        with _interrupt_noted() as interrupted:
            talk = _Talk(engine, store, interrupted, sampling, max_tokens, session, system, stats)
            if prompt is None:
                _chat(talk)
            elif not talk.say(prompt):
                sys.exit(INTERRUPTED)
    finally:
        close_host(host)


def _chat(talk: _Talk) -> None:
    with suppress(ImportError):  # absent on some platforms; input() then has no line editing
        import readline  # noqa: F401 - importing it is what gives input() its line editing

    typer.echo("Ctrl-C stops an answer, Ctrl-D ends the chat.", err=True)
    while True:
        try:
            line = _read_line()
        except EOFError:
            typer.echo("")
            break
        except KeyboardInterrupt:
            typer.echo("\n(Ctrl-D ends the chat)", err=True)
            continue
        if line.strip():
            talk.say(line)
    if talk.session is not None:
        typer.echo(f"session {talk.session}; continue with: ssmd run --session {talk.session}", err=True)


def _read_line() -> str:
    """Read a line. Raises KeyboardInterrupt on Ctrl-C: here, and only here, it breaks something off."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return input("> ")
    finally:
        signal.signal(signal.SIGINT, before)


class _Talk:
    """A conversation in this process: the messages so far, and the session they are kept in."""

    def __init__(
        self,
        engine: Engine,
        store: Store | None,
        interrupted: threading.Event,
        sampling: SamplingParams,
        max_tokens: int,
        session: str | None,
        system: str | None,
        stats: bool,
    ) -> None:
        from ssmd.sessions.turn import conversation
        from ssmd.text.messages import Message

        self.session = session
        self._engine = engine
        self._interrupted = interrupted
        self._sampling = sampling
        self._max_tokens = max_tokens
        self._stats = stats
        self._messages: list[Message] = []
        if session is not None and store is not None:
            self._messages = list(conversation(store.path(store.session(session).head)))
        elif system:
            self._messages.append(Message("system", system))

    def say(self, text: str) -> bool:
        """Print the answer as it comes. False if Ctrl-C cut it short."""
        from ssmd.engine.request import Done, Failed, Rejected, Request
        from ssmd.text.messages import Message

        asked = [*self._messages, Message("user", text)]
        request = Request(tuple(asked), self._sampling, max_tokens=self._max_tokens, session=self.session)
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        answer: list[str] = []
        self._interrupted.clear()
        try:
            generation = self._engine.submit(request, events.put)
        except Rejected as err:
            fail(err.message)
        while True:
            if self._interrupted.is_set():
                generation.cancel()
            try:
                event = events.get(timeout=LOOK_UP_S)
            except queue.Empty:
                continue
            if isinstance(event, Failed):
                fail(event.error.message)
            if isinstance(event, Done):
                break
            answer.append(event.text)
            sys.stdout.write(event.text.translate(_CONTROLS) if sys.stdout.isatty() else event.text)
            sys.stdout.flush()
        whole = not self._interrupted.is_set()
        typer.echo("" if whole else " …")
        if answer:  # nothing said is nothing to continue
            self._messages = [*asked, Message("assistant", "".join(answer))]
            self.session = generation.asked.session
        if self._stats:
            _print_stats(event)
        return whole


@contextmanager
def _interrupt_noted() -> Iterator[threading.Event]:
    """Ctrl-C sets the event, wherever it comes: an exception could come between two lines that belong together."""
    noted = threading.Event()
    before = signal.signal(signal.SIGINT, lambda *_: noted.set())
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, before)


def _print_stats(done: Done) -> None:
    usage = done.usage
    rate = "" if not usage.tbt_ms else f", {1e3 / usage.tbt_ms:.1f} tokens/s"
    typer.echo(
        f"[{usage.prompt_tokens} prompt tokens, {usage.cached_tokens} cached ({usage.resume}), "
        f"{usage.completion_tokens} generated; first after {usage.ttft_ms:.0f} ms{rate}; "
        f"{'stored' if usage.stored else 'not stored'}]",
        err=True,
    )
