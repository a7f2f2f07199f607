"""A model's file cut to some of its signatures: what LiteRT sees of it, by its own schema, and what it computes."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ai_edge_litert import schema_py_generated as schema

from ssmd.model.artifact import Artifact
from ssmd.runtime.hoststate.graph import GraphError
from ssmd_litert.excerpt import Excerpt
from ssmd_litert.library import LibraryGraph

WANTED = [("decode",), ("decode_b8",), ("prefill_16", "decode_b4"), ("decode", "prefill_16", "prefill_64")]


@pytest.fixture
def file(artifacts: Mapping[str, Path]) -> Path:
    return Artifact.open(artifacts["llama-int8"]).file("model.tflite")


def seen(excerpt: Excerpt) -> dict[str, tuple[Any, ...]]:
    """Return the contents of each signature: operators, and the names and shapes of all tensors."""
    model = schema.ModelT.InitFromPackedBuf(excerpt._bytes.tobytes(), 0)
    assert len(model.subgraphs) == len(model.signatureDefs)
    found = {}
    for signature in model.signatureDefs:
        graph = model.subgraphs[signature.subgraphIndex]
        operators = [(o.opcodeIndex, *map(int, o.inputs), *map(int, o.outputs)) for o in graph.operators]
        tensors = [(t.name, t.buffer, *map(int, t.shape)) for t in graph.tensors]
        found[signature.signatureKey.decode()] = (operators, tensors, list(graph.inputs), list(graph.outputs))
    return found


@pytest.mark.parametrize("wanted", WANTED)
def test_of_the_signatures_those_that_are_wanted_are_seen(file: Path, wanted: tuple[str, ...]) -> None:
    before = file.read_bytes()
    whole, some = Excerpt(file, lambda name: True), Excerpt(file, wanted.__contains__)
    assert whole.names == some.names
    everything = seen(whole)
    assert list(everything) == list(whole.names)
    assert seen(some) == {name: everything[name] for name in wanted}
    some.drop()
    assert seen(some) == {name: everything[name] for name in wanted}
    assert file.read_bytes() == before
    some.close()
    some.close()


def test_a_file_whose_signatures_share_a_graph_is_left_whole(file: Path, tmp_path: Path) -> None:
    whole = Excerpt(file, lambda name: True)
    table = [whole._at(entry) for entry in whole._list(whole._number(0), 7)[1:]]
    changed, other = bytearray(file.read_bytes()), tmp_path / "other.tflite"
    changed[whole._field(table[2], 4)] = 1
    other.write_bytes(changed)
    assert len(Excerpt(other, lambda name: name == "decode")._list(whole._number(0), 7)) == 1 + len(whole.names)


@pytest.mark.parametrize("wanted", WANTED)
def test_signatures_may_stand_in_another_order_than_their_graphs(
    file: Path, tmp_path: Path, wanted: tuple[str, ...]
) -> None:
    """The first graph's signature stores no number, and can have no other."""
    whole = Excerpt(file, lambda name: True)
    entries = whole._list(whole._number(0), 7)[1:]
    changed, other = bytearray(file.read_bytes()), tmp_path / "other.tflite"
    for place, table in zip(entries, [whole._at(entry) for entry in reversed(entries)], strict=True):
        changed[place : place + 4] = (table - place).to_bytes(4, "little")
    other.write_bytes(changed)
    everything = seen(whole)
    some = Excerpt(other, wanted.__contains__)
    assert some.names == whole.names[::-1]
    assert seen(some) == {name: everything[name] for name in wanted}


@pytest.mark.parametrize("wanted", WANTED)
def test_what_is_cut_computes_the_same_bits(file: Path, wanted: tuple[str, ...]) -> None:
    whole = LibraryGraph(file, threads=1, weight_cache=None)
    some = LibraryGraph(file, threads=1, weight_cache=None, wanted=wanted.__contains__)
    assert set(some.signatures) == set(wanted)
    noise = np.random.default_rng(0)
    for name, signature in some.signatures.items():
        inputs = {
            n: noise.integers(1, 9, t.shape, t.dtype)
            if t.dtype == np.int32
            else noise.standard_normal(t.shape, np.float32)
            for n, t in signature.inputs.items()
        }
        expected = whole.run_managed(name, inputs)
        assert {n: a.tobytes() for n, a in some.run_managed(name, inputs).items()} == {
            n: a.tobytes() for n, a in expected.items()
        }
        assert any(np.ptp(a) for a in expected.values())


def test_damage_is_one_error(file: Path, tmp_path: Path) -> None:
    whole, damaged, refused = file.read_bytes(), tmp_path / "damaged.tflite", 0
    chance = random.Random(0)
    for turn in range(300):
        content = bytearray(whole[: 1 << 16])
        for _ in range(1 + turn % 5):
            content[chance.randrange(4096)] = chance.choice((0, 1, 127, 128, 255))
        damaged.write_bytes(content[: chance.randrange(len(content))] if turn % 3 == 0 else content)
        try:
            Excerpt(damaged, lambda name: name == "decode").close()
        except GraphError:
            refused += 1
    assert refused > 50
    for nothing in (b"", b"\xff" * 64):
        damaged.write_bytes(nothing)
        with pytest.raises(GraphError, match="cannot be read"):
            Excerpt(damaged, lambda name: True)
