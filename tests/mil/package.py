"""A saved Core ML package (.mlpackage) with an ML program: its functions, their operations and constants.

    Manifest.json                                names the parts of the package and which of them is the model
    Data/com.apple.CoreML/model.mlmodel          protobuf: Model, with a description of the inputs and the MIL program
    Data/com.apple.CoreML/weights/weight.bin     the larger constants (see weights.py)

Arrays of fp16 are held as float32 whose values float16 can hold: all computing is done in float32, and only the
values are rounded. Constants are read once for the whole package, and functions that refer to one blob share it.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from mil import schema
from mil.weights import Array, DamagedPackage, WeightFile, elements

OPSETS = ("CoreML7", "CoreML8")  # iOS 17 and iOS 18

DTYPE_NAMES = {
    schema.mil.BOOL: "bool",
    schema.mil.STRING: "string",
    schema.mil.FLOAT16: "fp16",
    schema.mil.FLOAT32: "fp32",
} | {
    getattr(schema.mil, name.upper()): name
    for name in ("int4", "int8", "int16", "int32", *(f"uint{bits}" for bits in (1, 2, 3, 4, 6, 8, 16, 32)))
}
FEATURE_DTYPES = {
    schema.features.ArrayFeatureType.FLOAT16: "fp16",
    schema.features.ArrayFeatureType.FLOAT32: "fp32",
    schema.features.ArrayFeatureType.INT32: "int32",
}
# The field of an immediate value that holds a type; all others lie in `bytes`, as in a weight file.
FIELDS = {"bool": "bools", "string": "strings", "fp32": "floats", "int32": "ints", "int16": "ints", "uint16": "ints"}


@dataclass(frozen=True)
class TensorType:
    """A tensor's data type by its MIL name (fp16, fp32, int32, bool, ...) and its shape, which is static."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class Constant:
    """A value that is known when the package is loaded.

    `key` says where it is from: two constants of the same key are the same array. `blob` is the file, offset and size
    in bytes of a constant in a weight file.
    """

    type: TensorType
    value: Array | str
    key: Hashable
    blob: tuple[str, int, int] | None = None


@dataclass(frozen=True)
class Operation:
    """An operation of a function. An operand is a constant or the name of a value; a list input has several."""

    type: str
    name: str
    inputs: Mapping[str, tuple[Constant | str, ...]]
    outputs: tuple[tuple[str, TensorType], ...]
    value: Constant | None  # of a const

    def __str__(self) -> str:
        return f"{self.type} {self.name!r}"


@dataclass(frozen=True)
class Function:
    """A function: what goes in, which states it reads and writes, what comes out, and its operations in order."""

    name: str
    opset: str
    inputs: Mapping[str, TensorType]
    states: Mapping[str, TensorType]
    outputs: Mapping[str, TensorType]
    operations: tuple[Operation, ...]


def _inside(folder: Path, relative: str, what: str) -> Path:
    """The path of a part of the package, which may not lead out of `folder`."""
    path = (folder / relative).resolve()
    if not path.is_relative_to(folder.resolve()) or path == folder.resolve():
        raise DamagedPackage(f"{what} {relative!r} lies outside {folder}")
    return path


def _unlike(what: str, name: str, described: object, programmed: object) -> DamagedPackage:
    return DamagedPackage(f"{what} {name!r} is {described} in the description, but {programmed} in the program")


def tensor_type(proto: Any) -> TensorType:
    """The type that a protobuf ValueType says. Raises DamagedPackage unless it is a tensor of a static shape."""
    if proto.WhichOneof("type") != "tensorType":
        raise DamagedPackage(f"a value of type {proto.WhichOneof('type')}: only tensors are supported")
    tensor = proto.tensorType
    if tensor.dataType not in DTYPE_NAMES:
        raise DamagedPackage(f"the data type {schema.mil.DataType.Name(tensor.dataType)} is not supported")
    if any(dimension.WhichOneof("dimension") != "constant" for dimension in tensor.dimensions):
        raise DamagedPackage("a tensor's shape is not static")
    shape = tuple(dimension.constant.size for dimension in tensor.dimensions)
    if tensor.rank != len(shape):
        raise DamagedPackage(f"a tensor of rank {tensor.rank} has the shape {shape}")
    return TensorType(DTYPE_NAMES[tensor.dataType], shape)


def feature_type(feature: Any) -> TensorType:
    """The type that the model's description gives an input, a state or an output."""
    kind = feature.type.WhichOneof("Type")
    if kind not in ("multiArrayType", "stateType") or feature.type.isOptional:
        raise DamagedPackage(f"the feature {feature.name!r} is optional or a {kind}: only arrays are supported")
    array = feature.type.stateType.arrayType if kind == "stateType" else feature.type.multiArrayType
    if array.WhichOneof("ShapeFlexibility") or array.WhichOneof("defaultOptionalValue"):
        raise DamagedPackage(f"the feature {feature.name!r} has a flexible shape or a default: neither is supported")
    if array.dataType not in FEATURE_DTYPES:
        raise DamagedPackage(f"the feature {feature.name!r} is of data type {array.dataType}")
    return TensorType(FEATURE_DTYPES[array.dataType], tuple(array.shape))


class Package:
    """A saved package. Raises DamagedPackage for what is missing, contradicts itself or is not supported."""

    def __init__(self, path: Path) -> None:
        self.path = path
        manifest_path = path / "Manifest.json"
        if not manifest_path.is_file():
            raise DamagedPackage(f"{path} is no package: it has no Manifest.json")
        manifest = json.loads(manifest_path.read_text())
        items = manifest["itemInfoEntries"]
        root = items.get(manifest["rootModelIdentifier"])
        if root is None:
            raise DamagedPackage(f"{manifest_path} has no entry for its root model")
        model_path = _inside(path / "Data", root["path"], "the model")
        for item in items.values():
            if not _inside(path / "Data", item["path"], "the part").exists():
                raise DamagedPackage(f"{path / 'Data' / item['path']} is missing")
        self.folder = model_path.parent
        self._proto = schema.model.Model()
        try:
            self._proto.ParseFromString(model_path.read_bytes())
        except schema.DecodeError as error:
            raise DamagedPackage(f"{model_path}: {error}") from error
        if self._proto.WhichOneof("Type") != "mlProgram":
            raise DamagedPackage(f"{model_path} is a {self._proto.WhichOneof('Type')}, not an mlProgram")
        self._files: dict[str, WeightFile] = {}
        self._constants: dict[Hashable, Constant] = {}
        self._functions: dict[str, Function] = {}
        self.folded: dict[Hashable, Constant] = {}  # what constexpr operations gave, for all functions

    @property
    def function_names(self) -> list[str]:
        """The names of the functions, sorted."""
        return sorted(self._proto.mlProgram.functions)

    @property
    def default_function(self) -> str:
        """The function that is loaded where none is named: a package of one function calls it main."""
        return self._proto.description.defaultFunctionName or "main"

    def function(self, name: str | None = None) -> Function:
        """A function by name. Raises ValueError, naming those there are, where there is none of this name."""
        name = name or self.default_function
        if name not in self._proto.mlProgram.functions:
            raise ValueError(f"{self.path} has no function {name!r}: it has {', '.join(self.function_names)}")
        if name not in self._functions:
            self._functions[name] = self._function(name)
        return self._functions[name]

    def _function(self, name: str) -> Function:
        proto = self._proto.mlProgram.functions[name]
        if proto.opset not in OPSETS or proto.opset not in proto.block_specializations:
            raise DamagedPackage(f"the function {name} is of opset {proto.opset!r}, not one of {', '.join(OPSETS)}")
        block = proto.block_specializations[proto.opset]
        operations = tuple(map(self._operation, block.operations))
        inputs, states = {}, {}
        for entry in proto.inputs:
            if entry.type.WhichOneof("type") == "stateType":
                states[entry.name] = tensor_type(entry.type.stateType.wrappedType)
            else:
                inputs[entry.name] = tensor_type(entry.type)
        types = inputs | {output: type_ for operation in operations for output, type_ in operation.outputs}
        unknown = [output for output in block.outputs if output not in types]
        if unknown:
            raise DamagedPackage(f"the function {name} returns {unknown}, which no operation gives")
        outputs = {output: types[output] for output in block.outputs}
        described = self._described(name)
        for what, ours in {"input": inputs, "state": states, "output": outputs}.items():
            theirs = {feature.name: feature_type(feature) for feature in getattr(described, what)}
            for key in theirs.keys() | ours.keys():
                if theirs.get(key) != ours.get(key):
                    raise _unlike(f"the {what} of {name},", key, theirs.get(key), ours.get(key))
        return Function(name, proto.opset, inputs, states, outputs, operations)

    def _described(self, name: str) -> Any:
        description = self._proto.description
        if not description.functions:
            return description
        for function in description.functions:
            if function.name == name:
                return function
        raise DamagedPackage(f"the function {name} is not in the model's description")

    def _operation(self, proto: Any) -> Operation:
        try:
            return self._decoded(proto)
        except DamagedPackage as error:
            raise DamagedPackage(f"{proto.type} {', '.join(out.name for out in proto.outputs)!r}: {error}") from error

    def _decoded(self, proto: Any) -> Operation:
        attributes = dict(proto.attributes)
        name = self._constant(attributes.pop("name")).value if "name" in attributes else ""
        outputs = tuple((output.name, tensor_type(output.type)) for output in proto.outputs)
        value = self._constant(attributes.pop("val")) if proto.type == "const" and "val" in attributes else None
        inputs: dict[str, tuple[Constant | str, ...]] = {
            key: tuple(
                binding.name if binding.WhichOneof("binding") == "name" else self._constant(binding.value)
                for binding in argument.arguments
            )
            for key, argument in proto.inputs.items()
        }
        if proto.type.startswith("constexpr_"):  # before iOS 18 their operands are attributes
            inputs |= {key: (self._constant(attribute),) for key, attribute in attributes.items()}
            attributes = {}
        operation = Operation(proto.type, str(name), inputs, outputs, value)
        if attributes or proto.blocks:
            raise DamagedPackage(f"attributes {sorted(attributes)} or blocks: neither is supported")
        return operation

    def _constant(self, proto: Any) -> Constant:
        type_ = tensor_type(proto.type)
        count = int(np.prod(type_.shape, dtype=np.int64))
        where = proto.WhichOneof("value")
        if where == "blobFileValue":
            return self._blob(proto.blobFileValue.fileName, proto.blobFileValue.offset, type_, count)
        if where != "immediateValue" or proto.immediateValue.WhichOneof("value") != "tensor":
            raise DamagedPackage(f"a constant {type_} has no value, or one that is no tensor")
        tensor = proto.immediateValue.tensor
        field = FIELDS.get(type_.dtype, "bytes")
        if tensor.WhichOneof("value") != field:
            raise DamagedPackage(f"a constant {type_} lies in the field {tensor.WhichOneof('value')}, not {field}")
        values = getattr(tensor, field).values
        if field == "bytes":
            flat = elements(np.frombuffer(values, np.uint8), type_.dtype, count)
        elif len(values) != count:
            raise DamagedPackage(f"a constant {type_} has {len(values)} values")
        elif field == "strings":
            return Constant(type_, values[0], (type_, values[0]))
        else:
            flat = np.array(values, dtype={"fp32": np.float32}.get(type_.dtype, type_.dtype))
        return self._kept((type_, flat.tobytes()), type_, flat, None)

    def _blob(self, name: str, offset: int, type_: TensorType, count: int) -> Constant:
        key = (name, offset, type_)
        if key not in self._constants:
            if name not in self._files:
                prefix = "@model_path/"
                if not name.startswith(prefix):
                    raise DamagedPackage(f"the weight file {name!r} lies outside the package")
                self._files[name] = WeightFile(_inside(self.folder, name.removeprefix(prefix), "the weight file"))
            flat = self._files[name].read(offset, type_.dtype, count)
            size = self._files[name].size(offset)
            return self._kept(key, type_, flat, (name, offset, size))
        return self._constants[key]

    def _kept(self, key: Hashable, type_: TensorType, flat: Array, blob: tuple[str, int, int] | None) -> Constant:
        if key not in self._constants:
            array = flat.astype(np.float32) if type_.dtype == "fp16" else flat
            array = array.reshape(type_.shape)
            array.flags.writeable = False
            self._constants[key] = Constant(type_, array, key, blob)
        return self._constants[key]
