"""The fault campaign (benchmarks/faults.py), a short part of it; files are in test_fuzz_session_file.py."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import background
import databases
import interrupted
import pytest
from beginnings import Beginnings
from conftest import TinyArtifacts
from kills import Episode
from mixed import Campaign

from ssmd.model.artifact import Artifact

KILLS = int(os.environ.get("SSMD_KILLS", "3"))
SECONDS = float(os.environ.get("SSMD_MIXED_SECONDS", "3"))
DATABASES = int(os.environ.get("SSMD_DATABASES", "9"))
COMMANDS = int(os.environ.get("SSMD_COMMANDS", "2"))
KILLED = ("session gc", "session export", "backup", "check --repair, torn")  # the rest are in the full set
MODELS = ("granite-f32", *(pytest.param(name, marks=pytest.mark.full) for name in ("mamba-f32", "llama-f32")))


@pytest.mark.parametrize("model", MODELS)
def test_kills_under_load(model: str, artifacts: TinyArtifacts, tmp_path: Path) -> None:
    """Each answer that a client got is stored once, and is the answer of a daemon that was never killed."""
    name = Artifact.open(artifacts[model]).manifest.name
    episode = Episode(artifacts[model], name, "a", KILLS, tmp_path)
    episode.run()
    assert not episode.failures
    assert episode.counts["turns compared"] > KILLS, "the kills left no client the time to finish anything"


def test_kills_of_responses_in_the_background(artifacts: TinyArtifacts, tmp_path: Path) -> None:
    """Each has one end after a kill: answered and stored once, or failed and not stored."""
    name = Artifact.open(artifacts["mamba-f32"]).manifest.name
    episode = background.Episode(artifacts["mamba-f32"], name, "a", KILLS - 1, tmp_path)
    episode.run()
    assert not episode.failures
    assert episode.counts["compared with the control"]


@pytest.mark.full
@pytest.mark.parametrize("quota", [(), ("--quota", "2MB")], ids=["", "small quota"])
@pytest.mark.parametrize("model", ["granite-f32", "mamba2-groups-f32", "llama-f32"])
def test_kills_among_beginnings(model: str, quota: tuple[str, ...], artifacts: TinyArtifacts, tmp_path: Path) -> None:
    """Sealed, marked, shared, shortened and warm: what clients were told is there, and no word of a sealed one."""
    name = Artifact.open(artifacts[model]).manifest.name
    episode = Beginnings(artifacts[model], name, "a", KILLS, tmp_path, quota)
    episode.run()
    assert not episode.failures
    assert episode.counts["turns compared"] > KILLS, "the kills left no client the time to finish anything"


@pytest.mark.parametrize("model", MODELS)
def test_damaged_databases(model: str, artifacts: TinyArtifacts, tmp_path: Path) -> None:
    """Each ends in a right answer, an honest refusal or a repair."""
    counts, failures = databases.run(artifacts[model], 0, DATABASES, "a", tmp_path)
    assert not failures
    assert all(counts[f"{kind}/injected"] for kind in ("pages", "rows", "log"))


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(one, id=one.name, marks=() if one.name in KILLED else pytest.mark.full)
        for one in interrupted.COMMANDS
    ],
)
def test_killed_commands(command: interrupted.Command, artifacts: TinyArtifacts, tmp_path: Path) -> None:
    """The store is sound and has all turns, files are whole or absent, and the same command succeeds afterwards."""
    first = interrupted.COMMANDS.index(command) * interrupted.KILLS
    counts, failures = interrupted.run(artifacts["llama-f32"], first, COMMANDS, "a", tmp_path)
    assert not failures
    assert counts[f"{command.name}/injected"] == COMMANDS


def test_several_models_under_load(artifacts: TinyArtifacts, tmp_path: Path) -> None:
    """Three models, of which two fit: what clients were told is there, and has the bits of an undisturbed daemon."""
    for artifact in ("granite-f32", "openvino-granite-f32", "llama-f32"):
        path = artifacts[artifact]
        shutil.copytree(path, tmp_path / "models" / path.parent.name / path.name, copy_function=os.link)
    campaign = Campaign(tmp_path / "models", SECONDS / 60, "a", tmp_path, "--threads", "1")
    campaign.run()
    assert not campaign.failures
    found = campaign.counts
    assert found["kills"]
    assert found["models let go"], "they all fitted"
    assert found["that came the same way, bitwise equal"] > found["that came another way"]
