"""Facts of this runtime (ssmd/runtime/info.py). Imports neither the runtime nor OpenVINO."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ssmd.runtime.info import BuildOption, RuntimeInfo, Target

if TYPE_CHECKING:
    from ssmd.model.artifact import Artifact
    from ssmd.runtime.activations import Activations, Place
    from ssmd_openvino.build import OpenVINOConverter


def _rewriting(target: str, passes: str) -> OpenVINOConverter:
    from ssmd_openvino.build import rewriting

    return rewriting(target, passes)


def _first_load(device_class: str, files: Mapping[str, int]) -> str:
    """Return what the first load on an NPU costs for these files, bytes by name; "" for other devices."""
    from ssmd.machine.size import show_size

    if device_class != "npu":
        return ""
    models = sum(name.endswith(".xml") for name in files)
    return (
        f"for the NPU: {models} models over {show_size(max(files.values()))} of weights; the first load there compiles "
        "each, which can take minutes, and keeps some megabytes of each, or with an older driver all weights in each"
    )


def _activations(artifact: Artifact, places: Mapping[str, Place]) -> Activations:
    from ssmd_openvino.activations import activations

    return activations(artifact, places)


INFO = RuntimeInfo(
    rank=1,
    targets=(
        Target("openvino", serves=("experts", "attention windows"), int4_memory=1.5),
        Target("npu", "npu", "NPU_CONVERTER", serves=("attention windows",)),
    ),
    tries=("gpu", "npu"),
    build_options={"xamba": BuildOption("cumba, reduba, actiba=SEGMENTS", _rewriting)},
    activations=_activations,
    first_load=_first_load,
)
