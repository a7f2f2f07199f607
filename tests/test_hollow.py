"""Weights kept out of memory while the converter writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ssmd.memory import resident
from ssmd_litert.hollow import Hollow, HollowError

pytestmark = [  # the converter's own
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


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


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    file = tmp_path_factory.mktemp("whole") / "model.tflite"
    converted(Small()).export(str(file))
    return file.read_bytes()


def test_the_file_is_the_same(whole: bytes, tmp_path: Path) -> None:
    module, file = Small(), tmp_path / "model.tflite"
    hollow = Hollow(module)
    model = converted(module)
    hollow.empty(tmp_path / "weights")
    assert (tmp_path / "weights").stat().st_size == 4 * 512 * (600 + 700 + 700)
    model.export(str(file))
    assert file.read_bytes() != whole
    hollow.fill(file, tmp_path / "weights")
    assert file.read_bytes() == whole


def test_memory_is_given_back(tmp_path: Path) -> None:
    module = nn.Linear(4096, 4096, bias=False)
    hollow = Hollow(module)
    before = resident()
    assert before is not None
    hollow.empty(tmp_path / "weights")
    after = resident()
    assert after is not None
    assert before - after > 0.9 * 4 * 4096 * 4096


def test_a_weight_that_is_not_in_the_file(whole: bytes, tmp_path: Path) -> None:
    file = tmp_path / "model.tflite"
    file.write_bytes(whole)
    hollow = Hollow(Small())
    hollow.empty(tmp_path / "weights")
    with pytest.raises(HollowError, match="table"):
        hollow.fill(file, tmp_path / "weights")
    assert file.read_bytes() == whole


def test_a_weight_that_is_stored_otherwise(tmp_path: Path) -> None:
    module, file = Small(), tmp_path / "model.tflite"
    hollow = Hollow(module)
    model = converted(module)
    hollow.empty(tmp_path / "weights")
    module.inner[-1, -1] = 0
    model.export(str(file))
    with pytest.raises(HollowError, match="inner otherwise"):
        hollow.fill(file, tmp_path / "weights")
