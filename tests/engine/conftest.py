"""An engine over each kind of model: pure SSM, hybrid, transformer. Files with such fixtures use their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import TinyArtifacts
from engine.test_engine import program_of
from engines import OwnEngine

from ssmd.model.artifact import Artifact
from ssmd.runtime.protocol import Program
from ssmd.sessions.store import Store


@pytest.fixture(scope="module", params=["mamba-f32", "granite-f32", "llama-f32"])
def loaded(request: pytest.FixtureRequest, artifacts: TinyArtifacts) -> Iterator[tuple[Artifact, Program]]:
    with program_of(artifacts, request.param, threads=None) as loaded:
        yield loaded


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store.open(tmp_path / "data")
    yield store
    store.close()


@pytest.fixture
def engine(loaded: tuple[Artifact, Program], store: Store) -> Iterator[OwnEngine]:
    engine = OwnEngine(*loaded, store)
    engine.start()
    yield engine
    engine.shutdown(0)
