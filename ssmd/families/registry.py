"""The supported families, by the `model_type` of config.json."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from pydantic import ValidationError

from ssmd.families import (
    bamba,
    falcon_h1,
    falcon_mamba,
    granitemoehybrid,
    lfm2,
    lfm2_moe,
    lfm3,
    llama,
    mamba,
    mamba2,
    nemotron_h,
    qwen3,
    qwen3_5,
    qwen3_5_text,
)
from ssmd.families.fields import FamilyError, Recorded
from ssmd.families.neutral import NEUTRAL, check
from ssmd.families.unbuilt import named
from ssmd.families.weights import Binding, given
from ssmd.model.formats import unread
from ssmd.model.plan import Plan, first_problem
from ssmd.model.rope import Rope

MAX_LAYERS = 1024  # of a model, as in Plan.layers


@dataclass(frozen=True)
class Family:
    """The functions of a family. Its config is a dataclass of its own, with `vocabulary` and `max_position`."""

    name: str
    read: Callable[[Mapping[str, Any]], Any]
    describe: Callable[[Any], Plan]
    bindings: Callable[[Any], dict[str, Binding]]
    buckets: tuple[int, ...] = (16, 64, 256)  # prefill lengths in tokens, unless others are asked for
    # The fields of the text model, if they are in an object of config.json. The rest of its fields is left out.
    text: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None
    left_out: Mapping[str, str] = field(default_factory=dict)  # by the beginning of tensors' names, what they make

    def parse(self, config: Mapping[str, Any]) -> Any:
        """Read a config.json as the family's own config. Raises FamilyError naming the field."""
        return self._read(self._text(config))

    def _text(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        if self.text is None:
            return config
        check({name: value for name, value in config.items() if name != "text_config"})
        return self.text(config)

    def _read(self, text: Mapping[str, Any]) -> Any:
        check(text)
        _check_layers(text.get("num_hidden_layers"))  # before a family makes something of each
        with _said():
            config = self.read(text)
        _check_layers(config.layers if isinstance(config.layers, int) else len(config.layers))
        return config

    def unread(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the names of set fields of a config.json that are not read and not known to have no effect."""
        text = self._text(config)
        recorded = Recorded(text)
        self._read(recorded)
        known = recorded.asked | NEUTRAL[self.name]
        fields = {**config, **text}
        return tuple(sorted(name for name, value in fields.items() if value is not None and name not in known))

    def plan(self, config: Any) -> Plan:
        """Describe the model of a config: layers, state, parameters. Raises FamilyError if it is not possible."""
        with _said():
            plan = self.describe(config)
            plan.spec("float32")  # which MLPs alone do not make
            with np.errstate(all="ignore"):
                tables = (*(plan.tables(2) or ()), *(plan.window_tables(2) or ()))
            if not all(np.isfinite(table).all() for table in tables):
                raise FamilyError("config.json: the numbers of RoPE are too large or too small to compute with")
        return plan

    def tables(self, config: Any, context: int) -> dict[str, Binding]:
        """Return bindings of the tables that a graph for `context` tokens holds beside its parameters.

        With RoPE these are `rope_cos` and `rope_sin`, (context, R/2). If the layers with a window have tables of their
        own, these are `window_rope_cos` and `window_rope_sin`.
        """
        plan = self.plan(config)
        made: dict[str, Binding] = {}
        for of, rope, rotated in (("", plan.rope, plan.rotated), ("window_", plan.window_rope, plan.window_rotated)):
            if rope is not None and rotated:
                made |= _tables(of, rope, rotated, context)
        return made


def _check_layers(count: object) -> None:
    """Raise FamilyError if a model has more layers than a plan may have."""
    if isinstance(count, int) and count > MAX_LAYERS:
        raise FamilyError(f"config.json: num_hidden_layers makes {count} layers, expected at most {MAX_LAYERS}")


def _tables(of: str, rope: Rope, rotated: int, context: int) -> dict[str, Binding]:
    return {
        f"{of}rope_cos": given(lambda: rope.tables(rotated, context)[0]),
        f"{of}rope_sin": given(lambda: rope.tables(rotated, context)[1]),
    }


@contextmanager
def _said() -> Iterator[None]:
    """Raise errors inside as FamilyError: a plan's part refuses a size or a number, or the plan has no state."""
    try:
        yield
    except FamilyError:
        raise
    except (ValueError, OverflowError) as err:
        why = first_problem(err) if isinstance(err, ValidationError) else str(err)
        raise FamilyError(f"config.json makes no model that can be: {why}") from err


QWEN3_5_LEFT_OUT = {"model.visual.": "the vision tower", "mtp.": "the head that predicts further tokens (MTP)"}
FAMILIES = {
    family.name: family
    for family in (
        Family("llama", llama.Config.parse, llama.plan, llama.bindings),
        Family("granitemoehybrid", granitemoehybrid.Config.parse, granitemoehybrid.plan, granitemoehybrid.bindings),
        Family("mamba2", mamba2.Config.parse, mamba2.plan, mamba2.bindings),
        Family("bamba", bamba.Config.parse, bamba.plan, bamba.bindings),
        Family("falcon_h1", falcon_h1.Config.parse, falcon_h1.plan, falcon_h1.bindings),
        Family("qwen3", qwen3.parse, llama.plan, llama.bindings),
        # Their scan is unrolled. At 256 tokens each token is not faster, and a runtime takes half a minute to load it.
        Family("mamba", mamba.Config.parse, mamba.plan, mamba.bindings, buckets=(16, 64)),
        Family("falcon_mamba", falcon_mamba.parse, mamba.plan, mamba.bindings, buckets=(16, 64)),
        Family("nemotron_h", nemotron_h.Config.parse, nemotron_h.plan, nemotron_h.bindings),
        Family("lfm2", lfm2.Config.parse, lfm2.plan, lfm2.bindings),
        Family(
            "qwen3_5",
            qwen3_5.parse,
            qwen3_5_text.plan,
            qwen3_5_text.bindings,
            text=qwen3_5.text_of,
            left_out=QWEN3_5_LEFT_OUT,
        ),
        Family(
            "qwen3_5_text",
            qwen3_5_text.Config.parse,
            qwen3_5_text.plan,
            qwen3_5_text.bindings,
            left_out=QWEN3_5_LEFT_OUT,
        ),
        Family("lfm3", lfm3.Config.parse, lfm3.plan, lfm3.bindings),
        Family("lfm2_moe", lfm2_moe.parse, lfm2.plan, lfm2.bindings),
    )
}


WITH_EXPERTS = ("granitemoehybrid", "lfm2_moe")


def family_of(config: Mapping[str, Any]) -> Family:
    """Return the family of a config.json. Raises FamilyError with the supported ones, or with what to use instead."""
    if why := unread(config):
        raise FamilyError(f"config.json: {why}")
    name = config.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        if (unbuilt := named(name)) is not None:
            raise FamilyError(f"config.json: model_type is {name!r}: {unbuilt.why(FAMILIES)}")
        experts = isinstance(name, str) and ("moe" in name or "mixtral" in name)
        why = f", whose experts ssmd does not have; it has those of {' and '.join(WITH_EXPERTS)}" if experts else ""
        raise FamilyError(f"config.json: model_type is {name!r}{why}; supported: {', '.join(sorted(FAMILIES))}")
    return FAMILIES[name]
