"""The peer of `ssmd run`: the running daemon, or one in this process where none runs."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ssmd import __version__
from ssmd.cli.chat.talk import Daemon
from ssmd.daemon import discovery
from ssmd.daemon.discovery import Address, DaemonError

if TYPE_CHECKING:
    from ssmd.config import Settings


@dataclass(frozen=True)
class PeerOptions:
    """The options that choose a daemon or a model."""

    model: str | None  # a name or a path; None: the only model
    runtime: str | None
    device: str | None
    threads: int | None
    models_dir: Path | None
    keep: bool
    yes: bool = False  # pull a model that is not installed without a question

    @property
    def named(self) -> str | None:
        """Return the model's name in a request to a daemon."""
        runtime = None if self.runtime in (None, "auto") else self.runtime
        return self.model if self.model is None or runtime is None else f"{self.model}@{runtime}"


@contextlib.contextmanager
def reached(
    wanted: PeerOptions, settings: Settings, session: str | None, *, last: bool
) -> Iterator[tuple[Daemon, str]]:
    """Yield the daemon to use, and the model's name there. Prints to stderr which daemon it is.

    session: if no model is named, use this session's. last: use that of the session used last. Raises DaemonError, and
    the errors of loading.
    """
    from ssmd.cli.pull import first_model, pulled

    address = discovery.find(settings.data_dir)
    if address is not None:
        daemon = Daemon(partial(discovery.find, settings.data_dir), _say_where)
        why = _why_not(daemon, wanted)
        if why == _not_served(wanted) and pulled(wanted.model, settings, yes=wanted.yes):
            why = _why_not(daemon, wanted)  # if it serves all models, it serves a new one too
        if not why:
            model = wanted.named or _only(daemon, session, last)
            _say_where(address)
            yield daemon, model
            return
        typer.echo(f"the daemon at {address.place} is not used: {why}; the model is loaded here", err=True)
    elif (process := discovery.running(settings.data_dir)) is not None:
        who = f"process {process}" if process else "a process"
        state = "does not answer yet (starting, stopping or repairing)"
        typer.echo(f"{who} uses {settings.data_dir} and {state}; the model is loaded here, beside it", err=True)
    elif sys.stderr.isatty():
        typer.echo("no daemon runs: the model is loaded here", err=True)
    from ssmd.cli.chat.here import serving_here
    from ssmd.server import start_logging

    start_logging(settings.log_level)
    with serving_here(settings, first_model(wanted.model, settings, yes=wanted.yes), keep=wanted.keep) as here:
        daemon = Daemon(lambda: here)
        yield daemon, _only(daemon, session, last)


def _why_not(daemon: Daemon, wanted: PeerOptions) -> str:
    """Return the reason why a daemon cannot serve these options, or "". Raises DaemonError."""
    for name, value in (("device", wanted.device), ("threads", wanted.threads), ("models-dir", wanted.models_dir)):
        if value is not None:
            return f"--{name} applies only where the model is loaded"
    if wanted.model is not None and any(s in wanted.model for s in (os.sep, os.altsep) if s):
        return "it serves installed models, and this is a path"
    if wanted.named is not None and not daemon.serves(wanted.named):
        return _not_served(wanted)
    if wanted.model is None and wanted.runtime not in (None, "auto"):
        return "--runtime without a model applies only where it is loaded"
    return ""


def _not_served(wanted: PeerOptions) -> str:
    return f"it does not serve {wanted.named!r}"


def _only(daemon: Daemon, session: str | None, last: bool) -> str:
    """Return the model to use if none is named: the session's, or the only one. Raises DaemonError."""
    models = daemon.models()
    names = sorted({model.partition("@")[0] for model in models})
    if last and len(names) > 1:
        session = next((used["id"] for used in daemon.last_sessions(1)), None)
    if len(names) > 1 and session is not None and (its := daemon.session(session)["model"]) in names:
        return str(its)
    if len(names) != 1:
        raise DaemonError(f"say which model to use; the daemon has: {', '.join(names) or 'none'}")
    return models[0] if len(models) == 1 else names[0]


def _say_where(address: Address) -> None:
    version = "" if address.version == __version__ else f", which is ssmd {address.version}"
    typer.echo(f"using the daemon at {address.place}{version}", err=True)
