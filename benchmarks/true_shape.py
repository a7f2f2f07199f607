"""Source checkpoints of real shape with random weights, for measuring speed and memory without a download.

    python benchmarks/true_shape.py SHAPE FOLDER [--tokenizer FOLDER]    then: ssmd build FOLDER, ssmd bench NAME
    python benchmarks/true_shape.py SHAPE FOLDER --layers 4 [--vocabulary 49152]    a model's first layers alone
    python benchmarks/true_shape.py SHAPE FOLDER --build RUNTIME:QUANTIZATION

SHAPE: granite-4.0-h-350m, mamba2-130m or another model of scripts/models. The text that such a model writes has no
meaning; time and memory do not depend on it. tiny-mamba2, tiny-granite and others have the few small layers of
tests/tiny.py, a full vocabulary and a long context: for counts, which do not depend on the size.

A line says how many weights it has, and the bytes of a conversation's state with keys and values in float16.

With --build the checkpoint is written, built and removed again, and a line says what that took: the most memory of the
build's process and its children together (resident, with mapped files), the most disk, and seconds. The bound of the
memory is 1.2 times the artifact and 2 GB. It runs on Linux.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import tiny

from ssmd.cli.making import smollm2_source
from ssmd.config import Settings
from ssmd.families.registry import family_of

MODELS = Path(__file__).parent.parent / "scripts" / "models"
SHAPES: dict[str, dict[str, Any]] = {f.stem: json.loads(f.read_text())["config"] for f in sorted(MODELS.glob("*.json"))}
SHAPES |= {  # the text model of a config with a vision tower, as a config of its own
    f"{name}-text": c["text_config"] | {"architectures": [f"{c['architectures'][0].partition('For')[0]}ForCausalLM"]}
    for name, c in SHAPES.items()
    if "text_config" in c
}

LENGTHS = (0, 1000, 8000, 100_000)  # tokens of conversations whose states' sizes are said

SMALL: dict[str, dict[str, Any]] = {
    f"tiny-{name}": {"model_type": family, "vocab_size": 49152, **fields, "max_position_embeddings": 32768}
    for name, (family, fields) in tiny.VARIANTS.items()
}


class Weights:
    """Random weights, one tensor at a time, at a trained one's scale."""

    def __init__(self, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)

    def tensor(self, name: str, shape: tuple[int, ...], first: int = 0, last: int | None = None) -> NDArray[np.float32]:
        """Make a tensor, or its rows from `first` to `last`: others each time, also of the same rows."""
        shape = ((shape[0] if last is None else last) - first, *shape[1:])
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
        return np.ascontiguousarray(made, np.float32)


def cut(config: Mapping[str, Any], layers: int | None, vocabulary: int | None) -> dict[str, Any]:
    """Return a config with its first layers alone, and another vocabulary; None leaves the config's own."""
    made = dict(config)
    if "text_config" in made:
        return {**made, "text_config": cut(made["text_config"], layers, vocabulary)}
    if layers is not None:
        made["num_hidden_layers"] = layers
        made |= {name: made[name][:layers] for name in ("layer_types", "layers_block_type") if name in made}
    return made if vocabulary is None else {**made, "vocab_size": vocabulary}


def write(shape: str, folder: Path, tokenizer: Path, layers: int | None = None, vocabulary: int | None = None) -> None:
    """Write the checkpoint in bfloat16, as such are published, with the tokenizer and template of the source checkpoint
    `tokenizer`. One tensor is in memory at a time."""
    config = cut({**SHAPES, **SMALL}[shape], layers, vocabulary)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        shutil.copy(tokenizer / name, folder / name)
    family, weights = family_of(config), Weights()
    bindings = family.bindings(family.parse(config)).values()
    shapes = {name: shape for binding in bindings for name, shape in binding.reads.items()}
    entries, end = dict[str, Any](), 0
    for name, size in shapes.items():
        start, end = end, end + 2 * math.prod(size)
        entries[name] = {"dtype": "BF16", "shape": size, "data_offsets": [start, end]}
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for name, size in shapes.items():
            made = torch.from_numpy(weights.tensor(name, size)).to(torch.bfloat16)
            file.write(made.view(torch.int16).numpy().tobytes())
    spec = family.plan(family.parse(config)).spec("float16")
    state = ", ".join(f"{spec.nbytes_at(n) / 1e6:,.1f} MB at {n:,} tokens" for n in LENGTHS)
    print(f"{shape}: {end / 2e6:,.0f} million weights; state {state}", flush=True)


def measure(folder: Path, asked: str) -> str:
    """Build a checkpoint for RUNTIME:QUANTIZATION beside it, and remove the artifact. Returns what that took."""
    runtime, _, quantization = asked.partition(":")
    out = folder.with_name(f"{folder.name}-{runtime}-{quantization}")
    command = ["build", str(folder), "--runtime", runtime, "--quant", quantization, "--models-dir", str(out)]
    begin, free, memory, disk = time.perf_counter(), shutil.disk_usage(folder).free, 0, 0
    try:
        with subprocess.Popen([sys.executable, "-m", "ssmd", *command]) as process:
            while process.poll() is None:
                memory = max(memory, sum(map(_resident, tree(process.pid))))
                disk = max(disk, free - shutil.disk_usage(folder).free)
                time.sleep(0.1)
        seconds = time.perf_counter() - begin
        if process.returncode:
            raise SystemExit(f"the build ended with {process.returncode}")
        artifact = sum(f.stat().st_size for f in out.rglob("*") if f.is_file())
    finally:
        shutil.rmtree(out, ignore_errors=True)
    return (
        f"{folder.name} {runtime} {quantization}: artifact {artifact / 1e9:.2f} GB, memory {memory / 1e9:.2f} GB "
        f"(bound {(1.2 * artifact + 2e9) / 1e9:.2f}), disk beside the source {disk / 1e9:.2f} GB, {seconds:.0f} s"
    )


def tree(root: int) -> list[int]:
    """Return the ids of a process and of all below it."""
    found = [root]
    for pid in found:
        for listed in Path(f"/proc/{pid}/task").glob("*/children"):
            with contextlib.suppress(OSError):  # it has ended
                found += map(int, listed.read_text().split())
    return found


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=[*SHAPES, *SMALL])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokenizer", type=Path, help="a source checkpoint; else SmolLM2's from its package")
    parser.add_argument("--layers", type=int, help="the first so many layers; else all")
    parser.add_argument("--vocabulary", type=int, help="tokens, else the shape's own; SmolLM2's tokenizer has 49,152")
    parser.add_argument("--build", metavar="RUNTIME:QUANTIZATION", action="append", help="measure it, and remove all")
    asked = parser.parse_args()
    if asked.build and asked.folder.exists():
        parser.error(f"{asked.folder} exists; --build takes a new folder, which it removes")
    if asked.tokenizer is not None:
        write(asked.shape, asked.folder, asked.tokenizer, asked.layers, asked.vocabulary)
    else:
        with smollm2_source(Settings(), print) as temporary:
            write(asked.shape, asked.folder, temporary, asked.layers, asked.vocabulary)
    try:
        for one in asked.build or ():
            print(measure(asked.folder, one), flush=True)
    finally:
        if asked.build:
            shutil.rmtree(asked.folder)


if __name__ == "__main__":
    main()
