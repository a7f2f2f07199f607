"""Options that several commands share."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from ssmd.cli import completion
from ssmd.model.defaults import OPTIONS, integer


def _integer(text: str) -> int:
    try:
        return integer(text)
    except (ValueError, OverflowError):
        raise typer.BadParameter(f"{text!r} is not a valid integer.") from None


INTEGER: dict[str, Any] = {"parser": _integer, "metavar": "INTEGER"}  # of a field of requests: 40.0 is 40, as in a body


def with_sampling(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command an option for each of OPTIONS. It gets the values that were set, by name, as `sampling`."""
    own = inspect.signature(command, eval_str=True)
    added = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[
                int | None if option.whole else float | None,
                typer.Option(
                    *(f"--{one.replace('_', '-')}" for one in (name, *option.aliases)),
                    help=option.help,
                    **(INTEGER if option.whole else {}),
                ),
            ],
        )
        for name, option in OPTIONS.items()
    ]

    @functools.wraps(command)
    def wrapped(*args: object, **given: Any) -> None:
        sampling = {name: value for name in OPTIONS if (value := given.pop(name, None)) is not None}
        command(*args, **given, sampling=sampling)

    parameters = [one for one in own.parameters.values() if one.name != "sampling"]
    signature = own.replace(parameters=[*parameters, *added])
    vars(wrapped)["__signature__"] = signature
    wrapped.__annotations__ = {name: one.annotation for name, one in signature.parameters.items()}
    return wrapped


def given(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings among a command's parameters that the user gave, by name."""
    from ssmd.config import Settings

    return {
        name: value
        for name, value in flags.items()
        if name in Settings.model_fields and value is not False and value != []
    }


def _use_file(path: Path | None) -> Path | None:
    if path is not None:
        from ssmd.config import use_file

        path = path.expanduser()
        if not path.is_file():
            raise typer.BadParameter(f"there is no file {path}; `ssmd config path` prints the one read without it")
        use_file(path.absolute())
    return path


def known_runtime(name: str | None) -> str | None:
    """Refuse a runtime's name that no package registers. Other commands report if it can be used here."""
    if name in (None, "auto"):
        return name
    from ssmd.runtime.info import runtime_names, targets

    if name not in targets():
        from ssmd.machine.spelling import did_you_mean

        meant = did_you_mean(name, [*targets(), "auto"])
        raise typer.BadParameter(f"no runtime is named {name!r}; there are: {', '.join(runtime_names())}{meant}")
    return name


Model = Annotated[
    str | None,
    typer.Argument(
        metavar="[MODEL]",
        help="Name of an installed model, or a path. May be left out if there is one.",
        autocompletion=completion.models,
    ),
]
Runtime = Annotated[
    str | None,
    typer.Option(
        help="Use this runtime's artifact; auto picks the best that runs here.", metavar="NAME", callback=known_runtime
    ),
]
Target = Annotated[str | None, typer.Option(help="Runtime to make it for, or npu; else the fastest.", metavar="NAME")]
Device = Annotated[
    str | None,
    typer.Option(
        help="cpu, gpu or npu, of wgpu also vulkan, gl, metal or dx12; else what it was built for.", metavar="NAME"
    ),
]
Threads = Annotated[int | None, typer.Option(help="Compute threads.", metavar="N")]
Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        help="Read settings from this file, and not from that of SSMD_CONFIG.",
        metavar="FILE",
        callback=_use_file,
        is_eager=True,
    ),
]
DataDir = Annotated[Path | None, typer.Option(help="Where sessions are kept.", metavar="DIR")]
ModelsDir = Annotated[Path | None, typer.Option(help="Where models are installed.", metavar="DIR")]
Quota = Annotated[
    str | None, typer.Option(help="Bytes that all checkpoints may take, such as 8GiB or 500MB.", metavar="SIZE")
]
Remote = Annotated[
    str | None,
    typer.Option(
        help="Share conversations with other machines through this folder, or this PostgreSQL database "
        "(postgresql://user@host/db?packs=DIR|s3://BUCKET/PREFIX). A user with access to the folder, or to the "
        "database with its role, reads everything.",
        metavar="DIR|URL",
    ),
]
NoStore = Annotated[bool, typer.Option("--no-store", help="Keep nothing: no sessions, no checkpoints.")]
Offline = Annotated[bool, typer.Option("--offline", help="Fetch nothing, whatever is missing.")]
KeepSource = Annotated[
    bool, typer.Option("--keep-source", help="Keep the fetched source, for another runtime or another build.")
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Pull the model without asking, if it is not installed.")]
Json = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]
Buckets = Annotated[
    str | None,
    typer.Option(
        help="Prefill lengths in tokens, separated by commas; else 16,64,256, and 16,64 of Mamba-1.", metavar="N,N"
    ),
]
Context = Annotated[
    str | None,
    typer.Option(
        help="Tokens that a conversation can have, else the model's own, 32768 at most; 8192 of wgpu, 2048 of npu and "
        "coreml. Several: KV tiers.",
        metavar="N",
    ),
]
