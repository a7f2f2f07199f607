"""Grouped-query attention (arXiv:2305.13245): its sizes in a config.json, its bindings and its state.

Parameters, (out, in): q, k, v, o, and *_bias where the config has biases. Scores are plain products of q and k: their
scale, 1/sqrt(D) in most families, stands in q.

Glossary: D head_dim; G key/value heads, each read by R = heads / G query heads.
"""

from __future__ import annotations

from dataclasses import dataclass

from ssmd.families.fields import Fields, divides
from ssmd.families.weights import Binding, tensor
from ssmd.model.state import TensorSpec


@dataclass(frozen=True)
class Attention:
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    bias: bool

    @property
    def each(self) -> int:
        """R."""
        return self.heads // self.kv_heads

    @staticmethod
    def parse(f: Fields, kv_heads: int | None = None) -> Attention:
        """`kv_heads` is the family's default for a config without the field (null always means as many as heads).

        Raises FamilyError naming the field.
        """
        hidden, heads = f.size("hidden_size"), f.size("num_attention_heads")
        unsaid = heads if kv_heads is None or "num_key_value_heads" in f.config else kv_heads
        groups = f.size("num_key_value_heads", unsaid)
        divides(groups, heads, "num_key_value_heads", "num_attention_heads")
        if f.get("head_dim") is None:
            head_dim = divides(heads, hidden, "num_attention_heads", "hidden_size")
        else:
            head_dim = f.size("head_dim")
        return Attention(hidden, heads, groups, head_dim, f.flag("attention_bias", False))

    def state(self, layer: int, kv_dtype: str) -> tuple[TensorSpec, ...]:
        """key and value of `layer`."""
        shape = (self.kv_heads, self.head_dim)
        return (
            TensorSpec(f"key_{layer}", "key", layer, shape, kv_dtype),
            TensorSpec(f"value_{layer}", "value", layer, shape, kv_dtype),
        )

    def bindings(
        self, source: str, *, q: float, k: float = 1.0, o: float = 1.0, into: float = 1.0
    ) -> dict[str, Binding]:
        """From the tensors `source`{q,k,v,o}_proj. Factors on what q, k and o give, and on what q, k and v are given
        (`into`, which no bias sees)."""
        rows, groups = self.heads * self.head_dim, self.kv_heads * self.head_dim
        made: dict[str, Binding] = {}
        for name, height, width, scale, before in (
            ("q", rows, self.hidden, q, into),
            ("k", groups, self.hidden, k, into),
            ("v", groups, self.hidden, 1.0, into),
            ("o", self.hidden, rows, o, 1.0),
        ):
            made[name] = tensor(f"{source}{name}_proj.weight", height, width, scale=scale * before)
            if self.bias:
                made[name + "_bias"] = tensor(f"{source}{name}_proj.bias", height, scale=scale)
        return made
