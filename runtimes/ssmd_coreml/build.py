"""Builds Core ML artifacts: one package whose functions, decode and a prefill for each length, share their weights."""

from __future__ import annotations

import gc
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from uuid import NAMESPACE_URL, uuid5

from ssmd.build.builder import BuildError, Quantization, Shapes, Target
from ssmd.build.stripping import Constants
from ssmd.families.offsets import is_exact
from ssmd.machine.progress import Stage
from ssmd.model.artifact import Artifact
from ssmd.runtime.hoststate.signatures import signature_name
from ssmd.runtime.protocol import Program
from ssmd_coreml import library
from ssmd_coreml.lint import lint
from ssmd_coreml.package import PROGRAM, WEIGHTS, Package, blobs
from ssmd_coreml.runtime import MODEL, CoreMLRuntime
from ssmd_coreml.stacks import Variant

if TYPE_CHECKING:
    from ssmd.authoring.flat import FlatModule

MIN_WEIGHT_ELEMENTS = 64 * 64 + 1  # smaller ones stay float
INT4_BLOCK = 32  # values of a row that share a scale
_BYTEWISE = ("embedding", "head")  # int8 in int4 too, as in the other runtimes


class CoreMLConverter:
    runtime, device_class = "coreml", "gpu"
    buckets: tuple[int, ...] | None = None
    most_tokens: int | None = None
    context = 2048
    tiers: tuple[int, ...] = ()  # all functions share one state, and with it the capacity of its caches
    holds: ClassVar[bool] = True
    encodings: ClassVar[str] = "coreml"
    packages: ClassVar[Mapping[str, str]] = {"torch": "torch", "coremltools": "coremltools"}
    late: tuple[Quantization, ...] = ()

    def __init__(self, variant: Variant) -> None:
        self.variant: Variant = variant
        self.quantizations: tuple[Quantization, ...] = (
            ("int8", "int4", "f16") if variant == "stateful" else ("int8", "int4", "f16", "f32")
        )

    def prepare(self) -> None:
        library.coremltools()

    def rotates(self, quantization: Quantization) -> bool:
        return False

    def offsets(self, shapes: Shapes, quantization: Quantization) -> list[str]:
        return []

    def recipe(self, quantization: Quantization) -> dict[str, Any]:
        recipe = {"activations": "float32, float16 in products with weights and in attention over the caches"}
        weights = {
            "int8": "int8, symmetric, a scale for each output channel",
            "int4": f"int4, symmetric, a scale for {INT4_BLOCK} values; embedding and head int8",
            "f16": "float16",
        }
        return {} if quantization == "f32" else {**recipe, "weights": weights[quantization]}

    def write(self, module: FlatModule, target: Target, folder: Path, stage: Stage) -> dict[str, Any]:
        from ssmd_coreml.convert import converted

        weights = [
            (name, p.shape[1])
            for name, p in module.named_parameters()
            if p.dim() == 2 and p.numel() >= MIN_WEIGHT_ELEMENTS
            if not name.endswith("_A") and not is_exact(name)  # Mamba-1's decays
        ]
        if len(target.tiers) > 1:
            raise BuildError(
                f"capacities {list(target.tiers)}: the functions of a Core ML artifact share one, ask for one only"
            )
        unfit = [n for n, width in weights if n not in _BYTEWISE and width % INT4_BLOCK]
        if target.quantization == "int4" and unfit:
            raise BuildError(
                f"{unfit[0]} has rows that are no multiple of {INT4_BLOCK} values, which int4 takes; build with "
                "--quant int8"
            )
        ct = library.coremltools()
        functions, parts = ct.utils.MultiFunctionDescriptor(), []
        for length in (1, *target.buckets):
            name = signature_name(length, target.context, target.context)
            with stage(f"convert {name}"):
                model = converted(module, length, self.variant, half=target.quantization != "f32")
            with stage(f"quantize and write {name}"), library.quiet():
                model = _quantized(model, target.quantization, [n for n, _ in weights])
                model.save(str(folder / f"{name}.mlpackage"))
            functions.add_function(str(folder / f"{name}.mlpackage"), "main", name)
            parts.append(folder / f"{name}.mlpackage")
            del model
            gc.collect()
        functions.default_function_name = "decode"
        with stage("join the functions"), library.quiet():
            ct.utils.save_multifunction(functions, str(folder / MODEL))
            for part in parts:
                shutil.rmtree(part)
        _ordered(folder / MODEL)
        package = Package(folder / MODEL)
        _weights_stand_once(package)
        reasons = lint(package)
        operations = {name: sum(package.counted(name).values()) for name in sorted(package.functions)}
        return {"variant": self.variant, "operations": operations, "ane": reasons or "eligible"}

    def constants(self, folder: Path) -> Constants:
        """Return the places of the constants in the file of weights. Those in the program are not parameters."""
        others = (path.relative_to(folder).as_posix() for path in sorted((folder / MODEL).rglob("*")) if path.is_file())
        return {name: blobs(folder / name) if name == f"{MODEL}/{WEIGHTS}" else [] for name in others}

    def load(self, artifact: Artifact) -> Program:
        return CoreMLRuntime().load(artifact)


CONVERTER = CoreMLConverter("stateful")


def varied(variant: str) -> CoreMLConverter:
    """Return a converter for "stateful" or "stateless" artifacts. Raises ValueError."""
    if variant not in ("stateful", "stateless"):
        raise ValueError(f"there is no variant {variant!r}; there are: stateful, stateless")
    return CoreMLConverter("stateless" if variant == "stateless" else "stateful")


def _ordered(package: Path) -> None:
    """Make a package that every build makes alike: coremltools writes maps in any order, and names parts at random."""
    library.coremltools()
    from coremltools.proto import Model_pb2

    program = package / PROGRAM
    spec = Model_pb2.Model()
    spec.ParseFromString(program.read_bytes())
    program.write_bytes(spec.SerializeToString(deterministic=True))
    file = package / "Manifest.json"
    manifest = json.loads(file.read_text())
    items = manifest["itemInfoEntries"]
    names = {old: str(uuid5(NAMESPACE_URL, items[old]["path"])) for old in items}
    manifest["itemInfoEntries"] = {names[old]: items[old] for old in sorted(items, key=names.__getitem__)}
    manifest["rootModelIdentifier"] = names[manifest["rootModelIdentifier"]]
    file.write_text(json.dumps(manifest, indent=1) + "\n", newline="\n")


def _weights_stand_once(package: Package) -> None:
    """Raise BuildError if the file of weights is larger than the functions need, or they share too little of it."""
    each = {name: package.constants(name) for name in package.functions}
    distinct = {offset: size for places in each.values() for offset, size in places.items()}
    largest = max(sum(places.values()) for places in each.values())
    # Constants of a single function: masks and biases of its length.
    if sum(distinct.values()) > 1.1 * largest + (1 << 20) * len(each):
        raise BuildError(
            f"the functions have {sum(distinct.values())} bytes of constants, one has {largest}: they do not share "
            "their weights"
        )


def _quantized(model: Any, quantization: Quantization, weights: list[str]) -> Any:
    if quantization not in ("int8", "int4"):
        return model
    import coremltools.optimize.coreml as cto

    int8 = cto.OpLinearQuantizerConfig(
        mode="linear_symmetric", dtype="int8", granularity="per_channel", weight_threshold=0
    )
    int4 = cto.OpLinearQuantizerConfig(
        mode="linear_symmetric", dtype="int4", granularity="per_block", block_size=INT4_BLOCK, weight_threshold=0
    )
    config = cto.OptimizationConfig(global_config=None)
    for name in weights:
        config.set_op_name(f"module_{name}_to_fp16", int8 if quantization == "int8" or name in _BYTEWISE else int4)
    return cto.linear_quantize_weights(model, config)
