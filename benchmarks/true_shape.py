"""Source checkpoints of real shape with random weights, for measuring speed and memory without a download.

    python benchmarks/true_shape.py SHAPE FOLDER [--tokenizer FOLDER]    then: ssmd build FOLDER, ssmd bench NAME

SHAPE: granite-4.0-h-350m, mamba2-130m or another model of scripts/models. The text that such a model writes has no
meaning; time and memory do not depend on it. tiny-mamba2, tiny-granite and others have the few small layers of
tests/tiny.py, a full vocabulary and a long context: for counts, which do not depend on the size.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import tiny

from ssmd.cli.making import smollm2_source
from ssmd.config import Settings
from ssmd.families.registry import family_of
from ssmd.model.source import Source

MODELS = Path(__file__).parent.parent / "scripts" / "models"
SHAPES: dict[str, dict[str, Any]] = {f.stem: json.loads(f.read_text())["config"] for f in sorted(MODELS.glob("*.json"))}

SMALL: dict[str, dict[str, Any]] = {
    f"tiny-{name}": {"model_type": family, "vocab_size": 49152, **fields, "max_position_embeddings": 32768}
    for name, (family, fields) in tiny.VARIANTS.items()
}


class Weights:
    """Random weights in place of a Source: each tensor that a family's bindings ask for, at a trained one's scale."""

    def __init__(self, seed: int = 0) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._rng = np.random.default_rng(seed)

    def tensor(self, name: str, shape: tuple[int, ...], first: int = 0, last: int | None = None) -> NDArray[np.float32]:
        assert (first, last) == (0, None), "whole tensors only"
        made = self._rng.standard_normal(shape, np.float32)
        if name.endswith("A_log"):
            rows = np.log(np.arange(1, shape[-1] + 1))
            made = np.broadcast_to(rows, shape) + made * 0.05
        elif name.endswith(".D") or "norm" in name:
            made = 1 + made * 0.1
        elif name.endswith(("dt_bias", "dt_proj.bias")):
            dt = np.exp(self._rng.uniform(np.log(1e-3), np.log(0.1), shape))  # time steps as training begins with them
            made = np.log(np.expm1(dt)).astype(np.float32)
        elif name.endswith("bias"):
            made *= 0.1
        elif "conv" in name and len(shape) == 3:
            made *= 0.5
        elif "embed" in name:
            made *= 0.02
        else:
            made *= shape[-1] ** -0.5
        self.tensors[name] = torch.from_numpy(np.ascontiguousarray(made)).to(torch.bfloat16)
        widened: NDArray[np.float32] = self.tensors[name].float().numpy()
        return widened


def write(shape: str, folder: Path, tokenizer: Path) -> None:
    """Write the checkpoint in bfloat16, as such are published, with the tokenizer and template of the source checkpoint
    `tokenizer`."""
    config = {**SHAPES, **SMALL}[shape]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        shutil.copy(tokenizer / name, folder / name)
    family, weights = family_of(config), Weights()
    for binding in family.bindings(family.parse(config)).values():
        binding(cast(Source, weights))
    save_file(weights.tensors, folder / "model.safetensors")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=[*SHAPES, *SMALL])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokenizer", type=Path, help="a source checkpoint; else SmolLM2's from its package")
    asked = parser.parse_args()
    if asked.tokenizer is not None:
        write(asked.shape, asked.folder, asked.tokenizer)
        return
    with smollm2_source(Settings(), print) as temporary:
        write(asked.shape, asked.folder, temporary)


if __name__ == "__main__":
    main()
