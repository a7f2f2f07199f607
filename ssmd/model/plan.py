"""A plan: a model's layers with their mixers and MLPs. State and parameters follow from their sizes.

A family makes it from a config.json. The code that authors, packs or runs a model executes it. Matrices are (out, in).
Parameters are embedding, norm, head unless tied, and for each layer i `layer{i}_` +
    norm1, norm2              (hidden,): norms of the mixers' and the MLP's input; `norm` where there is only one
    in, out, x, dt            projections of a recurrent mixer, with *_bias
    conv, conv_bias           (K, 1, C), (C,)
    A, D, dt_bias             Mamba-1: (N, C), (C,), (C,); Mamba-2: (H,)
    gated_norm                (inner,)
    q, k, v, o                ((H or G) D, hidden), (hidden, H D), with *_bias; q_norm, k_norm (D,)
    gate_up, down             (2 I, hidden), (hidden, I), with *_bias; gate's rows come first; without a gate
    up, down                  (I, hidden), (hidden, I), with *_bias
    router, router_bias       (E, hidden), (E,)
    experts_gate, experts_up  (E, J, hidden)
    experts_down              (E, hidden, J)

Glossary: H heads, G key/value heads, D head_dim, N states, K conv width, C channels of a convolution, I intermediate,
R rotated values of a head, S context; E experts of J channels each.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)

from ssmd.model.rope import Rope
from ssmd.model.state import StateSpec, TensorSpec

MAX_BYTES = 4 << 20

Size = Annotated[int, Field(gt=0, le=1 << 24, strict=True)]
Width = Annotated[int, Field(ge=2, le=1 << 10, strict=True)]
Eps = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Shape = tuple[int, ...]


class PlanError(ValueError):
    """A plan that is invalid or cannot be read; the message names the field."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Mamba1(_Part):
    """Mamba's mixer (arXiv:2312.00752). mixer_eps: epsilon of FalconMamba's norms of dt's input, B and C."""

    kind: Literal["mamba1"] = "mamba1"
    inner: Size
    states: Size
    rank: Size
    width: Width
    conv_bias: bool
    bias: bool
    mixer_eps: Eps | None

    def state(self, layer: int, dtype: str) -> Iterator[TensorSpec]:
        """Name conv and ssm of `layer`, always float32."""
        yield TensorSpec(f"conv_{layer}", "conv", layer, (self.inner, self.width - 1))
        yield TensorSpec(f"ssm_{layer}", "ssm", layer, (self.inner, self.states))

    def parameters(self, hidden: int) -> Iterator[tuple[str, Shape]]:
        """Name its parameters with their shapes."""
        yield "in", (2 * self.inner, hidden)
        yield "x", (self.rank + 2 * self.states, self.inner)
        yield "dt", (self.inner, self.rank)
        yield "out", (hidden, self.inner)
        yield "conv", (self.width, 1, self.inner)
        yield "A", (self.states, self.inner)
        yield from ((name, (self.inner,)) for name in ("D", "dt_bias"))
        if self.conv_bias:
            yield "conv_bias", (self.inner,)
        if self.bias:
            yield "in_bias", (2 * self.inner,)
            yield "out_bias", (hidden,)


class Mamba2(_Part):
    """Mamba-2's mixer (arXiv:2405.21060, section 7).

    norm: position of the norm of the inner channels, in `groups` parts. dt is clamped to [dt_low, dt_high]; None is no
    bound.
    """

    kind: Literal["mamba2"] = "mamba2"
    heads: Size
    head_dim: Size
    states: Size
    groups: Size
    width: Width
    conv_bias: bool
    in_bias: bool
    out_bias: bool
    norm: Literal["none", "before the gate", "after the gate"]
    eps: Eps
    dt_low: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    dt_high: Number | None

    @model_validator(mode="after")
    def _divides(self) -> Mamba2:
        if self.heads % self.groups:
            raise ValueError(f"{self.groups} groups do not divide {self.heads} heads")
        return self

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: x, B, C."""
        return self.inner + 2 * self.groups * self.states

    @property
    def rows(self) -> int:
        """Rows of `in`: gate, conv input, dt."""
        return self.inner + self.channels + self.heads

    def state(self, layer: int, dtype: str) -> Iterator[TensorSpec]:
        """Name conv and ssm of `layer`, always float32."""
        yield TensorSpec(f"conv_{layer}", "conv", layer, (self.channels, self.width - 1))
        yield TensorSpec(f"ssm_{layer}", "ssm", layer, (self.heads, self.head_dim, self.states))

    def parameters(self, hidden: int) -> Iterator[tuple[str, Shape]]:
        """Name its parameters with their shapes."""
        yield "in", (self.rows, hidden)
        yield "out", (hidden, self.inner)
        yield "conv", (self.width, 1, self.channels)
        yield from ((name, (self.heads,)) for name in ("A", "D", "dt_bias"))
        if self.norm != "none":
            yield "gated_norm", (self.inner,)
        if self.conv_bias:
            yield "conv_bias", (self.channels,)
        if self.in_bias:
            yield "in_bias", (self.rows,)
        if self.out_bias:
            yield "out_bias", (hidden,)


class ShortConv(_Part):
    """LFM2's short gated convolution. Rows of `in` are B, gate, x."""

    kind: Literal["short_conv"] = "short_conv"
    channels: Size
    width: Width
    bias: bool

    def state(self, layer: int, dtype: str) -> Iterator[TensorSpec]:
        """Name conv of `layer`, always float32."""
        yield TensorSpec(f"conv_{layer}", "conv", layer, (self.channels, self.width - 1))

    def parameters(self, hidden: int) -> Iterator[tuple[str, Shape]]:
        """Name its parameters with their shapes."""
        yield "in", (3 * self.channels, hidden)
        yield "out", (hidden, self.channels)
        yield "conv", (self.width, 1, self.channels)
        if self.bias:
            yield "in_bias", (3 * self.channels,)
            yield "out_bias", (hidden,)
            yield "conv_bias", (self.channels,)


class Attention(_Part):
    """Grouped-query attention (arXiv:2305.13245): each key/value head is read by heads / kv_heads query heads.

    qk_eps: epsilon of the norms of queries and keys. rotated: number of first values of a head that take RoPE. Scores
    are plain products of q and k: their scale, 1/sqrt(D) in most families, is a factor in q or in q_norm.
    """

    kind: Literal["attention"] = "attention"
    heads: Size
    kv_heads: Size
    head_dim: Size
    bias: bool
    qk_eps: Eps | None
    rotated: Annotated[int, Field(ge=0, strict=True)]

    @model_validator(mode="after")
    def _divides(self) -> Attention:
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.kv_heads} key/value heads do not divide {self.heads} heads")
        if self.rotated % 2 or self.rotated > self.head_dim:
            raise ValueError(f"{self.rotated} of {self.head_dim} values of a head cannot be rotated")
        return self

    @property
    def rows(self) -> int:
        """Rows of q, k and v together."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    def state(self, layer: int, dtype: str) -> Iterator[TensorSpec]:
        """Name key and value of `layer`, which are of `dtype`."""
        shape = (self.kv_heads, self.head_dim)
        yield TensorSpec(f"key_{layer}", "key", layer, shape, dtype)
        yield TensorSpec(f"value_{layer}", "value", layer, shape, dtype)

    def parameters(self, hidden: int) -> Iterator[tuple[str, Shape]]:
        """Name its parameters with their shapes."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        for name, rows, columns in (("q", queries, hidden), ("k", keys, hidden), ("v", keys, hidden)):
            yield name, (rows, columns)
            if self.bias:
                yield f"{name}_bias", (rows,)
        yield "o", (hidden, queries)
        if self.bias:
            yield "o_bias", (hidden,)
        if self.qk_eps is not None:
            yield from ((name, (self.head_dim,)) for name in ("q_norm", "k_norm"))


class Mlp(_Part):
    """An MLP. activation: "swiglu" (arXiv:2002.05202) is down(silu(gate) * up).

    "relu2" (arXiv:2109.08668), which has no gate, is down(relu(up)^2).
    """

    intermediate: Size
    bias: bool
    activation: Literal["swiglu", "relu2"] = "swiglu"

    @property
    def into(self) -> tuple[str, int]:
        """The projection that is activated, and its rows."""
        return ("gate_up", 2 * self.intermediate) if self.activation == "swiglu" else ("up", self.intermediate)

    def parameters(self, hidden: int) -> Iterator[tuple[str, Shape]]:
        """Name its parameters with their shapes."""
        name, rows = self.into
        yield name, (rows, hidden)
        yield "down", (hidden, self.intermediate)
        if self.bias:
            yield f"{name}_bias", (rows,)
            yield "down_bias", (hidden,)


class Experts(_Part):
    """A mixture of experts (arXiv:1701.06538): SwiGLU MLPs, of which each token takes the `chosen` best.

    Experts of equal score are taken in order of their numbers. A score is the router's product, or with `sigmoid` its
    sigmoid. bias: router_bias is added to scores for the choice alone. The chosen experts' outputs are weighed by the
    softmax of their scores; with `sigmoid` by the scores themselves, with `normed` over their sum + 1e-6.
    """

    count: Annotated[int, Field(ge=1, le=1 << 12, strict=True)]
    chosen: Annotated[int, Field(ge=1, strict=True)]
    intermediate: Size
    sigmoid: bool
    bias: bool
    normed: bool

    @model_validator(mode="after")
    def _are_enough(self) -> Experts:
        if self.chosen > self.count:
            raise ValueError(f"{self.chosen} experts of {self.count} cannot be chosen")
        return self

    def parameters(self, hidden: int) -> Iterator[tuple[str, Shape]]:
        """Name its parameters with their shapes."""
        yield "router", (self.count, hidden)
        if self.bias:
            yield "router_bias", (self.count,)
        yield from ((name, (self.count, self.intermediate, hidden)) for name in ("experts_gate", "experts_up"))
        yield "experts_down", (self.count, hidden, self.intermediate)


Mixer = Annotated[Mamba1 | Mamba2 | ShortConv | Attention, Field(discriminator="kind")]


class Layer(_Part):
    """A layer. Its mixers read the same normed input side by side. An MLP follows them, or is a layer alone.

    experts: in the MLP's place, or beside it as the shared part; both read the same normed input.
    """

    mixers: Annotated[tuple[Mixer, ...], Field(max_length=2)]
    mlp: Mlp | None
    experts: Experts | None = None

    @model_validator(mode="after")
    def _has_a_part(self) -> Layer:
        if not self.mixers and not self.followers:
            raise ValueError("a layer has neither a mixer nor an MLP")
        if self.experts is not None and self.mlp is not None and self.mlp.activation != "swiglu":
            raise ValueError(f"an MLP of {self.mlp.activation} cannot stand beside experts")
        return self

    @model_serializer(mode="wrap")
    def _written(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave experts out where there are none: such a layer is written as before there were any."""
        fields: dict[str, Any] = write(self)
        return {name: value for name, value in fields.items() if name != "experts" or value is not None}

    @property
    def followers(self) -> tuple[Mlp | Experts, ...]:
        """The MLP and the experts, as far as the layer has them."""
        return tuple(part for part in (self.mlp, self.experts) if part is not None)

    @property
    def norms(self) -> tuple[str, ...]:
        """The norms that the layer has, in order: the mixers' and the MLP's."""
        return ("norm1", "norm2") if self.mixers and self.followers else ("norm",)


class Plan(_Part):
    """A whole model. embedding_scale: factor on the embedding's rows.

    rope: makes the tables if a layer rotates its keys; None if they are in a file instead.
    """

    format: Literal[1] = 1
    hidden: Size
    vocabulary: Size
    eps: Eps
    embedding_scale: Number
    tied: bool
    rope: Rope | None = None
    layers: Annotated[tuple[Layer, ...], Field(min_length=1, max_length=1024)]

    @model_validator(mode="after")
    def _rotates_alike(self) -> Self:
        rotations = {m.rotated for m in self.mixers if isinstance(m, Attention)}
        if len(rotations) > 1:
            raise ValueError(f"layers rotate different numbers of values, {sorted(rotations)}")
        return self

    @property
    def mixers(self) -> tuple[Mamba1 | Mamba2 | ShortConv | Attention, ...]:
        """The mixers of all layers, in order."""
        return tuple(m for layer in self.layers for m in layer.mixers)

    @property
    def experts(self) -> tuple[Experts, ...]:
        """The mixtures of experts of all layers, in order."""
        return tuple(layer.experts for layer in self.layers if layer.experts is not None)

    @property
    def rotated(self) -> int:
        """The number of values of a head that RoPE rotates; 0 if no layer has it."""
        return max((m.rotated for m in self.mixers if isinstance(m, Attention)), default=0)

    def spec(self, dtype: str) -> StateSpec:
        """Return the spec of the model's state, with keys and values of `dtype`."""
        return StateSpec(
            tuple(t for i, layer in enumerate(self.layers) for m in layer.mixers for t in m.state(i, dtype))
        )

    def parameters(self) -> dict[str, Shape]:
        """Return every parameter's shape by name, in the order of the layers."""
        made: dict[str, Shape] = {"embedding": (self.vocabulary, self.hidden), "norm": (self.hidden,)}
        if not self.tied:
            made["head"] = (self.vocabulary, self.hidden)
        for i, layer in enumerate(self.layers):
            made |= dict.fromkeys((f"layer{i}_{name}" for name in layer.norms), (self.hidden,))
            for part in (*layer.mixers, *layer.followers):
                made |= {f"layer{i}_{name}": shape for name, shape in part.parameters(self.hidden)}
        return made

    def tables(self, context: int) -> tuple[NDArray[np.float32], NDArray[np.float32]] | None:
        """Compute RoPE's cosines and sines of the first `context` positions, each (S, R/2); None without RoPE."""
        return None if self.rope is None or not self.rotated else self.rope.tables(self.rotated, context)

    @classmethod
    def open(cls, file: Path) -> Self:
        """Read a plan from a JSON file. Raises PlanError, which names the invalid field."""
        if file.stat().st_size > MAX_BYTES:
            raise PlanError(f"{file} is larger than {MAX_BYTES} bytes")
        try:
            return cls.model_validate_json(file.read_bytes())
        except ValidationError as err:
            raise PlanError(f"{file}: {first_problem(err)}; build the artifact again") from err


def first_problem(err: ValidationError) -> str:
    """Return a line that names the first invalid field and its error."""
    first = err.errors()[0]
    where = ".".join(str(p) for p in first["loc"])
    what = str(first["ctx"]["error"]) if first["type"] == "value_error" else first["msg"]
    return f"{where}: {what}" if where else what
