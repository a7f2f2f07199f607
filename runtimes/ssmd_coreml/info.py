"""Facts of this runtime (ssmd/runtime/info.py). Imports neither the runtime nor Core ML."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ssmd.runtime.info import BuildOption, RuntimeInfo, Target

if TYPE_CHECKING:
    from ssmd_coreml.build import CoreMLConverter


def _varied(target: str, variant: str) -> CoreMLConverter:
    from ssmd_coreml.build import varied

    return varied(variant)


INFO = RuntimeInfo(
    targets=(Target("coreml", "gpu"),),
    builds_anywhere=True,
    tries=("ane",),
    build_options={
        "variant": BuildOption(
            "stateful, stateless",
            _varied,
            lambda variant: "-stateless" if variant == "stateless" else "",
        )
    },
)
