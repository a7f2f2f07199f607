"""Which matrices int8 costs most in, plain and rotated: weights and activations rounded as XNNPACK does, in PyTorch.

    python benchmarks/quantization.py [FOLDER]     a source checkpoint; default: SmolLM2 out of its package

Weights: symmetric, a scale for each output channel. Activations: asymmetric, a scale for each token. Perplexity and
KL(f32 || rounded) in nats on the text of ssmd/build/quality.py. The quality that a build prints is LiteRT's own.
"""

from __future__ import annotations

import sys
from collections.abc import Set
from pathlib import Path
from unittest import mock

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
from ssmd_litert.recipe import MIN_WEIGHT_ELEMENTS

_LINEAR, _EMBEDDING = F.linear, F.embedding


def rounded_weight(w: Tensor) -> Tensor:
    scale = w.abs().amax(1, keepdim=True).clamp(min=1e-30) / 127
    return torch.round(w / scale) * scale


def rounded_activation(x: Tensor) -> Tensor:
    low, high = x.amin(-1, keepdim=True).clamp(max=0), x.amax(-1, keepdim=True).clamp(min=0)
    scale = ((high - low) / 255).clamp(min=1e-30)
    zero = torch.round(-128 - low / scale)
    return (torch.round(x / scale + zero).clamp(-128, 127) - zero) * scale


class Rounding:
    """Rounded weights in place of PyTorch's linear and embedding while a module runs. Small matrices stay."""

    def __init__(self, module: FlatModule, weights: Set[str], activations: Set[str]) -> None:
        self.weights, self.activations = weights, activations
        tied = not hasattr(module, "head")
        names = {p.data_ptr(): n for n, p in module.named_parameters() if p.numel() >= MIN_WEIGHT_ELEMENTS}
        self.names = {at: "head" if tied and n == "embedding" else n for at, n in names.items()}

    def linear(self, x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
        name = self.names.get(w.data_ptr())
        if name is None:
            return _LINEAR(x, w, bias)
        kind = name.rpartition("layer")[2].partition("_")[2] or name
        x = rounded_activation(x) if kind in self.activations else x
        return _LINEAR(x, rounded_weight(w) if kind in self.weights else w, bias)

    def embedding(self, ids: Tensor, w: Tensor) -> Tensor:
        return _EMBEDDING(ids, rounded_weight(w) if self.names.get(w.data_ptr()) in self.weights else w)


def main(folder: Path) -> None:
    source = Source.open(folder)
    family = family_of(source.config)
    config = family.parse(source.config)
    ids = Tokenizer.from_str(source.tokenizer_json.decode()).encode(quality.TEXT, add_special_tokens=False).ids
    ids = ids[: quality.MAX_TOKENS]

    def module(bindings: dict[str, Binding]) -> FlatModule:
        made: FlatModule = author(family, config, {n: b(source) for n, b in bindings.items()}, len(ids))
        return made

    bindings = family.bindings(config)
    reference = Host(module(bindings)).rows(ids, CHUNK)
    kinds = sorted({n.partition("_")[2] for n in bindings if n.startswith("layer") and not n.endswith("_bias")})
    print(f"# {source.path.name}: {len(ids)} tokens; perplexity in f32, change, KL, same favourite")
    for form, made in (("plain", bindings), ("rotated", rotated(bindings))):
        one = module(made)
        matrices = [k for k in kinds if getattr(one, f"layer0_{k}", torch.zeros(0)).dim() == 2]
        every, none = frozenset({*matrices, "head", "embedding"}), frozenset[str]()
        cases = [("weights and activations", every, every), ("weights", every, none), ("activations", none, every)]
        for kind in [*matrices, "head"]:
            cases += [
                (f"weights of {kind}", frozenset({kind}), none),
                (f"activations of {kind}", none, frozenset({kind})),
            ]
        for what, weights, activations in cases:
            rounding = Rounding(one, weights, activations)
            with mock.patch.object(F, "linear", rounding.linear), mock.patch.object(F, "embedding", rounding.embedding):
                told = quality.compared(Host(one).rows(ids, CHUNK), reference, ids)
            change = 100 * (told["perplexity"] / told["perplexity_f32"] - 1)
            print(
                f"{form:8} {what:26} {told['perplexity_f32']:.2f} {change:+.2f} % {told['kl']:.5f} {told['same']:.3f}"
            )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with smollm2_source(Settings(), print) as made:
            main(made)
