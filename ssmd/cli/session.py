"""`ssmd session list|show|rename|rm|pin|unpin|gc|check`: the conversations kept here. Works while the daemon runs."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ssmd.cli import completion, options
from ssmd.cli.output import counted, fail
from ssmd.machine.spelling import json_text

if TYPE_CHECKING:
    from ssmd.sessions.fsck.repair import CheckReport
    from ssmd.sessions.rows.partings import Parting
    from ssmd.sessions.rows.retention import CollectionResult
    from ssmd.sessions.store import Store
    from ssmd.sessions.turn import Session, Turn
    from ssmd.text.messages import Message

app = typer.Typer(help="The conversations kept here.", no_args_is_help=True)
_AT_ONCE = 500  # sessions printed at once
SHOWN = 100  # sessions in a list without --all
BUSY_MS = 10_000  # longest wait for a daemon that writes a turn
_UNDER_WAY_S = 60.0  # s: a state without a session that was used since may get its turn yet

Id = Annotated[
    str, typer.Argument(metavar="ID", help="The session's id or its beginning.", autocompletion=completion.sessions)
]

Ids = Annotated[
    list[str], typer.Argument(metavar="ID...", help="The sessions' ids.", autocompletion=completion.sessions)
]


@contextmanager
def open_store(data_dir: Path | None) -> Iterator[Store]:
    """Open the store while the command runs."""
    from ssmd.config import Settings
    from ssmd.machine.confinement import forbid_core_dumps
    from ssmd.sessions.store import Store

    settings = Settings(data_dir=data_dir)
    if not settings.core_dumps:
        forbid_core_dumps()
    settings.prepare()
    store = Store.open(settings.data_dir, busy_ms=BUSY_MS, quota=settings.quota)
    try:
        yield store
    finally:
        store.close()


class AmbiguousId(ValueError):
    """Several ids have the same beginning; the message names some."""


def whole_id(what: str, beginning: str, ids: Iterable[str]) -> str:
    """Return the id with this beginning, or the given text, which the store then refuses. Raises AmbiguousId.

    what: "sessions" or "turns", for the error.
    """
    fitting = [i for i in ids if i.startswith(beginning)]
    if len(fitting) > 1 and beginning not in fitting:
        raise AmbiguousId(
            f"{len(fitting)} {what} begin with {beginning!r}: {', '.join(fitting[:3])}; give more of the id"
        )
    return fitting[0] if len(fitting) == 1 else beginning


def read_session(store: Store, given: str) -> Session:
    """Read the session with this id, or else the only one whose id begins so. Raises UnknownSession, AmbiguousId."""
    from ssmd.sessions.turn import UnknownSession

    try:
        return store.session(given)
    except UnknownSession:
        whole = whole_id("sessions", given, store.ids(given)) if given else given
        if whole == given:
            raise
        return store.session(whole)


@app.command("list")
def list_sessions(
    everything: Annotated[bool, typer.Option("--all", help="All, not only the 100 used last.")] = False,
    search: Annotated[
        str | None, typer.Option(help="Only those that have all these words, in title or text.", metavar="WORDS")
    ] = None,
    data_dir: options.DataDir = None,
    as_json: options.Json = False,
) -> None:
    """List the sessions, the one used last first. Size: its checkpoints; shared: what of them others need too. Key: the
    name of the API key whose it is.

    The 100 used last, unless with --all; --json always has all of them.
    """
    limited = not (everything or as_json)
    most = SHOWN + 1 if limited else sys.maxsize
    with open_store(data_dir) as store, ExitStack() as held:
        if search is None and not limited:
            each = held.enter_context(store.each_session())
        else:
            some = store.sessions(most) if search is None else store.search(search, most).sessions
            each = partial(iter, some)
        if as_json:
            _print_summaries(each())
            return
        if next(each(), None) is None:
            typer.echo("no session is kept here yet" if search is None else "no session has all these words", err=True)
            return
        more = _print_table(each, SHOWN if limited else sys.maxsize)
    if more:
        typer.echo(f"these are the {SHOWN} used last; --all lists the others too", err=True)


def _print_table(each: Callable[[], Iterator[Session]], most: int) -> bool:
    """Print at most `most` sessions, a line each. Return True if there are more.

    It reads them twice, first for the widths of the columns: a store may have more than fit into memory.
    """
    from rich.cells import cell_len, set_cell_size

    names = ["id", "model", "turns", "size", "shared", "last used", "", "key", "title"]
    widths, owned, count = [len(name) for name in names], False, 0
    for session in islice(each(), most):
        widths = [max(width, cell_len(cell)) for width, cell in zip(widths, _row(session), strict=True)]
        owned |= bool(session.info.owner)
        count += 1
    shown = [i for i in range(len(names) - 1) if owned or names[i] != "key"]
    # A file or a pipe gets whole lines; a narrow terminal loses titles first, ids never.
    room = sys.maxsize
    if sys.stdout.isatty():
        room = max(1, shutil.get_terminal_size().columns - sum(widths[i] + 2 for i in shown))

    def line(row: list[str]) -> str:
        title = row[-1] if cell_len(row[-1]) <= room else set_cell_size(row[-1], room - 1) + "\u2026"
        return "".join(row[i] + " " * (widths[i] + 2 - cell_len(row[i])) for i in shown) + title

    typer.echo(typer.style(line(names), bold=True))
    rows = map(_row, islice(each(), count))
    while some := list(islice(rows, _AT_ONCE)):
        typer.echo("\n".join(map(line, some)))
    return count == most and next(islice(each(), most, None), None) is not None


def _row(session: Session) -> list[str]:
    used = _used(session).astimezone().strftime("%Y-%m-%d %H:%M")
    shared = _size(session.nbytes - session.own_nbytes) if session.nbytes > session.own_nbytes else ""
    texts = session.id, plain(session.info.model), str(session.turns), _size(session.nbytes), shared, used
    return [*texts, "pinned" if session.info.pinned else "", plain(session.info.owner), plain(session.title)]


@app.command("show")
def show(
    session_id: Id,
    why: Annotated[
        bool, typer.Option("--why", help="Also where each prompt differs from an earlier one, and so was read anew.")
    ] = False,
    data_dir: options.DataDir = None,
    as_json: options.Json = False,
) -> None:
    """Show a session and the conversation that leads to its current turn."""
    with open_store(data_dir) as store:
        session = read_session(store, session_id)
        path = store.path(session.head)
        everything = store.turns(session.id) if as_json else []
        partings = store.partings(everything or path) if why else {}
    if as_json:
        parted = {t.id: {"parting": asdict(partings[t.id]) if t.id in partings else None} for t in everything}
        turns = [_turn(t) | (parted[t.id] if why else {}) for t in everything]
        typer.echo(json_text(_summary(session) | {"tree": turns}, 1))
        return
    branches = f", {session.turns - len(path)} on other branches" if session.turns > len(path) else ""
    imported = ", imported" if session.info.imported else ""
    owner = f", of {plain(session.info.owner)}" if session.info.owner else ""
    model = plain(session.info.model)
    shown = f"{counted(len(path), 'turn')}{branches}"
    typer.echo(f"{session.id}  {model}  {shown}{imported}{owner}, {_size(session.nbytes)}")
    for turn in path:
        if why:
            typer.echo(f"\n{turn.id}: {_why(turn, partings.get(turn.id))}")
        for message in turn.messages:
            typer.echo(f"\n{message.role}: {_shown(message)}")
        if not has_answer(turn.finish):
            continue
        cut = "" if turn.complete else "  [cut off]"
        typer.echo(f"\n{turn.answer.role}: {_shown(turn.answer)}{cut}")


def has_answer(finish: str) -> bool:
    """Return False for the end of a turn without an answer: added items, a conversation's or a warm beginning."""
    from ssmd.sessions.rows.conversations import ADDED, OPENING
    from ssmd.sessions.rows.warm import WARM

    return finish not in (ADDED, OPENING, WARM)


def _why(turn: Turn, parting: Parting | None) -> str:
    """Describe where a turn's prompt differs from an earlier one."""
    tokens = f"a prompt of {turn.prompt_tokens} tokens"
    if parting is None:
        return f"{tokens}; it {'goes on from the turn above' if turn.parent else 'differs from no earlier one'}"
    others = plain(parting.turn if parting.session == turn.session else f"{parting.turn} of {parting.session}")
    place = f"{tokens}; the first {parting.position} are those of {others}"
    if not parting.here and not parting.there:
        return f"{place}, then the same words have other tokens"
    before, here, there = (json_text(text)[1:-1] for text in (parting.before, parting.here, parting.there))
    return f'{place}\n  here:  "…{before}|{here}…"\n  there: "…{before}|{there}…"'


@app.command("rename")
def rename(
    session_id: Id,
    title: Annotated[
        str | None, typer.Argument(help="Its new title; left out: how its first message begins.", metavar="TITLE")
    ] = None,
    data_dir: options.DataDir = None,
    as_json: options.Json = False,
) -> None:
    """Give a session a title."""
    with open_store(data_dir) as store:
        session = store.rename(read_session(store, session_id).id, title)
    typer.echo(json_text(_summary(session), 1) if as_json else plain(session.title))


@app.command("rm")
def remove(
    session_ids: Annotated[
        list[str],
        typer.Argument(metavar="ID...", help="The sessions to remove.", autocompletion=completion.sessions),
    ],
    data_dir: options.DataDir = None,
    as_json: options.Json = False,
) -> None:
    """Remove sessions: their text, and the states that no other session uses. It cannot be undone."""
    with open_store(data_dir) as store:
        for session_id in session_ids:
            store.session(session_id)  # raises for an unknown id, before any is removed
        for session_id in dict.fromkeys(session_ids):
            store.delete(session_id)
            if not as_json:
                typer.echo(f"removed {session_id}")
    if as_json:
        typer.echo(json.dumps({"removed": list(dict.fromkeys(session_ids))}))


def _shown(message: Message) -> str:
    """Format a message and its calls, a line each."""
    calls = [f"calls {plain(call.name)}({plain(call.arguments)})" for call in message.tool_calls]
    said = [plain(message.content, lines=True)] if message.content or not calls else []
    return "\n".join([*said, *calls])


def _print_summaries(sessions: Iterator[Session]) -> None:
    """Print a JSON list of sessions, one after the other: a store may have more than fit into memory."""
    between = "[\n "
    while some := list(islice(sessions, _AT_ONCE)):
        texts = (json_text(_summary(session), 1).replace("\n", "\n ") for session in some)
        typer.echo(between + ",\n ".join(texts), nl=False)
        between = ",\n "
    typer.echo("[]" if between == "[\n " else "\n]")


def _summary(session: Session) -> dict[str, Any]:
    return {
        "id": session.id,
        "model": session.info.model,
        "lineage": session.info.lineage,
        "turns": session.turns,
        "head": session.head,
        "base": session.base,
        "bytes": session.nbytes,
        "own_bytes": session.own_nbytes,
        "pinned": session.info.pinned,
        "imported": session.info.imported is not None,
        "owner": session.info.owner or None,
        "created_at": session.created_at.isoformat(),
        "last_used_at": _used(session).isoformat(),
        "title": session.title,
    }


def _used(session: Session) -> datetime:
    """Return when it was used last. The stored time may be in the future if the clock was ahead."""
    return min(session.last_used_at, datetime.now(UTC))


def _turn(turn: Turn) -> dict[str, Any]:
    return {
        "id": turn.id,
        "parent": turn.parent,
        "messages": [m.to_json() for m in turn.messages],
        "answer": turn.answer.to_json(),
        "prompt_tokens": turn.prompt_tokens,
        "finish": turn.finish,
        "complete": turn.complete,
        "created_at": turn.created_at.isoformat(),
    }


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e6:.1f} MB"


def plain(text: str, *, lines: bool = False) -> str:
    """Replace control characters: a stored reply, or an imported file, must not steer the terminal."""
    return "".join(c if c.isprintable() or (lines and c in "\n\t") else "\ufffd" for c in text)


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
            store.session(session_id)  # raises for an unknown id, before any is changed
        for session_id in wanted:
            store.pin(session_id, pinned)
            if not as_json:
                typer.echo(f"{'pinned' if pinned else 'unpinned'} {session_id}")
    if as_json:
        typer.echo(json.dumps({"pinned" if pinned else "unpinned": wanted}))


def collect(
    quota: options.Quota = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be removed.")] = False,
    unlisted: Annotated[
        bool, typer.Option("--unlisted", help="Remove the states of requests that are not stored, and no others.")
    ] = False,
    data_dir: options.DataDir = None,
    as_json: options.Json = False,
) -> None:
    """Remove states until those left fit the quota, and give the space back to the disk. No text is removed.

    Old states are removed first, then those of the sessions used least recently; pinned sessions keep theirs. Of
    several API keys, one above its equal share of the quota gives first.
    """
    from ssmd.config import Settings
    from ssmd.machine.progress import show_progress

    if unlisted:
        _collect_unlisted(data_dir, as_json=as_json, alone=quota is None and not dry_run)
        return
    limit = Settings(data_dir=data_dir, quota=quota).quota
    with open_store(data_dir) as store, show_progress("finding states to remove" if dry_run else "removing states"):
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


def _collect_unlisted(data_dir: Path | None, *, as_json: bool, alone: bool) -> None:
    """Remove states without a session. alone: no option was given that means other states."""
    if not alone:
        raise typer.BadParameter("--unlisted goes with neither --quota nor --dry-run: it removes all such states")
    from ssmd.machine.size import show_size

    with open_store(data_dir) as store:
        before = store.bytes_stored()
        gone = store.sweep(_UNDER_WAY_S)
        nbytes = before - store.bytes_stored()
    if as_json:
        typer.echo(json.dumps({"checkpoints": gone, "bytes": nbytes}))
    else:
        were = "was" if gone == 1 else "were"
        typer.echo(f"{counted(gone, 'state')} of requests that are not stored {were} removed, {show_size(nbytes)}")


def _tell(done: CollectionResult, limit: int, *, dry_run: bool) -> None:
    from ssmd.machine.size import show_size

    would = "would be removed" if dry_run else "was removed" if done.checkpoints == 1 else "were removed"
    for session_id, (nbytes, count) in done.sessions.items():
        typer.echo(f"{session_id}: {counted(count, 'state')}, {show_size(nbytes)}")
    states = f"{counted(done.checkpoints, 'state')} of {counted(len(done.sessions), 'session')}"
    typer.echo(
        f"{states} {would}, {show_size(done.nbytes)}; "
        f"{show_size(done.left)} of {show_size(limit)} {'would be ' if dry_run else ''}in use"
    )


def check(
    repair: Annotated[
        bool, typer.Option("--repair", help="Remove what is damaged; the daemon must be stopped.")
    ] = False,
    data_dir: options.DataDir = None,
    as_json: options.Json = False,
) -> None:
    """Read everything that is stored and report what is damaged. Exit code 1 if anything is, and was not repaired.

    A repair loses only what is damaged: without a state, its conversation is read again.
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
            with _bytes_read() as progress:
                done = mend(settings.data_dir, progress, busy_ms=BUSY_MS)
        finally:
            lock.release()
    else:
        with _bytes_read() as progress:
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
        found = f"{counted(done.sessions, 'session')}, {counted(done.turns, 'turn')}"
        found += f", {counted(done.checkpoints, 'checkpoint')}"
        typer.echo(f"{found}: {_verdict(done)}")
        if done.kept is not None:
            typer.echo(f"the damaged file is kept as {done.kept}; remove it if you miss nothing")
    if done.damages and not done.repaired:
        sys.exit(1)


def _verdict(done: CheckReport) -> str:
    if not done.damages:
        return "all sound"
    if done.repaired:
        return f"{len(done.damages)} damages repaired"
    return f"{len(done.damages)} damages; run `ssmd session check --repair` to repair them"


@contextmanager
def _bytes_read() -> Iterator[Callable[[int], None]]:
    """Show the bytes read so far, on a terminal."""
    from rich.console import Console
    from rich.progress import DownloadColumn, Progress, SpinnerColumn, TextColumn

    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("reading"), DownloadColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=None)
        yield lambda nbytes: progress.advance(task, nbytes)
