"""Hadamard rotation of a model's weights: the same function, and activations without outliers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch

from ssmd.authoring.host import Host
from ssmd.authoring.model import author
from ssmd.families.registry import family_of
from ssmd.families.rotation import block_of, hadamard, rotated, turned
from ssmd.model.source import Source

TOLERANCE = 2e-5  # of the largest logit: float32, as against transformers


@pytest.mark.parametrize("channels", [64, 96, 48, 130, 7, 576])
def test_a_turn_is_the_product(channels: int) -> None:
    array = np.random.default_rng(0).standard_normal((5, channels), np.float32)
    scale = np.linspace(0.5, 2, channels, dtype=np.float32)
    size = block_of(channels)
    assert (channels % size, size <= 64) == (0, True)
    signs = [[(-1) ** (i & j).bit_count() for j in range(size)] for i in range(size)]  # Sylvester's
    block = np.array(signs) / np.sqrt(size)
    whole = np.kron(np.eye(channels // size), block)
    np.testing.assert_allclose(turned(array, scale), array @ np.diag(scale) @ whole, atol=1e-5)
    np.testing.assert_allclose(turned(array[0]), array[0] @ whole, atol=1e-5)
    np.testing.assert_allclose(hadamard(size), block, atol=1e-7)
    np.testing.assert_allclose(turned(turned(array)), array, atol=1e-6)


def test_long_matrices_are_turned_in_parts() -> None:
    array = np.random.default_rng(0).standard_normal((4096 + 3, 16), np.float32)
    np.testing.assert_array_equal(turned(array)[4096:], turned(array[4096:]))


def modules(variant: str, folder: Path) -> tuple[Any, Any, Any]:
    """(config, the module as its family has it, the rotated one)."""
    source = Source.open(tiny.write_source(folder / variant, variant))
    family = family_of(source.config)
    config = family.parse(source.config)
    bindings = family.bindings(config)
    plain, turn = (
        author(family, config, {name: binding(source) for name, binding in made.items()}, 128)
        for made in (bindings, rotated(bindings))
    )
    return config, plain, turn


@pytest.mark.parametrize("variant", tiny.VARIANTS)
def test_it_computes_the_same(variant: str, tmp_path: Path) -> None:
    config, plain, turn = modules(variant, tmp_path)
    tokens = np.random.default_rng(1).integers(0, config.vocabulary, 40).tolist()
    one, other = Host(plain), Host(turn)
    for part, bucket in ((tokens[:32], 64), (tokens[32:33], 1), (tokens[33:], 16)):
        expected, found = one.feed(part, bucket), other.feed(part, bucket)
        assert np.abs(found - expected).max() <= TOLERANCE * np.abs(expected).max()
    before, after = one.state(), other.state()  # inner states are not rotated: sessions move between both forms
    for name, tensor in before.tensors.items():
        assert np.abs(after.tensors[name] - tensor).max() <= TOLERANCE * np.abs(tensor).max(), name


def test_every_matrix_is_turned(tmp_path: Path) -> None:
    """A parameter that a new family names otherwise would stay as it is, and be wrong."""
    for variant in tiny.VARIANTS:
        _, plain, turn = modules(variant, tmp_path / variant)
        same = {
            name.partition("_")[2] or name
            for name, value in turn.named_parameters()
            if (value.dim() == 2 or "_experts_" in name)
            and name in dict(plain.named_parameters())
            and torch.equal(value, getattr(plain, name))
        }
        assert same <= {"x", "dt", "A"}, variant  # of Mamba-1, which read neither the residual stream nor a norm


@pytest.mark.parametrize("dropped", ["spread_down", "spread_norm", "layer0_o", "layer1_gate_up", "embedding"])
def test_a_part_that_is_left_out_is_seen(dropped: str, tmp_path: Path) -> None:
    config, plain, turn = modules("llama", tmp_path)
    if dropped.startswith("spread"):
        delattr(turn, dropped)
    else:
        getattr(turn, dropped).data = getattr(plain, dropped).data
    tokens = np.random.default_rng(1).integers(0, config.vocabulary, 20).tolist()
    expected, found = (Host(m).feed(tokens, 64) for m in (plain, turn))
    assert np.abs(found - expected).max() > 100 * TOLERANCE * np.abs(expected).max()


def test_outliers_are_spread(tmp_path: Path) -> None:
    """The ratio of a token's largest value to its size decides how much its int8 loses."""
    _, plain, _ = modules("llama", tmp_path)
    wild = plain.embedding.data.clone()  # one channel of the residual stream is a hundred times the others
    wild[:, 5] *= 100
    quiet = torch.from_numpy(turned(wild.numpy()))
    crest = [float((x.abs().amax(-1) / x.pow(2).mean(-1).sqrt()).median()) for x in (wild, quiet)]
    assert crest[0] > 9
    assert crest[1] < 3
