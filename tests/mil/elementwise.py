"""Operations of MIL that take each element by itself: arithmetic, comparisons, functions, casts and choices."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from mil.operations import REQUIRED, Parameters, Run, Unsupported, operation
from mil.weights import Array

_erf: Callable[[Array], Array] = np.vectorize(math.erf, otypes=[np.float32])


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x)); exp may become infinite, which gives 0."""
    return np.asarray(1 / (1 + np.exp(-x)))


def _fixed(run: Run) -> Callable[[], Run]:
    return lambda: run


for _name, _binary in {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "floor_div": np.floor_divide,
    "mod": np.mod,  # with the sign of the divisor
    "minimum": np.minimum,
    "maximum": np.maximum,
    "pow": np.power,
}.items():
    operation(_name, "x:number y:number", alike="x y")(_fixed(_binary))
# The quotient of integers is not defined by the operation's specification, so it is not done.
operation("real_div", "x:float y:float", alike="x y")(_fixed(np.true_divide))

for _name, _comparison in {
    "less": np.less,
    "less_equal": np.less_equal,
    "greater": np.greater,
    "greater_equal": np.greater_equal,
    "equal": np.equal,
    "not_equal": np.not_equal,
}.items():
    operation(_name, "x:number y:number", result="bool", alike="x y")(_fixed(_comparison))

for _name, _logical in {
    "logical_and": np.logical_and,
    "logical_or": np.logical_or,
    "logical_xor": np.logical_xor,
}.items():
    operation(_name, "x:bool y:bool", result="bool")(_fixed(_logical))
operation("logical_not", "x:bool")(_fixed(np.logical_not))

_UNARY: dict[str, Run] = {
    "exp": np.exp,
    "exp2": np.exp2,
    "sqrt": np.sqrt,
    "sin": np.sin,
    "cos": np.cos,
    "tan": np.tan,
    "tanh": np.tanh,
    "floor": np.floor,
    "ceil": np.ceil,
    "round": np.round,  # half to even
    "erf": _erf,
    "sigmoid": sigmoid,
    "silu": lambda x: x * sigmoid(x),
    "relu": lambda x: np.maximum(x, 0),
    "relu6": lambda x: np.clip(x, 0, 6),
    "softplus": lambda x: np.logaddexp(x, 0, dtype=np.float32),
    "softsign": lambda x: x / (1 + np.abs(x)),
}
for _name, _unary in _UNARY.items():
    operation(_name, "x:float")(_fixed(_unary))
for _name, _unary in {"abs": np.abs, "sign": np.sign, "square": np.square}.items():
    operation(_name, "x:number")(_fixed(_unary))
operation("identity", "x", exact=True)(_fixed(lambda x: x))


@operation("rsqrt", "x:float", epsilon=1e-12)
def rsqrt(epsilon: float) -> Run:
    """1 / sqrt(x + epsilon)."""
    return lambda x: 1 / np.sqrt(x + np.float32(epsilon))


@operation("inverse", "x:float", epsilon=1e-4)
def inverse(epsilon: float) -> Run:
    """1 / (x + epsilon)."""
    return lambda x: 1 / (x + np.float32(epsilon))


@operation("log", "x:float", epsilon=1e-45)
def log(epsilon: float) -> Run:
    """log(x + epsilon)."""
    return lambda x: np.log(x + np.float32(epsilon))


@operation("clip", "x:float", alpha=REQUIRED, beta=REQUIRED)
def clip(alpha: Any, beta: Any) -> Run:
    """Between alpha and beta, which iOS 17 demands to be the larger one."""
    if alpha >= beta:
        raise Unsupported(f"alpha {alpha} is not below beta {beta}")
    return lambda x: np.minimum(np.maximum(x, alpha), beta)


@operation("threshold", "x:number", alpha=REQUIRED)
def threshold(alpha: Any) -> Run:
    """At least alpha."""
    return lambda x: np.maximum(x, alpha)


@operation("leaky_relu", "x:float", alpha=REQUIRED)
def leaky_relu(alpha: Any) -> Run:
    """x, or alpha x below 0."""
    return lambda x: np.where(x < 0, alpha * x, x)


@operation("elu", "x:float", alpha=REQUIRED)
def elu(alpha: Any) -> Run:
    """x, or alpha (exp(x) - 1) below 0."""
    return lambda x: np.where(x > 0, x, alpha * np.expm1(np.minimum(x, 0)))


@operation("gelu", "x:float", mode="EXACT")
def gelu(mode: str) -> Run:
    """x times the normal distribution's integral, or one of its two approximations."""
    if mode == "EXACT":
        return lambda x: 0.5 * x * (1 + _erf(x / math.sqrt(2)))
    if mode == "TANH_APPROXIMATION":
        return lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    if mode == "SIGMOID_APPROXIMATION":
        return lambda x: x * sigmoid(1.702 * x)
    raise Unsupported(f"the mode {mode!r}")


# How the types of a cast are held in numpy.
STORAGE = {"fp16": np.float32, "fp32": np.float32, "bool": np.bool_} | {
    name: getattr(np, name) for name in ("int8", "uint8", "int16", "uint16", "int32")
}


def _cast_type(types: Mapping[str, str], given: Parameters) -> tuple[str, ...]:
    return (str(given["dtype"]),)


@operation("cast", "x", result=_cast_type, dtype=REQUIRED)
def cast(dtype: str) -> Run:
    """To another type: a float loses its fraction on the way to an integer."""
    if dtype not in STORAGE:
        raise Unsupported(f"a cast to {dtype}")
    return lambda x: x.astype(STORAGE[dtype])


@operation("select", "a b cond:bool", alike="a b", exact=True)
def select() -> Run:
    """a where cond holds, else b; the three are broadcast."""
    return lambda a, b, cond: np.where(cond, a, b)
