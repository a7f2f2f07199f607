"""Fixtures of the LiteRT tests: a cache of their own, and an artifact with states of every kind."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from ssmd.model.artifact import Artifact


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / ("cäche 日" if sys.platform == "win32" else 'cäche "q" 日')  # LiteRT has to take any name
    monkeypatch.setenv("SSMD_CACHE_DIR", str(folder))
    return folder / "litert"


@pytest.fixture
def granite(artifacts: Mapping[str, Path]) -> Artifact:
    return Artifact.open(artifacts["granite-f32"])
