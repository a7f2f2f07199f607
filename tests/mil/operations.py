"""The operations of MIL: how one is defined here, and how one of a program is bound to its definition.

A definition is a function of the operation's parameters (operands that must be constants) that returns a function of
its tensors. Whatever a program gives that the definition does not know is an error: another input name, a parameter
that is no constant, a data type that the operation does not take, an output that it does not give.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mil.package import Constant, Operation, TensorType

Run = Callable[..., Any]
Parameters = Mapping[str, Any]
# Data types of the operands, and the parameters -> data types of the outputs (one for all, or one each).
Result = Callable[[Mapping[str, str], Parameters], tuple[str, ...]]

REQUIRED = object()

KINDS = {
    "any": {"fp16", "fp32", "int32", "bool", "int8", "uint8", "int16", "uint16"},
    "float": {"fp16", "fp32"},
    "number": {"fp16", "fp32", "int32"},
    "int": {"int32", "int8", "uint8", "int16", "uint16"},
    "bool": {"bool"},
    "mask": {"fp16", "fp32", "bool"},
    "stored": {"fp16", "fp32", "int8", "uint8", "int4", "uint4"},
    "index": {"uint1", "uint2", "uint3", "uint4", "uint6", "uint8"},
}


class Unsupported(NotImplementedError):
    """The program asks for what this evaluator does not do, or what the operation does not allow."""


@dataclass(frozen=True)
class Tensor:
    """A tensor that an operation takes: its name and the data types it may have."""

    name: str
    kind: str
    optional: bool
    several: bool

    @staticmethod
    def parse(text: str) -> Tensor:
        """`name[?|*][:kind]`: ? where it may be left out, * where it is a list of tensors."""
        name, _, kind = text.partition(":")
        return Tensor(name.rstrip("?*"), kind or "any", name.endswith("?"), name.endswith("*"))


@dataclass(frozen=True)
class Definition:
    """Operands and results of an operation. `exact`: its values are values of its operands, so nothing is rounded."""

    make: Callable[..., Run]
    tensors: tuple[Tensor, ...]
    parameters: Parameters
    result: Result
    alike: tuple[str, ...]
    exact: bool


@dataclass(frozen=True)
class Bound:
    """An operation of a program as a call: `run(*operands)` gives its outputs, of a float32 that is yet to be rounded.

    An operand is the name of a value, a constant, or None where an optional tensor is left out.
    """

    run: Run
    operands: tuple[str | Constant | None, ...]
    exact: bool


DEFINITIONS: dict[str, Definition] = {}


def operation(
    name: str,
    tensors: str,
    *,
    result: str | Result | None = None,
    alike: str = "",
    exact: bool = False,
    **parameters: Any,
) -> Callable[[Callable[..., Run]], Callable[..., Run]]:
    """Define an operation: the tensors it takes, in the order its function does, and the parameters' defaults.

    `result` is the data type of the outputs (that of the first tensor if not given), `alike` the tensors that must be
    of one data type.
    """
    parsed = tuple(Tensor.parse(text) for text in tensors.split())

    def rule(types: Mapping[str, str], given: Parameters) -> tuple[str, ...]:
        return (result if isinstance(result, str) else types[parsed[0].name],)

    def define(make: Callable[..., Run]) -> Callable[..., Run]:
        kind = result if callable(result) else rule
        DEFINITIONS[name] = Definition(make, parsed, parameters, kind, tuple(alike.split()), exact)
        return make

    return define


def _type(operand: Constant | str, types: Mapping[str, TensorType], owner: Operation) -> TensorType:
    if isinstance(operand, Constant):
        return operand.type
    if operand not in types:
        raise Unsupported(f"{owner} takes {operand!r}, which nothing before it gives")
    return types[operand]


def _parameters(
    definition: Definition, owner: Operation, constants: Mapping[str, Constant]
) -> tuple[dict[str, Any], dict[str, str]]:
    """The parameters' values and the data types of those that are given."""
    given: dict[str, Any] = {}
    dtypes: dict[str, str] = {}
    for name, default in definition.parameters.items():
        if name not in owner.inputs:
            if default is REQUIRED:
                raise Unsupported(f"{owner} has no {name}")
            given[name] = default
            continue
        (operand,) = owner.inputs[name]
        constant = constants.get(operand) if isinstance(operand, str) else operand
        if constant is None:
            raise Unsupported(f"the {name} of {owner} is no constant")
        given[name], dtypes[name] = constant.value, constant.type.dtype
    return given, dtypes


def bind(owner: Operation, types: Mapping[str, TensorType], constants: Mapping[str, Constant]) -> Bound:
    """Bind an operation to its definition, given the types of the values before it and the constants among them.

    Raises Unsupported, naming the operation and what it is that cannot be done.
    """
    definition = DEFINITIONS.get(owner.type)
    if definition is None:
        raise Unsupported(f"the operation {owner} is unknown to this evaluator")
    unknown = owner.inputs.keys() - definition.parameters.keys() - {tensor.name for tensor in definition.tensors}
    if unknown:
        raise Unsupported(f"{owner} has inputs unknown to this evaluator: {', '.join(sorted(unknown))}")
    given, dtypes = _parameters(definition, owner, constants)
    operands: list[str | Constant | None] = []
    for tensor in definition.tensors:
        several = owner.inputs.get(tensor.name, ())
        if not several and tensor.optional:
            operands.append(None)
            continue
        if not several or (len(several) > 1 and not tensor.several):
            raise Unsupported(f"{owner} has {len(several)} operands as {tensor.name}")
        for operand in several:
            dtype = _type(operand, types, owner).dtype
            if dtype not in KINDS[tensor.kind]:
                raise Unsupported(f"the {tensor.name} of {owner} is of type {dtype}, which it does not take")
            if dtypes.setdefault(tensor.name, dtype) != dtype:
                raise Unsupported(f"the {tensor.name} of {owner} are of more than one type")
            operands.append(constants.get(operand, operand) if isinstance(operand, str) else operand)
    if len({dtypes[name] for name in definition.alike if name in dtypes}) > 1:
        raise Unsupported(f"{owner} takes operands of one type, not of {dtypes}")
    results = definition.result(dtypes, given)
    declared = tuple(type_.dtype for _, type_ in owner.outputs)
    if declared != (results * len(declared) if len(results) == 1 else results):
        raise Unsupported(f"{owner} gives {', '.join(results)}, but is declared to give {', '.join(declared)}")
    try:
        return Bound(definition.make(**given), tuple(operands), definition.exact)
    except Unsupported as error:
        raise Unsupported(f"{owner}: {error}") from error


def integers(value: Any) -> tuple[int, ...]:
    """The integers of a constant vector."""
    return tuple(int(element) for element in value)
