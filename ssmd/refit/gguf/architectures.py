"""The architectures of GGUF files that are served: a config.json from the metadata, and transformers' tensor names.

llama.cpp's converter changes some tensors; what it did is undone here. Its functions, of `conversion/` in
https://github.com/ggml-org/llama.cpp:
    LlamaModel.permute               rows of q and k: the two rotated halves of a head are interleaved
    MambaModel, Mamba2Model          A = -exp(A_log), the convolution's middle axis is gone; of Mamba-2, A and D have
                                     a column, the norm is cut into groups
    GraniteMoeModel.modify_tensors   input_linear is cut into gate and up
    FalconH1Model.modify_tensors     all multipliers are in the weights: they are 1 here
    generate_extra_tensors           RoPE of Llama 3 as a table of divisors, rope_freqs.weight
Fields that no entry here reads, and that are set, are refused by name: they may change the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ssmd.model.gguf import GGUF, shown
from ssmd.model.rope import Llama3Scaling
from ssmd.model.source import SourceError

MAX_LAYERS = 4096
MIN_NUMBER, MAX_NUMBER = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
# Fields without effect here: what llama.cpp itself needs, or what only another field would bring into use.
NEUTRAL = {
    *("vocab_size", "attention.layer_norm_epsilon", "expert_used_count", "expert_group_count"),
    *("expert_group_used_count", "rope.scaling.original_context_length", "rope.scaling.finetuned"),
}
ROPE_FREQS = "rope_freqs.weight"
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}  # of all published models
_ORIGINAL = tuple(1 << n for n in range(5, 21))  # contexts before Llama 3's scaling that are tried


@dataclass(frozen=True)
class Form:
    """The way a tensor is stored. heads: its rows are permuted within so many heads; 0: they are not.

    exp: it is -exp of the source's tensor. shape: makes the source's shape of the stored one.
    """

    heads: int = 0
    exp: bool = False
    shape: Callable[[tuple[int, ...]], tuple[int, ...]] = lambda shape: shape


PLAIN = Form()
CONV = Form(shape=lambda shape: (shape[0], 1, *shape[1:]))  # (C, K) -> (C, 1, K)
FLAT = Form(shape=lambda shape: (math.prod(shape),))  # (H, 1) -> (H,)
Names = dict[str, tuple[str, Form]]  # a layer's stored names, after blk.N. : the source's, after its layer's prefix


@dataclass
class Metadata:
    """A file's fields below its architecture's name. asked: those that were read."""

    read: GGUF
    architecture: str
    asked: set[str] = field(default_factory=set)

    def get(self, name: str) -> Any:
        self.asked.add(name)
        return self.read.fields.get(f"{self.architecture}.{name}")

    def size(self, name: str, default: int | None = None) -> int:
        """Read a whole number of at least 1. Raises SourceError."""
        value = self.get(name)
        value = default if value is None else value
        if type(value) is not int or not 1 <= value < 1 << 31:
            raise self.wrong(name, value, "a whole number of at least 1")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Read a positive number, with the fewest digits of its float32; 0 means the default. Raises SourceError."""
        value = self.get(name) or default
        if isinstance(value, bool) or not isinstance(value, int | float) or not MIN_NUMBER <= value <= MAX_NUMBER:
            raise self.wrong(name, value, "a positive number")
        return float(str(np.float32(value)))

    def layered(self, name: str, layers: int) -> list[int]:
        """Read a whole number of each layer, 0 or more; one number is that of all layers. Raises SourceError."""
        value = self.get(name)
        every = value if isinstance(value, list) else [value] * layers
        if len(every) != layers or not all(type(n) is int and 0 <= n < 1 << 31 for n in every):
            raise self.wrong(name, value, f"a whole number, or one for each of {layers} layers")
        return every

    def wrong(self, name: str, value: object, expected: str) -> SourceError:
        said = "missing" if value is None else repr(value)[:60]
        return SourceError(f"{self.read.file}: {self.architecture}.{name} is {said}, expected {expected}")

    def has(self, name: str) -> bool:
        """Return True if the file has a tensor of this name, after blk.N. in any layer."""
        return any(n == name or (n.startswith("blk.") and n.split(".", 2)[-1] == name) for n in self.read.listed)

    def unknown(self) -> list[str]:
        """Return set fields of the architecture that were not read."""
        prefix = f"{self.architecture}."
        fields = ((n.removeprefix(prefix), v) for n, v in self.read.fields.items() if n.startswith(prefix))
        return sorted(n for n, v in fields if v and n not in self.asked | NEUTRAL)


@dataclass(frozen=True)
class Architecture:
    """One architecture. config: makes config.json. names: of its tensors. layer: the prefix of a layer's tensors."""

    config: Callable[[Metadata], dict[str, Any]]
    names: Callable[[Mapping[str, Any]], Names]
    top: Mapping[str, str]
    layer: str = "model.layers."


def _common(m: Metadata) -> dict[str, Any]:
    """Return what the configs of all architectures have."""
    embedding = m.read.listed.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise SourceError(f"{m.read.file} has no matrix token_embd.weight: it is not a whole model")
    layers = m.size("block_count")
    if layers > MAX_LAYERS:
        raise m.wrong("block_count", layers, f"at most {MAX_LAYERS}")
    for unused in ("context_length", "feed_forward_length", "attention.head_count"):  # by some architectures
        m.get(unused)
    if m.get("attention.causal") is False:
        raise m.wrong("attention.causal", False, "true: the model reads its texts whole, and cannot answer")
    return {
        "hidden_size": m.size("embedding_length"),
        "num_hidden_layers": layers,
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in m.read.listed,
    }


def _attention(m: Metadata, hidden: int, layers: int) -> tuple[dict[str, Any], list[bool]]:
    """Return the fields of attention, and for each layer True if it has attention."""
    several = {n for n in m.layered("attention.head_count", layers) if n}
    if len(several) != 1:
        raise m.wrong("attention.head_count", m.get("attention.head_count"), "one number of heads in all layers")
    heads = several.pop()
    each = m.layered("attention.head_count_kv", layers) if m.get("attention.head_count_kv") is not None else None
    groups = {n for n in each or [heads] if n}
    if len(groups) != 1:
        raise m.wrong("attention.head_count_kv", each, "one number of heads in all layers with attention")
    head_dim = m.size("attention.key_length", max(1, hidden // heads))
    if m.size("attention.value_length", head_dim) != head_dim:
        raise m.wrong("attention.value_length", m.get("attention.value_length"), f"{head_dim}, as key_length")
    fields = {"num_attention_heads": heads, "num_key_value_heads": groups.pop(), "head_dim": head_dim}
    return fields | {"attention_bias": m.has("attn_q.bias")}, [bool(n) for n in each or [heads] * layers]


def _rope(m: Metadata, head_dim: int) -> dict[str, Any]:
    """Return `rope_parameters` and the model's context. Raises SourceError if RoPE is of an unsupported kind."""
    if m.size("rope.dimension_count", head_dim) != head_dim:
        raise m.wrong("rope.dimension_count", m.get("rope.dimension_count"), f"{head_dim}, all of a head")
    context = m.size("context_length")
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": m.number("rope.freq_base", 10_000.0)}
    kind = m.get("rope.scaling.type") or "none"
    if kind in ("linear", "yarn"):
        rope |= {"rope_type": kind, "factor": m.number("rope.scaling.factor")}
    elif kind != "none":
        raise m.wrong("rope.scaling.type", kind, "none, linear or yarn")
    if kind == "yarn":
        rope["original_max_position_embeddings"] = m.size("rope.scaling.original_context_length")
    if ROPE_FREQS in m.read.listed:
        if kind != "none":
            raise SourceError(f"{m.read.file} has {ROPE_FREQS} beside rope.scaling.type = {shown(kind)}")
        rope |= _llama3(m, rope["rope_theta"], head_dim)
    return {"rope_parameters": rope, "max_position_embeddings": context}


def _llama3(m: Metadata, theta: float, head_dim: int) -> dict[str, Any]:
    """Return the parameters of Llama 3's RoPE that make the file's table of divisors. Raises SourceError.

    The table has no parameters: those that published models have are tried.
    """
    entry = m.read.listed[ROPE_FREQS]
    said = "is not a table of Llama 3's RoPE; other tables are not supported"
    unread = SourceError(f"{m.read.file}: {ROPE_FREQS} {said}")
    if entry.shape != (head_dim // 2,):  # before as many frequencies are computed
        raise unread
    divisors = m.read.rows(ROPE_FREQS, 0, head_dim // 2)
    factor = float(str(np.float32(divisors.max())))
    periods = np.float32(theta) ** (np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim))  # (D/2,)
    for original in _ORIGINAL if math.isfinite(factor) and factor > 1 else ():
        scaling = Llama3Scaling(factor, _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"], original)
        if np.allclose(1 / periods / scaling.frequencies(periods, theta), divisors, rtol=1e-4):
            return {
                "rope_type": "llama3",
                "factor": factor,
                **_LLAMA3,
                "original_max_position_embeddings": original,
            }
    raise unread


def _ssm(m: Metadata, hidden: int) -> tuple[int, int, int]:
    """Return inner channels, heads and `expand` of Mamba-2. Raises SourceError."""
    inner, heads = m.size("ssm.inner_size"), m.size("ssm.time_step_rank")
    if inner % heads:
        raise m.wrong("ssm.inner_size", inner, f"a multiple of ssm.time_step_rank = {heads}")
    return inner, heads, inner // hidden


def _whole(m: Metadata, inner: int, hidden: int) -> None:
    if inner % hidden:
        raise m.wrong("ssm.inner_size", inner, f"a multiple of embedding_length = {hidden}")


def _llama(m: Metadata, family: str) -> dict[str, Any]:
    c = _common(m)
    attention, has = _attention(m, c["hidden_size"], c["num_hidden_layers"])
    if not all(has):
        raise m.wrong("attention.head_count_kv", m.get("attention.head_count_kv"), "attention in all layers")
    return (
        {"model_type": family, "hidden_act": "silu"}
        | c
        | attention
        | _rope(m, attention["head_dim"])
        | {
            "intermediate_size": m.size("feed_forward_length"),
            "rms_norm_eps": m.number("attention.layer_norm_rms_epsilon"),
        }
        | ({} if family == "qwen3" else {"mlp_bias": m.has("ffn_up.bias")})
    )


def _granite(m: Metadata) -> dict[str, Any]:
    """Read Granite, all layers of attention with RoPE, as a Granite 4 without a Mamba layer."""
    c = _llama(m, "granitemoehybrid")
    rotated = m.get("rope.scaling.finetuned") is not False  # as llama.cpp reads it for Granite
    for name in ("conv_kernel", "state_size", "group_count", "inner_size", "time_step_rank"):
        m.get(f"ssm.{name}")  # what remains of a hybrid's config without a Mamba layer
    if c["head_dim"] * c["num_attention_heads"] != c["hidden_size"]:
        raise m.wrong("attention.key_length", c["head_dim"], "embedding_length / attention.head_count")
    if c.pop("mlp_bias"):
        raise SourceError(f"{m.read.file} has biases in its MLPs, and ssmd's Granite has none")
    return (
        c
        | _scales(m, c["head_dim"])
        | {"layer_types": ["attention"] * c["num_hidden_layers"]}
        | {
            "position_embedding_type": "rope" if rotated else "nope",
            "mamba_n_heads": 1,  # of no layer; the default does not fit every width
            "shared_intermediate_size": m.size("expert_shared_feed_forward_length", c["intermediate_size"]),
        }
    )


def _scales(m: Metadata, head_dim: int) -> dict[str, Any]:
    """Return Granite's multipliers; without a field llama.cpp takes these defaults."""
    return {
        "num_local_experts": 0,
        "embedding_multiplier": m.number("embedding_scale", 1.0),
        "residual_multiplier": m.number("residual_scale", 1.0),
        "attention_multiplier": m.number("attention.scale", head_dim**-0.5),
        "logits_scaling": m.number("logit_scale", 1.0),
    }


def _granite_hybrid(m: Metadata) -> dict[str, Any]:
    c = _common(m)
    hidden = c["hidden_size"]
    attention, has = _attention(m, hidden, c["num_hidden_layers"])
    if m.get("rope.scaling.finetuned") is not False:
        expected = "false: hybrids with RoPE, such as Bamba, are not read from GGUF"
        raise m.wrong("rope.scaling.finetuned", m.get("rope.scaling.finetuned"), expected)
    inner, heads, expand = _ssm(m, hidden)
    _whole(m, inner, hidden)
    for name in ("rope.freq_base", "rope.dimension_count"):
        m.get(name)  # nothing is rotated
    intermediate = m.size("expert_shared_feed_forward_length", m.get("feed_forward_length"))
    return (
        {"model_type": "granitemoehybrid", "hidden_act": "silu"}
        | c
        | attention
        | _scales(m, attention["head_dim"])
        | {
            "layer_types": ["attention" if a else "mamba" for a in has],
            "position_embedding_type": "nope",
            "max_position_embeddings": m.size("context_length"),
            "shared_intermediate_size": intermediate,
            "intermediate_size": intermediate,
            "rms_norm_eps": m.number("attention.layer_norm_rms_epsilon"),
            "mamba_n_heads": heads,
            "mamba_d_head": inner // heads,
            "mamba_d_state": m.size("ssm.state_size"),
            "mamba_n_groups": m.size("ssm.group_count", 1),
            "mamba_d_conv": m.size("ssm.conv_kernel"),
            "mamba_expand": expand,
            "mamba_conv_bias": m.has("ssm_conv1d.bias"),
            "mamba_proj_bias": m.has("ssm_in.bias"),
        }
    )


def _lfm2(m: Metadata) -> dict[str, Any]:
    c = _common(m)
    attention, has = _attention(m, c["hidden_size"], c["num_hidden_layers"])
    del attention["attention_bias"]
    return (
        {"model_type": "lfm2"}
        | c
        | attention
        | _rope(m, attention["head_dim"])
        | {
            "layer_types": ["full_attention" if a else "conv" for a in has],
            "intermediate_size": m.size("feed_forward_length"),
            "block_auto_adjust_ff_dim": False,
            "conv_L_cache": m.size("shortconv.l_cache"),
            "conv_bias": m.has("shortconv.conv.bias"),
            "norm_eps": m.number("attention.layer_norm_rms_epsilon"),
        }
    )


def _mamba(m: Metadata) -> dict[str, Any]:
    falcon = bool(m.get("ssm.dt_b_c_rms"))  # the norms of dt, B and C take transformers' epsilon, 1e-6
    return (
        {"model_type": "falcon_mamba" if falcon else "mamba", "hidden_act": "silu"}
        | _common(m)
        | {
            "state_size": m.size("ssm.state_size"),
            "conv_kernel": m.size("ssm.conv_kernel"),
            "intermediate_size": m.size("ssm.inner_size"),
            "time_step_rank": m.size("ssm.time_step_rank"),
            "layer_norm_epsilon": m.number("attention.layer_norm_rms_epsilon"),
            "use_conv_bias": m.has("ssm_conv1d.bias"),
            "use_bias": m.has("ssm_in.bias"),
        }
    )


def _mamba2(m: Metadata) -> dict[str, Any]:
    c = _common(m)
    inner, heads, expand = _ssm(m, c["hidden_size"])
    _whole(m, inner, c["hidden_size"])
    return (
        {"model_type": "mamba2", "hidden_act": "silu"}
        | c
        | {
            "num_heads": heads,
            "head_dim": inner // heads,
            "expand": expand,
            "state_size": m.size("ssm.state_size"),
            "n_groups": m.size("ssm.group_count", 1),
            "conv_kernel": m.size("ssm.conv_kernel"),
            "layer_norm_epsilon": m.number("attention.layer_norm_rms_epsilon"),
            "use_conv_bias": m.has("ssm_conv1d.bias"),
            "use_bias": m.has("ssm_in.bias"),
        }
    )


def _falcon_h1(m: Metadata) -> dict[str, Any]:
    c = _common(m)
    if c["tie_word_embeddings"]:
        raise SourceError(
            f"{m.read.file} has no output.weight: of Falcon-H1 with tied embeddings, llama.cpp's converter loses the "
            "multiplier of the head; take the safetensors checkpoint"
        )
    attention, _ = _attention(m, c["hidden_size"], c["num_hidden_layers"])
    inner, heads, _ = _ssm(m, c["hidden_size"])
    return (
        {"model_type": "falcon_h1", "hidden_act": "silu"}
        | c
        | attention
        | _rope(m, attention["head_dim"])
        | {
            "intermediate_size": m.size("feed_forward_length"),
            "rms_norm_eps": m.number("attention.layer_norm_rms_epsilon"),
            "mlp_bias": m.has("ffn_up.bias"),
            "mamba_d_ssm": inner,
            "mamba_n_heads": heads,
            "mamba_d_head": inner // heads,
            "mamba_d_state": m.size("ssm.state_size"),
            "mamba_n_groups": m.size("ssm.group_count", 1),
            "mamba_d_conv": m.size("ssm.conv_kernel"),
            "mamba_conv_bias": m.has("ssm_conv1d.bias"),
            "mamba_proj_bias": m.has("ssm_in.bias"),
            "projectors_bias": m.has("ssm_out.bias"),
            "mamba_rms_norm": m.has("ssm_norm.weight"),
            "mamba_norm_before_gate": False,  # as llama.cpp computes it
        }
    )


def _nemotron_h(m: Metadata) -> dict[str, Any]:
    c = _common(m)
    layers = c["num_hidden_layers"]
    attention, has = _attention(m, c["hidden_size"], layers)
    wide = m.layered("feed_forward_length", layers)
    if len(set(wide) - {0}) > 1 or any(a and w for a, w in zip(has, wide, strict=True)):
        raise m.wrong("feed_forward_length", wide, "one width, in layers without attention")
    if c["tie_word_embeddings"]:
        raise SourceError(f"{m.read.file} has no output.weight, and ssmd's Nemotron-H has a head of its own")
    inner, heads, _ = _ssm(m, c["hidden_size"])
    for name in ("rope.freq_base", "rope.dimension_count"):
        m.get(name)  # nothing is rotated
    kinds = ["full_attention" if a else "mlp" if w else "linear_attention" for a, w in zip(has, wide, strict=True)]
    return (
        {"model_type": "nemotron_h"}
        | c
        | attention
        | {
            "layers_block_type": kinds,
            "intermediate_size": max(wide) or 1,
            "max_position_embeddings": m.size("context_length"),
            "layer_norm_epsilon": m.number("attention.layer_norm_rms_epsilon"),
            "mlp_bias": m.has("ffn_up.bias"),
            "mamba_num_heads": heads,
            "mamba_head_dim": inner // heads,
            "ssm_state_size": m.size("ssm.state_size"),
            "n_groups": m.size("ssm.group_count", 1),
            "conv_kernel": m.size("ssm.conv_kernel"),
            "use_conv_bias": m.has("ssm_conv1d.bias"),
            "use_bias": m.has("ssm_in.bias"),
        }
    )


def _both(names: Mapping[str, str], forms: Mapping[str, Form] | None = None) -> Names:
    """Return weights and biases of products. forms: of those that are not stored plainly."""
    ends = (".weight", ".bias")
    return {f"{a}{end}": (f"{b}{end}", (forms or {}).get(a, PLAIN)) for a, b in names.items() for end in ends}


def _attention_names(config: Mapping[str, Any], source: str, *, permuted: bool) -> Names:
    """Return attention's names. source: the prefix of its tensors."""
    names = {"attn_q": "q_proj", "attn_k": "k_proj", "attn_v": "v_proj", "attn_output": "o_proj"}
    forms = {
        "attn_q": Form(heads=config["num_attention_heads"]),
        "attn_k": Form(heads=config["num_key_value_heads"]),
    }
    return _both({a: source + b for a, b in names.items()}, forms if permuted else None)


def _mixer_names(source: str) -> Names:
    """Return the names of Mamba-2's mixer."""
    return _both({"ssm_in": source + "in_proj", "ssm_out": source + "out_proj"}) | {
        "ssm_conv1d.weight": (source + "conv1d.weight", CONV),
        "ssm_conv1d.bias": (source + "conv1d.bias", PLAIN),
        "ssm_dt.bias": (source + "dt_bias", PLAIN),
        "ssm_a": (source + "A_log", Form(exp=True, shape=FLAT.shape)),
        "ssm_d": (source + "D", FLAT),
        "ssm_norm.weight": (source + "norm.weight", FLAT),
    }


def _norms(first: str, second: str) -> Names:
    return {"attn_norm.weight": (f"{first}.weight", PLAIN), "ffn_norm.weight": (f"{second}.weight", PLAIN)}


def _swiglu(source: str) -> Names:
    return _both({"ffn_gate": source + "gate_proj", "ffn_up": source + "up_proj", "ffn_down": source + "down_proj"})


def _llama_names(config: Mapping[str, Any]) -> Names:
    names = _norms("input_layernorm", "post_attention_layernorm") | _swiglu("mlp.")
    return names | _attention_names(config, "self_attn.", permuted=True)


def _qwen3_names(config: Mapping[str, Any]) -> Names:
    names = _norms("input_layernorm", "post_attention_layernorm") | _swiglu("mlp.")
    names |= {f"attn_{n}_norm.weight": (f"self_attn.{n}_norm.weight", PLAIN) for n in "qk"}
    return names | _attention_names(config, "self_attn.", permuted=False)


def _granite_names(config: Mapping[str, Any]) -> Names:
    names = _norms("input_layernorm", "post_attention_layernorm") | _mixer_names("mamba.")
    names |= {  # gate and up are the rows of one matrix, gate first
        "ffn_gate.weight": ("shared_mlp.input_linear.weight", PLAIN),
        "ffn_up.weight": ("shared_mlp.input_linear.weight", PLAIN),
        "ffn_down.weight": ("shared_mlp.output_linear.weight", PLAIN),
    }
    return names | _attention_names(config, "self_attn.", permuted=True)


def _lfm2_names(config: Mapping[str, Any]) -> Names:
    names = _norms("operator_norm", "ffn_norm")
    names |= _both({"ffn_gate": "feed_forward.w1", "ffn_up": "feed_forward.w3", "ffn_down": "feed_forward.w2"})
    names |= _both({"shortconv.in_proj": "conv.in_proj", "shortconv.out_proj": "conv.out_proj"})
    names |= {
        "shortconv.conv.weight": ("conv.conv.weight", CONV),
        "shortconv.conv.bias": ("conv.conv.bias", PLAIN),
        "attn_q_norm.weight": ("self_attn.q_layernorm.weight", PLAIN),
        "attn_k_norm.weight": ("self_attn.k_layernorm.weight", PLAIN),
    }
    attention = _attention_names(config, "self_attn.", permuted=False)
    return names | {a: (b.replace("o_proj", "out_proj"), form) for a, (b, form) in attention.items()}


def _mamba_names(config: Mapping[str, Any]) -> Names:
    products = {"ssm_in": "in_proj", "ssm_x": "x_proj", "ssm_dt": "dt_proj", "ssm_out": "out_proj"}
    return _both({a: f"mixer.{b}" for a, b in products.items()}) | {
        "attn_norm.weight": ("norm.weight", PLAIN),
        "ssm_conv1d.weight": ("mixer.conv1d.weight", CONV),
        "ssm_conv1d.bias": ("mixer.conv1d.bias", PLAIN),
        "ssm_a": ("mixer.A_log", Form(exp=True)),
        "ssm_d": ("mixer.D", PLAIN),
    }


def _mamba2_names(config: Mapping[str, Any]) -> Names:
    return {"attn_norm.weight": ("norm.weight", PLAIN)} | _mixer_names("mixer.")


def _falcon_h1_names(config: Mapping[str, Any]) -> Names:
    names = _norms("input_layernorm", "pre_ff_layernorm") | _swiglu("feed_forward.") | _mixer_names("mamba.")
    names["ffn_norm"] = names["ffn_norm.weight"]  # the converter leaves the ending out
    return names | _attention_names(config, "self_attn.", permuted=False)


def _nemotron_h_names(config: Mapping[str, Any]) -> Names:
    names = _mamba2_names(config) | _both({"ffn_up": "mixer.up_proj", "ffn_down": "mixer.down_proj"})
    return names | _attention_names(config, "mixer.", permuted=True)


_TOP = {"token_embd.weight": "model.embed_tokens.weight", "output.weight": "lm_head.weight"}
_MODEL = _TOP | {"output_norm.weight": "model.norm.weight"}
_BACKBONE = {
    "token_embd.weight": "backbone.embeddings.weight",
    "output_norm.weight": "backbone.norm_f.weight",
    "output.weight": "lm_head.weight",
}
ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(lambda m: _llama(m, "llama"), _llama_names, _MODEL),
    "qwen3": Architecture(lambda m: _llama(m, "qwen3"), _qwen3_names, _MODEL),
    "granite": Architecture(_granite, _granite_names, _MODEL),
    "granitehybrid": Architecture(_granite_hybrid, _granite_names, _MODEL),
    "lfm2": Architecture(
        _lfm2,
        _lfm2_names,
        _TOP | dict.fromkeys(("token_embd_norm.weight", "output_norm.weight"), "model.embedding_norm.weight"),
    ),
    "mamba": Architecture(_mamba, _mamba_names, _BACKBONE, "backbone.layers."),
    "mamba2": Architecture(_mamba2, _mamba2_names, _BACKBONE, "backbone.layers."),
    "falcon-h1": Architecture(
        _falcon_h1, _falcon_h1_names, _TOP | {"output_norm.weight": "model.final_layernorm.weight"}
    ),
    "nemotron_h": Architecture(_nemotron_h, _nemotron_h_names, _BACKBONE, "backbone.layers."),
}
