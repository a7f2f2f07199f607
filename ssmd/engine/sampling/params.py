"""What may be asked of sampling, and within which bounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ssmd.engine.sampling.filters import Filters
from ssmd.engine.sampling.penalties import Dry
from ssmd.model.defaults import EVERYTHING, MAX_BREAKERS, MAX_INT, OPTIONS, Option

MAX_TOP_LOGPROBS = 20
MAX_LOGIT_BIAS = 100.0
MAX_LOGIT_BIAS_ENTRIES = 10_000


def _number(name: str) -> float:
    return OPTIONS[name].otherwise


def _whole(name: str) -> int:
    return int(OPTIONS[name].otherwise)


@dataclass(frozen=True)
class SamplingParams:
    """How to sample. `temperature` 0 is greedy; `top_k` 0, `top_p` 1, `min_p` 0, `typical_p` 1, `xtc_probability` 0,
    `repetition_penalty` 1, `frequency_penalty` 0, `presence_penalty` 0 and no `dry` are off; `logit_bias` is added to
    raw logits.

    min_p: least probability, as a share of the likeliest token's. typical_p, xtc_probability, xtc_threshold: as in
    filters.py. repeat_last_n: tokens of prompt and answer that the penalty counts, 0 none, -1 all.

    Raises ValueError naming the field and its value.
    """

    temperature: float = _number("temperature")
    top_p: float = _number("top_p")
    top_k: int = _whole("top_k")
    min_p: float = _number("min_p")
    typical_p: float = _number("typical_p")
    xtc_probability: float = _number("xtc_probability")
    xtc_threshold: float = _number("xtc_threshold")
    repetition_penalty: float = _number("repetition_penalty")
    repeat_last_n: int = _whole("repeat_last_n")
    frequency_penalty: float = _number("frequency_penalty")
    presence_penalty: float = _number("presence_penalty")
    dry: Dry | None = None
    seed: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: bool = False
    top_logprobs: int = 0

    def __post_init__(self) -> None:
        for name in OPTIONS.keys() & vars(self).keys():
            OPTIONS[name].checked(name, getattr(self, name))
        if self.dry is not None:
            _check_dry(self.dry)
        Option(0, MAX_TOP_LOGPROBS, whole=True).checked("top_logprobs", self.top_logprobs)
        if self.seed is not None:
            Option(-(2**63), 2**64 - 1, whole=True).checked("seed", self.seed)
        if self.top_logprobs and not self.logprobs:
            raise ValueError(f"top_logprobs is {self.top_logprobs}, which needs logprobs to be true")
        if len(self.logit_bias) > MAX_LOGIT_BIAS_ENTRIES:
            raise ValueError(
                f"logit_bias has {len(self.logit_bias)} entries, at most {MAX_LOGIT_BIAS_ENTRIES} are allowed"
            )
        for token, bias in self.logit_bias.items():
            Option(0, MAX_INT, whole=True).checked("logit_bias: token id", token)
            Option(-MAX_LOGIT_BIAS, MAX_LOGIT_BIAS).checked(f"logit_bias of token {token}", bias)

    def counted(self, length: int) -> int:
        """How many of the last ids of a prompt of so many have to be known."""
        windows = [] if self.repetition_penalty == 1.0 else [self.repeat_last_n]
        if self.dry is not None:
            windows.append(self.dry.last_n)
        return length if EVERYTHING in windows else min(length, max(windows, default=0))

    @property
    def filters(self) -> Filters | None:
        """What bounds the set of tokens to draw from, where that has to be known; None where a draw is enough."""
        if self.typical_p >= 1.0 and not self.xtc_probability:
            return None
        return Filters(self.typical_p, self.top_p, self.min_p, self.xtc_probability, self.xtc_threshold)


def _check_dry(dry: Dry) -> None:
    OPTIONS["dry_multiplier"].checked("dry_multiplier", dry.multiplier)
    OPTIONS["dry_base"].checked("dry_base", dry.base)
    OPTIONS["dry_allowed_length"].checked("dry_allowed_length", dry.allowed_length)
    OPTIONS["dry_penalty_last_n"].checked("dry_penalty_last_n", dry.last_n)
    if len(dry.breakers) > MAX_BREAKERS or not all(dry.breakers):
        raise ValueError(
            f"dry_sequence_breakers holds {len(dry.breakers)} texts, 0 to {MAX_BREAKERS} are allowed, none empty"
        )
