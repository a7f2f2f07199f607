"""A function of a package, compiled: one closure for each operation, over a list of values.

Constants, and what constexpr operations give of them, are in the list from the start. Every output is rounded to the
data type that the program declares for it (what float16 cannot hold becomes infinite) and must have the shape that it
declares. A value is dropped after its last use.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from mil import compression, elementwise, indexing, products, reductions, shapes
from mil.elementwise import STORAGE
from mil.operations import Bound, Unsupported, bind
from mil.package import Constant, Function, Operation, Package, TensorType
from mil.weights import Array, DamagedPackage

States = dict[str, Array]  # float16, by name
Step = Callable[[list[Any], States], None]

MAX_RANK = 5  # of a Core ML tensor
DEFINED_IN = (compression, elementwise, indexing, products, reductions, shapes)  # importing them defines operations


def round_to(dtype: str, array: Array) -> Array:
    """The values of `array` as `dtype` holds them; fp16 stays in float32."""
    storage = STORAGE[dtype]
    if {"u": "i"}.get(array.dtype.kind, array.dtype.kind) != {"u": "i"}.get(kind := np.dtype(storage).kind, kind):
        raise TypeError(f"values of {array.dtype} as {dtype}")
    if dtype == "fp16":
        return array.astype(np.float16).astype(np.float32)
    return array.astype(storage, copy=False)


def _settle(owner: Operation, name: str, type_: TensorType, exact: bool) -> Callable[[Any], Array]:
    """Checks an output's shape and rounds it."""
    dtype, shape = type_.dtype, type_.shape
    storage = np.dtype(STORAGE[dtype])
    kept = exact or dtype != "fp16"

    def settle(result: Any) -> Array:
        array = np.asarray(result)
        if array.shape != shape:
            raise DamagedPackage(f"{owner} gives {name!r} of shape {array.shape}, but declares {shape}")
        return array if kept and array.dtype == storage else round_to(dtype, array)

    return settle


class Program:
    """A compiled function.

    `operations` counts its operations by type; `weight_bytes` is the size of the blobs of weight files that it refers
    to, each counted once; `constants` are those of its values that are known without an input.
    Raises operations.Unsupported for what the evaluator does not do.
    """

    def __init__(self, package: Package, function: Function) -> None:
        self.function = function
        self.operations: Counter[str] = Counter(operation.type for operation in function.operations)
        self._types: dict[str, TensorType] = dict(function.inputs)
        self.constants: dict[str, Constant] = {}
        self._slots: dict[str, int] = {}
        self._values: list[Any] = [None]  # the first stands for an operand that is left out
        self._steps: list[Step] = []
        self._reads: list[tuple[int, ...]] = []  # the slots that each step reads
        self._folded = package.folded
        self._blobs: set[tuple[str, int, int]] = set()
        for name in function.inputs:
            self._slot(name)
        for operation in function.operations:
            self._compile(operation)
        self.weight_bytes = sum(size for _, _, size in self._blobs)
        self._forget()

    def run(self, inputs: Mapping[str, Array], states: States) -> dict[str, Array]:
        """The outputs by name, as they are held: fp16 in float32. `states` is read and written."""
        values = list(self._values)
        for name, array in inputs.items():
            values[self._slots[name]] = array
        with np.errstate(all="ignore"):  # as the hardware does: infinities and NaN, no complaint
            for step in self._steps:
                step(values, states)
        return {name: values[self._slots[name]] for name in self.function.outputs}

    def _slot(self, name: str) -> int:
        if name in self._slots:
            raise DamagedPackage(f"the value {name!r} is given twice")
        self._slots[name] = len(self._values)
        self._values.append(None)
        return self._slots[name]

    def _hold(self, name: str, constant: Constant) -> None:
        self._values[self._slot(name)] = constant.value
        self._types[name] = constant.type
        self.constants[name] = constant

    def _refer(self, constant: Constant) -> Constant:
        if constant.blob:
            self._blobs.add(constant.blob)
        return constant

    def _compile(self, owner: Operation) -> None:
        for operands in owner.inputs.values():
            for operand in operands:
                if isinstance(operand, Constant):
                    self._refer(operand)
        for name, type_ in owner.outputs:
            if len(type_.shape) > MAX_RANK:
                raise Unsupported(f"{owner} gives {name!r} of rank {len(type_.shape)}: {MAX_RANK} is the most there is")
        if owner.type == "const":
            self._const(owner)
        elif owner.type in ("read_state", "write_state"):
            self._state(owner)
        elif owner.type.startswith("constexpr_"):
            self._constexpr(owner)
        else:
            self._operation(owner, bind(owner, self._types, self.constants))

    def _const(self, owner: Operation) -> None:
        if owner.value is None or owner.inputs or len(owner.outputs) != 1:
            raise DamagedPackage(f"{owner} has no value, or has inputs")
        ((name, type_),) = owner.outputs
        if owner.value.type != type_:
            raise DamagedPackage(f"{owner} is declared as {type_}, but its value is {owner.value.type}")
        self._hold(name, self._refer(owner.value))

    def _constexpr(self, owner: Operation) -> None:
        """Done once for the package: an operation of the same type on the same constants gives the same array."""
        bound = bind(owner, self._types, self.constants)
        if len(owner.outputs) != 1 or any(isinstance(operand, str) for operand in bound.operands):
            raise Unsupported(f"{owner} has operands that are no constants")
        ((name, type_),) = owner.outputs
        inputs = ((key, self.constants.get(v, v) if isinstance(v, str) else v) for key, (v,) in owner.inputs.items())
        key = (owner.type, type_, frozenset((name, getattr(constant, "key", constant)) for name, constant in inputs))
        if key not in self._folded:
            with np.errstate(over="ignore"):
                result = bound.run(*(operand and operand.value for operand in bound.operands))  # type: ignore[union-attr]
                array = _settle(owner, name, type_, bound.exact)(result)
            array.flags.writeable = False
            self._folded[key] = Constant(type_, array, key)
        self._hold(name, self._folded[key])

    def _state(self, owner: Operation) -> None:
        (state,) = owner.inputs.get("input", ("",))
        type_ = self.function.states.get(str(state))
        if type_ is None:
            raise DamagedPackage(f"{owner} is of {state!r}, which is no state of {self.function.name}")
        key = str(state)
        if owner.type == "read_state":
            ((name, declared),) = owner.outputs
            if declared != type_ or owner.inputs.keys() != {"input"}:
                raise DamagedPackage(f"{owner} reads {key!r}, which is {type_}, as {declared}")
            self._types[name] = declared
            slot = self._slot(name)

            def read(values: list[Any], states: States) -> None:
                values[slot] = states[key].astype(np.float32)

            self._step(read, ())
            return
        (data,) = owner.inputs.get("data", ("",))
        if owner.inputs.keys() != {"input", "data"} or owner.outputs or self._types.get(str(data)) != type_:
            raise DamagedPackage(f"{owner} writes {self._types.get(str(data))} into {key!r}, which is {type_}")
        if data in self.function.outputs:
            # Apple's framework crashes on loading such a package (github.com/apple/coremltools/pull/2713).
            raise Unsupported(f"{owner} writes {data!r} into {key!r}, which is an output as well")
        source = self._slots[str(data)]

        def write(values: list[Any], states: States) -> None:
            states[key] = values[source].astype(np.float16)

        self._step(write, (source,))

    def _operation(self, owner: Operation, bound: Bound) -> None:
        sources = []
        for operand in bound.operands:
            if isinstance(operand, str):
                sources.append(self._slots[operand])
            else:
                self._values.append(operand and operand.value)
                sources.append(len(self._values) - 1)
        settled = [_settle(owner, name, type_, bound.exact) for name, type_ in owner.outputs]
        self._types |= dict(owner.outputs)
        targets = [self._slot(name) for name, _ in owner.outputs]
        run = bound.run

        def compute(values: list[Any], states: States) -> None:
            try:
                results = run(*[values[source] for source in sources])
            except (ValueError, TypeError, IndexError) as error:
                raise type(error)(f"{owner}: {error}") from error
            if len(targets) == 1:
                values[targets[0]] = settled[0](results if not isinstance(results, list) else results[0])
                return
            if len(results) != len(targets):
                raise DamagedPackage(f"{owner} gives {len(results)} outputs, but declares {len(targets)}")
            for target, settle, result in zip(targets, settled, results, strict=True):
                values[target] = settle(result)

        self._step(compute, tuple(sources))

    def _step(self, step: Step, reads: tuple[int, ...]) -> None:
        self._steps.append(step)
        self._reads.append(reads)

    def _forget(self) -> None:
        """Let each step drop the values that no later one reads."""
        constant = {slot for slot, value in enumerate(self._values) if value is not None}
        needed = constant | {0} | {self._slots[name] for name in self.function.outputs}
        for index in reversed(range(len(self._steps))):
            last = set(self._reads[index]) - needed
            needed |= last
            if last:
                self._steps[index] = _dropping(self._steps[index], tuple(last))


def _dropping(step: Step, slots: tuple[int, ...]) -> Step:
    def run(values: list[Any], states: States) -> None:
        step(values, states)
        for slot in slots:
            values[slot] = None

    return run
