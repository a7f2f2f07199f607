"""Rotary position embedding (RoFormer, arXiv:2104.09864): its frequencies and the tables of cosines and sines.

Glossary: R number of values of a head that are rotated, S context.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

Pairs = NDArray[np.float32]  # (R/2,), one number for each pair of values


@dataclass(frozen=True)
class LinearScaling:
    """Scaling of all wavelengths by `factor`: positions are interpolated (arXiv:2306.15595)."""

    factor: float
    kind: Literal["linear"] = "linear"

    def __post_init__(self) -> None:
        _check_positive(self, "factor")

    def frequencies(self, periods: Pairs, theta: float) -> Pairs:
        """Compute the radians per token. Without scaling they would be 1 / periods."""
        return (1 / periods / np.float32(self.factor)).astype(np.float32)


@dataclass(frozen=True)
class Llama3Scaling:
    """Scaling of long wavelengths by `factor`, as in transformers' `_compute_llama3_parameters`."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int
    kind: Literal["llama3"] = "llama3"

    def __post_init__(self) -> None:
        _check_positive(self, "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(f"low_freq_factor is {self.low_freq_factor}, expected less than {self.high_freq_factor}")

    def frequencies(self, periods: Pairs, theta: float) -> Pairs:
        """Compute the radians per token. Without scaling they would be 1 / periods."""
        frequencies = 1 / periods
        wavelengths = 2 * math.pi / frequencies
        low, high = (self.original_max_position_embeddings / f for f in (self.low_freq_factor, self.high_freq_factor))
        smooth = (self.original_max_position_embeddings / wavelengths - self.low_freq_factor) / (
            self.high_freq_factor - self.low_freq_factor
        )
        blended = (1 - smooth) * frequencies / self.factor + smooth * frequencies
        longer = np.where(wavelengths > low, frequencies / self.factor, blended)
        return np.where(wavelengths < high, frequencies, longer)


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (arXiv:2309.00071, section 3.2), as in transformers' `_compute_yarn_parameters`.

    Pairs that turn more than `beta_fast` times in the original context stay unchanged. Those that turn less than
    `beta_slow` times are stretched by `factor`. Between them is a ramp; with `truncate` its ends are whole numbers of
    pairs. Cosines and sines are multiplied by `attention_factor`.
    """

    factor: float
    original_max_position_embeddings: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    kind: Literal["yarn"] = "yarn"

    def __post_init__(self) -> None:
        names = ("factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow")
        _check_positive(self, *names)

    def frequencies(self, periods: Pairs, theta: float) -> Pairs:
        """Compute the radians per token. Without scaling they would be 1 / periods."""
        rotated = 2 * len(periods)

        def pair(turns: float) -> float:
            """Return the number of the pair that turns this often in the original context."""
            period = self.original_max_position_embeddings / (turns * 2 * math.pi)
            return rotated * math.log(period) / (2 * math.log(theta))

        low, high = pair(self.beta_fast), pair(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, rotated - 1)
        width = np.float32(high - low or 0.001)
        kept = 1 - np.clip((np.arange(len(periods), dtype=np.float32) - np.float32(low)) / width, 0, 1)
        made: Pairs = 1 / (np.float32(self.factor) * periods) * (1 - kept) + 1 / periods * kept
        return made


@dataclass(frozen=True)
class ProportionalScaling:
    """Rotation of the first `pairs` pairs only, at wavelengths divided over all of them, longer by `factor`.

    As in transformers' `_compute_proportional_rope_parameters`. The other pairs are tables of ones and zeros.
    """

    pairs: int
    factor: float = 1.0
    kind: Literal["proportional"] = "proportional"

    def __post_init__(self) -> None:
        _check_positive(self, "pairs", "factor")

    def frequencies(self, periods: Pairs, theta: float) -> Pairs:
        """Compute the radians per token. Without scaling they would be 1 / periods."""
        turning = np.arange(len(periods)) < self.pairs
        return np.where(turning, 1 / periods, np.float32(0)).astype(np.float32) / np.float32(self.factor)


Scaling = Annotated[LinearScaling | Llama3Scaling | YarnScaling | ProportionalScaling, Field(discriminator="kind")]


@dataclass(frozen=True)
class Rope:
    """The base of the frequencies, and their scaling. Raises ValueError if a number is invalid."""

    theta: float
    scaling: Scaling | None = None

    def __post_init__(self) -> None:
        _check_positive(self, "theta")
        if isinstance(self.scaling, YarnScaling) and self.theta <= 1:
            raise ValueError(f"theta is {self.theta}, expected more than 1 with YaRN")

    def reach(self, stated: int) -> int:
        """Return the most positions that a model was made for: `stated`, or those of YaRN if they are more.

        YaRN gives `factor` times the original ones. Instructions to enable YaRN leave the stated number unchanged.
        """
        if not isinstance(self.scaling, YarnScaling):
            return stated
        return max(stated, int(self.scaling.factor * self.scaling.original_max_position_embeddings))

    def frequencies(self, rotated: int) -> Pairs:
        """Compute the radians per token of each pair of values, (R/2,)."""
        powers = np.arange(0, rotated, 2, dtype=np.float32) / np.float32(rotated)
        # A float64 power, rounded: NumPy's float32 one with AVX-512 is off by its last two bits, as are far angles.
        periods = (self.theta ** powers.astype(np.float64)).astype(np.float32)
        if self.scaling is None:
            return (1 / periods).astype(np.float32)
        return self.scaling.frequencies(periods, self.theta).astype(np.float32)

    def tables(self, rotated: int, context: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Compute cosines and sines, each (S, R/2), with YaRN's attention factor in them.

        The angle is a float32 product, as in the official models.
        """
        angles = np.arange(context, dtype=np.float32)[:, None] * self.frequencies(rotated)
        factor = np.float32(self.scaling.attention_factor if isinstance(self.scaling, YarnScaling) else 1.0)
        return np.cos(angles) * factor, np.sin(angles) * factor


def _check_positive(part: Scaling | Rope, *names: str) -> None:
    for name in names:
        value = getattr(part, name)
        if not 0 < value < math.inf:  # false for NaN, too
            raise ValueError(f"{name} is {value}, expected a positive number")
