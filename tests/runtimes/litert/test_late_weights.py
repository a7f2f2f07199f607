"""Weights that a .tflite gets after its graphs are made: the same bytes as if the converter had written them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from ai_edge_litert import schema_py_generated as schema
from torch import Tensor, nn

from ssmd.build.builder import BuildError, Quantization
from ssmd.families.offsets import divided
from ssmd.families.weights import Array, Parameters, given, mapped, tensor
from ssmd.machine.memory import resident
from ssmd.model.random_source import SeededSource
from ssmd_litert import late_weights
from ssmd_litert.lint import packed
from ssmd_litert.modelfile import edit, load, save
from ssmd_litert.recipe import quantize

SHAPES = {"table": (600, 512), "inner": (704, 512), "outer": (512, 704), "scale": (512,)}
LARGE = ("table", "inner", "outer")


class BlockOffsets(nn.Module):  # type: ignore[misc] # PyTorch is untyped here
    """A product of bytes in int4 too. The recipe knows it by this name."""

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return nn.functional.linear(x, weight)


class Small(nn.Module):  # type: ignore[misc] # PyTorch is untyped here
    """Weights as a model's: used by two signatures, tied, one of them the same all over, one small."""

    def __init__(self, parameters: Mapping[str, Array]) -> None:
        super().__init__()
        self.late = parameters if isinstance(parameters, Parameters) else None
        self.bytewise = BlockOffsets()
        for name, array in parameters.items():
            self.register_parameter(name, nn.Parameter(torch.from_numpy(array), requires_grad=False))

    def forward(self, tokens: Tensor) -> Tensor:
        h = nn.functional.embedding(tokens, self.table) * self.scale
        h = h + nn.functional.linear(nn.functional.linear(h, self.inner), self.outer)
        return self.bytewise(nn.functional.linear(h, self.flat), self.table)


def parameters() -> Parameters:
    """Make them, the matrices of products in 16 levels, which int4 finds again."""
    bindings = {name: tensor(name, *shape) for name, shape in SHAPES.items()}
    for name in ("inner", "outer"):
        bindings[name] = mapped(lambda rows: divided(rows)[0], bindings[name], by_rows=True)
    ones = given(lambda: np.ones((512, 512), np.float32))
    return Parameters({**bindings, "flat": ones}, SeededSource({}, 1))


def converted(module: nn.Module) -> Any:
    import litert_torch

    converter: Any = litert_torch
    for length in (1, 4):
        inputs = {"tokens": torch.zeros(1, length, dtype=torch.int32)}
        converter = converter.signature(f"of_{length}", module, sample_kwargs=inputs)
    with late_weights.unwritten():
        return converter.convert(lightweight_conversion=True)


def the_file_is_the_same(folder: Path) -> None:
    late = parameters()
    known = {name: late.whole(name) for name in late}
    converted(Small(known)).export(str(folder / "whole.f32"))
    module = Small(late)
    names = late_weights.export(converted(module), module, folder / "late.f32")
    assert (folder / "late.f32").stat().st_size < (folder / "whole.f32").stat().st_size / 3
    assert all(not late[name].flat[4:].any() for name in LARGE), "nothing was written to them"
    give_back = partial(late_weights.give_back, parameters=late, names=names)
    lacking = {place: name for place, name in names.items() if name != "inner"}
    with pytest.raises(BuildError, match="lost the weight inner"):
        edit(folder / "late.f32", partial(late_weights.give_back, parameters=late, names=lacking))
    model = load(folder / "late.f32")
    next(t for t in model.subgraphs[0].tensors if (0, t.name) in names).type = schema.TensorType.FLOAT16
    save(model, folder / "other.f32")
    with pytest.raises(BuildError, match="the quantizer has given"):
        edit(folder / "other.f32", partial(late_weights.give_back, parameters=late, names=names))
    quantizations: tuple[Quantization, ...] = ("int8", "int4", "f32")
    for quantization in quantizations:
        files = [folder / f"{way}.{quantization}" for way in ("whole", "late")]
        if quantization != "f32":
            quantize(folder / "whole.f32", files[0], quantization)
            quantize(folder / "late.f32", files[1], quantization)
        edit(files[0])
        edit(files[1], give_back)
        assert files[1].read_bytes() == files[0].read_bytes(), quantization


class Large(nn.Module):  # type: ignore[misc] # PyTorch is untyped here
    """Weights that together have more bytes in float32 than the converter's writer takes: 2 GiB."""

    def __init__(self, parameters: Parameters) -> None:
        super().__init__()
        self.late = parameters
        for name, array in parameters.items():
            self.register_parameter(name, nn.Parameter(torch.from_numpy(array), requires_grad=False))

    def forward(self, tokens: Tensor) -> Tensor:
        h = nn.functional.embedding(tokens, self.table)
        return nn.functional.linear(nn.functional.linear(h, self.inner), self.head)


def weights_above_2_gib_are_written(folder: Path) -> None:
    row = np.linspace(-1, 1, 512, dtype=np.float32)
    shapes = {"table": (600_000, 512), "inner": (512, 512), "head": (600_000, 512)}
    bindings = {name: given(partial(np.broadcast_to, row, shape)) for name, shape in shapes.items()}
    late = Parameters(bindings, SeededSource({}, 1))
    module = Large(late)
    names = late_weights.export(converted(module), module, folder / "large.f32")
    assert set(names.values()) == set(shapes)
    assert (folder / "large.f32").stat().st_size < 1 << 20


def test_what_the_converter_writes(tmp_path: Path) -> None:
    """In a process of its own: the converter raises Python's recursion limit and brings JAX, which forbids to fork."""
    calls = "; ".join(f"t.{case.__name__}(folder)" for case in (the_file_is_the_same, weights_above_2_gib_are_written))
    code = "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[1]); folder = Path(sys.argv[2])\n"
    code += f"import test_late_weights as t; {calls}"
    command = [sys.executable, "-c", code, str(Path(__file__).parent), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def noise(seed: int) -> Array:
    return np.random.default_rng(seed).standard_normal((2048, 2048), np.float32)


def test_large_parameters_take_no_memory() -> None:
    bindings = {f"layer{i}_up": given(partial(noise, i)) for i in range(8)}
    before = resident()
    made = Parameters(bindings, SeededSource({}, 1))
    after = resident()
    assert before is not None
    assert after is not None
    assert sum(array.nbytes for array in made.values()) == 8 * 4 * 2048 * 2048
    assert after - before < 3 * 4 * 2048 * 2048, "one at a time"
    assert len({array[0, :4].tobytes() for array in made.values()}) == 8, "each has numbers of its own"
    assert np.array_equal(made.whole("layer3_up"), noise(3))


def test_packed_weights_of_a_lint_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "model.tflite"
    file.write_bytes(bytes(1000))
    with packed(file) as cache:
        assert cache is not None
        cache.write_bytes(b"as XNNPACK does")
    assert [f.name for f in tmp_path.iterdir()] == [file.name]
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=1000))
    with packed(file) as cache:
        assert cache is None, "XNNPACK ends the process where the disk is full"
