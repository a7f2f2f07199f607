"""`ssmd backup` copies all conversations into a folder, while the daemon goes on writing."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from ssmd.cli import options
from ssmd.cli.session import BUSY_MS, plain


def backup(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="An empty folder, or one to be made.")],
    without_states: Annotated[
        bool, typer.Option("--without-states", help="Copy only the text; a restored conversation is read again once.")
    ] = False,
    data_dir: options.DataDir = None,
    as_json: options.Json = False,
) -> None:
    """Copy all sessions, with their states, into an empty folder, and check the copy. Works while the daemon runs.

    The copy holds nothing that was removed. The exit code is 1 if no copy could be made (DIR is then empty), or if the
    copy is damaged. `ssmd session check` reports whether the sessions here have the same damage.
    """
    from ssmd.config import Settings
    from ssmd.machine.size import show_size
    from ssmd.sessions.files.backup import back_up

    settings = Settings(data_dir=data_dir)
    done = back_up(settings.data_dir, folder, states=not without_states, busy_ms=BUSY_MS)
    counts = {"sessions": done.sessions, "turns": done.turns, "checkpoints": done.checkpoints}
    if as_json:
        damages = [{"what": d.what, "problem": d.problem, "repair": d.loss} for d in done.damages]
        fields = {"file": str(done.file), "bytes": done.nbytes, "states": done.states, **counts}
        typer.echo(json.dumps(fields | {"sound": not damages, "damages": damages}, indent=1))
    else:
        for damage in done.damages:
            typer.echo(plain(str(damage)))
        found = f"{len(done.damages)} damages; run `ssmd session check` to see if the sessions here have them too"
        verdict = found if done.damages else "all sound"
        said = ", ".join(f"{count} {name}" for name, count in counts.items())
        typer.echo(f"{plain(str(done.file))}: {said}, {show_size(done.nbytes)}: {verdict}")
    if done.damages:
        sys.exit(1)
