"""Tiny sources as GGUF files, written by the library of the format's authors with llama.cpp's conventions.

The names are that library's (TensorNameMap). What the converter does to values stands in functions of `conversion/` in
https://github.com/ggml-org/llama.cpp, which the library does not have: LlamaModel.permute, MambaModel.modify_tensors,
Mamba2Model.modify_tensors, GraniteMoeModel.modify_tensors, FalconH1Model.modify_tensors, generate_extra_tensors.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import MODEL_ARCH, GGMLQuantizationType, GGUFWriter, quants
from numpy.typing import NDArray
from safetensors.numpy import load_file

Array = NDArray[np.float32]
ARCHITECTURES = {
    "llama": MODEL_ARCH.LLAMA,
    "qwen3": MODEL_ARCH.QWEN3,
    "granitemoehybrid": MODEL_ARCH.GRANITE_HYBRID,
    "lfm2": MODEL_ARCH.LFM2,
    "mamba": MODEL_ARCH.MAMBA,
    "falcon_mamba": MODEL_ARCH.MAMBA,
    "mamba2": MODEL_ARCH.MAMBA2,
    "falcon_h1": MODEL_ARCH.FALCON_H1,
    "nemotron_h": MODEL_ARCH.NEMOTRON_H,
}
PERMUTED = ("llama", "granitemoehybrid", "nemotron_h")
ATTENTION = ("attention", "full_attention")


def write_gguf(
    source: Path,
    file: Path,
    kind: str = "F32",
    *,
    pre: str = "gpt-2",
    change: Callable[[GGUFWriter], object] = lambda writer: None,
    more: Mapping[str, Array] | None = None,
    endian: gguf.GGUFEndian = gguf.GGUFEndian.LITTLE,
) -> Path:
    """Write the source checkpoint in a folder as `file`, matrices in `kind` where their rows are long enough.

    change: adds fields before the file is written. more: further tensors, stored as they are.
    """
    config = json.loads((source / "config.json").read_text())
    arch = architecture_of(config)
    writer = GGUFWriter(file, gguf.MODEL_ARCH_NAMES[arch], endianess=endian)
    _fields(writer, config)
    _tokenizer(writer, source, pre)
    change(writer)
    tensors = stored(config, load_file(source / "model.safetensors"), arch)
    for name, array in {**tensors, **(more or {})}.items():
        quant = kind_of(name, array, kind)
        if quant == GGMLQuantizationType.F32:
            writer.add_tensor(name, np.ascontiguousarray(array, np.float32))
        else:
            writer.add_tensor(name, quants.quantize(np.ascontiguousarray(array, np.float32), quant), raw_dtype=quant)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def architecture_of(config: Mapping[str, Any]) -> MODEL_ARCH:
    """A Granite 4 without Mamba layers is written as Granite."""
    if config["model_type"] == "granitemoehybrid" and all(t in ATTENTION for t in config["layer_types"]):
        return MODEL_ARCH.GRANITE
    return ARCHITECTURES[config["model_type"]]


def kind_of(name: str, array: Array, kind: str) -> GGMLQuantizationType:
    """The type that a tensor is stored in: vectors, convolutions and A stay float32, as in llama.cpp."""
    quant = GGMLQuantizationType[kind]
    plain = array.ndim < 2 or "conv" in name or ("ssm_" in name.removesuffix(".weight") and array.shape[-1] < 32)
    plain |= array.shape[-1] % gguf.GGML_QUANT_SIZES[quant][0] != 0 or "norm" in name or name.endswith("ssm_a")
    return GGMLQuantizationType.F32 if plain else quant


def rounded(source: Path, folder: Path, kind: str) -> Path:
    """The same source with the values that a file in `kind` holds: what transformers is to be given."""
    config = json.loads((source / "config.json").read_text())
    weights = load_file(source / "model.safetensors")
    names = name_map(config, architecture_of(config))

    def held(name: str, array: Array) -> Array:
        if name.endswith("shared_mlp.input_linear.weight"):
            name, mapped = name, "blk.0.ffn_gate.weight"
        else:
            mapped = names(name.replace(".dt_bias", ".dt_proj.bias"))
        quant = kind_of(mapped, array, kind)
        if quant == GGMLQuantizationType.F32:
            return array
        return np.asarray(quants.dequantize(quants.quantize(array, quant), quant), np.float32).reshape(array.shape)

    folder.mkdir()
    for other in source.iterdir():
        if other.suffix != ".safetensors":
            (folder / other.name).write_bytes(other.read_bytes())
    from safetensors.numpy import save_file

    made = {name: np.ascontiguousarray(held(name, array)) for name, array in weights.items()}
    save_file(made, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def name_map(config: Mapping[str, Any], arch: MODEL_ARCH) -> Callable[[str], str]:
    names = gguf.get_tensor_name_map(arch, layers_of(config))

    def mapped(name: str) -> str:
        found: str | None = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found is not None, name
        return found

    return mapped


def layers_of(config: Mapping[str, Any]) -> int:
    return len(config["layers_block_type"]) if config["model_type"] == "nemotron_h" else config["num_hidden_layers"]


def stored(config: Mapping[str, Any], weights: Mapping[str, Array], arch: MODEL_ARCH) -> dict[str, Array]:
    """The tensors as the converter stores them, by llama.cpp's names."""
    mapped = name_map(config, arch)

    def each() -> Iterator[tuple[str, Array]]:
        for name, array in weights.items():
            if name.endswith("shared_mlp.input_linear.weight"):
                layer = name.split(".")[2]
                gate, up = np.split(array, 2)
                yield f"blk.{layer}.ffn_gate.weight", gate
                yield f"blk.{layer}.ffn_up.weight", up
            elif name.endswith("shared_mlp.output_linear.weight"):
                yield f"blk.{name.split('.')[2]}.ffn_down.weight", array
            else:
                yield mapped(name.replace(".dt_bias", ".dt_proj.bias")), _converted(config, name, array)
        rope = config.get("rope_parameters") or {}
        if rope.get("rope_type") == "llama3":
            yield "rope_freqs.weight", _divisors(config, rope)

    return dict(each())


def _converted(config: Mapping[str, Any], name: str, array: Array) -> Array:
    family = config["model_type"]
    if family in PERMUTED and name.split(".")[-2] in ("q_proj", "k_proj"):
        heads = config["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
        halves = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
        return halves.swapaxes(1, 2).reshape(array.shape)
    if name.endswith(("conv1d.weight", "conv.conv.weight")):
        return array.squeeze(1)
    if name.endswith(".A_log"):
        array = -np.exp(array)
    if family not in ("mamba", "falcon_mamba"):
        if name.endswith((".A_log", ".D")):
            return array.reshape(-1, 1)
        if name.endswith(("mixer.norm.weight", "mamba.norm.weight")):
            return array.reshape(config.get("n_groups") or config["mamba_n_groups"], -1)
    return array * _multiplier(config, name) if family == "falcon_h1" else array


def _multiplier(config: Mapping[str, Any], name: str) -> Any:
    """Return the factor of a tensor in FalconH1Model.modify_tensors."""
    c = config
    if ".mamba.in_proj." in name:
        state = c["mamba_n_groups"] * c["mamba_d_state"]
        sizes = [c["mamba_d_ssm"], c["mamba_d_ssm"], state, state, c["mamba_n_heads"]]
        return np.repeat(np.array(c["ssm_multipliers"], np.float32) * np.float32(c["ssm_in_multiplier"]), sizes)[
            :, None
        ]
    by_name = {
        "down_proj": c["mlp_multipliers"][1],
        "gate_proj": c["mlp_multipliers"][0],
        "k_proj": c["key_multiplier"] * c["attention_in_multiplier"],
        "q_proj": c["attention_in_multiplier"],
        "v_proj": c["attention_in_multiplier"],
        "o_proj": c["attention_out_multiplier"],
        "out_proj": c["ssm_out_multiplier"],
        "lm_head": c["lm_head_multiplier"],
        "embed_tokens": c["embedding_multiplier"],
    }
    return np.float32(by_name.get(name.split(".")[-2], 1.0))


def _divisors(config: Mapping[str, Any], rope: Mapping[str, Any]) -> Array:
    """Return the divisors that generate_extra_tensors writes for Llama 3's RoPE."""
    made = []
    for i in range(0, config["head_dim"], 2):
        wavelength = 2 * np.pi * rope["rope_theta"] ** (i / config["head_dim"])
        turns = rope["original_max_position_embeddings"] / wavelength
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        smooth = min(max((turns - low) / (high - low), 0), 1)
        made.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(made, np.float32)


def _fields(w: GGUFWriter, c: Mapping[str, Any]) -> None:
    """Write the fields as the converter's set_gguf_parameters does."""
    family, layers = c["model_type"], layers_of(c)
    mamba = family in ("mamba", "falcon_mamba", "mamba2")
    w.add_block_count(layers)
    w.add_embedding_length(c["hidden_size"])
    eps = next(c[k] for k in ("rms_norm_eps", "norm_eps", "layer_norm_epsilon") if k in c)
    w.add_layer_norm_rms_eps(eps)
    hybrid = family == "granitemoehybrid" and architecture_of(c) == MODEL_ARCH.GRANITE_HYBRID
    w.add_context_length(2**20 if mamba or hybrid else c["max_position_embeddings"])
    if not mamba:
        _attention_fields(w, c)
    else:
        w.add_feed_forward_length(0)
        w.add_head_count(0)
    if family == "granitemoehybrid":
        w.add_feed_forward_length(c["shared_intermediate_size"])
        w.add_expert_count(0)
        w.add_attention_scale(c["attention_multiplier"])
        w.add_embedding_scale(c["embedding_multiplier"])
        w.add_residual_scale(c["residual_multiplier"])
        w.add_logit_scale(c["logits_scaling"])
        w.add_rope_scaling_finetuned(not hybrid)
    elif family == "nemotron_h":
        w.add_feed_forward_length([c["intermediate_size"] if k == "mlp" else 0 for k in c["layers_block_type"]])
    elif family == "lfm2":
        w.add_shortconv_l_cache(c["conv_L_cache"])
        w.add_feed_forward_length(_lfm2_width(c))
    elif not mamba:
        w.add_feed_forward_length(c["intermediate_size"])
    if mamba or hybrid or family in ("falcon_h1", "nemotron_h"):
        _ssm_fields(w, c)


def _attention_fields(w: GGUFWriter, c: Mapping[str, Any]) -> None:
    head_dim = c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
    kinds = c.get("layer_types") or c.get("layers_block_type") or ["attention"]
    w.add_head_count(c["num_attention_heads"])
    several = c["model_type"] in ("granitemoehybrid", "lfm2", "nemotron_h")
    w.add_head_count_kv(
        [c["num_key_value_heads"] * (k in ATTENTION) for k in kinds] if several else c["num_key_value_heads"]
    )
    w.add_key_length(head_dim)
    w.add_value_length(head_dim)
    if c.get("rope_parameters"):
        w.add_rope_freq_base(c["rope_parameters"]["rope_theta"])


def _ssm_fields(w: GGUFWriter, c: Mapping[str, Any]) -> None:
    def first(*names: str) -> Any:
        return next(c[n] for n in names if c.get(n) is not None)

    w.add_ssm_conv_kernel(first("conv_kernel", "mamba_d_conv"))
    w.add_ssm_state_size(first("ssm_state_size", "state_size", "mamba_d_state"))
    if c["model_type"] in ("mamba", "falcon_mamba"):
        w.add_ssm_inner_size(c["intermediate_size"])
        w.add_ssm_time_step_rank(c["time_step_rank"])
        w.add_ssm_dt_b_c_rms(c["model_type"] == "falcon_mamba")
        return
    heads = first("num_heads", "mamba_n_heads", "mamba_num_heads")
    size = c.get("mamba_head_dim") or c.get("mamba_d_head") or c["head_dim"]
    w.add_ssm_inner_size(c.get("mamba_d_ssm") or heads * size)
    w.add_ssm_time_step_rank(heads)
    w.add_ssm_group_count(first("n_groups", "mamba_n_groups"))


def _lfm2_width(c: Mapping[str, Any]) -> int:
    if not c["block_auto_adjust_ff_dim"]:
        return int(c["intermediate_size"])
    width = int(c["block_ffn_dim_multiplier"] * int(2 * c["intermediate_size"] / 3))
    return -(-width // int(c["block_multiple_of"])) * int(c["block_multiple_of"])


def _tokenizer(w: GGUFWriter, source: Path, pre: str) -> None:
    """Write the vocabulary as _set_vocab_gpt2 does, with padding up to the embedding's rows."""
    whole = json.loads((source / "tokenizer.json").read_text())
    settings = json.loads((source / "tokenizer_config.json").read_text())
    config = json.loads((source / "config.json").read_text())
    vocabulary = {**whole["model"]["vocab"], **{t["content"]: t["id"] for t in whole["added_tokens"]}}
    added = {t["id"]: t["special"] for t in whole["added_tokens"]}
    texts = {i: t for t, i in vocabulary.items()}
    count = config["vocab_size"]
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre(pre)
    w.add_token_list([texts.get(i, f"[PAD{i}]") for i in range(count)])
    kinds = [5 if i not in texts else 1 if i not in added else 3 if added[i] else 4 for i in range(count)]
    w.add_token_types(kinds)
    w.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in whole["model"]["merges"]])
    w.add_bos_token_id(vocabulary[settings["bos_token"]])
    w.add_eos_token_id(vocabulary[settings["eos_token"]])
    w.add_pad_token_id(vocabulary[settings["pad_token"]])
    w.add_unk_token_id(vocabulary[settings["unk_token"]])
    w.add_chat_template((source / "chat_template.jinja").read_text())
