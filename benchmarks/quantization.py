"""The cost of rounding, plain and rotated: weights and activations rounded as XNNPACK does, in PyTorch.

    python benchmarks/quantization.py [FOLDER] [--totals]    a source checkpoint; default: SmolLM2 out of its package
    python benchmarks/quantization.py [FOLDER] --int4        ways to 4 bits: bytes, and what they cost
                    [--llama-library LIBRARY --gguf FILE]    FILE: the same weights in 16 bits or more, for llama.cpp
                    [--artifacts ARTIFACT ...]               of the same weights, in their own runtimes

Weights: symmetric, a scale for each output channel. Activations: asymmetric, a scale for each token. KL(f32 || rounded)
in nats and the change of perplexity, on the text of ssmd/build/quality.py and on quantization.txt beside this file, in
pieces of 400 tokens. --totals leaves single matrices out. "Weights" alone is what wgpu rounds. What runtimes lose:
benchmarks/rotation.py.

int4: embedding and head int8; a float16 scale for each block of a row, offsets int8. Compensated (GPTQ,
arXiv:2210.17323): columns in order, what one is off is made up for by those after it, by what the others' inputs were
on the project's documents; the scale of a block is the best of some by the same measure. libllama quantizes FILE
itself, and computes the logits of what it wrote (llama_library.py says how to get a libllama).
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from llama_library import KINDS, Library, Llama
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from ssmd.authoring.flat import FlatModule
from ssmd.authoring.host import Host
from ssmd.authoring.model import author
from ssmd.authoring.ops import CHUNK
from ssmd.build import quality
from ssmd.cli.making import smollm2_source
from ssmd.config import Settings
from ssmd.families.offsets import BLOCK, is_multiplied
from ssmd.families.registry import family_of
from ssmd.families.rotation import rotated
from ssmd.families.weights import Binding
from ssmd.model.artifact import Artifact
from ssmd.model.gguf import GGUF
from ssmd.model.source import Source
from ssmd.refit.compensated import Factor, better
from ssmd.runtime.protocol import get_runtime
from ssmd_litert.recipe import MIN_WEIGHT_ELEMENTS

_LINEAR, _EMBEDDING = F.linear, F.embedding
LONG = Path(__file__).with_name("quantization.txt")
DOCUMENTS = Path(__file__).parent.parent / "docs"
CALIBRATED = 8000  # tokens of them


def rounded_weight(w: Tensor) -> Tensor:
    scale = w.abs().amax(1, keepdim=True).clamp(min=1e-30) / 127
    return torch.round(w / scale) * scale


def scaled(w: Tensor, block: int = BLOCK) -> Tensor:
    """4 bits with a scale for each block."""
    parts = w.reshape(-1, block)
    scale = parts.abs().amax(1, keepdim=True).clamp(min=1e-30) / 7
    return (torch.round(parts / scale).clamp(-8, 7) * scale).reshape(w.shape)


def shifted(w: Tensor, block: int = BLOCK) -> Tensor:
    """4 bits with a scale and an offset for each block."""
    parts = w.reshape(len(w), -1, block)
    low = parts.amin(-1, keepdim=True)
    step = ((parts.amax(-1, keepdim=True) - low) / 15).clamp(min=1e-30)
    levels = torch.round((parts - low) / step).clamp(0, 15) - 8
    offsets = rounded_weight((low + 8 * step)[..., 0])
    return (levels * step + offsets[..., None]).reshape(w.shape)


def compensated(w: Tensor, inputs: Tensor) -> Tensor:
    """4 bits with a scale for each block, by the products (K, K) of all inputs with one another."""
    w, gram = w.double(), inputs.double()
    gram = gram + torch.eye(len(gram)) * 0.01 * gram.diagonal().mean()
    factor = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(gram)), upper=True)
    made = torch.zeros_like(w)
    for first in range(0, w.shape[1], BLOCK):
        own = slice(first, first + BLOCK)
        part, errors, weight = w[:, own].clone(), torch.zeros(len(w), BLOCK).double(), gram.diagonal()[own]
        largest = part.abs().amax(1, keepdim=True).clamp(min=1e-30)
        scales = torch.stack([largest / 7 * f for f in (*np.arange(0.7, 1.06, 0.03), 7 / 8)])  # (n, rows, 1)
        off = ((torch.round(part / scales).clamp(-8, 7) * scales - part).square() * weight).sum(-1)
        scale = scales[off.argmin(0), torch.arange(len(w))]
        for i in range(BLOCK):
            value = torch.round(part[:, i : i + 1] / scale).clamp(-8, 7) * scale
            made[:, first + i : first + i + 1] = value
            errors[:, i : i + 1] = (part[:, i : i + 1] - value) / factor[first + i, first + i]
            part[:, i + 1 :] -= errors[:, i : i + 1] @ factor[first + i : first + i + 1, first + i + 1 : first + BLOCK]
        w[:, first + BLOCK :] -= errors @ factor[own, first + BLOCK :]
    return made.float()


def calibrated(w: Tensor, inputs: Tensor) -> Tensor:
    """4 bits with a scale and an offset for each block, as `ssmd pull --calibrate` rounds them for LiteRT."""
    made, _ = better(w.numpy(), Factor.of(inputs.numpy().copy()), brief=True)
    levels = made.levels.reshape(*made.steps.shape, BLOCK) * made.steps[..., None]
    offsets = rounded_weight(torch.from_numpy(made.offsets))
    return (torch.from_numpy(levels.astype(np.float32)) + offsets[..., None]).reshape(w.shape)


def rounded_activation(x: Tensor) -> Tensor:
    low, high = x.amin(-1, keepdim=True).clamp(max=0), x.amax(-1, keepdim=True).clamp(min=0)
    scale = ((high - low) / 255).clamp(min=1e-30)
    zero = torch.round(-128 - low / scale)
    return (torch.round(x / scale + zero).clamp(-128, 127) - zero) * scale


Made = Mapping[str, Tensor]
NONE: Made = MappingProxyType({})


class Rounding:
    """Rounded weights in place of PyTorch's linear and embedding while a module runs. Small matrices stay."""

    def __init__(self, module: FlatModule, weights: Set[str], activations: Set[str], made: Made = NONE) -> None:
        """`made`: matrices that are rounded already, by name; the others are to int8."""
        self.weights, self.activations, self.made = weights, activations, made
        tied = not hasattr(module, "head")
        names = {p.data_ptr(): n for n, p in module.named_parameters() if p.numel() >= MIN_WEIGHT_ELEMENTS}
        self.names = {at: "head" if tied and n == "embedding" else n for at, n in names.items()}

    def linear(self, x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
        name = self.names.get(w.data_ptr())
        if name is None:
            return _LINEAR(x, w, bias)
        kind = name.rpartition("layer")[2].partition("_")[2] or name
        x = rounded_activation(x) if kind in self.activations else x
        if kind in self.weights:
            w = self.made[name] if name in self.made else rounded_weight(w)
        return _LINEAR(x, w, bias)

    def embedding(self, ids: Tensor, w: Tensor) -> Tensor:
        return _EMBEDDING(ids, rounded_weight(w) if self.names.get(w.data_ptr()) in self.weights else w)


class Case(NamedTuple):
    weights: Set[str]
    activations: Set[str]
    made: Made = NONE


Pieces = Sequence[Sequence[int]]


def main(folder: Path, asked: argparse.Namespace) -> None:
    source = Source.open(folder)
    family = family_of(source.config)
    config = family.parse(source.config)
    tokenizer = Tokenizer.from_str(source.tokenizer_json.decode())

    def pieces(text: str, most: int | None = None) -> Pieces:
        ids = tokenizer.encode(text, add_special_tokens=False).ids[:most]
        return [ids[i : i + quality.MAX_TOKENS] for i in range(0, len(ids), quality.MAX_TOKENS)]

    def module(bindings: dict[str, Binding]) -> FlatModule:
        weights = {n: b(source) for n, b in bindings.items()}
        made: FlatModule = author(family, config, weights, quality.MAX_TOKENS)
        return made

    bindings = family.bindings(config)
    forms = [module(bindings), module(rotated(bindings))]
    kinds = sorted({n.partition("_")[2] for n in bindings if n.startswith("layer") and not n.endswith("_bias")})
    matrices = [k for k in kinds if getattr(forms[0], f"layer0_{k}", torch.zeros(0)).dim() == 2]
    every, none = frozenset({*matrices, "head", "embedding"}), frozenset[str]()
    whole = {
        "weights and activations": [Case(every, every)],
        "weights": [Case(every, none)],
        "activations": [Case(none, every)],
    }
    short = pieces(quality.TEXT, quality.MAX_TOKENS)
    if asked.int4:
        documents = "".join(file.read_text()[:4000] for file in sorted(DOCUMENTS.rglob("*.md")))
        print(f"\n{source.path.name}, {quality.MAX_TOKENS} and {sum(map(len, pieces(LONG.read_text())))} tokens\n")
        texts = (short, pieces(LONG.read_text()))
        curve(forms, texts, pieces(documents, CALIBRATED), every)
        if asked.gguf:
            peers(forms[0], texts, asked.llama_library, asked.gguf)
        for path in asked.artifacts:
            own(forms[0], texts, path)
        return
    for name, text in (("quality.py", short), (LONG.name, pieces(LONG.read_text()))):
        print(f"\n{source.path.name}, {name}: {sum(map(len, text))} tokens\n")
        print("| KL (change of perplexity) | plain | rotated |\n| --- | --- | --- |")
        table(forms, whole, text, lambda kl, change: f"{kl:.5f} ({change:+.2f} %)")
    if not asked.totals:
        print("\n| KL of one alone | weights, plain | rotated | activations, plain | rotated |")
        print("| --- | --- | --- | --- | --- |")
        single = {k: [Case(frozenset({k}), none), Case(none, frozenset({k}))] for k in (*matrices, "head")}
        table(forms, single, short, lambda kl, change: f"{kl:.5f}")


def cost(
    form: FlatModule, case: Case, pieces: Pieces, references: Sequence[NDArray[np.float32]]
) -> tuple[float, float]:
    """KL, and the change of perplexity in percent."""
    rounding = Rounding(form, case.weights, case.activations, case.made)
    with mock.patch.object(F, "linear", rounding.linear), mock.patch.object(F, "embedding", rounding.embedding):
        return loss([Host(form).rows(piece, CHUNK) for piece in pieces], pieces, references)


def loss(
    found: Sequence[NDArray[np.float32]], pieces: Pieces, references: Sequence[NDArray[np.float32]]
) -> tuple[float, float]:
    """KL of these logits, and the change of perplexity in percent."""
    told = [quality.compared(f, r, p) for f, r, p in zip(found, references, pieces, strict=True)]
    sizes = [len(p) for p in pieces]
    more = [np.log(t["perplexity"] / t["perplexity_f32"]) for t in told]
    kl = np.average([t["kl"] for t in told], weights=sizes)
    return float(kl), 100 * float(np.expm1(np.average(more, weights=sizes)))


def inputs_of(form: FlatModule, pieces: Pieces) -> dict[str, Tensor]:
    """Return the products of a matrix' inputs with one another, summed over all tokens, by its name."""
    names, found = {p.data_ptr(): n for n, p in form.named_parameters()}, dict[str, Tensor]()

    def linear(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        name = names.get(w.data_ptr(), "")
        found[name] = found.get(name, torch.zeros(())) + rows.T @ rows
        return _LINEAR(x, w, bias)

    with mock.patch.object(F, "linear", linear):
        for piece in pieces:
            Host(form).rows(piece, CHUNK)
    return found


def curve(forms: Sequence[FlatModule], texts: Sequence[Pieces], calibration: Pieces, every: Set[str]) -> None:
    """A row for each way to 4 bits."""
    references = [[Host(forms[0]).rows(piece, CHUNK) for piece in pieces] for pieces in texts]
    of = [
        {n: p.data for n, p in f.named_parameters() if is_multiplied(n) and p.numel() >= MIN_WEIGHT_ELEMENTS}
        for f in forms
    ]
    values = sum(p.numel() for n, p in forms[0].named_parameters() if p.dim() == 2)
    four = sum(w.numel() for w in of[0].values())
    grams = [inputs_of(form, calibration) for form in forms]
    ways: dict[str, tuple[float, int, Made]] = {
        "int8, rotated": (8, 1, {}),
        "a scale for 32": (4.5, 0, {n: scaled(w) for n, w in of[0].items()}),
        "a scale for 32, rotated": (4.5, 1, {n: scaled(w) for n, w in of[1].items()}),
        "a scale for 32, compensated": (4.5, 0, {n: compensated(w, grams[0][n]) for n, w in of[0].items()}),
        "a scale for 32, rotated, compensated": (4.5, 1, {n: compensated(w, grams[1][n]) for n, w in of[1].items()}),
        "a scale and an offset for 64": (4.375, 0, {n: shifted(w, 64) for n, w in of[0].items()}),
        "a scale and an offset for 32": (4.75, 0, {n: shifted(w) for n, w in of[0].items()}),
        "a scale and an offset for 32, rotated": (4.75, 1, {n: shifted(w) for n, w in of[1].items()}),
        **{
            f"a scale and an offset for 32{', rotated' * i}, compensated": (
                4.75,
                i,
                {n: calibrated(w, grams[i][n]) for n, w in of[i].items()},
            )
            for i in range(2)
        },
    }
    print("| weights of 4 bits | bytes, int8 = 1 | KL (change of perplexity) | of the longer text |")
    print("| --- | --- | --- | --- |")
    for name, (bits, form, made) in ways.items():
        told = [cost(forms[form], Case(every, every, made), *text) for text in zip(texts, references, strict=True)]
        cells = [f"{kl:.4f} ({change:+.1f} %)" for kl, change in told]
        print(f"| {name} | {1 - four / values * (1 - bits / 8):.2f} | {' | '.join(cells)} |", flush=True)


def peers(form: FlatModule, texts: Sequence[Pieces], library: Path, gguf: Path) -> None:
    """A row for each kind that libllama writes; in front, what its own float32 differs from ssmd's."""
    references = [[Host(form).rows(piece, CHUNK) for piece in pieces] for pieces in texts]
    values = sum(p.numel() for _, p in form.named_parameters() if p.dim() == 2)
    loaded = Library(library)
    with tempfile.TemporaryDirectory(prefix="ssmd-") as folder:
        for kind in ("", *KINDS):
            file = Path(folder) / "model.gguf" if kind else gguf
            if kind:
                loaded.quantize(gguf, file, kind)
            model = Llama(loaded, file, context=2 * quality.MAX_TOKENS, streams=1, threads=1)
            costs = [loss([model.rows(p) for p in t], t, r) for t, r in zip(texts, references, strict=True)]
            model.close()
            cells = [f"{kl:.4f} ({change:+.1f} %)" for kl, change in costs]
            print(
                f"| llama.cpp, {kind or gguf.name} | {matrices_of(file) / values:.2f} | {' | '.join(cells)} |",
                flush=True,
            )


def own(form: FlatModule, texts: Sequence[Pieces], path: Path) -> None:
    """A row for an artifact, fed token by token."""
    references = [[Host(form).rows(piece, CHUNK) for piece in pieces] for pieces in texts]
    artifact = Artifact.open(path)
    manifest, program = (
        artifact.manifest,
        get_runtime(artifact.manifest.runtime).load(artifact, device="cpu", threads=1),
    )

    def rows(piece: Sequence[int]) -> NDArray[np.float32]:
        handle = program.new_state()
        try:
            return np.concatenate([program.decode([handle], [token]) for token in piece])
        finally:
            program.release(handle)

    costs = [loss([rows(p) for p in t], t, r) for t, r in zip(texts, references, strict=True)]
    program.close()
    how = ", calibrated" * ("calibrated" in manifest.quantization_recipe)
    cells = [f"{kl:.4f} ({change:+.1f} %)" for kl, change in costs]
    print(f"| {manifest.runtime}, {manifest.quantization}{how} | | {' | '.join(cells)} |", flush=True)


def matrices_of(file: Path) -> int:
    """Return the bytes of the matrices of a GGUF file that are multiplied or looked up."""
    return sum(
        tensor.nbytes
        for name, tensor in GGUF(file).listed.items()
        if len(tensor.shape) == 2 and math.prod(tensor.shape) >= MIN_WEIGHT_ELEMENTS and "conv" not in name
    )


def table(
    forms: Sequence[FlatModule],
    rows: Mapping[str, Sequence[Case]],
    pieces: Pieces,
    cell: Callable[[float, float], str],
) -> None:
    """A column for each case and form; the first form is exact where nothing is rounded."""
    references = [Host(forms[0]).rows(piece, CHUNK) for piece in pieces]
    for name, cases in rows.items():
        cells = [name]
        for case, one in ((case, one) for case in cases for one in forms):
            cells.append(cell(*cost(one, case, pieces, references)))
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--totals", action="store_true")
    parser.add_argument("--int4", action="store_true")
    parser.add_argument("--llama-library", type=Path)
    parser.add_argument("--gguf", type=Path)
    parser.add_argument("--artifacts", type=Path, nargs="*", default=[])
    options = parser.parse_args()
    if bool(options.gguf) != bool(options.llama_library) or ((options.gguf or options.artifacts) and not options.int4):
        parser.error("--gguf and --artifacts need --int4, --gguf needs --llama-library, and that needs --gguf")
    if options.folder:
        main(options.folder, options)
    else:
        with smollm2_source(Settings(), print) as made:
            main(made, options)
