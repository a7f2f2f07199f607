"""The contract suite, for every runtime named by SSMD_CONTRACT_RUNTIMES (default: all) and every tiny artifact."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import pytest
from conftest import BUILT
from contract.driving import Case, Loaded

from ssmd.artifact import Artifact
from ssmd.runtime import get_runtime

RUNTIMES = os.environ.get("SSMD_CONTRACT_RUNTIMES", "litert,openvino,npu").split(",")
CASES = [Case(r, f, q) for r in RUNTIMES for f in ("llama", "granite") for q in ("f32", "int8")]
CASES = [c for c in CASES if c.name in BUILT] + ([Case("npu", "granite", "f16")] if "npu" in RUNTIMES else [])
_F32 = [made for made in BUILT.values() if made.quantization == "f32"]
PARITY = [Case(made.runtime, made.variant, "f32") for made in _F32 if made.runtime in RUNTIMES]


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Weight caches of tests stay out of the user's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSMD_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", params=CASES, ids=str)
def loaded(request: pytest.FixtureRequest, artifacts: Mapping[str, Path]) -> Iterator[Loaded]:
    """One program of the case, shared by all tests: each leaves it as it found it."""
    case: Case = request.param
    yield from _load(case, artifacts)


@pytest.fixture(scope="session", params=PARITY, ids=str)
def loaded_f32(request: pytest.FixtureRequest, artifacts: Mapping[str, Path]) -> Iterator[Loaded]:
    yield from _load(request.param, artifacts)


def _load(case: Case, artifacts: Mapping[str, Path]) -> Iterator[Loaded]:
    artifact = Artifact.open(artifacts[case.name])
    # The CPU runs what was built for the NPU, too, which cannot execute here.
    load = partial(get_runtime(artifact.manifest.runtime).load, artifact, device="cpu")
    program = load()
    yield Loaded(case, artifact, program, load)
    program.close()
