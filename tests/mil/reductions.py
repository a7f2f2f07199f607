"""Operations of MIL that run over whole dimensions: sums and maxima, cumulative sums, softmax and norms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from mil.operations import Parameters, Run, Unsupported, integers, operation
from mil.weights import Array


def _reduction(compute: Callable[..., Any]) -> Callable[[Array | None, Any], Run]:
    def make(axes: Array | None, keep_dims: Any) -> Run:
        places = None if axes is None else integers(axes)
        kept = bool(keep_dims)
        return lambda x: compute(x, axis=places, keepdims=kept)

    return make


def _log_sum_exp(x: Array, axis: tuple[int, ...] | None, keepdims: bool) -> Any:
    largest = x.max(axis=axis, keepdims=True)
    total = np.log(np.sum(np.exp(x - largest), axis=axis, keepdims=True)) + largest
    return total if keepdims else np.squeeze(total, axis)


for _name, _kind, _compute in (
    ("reduce_sum", "number", np.sum),
    ("reduce_prod", "number", np.prod),
    ("reduce_max", "number", np.max),
    ("reduce_min", "number", np.min),
    ("reduce_sum_square", "number", lambda x, **how: np.sum(np.square(x), **how)),
    ("reduce_l1_norm", "number", lambda x, **how: np.sum(np.abs(x), **how)),
    # A mean or a root of integers is not defined by the operation's specification, so it is not done.
    ("reduce_mean", "float", np.mean),
    ("reduce_l2_norm", "float", lambda x, **how: np.sqrt(np.sum(np.square(x), **how))),
    ("reduce_log_sum_exp", "float", _log_sum_exp),
):
    operation(_name, f"x:{_kind}", axes=None, keep_dims=False)(_reduction(_compute))


def _index_type(types: Mapping[str, str], given: Parameters) -> tuple[str, ...]:
    return (str(given["output_dtype"]),)


for _name, _find in {"reduce_argmax": np.argmax, "reduce_argmin": np.argmin}.items():

    def _arg(axis: Any, keep_dims: Any, output_dtype: str, _find: Callable[..., Any] = _find) -> Run:
        if output_dtype not in ("int32", "uint16"):
            raise Unsupported(f"indices of type {output_dtype}")
        return lambda x: np.asarray(_find(x, int(axis), keepdims=bool(keep_dims))).astype(output_dtype)

    operation(_name, "x:number", result=_index_type, axis=-1, keep_dims=False, output_dtype="int32")(_arg)


@operation("cumsum", "x:number", axis=0, exclusive=False, reverse=False)
def cumsum(axis: Any, exclusive: Any, reverse: Any) -> Run:
    """The sum of all elements up to each one, without itself if `exclusive`, from the end if `reverse`."""
    at = int(axis)

    def run(x: Array) -> Array:
        forward = np.flip(x, at) if reverse else x
        total = np.cumsum(forward, at, dtype=x.dtype)
        if exclusive:
            total = np.roll(total, 1, at)
            np.moveaxis(total, at, 0)[0] = 0
        return np.flip(total, at) if reverse else total

    return run


def softmax_of(x: Array, axis: int) -> Array:
    """exp(x) over its sum along `axis`."""
    powers = np.exp(x - x.max(axis, keepdims=True))
    return np.asarray(powers / powers.sum(axis, keepdims=True))


@operation("softmax", "x:float", axis=-1)
def softmax(axis: Any) -> Run:
    """exp(x) over its sum along `axis`."""
    at = int(axis)
    return lambda x: softmax_of(x, at)


@operation("layer_norm", "x:float gamma?:float beta?:float", axes=None, epsilon=1e-5)
def layer_norm(axes: Array | None, epsilon: Any) -> Run:
    """(x - mean) / sqrt(variance + epsilon) gamma + beta over `axes`; gamma and beta are of those sizes."""

    def run(x: Array, gamma: Array | None, beta: Array | None) -> Any:
        places = tuple(range(x.ndim)) if axes is None else tuple(axis % x.ndim for axis in integers(axes))
        sizes = [n if axis in places else 1 for axis, n in enumerate(x.shape)]
        centred = x - x.mean(places, keepdims=True)
        y = centred / np.sqrt(np.square(centred).mean(places, keepdims=True) + np.float32(epsilon))
        if gamma is not None:
            y = y * gamma.reshape(sizes)
        return y if beta is None else y + beta.reshape(sizes)

    return run


@operation("batch_norm", "x:float mean:float variance:float gamma?:float beta?:float", epsilon=1e-5)
def batch_norm(epsilon: Any) -> Run:
    """(x - mean) / sqrt(variance + epsilon) gamma + beta, for each channel: x (N, C, *D), the others (C,)."""

    def run(x: Array, mean: Array, variance: Array, gamma: Array | None, beta: Array | None) -> Any:
        def channels(a: Array) -> Array:
            return a.reshape(-1, *(1,) * (x.ndim - 2))  # (C, 1, ...)

        y = (x - channels(mean)) / np.sqrt(channels(variance) + np.float32(epsilon))
        if gamma is not None:
            y = y * channels(gamma)
        return y if beta is None else y + channels(beta)

    return run
