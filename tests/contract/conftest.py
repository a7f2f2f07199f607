"""The contract suite for every runtime, or those named by SSMD_CONTRACT_RUNTIMES: with two or three tiny artifacts of
each, with all of them in `scripts/test --full`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from conftest import BUILT, FAMILIES, FOREIGN, KEPT, QUICK, TinyArtifacts
from contract.driving import Case, Loaded
from evaluated import runtime_of

from ssmd.model.artifact import Artifact
from ssmd.model.source import Source
from ssmd.refit.catalog import install
from ssmd.runtime import get_runtime
from ssmd_wgpu.device import devices


def usable_device(runtime: str) -> str:
    """Name the first device of a runtime from elsewhere that can be used here."""
    return next(device.name for device in get_runtime(runtime).devices() if not device.why_not)


RUNTIMES = os.environ.get("SSMD_CONTRACT_RUNTIMES", "litert,openvino,npu,wgpu,coreml").split(",")
# What no family and no quantization changes: of each runtime a program with KV rows and one without.
CASES = [
    *(Case(r, f, "f32") for r in ("litert", "openvino", "wgpu") for f in ("granite", "mamba")),
    *(Case(r, "granite", "int8") for r in ("litert", "openvino")),
    *(Case(r, "lfm3", "f32") for r in ("litert", "openvino")),
    Case("openvino", "lfm2-moe", "f32"),  # experts
    Case("npu", "granite", "f16"),
    Case(
        "coreml", "granite", "f16"
    ),  # tests/runtimes/coreml has others: each call is computed in numpy, by the evaluator
    *(Case(r, f, "f32", device=usable_device(r)) for r in FOREIGN for f in FAMILIES),
]
# For `scripts/test --full`: all others.
MORE = [
    Case(r, f, q)
    for r in ("litert", "openvino", "wgpu", "coreml")
    for f in ("llama", "granite")
    for q in ("f32", "int8")
]
MORE += [Case(r, "granite", "int8", refitted=True) for r in ("litert", "openvino")]
MORE += [Case("openvino", "lfm2-moe", "int8")]
MORE += [Case("coreml", "llama", "f16"), Case("coreml", "mamba", "f16")]
MORE += [Case("wgpu", f, "f32") for f in ("falcon-mamba", "qwen3.5", "lfm2-moe")]
MORE += [replace(c, device="gl") for c in CASES + MORE if c.runtime == "wgpu"]
GL = ("granite", "falcon-mamba", "lfm2-moe")  # which use all kernels but those of quantized weights
PARITY = [
    Case(m.runtime, m.variant, "f32", device=usable_device(m.runtime) if m.runtime in FOREIGN else "")
    for m in BUILT.values()
    if m.quantization == "f32"
]
PARITY += [replace(c, device="gl") for c in PARITY if c.runtime == "wgpu"]


def _params(cases: list[Case], full: Callable[[Case], bool]) -> list[Any]:
    asked = [c for c in dict.fromkeys(cases) if c.runtime in RUNTIMES]
    marks = {c: [pytest.mark.full] if full(c) and c.runtime not in FOREIGN else [] for c in asked}
    return [pytest.param(c, marks=marks[c], id=str(c)) for c in asked]


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Weight caches of tests stay out of the user's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSMD_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", params=_params(CASES + MORE, lambda c: c not in CASES))
def loaded(
    request: pytest.FixtureRequest, artifacts: TinyArtifacts, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Loaded]:
    """One program of the case, shared by all tests: each leaves it as it found it."""
    case: Case = request.param
    artifact = Artifact.open(artifacts[case.name])
    if case.refitted:
        from refitting import stripped  # LiteRT's converter, which the other cases do without

        source = Source.open(artifacts.source(case.name))
        name, folder = artifact.manifest.name, tmp_path_factory.mktemp("refitted")
        artifact = install(stripped(artifact, source), source, folder / "artifact", name=name)
    yield from _load(case, artifact)


@pytest.fixture(
    scope="session",
    params=_params(PARITY, lambda c: c.name not in (*KEPT, *QUICK) or (c.device == "gl" and c.family not in GL)),
)
def loaded_f32(request: pytest.FixtureRequest, artifacts: TinyArtifacts) -> Iterator[Loaded]:
    yield from _load(request.param, Artifact.open(artifacts[request.param.name]))


def _load(case: Case, artifact: Artifact) -> Iterator[Loaded]:
    if case.runtime == "wgpu" and case.device not in (there := {d.name for d in devices() if not d.why_not}):
        pytest.skip(f"no adapter {case.device} here, only {sorted(there)}: apt install mesa-vulkan-drivers libvulkan1")
    load = partial(runtime_of(artifact.manifest.runtime).load, artifact, device=case.device)
    program = load()
    yield Loaded(case, artifact, program, load)
    program.close()
