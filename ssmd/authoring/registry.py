"""The re-authored modules there are, by family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ssmd.authoring.bamba import Bamba
from ssmd.authoring.falcon_h1 import FalconH1
from ssmd.authoring.flat import FlatModule
from ssmd.authoring.granitemoehybrid import GraniteMoeHybrid
from ssmd.authoring.lfm2 import Lfm2
from ssmd.authoring.llama import Llama
from ssmd.authoring.mamba import Mamba
from ssmd.authoring.mamba2 import Mamba2

MODULES: dict[str, Any] = {
    "llama": Llama,
    "granitemoehybrid": GraniteMoeHybrid,
    "qwen3": Llama,
    "mamba": Mamba,
    "falcon_mamba": Mamba,
    "lfm2": Lfm2,
    "mamba2": Mamba2,
    "bamba": Bamba,
    "falcon_h1": FalconH1,
}


def author(family: str, config: Any, parameters: Mapping[str, NDArray[np.float32]], context: int) -> FlatModule:
    """The module of `family` for its config and bound parameters; `context` is the capacity of its KV caches."""
    module: FlatModule = MODULES[family](config, parameters, context)
    return module.eval()
