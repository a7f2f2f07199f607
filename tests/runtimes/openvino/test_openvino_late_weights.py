"""Weights that an OpenVINO model's file gets after its graphs are made: the same bytes as if OpenVINO wrote them."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import cast

import pytest
import tiny

from ssmd.authoring.model import author
from ssmd.build.builder import BuildError, Quantization, Target
from ssmd.families import weights
from ssmd.families.offsets import with_offsets
from ssmd.families.registry import family_of
from ssmd.families.rotation import rotated
from ssmd.families.weights import Parameters, make_parameters, tensor
from ssmd.model.random_source import SeededSource
from ssmd.refit.encodings import ENCODINGS
from ssmd_openvino.build import CONVERTER, NPU_CONVERTER, OpenVINOConverter, SharedWeights, rewriting
from ssmd_openvino.runtime import WEIGHTS

ROWS, COLUMNS = 600, 512


@pytest.mark.parametrize(
    ("converter", "variant", "quantization", "kinds"),
    [
        # Experts of three axes in int8, and a router that stays float32.
        (CONVERTER, "lfm2-moe", "int8", {"embedding", "layer2_experts_up", "layer2_router"}),
        # With a loop: such a model has lost the names of its constants.
        (CONVERTER, "mamba", "f32", {"embedding", "layer0_in"}),
        (NPU_CONVERTER, "llama", "f16", {"embedding", "layer0_down"}),
        (CONVERTER, "llama", "int4", {"embedding", "layer0_down", "layer0_gate_up", "layer0_gate_up_offset"}),
    ],
)
def test_late_weights_give_the_same_files(
    converter: OpenVINOConverter,
    variant: str,
    quantization: str,
    kinds: set[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(weights, "LATE_BYTES", 2048)
    name, fields = tiny.VARIANTS[variant]
    wide = {"intermediate_size": 1536, "num_hidden_layers": 1} if quantization == "int4" else {}  # int8 offsets
    source = SeededSource({"model_type": name, "vocab_size": 300, **fields, **wide}, 1)
    family = family_of(source.config)
    config = family.parse(source.config)
    target = Target(cast(Quantization, quantization), (16,), (64,))
    assert quantization in converter.late
    bindings = family.bindings(config)
    form = rotated(bindings) if converter.rotates(target.quantization) else bindings
    if quantization == "int4":
        shapes = {name: binding(source).shape for name, binding in bindings.items()}
        form = with_offsets(bindings, converter.offsets(shapes, "int4"))
    made = {}
    for late in (False, True):
        module = author(family, config, make_parameters(form, source, late=late), target.context)
        folder = tmp_path / str(late)
        folder.mkdir()
        converter.write(module, target, folder, lambda _: nullcontext())
        made[late] = {file.name: file.read_bytes() for file in folder.iterdir()}
    assert made[True] == made[False]
    assert module.late is not None
    assert kinds <= module.late.late.keys()
    assert all(not module.late[n].flat[4:].any() for n in module.late.late), "nothing was written to them"


def test_passes_that_are_measured_have_all_weights() -> None:
    assert rewriting("openvino", "cumba").late == rewriting("npu", "cumba").late == ()


@pytest.mark.parametrize(
    ("field", "other", "message"),
    [
        ("layer0_up_1", "another_1", "has not written the weight layer0_up where it can be found"),
        ("i8", "u8", "the weight layer0_up as u8 of shape 600, 512"),
        ("600, 512", "512, 600", "the weight layer0_up as i8 of shape 512, 600"),
        ("f16", "f32", "the weight layer0_up as f32 of shape 600, 1"),
        ("", "", ""),
    ],
)
def test_a_weight_that_is_not_found_whole_is_an_error(field: str, other: str, message: str, tmp_path: Path) -> None:
    """A hand-made IR. The last one is right: it gets values in place of the zeros."""
    late = Parameters({"layer0_up": tensor("up", ROWS, COLUMNS)}, SeededSource({}, 1))
    values, scales = ROWS * COLUMNS, 2 * ROWS
    constants = (
        ("layer0_up_1", "i8", f"{ROWS}, {COLUMNS}", 0, values),
        ("layer0_up/scale_2", "f16", f"{ROWS}, 1", values, scales),
    )
    text = "".join(
        f'<layer name="{name}" type="Const" version="opset1">\n'
        f'\t<data element_type="{kind}" shape="{shape}" offset="{at}" size="{size}" />\n'
        for name, kind, shape, at, size in (constants[:1] if field == "layer0_up_1" else constants)
    )
    (tmp_path / "a.xml").write_text(text.replace(f'"{field}"', f'"{other}"'))
    (tmp_path / "a.bin").write_bytes(bytes(values + scales))
    names = {"layer0_up_1": "layer0_up", "layer0_up/scale_2": "layer0_up"}
    with SharedWeights(tmp_path / WEIGHTS, late) as shared:
        if message:
            with pytest.raises(BuildError, match=message):
                shared.take(tmp_path / "a.xml", names)
            return
        shared.take(tmp_path / "a.xml", names)
    made = ENCODINGS["nncf-int8"].form(late.whole("layer0_up"))
    assert (tmp_path / WEIGHTS).read_bytes() == b"".join(part.tobytes() for part in made)
