"""The memory and disk of a build: estimated, and refused in words where the machine does not have them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from ssmd.build import builder
from ssmd.build.builder import BuildError, Needs, Target, check_needs, needs_of
from ssmd.families.weights import stacked, tensor
from ssmd_coreml.build import CONVERTER as COREML
from ssmd_litert.build import CONVERTER as LITERT
from ssmd_openvino.build import CONVERTER as OPENVINO

BINDINGS = {
    "embedding": tensor("embed", 100_000, 2048),
    **{f"layer{i}_up": stacked(tensor(f"up{i}", 4096, 2048), tensor(f"gate{i}", 4096, 2048)) for i in range(180)},
    "head": tensor("embed", 100_000, 2048),
}
VALUES = 100_000 * 2048 + 180 * 8192 * 2048  # a tensor that two parameters read counts once


def test_large_parameters_made_late_take_little_memory() -> None:
    int8 = Target("int8", (16,), (512,))
    for late in (needs_of(converter, BINDINGS, int8) for converter in (LITERT, OPENVINO)):
        assert late.memory < VALUES * 1.2 + 2e9
        assert VALUES < late.disk < 3 * VALUES
    assert needs_of(OPENVINO, BINDINGS, int8).memory > VALUES, "in int8"
    int4 = Target("int4", (16,), (512,))
    assert needs_of(OPENVINO, BINDINGS, int4).memory < needs_of(OPENVINO, BINDINGS, int8).memory
    assert needs_of(LITERT, BINDINGS, int4).memory < VALUES + 2e9
    experts = {**BINDINGS, "layer180_experts_up": tensor("experts", 4096, 2048)}
    assert needs_of(OPENVINO, experts, int4).memory > 4 * VALUES, "its experts have zero points"
    assert needs_of(COREML, BINDINGS, int8).memory > 4 * VALUES


def test_a_build_without_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builder, "available", lambda: 3_000_000_000)
    with pytest.raises(BuildError, match=r"about 12\.6 GB of memory, and 3\.0 GB are free: close other programs"):
        check_needs(Needs(12_600_000_000, 0), tmp_path)
    check_needs(Needs(3_000_000_000, 0), tmp_path)
    monkeypatch.setattr(builder, "available", lambda: None)
    check_needs(Needs(12_600_000_000, 0), tmp_path)


def test_a_build_without_room_on_the_disk_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=1_000_000_000))
    with pytest.raises(BuildError, match=r"about 2\.4 GB of the disk of .*, and 1\.0 GB are free: make room"):
        check_needs(Needs(0, 2_400_000_000), tmp_path / "not" / "yet")
    assert not (tmp_path / "not").exists()
    check_needs(Needs(0, 1_000_000_000), tmp_path)
