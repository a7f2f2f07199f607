"""`ssmd completion`: the script that lets a shell complete model names and session ids, and the completions themselves.

They are found without reading manifests or the settings. Any error yields no completion: a shell must not show errors.
Shells evaluate the completions, so only names of models and ids are offered, without descriptions.
"""

from __future__ import annotations

import os
import re
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from ssmd.cli.output import fail

SHELLS = ("bash", "zsh", "fish", "powershell")
VARIABLE = "_SSMD_COMPLETE"
SHOWN = 200  # sessions that are offered, the last used ones
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", re.ASCII)
_ID = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)


def completion(shell: Annotated[str, typer.Argument(metavar="SHELL", help=", ".join(SHELLS))]) -> None:
    """Print a script for completion in a shell. It completes commands, options, models and sessions.

    For bash put this into ~/.bashrc: eval "$(ssmd completion bash)"
    """
    from typer.completion import get_completion_script  # type: ignore[attr-defined]  # where typer's own option has it

    if shell not in SHELLS:
        fail(f"{shell!r} is not a supported shell; supported are: {', '.join(SHELLS)}", 2)
    typer.echo(get_completion_script(prog_name="ssmd", complete_var=VARIABLE, shell=shell))


def prepare() -> None:
    """Prepare for completion if a shell requests it."""
    if VARIABLE in os.environ:
        from typer.completion import get_completion_inspect_parameters

        get_completion_inspect_parameters()  # registers typer's own shells


def models(ctx: typer.Context, incomplete: str) -> list[str]:
    """List the names of the installed models that begin with `incomplete`."""
    from ssmd.daemon.place import models_dir

    try:
        folder = models_dir(_given(ctx, "models_dir"), _given(ctx, "data_dir"))
        found = [one.name for one in os.scandir(folder) if one.name.startswith(incomplete) and _is_model(one)]
    except Exception:
        return []
    return sorted(found)


def sessions(ctx: typer.Context, incomplete: str) -> list[str]:
    """List the ids of the sessions that begin with `incomplete`, the one used last first."""
    from ssmd.daemon.place import data_dir

    try:
        return _sessions(data_dir(_given(ctx, "data_dir")), incomplete)
    except Exception:
        return []


def _given(ctx: typer.Context, option: str) -> Path | None:
    value = ctx.params.get(option)
    return Path(value) if value else None


def _is_model(folder: os.DirEntry[str]) -> bool:
    if not _NAME.fullmatch(folder.name):
        return False
    return any(os.path.exists(os.path.join(one.path, "artifact.json")) for one in os.scandir(folder.path))


def _sessions(data: Path, incomplete: str) -> list[str]:
    import sqlite3

    file = data / "sessions.sqlite3"
    unused = "" if Path(f"{file}-wal").exists() else "&immutable=1"  # else SQLite makes files that others may write
    uri = f"{file.as_uri()}?mode=ro{unused}"
    with closing(sqlite3.connect(uri, uri=True, timeout=0.2)) as database:
        rows = database.execute(
            "SELECT id FROM session WHERE substr(id, 1, ?) = ? ORDER BY last_used_at DESC LIMIT ?",
            (len(incomplete), incomplete, SHOWN),
        )
        return [one for (one,) in rows if isinstance(one, str) and _ID.fullmatch(one)]
