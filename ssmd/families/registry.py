"""The supported families, by the `model_type` of config.json."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
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
    llama,
    mamba,
    mamba2,
    nemotron_h,
    qwen3,
)
from ssmd.families.fields import FamilyError, Recorded
from ssmd.families.neutral import NEUTRAL, check
from ssmd.families.unbuilt import named
from ssmd.families.weights import Binding, given
from ssmd.model.formats import unread
from ssmd.model.plan import Plan, first_problem


@dataclass(frozen=True)
class Family:
    """The functions of a family. Its config is a dataclass of its own, with `vocabulary` and `max_position`."""

    name: str
    read: Callable[[Mapping[str, Any]], Any]
    describe: Callable[[Any], Plan]
    bindings: Callable[[Any], dict[str, Binding]]
    buckets: tuple[int, ...] = (16, 64, 256)  # prefill lengths in tokens, unless others are asked for

    def parse(self, config: Mapping[str, Any]) -> Any:
        """Read a config.json as the family's own config. Raises FamilyError naming the field."""
        check(config)
        with _said():
            return self.read(config)

    def unread(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the names of set fields of a config.json that are not read and not known to have no effect."""
        recorded = Recorded(config)
        self.parse(recorded)
        known = recorded.asked | NEUTRAL[self.name]
        return tuple(sorted(name for name, value in config.items() if value is not None and name not in known))

    def plan(self, config: Any) -> Plan:
        """Describe the model of a config: layers, state, parameters. Raises FamilyError if it is not possible."""
        with _said():
            plan = self.describe(config)
            plan.spec("float32")  # which MLPs alone do not make
            with np.errstate(all="ignore"):
                tables = plan.tables(2) or ()
            if not all(np.isfinite(table).all() for table in tables):
                raise FamilyError("config.json: the numbers of RoPE are too large or too small to compute with")
        return plan

    def tables(self, config: Any, context: int) -> dict[str, Binding]:
        """Return bindings of the tables that a graph for `context` tokens holds beside its parameters.

        With RoPE these are `rope_cos` and `rope_sin`, (context, R/2); without it there are none.
        """
        plan = self.plan(config)
        if plan.rope is None or not plan.rotated:
            return {}
        rope, rotated = plan.rope, plan.rotated
        return {
            "rope_cos": given(lambda: rope.tables(rotated, context)[0]),
            "rope_sin": given(lambda: rope.tables(rotated, context)[1]),
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
