"""A folder that is not a source checkpoint is refused first, with the name of its format and what to take instead."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ssmd.families.fields import FamilyError
from ssmd.families.registry import family_of
from ssmd.model.source import Source, SourceError

LLAMA = {"model_type": "llama", "hidden_size": 96}
MLX = {"group_size": 64, "bits": 4}
COMPRESSED = {"config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "int"}}}}
FORMATS: list[tuple[dict[str, Any], str]] = [
    ({"quantization": MLX, "quantization_config": MLX}, "quantization_config is there (MLX, 4 bits)"),
    ({"quantization": MLX}, "quantization is there (MLX, 4 bits)"),
    ({"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128}}, "is there (gptq, 4 bits)"),
    ({"quantization_config": {"quant_method": "awq", "w_bit": 4, "version": "gemm"}}, "is there (awq, 4 bits)"),
    (
        {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
        "is there (bitsandbytes, 4 bits)",
    ),
    ({"quantization_config": {"load_in_8bit": True}}, "quantization_config is there ({'load_in_8bit': True})"),
    ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}, "is there (fp8)"),
    ({"quantization_config": {"quant_method": "compressed-tensors", **COMPRESSED}}, "is there (compressed-tensors)"),
    (
        {"compression_config": {"quant_method": "compressed-tensors"}},
        "compression_config is there (compressed-tensors)",
    ),
    ({"quantization_config": {"quant_method": "bitnet", "quantization_mode": "online"}}, "is there (bitnet)"),
    ({"quantization_config": {"quant_method": "\x1b[31m"}}, r"is there ({'quant_method': '\x1b[31m'})"),
    ({"quantization_config": "int8"}, "quantization_config is there ('int8')"),
]
ORIGINAL = {"d_model": 768, "n_layer": 24, "vocab_size": 50277, "ssm_cfg": {}, "rms_norm": True}


def refusal(folder: Path, files: dict[str, Any]) -> str:
    """Of the folder, and of the config alone where there is one."""
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    with pytest.raises(SourceError) as failure:
        Source.open(folder)
    if (config := files.get("config.json")) is not None:
        with pytest.raises(FamilyError) as alone:
            family_of(config)
        assert str(alone.value) in str(failure.value)
    return str(failure.value)


@pytest.mark.parametrize(("fields", "said"), FORMATS)
def test_quantized_checkpoints(tmp_path: Path, fields: dict[str, Any], said: str) -> None:
    why = refusal(tmp_path, {"config.json": {**LLAMA, **fields}})
    assert said in why
    assert "take the checkpoint that is not quantized" in why


@pytest.mark.parametrize("more", [{}, {"ssm_cfg": {"layer": "Mamba2"}, "attn_layer_idx": []}])
def test_mamba_in_its_original_format(tmp_path: Path, more: dict[str, Any]) -> None:
    why = refusal(tmp_path, {"config.json": {**ORIGINAL, **more}})
    assert "original format of state-spaces/mamba" in why
    assert "state-spaces/mamba-130m-hf" in why


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("params.json", "has no config.json; it is in Mistral's or Llama's own format: take the checkpoint for"),
        ("adapter_config.json", "it is an adapter (LoRA), no whole model: merge it"),
        ("model-Q4_K_M.gguf", "it is in GGUF: take the checkpoint that it was made from"),
    ],
)
def test_folders_without_a_config(tmp_path: Path, file: str, said: str) -> None:
    assert said in refusal(tmp_path, {file: {}})


def test_what_says_nothing_is_no_reason() -> None:
    """As published configs have it: transformers' Mamba keeps fields of the original."""
    for name in ("quantization", "quantization_config"):
        assert family_of({**LLAMA, name: None}).name == family_of({**LLAMA, name: {}}).name == "llama"
    assert family_of({**ORIGINAL, "model_type": "mamba"}).name == "mamba"
