"""Which matrices int8 costs most in, plain and rotated: weights and activations rounded as XNNPACK does, in PyTorch.

    python benchmarks/quantization.py [FOLDER] [--totals]    a source checkpoint; default: SmolLM2 out of its package

Weights: symmetric, a scale for each output channel; int4: one for 32 values, embedding and head int8. Activations:
asymmetric, a scale for each token. KL(f32 || rounded) in nats and the change of perplexity, on the text of
ssmd/build/quality.py and on quantization.txt beside this file, in pieces of 400 tokens. --totals leaves single matrices
out. "Weights" alone is what wgpu rounds. What runtimes lose: benchmarks/rotation.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from ssmd.authoring.flat import FlatModule
from ssmd.authoring.host import Host
from ssmd.authoring.model import author
from ssmd.authoring.ops import CHUNK
from ssmd.build import quality
from ssmd.cli.making import smollm2_source
from ssmd.config import Settings
from ssmd.families.registry import family_of
from ssmd.families.rotation import rotated
from ssmd.families.weights import Binding
from ssmd.model.source import Source
from ssmd_litert.recipe import INT4_BLOCK, MIN_WEIGHT_ELEMENTS

_LINEAR, _EMBEDDING = F.linear, F.embedding
LONG = Path(__file__).with_name("quantization.txt")


def rounded_weight(w: Tensor) -> Tensor:
    scale = w.abs().amax(1, keepdim=True).clamp(min=1e-30) / 127
    return torch.round(w / scale) * scale


def rounded_to_4_bits(w: Tensor) -> Tensor:
    parts = w.reshape(-1, INT4_BLOCK)
    scale = parts.abs().amax(1, keepdim=True).clamp(min=1e-30) / 7
    return (torch.round(parts / scale).clamp(-8, 7) * scale).reshape(w.shape)


def rounded_activation(x: Tensor) -> Tensor:
    low, high = x.amin(-1, keepdim=True).clamp(max=0), x.amax(-1, keepdim=True).clamp(min=0)
    scale = ((high - low) / 255).clamp(min=1e-30)
    zero = torch.round(-128 - low / scale)
    return (torch.round(x / scale + zero).clamp(-128, 127) - zero) * scale


class Rounding:
    """Rounded weights in place of PyTorch's linear and embedding while a module runs. Small matrices stay."""

    def __init__(self, module: FlatModule, weights: Set[str], activations: Set[str], bits: int = 8) -> None:
        self.weights, self.activations, self.bits = weights, activations, bits
        tied = not hasattr(module, "head")
        names = {p.data_ptr(): n for n, p in module.named_parameters() if p.numel() >= MIN_WEIGHT_ELEMENTS}
        self.names = {at: "head" if tied and n == "embedding" else n for at, n in names.items()}

    def linear(self, x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
        name = self.names.get(w.data_ptr())
        if name is None:
            return _LINEAR(x, w, bias)
        kind = name.rpartition("layer")[2].partition("_")[2] or name
        x = rounded_activation(x) if kind in self.activations else x
        rounded = rounded_to_4_bits if self.bits == 4 and kind != "head" else rounded_weight
        return _LINEAR(x, rounded(w) if kind in self.weights else w, bias)

    def embedding(self, ids: Tensor, w: Tensor) -> Tensor:
        return _EMBEDDING(ids, rounded_weight(w) if self.names.get(w.data_ptr()) in self.weights else w)


class Case(NamedTuple):
    weights: Set[str]
    activations: Set[str]
    bits: int = 8


Pieces = Sequence[Sequence[int]]


def main(folder: Path, totals: bool) -> None:
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
        "int4 weights and activations": [Case(every, every, 4)],
        "int4 weights": [Case(every, none, 4)],
    }
    short = pieces(quality.TEXT, quality.MAX_TOKENS)
    for name, text in (("quality.py", short), (LONG.name, pieces(LONG.read_text()))):
        print(f"\n{source.path.name}, {name}: {sum(map(len, text))} tokens\n")
        print("| KL (change of perplexity) | plain | rotated |\n| --- | --- | --- |")
        table(forms, whole, text, lambda kl, change: f"{kl:.5f} ({change:+.2f} %)")
    if not totals:
        print("\n| KL of one alone | weights, plain | rotated | activations, plain | rotated |")
        print("| --- | --- | --- | --- | --- |")
        single = {k: [Case(frozenset({k}), none), Case(none, frozenset({k}))] for k in (*matrices, "head")}
        table(forms, single, short, lambda kl, change: f"{kl:.5f}")


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
            rounding = Rounding(one, case.weights, case.activations, case.bits)
            with mock.patch.object(F, "linear", rounding.linear), mock.patch.object(F, "embedding", rounding.embedding):
                told = [
                    quality.compared(Host(one).rows(p, CHUNK), r, p) for p, r in zip(pieces, references, strict=True)
                ]
            sizes = [len(p) for p in pieces]
            more = [np.log(t["perplexity"] / t["perplexity_f32"]) for t in told]
            kl = np.average([t["kl"] for t in told], weights=sizes)
            cells.append(cell(float(kl), 100 * float(np.expm1(np.average(more, weights=sizes)))))
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    asked = [word for word in sys.argv[1:] if word != "--totals"]
    if asked:
        main(Path(asked[0]), "--totals" in sys.argv)
    else:
        with smollm2_source(Settings(), print) as made:
            main(made, "--totals" in sys.argv)
