"""`ssmd session export` and `import`: conversations to files and from them. Both work while the daemon runs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ssmd.cli import completion, options
from ssmd.cli.output import USAGE, counted, fail
from ssmd.cli.session import _size, open_store, read_session

if TYPE_CHECKING:
    from ssmd.config import Settings
    from ssmd.sessions.files.packing import ExportResult, States
    from ssmd.sessions.files.rereading import Rereader
    from ssmd.sessions.files.transfer import ImportResult, LocalModel
    from ssmd.sessions.store import Store
    from ssmd.text.apart import Texts


def export(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="ID FILE | ID... --into DIR",
            help="A session and the file to write, say chat.ssmd.",
            autocompletion=completion.sessions,
        ),
    ] = None,
    into: Annotated[
        Path | None, typer.Option("--into", metavar="DIR", help="Write each session to DIR/ID.ssmd.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Export all sessions; needs --into.")] = False,
    no_state: Annotated[bool, typer.Option("--no-state", help="The text alone: it is read again, once.")] = False,
    all_states: Annotated[
        bool, typer.Option("--all-states", help="The newest states of every branch, not of the current one alone.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite existing files.")] = False,
    data_dir: options.DataDir = None,
    as_json: options.Json = False,
) -> None:
    """Write sessions with their newest states to files, to go on with them elsewhere.

    All turns of all branches go along. With --json one object a line.
    """
    if no_state and all_states:
        fail("--no-state and --all-states contradict each other", USAGE)
    states: States = "none" if no_state else "all" if all_states else "newest"
    from ssmd.sessions.files.transfer import remove_unfinished

    with open_store(data_dir) as store:
        targets = _targets(store, arguments or [], into, everything, force)
        for folder in {file.parent for _, file in targets}:
            remove_unfinished(folder)
        for session_id, file in targets:
            _export_one(store, session_id, file, states, force=force, as_json=as_json)


def _targets(
    store: Store, arguments: Sequence[str], into: Path | None, everything: bool, force: bool
) -> list[tuple[str, Path]]:
    """Return the sessions and their files. All their errors are found before anything is written."""
    if into is None:
        if everything or len(arguments) != 2:
            fail("name a session and a file: ID FILE; for several sessions a folder: ID... --into DIR", USAGE)
        return [(read_session(store, arguments[0]).id, Path(arguments[1]).expanduser())]
    if everything == bool(arguments):
        fail("name the sessions, or pass --all", USAGE)
    folder = into.expanduser()
    ids = store.ids() if everything else list(dict.fromkeys(read_session(store, given).id for given in arguments))
    targets = [(i, folder / f"{i}.ssmd") for i in ids]  # ids are letters, digits, _ and -, so they cannot form a path
    names = [file.name.lower() for _, file in targets]
    if len(set(names)) < len(names):
        fail("some ids differ in capitals only, and many file systems do not tell them apart: export them one by one")
    there = [file for _, file in targets if file.exists()]
    if there and not force:
        fail(f"{there[0]} exists already; choose another folder, or overwrite with --force")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return targets


def _export_one(store: Store, session_id: str, file: Path, states: States, *, force: bool, as_json: bool) -> None:
    from ssmd.machine.progress import show_progress
    from ssmd.sessions.files.transfer import export_session

    with show_progress(f"exporting {session_id}"):
        done: ExportResult = export_session(store, session_id, file, force=force, states=states)
    if as_json:
        fields = {"file": str(file), "bytes": done.nbytes, "turns": done.turns, "states": done.checkpoints}
        typer.echo(json.dumps(fields | {"left_out": done.left_out}))
        return
    left = f" ({done.left_out} more states do not fit into one file)" if done.left_out else ""
    what = f"{counted(done.turns, 'turn')}, {counted(done.checkpoints, 'state')}{left}"
    typer.echo(f"{file}: {what}, {_size(done.nbytes)}")


def import_(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Files that `ssmd session export` wrote.")],
    reread: Annotated[
        bool,
        typer.Option("--reread", help="Believe no state in the file: compute them anew with the model, now."),
    ] = False,
    runtime: options.Runtime = None,
    device: options.Device = None,
    threads: options.Threads = None,
    data_dir: options.DataDir = None,
    models_dir: options.ModelsDir = None,
    as_json: options.Json = False,
) -> None:
    """Read sessions from files. Of a session of a model that is not installed here only the messages are taken.

    With --json one object a line.
    """
    from ssmd.config import Settings
    from ssmd.sessions.turn import StoreError

    settings = Settings(data_dir=data_dir, models_dir=models_dir, runtime=runtime, device=device, threads=threads)
    local = _local_models(settings.models_dir)
    if not local:
        typer.echo("note: no model is installed here, so sessions are not checked against one", err=True)
    failed = 0
    with open_store(data_dir) as store:
        for file in files:
            try:
                done = _import_one(store, file.expanduser(), local, settings, reread)
            except StoreError as err:
                if len(files) == 1:
                    raise
                typer.echo(f"error: {err}", err=True)  # the other files are imported all the same
                failed += 1
                continue
            typer.echo(_json(done) if as_json else _line(done))
    if failed:
        fail(f"{failed} of {len(files)} files were not imported")


def _import_one(
    store: Store, file: Path, local: Mapping[str, LocalModel], settings: Settings, reread: bool
) -> ImportResult:
    from ssmd.machine.progress import show_progress
    from ssmd.sessions.files.sessionfile import open_session_file
    from ssmd.sessions.files.transfer import import_session

    if not reread:
        with show_progress(f"importing {file.name}"):
            return import_session(store, file, local=local or None)
    with show_progress(f"checking {file.name}"), open_session_file(file) as reader:
        lineage = reader.document.session.lineage
    if lineage not in local:
        with show_progress(f"importing {file.name}"):
            return import_session(store, file, local=local or None, believe=False)
    with show_progress(f"loading {local[lineage].name}"):
        rereader, texts = _rereader(lineage, settings)
    try:
        with show_progress(f"reading {file.name}"):
            return import_session(store, file, local=local, rereader=rereader)
    finally:
        texts.close()
        rereader.program.close()


def _rereader(lineage: str, settings: Settings) -> tuple[Rereader, Texts]:
    """Load a model of that lineage. Returns it, and the texts to close after its program."""
    from ssmd.machine.progress import tell
    from ssmd.model.artifact import Artifact
    from ssmd.model.made import is_made_here
    from ssmd.runtime.loading import load
    from ssmd.sessions.checkpoint import Scope
    from ssmd.sessions.files.rereading import Rereader
    from ssmd.text.apart import opened

    artifact = Artifact.open(_artifact_of(lineage, settings))
    manifest = artifact.manifest
    made_here = is_made_here(artifact.path, settings.data_dir)
    program = load(artifact, made_here=made_here, device=settings.device, threads=settings.threads)
    texts = opened(artifact, apart=not made_here)
    scope = Scope(program.spec.digest(), manifest.lineage, manifest.build)
    return Rereader(program, texts.tokenizer, scope, tell), texts


def _artifact_of(lineage: str, settings: Settings) -> Path:
    """Return the smallest artifact of a lineage that runs here. Raises ModelError."""
    from ssmd.installed import ModelError, installed, resolve

    fitting = [i for i in installed(settings.models_dir) if i.manifest is not None and i.manifest.lineage == lineage]
    problems = []
    for one in sorted(fitting, key=lambda i: (i.nbytes, i.path)):
        try:
            return resolve(str(one.path.absolute()), settings.models_dir, settings.runtime, settings.device)
        except ModelError as err:
            problems.append(str(err))
    raise ModelError("; ".join(problems))


def _line(done: ImportResult) -> str:
    renamed = " (a new id: the file's own is in use here)" if done.renamed else ""
    what = f"{counted(done.turns, 'turn')}, {counted(done.checkpoints, 'state')}"
    what = f"{done.session}{renamed}: {what}, {_size(done.nbytes)}"
    if not done.text_only:
        return what
    return f"{what}; text only: {done.text_only}. The next request reads it whole, once"


def _json(done: ImportResult) -> str:
    fields = {"id": done.session, "renamed": done.renamed, "turns": done.turns, "states": done.checkpoints}
    fields |= {"dropped": done.dropped, "text_only": done.text_only or None}
    return json.dumps(fields | {"bytes": done.nbytes, "model": done.model, "lineage": done.lineage})


def _local_models(models_dir: Path) -> dict[str, LocalModel]:
    from ssmd.installed import installed
    from ssmd.sessions.files.transfer import LocalModel

    manifests = [one.manifest for one in installed(models_dir) if one.manifest is not None]
    return {m.lineage: LocalModel(m.name, m.spec, m.vocabulary) for m in manifests}
