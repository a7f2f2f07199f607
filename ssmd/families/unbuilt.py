"""Hybrid families that are refused by name: the parts that each needs and ssmd does not have, and what to take instead.

A part of a supported family, such as the layers with experts of Nemotron-H, may be refused in the same words.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

# A published model of each family that is named as the one to take instead.
PUBLISHED: Mapping[str, str] = {
    "qwen3_5": "Qwen/Qwen3.5-4B",
    "lfm2_moe": "LiquidAI/LFM2-8B-A1B",
    "granitemoehybrid": "ibm-granite/granite-4.0-h-micro",
    "falcon_mamba": "tiiuae/falcon-mamba-7b-instruct",
    "nemotron_h": "Nemotron-3-Nano-4B, which is dense",
}


@dataclass(frozen=True)
class UnsupportedFamily:
    """A family, or a part of one, that is not built. needs: the parts that are absent here.

    weights: the memory that the published model takes, where it is a reason too. instead: families to take, the nearest
    first. gguf: its architecture in GGUF files, "" if there is none.
    """

    needs: str
    instead: tuple[str, ...]
    weights: str = ""
    gguf: str = ""

    def why(self, supported: Collection[str]) -> str:
        """Return the reason and the advice, as the end of a sentence about the model."""
        weights = f" Memory is a reason too: {self.weights}." if self.weights else ""
        known = [name for name in self.instead if name in supported]
        advice = "".join(f" Take a model of {name} instead, such as {PUBLISHED[name]}." for name in known[:1])
        return f"it needs {self.needs}, which ssmd does not have.{weights}{advice}".rstrip(".")


UNBUILT: Mapping[str, UnsupportedFamily] = {
    "jamba": UnsupportedFamily(
        "Mamba-1 layers whose norms of dt, B and C have weights, and in most of its models experts",
        ("granitemoehybrid",),
        gguf="jamba",
    ),
    "kimi_linear": UnsupportedFamily(
        "Kimi Delta Attention (a decay for each channel), multi-head latent attention, and experts beside them",
        ("lfm2_moe",),
        "Kimi-Linear-48B-A3B takes 48 GB in int8 and 29 GB in int4",
        gguf="kimi-linear",
    ),
    "olmo_hybrid": UnsupportedFamily(
        "gated DeltaNet whose beta reaches 2, with a convolution each for queries, keys and values",
        ("qwen3_5", "granitemoehybrid"),
    ),
    "plamo2": UnsupportedFamily(
        "Mamba heads with weighted norms of dt, B and C, and a second norm after each part of a layer",
        ("granitemoehybrid",),
        gguf="plamo2",
    ),
    "qwen3_5_moe": UnsupportedFamily(
        "256 experts and a shared one behind a gate of its own, in layers of gated DeltaNet",
        ("qwen3_5", "lfm2_moe"),
        "Qwen3.5-35B-A3B takes 35 GB in int8 and 21 GB in int4",
        gguf="qwen35moe",
    ),
    "qwen3_next": UnsupportedFamily(
        "512 experts and a shared one behind a gate of its own, in layers of gated DeltaNet",
        ("qwen3_5", "lfm2_moe"),
        "Qwen3-Next-80B-A3B takes 80 GB in int8 and 48 GB in int4",
        gguf="qwen3next",
    ),
    "qwen4_exp": UnsupportedFamily(
        "hyper-connections, tables of n-grams, an indexer and experts, in layers of gated DeltaNet",
        ("qwen3_5", "lfm2_moe"),
    ),
    "recurrent_gemma": UnsupportedFamily(
        "the RG-LRU recurrence and attention in a window beside it", ("granitemoehybrid",)
    ),
    "rwkv7": UnsupportedFamily("the time mixing of RWKV-7", ("falcon_mamba",), gguf="rwkv7"),
    "zamba2": UnsupportedFamily(
        "a block of attention that several layers share, with adapters for each of them", ("granitemoehybrid",)
    ),
}
NEMOTRON_EXPERTS = UnsupportedFamily(
    "experts with squared ReLU and no gate, chosen in groups, and a shared one beside them",
    ("nemotron_h", "lfm2_moe"),
    "Nemotron-3-Nano-30B-A3B takes 30 GB in int8 and 18 GB in int4",
    gguf="nemotron_h_moe",
)


def named(model_type: object) -> UnsupportedFamily | None:
    """Return the entry of a `model_type`, also of the text model inside a larger one; None if there is none."""
    return UNBUILT.get(model_type.removesuffix("_text")) if isinstance(model_type, str) else None


def in_gguf(architecture: str) -> UnsupportedFamily | None:
    """Return the entry of an architecture of GGUF files; None if there is none."""
    return next((one for one in (*UNBUILT.values(), NEMOTRON_EXPERTS) if one.gguf and one.gguf == architecture), None)
