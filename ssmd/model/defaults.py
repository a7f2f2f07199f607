"""Sampling defaults: the values of options that a request does not set, each with its source.

A model's own defaults come from its source's generation_config.json: `ssmd pull` and `ssmd build` write them into the
artifact's folder, as defaults.json. CATALOGUE has values for the other options, by the artifact's name. The manifest
does not list the file, so defaults are not part of the build.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ssmd.machine.spelling import did_you_mean, printable

if TYPE_CHECKING:
    from ssmd.model.artifact import Manifest

log = logging.getLogger(__name__)
FILE = "defaults.json"
GENERATION_CONFIG = "generation_config.json"
MAX_INT = 2**31 - 1
MAX_BYTES = 64 << 10  # of the file
MAX_SOURCE_CHARS = 200
LEAST_TOKENS = 64  # that a generation config may end all answers at; some hold the 20 of an example
ALL_TOKENS = -1  # as a window: all of prompt and answer
BREAKERS = "dry_sequence_breakers"  # the one option that is no number, but a list of texts
MAX_BREAKERS = 16
MAX_BREAKER_CHARS = 40


@dataclass(frozen=True)
class Option:
    """A number that a request, a person or a model may set: its bounds, its default, and its texts for people."""

    low: float
    high: float
    whole: bool = False
    otherwise: float = 0  # its value if neither the request nor the model sets it
    aliases: tuple[str, ...] = ()  # other servers' names of it
    help: str = ""
    label: str = ""  # on the page
    step: float = 1  # of the page's arrows

    @property
    def expected(self) -> str:
        """A phrase for errors, such as "a number from 0 to 2"."""
        if self.high < MAX_INT:
            bounds = f" from {self.low:g} to {self.high:g}"
        else:
            bounds = f" of {self.low:g} or more" if self.low >= -MAX_INT else ""
        return f"a {'whole ' if self.whole else ''}number{bounds}"

    def checked(self, name: str, value: object) -> float:
        """Return the value. Raises ValueError, with the name and the value, if it is not a number within the bounds."""
        if self.whole:
            value = whole(value)
        kind = int if self.whole else int | float
        if isinstance(value, kind) and not isinstance(value, bool) and self.low <= value <= self.high:
            return value
        raise ValueError(f"{name} is {printable(repr(value))}, expected {self.expected}")

    def read(self, name: str, text: str) -> float:
        """Return the value that a text writes. Raises ValueError as `checked` does."""
        try:
            value: float = integer(text) if self.whole else float(text)
        except (ValueError, OverflowError):
            raise ValueError(f"{name} is {printable(text)!r}, expected {self.expected}") from None
        return self.checked(name, value)


def whole(value: object) -> object:
    """Return an int for a float without a fraction, as of clients that write 4.0 for 4; other values unchanged."""
    return int(value) if type(value) is float and value.is_integer() else value


def integer(text: str) -> int:
    """Return the integer that a text writes, such as "40" or "40.0". Raises ValueError."""
    try:
        return int(text)
    except ValueError:
        value = whole(float(text))
        if isinstance(value, int):
            return value
        raise


# All sampling options: request bodies, the terminal's options and `/set`, and the page's fields are made of this table.
OPTIONS: Mapping[str, Option] = {
    "temperature": Option(
        *(0, 2),
        otherwise=1,
        help="0 always takes the likeliest token.",
        label="Temperature",
        step=0.1,
    ),
    "top_p": Option(
        *(0, 1),
        otherwise=1,
        help="Sample among the likeliest tokens of this total probability.",
        label="Top p",
        step=0.01,
    ),
    "top_k": Option(
        *(0, MAX_INT),
        whole=True,
        help="Sample among this many of the likeliest tokens; 0 all.",
        label="Top k",
    ),
    "min_p": Option(
        *(0, 1),
        help="Least probability, as a share of the likeliest token's.",
        label="Min p",
        step=0.01,
    ),
    "typical_p": Option(
        *(0, 1),
        otherwise=1,
        help="Sample among the tokens of typical surprise, up to this total probability.",
    ),
    "xtc_probability": Option(
        *(0, 1),
        help="How often XTC drops all likely tokens but the least likely of them; 0 never.",
    ),
    "xtc_threshold": Option(
        *(0, 1),
        otherwise=0.1,
        help="Probability from which XTC calls a token likely.",
    ),
    "repetition_penalty": Option(
        *(0.01, 100),
        otherwise=1,
        aliases=("repeat_penalty",),
        help="Makes the last tokens less likely to come again; 1 does not, 1.1 does a little.",
        label="Repetition penalty",
        step=0.05,
    ),
    "repeat_last_n": Option(
        *(ALL_TOKENS, MAX_INT),
        whole=True,
        otherwise=64,
        help="How many tokens the repetition penalty counts; -1 all.",
    ),
    "frequency_penalty": Option(
        *(-2, 2),
        help="Subtracted from a token's logit once for each time that the answer has it.",
    ),
    "presence_penalty": Option(
        *(-2, 2),
        help="Subtracted once from the logit of each token that the answer has.",
    ),
    "dry_multiplier": Option(
        *(0, 100),
        help="Strength of DRY, which penalizes repeated sequences of tokens; 0 is off.",
        label="DRY, against loops",
        step=0.1,
    ),
    "dry_base": Option(
        *(1, 100),
        otherwise=1.75,
        help="Growth of DRY's penalty with each more token that repeats.",
    ),
    "dry_allowed_length": Option(
        *(1, 1024),
        whole=True,
        otherwise=2,
        help="Tokens that may repeat before DRY penalizes the next one.",
    ),
    "dry_penalty_last_n": Option(
        *(ALL_TOKENS, MAX_INT),
        whole=True,
        otherwise=ALL_TOKENS,
        help="How many tokens DRY looks back at; -1 all.",
    ),
    "max_tokens": Option(
        *(1, MAX_INT),
        whole=True,
        otherwise=2048,
        help="Longest answer, in tokens.",
        label="Longest answer",
    ),
}
# Fields of a generation config, and the options that they set.
_GENERATION = {
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")},
    "max_new_tokens": "max_tokens",
}


@dataclass(frozen=True)
class Default:
    """The value of an option, and its source in words."""

    value: float | tuple[str, ...]
    source: str

    @property
    def text(self) -> str:
        """The value in a line, texts as JSON."""
        return json.dumps(self.value) if isinstance(self.value, tuple) else f"{self.value:g}"


Defaults = Mapping[str, Default]  # by the option's name


@dataclass(frozen=True)
class KnownModel:
    """A model whose defaults ssmd has. It is recognised by its name on the hub, family and vocabulary."""

    origin: str
    family: str
    vocabulary: int
    values: Defaults


def _values(source: str, **values: float | tuple[str, ...]) -> dict[str, Default]:
    return {name: Default(value, source) for name, value in values.items()}


_CARD = "the model's card"
CATALOGUE: Mapping[str, KnownModel] = {
    "smollm2": KnownModel(
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        "llama",
        49152,
        {
            **_values(_CARD, temperature=0.2, top_p=0.9),
            **_values(
                "benchmarks/loops.py: against answers that go in circles",
                dry_multiplier=0.8,
                dry_allowed_length=16,
                dry_penalty_last_n=512,
                dry_sequence_breakers=(),
            ),
        },
    ),
    "lfm2-350m": KnownModel(
        "LiquidAI/LFM2-350M",
        "lfm2",
        65536,
        _values(_CARD, temperature=0.3, min_p=0.15, repetition_penalty=1.05),
    ),
    "lfm2-700m": KnownModel(
        "LiquidAI/LFM2-700M",
        "lfm2",
        65536,
        _values(_CARD, temperature=0.3, min_p=0.15, repetition_penalty=1.05),
    ),
    "lfm2-1.2b": KnownModel(
        "LiquidAI/LFM2-1.2B",
        "lfm2",
        65536,
        _values(_CARD, temperature=0.3, min_p=0.15, repetition_penalty=1.05),
    ),
    "lfm2-2.6b": KnownModel(
        "LiquidAI/LFM2-2.6B",
        "lfm2",
        65536,
        _values(_CARD, temperature=0.3, min_p=0.15, repetition_penalty=1.05),
    ),
    "lfm2-8b-a1b": KnownModel(
        "LiquidAI/LFM2-8B-A1B",
        "lfm2_moe",
        65536,
        _values(_CARD, temperature=0.3, min_p=0.15, repetition_penalty=1.05),
    ),
    # "Temperature=0.6, TopP=0.95, TopK=20, and MinP=0 (the default setting in generation_config.json)"
    "qwen3-0.6b": KnownModel(
        "Qwen/Qwen3-0.6B",
        "qwen3",
        151936,
        _values(
            f"{GENERATION_CONFIG} of Qwen/Qwen3-0.6B, as its card quotes it", temperature=0.6, top_p=0.95, top_k=20
        ),
    ),
    "qwen3-1.7b": KnownModel(
        "Qwen/Qwen3-1.7B",
        "qwen3",
        151936,
        _values(
            f"{GENERATION_CONFIG} of Qwen/Qwen3-1.7B, as its card quotes it", temperature=0.6, top_p=0.95, top_k=20
        ),
    ),
}


def defaults_of(manifest: Manifest, folder: Path) -> dict[str, Default]:
    """Return the defaults of the artifact in `folder`: its file's, and the catalogue's for the other options."""
    name = manifest.name.casefold()
    known = next((k for own, k in CATALOGUE.items() if name in (own, k.origin.rpartition("/")[2].casefold())), None)
    if known is None or (known.family, known.vocabulary) != (manifest.family, manifest.vocabulary):
        return read(folder)
    return {**known.values, **read(folder)}


def of_generation_config(fields: Mapping[str, Any], whose: str) -> tuple[dict[str, Default], list[str]]:
    """Return the defaults in a generation config, and a line for each value that is invalid and left out.

    whose: a model's name. `do_sample: false` is temperature 0, as transformers then decodes greedily.
    """
    source = f"{GENERATION_CONFIG} of {printable(whose, 100)}"
    found: dict[str, Default] = {}
    wrong: list[str] = []
    for theirs, name in _GENERATION.items():
        value = fields.get(theirs)
        if value is None:
            continue
        try:
            found[name] = Default(OPTIONS[name].checked(theirs, value), source)
            if name == "max_tokens" and value < LEAST_TOKENS:
                del found[name]
                raise ValueError(f"{theirs} is {value}, which would cut answers off")
        except ValueError as err:
            wrong.append(f"{GENERATION_CONFIG}: {err}; it is left out")
    if fields.get("do_sample") is False:
        found["temperature"] = Default(0.0, f"{source}: do_sample is false")
    return found, wrong


def write(folder: Path, defaults: Defaults) -> None:
    """Write the file of an artifact's folder, whole or not at all. Without defaults write none. Raises OSError."""
    if not defaults:
        return
    new = folder / f".{FILE}-{os.getpid()}"
    fields = {name: {"value": one.value, "source": one.source} for name, one in defaults.items()}
    new.write_text(json.dumps(fields, indent=1) + "\n", newline="\n")
    new.replace(folder / FILE)


def read(folder: Path) -> dict[str, Default]:
    """Return the defaults in the file of an artifact's folder; {} without one.

    Invalid entries are logged and ignored, as the model works without them.
    """
    file = folder / FILE
    try:
        if file.is_symlink() or not file.is_file():
            return {}
        if file.stat().st_size > MAX_BYTES:
            raise ValueError(f"it is larger than {MAX_BYTES} bytes")
        fields = json.loads(file.read_bytes())
        if not isinstance(fields, dict):
            raise ValueError("it is not a JSON object")
    except (OSError, ValueError, RecursionError) as err:
        log.warning("%s is ignored: %s", file, err)
        return {}
    found = {}
    for name, entry in fields.items():
        try:
            found[name] = _entry(name, entry)
        except ValueError as err:
            log.warning("%s: %s; it is ignored", file, err)
    return found


def _entry(name: str, entry: object) -> Default:
    if not isinstance(entry, dict) or entry.keys() != {"value", "source"}:
        raise ValueError(f"{printable(name)} is no object of a value and its source")
    source = entry["source"]
    if not isinstance(source, str) or not source.isprintable() or len(source) > MAX_SOURCE_CHARS:
        raise ValueError(f"the source of {printable(name)} is not a line of at most {MAX_SOURCE_CHARS} characters")
    if name == BREAKERS:
        return Default(_breakers(entry["value"]), source)
    return Default(option_of(name).checked(name, entry["value"]), source)


def _breakers(value: object) -> tuple[str, ...]:
    texts = value if isinstance(value, list) else [None]
    if len(texts) > MAX_BREAKERS or not all(isinstance(t, str) and 0 < len(t) <= MAX_BREAKER_CHARS for t in texts):
        raise ValueError(
            f"{BREAKERS} is {printable(repr(value))}, expected 0 to {MAX_BREAKERS} texts, each of 1 to "
            f"{MAX_BREAKER_CHARS} characters"
        )
    return tuple(texts)


def full_name(name: str) -> str:
    """Return the name of the option that has this name or alias; others as they are."""
    return next((own for own, option in OPTIONS.items() if name in option.aliases), name)


def option_of(name: str) -> Option:
    """Return the option of that name. Raises ValueError, which lists the known ones."""
    if name not in OPTIONS:
        raise ValueError(
            f"there is no option {printable(name)!r}{did_you_mean(name, OPTIONS)}; there are: {', '.join(OPTIONS)}"
        )
    return OPTIONS[name]


def parse(text: str) -> tuple[str, float]:
    """Return the name and value of a setting's NAME=VALUE. Raises ValueError."""
    name, equals, written = text.partition("=")
    name = full_name(name.strip())
    if not equals:
        raise ValueError(f"{printable(text)!r} is not NAME=VALUE, such as temperature=0.7")
    return name, option_of(name).read(name, written)
