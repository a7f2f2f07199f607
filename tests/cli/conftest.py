"""A home folder that several tests of commands share."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from conftest import TinyArtifacts


@pytest.fixture(scope="module")
def home(artifacts: TinyArtifacts, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data directory with one good model and one broken one."""
    path = tmp_path_factory.mktemp("home")
    models = path / "data" / "models"
    (models / "tiny").mkdir(parents=True)
    (models / "tiny" / "litert-cpu-f32").symlink_to(artifacts["llama-f32"])
    shutil.copytree(artifacts["llama-f32"], models / "broken" / "litert-cpu-f32")
    (models / "broken" / "litert-cpu-f32" / "model.tflite").write_bytes(b"cut")
    return path
