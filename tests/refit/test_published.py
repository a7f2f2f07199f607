"""Graphs of Qwen3.5 and checkpoints of it as they are published: a text model beside a vision tower."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import TinyArtifacts
from refitting import stripped
from safetensors.numpy import load_file, save_file

from ssmd.model.artifact import GOLDEN, Artifact
from ssmd.model.source import Source
from ssmd.refit.catalog import install
from ssmd.refit.graphfile import StrippedGraph
from ssmd.refit.refit import RefitError, differences, differences_text, refit

BUILT = "qwen3.5-int8"


@pytest.fixture(scope="module")
def flat(artifacts: TinyArtifacts) -> Source:
    return Source.open(artifacts.source(BUILT))


def published(flat: Source, folder: Path, *others: str) -> Source:
    """Its checkpoint with the names of a published one, and tensors of other parts."""
    shutil.copytree(flat.path, folder)
    tensors = load_file(flat.path / "model.safetensors")
    renamed = {name.replace("model.", "model.language_model."): t for name, t in tensors.items()}
    save_file({**renamed, **{name: np.ones((2, 2), np.float32) for name in others}}, folder / "model.safetensors")
    config = {"model_type": "qwen3_5", "text_config": dict(flat.config), "vision_config": {"depth": 2}}
    (folder / "config.json").write_text(json.dumps(config))
    return Source.open(folder)


def graph_of(artifacts: TinyArtifacts, source: Source) -> StrippedGraph:
    made = stripped(Artifact.open(artifacts[BUILT]), source)
    return StrippedGraph(made.header.model_copy(update={"family": "qwen3_5"}), made.literals)


def test_pull_leaves_out_and_names_vision_and_mtp(artifacts: TinyArtifacts, flat: Source, tmp_path: Path) -> None:
    source = published(flat, tmp_path / "source", "model.visual.b", "model.visual.blocks.0.w", "mtp.fc.weight")
    said: list[str] = []
    made = install(graph_of(artifacts, source), source, tmp_path / "made", name="x", progress=said.append)
    assert [line for line in said if line.startswith("left out")] == [
        "left out: the vision tower, 2 tensors named model.visual.*",
        "left out: the head that predicts further tokens (MTP), 1 tensor named mtp.*",
    ]
    built = Artifact.open(artifacts[BUILT])
    for file in built.manifest.files:
        if file != GOLDEN:
            assert made.file(file).read_bytes() == built.file(file).read_bytes()


def test_a_tensor_of_the_text_model_too_many(artifacts: TinyArtifacts, flat: Source, tmp_path: Path) -> None:
    source = published(flat, tmp_path / "source", "model.visual.b", "model.language_model.layers.9.x")
    with pytest.raises(RefitError, match=r"has the tensor 'model\.language_model\.layers\.9\.x', which"):
        refit(graph_of(artifacts, source), source, tmp_path / "made")


def test_what_differs_is_named_in_the_text_model(artifacts: TinyArtifacts, flat: Source, tmp_path: Path) -> None:
    source = published(flat, tmp_path / "source")
    header = graph_of(artifacts, source).header

    def said(outside: dict[str, Any], **inside: Any) -> str:
        text = {**flat.config, **inside}
        return differences_text(differences(header, {**source.config, **outside, "text_config": text}))

    assert said({"vision_config": {"depth": 3}}, initializer_range=0.5) == ""
    assert said({}, hidden_size=48, attention_dropout=0.5) == "hidden_size is 48, not 96"
    assert said({"tie_word_embeddings": False}) == "tie_word_embeddings is False, not True"
