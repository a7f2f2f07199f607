"""`ssmd warm`: beginnings of prompts that are read once and kept, so that an agent's first request reads little."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ssmd.cli import options
from ssmd.cli.output import USAGE, fail, lines
from ssmd.cli.session import open_store, plain
from ssmd.machine import textfile

if TYPE_CHECKING:
    from ssmd.sessions.rows.warm import WarmBeginning
    from ssmd.sessions.store import Store

WARM = "/ssmd/v1/warm"
MAX_BYTES = 16 << 20  # of a file or of stdin
WAIT_S = 6 * 3600.0  # longest wait for a reading
SUFFIX = ".ssmd"
# The fields of a chat's body that shape the beginning of its prompt.
_FIELDS = ("messages", "tools", "functions", "chat_template_kwargs", "enable_thinking", "reasoning_effort")
_OTHERS = {"system": "Anthropic's messages", "input": "OpenAI's responses", "instructions": "OpenAI's responses"}


def warm(
    file: Annotated[
        str | None,
        typer.Argument(
            metavar="[FILE]",
            help="A chat's body as JSON, or a system prompt as text; - reads stdin. Or a .ssmd file to import.",
        ),
    ] = None,
    from_last: Annotated[
        bool, typer.Option("--from-last", help="Take the tools and system messages of the session used last.")
    ] = False,
    session: Annotated[str | None, typer.Option(help="Take those of this session.", metavar="ID")] = None,
    name: Annotated[str | None, typer.Option(help="Its name; else the file's or the session's.")] = None,
    idle: Annotated[bool, typer.Option("--idle", help="Read it when no request waits, and return at once.")] = False,
    model: Annotated[str | None, typer.Option(help="The model that reads it.", metavar="NAME")] = None,
    key: Annotated[
        str | None, typer.Option(help="Name of the API key whose requests it is for, if keys have names.")
    ] = None,
    listing: Annotated[bool, typer.Option("--list", help="List the warm beginnings.")] = False,
    remove: Annotated[str | None, typer.Option("--rm", help="Remove one, by name or id.", metavar="NAME")] = None,
    export: Annotated[
        Path | None, typer.Option("--export", help="Write the one that FILE names to this file.", metavar="F.ssmd")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
    trust: Annotated[
        bool, typer.Option("--trust", help="Of an imported file: believe its state, and use it at once.")
    ] = False,
    runtime: options.Runtime = None,
    data_dir: options.DataDir = None,
    models_dir: options.ModelsDir = None,
    as_json: options.Json = False,
) -> None:
    """Read the beginning of prompts once, and keep its state: tools and system messages, as an agent sends them.

    The first request that begins so then reads only what follows, also after a restart. Retention never removes it. A
    beginning of the same name and key replaces the one before.
    """
    named = session is not None
    if sum((listing, remove is not None, from_last or named, file is not None and export is None)) > 1:
        fail("a FILE, --from-last or --session, --list and --rm exclude one another", USAGE)
    if trust and not (file or "").endswith(SUFFIX):
        fail("--trust is for the import of a .ssmd file", USAGE)
    if listing or remove is not None or export is not None:
        with open_store(data_dir) as store:
            if remove is not None:
                _remove(store, remove, as_json)
            elif export is not None:
                _export(store, file, export.expanduser(), force, as_json)
            else:
                _list(store, as_json)
        return
    if file is not None and file.endswith(SUFFIX):
        _import(Path(file).expanduser(), name, key, trust, data_dir, models_dir, as_json)
        return
    body: dict[str, Any] = {}
    if file is not None:
        body = _body(_text(file), file)
        name = name or ("stdin" if file == "-" else Path(file).stem)
    elif not (from_last or named):
        fail("name a FILE with a chat's body or a system prompt, or pass --from-last; see ssmd warm --help", USAGE)
    else:
        with open_store(data_dir) as store:
            session, name = _source(store, session, name)
        body = {"session": session}
    fields = {"name": name, "idle": idle, **({} if key is None else {"key": key})}
    done = _read(body | fields, model, runtime, session, data_dir, models_dir)
    with open_store(data_dir) as store:
        replaced = _replace(store, done["id"])
    if as_json:
        typer.echo(json.dumps(done | {"replaced": replaced}))
        return
    state = f"{done['cached_tokens']} of them from a stored state" if done["ready"] else "read when no request waits"
    typer.echo(f"{plain(done['name'])}: {done['tokens']} tokens, {state}")
    for one in replaced:
        typer.echo(f"it replaces {one}, of the same name", err=True)


def _read(
    body: dict[str, Any],
    model: str | None,
    runtime: str | None,
    session: str | None,
    data_dir: Path | None,
    models_dir: Path | None,
) -> dict[str, Any]:
    """Have a beginning read by the daemon, or by a model that is loaded here. Raises DaemonError."""
    from ssmd.cli.chat.peer import PeerOptions, reached
    from ssmd.config import Settings
    from ssmd.daemon.answers import WARM as SHAPE
    from ssmd.daemon.client import Client
    from ssmd.machine.progress import show_progress

    settings = Settings(data_dir=data_dir, models_dir=models_dir, runtime=runtime, log_level="error")
    wanted = PeerOptions(model, runtime, None, None, models_dir, keep=True)
    with reached(wanted, settings, session, last=False) as (daemon, named):
        client = Client(daemon.client().address, WAIT_S)
        with show_progress("reading the beginning"):
            done: dict[str, Any] = client.send("POST", WARM, body | {"model": named}, holds=SHAPE)
    return done


def _text(file: str) -> str:
    """Return the text of a file, or of stdin. Ends the command if it is not text, or too long."""
    what = "stdin" if file == "-" else file
    if file == "-":
        raw = sys.stdin.buffer.read(MAX_BYTES + 1)
    else:
        path = Path(file).expanduser()
        if not path.is_file():
            fail(f"{path} is not a file" if os.path.lexists(path) else f"there is no file {path}")
        with path.open("rb") as opened:
            raw = opened.read(MAX_BYTES + 1)
    if len(raw) > MAX_BYTES:
        fail(f"{what} is longer than {MAX_BYTES >> 20} MiB, which no beginning is")
    if 0 in raw and textfile.encoding(raw) == textfile.UTF_8:
        fail(f"{what} is not text: it has zero bytes")
    try:
        text = textfile.decode(raw)
    except UnicodeDecodeError as err:
        fail(f"{what} is not {err.encoding.upper()}; convert it to UTF-8 first, as with iconv")
    if not text.strip():
        fail(f"{what} is empty; give a chat's body as JSON, or a system prompt as text")
    return text


def _body(text: str, file: str) -> dict[str, Any]:
    """Return the fields of a chat's body that shape its beginning. Ends the command if the text is invalid JSON.

    A text that is not JSON is a system prompt.
    """
    what = "stdin" if file == "-" else file
    prompt = {"messages": [{"role": "system", "content": text}]}
    if not text.lstrip().startswith(("{", "[")):
        return prompt
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as err:
        if text.lstrip().startswith("["):  # as prompts do
            return prompt
        why = "it is nested too deeply" if isinstance(err, RecursionError) else str(err)
        fail(f"{what} begins like JSON and is not: {why}")
    fields = {"messages": given} if isinstance(given, list) else given
    if "messages" not in fields and (foreign := next((_OTHERS[n] for n in _OTHERS if n in fields), "")):
        fail(f"{what} is a body of {foreign}: send it to the daemon once, then run ssmd warm --from-last")
    if "messages" not in fields and not fields.get("tools"):
        fail(f"{what} has no messages and no tools; give the body of a chat completion")
    if "system" in fields:
        fail(f"{what} is a body of {_OTHERS['system']}: send it to the daemon once, then run ssmd warm --from-last")
    messages = fields.get("messages") or [{"role": "user", "content": "."}]  # tools alone are a beginning too
    return {name: fields[name] for name in _FIELDS if name in fields} | {"messages": messages}


def _source(store: Store, given: str | None, name: str | None) -> tuple[str, str]:
    """Return the id of the session to take a beginning from, and the beginning's name."""
    from ssmd.cli.session import read_session

    ours = {one.session.id for one in store.warm()}
    found = next((s for s in store.sessions(len(ours) + 1) if s.id not in ours), None) if given is None else None
    if given is not None:
        found = read_session(store, given)
    if found is None:
        fail("no session is kept here yet; run the agent once, or give a file: ssmd warm FILE")
    return found.id, name or found.title or found.id


def _find(store: Store, given: str | None) -> WarmBeginning:
    """Return the warm beginning with this name, or this beginning of an id; the only one if none is given."""
    every = store.warm()
    found = [one for one in every if given is None or given == one.session.title]
    found = found or [one for one in every if given and one.session.id.startswith(given)]
    if len(found) == 1:
        return found[0]
    there = ", ".join(f"{plain(one.session.title)} ({one.session.id})" for one in found or every) or "none"
    if not found:
        fail(f"there is no warm beginning {plain(given or '')!r}; there are: {there}")
    fail(f"say which warm beginning, by its id; there are: {there}")


def _remove(store: Store, given: str, as_json: bool) -> None:
    one = _find(store, given)
    store.delete(one.session.id)
    if as_json:
        typer.echo(json.dumps({"id": one.session.id, "deleted": True}))
    else:
        typer.echo(f"removed {plain(one.session.title)} ({one.session.id})")


def _export(store: Store, given: str | None, file: Path, force: bool, as_json: bool) -> None:
    from ssmd.cli.session_move import _export_one

    one = _find(store, given)
    if not one.ready:
        typer.echo("note: its state is not stored yet; the file has the text and tokens alone", err=True)
    _export_one(store, one.session.id, file, "newest", force=force, as_json=as_json)


def _list(store: Store, as_json: bool) -> None:
    """Print the warm beginnings, a line each."""
    from ssmd.api.own.warm import row
    from ssmd.machine.size import show_size

    every = store.warm()
    if as_json:
        typer.echo(json.dumps([row(one) for one in every], indent=1))
        return
    if not every:
        typer.echo("no beginning is kept warm; make one with: ssmd warm FILE, or ssmd warm --from-last", err=True)
        return
    rows = [("name", "model", "tokens", "size", "state", "key", "id")]
    for one in every:
        state = "ready" if one.ready else "not read yet"
        state = f"{state}, imported" if one.session.info.imported else state
        size, info = show_size(one.session.nbytes), one.session.info
        rows.append((one.session.title, info.model, str(one.tokens), size, state, info.owner or "-", one.session.id))
    for line in lines([tuple(plain(cell) for cell in row_) for row_ in rows]):
        typer.echo(line)


def _import(
    file: Path,
    name: str | None,
    key: str | None,
    trust: bool,
    data_dir: Path | None,
    models_dir: Path | None,
    as_json: bool,
) -> None:
    """Import a beginning from a file. The daemon reads it when no request waits, unless its state is trusted."""
    from ssmd.cli.session_move import _local_models
    from ssmd.config import Settings
    from ssmd.daemon.discovery import find
    from ssmd.machine.progress import show_progress
    from ssmd.sessions.files.transfer import import_warm
    from ssmd.sessions.turn import Domain

    settings = Settings(data_dir=data_dir, models_dir=models_dir)
    local = _local_models(settings.models_dir)
    with open_store(data_dir) as store:
        mine = store if key is None else store.of(Domain(key, (key,)))
        with show_progress(f"importing {file.name}"):
            done = import_warm(mine, file, local=local, trust=trust, name=name or None)
        replaced = _replace(store, done.session)
        one = next(w for w in store.warm() if w.session.id == done.session)
    address = find(settings.data_dir)
    if address is not None:  # it looks for what is to be read
        from ssmd.daemon.client import Client

        Client(address).get(WARM)
    if as_json:
        from ssmd.api.own.warm import row

        typer.echo(json.dumps(row(one) | {"replaced": replaced}))
        return
    after = "ready" if one.ready else "read when no request waits" if address else "read when a daemon runs"
    typer.echo(f"{plain(one.session.title)}: {one.tokens} tokens, {after}")
    for other in replaced:
        typer.echo(f"it replaces {other}, of the same name", err=True)


def _replace(store: Store, made: str) -> list[str]:
    """Remove the other beginnings with the name, model and key of a new one. Return their ids."""
    whose = {
        one.session.id: (one.session.title, one.session.info.model, one.session.info.owner) for one in store.warm()
    }
    gone = [other for other, its in whose.items() if other != made and its == whose.get(made)]
    for session_id in gone:
        store.delete(session_id)
    return gone
