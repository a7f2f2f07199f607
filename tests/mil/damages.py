"""Ways in which a package of stateful_cases is damaged, with the error and the words that tell of each."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mil import schema
from mil.operations import Unsupported
from mil.weights import DamagedPackage

MODEL = Path("Data/com.apple.CoreML/model.mlmodel")
WEIGHTS = Path("Data/com.apple.CoreML/weights/weight.bin")


@contextmanager
def changed(path: Path) -> Iterator[Any]:
    """The model of a package, saved with what is changed in it."""
    proto = schema.model.Model()
    proto.ParseFromString((path / MODEL).read_bytes())
    yield proto
    (path / MODEL).write_bytes(proto.SerializeToString())


def operations(model: Any, type_: str) -> list[Any]:
    (block,) = model.mlProgram.functions["main"].block_specializations.values()
    return [operation for operation in block.operations if operation.type == type_]


def weights(path: Path, change: Callable[[bytearray], None]) -> None:
    content = bytearray((path / WEIGHTS).read_bytes())
    change(content)
    (path / WEIGHTS).write_bytes(content)


def blob(model: Any) -> Any:
    return next(o.attributes["val"].blobFileValue for o in operations(model, "const") if "fileName" in str(o))


def truncated(path: Path) -> None:
    weights(path, lambda content: content.__delitem__(slice(-64, None)))


def without_sentinel(path: Path) -> None:
    weights(path, lambda content: content.__setitem__(64, content[64] ^ 1))


def other_version(path: Path) -> None:
    weights(path, lambda content: content.__setitem__(4, 1))


def other_blob_type(path: Path) -> None:
    weights(path, lambda content: content.__setitem__(68, 2))


def other_blob_size(path: Path) -> None:
    weights(path, lambda content: content.__setitem__(72, content[72] ^ 2))


def edited(edit: Callable[[Any], None]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        with changed(path) as model:
            edit(model)

    return damage


def beyond_the_end(model: Any) -> None:
    blob(model).offset = 1 << 40


def between_blobs(model: Any) -> None:
    blob(model).offset += 64


def unaligned(model: Any) -> None:
    blob(model).offset += 2


def outside(model: Any) -> None:
    blob(model).fileName = "@model_path/../../../../weight.bin"


def absolute(model: Any) -> None:
    blob(model).fileName = "/etc/hostname"


def no_such_file(model: Any) -> None:
    blob(model).fileName = "@model_path/weights/other.bin"


def renamed(model: Any) -> None:
    operations(model, "tanh")[0].type = "tanhh"


def other_shape(model: Any) -> None:
    operations(model, "tanh")[0].outputs[0].type.tensorType.dimensions[1].constant.size = 9


def other_type(model: Any) -> None:
    operations(model, "tanh")[0].outputs[0].type.tensorType.dataType = schema.mil.FLOAT32


def unknown_input(model: Any) -> None:
    tanh = operations(model, "tanh")[0]
    tanh.inputs["alpha"].CopyFrom(tanh.inputs["x"])


def unknown_attribute(model: Any) -> None:
    tanh = operations(model, "tanh")[0]
    tanh.attributes["fast"].CopyFrom(tanh.attributes["name"])


def nothing_gives_it(model: Any) -> None:
    operations(model, "tanh")[0].inputs["x"].arguments[0].name = "nowhere"


def given_twice(model: Any) -> None:
    tanh = operations(model, "tanh")[0]
    tanh.outputs[0].name = tanh.inputs["x"].arguments[0].name


def unknown_opset(model: Any) -> None:
    model.mlProgram.functions["main"].opset = "CoreML99"


def described_otherwise(model: Any) -> None:
    model.description.input[0].type.multiArrayType.shape[1] = 5


def state_of_nobody(model: Any) -> None:
    operations(model, "write_state")[0].inputs["input"].arguments[0].name = "ids"


def no_function(model: Any) -> None:
    model.mlProgram.functions["other"].CopyFrom(model.mlProgram.functions["main"])
    del model.mlProgram.functions["main"]


DAMAGES: dict[str, tuple[Callable[[Path], None], type[Exception], str]] = {
    "truncated": (truncated, DamagedPackage, "but the file has"),
    "without_sentinel": (without_sentinel, DamagedPackage, "the sentinel is 0xdeadbeee, not 0xdeadbeef"),
    "other_version": (other_version, DamagedPackage, "version 1, not 2"),
    "other_blob_type": (other_blob_type, DamagedPackage, "of type fp32, the program says fp16"),
    "other_blob_size": (other_blob_size, DamagedPackage, "the blob has"),
    "no weights": (lambda path: shutil.rmtree((path / WEIGHTS).parent), DamagedPackage, "weights is missing"),
    "no weight file": (lambda path: (path / WEIGHTS).unlink(), DamagedPackage, "the weight file .* is missing"),
    "empty weight file": (lambda path: (path / WEIGHTS).write_bytes(b""), DamagedPackage, "0 bytes: too few"),
    "no manifest": (lambda path: (path / "Manifest.json").unlink(), DamagedPackage, "has no Manifest.json"),
    "no model": (lambda path: (path / MODEL).unlink(), DamagedPackage, "model.mlmodel is missing"),
    "no protobuf": (lambda path: (path / MODEL).write_bytes(b"\xff" * 99), DamagedPackage, "model.mlmodel"),
} | {
    edit.__name__: (edited(edit), error, message)
    for edit, error, message in [
        (beyond_the_end, DamagedPackage, "but the file has"),
        (between_blobs, DamagedPackage, "no blob begins here"),
        (unaligned, DamagedPackage, "no multiple of 64"),
        (outside, DamagedPackage, "lies outside"),
        (absolute, DamagedPackage, "'/etc/hostname' lies outside the package"),
        (no_such_file, DamagedPackage, "other.bin is missing"),
        (renamed, Unsupported, "the operation tanhh '.*' is unknown"),
        (other_type, Unsupported, "gives fp16, but is declared to give fp32"),
        (unknown_input, Unsupported, "unknown to this evaluator: alpha"),
        (unknown_attribute, DamagedPackage, r"tanh .* attributes \['fast'\]"),
        (nothing_gives_it, Unsupported, "takes 'nowhere', which nothing before it gives"),
        (given_twice, DamagedPackage, "is given twice"),
        (unknown_opset, DamagedPackage, "opset 'CoreML99'"),
        (described_otherwise, DamagedPackage, "'ids' is int32.* in the description"),
        (state_of_nobody, DamagedPackage, "'ids', which is no state of main"),
        (no_function, ValueError, "no function 'main': it has other"),
    ]
}
