"""Driving a program in the contract suite: cases, feeding and comparing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ssmd.model.artifact import Artifact
from ssmd.model.state import State
from ssmd.runtime.protocol import Handle, Logits, Program

CPUINFO = Path("/proc/cpuinfo")
AVX512 = not CPUINFO.exists() or "avx512" in CPUINFO.read_text()  # elsewhere nothing is known


@dataclass(frozen=True)
class Case:
    """One runtime with one artifact. `tolerance` is the largest error of logits and states between two ways of
    computing the same thing, in standard deviations of the tensor."""

    runtime: str
    family: str
    quantization: str
    refitted: bool = False  # from its stripped graph
    device: str = ""  # else that of the runtime

    def __post_init__(self) -> None:
        # The CPU runs what was built for the NPU, too, which cannot execute here.
        object.__setattr__(self, "device", self.device or ("vulkan" if self.runtime == "wgpu" else "cpu"))

    @property
    def tolerance(self) -> float:
        # float32: orders of sums differ, measured up to 1.7e-5. int8: such a difference may tip the rounding of an
        # activation over, measured up to 0.10 for a single value of these tiny models.
        # f16 computes in float32 and saves rows as float16, of which a difference may tip the rounding over as well.
        # Core ML's programs but those of f32 round what goes into and comes out of products with weights to float16,
        # and every state at every step; int8 weights are no more than that, for no activation is quantized.
        if self.half:
            return 1e-2
        return {"f32": 5e-5, "f16": 2e-3, "int8": 0.2}[self.quantization]

    @property
    def half(self) -> bool:
        """Report if its states are float16."""
        return self.runtime == "coreml" and self.quantization != "f32"

    def state_error(self, actual: State, expected: State) -> float:
        """The largest difference of a value, in standard deviations of its tensor. Where states are float16 a value's
        own size counts too: of one of 34 standard deviations the last digit alone is 0.02."""
        assert actual.position == expected.position
        worst = 0.0
        for name, array in expected.tensors.items():
            wanted = array.astype(np.float64)
            scale = wanted.std() + (np.abs(wanted) if self.half else 0.0)
            worst = max(worst, float((np.abs(actual.tensors[name] - wanted) / scale).max()))
        return worst

    def check_states(self, actual: State, expected: State) -> None:
        """Compare two states. XNNPACK's float32 kernels for processors without AVX-512 leave single values of the
        hybrid's up to 1.4e-3 off (a Zen 1; the logits are within the tolerance): not explained, a failure that is
        expected there.
        """
        off = self.state_error(actual, expected)
        known = (self.runtime, self.family, self.quantization) == ("litert", "granite", "f32") and not AVX512
        if known and self.tolerance < off < 2e-3:
            pytest.xfail(f"on a processor without AVX-512 states are {off:.1e} standard deviations off")
        assert off <= self.tolerance

    @property
    def name(self) -> str:
        """Of its tiny artifact."""
        name = f"{self.family}-{self.quantization}"
        return name if self.runtime == "litert" else f"{self.runtime}-{name}"

    def __str__(self) -> str:
        where = f"-{self.device}" if self.runtime == "wgpu" else ""
        return f"{self.runtime}{where}-{self.family}-{self.quantization}{'-refitted' if self.refitted else ''}"


@dataclass(frozen=True)
class Loaded:
    case: Case
    artifact: Artifact
    program: Any  # a Program that also has `pad_token`, which only this suite sets
    load: Callable[..., Program]  # loads the artifact once more

    def ids(self, n: int, seed: int = 0) -> list[int]:
        """n token ids, the same for the same seed."""
        ids: list[int] = np.random.default_rng(seed).integers(0, self.program.vocabulary, n).tolist()
        return ids


def ready(program: Program) -> None:
    """Have open what a program would open once several handles are decoded together, where there is such a thing."""
    batches = getattr(program, "batches", None)
    if batches is not None:
        batches.open(8)


def feed(program: Program, handle: Handle, ids: Sequence[int], lengths: Iterable[int]) -> Logits:
    """Prefill calls of these lengths from ids' start. Returns the last logits."""
    at, logits = 0, np.empty(0, np.float32)
    for length in lengths:
        logits = program.prefill(handle, ids[at : at + length])
        at += length
    assert at == len(ids)
    return logits


def decode(program: Program, handle: Handle, ids: Sequence[int]) -> NDArray[np.float32]:
    """The logits after each of the ids, (n, V)."""
    return np.concatenate([program.decode([handle], [i]) for i in ids])


def started(program: Program, ids: Sequence[int]) -> Handle:
    """A new handle that has read the ids, by the largest buckets."""
    handle, largest = program.new_state(), max(program.buckets)
    for at in range(0, len(ids), largest):
        program.prefill(handle, ids[at : at + largest])
    return handle


def same(a: State, b: State) -> bool:
    """Bit for bit."""
    return (
        (a.position, a.since) == (b.position, b.since)
        and set(a.tensors) == set(b.tensors)
        and all(a.tensors[n].dtype == b.tensors[n].dtype for n in a.tensors)
        and all(a.tensors[n].tobytes() == b.tensors[n].tobytes() for n in a.tensors)
    )


def error(actual: NDArray[Any], expected: NDArray[Any]) -> float:
    """The largest difference in standard deviations of what is expected."""
    assert actual.shape == expected.shape
    wanted = expected.astype(np.float64)
    return float(np.abs(actual - wanted).max() / wanted.std())


def frozen(state: State) -> State:
    """A deep copy of a state, to compare with later."""
    return State(state.position, state.since, {n: a.copy() for n, a in state.tensors.items()})
