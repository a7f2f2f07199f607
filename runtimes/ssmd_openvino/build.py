"""Builds OpenVINO artifacts.

For processors one model that leaves the number of tokens and the capacity of the caches open, and one of a decode step
of several streams; for the NPU one of fixed shapes for every length and capacity. All are over one file of weights.
"""

from __future__ import annotations

import gc
import hashlib
import itertools
import math
import mmap
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from ssmd.build.builder import TIERS, BuildError, Quantization, Shapes, Target
from ssmd.build.stripping import Constants
from ssmd.families.offsets import BLOCK, SUFFIX, is_exact, is_multiplied
from ssmd.families.weights import MARK, Parameters
from ssmd.machine.installation import to_add
from ssmd.machine.progress import Stage
from ssmd.model.artifact import Artifact
from ssmd.refit.encodings import ENCODINGS, EncodingError
from ssmd.runtime.hoststate.program import FlatProgram
from ssmd.runtime.hoststate.signatures import lanes_name
from ssmd_openvino import library
from ssmd_openvino.compile import PRODUCTS, chosen_products, compile_model
from ssmd_openvino.graph import OpenVINOCall, signatures
from ssmd_openvino.lint import lint, operations
from ssmd_openvino.runtime import LANES, ON_CPU, OPEN, WEIGHTS, WITH_LANES, OpenVINORuntime
from ssmd_openvino.xamba import Passes, apply

if TYPE_CHECKING:
    from ssmd.authoring.flat import FlatModule

MIN_WEIGHT_ELEMENTS = 64 * 64 + 1  # smaller ones stay float: masks, and matrices of a rotated model
PROBE_TOKENS, PROBE_SLOTS = 16, 64  # of a model that leaves them open
_ALIGNMENT = 64  # bytes, of a constant in the file of weights
_NUMBER = re.compile(r"_\d+|^\d+")  # in a name, which it makes the only one of its kind
_KEPT_BY_NNCF = ["nncf", "weight_compression", "ignored_scope", "names"]  # names, with their numbers
_PLACE = re.compile(r'offset="(\d+)" size="(\d+)"')  # of a constant, in the text of an IR
# The same with the constant's name, type and shape before it.
_NAMED_PLACE = re.compile(
    r'(?P<before>name="(?P<name>[^"]*)" type="Const"[^>]*>\s*'
    r'<data element_type="(?P<type>\w+)" shape="(?P<shape>[^"]*)" )?offset="(?P<offset>\d+)" size="(?P<size>\d+)"'
)
_SCALE = "/scale"  # after the name of a constant that nncf has made int8, in the name of its scales
_AS_FLOAT16 = "_compressed"  # after the name of a constant that is written in float16
_OTHER = f"install the version that ssmd was made for: {to_add('build')}"


class OpenVINOConverter:
    runtime = "openvino"
    holds: ClassVar[bool] = True
    encodings: ClassVar[str] = "nncf"
    packages: ClassVar[Mapping[str, str]] = {"torch": "torch", "openvino": "openvino", "nncf": "nncf"}

    def __init__(self, device_class: Literal["cpu", "npu"], passes: Passes | None = None) -> None:
        """`passes`: of XAMBA, run over the graph before its weights are quantized."""
        self.device_class: str = device_class
        self._passes = passes
        self.quantizations: tuple[Quantization, ...] = (
            ("f16", "int8") if device_class == "npu" else ("int8", "int4", "f16", "f32")
        )
        # The passes are measured with the weights. What is checked for float16 before it is int8 needs them too.
        late: tuple[Quantization, ...] = ("f16",) if device_class == "npu" else ("int8", "int4", "f16", "f32")
        self.late = late if passes is None else ()
        # Each length is a model that the NPU's compiler takes a minute for, and more the longer it is (docs/npu.md).
        self.buckets: tuple[int, ...] | None = (64,) if device_class == "npu" else None
        self.most_tokens = None if device_class == "npu" else 64
        self.context = 2048 if device_class == "npu" else 32_768
        # An open model has any capacity for nothing, each of those for the NPU is a set of models.
        self.tiers: tuple[int, ...] = (2048, 8192) if device_class == "npu" else TIERS

    def prepare(self) -> None:
        library.openvino()
        library.nncf()

    def rotates(self, quantization: Quantization) -> bool:
        """Return True for int8 on a processor, which rounds activations too; an NPU computes in float16.

        See docs/quantization.md.
        """
        return quantization == "int8" and self.device_class == "cpu"

    def offsets(self, shapes: Shapes, quantization: Quantization) -> list[str]:
        int4 = quantization == "int4"
        return [n for n, s in shapes.items() if int4 and _is_int4(n, s) and s[1] % BLOCK == 0]

    def recipe(self, quantization: Quantization) -> dict[str, Any]:
        recipes: dict[str, dict[str, Any]] = {
            "int8": {"weights": "int8, symmetric, a scale for each output channel"},
            "int4": {
                "offsets": BLOCK,
                "weights": f"int4, a scale and an offset for {BLOCK} values; embedding, head and offsets int8",
            },
        }
        return recipes.get(quantization, {})

    def write(self, module: FlatModule, target: Target, folder: Path, stage: Stage) -> dict[str, Any]:
        unfit = [
            n
            for n, p in module.named_parameters()
            if target.quantization == "int4" and (_is_int4(n, p.shape) or _is_expert(n)) and p.shape[-1] % BLOCK
        ]
        if unfit:
            raise BuildError(
                f"{unfit[0]} has rows that are no multiple of {BLOCK} values, which int4 takes; build with --quant int8"
            )
        made = (self._write_open if self.device_class == "cpu" else self._write_fixed)(module, target, folder, stage)
        return made if self._passes is None else {**made, "xamba": {"passes": self._passes.to_json(), **made["xamba"]}}

    def constants(self, folder: Path) -> Constants:
        models = sorted(folder.glob("*.xml"))
        places = {(int(p[1]), int(p[2])) for model in models for p in _PLACE.finditer(model.read_text("utf-8"))}
        return {WEIGHTS: sorted(places), **{model.name: () for model in models}}

    def load(self, artifact: Artifact) -> FlatProgram:
        return OpenVINORuntime().load(artifact, device="cpu")  # an NPU's too: what it says must not depend on one here

    def _write_open(self, module: FlatModule, target: Target, folder: Path, stage: Stage) -> dict[str, Any]:
        from ssmd_openvino.convert import converted, converted_lanes

        with stage("convert"):
            model = converted(module, target.context)
        report = self._rewritten(model, OPEN, stage)
        with SharedWeights(folder / WEIGHTS, module.late) as weights:
            late = weights.stand_ins(model)
            with stage("quantize"):
                model = _compressed(model, target.quantization)
            with stage("write"):
                weights.save(model, folder / f"{OPEN}.xml", target.quantization, late)
            products = PRODUCTS * sum(m.count > 1 for m in module.plan.experts)
            made: dict[str, Any] = {"experts": {"products": products}} if products else {}
            models = [OPEN]
            if self._passes is not None:  # one stream's step is rewritten, no other gives its bits
                made["xamba"] = {OPEN: report}
            shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
            for lanes in LANES if self._passes is None and has_lanes(shapes, target.quantization) else ():
                del model
                gc.collect()  # models refer to one another
                with stage(f"convert a decode step of {lanes} streams"):
                    model = converted_lanes(module, lanes)
                    late = weights.stand_ins(model)
                    model = _compressed(model, target.quantization)
                    weights.save(model, folder / f"{lanes_name(lanes)}.xml", target.quantization, late)
                    models.append(lanes_name(lanes))
        del model
        if products:
            gc.collect()
            with stage("count the products of chosen experts"):
                for name in models:
                    check_experts(folder, name, products)
        return made

    def _write_fixed(self, module: FlatModule, target: Target, folder: Path, stage: Stage) -> dict[str, Any]:
        from ssmd_openvino.convert import converted

        counts: dict[str, Any] = {}
        reports: dict[str, Any] = {}
        with SharedWeights(folder / WEIGHTS, module.late) as weights:
            for name, (length, capacity) in signatures((1, *target.buckets), target.tiers).items():
                with stage(f"convert {name}"):
                    model = converted(module, capacity, length)
                reports[name] = self._rewritten(model, name, stage)
                with stage(f"check and write {name}"):
                    if wrong := lint(model):
                        raise BuildError(f"{name} is not a graph for the NPU: {'; '.join(wrong[:3])}")
                    counts[name] = operations(model)
                    late = weights.stand_ins(model)
                    model = _compressed(model, target.quantization)
                    weights.save(model, folder / f"{name}.xml", target.quantization, late)
                    del model
                    gc.collect()  # models refer to one another
        made: dict[str, Any] = {"npu_lint": "passed", "operations": counts}
        return {**made, "xamba": reports} if self._passes else made

    def _rewritten(self, model: Any, name: str, stage: Stage) -> dict[str, Any]:
        """Run the passes over a model, one after another. Returns each one's report and its error in the logits."""
        if self._passes is None:
            return {}
        made: dict[str, Any] = {}
        with stage(f"rewrite {name}"):
            for one in self._passes.single():
                [(kind, _)] = [(k, v) for k, v in one.to_json().items() if v]
                expected = probe_logits(model)
                report = apply(model, one)
                error = np.abs(probe_logits(model) - expected).max() / expected.std()
                made[kind] = {**report.to_json(), "logits_error": float(error)}
        return made


def probe_logits(model: Any) -> NDArray[np.float32]:
    """Return a model's logits after PROBE_TOKENS tokens of ascending ids from an empty state, in float32 on the CPU."""
    openvino = library.openvino()
    length = model.input("tokens").get_partial_shape()[1]
    count = PROBE_TOKENS if length.is_dynamic else length.get_length()
    feeds = {"tokens": np.arange(1, count + 1, dtype=np.int32)[None], "pos": np.zeros(1, np.int32)}
    feeds["n_valid"] = np.full(1, count, np.int32)
    compiled = compile_model(openvino.Core(), model.clone(), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    request = compiled.create_infer_request()
    for i, port in enumerate(model.inputs):  # the plugin adds names to those of its ports and keeps their order
        sizes = [PROBE_SLOTS if d.is_dynamic else d.get_length() for d in port.get_partial_shape()]
        name = next((n for n in feeds if n in port.names), None)
        array = np.zeros(sizes, np.float32) if name is None else feeds[name]
        request.set_input_tensor(i, openvino.Tensor(array))
    OpenVINOCall(request).run()
    logits: NDArray[np.float32] = request.get_output_tensor(0).data.copy()
    return logits


CONVERTER = OpenVINOConverter("cpu")
NPU_CONVERTER = OpenVINOConverter("npu")


def rewriting(runtime: str, passes: str) -> OpenVINOConverter:
    """Return a converter for "openvino" or "npu" that runs XAMBA's passes. Raises XambaError, which is a ValueError."""
    return OpenVINOConverter("npu" if runtime == "npu" else "cpu", Passes.parse(passes))


class SharedWeights:
    """One file for the constants of several models, each of which stands in it once.

    A large parameter of `late` has no values in a model. They are made here, by blocks of rows, in the encoding of the
    constant that stands for it.
    """

    def __init__(self, file: Path, late: Parameters | None = None) -> None:
        self._path, self._growing = file, file.with_suffix(".growing")  # a model's own file may have that name
        self._file = self._growing.open("wb")
        self._late = late
        self._places: dict[bytes, int] = {}
        self._made: dict[tuple[str, str], int] = {}  # the places of large parameters, by encoding

    def __enter__(self) -> SharedWeights:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._growing.replace(self._path)

    def stand_ins(self, model: Any) -> dict[str, str]:
        """Return the large parameters of a float32 openvino.Model by the names of the constants that stand for them.

        Raises BuildError if one of them is not found whole.
        """
        late = self._late
        if late is None or not late.late:
            return {}
        marks = {late[name].flat[:MARK].tobytes(): name for name in late.late}
        found, constants = dict[str, str](), Counter[str]()
        for op in _constants(model):
            constants[op.get_friendly_name()] += 1
            if math.prod(op.get_output_shape(0)) >= MARK and op.get_element_type().get_type_name() == "f32":
                name = marks.get(op.data.flat[:MARK].tobytes())
                if name is not None and _axes(op.get_output_shape(0)) == _axes(late.late[name]):
                    found[op.get_friendly_name()] = name
        lost = set(late.late) - {name for constant, name in found.items() if constants[constant] == 1}
        if lost:
            raise BuildError(f"OpenVINO has not stored the weight {min(lost)} where it can be found; {_OTHER}")
        return found

    def save(self, model: Any, file: Path, quantization: Quantization, late: Mapping[str, str]) -> None:
        """Write an openvino.Model as an IR over this file. late: as of `stand_ins`. Raises BuildError as `take`."""
        before = _save(model, file, quantization)
        self.take(file, {new: late[old] for new, old in before.items() if old in late})

    def take(self, model: Path, late: Mapping[str, str]) -> None:
        """Take over the weights file of an IR, which goes, and point its text here.

        late: large parameters by the names of the constants that stand for them. Raises BuildError if one of these does
        not have the parameter's axes and a known encoding, or if the encoding does not hold its values.
        """
        own, found = model.with_suffix(".bin"), set[str]()
        if own.stat().st_size:
            with own.open("rb") as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as data:

                def moved(place: re.Match[str]) -> str:
                    first, size = int(place["offset"]), int(place["size"])
                    constant = (place["name"] or "").removesuffix(_AS_FLOAT16)
                    if constant in late:
                        found.add(late[constant])
                        at = self._place_late(late[constant], place)
                    else:
                        at = self._place(data[first : first + size])
                    return f'{place["before"] or ""}offset="{at}" size="{size}"'

                model.write_text(_NAMED_PLACE.sub(moved, model.read_text("utf-8")), "utf-8", newline="\n")
        own.unlink()
        if lost := set(late.values()) - found:
            raise BuildError(f"OpenVINO has not written the weight {min(lost)} where it can be found; {_OTHER}")

    def _place_late(self, name: str, place: re.Match[str]) -> int:
        """Return the place of a large parameter, or of its scales. Raises BuildError."""
        assert self._late is not None
        shape = _axes(self._late.late[name])
        blocks = (*shape[:-1], shape[-1] // BLOCK)
        known = {
            ("f16", _axes(blocks)): "nncf-int4-scale",
            ("i4", _axes((*blocks, BLOCK))): "nncf-int4",
            ("f16", shape[:-1]): "nncf-int8-scale",
            ("f32", shape): "f32",
            ("f16", shape): "f16",
            ("i8", shape): "nncf-int8",
        }
        encoding = known.get((place["type"], _axes(map(int, place["shape"].split(", ")))))
        if encoding is None:
            raise BuildError(
                f"OpenVINO has stored the weight {name} as {place['type']} of shape {place['shape']}, which ssmd "
                f"does not know; {_OTHER}"
            )
        if (name, encoding) not in self._made:
            self._made[name, encoding] = self._place_parts(self._encoded(name, encoding))
        return self._made[name, encoding]

    def _encoded(self, name: str, encoding: str) -> Iterator[bytes]:
        """Yield the bytes of a large parameter in order. Raises BuildError."""
        assert self._late is not None
        form, part = ENCODINGS[encoding].form, ENCODINGS[encoding].part
        try:
            for rows in self._late.blocks(name):
                yield np.ascontiguousarray(form(rows)[part]).tobytes()
        except EncodingError as err:
            raise BuildError(f"{name}: {err}") from err

    def _place(self, content: bytes) -> int:
        digest = hashlib.sha256(content).digest()
        if digest not in self._places:
            self._file.write(bytes(-self._file.tell() % _ALIGNMENT))
            self._places[digest] = self._file.tell()
            self._file.write(content)
        return self._places[digest]

    def _place_parts(self, parts: Iterable[bytes]) -> int:
        """Return the place of a constant that is made in parts; it is written, and removed again if it stood there."""
        end, digest = self._file.tell(), hashlib.sha256()
        self._file.write(bytes(-end % _ALIGNMENT))
        at = self._file.tell()
        for part in parts:
            digest.update(part)
            self._file.write(part)
        known = self._places.setdefault(digest.digest(), at)
        if known != at:
            self._file.seek(end)
            self._file.truncate()
        return known


def _axes(shape: Iterable[int]) -> tuple[int, ...]:
    """Return a shape without its axes of 1: of the same values in the same order."""
    return tuple(n for n in shape if n != 1)


def _is_int4(name: str, shape: Sequence[int]) -> bool:
    """Return True if a parameter has 4 bits in int4."""
    return is_multiplied(name) and math.prod(shape) >= MIN_WEIGHT_ELEMENTS


def has_lanes(shapes: Shapes, quantization: Quantization) -> bool:
    """Return True if a step of several streams is faster and gives the same bits (docs/notes/log.md).

    With int4 weights a product with four rows takes as long as four products with one. With int8 weights whose rows are
    shorter than a group of activations these are not quantized, so a row gets other bits than alone.
    """
    if quantization == "int4":
        return False
    group = ON_CPU["DYNAMIC_QUANTIZATION_GROUP_SIZE"]
    matrices = [s for s in shapes.values() if len(s) == 2 and math.prod(s) >= MIN_WEIGHT_ELEMENTS]
    return quantization != "int8" or all(shape[1] >= group for shape in matrices)


def check_experts(folder: Path, name: str, products: int) -> None:
    """Check that the plugin computes only the chosen experts of a model in `folder`. Raises BuildError.

    products: the number that the plugin has to make. If it does not know the form of a layer's experts, it computes all
    of them, and nothing else tells of it.
    """
    core = library.openvino().Core()
    properties = {**ON_CPU, **WITH_LANES, "INFERENCE_NUM_THREADS": 1}
    model = core.read_model(folder / f"{name}.xml", folder / WEIGHTS)
    found = chosen_products(compile_model(core, model, "CPU", properties))
    if found != products:
        raise BuildError(
            f"OpenVINO {library.package_version()} would compute all experts for each token: its {name} has {found} "
            f"products of chosen experts, and {products} are needed, {PRODUCTS} for each layer with experts"
        )


def _is_router(name: str) -> bool:
    """Return True if a constant is of a router. It stays float32: in 8 bits it chooses other experts."""
    return re.search(r"layer\d+_router\b", name) is not None


def _is_expert(name: str) -> bool:
    return re.search(r"layer\d+_experts_(gate|up|down)\b", name) is not None


def _compressed(model: Any, quantization: Quantization) -> Any:
    """Return the model with quantized weights. Other constants are not changed."""
    if quantization not in ("int8", "int4"):
        return model
    nncf = library.nncf()
    constants = [op for op in model.get_ops() if op.get_type_name() == "Constant" and op.get_output_size()]
    sizes = {op.get_friendly_name(): math.prod(op.get_output_shape(0)) for op in constants}
    exact = (n for n, size in sizes.items() if size < MIN_WEIGHT_ELEMENTS or is_exact(n) or _is_router(n))
    small = list(exact)  # masks too

    def but_for(names: list[str]) -> Any:
        return nncf.IgnoredScope(names=names, validate=False) if names else None

    if quantization == "int8":
        return nncf.compress_weights(model, mode=nncf.CompressWeightsMode.INT8_SYM, ignored_scope=but_for(small))
    offsets = [name for name in sizes if name.endswith(SUFFIX) and name not in small]
    if offsets:
        others = [name for name in sizes if name not in offsets]
        model = nncf.compress_weights(model, mode=nncf.CompressWeightsMode.INT8_SYM, ignored_scope=but_for(others))
    if any(map(_is_expert, sizes)):  # whose blocks have offsets of their own, as they are not divided
        others = [name for name in sizes if not _is_expert(name) or name in small]
        model = nncf.compress_weights(
            model,
            mode=nncf.CompressWeightsMode.INT4_ASYM,
            group_size=BLOCK,
            ratio=1.0,
            all_layers=True,
            ignored_scope=but_for(others),
        )
    return nncf.compress_weights(
        model,
        mode=nncf.CompressWeightsMode.INT4_SYM,
        backup_mode=nncf.BackupMode.INT8_SYM,
        group_size=BLOCK,
        ratio=1.0,
        ignored_scope=but_for(small),
    )


def _save(model: Any, file: Path, quantization: Quantization) -> dict[str, str]:
    """Write a model as an IR. Returns the names of constants before by those in the file."""
    model.set_friendly_name(file.stem)
    before = _renumber(model)
    if model.has_rt_info(_KEPT_BY_NNCF):
        model.set_rt_info("", _KEPT_BY_NNCF)
    library.openvino().save_model(model, file, compress_to_fp16=quantization == "f16")
    return before


def _renumber(model: Any, numbers: Iterator[int] | None = None) -> dict[str, str]:
    """Replace the numbers in names, which count objects of the whole process, by the place in the graph.

    Returns the names of constants before by those after it; those of scales are the names of what they scale.
    """
    numbers = itertools.count() if numbers is None else numbers
    before = {}
    for op in model.get_ordered_ops():
        old = op.get_friendly_name()
        new = f"{_NUMBER.sub('', old)}_{next(numbers)}"
        op.set_friendly_name(new)
        if op.get_type_name() == "Constant":
            before[new] = old.removesuffix(_SCALE)
        if op.get_type_name() == "Loop":
            before |= _renumber(op.get_function(), numbers)
    return before


def _constants(model: Any) -> Iterator[Any]:
    """Yield the constants of a model and of its loops' bodies."""
    for op in model.get_ops():
        if op.get_type_name() == "Constant":
            yield op
        elif op.get_type_name() == "Loop":
            yield from _constants(op.get_function())
