"""The sampling options of a request, and their bounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ssmd.engine.sampling.filters import Filters
from ssmd.model.defaults import ALL_TOKENS, MAX_BREAKERS, MAX_INT, OPTIONS, Option

BREAKERS = ("\n", ":", '"', "*")
MAX_TOP_LOGPROBS = 20
MAX_LOGIT_BIAS = 100.0
MAX_LOGIT_BIAS_ENTRIES = 10_000


@dataclass(frozen=True)
class Dry:
    """Options of DRY. multiplier 0 is off."""

    multiplier: float
    base: float = OPTIONS["dry_base"].otherwise
    allowed_length: int = int(OPTIONS["dry_allowed_length"].otherwise)
    last_n: int = int(
        OPTIONS["dry_penalty_last_n"].otherwise
    )  # tokens of prompt and answer to search; 0: none, -1: all
    breakers: tuple[str, ...] = BREAKERS  # texts; a token that contains one of them is a breaker
    prompt: bool = True  # False: search the answer alone


def _number(name: str) -> float:
    return OPTIONS[name].otherwise


def _whole(name: str) -> int:
    return int(OPTIONS[name].otherwise)


@dataclass(frozen=True)
class SamplingParams:
    """Sampling options of a request. Raises ValueError with the field and its value."""

    temperature: float = _number("temperature")  # 0: greedy
    top_p: float = _number("top_p")  # 1: off
    top_k: int = _whole("top_k")  # 0: off
    min_p: float = _number("min_p")  # least probability, as a share of the likeliest token's; 0: off
    typical_p: float = _number("typical_p")  # as in filters.py; 1: off
    xtc_probability: float = _number("xtc_probability")  # as in filters.py; 0: off
    xtc_threshold: float = _number("xtc_threshold")
    repetition_penalty: float = _number("repetition_penalty")  # 1: off
    repeat_last_n: int = _whole("repeat_last_n")  # tokens of prompt and answer that this counts; 0: none, -1: all
    frequency_penalty: float = _number("frequency_penalty")  # 0: off
    presence_penalty: float = _number("presence_penalty")  # 0: off
    dry: Dry | None = None  # None: off
    seed: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # by token id; added to raw logits
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
        """Return how many of the last ids of a prompt the penalties count. length: ids of the prompt."""
        windows = [] if self.repetition_penalty == 1.0 else [self.repeat_last_n]
        if self.dry is not None:
            windows.append(self.dry.last_n)
        return length if ALL_TOKENS in windows else min(length, max(windows, default=0))

    @property
    def filters(self) -> Filters | None:
        """Return the filters if the set of possible tokens must be computed; None if a draw is enough."""
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
