"""Checkpoints in unsupported formats, recognised by config.json or by other files, with the advice for each."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# quantization: MLX; compression_config: older compressed-tensors; the other: GPTQ, AWQ, bitsandbytes, FP8, ...
QUANTIZED = ("quantization_config", "quantization", "compression_config")
INSTEAD = {
    "params.json": "it is in Mistral's or Llama's own format: take the checkpoint for transformers, whose name often "
    "ends in -hf",
    "adapter_config.json": "it is an adapter (LoRA), no whole model: merge it into its base model first, with peft "
    "merge_and_unload() and save_pretrained(new)",
    "*.gguf": "it is in GGUF: take the checkpoint that it was made from, in safetensors",
}


def unread(config: Mapping[str, Any]) -> str | None:
    """Return the reason why a checkpoint with this config.json is not supported, with advice; None if it may be."""
    for name in QUANTIZED:
        if config.get(name):
            return (
                f"{name} is there ({_kind(config[name])}): its weights are quantized already, and ssmd quantizes by "
                "itself: take the checkpoint that is not quantized, from which this one was made"
            )
    if config.get("model_type") is None and "d_model" in config and ("ssm_cfg" in config or "n_layer" in config):
        return (
            "it is in the original format of state-spaces/mamba (d_model, no model_type): take the checkpoint for "
            "transformers, whose name ends in -hf, as state-spaces/mamba-130m-hf or AntonV/mamba2-130m-hf"
        )
    return None


def in_its_place(folder: Path) -> str | None:
    """Return the format of a folder without config.json, with advice; None if it is unknown."""
    return next((why for pattern, why in INSTEAD.items() if any(folder.glob(pattern))), None)


def _kind(value: object) -> str:
    """Return the method's name and the bits, as far as they are given."""
    said: Mapping[str, Any] = value if isinstance(value, dict) else {}
    method = said.get("quant_method") or said.get("quant_algo")
    if method is None and "group_size" in said and "bits" in said:
        method = "MLX"
    bits = said.get("bits") or said.get("w_bit") or (4 if said.get("load_in_4bit") else None)
    if not isinstance(method, str) or not re.fullmatch(r"[\w.-]{1,40}", method, re.ASCII):
        return repr(value)[:60]
    return f"{method}, {bits} bits" if type(bits) is int else method
