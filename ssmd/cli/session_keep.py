"""`ssmd session pin|unpin|gc|check`: how long states are kept, and whether what is kept is whole."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ssmd.cli import completion, options
from ssmd.cli.failure import fail
from ssmd.cli.session import BUSY_MS, open_store, plain

if TYPE_CHECKING:
    from ssmd.sessions.fsck.repair import Checked
    from ssmd.sessions.rows.retention import Collected

Ids = Annotated[
    list[str], typer.Argument(metavar="ID...", help="The sessions' ids.", autocompletion=completion.sessions)
]


def add_to(app: typer.Typer) -> None:
    app.command("pin")(pin)
    app.command("unpin")(unpin)
    app.command("gc")(collect)
    app.command("check")(check)


def pin(session_ids: Ids, data_dir: options.DataDir = None, as_json: options.Json = False) -> None:
    """Keep all states of these sessions, however long they are not used."""
    _set_pinned(session_ids, data_dir, as_json, pinned=True)


def unpin(session_ids: Ids, data_dir: options.DataDir = None, as_json: options.Json = False) -> None:
    """Treat these sessions like all others again."""
    _set_pinned(session_ids, data_dir, as_json, pinned=False)


def _set_pinned(session_ids: list[str], data_dir: Path | None, as_json: bool, *, pinned: bool) -> None:
    wanted = list(dict.fromkeys(session_ids))
    with open_store(data_dir) as store:
        for session_id in wanted:
            store.session(session_id)  # a wrong id among them: nothing is changed
        for session_id in wanted:
            store.pin(session_id, pinned)
            if not as_json:
                typer.echo(f"{'pinned' if pinned else 'unpinned'} {session_id}")
    if as_json:
        typer.echo(json.dumps({"pinned" if pinned else "unpinned": wanted}))


def collect(
    quota: options.Quota = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    data_dir: options.DataDir = None,
    as_json: options.Json = False,
) -> None:
    """Let states go until those left fit the quota, and give the space back to the disk. No text is removed.

    Old states go first, then those of the sessions used least recently; pinned sessions keep theirs.
    """
    from ssmd.config import Settings
    from ssmd.machine.progress import shown

    limit = Settings(data_dir=data_dir, quota=quota).quota
    with open_store(data_dir) as store, shown("looking what would go" if dry_run else "letting states go"):
        done = store.collect(limit, dry_run=dry_run)
    over = max(0, done.left - limit)
    if as_json:
        sessions = [{"id": one, "bytes": n, "checkpoints": count} for one, (n, count) in done.sessions.items()]
        fields = {"dry_run": dry_run, "quota": limit, "checkpoints": done.checkpoints, "bytes": done.nbytes}
        typer.echo(json.dumps({**fields, "left": done.left, "over": over, "sessions": sessions}, indent=1))
    else:
        _tell(done, limit, dry_run=dry_run)
    if over:
        fail("the pinned sessions alone exceed the quota; unpin some (`ssmd session unpin ID`), or allow more")


def _tell(done: Collected, limit: int, *, dry_run: bool) -> None:
    from ssmd.machine.size import show_size

    would = "would go" if dry_run else "went"
    for session_id, (nbytes, count) in done.sessions.items():
        typer.echo(f"{session_id}: {count} states, {show_size(nbytes)}")
    typer.echo(
        f"{done.checkpoints} states of {len(done.sessions)} sessions {would}, {show_size(done.nbytes)}; "
        f"{show_size(done.left)} of {show_size(limit)} {'would be ' if dry_run else ''}in use"
    )


def check(
    repair: Annotated[
        bool, typer.Option("--repair", help="Take out what is broken; the daemon must be stopped.")
    ] = False,
    data_dir: options.DataDir = None,
    as_json: options.Json = False,
) -> None:
    """Read everything that is stored and say what is broken. Exit code 1 if anything is, and was not repaired.

    A repair loses nothing but what is broken: where a state is, its conversation is read again.
    """
    from ssmd.config import Settings
    from ssmd.sessions.fsck.repair import check as look
    from ssmd.sessions.fsck.repair import repair as mend
    from ssmd.sessions.rows.lock import DirectoryLock

    settings = Settings(data_dir=data_dir)
    settings.prepare()
    if repair:
        lock = DirectoryLock.take(settings.data_dir, "stop it, then repair")
        try:
            with _shown() as progress:
                done = mend(settings.data_dir, progress, busy_ms=BUSY_MS)
        finally:
            lock.release()
    else:
        with _shown() as progress:
            done = look(settings.data_dir, progress, busy_ms=BUSY_MS)
    if as_json:
        damages = [{"what": d.what, "problem": d.problem, "repair": d.loss} for d in done.damages]
        counts = {"sessions": done.sessions, "turns": done.turns, "checkpoints": done.checkpoints}
        kept = None if done.kept is None else str(done.kept)
        fields = {"sound": not done.damages, "repaired": done.repaired, **counts, "damages": damages, "kept": kept}
        typer.echo(json.dumps(fields, indent=1))
    else:
        for damage in done.damages:
            typer.echo(plain(str(damage)))
        typer.echo(f"{done.sessions} sessions, {done.turns} turns, {done.checkpoints} checkpoints: {_verdict(done)}")
        if done.kept is not None:
            typer.echo(f"the damaged file is kept as {done.kept}; remove it when you miss nothing")
    if done.damages and not done.repaired:
        sys.exit(1)


def _verdict(done: Checked) -> str:
    if not done.damages:
        return "all sound"
    if done.repaired:
        return f"{len(done.damages)} damages repaired"
    return f"{len(done.damages)} damages; `ssmd session check --repair` takes them out"


@contextmanager
def _shown() -> Iterator[Callable[[int], None]]:
    """Bytes read so far, on a terminal."""
    from rich.console import Console
    from rich.progress import DownloadColumn, Progress, SpinnerColumn, TextColumn

    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("reading"), DownloadColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=None)
        yield lambda nbytes: progress.advance(task, nbytes)
