"""Parity with transformers through a runtime, in float32: logits and states, by any split, with junk pads, greedily."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import FOREIGN
from contract.driving import Loaded, error, feed
from numpy.typing import NDArray
from safetensors.numpy import load_file

from ssmd.model.artifact import Artifact
from ssmd.model.state import State
from ssmd.runtime.verify import verify

# Largest error in standard deviations: what the order of float32 sums leaves over four layers, measured 1.4e-5.
TOLERANCE = 5e-5
# Of states, in units of the largest value of their tensor, as in docs/notes/parity.md: of an ssm state that may be 34
# standard deviations. Measured up to 2.5e-6.
STATE_TOLERANCE = 1e-5
# softplus is right to 6e-8 (ssmd/authoring/ops.py), of a dt of 0.005 that is 1e-5. This config has such: measured
# 1.7e-5 with OpenVINO on a processor with AVX-512, 8e-6 with LiteRT.
SMALL_DT = {"mamba-biases": 3e-5}


@cache
def official(family: str, vocabulary: int) -> Any:
    """transformers' model of an artifact's source."""
    return pytest.importorskip("tiny").official(family, vocabulary)


def reference(loaded: Loaded, ids: Sequence[int]) -> tuple[NDArray[np.float32], State]:
    """Logits (n, V) after every token, and the canonical state after the last, read out of transformers' cache."""
    return computed(loaded.case.family, loaded.program.vocabulary, tuple(ids))


@cache
def computed(family: str, vocabulary: int, ids: tuple[int, ...]) -> tuple[NDArray[np.float32], State]:
    """The same for every runtime."""
    oracle = pytest.importorskip("oracle")
    logits, cached = oracle.continued(official(family, vocabulary), ids)
    state = oracle.state(cached, len(ids))
    for array in (logits, *state.tensors.values()):
        array.flags.writeable = False
    return logits, state


def state_off(found: State, expected: State) -> float:
    assert (found.position, found.tensors.keys()) == (expected.position, expected.tensors.keys())
    off = 0.0
    for name, array in expected.tensors.items():
        assert found.tensors[name].shape == array.shape
        off = max(off, float(np.abs(found.tensors[name] - array).max() / np.abs(array).max()))
    return off


def state_tolerance(loaded: Loaded) -> float:
    return SMALL_DT.get(loaded.case.family, STATE_TOLERANCE)


@pytest.mark.parametrize(
    ("lengths", "pad"),
    [([64], 0), ([64, 64, 2], 99), ([50, 1, 13, 64, 2], 0), ([16, 7, 64, 3, 40], 99)],
    ids=lambda asked: "+".join(map(str, asked)) if isinstance(asked, list) else None,
)
def test_prompts(loaded_f32: Loaded, lengths: list[int], pad: int) -> None:
    program, ids = loaded_f32.program, loaded_f32.ids(sum(lengths), seed=11)
    logits, state = reference(loaded_f32, ids)
    handle = program.new_state()
    try:
        program.pad_token = pad
        actual = feed(program, handle, ids, lengths)
    finally:
        program.pad_token = 0
    assert error(actual, logits[-1]) <= TOLERANCE
    assert state_off(program.save(handle), state) <= state_tolerance(loaded_f32)
    program.release(handle)


def test_a_state_out_of_transformers_goes_on(loaded_f32: Loaded) -> None:
    program, ids = loaded_f32.program, loaded_f32.ids(70, seed=13)
    _, state = reference(loaded_f32, ids[:41])
    logits, expected = reference(loaded_f32, ids)
    handle = program.restore(state)
    assert error(feed(program, handle, ids[41:], [1, 16, 12]), logits[-1]) <= TOLERANCE
    assert state_off(program.save(handle), expected) <= state_tolerance(loaded_f32)
    program.release(handle)


def test_64_greedy_tokens(loaded_f32: Loaded) -> None:
    program, ids = loaded_f32.program, loaded_f32.ids(70, seed=12)
    handle = program.new_state()
    rows = [feed(program, handle, ids, [64, 6])]
    while len(rows) < 65:
        ids.append(int(rows[-1].argmax()))
        rows.append(program.decode([handle], ids[-1:])[0])
    logits, state = reference(loaded_f32, ids)
    assert error(np.stack(rows), logits[69:]) <= TOLERANCE
    assert (np.stack(rows).argmax(-1) == logits[69:].argmax(-1)).all()
    assert state_off(program.save(handle), state) <= state_tolerance(loaded_f32)
    program.release(handle)


def test_int8_stays_near_float32(loaded: Loaded, artifacts: Mapping[str, Path]) -> None:
    """Both against the same golden values. Largest relative rms error of a step, measured: float32 8e-7, float16
    5e-4 (Core ML, where states and products are float16: 2.5e-3), int8 0.030 (llama) and 0.016 (granite)."""
    case, built = loaded.case, Artifact.open(artifacts[loaded.case.name])  # a refitted one has golden values of its own
    report = verify(built, loaded.program)
    f16 = 5e-3 if case.runtime == "coreml" else 2e-3
    assert report.worst.rms_relative <= {"f32": 1e-5, "f16": f16, "int8": 0.06}[case.quantization]
    if case.runtime in FOREIGN:  # whose golden values may be its own
        return
    plain = f"{case.family}-f32"  # LiteRT's; of what it does not serve, such as experts, OpenVINO's
    other = Artifact.open(artifacts[plain if plain in artifacts else f"openvino-{plain}"])
    if case.runtime == "wgpu":  # whose reference is another one, in numpy and float64
        ours, pytorchs = (load_file(a.file("golden.safetensors"))["logits"] for a in (built, other))
        assert error(ours, pytorchs) <= TOLERANCE
        return
    golden = [a.file("golden.safetensors").read_bytes() for a in (built, other)]
    assert golden[0] == golden[1]
