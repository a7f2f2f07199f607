"""Builds wgpu artifacts: straight from a source checkpoint by numpy, in the memory of a layer, with no converter.

The plan follows from the family's config, the parameters from its bindings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from ssmd.build import quality
from ssmd.build.builder import BuildError, Quantization, planned
from ssmd.families import bamba, falcon_h1, granitemoehybrid, lfm2, llama, mamba, mamba2
from ssmd.families.mixer import Mamba2Mixer
from ssmd.families.registry import Family, family_of
from ssmd.families.rope import Rope
from ssmd.families.weights import Binding, mapped, stacked
from ssmd.machine.memory import return_big_blocks
from ssmd.machine.progress import Progress, staged
from ssmd.model.artifact import GOLDEN, Artifact, seal
from ssmd.model.source import Source
from ssmd.refit.install import checked_tokenizer, fields_of, placed, save_texts
from ssmd.runtime.verify import GOLDEN_POSITIONS, compare, golden_tokens, save_golden
from ssmd_wgpu import pack
from ssmd_wgpu.pack import Weights
from ssmd_wgpu.plan import FILE, Attention, Layer, Mamba1, Mamba2, Mixer, Plan, ShortConv, Swiglu
from ssmd_wgpu.reference import Reference

RECIPES = {
    "int8": {"weights": "int8, symmetric, a scale for each row; those of Mamba-1's dt, B and C float16"},
    "int4": {
        "weights": "int4, symmetric, a scale for 32 values; embedding and head int8, Mamba-1's dt, B and C float16"
    },
}


class WgpuConverter:
    """What `ssmd build` asks of a runtime. `build` is the whole of it: there is no module to convert."""

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
        """As `ssmd.build.builder.build`."""
        if out.exists() and not replace:
            raise BuildError(f"{out} exists already; remove it, replace it or choose another name")
        return_big_blocks()
        family = family_of(source.config)
        config = family.parse(source.config)
        asked = planned(self, family, config, quantization, buckets, tiers or None)
        plan = plan_of(family, config, asked.context)
        tokenizer = checked_tokenizer(source, config.vocabulary)

        def stage(what: str) -> AbstractContextManager[None]:
            return staged(progress, what)

        with placed(out) as made:
            with stage("hash the source"):
                lineage = source.lineage
            save_texts(source, made)
            (made / FILE).write_text(plan.model_dump_json(indent=1) + "\n")
            rows = rows_of(family, config, plan, source)
            with stage("pack the weights"):
                shapes = plan.parameters()
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
                recipe=RECIPES.get(asked.quantization, {}),
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


def plan_of(family: Family, config: Any, context: int) -> Plan:
    """Raises BuildError for a family without a plan."""
    made = _PLANS.get(type(config))
    if made is None:
        raise BuildError(f"runtime wgpu has no plan of family {family.name!r}; build it for litert or openvino")
    layers, scale = made(config)
    for layer in layers:
        for mixer in layer.mixers:
            if isinstance(mixer, Attention) and mixer.head_dim % 2:
                raise BuildError(f"head_dim {mixer.head_dim} is odd; runtime wgpu keeps keys and values in pairs")
    return Plan(
        hidden=config.hidden,
        vocabulary=config.vocabulary,
        eps=config.eps,
        embedding_scale=scale,
        tied=config.tied,
        context=context,
        layers=layers,
    )


Made = tuple[tuple[Layer, ...], float]  # layers, and the factor on the embedding


def _mamba(c: mamba.Config) -> Made:
    mixer = Mamba1(
        inner=c.inner,
        states=c.states,
        rank=c.rank,
        width=c.conv,
        conv_bias=c.conv_bias,
        bias=c.proj_bias,
        mixer_eps=c.mixer_eps,
    )
    return (Layer(mixers=(mixer,), mlp=None),) * c.layers, 1.0


def _mixer(m: Mamba2Mixer) -> Mamba2:
    low, high = m.time_step_limit
    return Mamba2(
        heads=m.heads,
        head_dim=m.head_dim,
        states=m.d_state,
        groups=m.groups,
        width=m.d_conv,
        conv_bias=m.conv_bias,
        in_bias=m.in_bias,
        out_bias=m.out_bias,
        norm=m.norm,
        eps=m.eps,
        dt_low=low,
        dt_high=None if math.isinf(high) else high,
    )


def _mamba2(c: mamba2.Config) -> Made:
    return (Layer(mixers=(_mixer(c.mixer),), mlp=None),) * c.layers, 1.0


def _attention(c: Any, rope: Rope | None, bias: bool, qk_eps: float | None = None) -> Attention:
    """`c` has heads, kv_heads and head_dim."""
    return Attention(
        heads=c.heads,
        kv_heads=c.kv_heads,
        head_dim=c.head_dim,
        bias=bias,
        qk_eps=qk_eps,
        rotated=0 if rope is None else rope.rotated(c.head_dim),
    )


def _llama(c: llama.Config) -> Made:
    attention = _attention(c, c.rope, c.attention_bias, c.eps if c.qk_norm else None)
    mlp = Swiglu(intermediate=c.intermediate, bias=c.mlp_bias)
    return (Layer(mixers=(attention,), mlp=mlp),) * c.layers, 1.0


def _granite(c: granitemoehybrid.Config) -> Made:
    mlp = Swiglu(intermediate=c.intermediate, bias=False)
    kinds: dict[str, Mixer] = {
        "mamba": _mixer(c.mixer),
        "attention": _attention(c.attention, c.rope, c.attention.bias),
    }
    return tuple(Layer(mixers=(kinds[kind],), mlp=mlp) for kind in c.layers), c.embedding_multiplier


def _bamba(c: bamba.Config) -> Made:
    mlp = Swiglu(intermediate=c.intermediate, bias=c.mlp_bias)
    kinds: dict[str, Mixer] = {
        "mamba": _mixer(c.mixer),
        "attention": _attention(c.attention, c.rope, c.attention.bias),
    }
    return tuple(Layer(mixers=(kinds[kind],), mlp=mlp) for kind in c.layers), 1.0


def _falcon_h1(c: falcon_h1.Config) -> Made:
    mixers = (_mixer(c.mixer), _attention(c.attention, c.rope, c.attention.bias))
    return (Layer(mixers=mixers, mlp=Swiglu(intermediate=c.intermediate, bias=c.mlp_bias)),) * c.layers, 1.0


def _lfm2(c: lfm2.Config) -> Made:
    mlp = Swiglu(intermediate=c.intermediate, bias=False)
    kinds: dict[str, Mixer] = {
        "conv": ShortConv(channels=c.hidden, width=c.conv, bias=c.conv_bias),
        "attention": _attention(c, c.rope, False, c.eps),
    }
    return tuple(Layer(mixers=(kinds[kind],), mlp=mlp) for kind in c.layers), 1.0


_PLANS: dict[type, Callable[[Any], Made]] = {
    mamba.Config: _mamba,
    mamba2.Config: _mamba2,
    llama.Config: _llama,
    granitemoehybrid.Config: _granite,
    bamba.Config: _bamba,
    falcon_h1.Config: _falcon_h1,
    lfm2.Config: _lfm2,
}


def rows_of(family: Family, config: Any, plan: Plan, source: Source) -> dict[str, pack.Rows]:
    """Of every parameter of the plan its rows, block by block, made when they are asked for."""
    bound = {**family.bindings(config), **family.tables(config, plan.context)}
    made: dict[str, Binding] = {}
    for name in plan.parameters():
        prefix, own = _split(name)
        if own == "norm1" and prefix + own not in bound:
            made[name] = bound[prefix + "norm"]
        elif own in ("qkv", "qkv_bias"):
            made[name] = stacked(*(bound[prefix + part + own[3:]] for part in "qkv"))
        elif own == "conv":
            made[name] = mapped(lambda w: np.ascontiguousarray(w[:, 0].T), bound[name])  # (K, 1, C) -> (C, K)
        elif own == "A" and isinstance(config, mamba.Config):
            made[name] = mapped(lambda a: np.ascontiguousarray(a.T), bound[name])  # (N, C) -> (C, N)
        else:
            made[name] = bound[name]

    def rows(binding: Binding) -> Iterator[np.ndarray[Any, np.dtype[np.float32]]]:
        return binding.blocks(source)

    return {name: partial(rows, binding) for name, binding in made.items()}


def packed_rows(weights: Weights) -> dict[str, pack.Rows]:
    """The same of weights that are packed already."""
    return {name: partial(weights.rows, name) for name in (*weights.vectors, *weights.matrices)}


def _split(name: str) -> tuple[str, str]:
    """("layer3_", "in_bias") of "layer3_in_bias"."""
    if not name.startswith("layer"):
        return "", name
    layer, _, own = name.partition("_")
    return layer + "_", own
