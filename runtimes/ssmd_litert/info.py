"""Facts of this runtime (ssmd/runtime/info.py). Imports neither the runtime nor LiteRT."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ssmd.runtime.info import RuntimeInfo, Target

if TYPE_CHECKING:
    from ssmd.model.artifact import Artifact
    from ssmd.runtime.activations import Activations, Place


def _activations(artifact: Artifact, places: Mapping[str, Place]) -> Activations:
    from ssmd_litert.activations import activations

    return activations(artifact, places)


# On Windows for ARM there is no package of LiteRT.
INFO = RuntimeInfo(
    rank=0,
    targets=(Target("litert", serves=("attention windows",)),),
    activations=_activations,
    suggested=lambda platform, machine: (platform, machine) != ("win32", "arm64"),
)
