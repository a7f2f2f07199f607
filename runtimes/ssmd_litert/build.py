"""Builds LiteRT artifacts: one .tflite with a signature for each length and capacity over one copy of the weights."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ssmd.build.builder import TIERS, BuildError, Quantization, Shapes, Target
from ssmd.build.stripping import Constants
from ssmd.families.offsets import BLOCK
from ssmd.machine.memory import trim
from ssmd.machine.progress import Stage
from ssmd.model.artifact import Artifact
from ssmd.model.state import StateSpec, of_lane
from ssmd.runtime.hoststate.graph import SLOTS
from ssmd.runtime.hoststate.program import FlatProgram
from ssmd.runtime.hoststate.signatures import LANES, lanes_name, signature_name
from ssmd_litert import recipe
from ssmd_litert.capacity import open_capacity
from ssmd_litert.delegated import delegate_all
from ssmd_litert.inplace import write_states_last
from ssmd_litert.late_weights import Names, export, give_back, unwritten
from ssmd_litert.lint import lint
from ssmd_litert.modelfile import Edited, edit
from ssmd_litert.runtime import LiteRTRuntime
from ssmd_litert.summed import add_up

if TYPE_CHECKING:
    from ssmd.authoring.model import Model

MODEL = "model.tflite"
MOST_SAID = 3  # of what a lint finds
NOMINALS = (251, 241)  # the capacity that a file says is the first of these that is no other size in it
# A converted file says at each operator the class of the module that it came from. What is said is fixed by family,
# wherever the code lies: the same model gives the same bytes, those of the graphs that were shipped under these names.
_CLASSES = {
    "llama": "ssmd.authoring.llama.Llama",
    "qwen3": "ssmd.authoring.llama.Llama",
    "granitemoehybrid": "ssmd.authoring.granitemoehybrid.GraniteMoeHybrid",
    "mamba": "ssmd.authoring.mamba.Mamba",
    "falcon_mamba": "ssmd.authoring.mamba.Mamba",
    "lfm2": "ssmd.authoring.lfm2.Lfm2",
    "mamba2": "ssmd.authoring.mamba2.Mamba2",
    "bamba": "ssmd.authoring.bamba.Bamba",
    "falcon_h1": "ssmd.authoring.falcon_h1.FalconH1",
}
_CLASS = "ssmd.Model"  # of every other family


class LiteRTConverter:
    runtime, device_class = "litert", "cpu"
    buckets: tuple[int, ...] | None = None
    most_tokens: int | None = None
    context = 32_768  # where the model has as many
    tiers: tuple[int, ...] = TIERS
    quantizations: tuple[Quantization, ...] = ("int8", "int4", "f32")
    late: tuple[Quantization, ...] = ("int8", "int4", "f32")
    holds: ClassVar[bool] = False
    encodings: ClassVar[str] = "litert"
    packages: ClassVar[Mapping[str, str]] = {
        "torch": "torch",
        "litert_torch": "litert-torch",
        "ai_edge_quantizer": "ai-edge-quantizer",
    }

    def prepare(self) -> None:
        import litert_torch  # noqa: F401 - here, so that its seconds count as its own

    def rotates(self, quantization: Quantization) -> bool:
        return recipe.rotates(quantization)

    def offsets(self, shapes: Shapes, quantization: Quantization) -> list[str]:
        return recipe.offsets(shapes, quantization)

    def recipe(self, quantization: Quantization) -> dict[str, Any]:
        divided = {"offsets": BLOCK} if quantization == "int4" else {}
        return {**divided, "ops": recipe.ops(quantization)} if quantization != "f32" else {}

    def write(self, module: Model, target: Target, folder: Path, stage: Stage) -> dict[str, Any]:
        shapes = {name: tuple(value.shape) for name, value in module.named_parameters()}
        unfit = recipe.unfit(shapes, target.quantization)
        if unfit is not None:
            raise BuildError(
                f"{unfit} has rows of {shapes[unfit][1]} values, {target.quantization} takes multiples of "
                f"{BLOCK}; build with --quant int8"
            )
        exported, model = folder / (MODEL + ".f32"), folder / MODEL
        with stage(f"export decode and {len(target.buckets)} prefill lengths"):
            names = _export(module, target.buckets, exported)
        if target.quantization != "f32":
            with stage("quantize"):
                recipe.quantize(exported, model, target.quantization)
                exported.unlink()
        else:
            exported.rename(model)
        changes: list[Callable[[Edited], None]] = [delegate_all, add_up]
        if names and module.late is not None:
            changes.insert(0, partial(give_back, parameters=module.late, names=names))
        if module.spec.rows:
            changes.append(partial(open_capacity, nominal=nominal(module.spec)))
        if states := [t.name for t in module.spec.recurrent]:
            lanes = [of_lane(name, lane) for name in states for lane in range(max(LANES))]
            changes.append(partial(write_states_last, states={*states, *lanes}))
        with stage("put the graphs into forms that run fast"):
            edit(model, *changes)
        with stage("look at what runs where"):
            if wrong := lint(model):
                raise BuildError("; ".join(wrong[:MOST_SAID]))
        _weights_stand_once(model, shapes, target, 1 + len(target.buckets) + sum(LANES))
        return {}

    def constants(self, folder: Path) -> Constants:
        from ssmd_litert.constants import buffers, scales

        with (folder / MODEL).open("rb") as f:
            return {MODEL: [*buffers(f.fileno()), *scales(f.fileno())]}

    def load(self, artifact: Artifact) -> FlatProgram:
        return LiteRTRuntime().load(artifact)


CONVERTER = LiteRTConverter()


def _export(module: Model, buckets: Sequence[int], file: Path) -> Names:
    """Write the module's float32 file. Returns its large parameters by tensor, for which a few numbers stand."""
    import litert_torch
    import torch

    from ssmd.authoring.host import graph_shapes

    converter: Any = litert_torch
    module.__class__ = _named(module)
    shapes = graph_shapes(module.spec, nominal(module.spec))
    if module.spec.rows:
        shapes[SLOTS] = (1, 1, nominal(module.spec))
    for length in (1, *buckets):
        inputs = {
            "tokens": torch.zeros(1, length, dtype=torch.int32),
            "pos": torch.zeros(1, dtype=torch.int32),
            "n_valid": torch.ones(1, dtype=torch.int32),
            **{name: torch.zeros(shape) for name, shape in shapes.items()},
        }
        converter = converter.signature(signature_name(length, 0, 0), module, sample_kwargs=inputs)
    for lanes in LANES:
        inputs = {
            "tokens": torch.zeros(1, lanes, dtype=torch.int32),
            "pos": torch.zeros(lanes, dtype=torch.int32),
            **{of_lane(n, lane): torch.zeros(s) for lane in range(lanes) for n, s in shapes.items()},
        }
        converter = converter.signature(lanes_name(lanes), module, sample_kwargs=inputs)
    trim()  # what the parameters lay in until now
    # A lightweight conversion shares one copy of the weights among the signatures.
    if module.late is None or not module.late.late:
        converter.convert(lightweight_conversion=True).export(str(file))
        return {}
    with unwritten():
        converted = converter.convert(lightweight_conversion=True)
    del converter
    gc.collect()  # PyTorch's graphs, which refer to one another
    trim()
    return export(converted, module, file)


def nominal(spec: StateSpec) -> int:
    """Return the capacity that a file of this state says."""
    sizes = {size for t in spec.tensors for size in t.shape}
    return next((n for n in NOMINALS if n not in sizes), NOMINALS[0])


def _named(module: Model) -> type[Model]:
    """Make a class like the module's under the name that the file is to say."""
    place, _, name = _CLASSES.get(module.family, _CLASS).rpartition(".")
    return type(name, (type(module),), {"__module__": place})


def _weights_stand_once(file: Path, shapes: Shapes, target: Target, graphs: int) -> None:
    """Raise BuildError if the file is larger than one copy of the weights and its graphs can be."""
    weights = recipe.nbytes(shapes, target.quantization)
    # Graphs: operators and tensors of every layer, quantization scales by signature; masks of 4 heads for each bucket.
    rows = sum(shape[0] for shape in shapes.values())
    around = graphs * (len(shapes) * 6000 + 12 * rows) + sum(4 * 4 * b * b for b in target.buckets) + (2 << 20)
    size = file.stat().st_size
    if size > weights + around:
        raise BuildError(
            f"{file.name} has {size} bytes, one copy of the weights has {weights}: the converter has stored some of "
            "them more than once"
        )
