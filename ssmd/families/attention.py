"""Grouped-query attention (arXiv:2305.13245): its sizes in a config.json and its bindings.

Parameters, (out, in): q, k, v, o, and *_bias where the config has biases. Scores are plain products of q and k. Their
scale, 1/sqrt(D) in most families, is a factor in q.
"""

from __future__ import annotations

from ssmd.families.fields import Fields, divides
from ssmd.families.rope import rope_of
from ssmd.families.weights import Binding, tensor
from ssmd.model.plan import Attention
from ssmd.model.rope import Rope


def attention_of(
    f: Fields,
    max_position: int,
    kv_heads: int | None = None,
    *,
    theta: float = 10_000.0,
    partial: float | None = None,
    qk_eps: float | None = None,
) -> tuple[Attention, Rope]:
    """Read attention with RoPE from a config.json. Raises FamilyError naming the field.

    kv_heads: as in `without_rope`. max_position, theta, partial: as in `rope_of`.
    """
    plain = without_rope(f, kv_heads)
    rope, rotated = rope_of(f, plain.head_dim, max_position, theta, partial)
    return plain.model_copy(update={"rotated": rotated, "qk_eps": qk_eps}), rope


def without_rope(f: Fields, kv_heads: int | None = None) -> Attention:
    """Read attention without positions from a config.json. Raises FamilyError naming the field.

    kv_heads: the family's default for a config without the field; null always means as many as heads.
    """
    heads = f.size("num_attention_heads")
    unsaid = heads if kv_heads is None or "num_key_value_heads" in f.config else kv_heads
    groups = f.size("num_key_value_heads", unsaid)
    divides(groups, heads, "num_key_value_heads", "num_attention_heads")
    if f.get("head_dim") is None:
        head_dim = divides(heads, f.size("hidden_size"), "num_attention_heads", "hidden_size")
    else:
        head_dim = f.size("head_dim")
    bias = f.flag("attention_bias", False)
    return Attention(heads=heads, kv_heads=groups, head_dim=head_dim, bias=bias, qk_eps=None, rotated=0)


def attention(
    a: Attention, hidden: int, source: str, *, q: float, k: float = 1.0, o: float = 1.0, into: float = 1.0
) -> dict[str, Binding]:
    """Bind q, k, v and o to the tensors `source`{q,k,v,o}_proj.

    q, k, o: factors on their outputs. into: factor on the input of q, k and v, which does not apply to biases.
    """
    rows, groups = a.heads * a.head_dim, a.kv_heads * a.head_dim
    made: dict[str, Binding] = {}
    for name, height, width, scale, before in (
        ("q", rows, hidden, q, into),
        ("k", groups, hidden, k, into),
        ("v", groups, hidden, 1.0, into),
        ("o", hidden, rows, o, 1.0),
    ):
        made[name] = tensor(f"{source}{name}_proj.weight", height, width, scale=scale * before)
        if a.bias:
            made[name + "_bias"] = tensor(f"{source}{name}_proj.bias", height, scale=scale)
    return made
