"""Builds wgpu artifacts: straight from a source checkpoint by numpy, in the memory of a layer, with no converter.

The plan and the parameters' bindings are the family's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from ssmd.build import quality
from ssmd.build.builder import BuildError, Quantization, targeted
from ssmd.families.registry import Family, family_of
from ssmd.families.weights import Array, Binding, mapped, stacked
from ssmd.machine.memory import return_big_blocks
from ssmd.machine.progress import Progress, staged
from ssmd.model.artifact import GOLDEN, Artifact, seal
from ssmd.model.plan import Attention, GatedDeltaNet, Plan, first_problem
from ssmd.model.source import Source, Tensors
from ssmd.refit.install import checked_tokenizer, config_of, fields_of, placed, save_texts
from ssmd.runtime.verify import GOLDEN_POSITIONS, compare, golden_tokens, save_golden
from ssmd_wgpu import pack
from ssmd_wgpu.pack import Weights
from ssmd_wgpu.plan import FILE, PackedPlan, attention_rows
from ssmd_wgpu.reference import Reference

RECIPES = {
    "int8": {"weights": "int8, symmetric, a scale for each row; those of Mamba-1's dt, B and C float16"},
    "int4": {
        "weights": "int4, symmetric, a scale for 32 values; embedding and head int8, Mamba-1's dt, B and C float16"
    },
}


class WgpuConverter:
    """The converter for `ssmd build`. `build` does all the work: no module is converted."""

    runtime = "wgpu"
    device_class = "gpu"
    quantizations: tuple[Quantization, ...] = ("int8", "int4", "f16", "f32")
    buckets: tuple[int, ...] | None = (64, 256)  # a product's tile is of 32 tokens or more: fewer take as long
    most_tokens: int | None = 256
    context = 8192
    tiers: tuple[int, ...] = ()  # a step attends over the rows that there are

    def build(
        self,
        source: Source,
        out: Path,
        *,
        name: str,
        quantization: Quantization | None = None,
        buckets: Sequence[int] | None = None,
        tiers: Sequence[int] | None = None,
        replace: bool = False,
        progress: Progress = lambda line: None,
    ) -> Artifact:
        """Build an artifact, as `ssmd.build.builder.build` does."""
        if out.exists() and not replace:
            raise BuildError(f"{out} exists already; remove it, replace it or choose another name")
        return_big_blocks()
        family = family_of(source.config)
        config = config_of(family, source, progress)
        asked = targeted(self, family, config, quantization, buckets, tiers or None)
        plan = packed_plan(family, config, asked.context)
        tokenizer = checked_tokenizer(source, config.vocabulary)

        def stage(what: str) -> AbstractContextManager[None]:
            return staged(progress, what)

        with placed(out) as made:
            with stage("hash the source"):
                lineage = source.lineage
            save_texts(source, made)
            described = plan.model_dump_json(indent=1, exclude={"rope"}) + "\n"  # its tables are weights
            (made / FILE).write_bytes(described.encode())
            rows = rows_of(family, config, plan, source)
            with stage("pack the weights"):
                shapes = plan.packed()
                formats = {n: pack.format_of(n, asked.quantization) for n, s in shapes.items() if pack.is_matrix(n, s)}
                try:
                    pack.write(made / pack.FILE, shapes, rows, formats)
                except pack.PackError as err:
                    raise BuildError(str(err)) from err
            with stage("compute golden values"):
                tokens = golden_tokens(tokenizer)
                logits = Reference(plan, rows).logits(tokens, GOLDEN_POSITIONS)
                if not np.isfinite(logits).all():
                    raise BuildError("the model's logits are not finite: its weights or its config are damaged")
                save_golden(made / GOLDEN, tokens, logits)
            lost = {}
            if asked.quantization != "f32":
                with stage("compare with the weights as they were"):
                    packed = Reference(plan, packed_rows(Weights(made / pack.FILE, shapes)))
                    text = tokenizer.encode(quality.TEXT)[: min(quality.MAX_TOKENS, plan.context)]
                    steps = [
                        compare(p, "prefill", *pair)
                        for p, *pair in zip(
                            GOLDEN_POSITIONS, packed.logits(tokens, GOLDEN_POSITIONS), logits, strict=True
                        )
                    ]
                    found, true = (r.logits(text, range(len(text))) for r in (packed, Reference(plan, rows)))
                    lost = quality.summed(steps, found, true, text)
            fields = fields_of(
                family,
                config,
                name=name,
                lineage=lineage,
                runtime=self.runtime,
                device_class=self.device_class,
                quantization=asked.quantization,
                recipe=recipe_of(plan, asked.quantization),
                conversion={},
                buckets=asked.buckets,
                tiers=asked.tiers[-1:],
                builders={"ssmd-daemon": version("ssmd-daemon")},
                special_tokens=source.special_tokens,
                stop_tokens=source.stop_tokens,
            )
            with stage("hash the artifact"):
                seal(made, fields | ({"quality": lost} if lost else {}))
        return Artifact.open(out)


CONVERTER = WgpuConverter()


def recipe_of(plan: Plan, quantization: str) -> dict[str, str]:
    """Describe the formats of the weights; empty where all have one format."""
    made = dict(RECIPES.get(quantization, {}))
    if quantization != "f32" and any(isinstance(m, GatedDeltaNet) for m in plan.mixers):
        made["weights"] = f"{made.get('weights', quantization)}; those of gated DeltaNet's b and a float32"
    if quantization != "f32" and plan.experts:
        made["weights"] = f"{made.get('weights', quantization)}; those of routers float32"
    return made


def packed_plan(family: Family, config: Any, context: int) -> PackedPlan:
    """Make the plan.json of a config. Raises FamilyError or, where the shaders cannot run such a model, BuildError."""
    plan = family.plan(config)
    try:
        return PackedPlan.model_validate({**dict(plan), "context": context})
    except ValidationError as err:
        raise BuildError(f"{first_problem(err)}; build it for litert or openvino") from err


def rows_of(family: Family, config: Any, plan: PackedPlan, source: Source) -> dict[str, pack.Rows]:
    """Make the rows of everything in the file of weights, block by block, when they are asked for."""
    bound = {**family.bindings(config), **family.tables(config, plan.context)}
    made: dict[str, Binding] = {}
    for name in plan.packed():
        prefix, own = _split(name)
        if own in ("norm1", "norm2") and name not in bound:
            made[name] = bound[prefix + "norm"]
        elif own in ("qkv", "qkv_bias"):
            parts = next(attention_rows(m)[0] for m in plan.layers[_layer(prefix)].mixers if isinstance(m, Attention))
            made[name] = stacked(*(bound[prefix + part + own[3:]] for part in parts))
        elif own == "experts_gate_up":
            made[name] = beside(bound[prefix + "experts_gate"], bound[prefix + "experts_up"])
        elif own == "experts_down":
            made[name] = mapped(_flat, bound[name], by_rows=True)
        elif own == "conv":
            made[name] = mapped(lambda w: np.ascontiguousarray(w[:, 0].T), bound[name])  # (K, 1, C) -> (C, K)
        elif own == "A":
            made[name] = mapped(lambda a: np.ascontiguousarray(a.T), bound[name])  # Mamba-1's (N, C) -> (C, N)
        else:
            made[name] = bound[name]

    def rows(binding: Binding) -> Iterator[np.ndarray[Any, np.dtype[np.float32]]]:
        return binding.blocks(source)

    return {name: partial(rows, binding) for name, binding in made.items()}


def beside(gate: Binding, up: Binding) -> Binding:
    """Return the binding of experts' rows of gate and of up, one expert after the other. Both are (E, J, hidden)."""

    def blocks(source: Tensors) -> Iterator[Array]:
        singly = (_experts(part.blocks(source)) for part in (gate, up))
        for pair in zip(*singly, strict=True):
            yield np.concatenate(pair)

    def whole(source: Tensors) -> Array:
        return np.concatenate(list(blocks(source)))

    return Binding(whole, blocks, {**gate.reads, **up.reads})


def _experts(blocks: Iterator[Array]) -> Iterator[Array]:
    """Yield the matrix of each expert, of blocks of several."""
    for block in blocks:
        yield from block


def _flat(experts: Array) -> Array:
    """Return the rows of some experts, (n, rows, columns) -> (n rows, columns)."""
    return experts.reshape(-1, experts.shape[-1])


def packed_rows(weights: Weights) -> dict[str, pack.Rows]:
    """Read the rows of weights that are packed already, block by block."""
    return {name: partial(weights.rows, name) for name in (*weights.vectors, *weights.matrices)}


def _layer(prefix: str) -> int:
    """Return 3 for "layer3_"."""
    return int(prefix.removeprefix("layer").removesuffix("_"))


def _split(name: str) -> tuple[str, str]:
    """Split "layer3_in_bias" into "layer3_" and "in_bias"."""
    if not name.startswith("layer"):
        return "", name
    layer, _, own = name.partition("_")
    return layer + "_", own
