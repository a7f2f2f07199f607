"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[
    str | None,
    typer.Argument(metavar="[MODEL]", help="Name of an installed model, or a path. May be left out if there is one."),
]
Runtime = Annotated[
    str | None, typer.Option(help="Use this runtime's artifact; auto picks the best that runs here.", metavar="NAME")
]
Device = Annotated[
    str | None,
    typer.Option(
        help="cpu, gpu or npu, of wgpu also vulkan, gl, metal or dx12; else what it was built for.", metavar="NAME"
    ),
]
Threads = Annotated[int | None, typer.Option(help="Compute threads.", metavar="N")]
DataDir = Annotated[Path | None, typer.Option(help="Where sessions are kept.", metavar="DIR")]
ModelsDir = Annotated[Path | None, typer.Option(help="Where models are installed.", metavar="DIR")]
Quota = Annotated[
    str | None, typer.Option(help="Bytes that all checkpoints may take, such as 8GiB or 500MB.", metavar="SIZE")
]
NoStore = Annotated[bool, typer.Option("--no-store", help="Keep nothing: no sessions, no checkpoints.")]
Offline = Annotated[bool, typer.Option("--offline", help="Fetch nothing, whatever is missing.")]
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
        help="Tokens that a conversation can have, else 2048, of OpenVINO and wgpu 8192; several: KV tiers.",
        metavar="N",
    ),
]
