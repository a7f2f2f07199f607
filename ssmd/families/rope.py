"""Rotary position embedding (RoFormer, arXiv:2104.09864): its settings and the tables of cosines and sines.

Glossary: D head_dim, R how much of it is rotated, S context.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ssmd.families.fields import FamilyError, Fields

SUPPORTED = ("default", "llama3")


@dataclass(frozen=True)
class Llama3Scaling:
    """Stretches long wavelengths by `factor`, as in transformers' `_compute_llama3_parameters`."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class Rope:
    """`partial` is the share of head_dim that is rotated: its first R values."""

    theta: float
    scaling: Llama3Scaling | None = None
    partial: float = 1.0

    @staticmethod
    def parse(fields: Fields, theta: float = 10_000.0, partial: float | None = None) -> Rope:
        """From `rope_parameters`, or from the older pair `rope_theta` and `rope_scaling`. Raises FamilyError.

        `theta` is the family's own, where the config names none. `partial` is the family's default of
        partial_rotary_factor; without one, only whole heads are supported.
        """
        name = "rope_parameters" if fields.get("rope_parameters") is not None else "rope_scaling"
        table = fields.get(name)
        if not (table is None or isinstance(table, dict)):
            raise FamilyError(f"config.json: {name} is {table!r}, expected an object")
        inner = Fields(table or {})
        theta = (inner if inner.get("rope_theta") is not None else fields).number("rope_theta", theta)
        kind = inner.get("rope_type") or inner.get("type") or "default"
        if kind not in SUPPORTED:
            raise FamilyError(f"config.json: {name}.rope_type is {kind!r}; supported: {', '.join(SUPPORTED)}")
        if partial is None:
            for place in (fields, inner):
                place.only("partial_rotary_factor", 1.0, 1.0)
            partial = 1.0
        else:
            partial = inner.number("partial_rotary_factor", partial)
        if kind == "default":
            return Rope(theta, None, partial)
        low, high = inner.number("low_freq_factor"), inner.number("high_freq_factor")
        if not low < high:
            raise FamilyError(f"config.json: {name}.low_freq_factor {low} is not below high_freq_factor {high}")
        original = inner.size("original_max_position_embeddings")
        return Rope(theta, Llama3Scaling(inner.number("factor"), low, high, original), partial)

    def rotated(self, head_dim: int) -> int:
        """R. Raises FamilyError unless it is even and at most D."""
        rotated = int(head_dim * self.partial)
        if rotated % 2 or not 0 < rotated <= head_dim:
            raise FamilyError(
                f"config.json: partial_rotary_factor {self.partial} of head_dim = {head_dim} is {rotated}, "
                "expected an even number of at most head_dim"
            )
        return rotated

    def frequencies(self, head_dim: int) -> NDArray[np.float32]:
        """Radians a token, (R/2,)."""
        rotated = self.rotated(head_dim)
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

    def tables(self, head_dim: int, context: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Cosines and sines, each (S, R/2). The angle is a float32 product, as in the official models."""
        angles = np.arange(context, dtype=np.float32)[:, None] * self.frequencies(head_dim)
        return np.cos(angles), np.sin(angles)
