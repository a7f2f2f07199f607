"""The contract suite, for every runtime named by SSMD_CONTRACT_RUNTIMES (default: all) and every tiny artifact."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
from conftest import BUILT, TinyArtifacts
from contract.driving import Case, Loaded
from evaluated import runtime_of
from refitting import stripped

from ssmd.model.artifact import Artifact
from ssmd.model.source import Source
from ssmd.refit.catalog import install
from ssmd_wgpu.device import devices

RUNTIMES = os.environ.get("SSMD_CONTRACT_RUNTIMES", "litert,openvino,npu,wgpu,coreml").split(",")
CASES = [Case(r, f, q) for r in RUNTIMES for f in ("llama", "granite") for q in ("f32", "int8")]
CASES = [c for c in CASES if c.name in BUILT] + ([Case("npu", "granite", "f16")] if "npu" in RUNTIMES else [])
_F32 = [made for made in BUILT.values() if made.quantization == "f32"]
CASES += [Case(r, "granite", "int8", refitted=True) for r in RUNTIMES if r in ("litert", "openvino")]
CASES += [replace(c, device="gl") for c in CASES if c.runtime == "wgpu"]
CASES += [Case("wgpu", "falcon-mamba", "f32")] if "wgpu" in RUNTIMES else []
CASES += [Case("coreml", f, "f16") for f in ("granite", "llama", "mamba")] if "coreml" in RUNTIMES else []
PARITY = [Case(made.runtime, made.variant, "f32") for made in _F32 if made.runtime in RUNTIMES]
PARITY += [replace(c, device="gl") for c in PARITY if c.runtime == "wgpu"]


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Weight caches of tests stay out of the user's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSMD_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", params=CASES, ids=str)
def loaded(
    request: pytest.FixtureRequest, artifacts: TinyArtifacts, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Loaded]:
    """One program of the case, shared by all tests: each leaves it as it found it."""
    case: Case = request.param
    artifact = Artifact.open(artifacts[case.name])
    if case.refitted:
        source = Source.open(artifacts.source(case.name))
        name, folder = artifact.manifest.name, tmp_path_factory.mktemp("refitted")
        artifact = install(stripped(artifact, source), source, folder / "artifact", name=name)
    yield from _load(case, artifact)


@pytest.fixture(scope="session", params=PARITY, ids=str)
def loaded_f32(request: pytest.FixtureRequest, artifacts: TinyArtifacts) -> Iterator[Loaded]:
    yield from _load(request.param, Artifact.open(artifacts[request.param.name]))


def _load(case: Case, artifact: Artifact) -> Iterator[Loaded]:
    if case.runtime == "wgpu" and case.device not in (there := {d.name for d in devices()}):
        pytest.skip(f"no adapter {case.device} here, only {sorted(there)}: apt install mesa-vulkan-drivers libvulkan1")
    load = partial(runtime_of(artifact.manifest.runtime).load, artifact, device=case.device)
    program = load()
    yield Loaded(case, artifact, program, load)
    program.close()
