"""A daemon with three models, two of which are one for two runtimes, for tests that change what is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import TinyArtifacts
from several import Several, models_folder, several


@pytest.fixture
def models(artifacts: TinyArtifacts, tmp_path: Path) -> Path:
    return models_folder(artifacts, tmp_path / "models")


@pytest.fixture
def three(models: Path) -> Iterator[Several]:
    with several(models) as one:
        yield one
