"""Core ML as called on a Mac: through coremltools' own signatures, with the evaluator in its place.

None of this shows that Core ML works so: it shows that what is called exists in coremltools 9.0, with these parameters.
"""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import TinyArtifacts
from mil.model import Model, open_package

from ssmd.model.artifact import Artifact
from ssmd.runtime.execution import execute
from ssmd.runtime.protocol import ProgramError
from ssmd.runtime.verify import verify
from ssmd_coreml import backend, doctor, library
from ssmd_coreml.backend import COMPUTE_UNITS, compiled_path
from ssmd_coreml.runtime import DEVICES, CoreMLRuntime


def as_declared(real: Callable[..., Any], played: Callable[..., Any]) -> Callable[..., Any]:
    """`played`, which refuses a call that `real` would not take."""

    def called(*args: Any, **kwargs: Any) -> Any:
        inspect.signature(real).bind(*args, **kwargs)
        return played(*args, **kwargs)

    return called


class Mac:
    """coremltools as it is on a Mac: a compiled model is a copy of the package."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real = library.coremltools()
        self.compiled: list[Path] = []
        self.loaded: list[tuple[str, str]] = []
        self.system = "macOS 24A335"
        self.fail = ""
        models = SimpleNamespace(
            CompiledMLModel=as_declared(real.models.CompiledMLModel, self._load),
            utils=SimpleNamespace(compile_model=as_declared(real.models.utils.compile_model, self._compile)),
        )
        played = SimpleNamespace(models=models, ComputeUnit=real.ComputeUnit, utils=real.utils)
        monkeypatch.setattr(library, "coremltools", lambda: played)
        monkeypatch.setattr(library, "macos", lambda: (15, 1))
        monkeypatch.setattr(backend, "_system", lambda: self.system)

    def _compile(self, model: str, destination_path: str) -> str:
        shutil.copytree(model, destination_path)
        if self.fail:
            raise RuntimeError(self.fail)
        self.compiled.append(Path(destination_path))
        return destination_path

    def _load(self, path: str, compute_units: Any, function_name: str) -> Model:
        assert path.endswith(".mlmodelc")
        self.loaded.append((compute_units.name, function_name))
        return Model(open_package(Path(path)), function_name)


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Mac:
    monkeypatch.setenv("SSMD_CACHE_DIR", str(tmp_path / "cache"))
    return Mac(monkeypatch)


@pytest.fixture
def granite(artifacts: TinyArtifacts) -> Artifact:
    return Artifact.open(artifacts["coreml-granite-f16"])


def test_units_are_coremltools_own() -> None:
    unit = library.coremltools().ComputeUnit
    assert {unit[name].name for name in COMPUTE_UNITS.values()} == {"CPU_AND_GPU", "CPU_ONLY", "CPU_AND_NE"}


@pytest.mark.parametrize("device", ["gpu", "cpu", "ane"])
def test_it_is_compiled_once_for_a_system(mac: Mac, granite: Artifact, device: Any) -> None:
    runtime = CoreMLRuntime(probe=False)
    assert not any(d.why_not for d in runtime.devices())
    program = runtime.load(granite, device=device)
    assert verify(granite, program).passed
    assert program.producer == f"coreml coremltools 9.0; macOS 24A335; {COMPUTE_UNITS[device]}"
    assert sorted(mac.loaded) == [(COMPUTE_UNITS[device], f) for f in ("decode", "prefill_16", "prefill_64")]
    CoreMLRuntime(probe=False).load(granite, device="cpu")
    assert len(mac.compiled) == 1
    kept = compiled_path(granite.manifest.build)
    assert [p.name for p in kept.parent.iterdir()] == ["model.mlmodelc"]
    mac.system = "macOS 24B83"  # after an update: compiled anew, and what was for the old one goes
    CoreMLRuntime(probe=False).load(granite)
    assert len(mac.compiled) == 2
    assert not kept.exists()
    assert compiled_path(granite.manifest.build).is_dir()


def test_a_compilation_that_fails_leaves_nothing(mac: Mac, granite: Artifact) -> None:
    mac.fail = "Error compiling model: Failed to parse the model specification."
    with pytest.raises(ProgramError, match=r"Core ML cannot compile it: Error compiling model.*build it again"):
        CoreMLRuntime(probe=False).load(granite)
    assert not any(compiled_path(granite.manifest.build).parent.iterdir())
    mac.fail = ""
    CoreMLRuntime(probe=False).load(granite)


def test_a_model_that_does_not_load(mac: Mac, granite: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Mac, path: str, compute_units: Any, function_name: str) -> Model:
        raise Exception("Unable to load model")  # as plain as coremltools' own

    monkeypatch.setattr(Mac, "_load", refuse)
    again = Mac(monkeypatch)
    with pytest.raises(ProgramError, match="Core ML cannot load it: Unable to load model"):
        CoreMLRuntime(probe=False).load(granite)
    assert len(again.compiled) == 1


def test_placement_by_the_compute_plan(mac: Mac, granite: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted by the class of the device that an operation prefers; what has none is left out."""
    from coremltools.models import compute_plan

    class MLGPUComputeDevice:
        pass

    operations = ["linear", "const", "mul"]
    structure = SimpleNamespace(
        program=SimpleNamespace(functions={"decode": SimpleNamespace(block=SimpleNamespace(operations=operations))})
    )

    class Plan:
        model_structure = structure

        @staticmethod
        def get_compute_device_usage_for_mlprogram_operation(operation: str) -> Any:
            return None if operation == "const" else SimpleNamespace(preferred_compute_device=MLGPUComputeDevice())

    real = compute_plan.MLComputePlan
    assert hasattr(real, "get_compute_device_usage_for_mlprogram_operation")
    assert isinstance(real.model_structure, property)
    asked: list[tuple[str, str]] = []

    def load(path: str, compute_units: Any) -> Plan:
        asked.append((path, compute_units.name))
        return Plan()

    played = SimpleNamespace(load_from_path=as_declared(real.load_from_path, load))
    monkeypatch.setattr(compute_plan, "MLComputePlan", played)
    assert doctor.placement(granite, "ane") == {"decode": {"MLGPUComputeDevice": 2}}
    assert asked == [(str(compiled_path(granite.manifest.build)), "CPU_AND_NE")]


# test_it_is_compiled_once_for_a_system tells the units apart
@pytest.mark.parametrize("unit", [pytest.param(u, marks=[] if u == "ane" else [pytest.mark.full]) for u in DEVICES])
def test_the_doctor_on_every_unit(mac: Mac, granite: Artifact, unit: Any) -> None:
    measured = execute(granite, unit, CoreMLRuntime(probe=False))
    assert measured["passed"]
    assert measured["decode_ms"] > 0
    assert np.isfinite(measured["worst_rms"])
