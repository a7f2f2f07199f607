"""A module's graphs for the NPU in float32 on OpenVINO's CPU plugin, which stand in the module's place in a Host."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ssmd.authoring.flat import FlatModule
from ssmd_openvino import library
from ssmd_openvino.compile import compile_model
from ssmd_openvino.convert import converted
from ssmd_openvino.graph import LOGITS, OUTPUT

EXACT = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1}


class StaticGraphs:
    """Graphs of fixed lengths, as `ssmd build --runtime npu` converts them; their weights stay float32.

    models: an openvino.Model for each length.
    """

    every = False

    def __init__(self, module: FlatModule, lengths: tuple[int, ...]) -> None:
        self.spec, self.context = module.spec, module.context
        self.models: Mapping[int, Any] = {length: converted(module, module.context, length) for length in lengths}
        core = library.openvino().Core()
        self._compiled = {n: compile_model(core, m.clone(), "CPU", EXACT) for n, m in self.models.items()}

    def __call__(self, tokens: Tensor, pos: Tensor, n_valid: Tensor, **states: Tensor) -> dict[str, Tensor]:
        compiled = self._compiled[tokens.shape[1]]
        given = {"tokens": tokens, "pos": pos, "n_valid": n_valid, **states}
        named = {port: next(name for name in given if name in port.names) for port in compiled.inputs}
        out = compiled({port: given[name].numpy() for port, name in named.items()})
        return {_name(port): torch.tensor(out[port]) for port in compiled.outputs}


def _name(port: Any) -> str:
    """Return the name of an output as the module gives it; the plugin adds names of its own."""
    name: str = next(n for n in port.names if n == LOGITS or n.startswith(OUTPUT))
    return name.removeprefix(OUTPUT)
