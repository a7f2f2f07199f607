"""Rotary position embedding (RoFormer, arXiv:2104.09864): its frequencies and the tables of cosines and sines.

Glossary: R how many values of a head are rotated, S context.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Llama3Scaling:
    """Stretches long wavelengths by `factor`, as in transformers' `_compute_llama3_parameters`."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        _check_positive(self, "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(f"low_freq_factor is {self.low_freq_factor}, expected less than {self.high_freq_factor}")


@dataclass(frozen=True)
class Rope:
    """The base of the frequencies, and what stretches them. Raises ValueError where a number makes no sense."""

    theta: float
    scaling: Llama3Scaling | None = None

    def __post_init__(self) -> None:
        _check_positive(self, "theta")

    def frequencies(self, rotated: int) -> NDArray[np.float32]:
        """Compute the radians a token of each pair of values, (R/2,)."""
        exponents = np.arange(0, rotated, 2, dtype=np.float32) / np.float32(rotated)
        frequencies = (1.0 / (np.float32(self.theta) ** exponents)).astype(np.float32)
        if self.scaling is None:
            return frequencies
        s = self.scaling
        wavelengths = 2 * math.pi / frequencies
        low, high = (s.original_max_position_embeddings / f for f in (s.low_freq_factor, s.high_freq_factor))
        smooth = (s.original_max_position_embeddings / wavelengths - s.low_freq_factor) / (
            s.high_freq_factor - s.low_freq_factor
        )
        blended = (1 - smooth) * frequencies / s.factor + smooth * frequencies
        stretched = np.where(wavelengths > low, frequencies / s.factor, blended)
        return np.where(wavelengths < high, frequencies, stretched).astype(np.float32)

    def tables(self, rotated: int, context: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Compute cosines and sines, each (S, R/2). The angle is a float32 product, as in the official models."""
        angles = np.arange(context, dtype=np.float32)[:, None] * self.frequencies(rotated)
        return np.cos(angles), np.sin(angles)


def _check_positive(part: Llama3Scaling | Rope, *names: str) -> None:
    for name in names:
        value = getattr(part, name)
        if not 0 < value < math.inf:  # false for NaN, too
            raise ValueError(f"{name} is {value}, expected a positive number")
