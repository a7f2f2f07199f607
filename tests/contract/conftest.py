"""The contract suite, for every runtime named by SSMD_CONTRACT_RUNTIMES (default: litert) and every tiny artifact."""

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

RUNTIMES = os.environ.get("SSMD_CONTRACT_RUNTIMES", "litert").split(",")
CASES = [Case(r, f, q) for r in RUNTIMES for f in ("llama", "granite") for q in ("f32", "int8")]
PARITY = [Case(r, name.removesuffix("-f32"), "f32") for r in RUNTIMES for name in BUILT if name.endswith("-f32")]


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
    artifact = Artifact.open(artifacts[f"{case.family}-{case.quantization}"])
    load = partial(get_runtime(case.runtime).load, artifact)
    program = load()
    yield Loaded(case, artifact, program, load)
    program.close()
