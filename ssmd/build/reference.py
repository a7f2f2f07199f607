"""The f32 module's results: the golden values of an artifact, and the reference for its quantization's quality."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from ssmd.authoring.flat import FlatModule
from ssmd.authoring.host import Host
from ssmd.authoring.ops import CHUNK
from ssmd.build import quality
from ssmd.runtime.verify import GOLDEN_POSITIONS, GOLDEN_TOKENS, golden_tokens, save_golden
from ssmd.text.tokenizer import Tokenizer

TOLERANCE = 1e-3  # of the largest logit: float32 in another order of sums, through all layers


class ReferenceFailed(ValueError):
    """A module whose values are not finite, or differ in another form of it; the message says which."""


@dataclass(frozen=True)
class Reference:
    """The module's float32 results for fixed texts.

    golden: logits (k, V) after GOLDEN_POSITIONS of `tokens`. text: ids. text_logits: logits (n, V) after each of them.
    """

    tokens: list[int]
    golden: NDArray[np.float32]
    text: list[int]
    text_logits: NDArray[np.float32]

    @staticmethod
    def of(module: FlatModule, tokenizer: Tokenizer) -> Reference:
        """Compute the reference of fixed texts. tokenizer: the source's. Raises ReferenceFailed."""
        tokens = golden_tokens(tokenizer)
        text = tokenizer.encode(quality.TEXT)[: min(quality.MAX_TOKENS, module.context)]
        with one_thread():
            return Reference(tokens, golden(module, tokens), text, Host(module, len(text)).rows(text, CHUNK))

    def check(self, module: FlatModule) -> None:
        """Check that another form of the module gives the same golden values. Raises ReferenceFailed."""
        error = float(np.abs(golden(module, self.tokens) - self.golden).max() / np.abs(self.golden).max())
        if not error <= TOLERANCE:
            raise ReferenceFailed(
                f"rotated, the weights give other logits (by {error:.2g} of the largest); build with --quant f32"
            )

    def save(self, file: Path) -> None:
        """Write golden.safetensors (docs/artifact-format.md)."""
        save_golden(file, self.tokens, self.golden)


@contextmanager
def one_thread() -> Iterator[None]:
    """Let PyTorch compute with one thread: a sum's last bits depend on how it is divided, and builds must repeat."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def golden(module: FlatModule, tokens: Sequence[int]) -> NDArray[np.float32]:
    """Return logits (k, V) after GOLDEN_POSITIONS of `tokens`. Raises ReferenceFailed."""
    ends = [position + 1 for position in GOLDEN_POSITIONS]
    parts = [tokens[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    logits = Host(module, GOLDEN_TOKENS).feed_all(parts, [len(part) for part in parts])
    if not all(np.isfinite(row).all() for row in logits):
        raise ReferenceFailed("the model's logits are not finite: its weights or its config are damaged")
    return np.stack(logits)
