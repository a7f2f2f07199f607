"""A data directory whose models are chatted with in a terminal: what is typed there, waited for, and kept."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import commands
from keeping import lay_store
from noted import note_all
from terminal import Terminal, command
from test_server import environment

from ssmd.sessions.store import Store
from ssmd.sessions.turn import Session, Turn, conversation

ASKED = "--temperature 0 --max-tokens 6 --stats"
ENDLESS = "--temperature 0 --stats --max-tokens 100000"
STORED = r"; stored\]"
BEGUN = "tells more"
ANSWERS = r"\x1b\[\?2004h[^\x1b]"  # the first characters of an answer


class Home:
    """A data directory with both models, and a daemon or none."""

    def __init__(self, path: Path, models: Path) -> None:
        self.path = path
        self.data = path / "data"
        self.env = environment(path)
        lay_store(self.data)
        shutil.copytree(models, self.data / "models")
        note_all([], self.data)

    def ssmd(self, *arguments: str, given: str = "") -> tuple[str, str]:
        """stdout and stderr of a command that ends well."""
        done = commands.ssmd(*arguments, env=self.env, given=given)
        assert done.returncode == 0, done
        return done.stdout, done.stderr

    @contextmanager
    def chat(self, options: str = ASKED, model: str = "llama") -> Iterator[Terminal]:
        with command("run", model, *options.split(), env=self.env) as one:
            one.until(BEGUN, 60)
            yield one

    def sessions(self) -> list[Session]:
        with self._store() as store:
            return store.sessions()

    def turns(self, session: str) -> list[Turn]:
        with self._store() as store:
            return store.turns(session)

    def said(self) -> list[tuple[str, str]]:
        """(role, content) of all that leads to the head of the session used last."""
        with self._store() as store:
            newest = store.newest()
            assert newest is not None
            return [(m.role, m.content) for m in conversation(store.path(newest.head))]

    def asked(self) -> list[str]:
        return [content for role, content in self.said() if role == "user"]

    @contextmanager
    def _store(self) -> Iterator[Store]:
        store = Store.open(self.data)
        try:
            yield store
        finally:
            store.close()
