"""The cost of quantization: errors of the logits, perplexity and divergence on a fixed text, against the f32 module.

The text was written for this and is published nowhere else, so that no model has it in its training data.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ssmd.model.artifact import Artifact
from ssmd.runtime.protocol import Program
from ssmd.runtime.verify import StepError, verify

MAX_TOKENS = 400
_MOST_NATS = 700.0  # whose perplexity is still a number
_ROWS = 64  # compared at a time: in float64 all of them would take as much memory as a small model's weights
TEXT = """\
The harbour had been quiet for three weeks when the first boats came back. Nobody on the quay could say how many had
left in the autumn, because the ledger in which such things were written had been lost in the storm that took the roof
of the customs house. "They are early," said the old woman who sold rope. "They are late," said her son. "It only seems
early because you stopped counting."

An eel that leaves a river in northern Europe must cross 6,000 km of open ocean before it can spawn. Suppose that it
weighs 1.2 kg, of which 28 percent is fat. One gram of fat yields roughly 39 kilojoules, so the store is 1200 * 0.28 *
39, or about 13,100 kilojoules; at half a kilojoule for each kilometre the journey takes 3,000 of them.

def average(values, weights):
    total = sum(weights)
    if total == 0:
        raise ZeroDivisionError("the weights add up to zero")
    return sum(v * w for v, w in zip(values, weights)) / total

User: My sourdough does not rise any more since I moved to a new flat. What changed?
Assistant: The most likely cause is temperature. A starter that doubled in six hours at 24 degrees may need twelve at
18. Put the jar on top of the refrigerator, feed it once a day, and wait until it doubles before you bake.

In 1911 the town council decided by nine votes to four to build a tramway. The blacksmith voted against it because
horses would lose their work; the doctor voted for it because the horses did. The line carried 212,000 passengers in
its first year and was closed in 1954, when buses had become cheaper.
"""


class QualityError(ValueError):
    """An artifact whose logits are not finite."""


def measure(artifact: Artifact, program: Program, tokens: Sequence[int], reference: NDArray[np.float32]) -> Any:
    """Measure an artifact's quality for the manifest. Raises QualityError.

    Returns `golden`, the largest rms and max error of a golden step, in standard deviations of the reference; and
    `text`, which compares the artifact with the reference (logits f32[n, V] after each of `tokens`) on a text.
    """
    steps = verify(artifact, program).steps
    handle = program.new_state()
    try:
        found = np.stack([program.decode([handle], [token])[0].copy() for token in tokens])
    finally:
        program.release(handle)
    if not np.isfinite(found).all():
        raise QualityError(
            f"quantized to {artifact.manifest.quantization} its logits are not finite; build another form"
        )
    return summed(steps, found, reference, tokens)


def summed(
    steps: Sequence[StepError], found: NDArray[np.float32], reference: NDArray[np.float32], tokens: Sequence[int]
) -> Any:
    """Summarise computed logits as `measure` does."""
    worst = max(steps, key=lambda s: s.rms_relative)
    return {
        "golden": {"rms": _rounded(worst.rms_relative), "max": _rounded(worst.max_relative)},
        "text": {"tokens": len(tokens), **compared(found, reference, tokens)},
    }


def compared(found: NDArray[np.float32], reference: NDArray[np.float32], tokens: Sequence[int]) -> dict[str, float]:
    """Compare logits with the reference's; rows are the logits after each token.

    Returns the perplexity of tokens[1:] by both; `kl`, the mean of KL(reference || found) in nats; and `same`, the
    share of tokens at which both have the same largest logit.
    """
    n, following = len(found), np.asarray(tokens[1:])
    loss = loss_f32 = kl = 0.0
    same = 0
    for start in range(0, n, _ROWS):
        rows = slice(start, start + _ROWS)
        own, true = _log_softmax(found[rows]), _log_softmax(reference[rows])
        known = following[rows, None]  # the last token has no known successor
        loss, loss_f32 = (
            total - float(np.take_along_axis(p[: len(known)], known, 1).sum()) / max(n - 1, 1)
            for total, p in ((loss, own), (loss_f32, true))
        )
        kl += float((np.exp(true) * (true - own)).sum()) / n
        same += int((own.argmax(-1) == true.argmax(-1)).sum())
    return {
        "perplexity": _rounded(np.exp(min(loss, _MOST_NATS))),
        "perplexity_f32": _rounded(np.exp(min(loss_f32, _MOST_NATS))),
        "kl": _rounded(kl),
        "same": _rounded(same / n),
    }


def _log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return result


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
