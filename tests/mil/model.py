"""A Core ML model as coremltools' MLModel is one, evaluated with numpy: predict, make_state, read_state, write_state.

It is as strict as the sources and documentation of coremltools 9.0 and Core ML. Behaviour that they leave undefined
(two predictions at once on a state, an index past the end) is an error here.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from mil.package import Package, TensorType
from mil.program import Program
from mil.weights import Array

# What numpy arrays become an input of a data type. coremltools casts float16 to float32 itself, and hands float32,
# float64 and int32 to Core ML; any other type is an error there.
ACCEPTED = {"fp16": ("float16", "float32", "float64"), "fp32": ("float16", "float32", "float64"), "int32": ("int32",)}

_packages: weakref.WeakValueDictionary[tuple[object, ...], Package] = weakref.WeakValueDictionary()


def open_package(path: Path) -> Package:
    """The package at `path`; the models of one package share it, and so its constants, until its files change."""
    files = sorted(file for file in path.rglob("*") if file.is_file())
    stats = [(str(file), stat.st_ino, stat.st_size, stat.st_mtime_ns) for file in files if (stat := file.stat())]
    key = (str(path.resolve()), *stats)
    package = _packages.get(key)
    if package is None:
        package = _packages[key] = Package(path)
    return package


class State:
    """The states of a model, float16, zero at first. Other functions of its package that declare them can use it."""

    def __init__(self, package: Package, types: Mapping[str, TensorType]) -> None:
        self.package = package
        self.types = dict(types)
        self._arrays: dict[str, Array] = {name: np.zeros(type_.shape, np.float16) for name, type_ in types.items()}
        self._in_use = threading.Lock()

    @contextmanager
    def using(self) -> Iterator[dict[str, Array]]:
        """The arrays for a prediction. Raises RuntimeError while another prediction has them."""
        if not self._in_use.acquire(blocking=False):
            raise RuntimeError("a prediction on this state runs: it may not be read, written or used until it ends")
        try:
            yield self._arrays
        finally:
            self._in_use.release()

    def _known(self, name: str) -> None:
        if name not in self.types:
            raise RuntimeError(f"there is no state {name!r}: there are {', '.join(sorted(self.types)) or 'none'}")

    def read_state(self, name: str) -> Array:
        """A state's value, as a new float32 array. Raises RuntimeError for a name there is not."""
        self._known(name)
        with self.using() as arrays:
            return arrays[name].astype(np.float32)

    def write_state(self, name: str, value: Array) -> None:
        """Set a state to a float32 array of its shape, which is rounded to float16.

        Raises RuntimeError for a name there is not, another shape or data type (float16 too) and a read-only array.
        """
        self._known(name)
        if not isinstance(value, np.ndarray) or value.dtype != np.float32:
            found = getattr(value, "dtype", type(value).__name__)
            raise RuntimeError(f"the state {name!r} is written from a float32 array, not from {found}")
        if value.shape != self.types[name].shape:
            raise RuntimeError(f"the state {name!r} is of shape {self.types[name].shape}, not {value.shape}")
        if not value.flags.writeable:
            raise RuntimeError(f"the array for the state {name!r} is read-only")
        with self.using() as arrays, np.errstate(over="ignore"):
            arrays[name] = value.astype(np.float16)


class Model:
    """A function of a package. Raises ValueError where there is none of its name; see Package and Program for others.

    `operations` counts the operations by type, `weight_bytes` is the size of the weights that the function refers to.
    """

    def __init__(self, package: Package | Path | str, function_name: str | None = None) -> None:
        self.package = package if isinstance(package, Package) else open_package(Path(package))
        self.function = self.package.function(function_name)
        self.function_name = self.function.name
        self.program = Program(self.package, self.function)
        self.operations: Counter[str] = self.program.operations
        self.weight_bytes: int = self.program.weight_bytes

    def make_state(self) -> State:
        """New states, all zero; none where the function has none."""
        return State(self.package, self.function.states)

    def predict(self, data: Mapping[str, Array], state: State | None = None) -> dict[str, Array]:
        """Return the outputs by name: new arrays of float32 or int32.

        Raises KeyError for a name that is not an input. Raises RuntimeError for an input that is missing, read-only,
        not an array, or of another shape or data type. Raises RuntimeError for a state that is missing, in use, or of
        another package or type.
        """
        if type(data) is not dict:
            raise TypeError(f"the inputs are a dict, not {type(data).__name__}")
        unknown = data.keys() - self.function.inputs.keys()
        if unknown:
            known = ", ".join(sorted(self.function.inputs))
            raise KeyError(f"{', '.join(sorted(unknown))}: no such input of {self.function_name}, which takes {known}")
        inputs = {name: self._input(name, type_, data) for name, type_ in self.function.inputs.items()}
        if state is None and not self.function.states:
            results = self.program.run(inputs, {})
        else:
            with self._checked(state).using() as arrays:
                results = self.program.run(inputs, arrays)
        return {name: np.array(result) for name, result in results.items()}

    def _input(self, name: str, type_: TensorType, data: Mapping[str, Array]) -> Array:
        if name not in data:
            raise RuntimeError(f"the input {name!r} of {self.function_name} is missing")
        value = data[name]
        if not isinstance(value, np.ndarray) or str(value.dtype) not in ACCEPTED[type_.dtype]:
            found = getattr(value, "dtype", type(value).__name__)
            raise RuntimeError(f"the input {name!r} is of type {type_.dtype}, not {found}")
        if value.shape != type_.shape:
            raise RuntimeError(f"the input {name!r} is of shape {type_.shape}, not {value.shape}")
        if not value.flags.writeable or min(value.strides, default=0) < 0:
            raise RuntimeError(f"the array for the input {name!r} is read-only or runs backwards")
        with np.errstate(over="ignore"):
            if type_.dtype == "fp16":
                return value.astype(np.float16).astype(np.float32)
            return value.astype(np.int32 if type_.dtype == "int32" else np.float32)

    def _checked(self, state: State | None) -> State:
        for name, type_ in self.function.states.items():
            if not isinstance(state, State):
                raise RuntimeError(f"the input feature for {name} must be an MLState, but it was not")
            if state.package is not self.package or state.types.get(name) != type_:
                raise RuntimeError(f"this state has no {name!r} of {type_}, or is of another package")
        if not isinstance(state, State) or state.package is not self.package:
            raise RuntimeError(f"{self.function_name} has no states, and this is none of its package")
        return state
