"""Weights kept out of memory while the converter writes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ssmd.build.builder import BuildError
from ssmd.machine.memory import resident
from ssmd_litert.weights_on_disk import WeightsOnDisk


class Small(nn.Module):  # type: ignore[misc] # PyTorch is untyped here
    """Weights as a model's: used by two signatures, tied, one of them the same all over, one small."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.table = nn.Parameter(torch.randn(600, 512, generator=generator), requires_grad=False)
        self.inner = nn.Parameter(torch.randn(700, 512, generator=generator), requires_grad=False)
        self.outer = nn.Parameter(torch.randn(512, 700, generator=generator), requires_grad=False)
        self.flat = nn.Parameter(torch.ones(512, 512), requires_grad=False)
        self.scale = nn.Parameter(torch.randn(512, generator=generator), requires_grad=False)

    def forward(self, tokens: Tensor) -> Tensor:
        h = nn.functional.embedding(tokens, self.table) * self.scale
        h = h + nn.functional.linear(nn.functional.linear(h, self.inner), self.outer)
        return nn.functional.linear(nn.functional.linear(h, self.flat), self.table)


def converted(module: nn.Module) -> Any:
    import litert_torch

    converter: Any = litert_torch
    for length in (1, 4):
        inputs = {"tokens": torch.zeros(1, length, dtype=torch.int32)}
        converter = converter.signature(f"of_{length}", module, sample_kwargs=inputs)
    return converter.convert(lightweight_conversion=True)


def the_file_is_the_same(folder: Path) -> None:
    module, file = Small(), folder / "model.tflite"
    converted(Small()).export(str(folder / "whole.tflite"))
    weights_on_disk = WeightsOnDisk(module)
    model = converted(module)
    weights_on_disk.empty(folder / "weights")
    assert (folder / "weights").stat().st_size == 4 * 512 * (600 + 700 + 700)
    model.export(str(file))
    whole = (folder / "whole.tflite").read_bytes()
    assert file.read_bytes() != whole
    weights_on_disk.fill(file, folder / "weights")
    assert file.read_bytes() == whole


def a_weight_that_is_not_in_the_file(folder: Path) -> None:
    file = folder / "whole.tflite"
    whole = file.read_bytes()
    weights_on_disk = WeightsOnDisk(Small())
    weights_on_disk.empty(folder / "none")
    with pytest.raises(BuildError, match="table"):
        weights_on_disk.fill(file, folder / "none")
    assert file.read_bytes() == whole


def a_weight_that_is_stored_otherwise(folder: Path) -> None:
    module, file = Small(), folder / "model.tflite"
    weights_on_disk = WeightsOnDisk(module)
    model = converted(module)
    weights_on_disk.empty(folder / "other")
    module.inner[-1, -1] = 0
    model.export(str(file))
    with pytest.raises(BuildError, match="inner otherwise"):
        weights_on_disk.fill(file, folder / "other")


def test_what_the_converter_writes(tmp_path: Path) -> None:
    """In a process of its own: the converter raises Python's recursion limit and brings JAX, which forbids to fork."""
    cases = (the_file_is_the_same, a_weight_that_is_not_in_the_file, a_weight_that_is_stored_otherwise)
    calls = "; ".join(f"test_weights_on_disk.{case.__name__}(Path(sys.argv[2]))" for case in cases)
    code = (
        f"import sys; from pathlib import Path; sys.path.insert(0, sys.argv[1]); import test_weights_on_disk; {calls}"
    )
    command = [sys.executable, "-c", code, str(Path(__file__).parent), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def test_memory_is_given_back(tmp_path: Path) -> None:
    module = nn.Linear(4096, 4096, bias=False)
    weights_on_disk = WeightsOnDisk(module)
    before = resident()
    assert before is not None
    weights_on_disk.empty(tmp_path / "weights")
    after = resident()
    assert after is not None
    assert before - after > 0.9 * 4 * 4096 * 4096
