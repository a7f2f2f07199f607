"""Models of PyTorch converted by coremltools, with torch's own results as the reference.

A case is a function of the tensors in `OPERANDS` by name; all of them together are one traced module.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from mil.schema import coremltools as ct
from mil.weights import Array

_random = np.random.default_rng(11)
# Floats that float16 can hold, and no two elements of `ranked` close to each other, so that float16 keeps their order.
OPERANDS: dict[str, Array] = {
    "x": _random.normal(size=(2, 6, 8)),
    "y": _random.normal(size=(2, 6, 8)),
    "image": _random.normal(size=(1, 4, 6, 7)),
    "ranked": _random.permutation(48).reshape(2, 3, 8) / 8,
    "query": _random.normal(size=(1, 4, 3, 8)),
    "key": _random.normal(size=(1, 4, 5, 8)),
    "value": _random.normal(size=(1, 4, 5, 8)),
}
OPERANDS = {name: a.astype(np.float16).astype(np.float32) for name, a in OPERANDS.items()}
OPERANDS |= {"ids": np.array([[3, 0, 9, 3]], np.int32), "place": np.array([2], np.int32)}

Case = Callable[[Any, dict[str, Any]], Any]


def cases() -> dict[str, Case]:
    """The cases by name; torch is imported when they are asked for."""
    import torch
    import torch.nn.functional as F

    generator = torch.Generator().manual_seed(5)

    def weight(*shape: int) -> Any:
        return (torch.randn(shape, generator=generator) / 2).half().float()

    w1, w1_grouped, w1_depth, b1 = weight(4, 6, 3), weight(4, 3, 3), weight(6, 1, 4), weight(4)
    w2, w2_grouped, w2_point = weight(3, 4, 3, 2), weight(8, 2, 3, 3), weight(5, 4, 1, 1)
    matrix, offset, scale, table = weight(5, 8), weight(5), weight(8), weight(10, 6)
    mean, variance = weight(6), weight(6).abs() + 0.5
    mask = torch.ones(3, 5).tril(1).bool()

    def assigned(t: dict[str, Any]) -> Any:
        copy = t["x"] * 1.0
        copy[:, 1:4, ::2] = t["y"][:, 0:3, 4:]
        return copy

    def rms_norm(x: Any) -> Any:
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5) * scale

    def one_hot_write(t: dict[str, Any]) -> Any:
        rows = torch.arange(6, dtype=torch.int32)
        chosen = (rows == t["place"]).float().reshape(1, 6, 1)
        return t["x"] * (1 - chosen) + t["y"] * chosen

    def decay(t: dict[str, Any]) -> Any:
        sums = t["x"].cumsum(1)
        apart = (sums.unsqueeze(2) - sums.unsqueeze(1)).clamp(max=0.0)
        return torch.exp(apart) * torch.tril(torch.ones(6, 6)).unsqueeze(-1)

    return {
        "conv1d": lambda _, t: F.conv1d(t["x"], w1, b1),
        "conv1d_strided": lambda _, t: F.conv1d(t["x"], w1, b1, stride=2, padding=2),
        "conv1d_dilated": lambda _, t: F.conv1d(t["x"], w1, dilation=3, padding=3),
        "conv1d_grouped": lambda _, t: F.conv1d(t["x"], w1_grouped, b1, groups=2, padding=1),
        "conv1d_depthwise": lambda _, t: F.silu(F.conv1d(t["x"], w1_depth, mean, groups=6)),
        "conv2d": lambda _, t: F.conv2d(t["image"], w2, padding=(2, 1)),
        "conv2d_grouped": lambda _, t: F.conv2d(t["image"], w2_grouped, groups=2, stride=(2, 1), dilation=(1, 2)),
        "conv2d_pointwise": lambda _, t: F.conv2d(t["image"], w2_point, offset),
        "conv2d_same": lambda _, t: F.conv2d(t["image"], w2, padding="same"),
        "linear": lambda _, t: F.linear(t["x"], matrix, offset),
        "matmul": lambda _, t: t["x"] @ t["y"].transpose(1, 2),
        "einsum_batched": lambda _, t: torch.einsum("bhd,bkd->bhk", t["x"], t["y"]),
        "einsum_chunked": lambda _, t: torch.einsum("bhqd,bhkd->bhqk", t["query"], t["key"]),
        "einsum_native": lambda _, t: torch.einsum(
            "nchw,nwhu->nchu", t["query"], t["key"].permute(0, 3, 2, 1)[:, :, :3]
        ),
        "silu": lambda _, t: F.silu(t["x"]),
        "softplus": lambda _, t: F.softplus(t["x"] * 4),
        "gelu": lambda _, t: F.gelu(t["x"]) + F.gelu(t["x"], approximate="tanh"),
        "exponents": lambda _, t: torch.exp(-F.softplus(t["x"])) * torch.sigmoid(t["y"]),
        "log1p": lambda _, t: torch.log1p(t["x"].abs()) + torch.sqrt(t["y"].abs() + 0.5),
        "powers": lambda _, t: t["x"].pow(2) + torch.rsqrt(t["y"].abs() + 0.25) + t["x"].abs().pow(1.5),
        "clamps": lambda _, t: t["x"].clamp(-0.5, 0.75) + t["y"].clamp(min=0.25) + t["x"].clamp(max=0.0),
        "remainders": lambda _, t: torch.floor(t["x"]) + torch.remainder(t["x"] * 4, 3.0),
        "cumsum": lambda _, t: t["x"].cumsum(1),
        "decay": lambda _, t: decay(t),
        "softmax": lambda _, t: torch.softmax(t["x"] * 3, 1),
        "log_softmax": lambda _, t: torch.log_softmax(t["x"], -1),
        "logsumexp": lambda _, t: torch.logsumexp(t["x"], -1),
        "layer_norm": lambda _, t: F.layer_norm(t["x"], (8,), scale, scale * 2),
        "group_norm": lambda _, t: F.group_norm(t["x"], 3, mean, variance),
        "batch_norm": lambda _, t: F.batch_norm(t["image"], mean[:4], variance[:4], mean[1:5], variance[1:5]),
        "rms_norm": lambda _, t: rms_norm(t["x"]),
        "reduced": lambda _, t: t["x"].sum(1) + t["x"].mean(1) + t["x"].amax(1) + t["x"].amin(1),
        "variance": lambda _, t: t["x"].var(-1) + t["x"].std(1).mean(-1, keepdim=True),
        "slices": lambda _, t: t["x"][:, 1:-1:2, -5:] * t["y"][:, ::3, 2:7],
        "selected": lambda _, t: t["x"][:, -1] + t["y"][:, :, 3][:, :1],
        "flipped": lambda _, t: t["x"].flip(1) + torch.roll(t["y"], 2, 2),
        "split": lambda _, t: torch.cat(torch.split(t["x"], [1, 5, 2], -1)[::-1], -1),
        "chunk": lambda _, t: torch.stack(t["x"].chunk(4, 2), 1),
        "shaped": lambda _, t: t["x"].reshape(2, 3, 2, 8).permute(2, 0, 3, 1).unsqueeze(0).squeeze(-2),
        "expanded": lambda _, t: t["x"][:, :1].expand(2, 4, 8).repeat(1, 2, 1),
        "interleaved": lambda _, t: t["key"].repeat_interleave(2, dim=1),
        "padded": lambda _, t: F.pad(t["x"], (2, 1), value=0.5),
        "embedding": lambda _, t: F.embedding(t["ids"], table),
        "gather": lambda _, t: torch.gather(t["x"], 1, (t["ids"].long() % 6).reshape(1, 4, 1).expand(2, 4, 8)),
        "index_select": lambda _, t: t["x"].index_select(1, t["place"]),
        "one_hot": lambda _, t: F.one_hot(t["ids"].long(), 10).float(),
        "one_hot_write": lambda _, t: one_hot_write(t),
        "assigned": lambda _, t: assigned(t),
        "scattered": lambda _, t: t["x"].scatter(1, (t["ids"].long() % 6)[:, :2, None].expand(2, 2, 8), t["y"][:, :2]),
        "scatter_added": lambda _, t: t["x"].scatter_add(
            1, (t["ids"].long() % 6).reshape(1, 4, 1).expand(2, 4, 8), t["y"][:, :4]
        ),
        "where": lambda _, t: torch.where(t["x"] > t["y"], t["x"], torch.zeros_like(t["y"])),
        "masked": lambda _, t: t["x"].masked_fill(
            torch.logical_or((t["x"] < 0) & ~(t["y"] > 0.5), t["y"] == 1.0), -3.0
        ),
        "triangles": lambda _, t: torch.tril(t["x"]) + torch.triu(t["y"], 1),
        "topk": lambda _, t: torch.topk(t["ranked"], 3, -1)[0],
        "topk_indices": lambda _, t: torch.topk(t["ranked"], 3, -1)[1].int(),
        "sorted": lambda _, t: torch.argsort(t["ranked"], 1, descending=True).int(),
        "argmax": lambda _, t: t["ranked"].argmax(-1).int(),
        "attention": lambda _, t: F.scaled_dot_product_attention(t["query"], t["key"], t["value"]),
        "attention_masked": lambda _, t: F.scaled_dot_product_attention(t["query"], t["key"], t["value"], mask),
        "attention_added": lambda _, t: F.scaled_dot_product_attention(
            t["query"], t["key"], t["value"], t["x"][:1, :3, :5].unsqueeze(1)
        ),
        "attention_causal": lambda _, t: F.scaled_dot_product_attention(
            t["query"], t["key"][:, :, :3], t["value"][:, :, :3], is_causal=True
        ),
        "integers": lambda _, t: (t["ids"] // 2 * 3 - t["ids"] % 4) * (t["ids"] > 2).int(),
    }


def _module(chosen: dict[str, Case]) -> Any:
    import torch

    class Cases(torch.nn.Module):  # type: ignore[misc]
        def forward(self, *tensors: Any) -> Any:
            named = dict(zip(OPERANDS, tensors, strict=True))
            return tuple(case(self, named) for case in chosen.values())

    return Cases().eval()


def expected(chosen: dict[str, Case]) -> dict[str, Array]:
    """Return torch's results."""
    import torch

    with torch.no_grad():
        outputs = _module(chosen)(*map(torch.from_numpy, OPERANDS.values()))
    return {name: output.numpy() for name, output in zip(chosen, outputs, strict=True)}


def package(path: Path, chosen: dict[str, Case], precision: str, target: str = "iOS18") -> None:
    """Save the cases as a package of an output each."""
    import torch

    with torch.no_grad():
        traced = torch.jit.trace(_module(chosen), tuple(map(torch.from_numpy, OPERANDS.values())), check_trace=False)
    given = expected(chosen)
    ct.convert(
        traced,
        inputs=[ct.TensorType(name=name, shape=a.shape, dtype=a.dtype.type) for name, a in OPERANDS.items()],
        outputs=[ct.TensorType(name=f"out_{name}", dtype=given[name].dtype.type) for name in chosen],
        minimum_deployment_target=getattr(ct.target, target),
        compute_precision=getattr(ct.precision, precision.upper()),
        skip_model_load=True,
    ).save(str(path))
