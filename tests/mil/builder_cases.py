"""Single operations built with coremltools' Builder, whose own value inference says what they give.

A case is a function of the Builder and of the tensors in `OPERANDS` by name: called on placeholders it becomes an
output of a package, called on constants its `.val` is the expected value.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from mil.schema import coremltools as ct
from mil.weights import Array

Case = Callable[[Any, dict[str, Any]], Any]
_random = np.random.default_rng(7)

FLOATS: dict[str, Array] = {
    "x": _random.normal(size=(2, 3, 4)) * 2,
    "y": _random.normal(size=(3, 1)) * 2,
    "above": _random.uniform(0.1, 3, (2, 3, 4)),
    "within": _random.uniform(-0.9, 0.9, (2, 3, 4)),
    "w": _random.normal(size=(5, 4)),
    "m": _random.normal(size=(2, 4, 3)),
    "e": _random.normal(size=(2, 5, 3, 4)),
    "f": _random.normal(size=(2, 4, 1, 6)),
    "q": _random.normal(size=(1, 2, 3, 8)),
    "k": _random.normal(size=(1, 2, 5, 8)),
    "v": _random.normal(size=(1, 2, 5, 6)),
    "add5": _random.normal(size=(3, 5)),
    "one": _random.normal(size=(1, 3, 1)),
}
INTS: dict[str, Array] = {
    "i": _random.integers(-7, 8, (2, 3, 4)),
    "j": _random.integers(1, 5, (2, 3, 4)),
    "at": np.array([2, 0, 1, 1]),
    "along": _random.integers(0, 3, (2, 5, 4)),
    "batched": np.array([[1, 0], [2, 2]]),
    "begin": np.array([0, 1, 0]),
    "end": np.array([2, 3, 2]),
}
# Floats that float16 can hold, so that a case of float16 begins with the same values.
OPERANDS = {name: a.astype(np.float16).astype(np.float32) for name, a in FLOATS.items()} | {
    name: a.astype(np.int32) for name, a in INTS.items()
}

CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    CASES[function.__name__.removeprefix("_")] = function
    return function


def _one(name: str, *operands: str, op: str = "", **parameters: Any) -> None:
    """An operation on named operands: `x=above` gives the operand `above` as x; integer ones are called `..._int`."""
    pairs = [operand.split("=") for operand in operands]

    def run(mb: Any, t: dict[str, Any]) -> Any:
        return getattr(mb, op or name)(**{key: t[value] for key, value in pairs}, **parameters)

    CASES[name] = run


for _name in ("add", "sub", "mul", "real_div", "floor_div", "mod", "minimum", "maximum"):
    _one(_name, "x=x", "y=y")
for _name in ("add", "sub", "mul", "floor_div", "mod", "minimum", "maximum"):
    _one(f"{_name}_int", "x=i", "y=j", op=_name)
_one("pow", "x=above", "y=y")
for _name in ("less", "less_equal", "greater", "greater_equal", "equal", "not_equal"):
    _one(_name, "x=x", "y=y")
    _one(f"{_name}_int", "x=i", "y=j", op=_name)
for _name in ("exp", "exp2", "sin", "cos", "tan", "tanh", "floor", "ceil", "round", "erf", "sigmoid", "relu", "relu6"):
    _one(_name, "x=x")
for _name in ("softplus", "softsign", "abs", "sign", "square"):
    _one(_name, "x=x")
for _name in ("abs", "sign", "square"):
    _one(f"{_name}_int", "x=i", op=_name)
for _name in ("sqrt", "log", "rsqrt", "inverse"):
    _one(_name, "x=above")
_one("log_epsilon", "x=above", op="log", epsilon=0.5)
_one("rsqrt_epsilon", "x=above", op="rsqrt", epsilon=0.5)
_one("inverse_epsilon", "x=above", op="inverse", epsilon=0.5)
_one("clip", "x=x", alpha=-0.5, beta=1.25)
_one("threshold", "x=x", alpha=0.25)
_one("leaky_relu", "x=x", alpha=0.125)
_one("elu", "x=x", alpha=0.5)
for _mode in ("EXACT", "TANH_APPROXIMATION", "SIGMOID_APPROXIMATION"):
    _one(f"gelu_{_mode.lower()}", "x=x", op="gelu", mode=_mode)
for _name in ("int32", "int8", "uint8", "int16", "uint16", "bool"):
    _one(f"cast_{_name}", "x=above", op="cast", dtype=_name)
_one("cast_negative", "x=x", op="cast", dtype="int32")
_one("cast_float", "x=i", op="cast", dtype="fp32")

for _name in ("sum", "mean", "max", "min", "sum_square", "prod", "l1_norm", "l2_norm", "log_sum_exp"):
    _one(f"reduce_{_name}", "x=x", axes=[-1, 0], keep_dims=False)
    _one(f"reduce_{_name}_kept", "x=x", op=f"reduce_{_name}", axes=[1], keep_dims=True)
for _name in ("sum", "max", "min"):
    _one(f"reduce_{_name}_int", "x=i", op=f"reduce_{_name}", axes=[1], keep_dims=False)
_one("reduce_sum_all", "x=x", op="reduce_sum")
_one("reduce_argmax", "x=x", axis=1)
_one("reduce_argmin", "x=x", axis=-1, keep_dims=True)
_one("cumsum", "x=x", axis=1)
_one("cumsum_reverse", "x=x", op="cumsum", axis=2, reverse=True)
_one("cumsum_int", "x=i", op="cumsum", axis=0)
_one("softmax", "x=x", axis=1)
_one("layer_norm", "x=x", axes=[1, 2], epsilon=1e-3)
_one(
    "layer_norm_scaled",
    "x=x",
    op="layer_norm",
    axes=[-1],
    gamma=np.array([1, 2, -3, 0.5], np.float32),
    beta=np.array([0, 1, 0.25, -1], np.float32),
)

_one("linear", "x=x", weight=OPERANDS["w"], bias=np.array([1, 2, 3, 4, 5], np.float32))
_one("matmul", "x=x", "y=m")
_one("matmul_transposed", "x=m", "y=x", op="matmul", transpose_x=True, transpose_y=True)
_one("matmul_broadcast", "x=q", "y=k", op="matmul", transpose_y=True)
_one("scaled_dot_product_attention", "query=q", "key=k", "value=v")
_one("attention_added", "query=q", "key=k", "value=v", "attn_mask=add5", op="scaled_dot_product_attention")

_one("reshape", "x=x", shape=[4, -1, 2])
_one("reshape_zeros", "x=x", op="reshape", shape=[1, 0, 3, 0])
_one("transpose", "x=x", perm=[2, 0, 1])
_one("transpose_negative", "x=x", op="transpose", perm=[-1, 0, -2])
_one("expand_dims", "x=x", axes=[0, -1])
_one("squeeze", "x=one", axes=[-1])
_one("squeeze_all", "x=one", op="squeeze")
_one("tile", "x=x", reps=[2, 1, 3])
_one("reverse", "x=x", axes=[0, 2])
_one("reverse_all", "x=x", op="reverse")
_one("pad", "x=x", pad=[1, 0, 2, 3], mode="constant", constant_val=0.5)
_one("pad_reflect", "x=x", op="pad", pad=[1, 2], mode="reflect")
_one("pad_replicate", "x=x", op="pad", pad=[1, 2], mode="replicate")
_one("band_part", "x=x", lower=1, upper=0)
_one("band_part_upper", "x=x", op="band_part", lower=0, upper=-1)
_one("shape", "x=x")
_one("fill_like", "ref_tensor=x", value=1.5)
_one("fill", shape=[2, 3], value=1.5)
_one("fill_int", op="fill", shape=[4], value=7)
_one("range_1d", start=1, end=9, step=3)
_one("identity", "x=x")
_one("gather", "x=x", "indices=at", axis=1)
_one("gather_batched", "x=x", "indices=batched", op="gather", axis=1, batch_dims=1)
_one("gather_along_axis", "x=x", "indices=along", axis=1)
_one("topk", "x=x", k=2, axis=-1)
_one("topk_ascending", "x=x", op="topk", k=2, axis=1, ascending=True)
_one("topk_values", "x=x", op="topk", k=3, axis=2, return_indices=False)
_one("argsort", "x=x", axis=1, ascending=True)
_one("argsort_descending", "x=x", op="argsort", axis=2)
_one("slice_by_size", "x=x", begin=[0, 1, -3], size=[-1, 2, 2])
_one("slice_by_size_moving", "x=x", "begin=begin", op="slice_by_size", size=[1, 2, 3])
_one("slice_by_index", "x=x", begin=[0, -2, 3], end=[1, 3, 0], stride=[1, 1, -2])
_one(
    "slice_by_index_masks",
    "x=x",
    op="slice_by_index",
    begin=[1, 7, 1],
    end=[0, 0, 9],
    begin_mask=[False, True, False],
    end_mask=[False, True, True],
    squeeze_mask=[True, False, False],
    stride=[1, 2, 1],
)
_one("split_sizes", "x=x", op="split", split_sizes=[1, 3], axis=2)
_one("split_even", "x=x", op="split", num_splits=2, axis=-1)


@case
def _concat(mb: Any, t: dict[str, Any]) -> Any:
    return mb.concat(values=[t["x"], t["above"], t["x"]], axis=-2)


@case
def _stack(mb: Any, t: dict[str, Any]) -> Any:
    return mb.stack(values=[t["x"], t["above"]], axis=2)


@case
def _einsum(mb: Any, t: dict[str, Any]) -> Any:
    return mb.einsum(values=[t["e"], t["f"]], equation="nchw,nwhu->nchu")


@case
def _select(mb: Any, t: dict[str, Any]) -> Any:
    return mb.select(cond=mb.greater(x=t["i"], y=np.int32(1)), a=t["x"], b=t["above"])


@case
def _select_scalar(mb: Any, t: dict[str, Any]) -> Any:
    return mb.select(cond=mb.greater(x=t["x"], y=t["y"]), a=t["x"], b=t["y"])


@case
def _attention_masked(mb: Any, t: dict[str, Any]) -> Any:
    mask = np.arange(5) <= np.arange(3)[:, None] + 1
    return mb.scaled_dot_product_attention(query=t["q"], key=t["k"], value=t["v"], attn_mask=mask)


@case
def _slice_update(mb: Any, t: dict[str, Any]) -> Any:
    update = mb.slice_by_index(x=t["above"], begin=[0, 0, 0], end=[2, 2, 2])
    return mb.slice_update(x=t["x"], update=update, begin=[0, 1, 0], end=[2, 3, 4], stride=[1, 1, 2])


@case
def _slice_update_moving(mb: Any, t: dict[str, Any]) -> Any:
    update = mb.slice_by_index(x=t["above"], begin=[0, 0, 0], end=[2, 2, 2])
    return mb.slice_update(x=t["x"], update=update, begin=t["begin"], end=t["end"])


for _logical in ("logical_and", "logical_or", "logical_xor"):

    def _two(mb: Any, t: dict[str, Any], _logical: str = _logical) -> Any:
        first, second = mb.greater(x=t["i"], y=np.int32(1)), mb.less(x=t["j"], y=np.int32(3))
        return getattr(mb, _logical)(x=first, y=second)

    CASES[_logical] = _two


@case
def _logical_not(mb: Any, t: dict[str, Any]) -> Any:
    return mb.logical_not(x=mb.greater(x=t["i"], y=np.int32(1)))


def _flat(result: Any) -> list[Any]:
    return list(result) if isinstance(result, (tuple, list)) else [result]


def inferred() -> dict[str, list[Array]]:
    """Return the values that coremltools infers for each case, in float32. Raises where it infers none."""
    from coremltools.converters.mil import Builder as mb

    values: dict[str, list[Array]] = {}

    def body(unused: Any) -> Any:
        tensors = {name: mb.const(val=array) for name, array in OPERANDS.items()}
        for name, build in CASES.items():
            outputs = [output.val for output in _flat(build(mb, tensors))]
            assert all(output is not None for output in outputs), f"coremltools infers no value of {name}"
            values[name] = [np.asarray(output) for output in outputs]
        return unused

    mb.program(input_specs=[mb.TensorSpec(shape=(1,))], opset_version=ct.target.iOS18)(body)
    return values


def package(path: Path, precision: str) -> None:
    """Save a package whose outputs are the cases, named `out_case_0`, `out_case_1`, ... where a case has several.

    float32: the operations just as they were built. float16: as coremltools' converter makes float16 of them.
    """
    from coremltools.converters.mil import Builder as mb
    from coremltools.converters.mil.mil import types

    kinds = {"f": types.fp32, "i": types.int32}
    specs = [mb.TensorSpec(shape=array.shape, dtype=kinds[array.dtype.kind]) for array in OPERANDS.values()]

    def body(*placeholders: Any) -> list[Any]:
        tensors = dict(zip(OPERANDS, placeholders, strict=True))
        outputs = []
        for name, build in CASES.items():
            for index, output in enumerate(_flat(build(mb, tensors))):
                given = "fp32" if types.is_float(output.dtype) else "int32"
                outputs.append(mb.cast(x=output, dtype=given, name=f"out_{name}_{index}"))
        return outputs

    # The Builder reads the parameters' names from the function, so it needs as many named ones as there are operands.
    function = eval(f"lambda {', '.join(OPERANDS)}: body({', '.join(OPERANDS)})", {"body": body})
    program = mb.program(input_specs=specs, opset_version=ct.target.iOS18)(function)
    ct.convert(
        program,
        convert_to="mlprogram",
        minimum_deployment_target=ct.target.iOS18,
        compute_precision=getattr(ct.precision, precision.upper()),
        pass_pipeline=ct.PassPipeline.EMPTY if precision == "float32" else ct.PassPipeline.DEFAULT,
        skip_model_load=True,
    ).save(str(path))
