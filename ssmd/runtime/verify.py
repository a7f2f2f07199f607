"""Replay of an artifact's golden values, the logits that the re-authored module computed at build time.

A refitted artifact has no such module: its golden values are its own logits of when it was new.

golden.safetensors holds `tokens` i32[n], `positions` i32[k] ascending, and `logits` f32[k, V]: the reference logits
after feeding tokens[: positions[j] + 1].
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from ssmd.machine.progress import tell
from ssmd.model.artifact import GOLDEN, Artifact, ArtifactError, Manifest
from ssmd.runtime.buckets import plan
from ssmd.runtime.protocol import Program
from ssmd.text.tokenizer import Tokenizer

GOLDEN_TOKENS = 40
GOLDEN_POSITIONS = (0, 1, 15, 31, 39)
GOLDEN_TEXT = (
    "A river does not remember the rain that filled it, and yet its shape is the sum of every storm. On the old bridge "
    "a woman counts 3 boats, 17 gulls and one late train; then she writes the numbers down and walks home slowly."
)
# Largest rms error of a step, relative to the standard deviation of the reference logits. float32 differs only by the
# order of sums (measured 1e-6 on tiny models). int8 rounds weights and activations, and small models with large
# outliers suffer most (measured 0.03 on tiny models, 0.068 on SmolLM2-135M). A wrong program is near 1.
TOLERANCES = {"f32": 1e-4, "f16": 1e-2, "int8": 0.25, "int4": 0.5}
# Added tolerance for piecewise linear functions (ActiBA): this over the square of their segments, at most the tolerance
# of int4 (measured 6 to 22 on tiny models of four families, the worst row of 40; docs/notes/xamba.md).
_PIECEWISE = 40.0


Call = Literal["prefill", "decode"]


@dataclass(frozen=True)
class StepError:
    """Errors of the logits after token `position`; `*_relative` are in standard deviations of the reference.

    shift: the mean difference. It does not change a softmax, so samplers are not affected. int8 without rotation shifts
    all logits of SmolLM2 by up to 0.55 standard deviations. The errors are the rest without the shift.
    """

    position: int
    call: Call
    max_error: float
    rms_error: float
    max_relative: float
    rms_relative: float
    shift: float


@dataclass(frozen=True)
class Report:
    steps: tuple[StepError, ...]
    tolerance: float

    @property
    def worst(self) -> StepError:
        """The step with the largest relative rms error; NaN counts as the largest."""
        return max(self.steps, key=lambda s: np.inf if np.isnan(s.rms_relative) else s.rms_relative)

    @property
    def passed(self) -> bool:
        return self.worst.rms_relative <= self.tolerance


def segments_of(manifest: Manifest) -> int | None:
    """Return the number of segments of ActiBA's functions in an artifact's graph; None if it has none."""
    xamba = manifest.conversion.get("xamba")
    passes = xamba.get("passes") if isinstance(xamba, dict) else None
    segments = passes.get("actiba") if isinstance(passes, dict) else None
    return segments if isinstance(segments, int) and segments > 0 else None


def tolerance_of(quantization: str, segments: int | None = None) -> float:
    """Return the tolerance of a quantization, by its name up to "-": "int8-smooth" is "int8". Raises ArtifactError.

    segments: those of ActiBA's functions, which add to it.
    """
    scheme = quantization.partition("-")[0]
    if scheme not in TOLERANCES:
        raise ArtifactError(
            f"no tolerance is known for the quantization {quantization!r}, only for {sorted(TOLERANCES)}"
        )
    added = 0.0 if segments is None else min(_PIECEWISE / segments**2, TOLERANCES["int4"])
    return TOLERANCES[scheme] + added


def verify(artifact: Artifact, program: Program) -> Report:
    """Feed the golden tokens and compare the logits at every golden position.

    Adjacent positions are fed by decode, gaps by prefill. Raises ArtifactError if the golden values are malformed.
    """
    tolerance = tolerance_of(artifact.manifest.quantization, segments_of(artifact.manifest))
    tokens, positions, expected = _golden(artifact)
    calls = replay(program, tokens, positions)
    steps = [compare(p, *made, reference) for p, made, reference in zip(positions, calls, expected, strict=True)]
    return Report(tuple(steps), tolerance)


def replay(
    program: Program, tokens: Sequence[int], positions: Sequence[int]
) -> Iterator[tuple[Call, NDArray[np.float32]]]:
    """Feed `tokens` to an empty state. Yield at each position the call that fed its token, and the logits (V,)."""
    handle = program.new_state()
    try:
        fed = 0
        for done, position in enumerate(positions):
            tell(done, len(positions))
            for length in plan(position + 1 - fed, program.buckets):
                part = list(tokens[fed : fed + length])
                decoded = length == 1 and fed > 0
                logits = program.decode([handle], part)[0] if decoded else program.prefill(handle, part)
                fed += length
            yield "decode" if decoded else "prefill", logits
        tell(0, 0)
    finally:
        program.release(handle)


def golden_tokens(tokenizer: Tokenizer) -> list[int]:
    """Return the ids of a fixed text: golden values should measure real use."""
    return (tokenizer.encode(GOLDEN_TEXT) * GOLDEN_TOKENS)[:GOLDEN_TOKENS]


def save_golden(file: Path, tokens: Sequence[int], logits: NDArray[np.float32]) -> None:
    """Write golden.safetensors; logits f32[k, V] after GOLDEN_POSITIONS of `tokens`."""
    positions = np.array(GOLDEN_POSITIONS, np.int32)
    save_file({"tokens": np.array(tokens, np.int32), "positions": positions, "logits": logits}, file)


def compare(position: int, call: Call, logits: NDArray[np.float32], reference: NDArray[np.float32]) -> StepError:
    """Compare as many logits as the reference has."""
    difference = logits.astype(np.float64) - reference
    shift = float(difference.mean())
    error = difference - shift
    spread = float(reference.std(dtype=np.float64)) or 1.0
    largest, rms = float(np.abs(error).max()), float(np.sqrt(np.mean(error**2)))
    return StepError(position, call, largest, rms, largest / spread, rms / spread, shift)


def _golden(artifact: Artifact) -> tuple[list[int], list[int], NDArray[np.float32]]:
    path, manifest = artifact.file(GOLDEN), artifact.manifest
    if manifest.golden == "none":
        raise ArtifactError(
            f"artifact {artifact.path} has no golden values: it was made where its runtime cannot execute; make it "
            f"again here: ssmd pull {manifest.name} --runtime {manifest.runtime} --force"
        )

    def wrong(what: str) -> ArtifactError:
        return ArtifactError(f"{path}: {what}; build the artifact again")

    try:
        tensors: dict[str, NDArray[Any]] = load_file(path)
    except (SafetensorError, OSError, ValueError) as err:
        raise wrong(f"not a safetensors file ({err})") from err
    if set(tensors) != {"tokens", "positions", "logits"}:
        raise wrong(f"holds {sorted(tensors)}, expected tokens, positions and logits")
    tokens, positions, logits = tensors["tokens"], tensors["positions"], tensors["logits"]
    for name, array, axes in (("tokens", tokens, 1), ("positions", positions, 1), ("logits", logits, 2)):
        dtype = np.float32 if name == "logits" else np.int32
        if array.dtype != dtype or array.ndim != axes or not array.size:
            raise wrong(f"{name} is {array.dtype}{list(array.shape)}")
    if logits.shape != (len(positions), manifest.vocabulary) or not np.isfinite(logits).all():
        raise wrong(f"logits {list(logits.shape)} are not finite values for {len(positions)} positions")
    if tokens.min() < 0 or tokens.max() >= manifest.vocabulary:
        raise wrong(f"token ids go beyond the vocabulary of {manifest.vocabulary}")
    if positions[0] < 0 or positions[-1] >= len(tokens) or (np.diff(positions) <= 0).any():
        raise wrong(f"positions do not ascend within the {len(tokens)} tokens")
    if manifest.context is not None and positions[-1] >= manifest.context:
        raise wrong(f"positions go beyond the context of {manifest.context}")
    return tokens.tolist(), positions.tolist(), logits
