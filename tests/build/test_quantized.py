"""int8 artifacts against PyTorch, whose weights and activations are rounded as XNNPACK rounds them."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
import torch.nn.functional as F
from conftest import TinyArtifacts
from quantization import Rounding

from ssmd.authoring.host import Host
from ssmd.authoring.model import author
from ssmd.families.registry import family_of
from ssmd.families.rotation import rotated
from ssmd.model.artifact import Artifact
from ssmd.model.source import Source
from ssmd_litert.runtime import LiteRTRuntime

EVERY = frozenset({"q", "k", "v", "o", "gate_up", "down", "in", "out", "embedding", "head"})


@pytest.mark.parametrize("name", ["llama-int8", "granite-int8"])
def test_it_computes_what_its_recipe_says(name: str, artifacts: TinyArtifacts) -> None:
    artifact = Artifact.open(artifacts[name])
    source = Source.open(artifacts.source(name))
    family = family_of(source.config)
    config = family.parse(source.config)
    module = author(family, config, {n: b(source) for n, b in rotated(family.bindings(config)).items()}, 128)
    tokens = np.random.default_rng(5).integers(0, config.vocabulary, 40).tolist()
    program = LiteRTRuntime().load(artifact, threads=1)
    lost, other = [], []
    for token in tokens:  # alone: what differs in the 7th digit may round to another of 256 values at the next token
        rounding = Rounding(module, EVERY, EVERY)
        exact = Host(module, 1).feed([token], 1)
        with mock.patch.object(F, "linear", rounding.linear), mock.patch.object(F, "embedding", rounding.embedding):
            expected = Host(module, 1).feed([token], 1)
        handle = program.new_state()
        found = program.decode([handle], [token])[0]
        program.release(handle)
        lost.append(np.sqrt(np.mean((expected - exact) ** 2)))
        other.append(np.sqrt(np.mean((found - expected) ** 2)))
    program.close()
    assert np.median(lost) > 0.005 * np.std(exact), "rounding costs something"
    assert np.median(other) < 1e-3 * np.median(lost)
