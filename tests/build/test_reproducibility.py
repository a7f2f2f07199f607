"""The same input builds the same artifact: in another process, another folder, with other hash seeds and threads.

The other one is kept (tests/kept.py) and may be of another processor, where PyTorch and the runtimes add in another
order. So weights, graphs and the manifest are compared to the byte; golden values, and what was measured, are not.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import BUILT, NUMERIC, ROOT, TinyArtifacts, plain_environment
from safetensors.numpy import load_file

from ssmd.model.artifact import GOLDEN as VALUES
from ssmd.model.artifact import MANIFEST
from ssmd_litert.modelfile import Edited, edit

# What `ssmd build` computes with PyTorch and with the quantizer, without the export, which takes half a minute.
GOLDEN = """
import sys, torch
from pathlib import Path
from ssmd.build.reference import Reference
from ssmd.authoring.model import author
from ssmd.families.registry import family_of
from ssmd.model.source import Source
from ssmd.text.tokenizer import Tokenizer
from ssmd_litert.modelfile import Edited, edit

torch.set_num_threads(int(sys.argv[3]))
source = Source.open(Path(sys.argv[1]))
family = family_of(source.config)
config = family.parse(source.config)
module = author(family, config, {name: bind(source) for name, bind in family.bindings(config).items()}, 512)
reference = Reference.of(module, Tokenizer.open(source.path / "tokenizer.json"))
reference.save(Path(sys.argv[2]))
print(reference.text_logits.tobytes().hex())
assert torch.get_num_threads() == int(sys.argv[3])
"""
STALE = "if it is as it should be, its key does not see why: let CODE in tests/kept.py have that, and run scripts/keep"
# Of the largest logit. PyTorch adds in another order where a processor has other vectors: a sum of a few hundred
# products, each rounded to 2^-24 of itself, is off by some 1e-7 of its size, and a few layers add that up.
ROUNDINGS = 1e-5
OTHER_NUMBERS = (
    {"MKL_CBWR": "COMPATIBLE"},
    {"ATEN_CPU_CAPABILITY": "default", "NPY_DISABLE_CPU_FEATURES": "AVX2 FMA3"},
)
QUANTIZE = """
import sys
from pathlib import Path
from ssmd_litert.recipe import quantize

quantize(Path(sys.argv[1]), Path(sys.argv[2]), "int8")
"""


def python(*arguments: str, seed: int, **environment: str) -> str:
    """Run in a process of its own, whose sets and dicts of texts have another order. Returns what it prints."""
    around = {**plain_environment(), "PYTHONHASHSEED": str(seed), **environment}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=around, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def check_same(found: Path, kept: Path) -> None:
    """Check that two builds have the same files, but for roundings in golden values and what was measured."""
    one, other = hashes(found), hashes(kept)
    assert one.keys() == other.keys()
    assert {n for n in one if one[n] != other[n]} <= {VALUES, MANIFEST}, STALE
    check_values(found / VALUES, kept / VALUES)
    assert said(found) == said(kept), STALE


def check_values(found: Path, kept: Path) -> None:
    """Check that golden values are the same but for roundings."""
    values, expected = load_file(found), load_file(kept)
    assert values.keys() == expected.keys(), STALE
    assert np.abs(values["logits"] - expected["logits"]).max() <= ROUNDINGS * np.abs(expected["logits"]).max(), STALE
    assert all((values[n] == expected[n]).all() for n in ("tokens", "positions")), STALE


def said(artifact: Path) -> dict[str, Any]:
    """Read artifact.json, less the numbers that were measured."""
    fields: dict[str, Any] = json.loads((artifact / MANIFEST).read_text())
    del fields["files"][VALUES]
    fields["quality"] = sorted(fields["quality"]) if "quality" in fields else None
    return fields


def hashes(folder: Path) -> dict[str, str]:
    return {str(p.relative_to(folder)): sha256(p.read_bytes()).hexdigest() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize(
    "name", ["llama-f32", "openvino-granite-int8", "npu-granite-f16", "coreml-llama-int8", "wgpu-mamba-f32"]
)
def test_a_second_build_of_a_moved_source_has_the_same_files(
    artifacts: TinyArtifacts, tmp_path: Path, name: str
) -> None:
    first, made = artifacts[name], BUILT[name]
    source = tmp_path / "moved" / "other name"
    shutil.copytree(artifacts.source(name), source)
    (tmp_path / "tmp").mkdir()
    asked = (*made.asked, "--name", made.variant)
    where = ("--models-dir", str(tmp_path / "elsewhere"))
    around = {"TMPDIR": str(tmp_path / "tmp"), "OMP_NUM_THREADS": "3", "TZ": "Asia/Tokyo"}
    python("-m", "ssmd", "build", str(source), *asked, *where, seed=4242, **around)
    second = tmp_path / "elsewhere" / made.folder
    assert MANIFEST in hashes(first)
    check_same(second, first)


def test_golden_values_do_not_depend_on_threads(artifacts: TinyArtifacts, tmp_path: Path) -> None:
    """The hybrid's values do by default, since its sums are divided among the threads."""
    source, built = artifacts.source("granite-int8"), artifacts["granite-int8"] / "golden.safetensors"
    files = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    texts = {python("-c", GOLDEN, str(source), str(f), str(n), seed=n) for n, f in enumerate(files, 1)}
    assert len(texts) == 1, "the logits that quantization is measured against"
    assert len({f.read_bytes() for f in files}) == 1
    check_values(files[0], built)


@pytest.mark.parametrize("numeric", OTHER_NUMBERS, ids=lambda one: "-".join(one))
def test_golden_values_differ_by_roundings_with_other_kernels(
    artifacts: TinyArtifacts, tmp_path: Path, numeric: dict[str, str]
) -> None:
    source, found = artifacts.source("granite-int8"), tmp_path / "golden.safetensors"
    python("-c", GOLDEN, str(source), str(found), "1", seed=1, **numeric)
    check_values(found, artifacts["granite-int8"] / VALUES)


def test_processes_that_build_compute_in_the_plain_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """A setting of the process that runs the tests would be another maker's: its bytes are not those that are kept."""
    for name in NUMERIC:
        monkeypatch.setenv(name, "AVX2" if name.startswith("NPY") else "COMPATIBLE")
    assert not [name for name in NUMERIC if name in plain_environment()]
    found = python("-c", "import json, os, conftest; print(json.dumps(dict(os.environ)))", seed=1, PYTHONPATH="tests")
    assert not [name for name in NUMERIC if name in json.loads(found)]


def named_apart(edited: Edited) -> None:
    """Names for what a build adds after it quantizes, as the converter's: a quantizer wants them to differ."""
    for place, graph in enumerate(edited.model.subgraphs):
        for i, tensor in enumerate(graph.tensors):
            tensor.name = b"%d/%d" % (place, i)


def test_quantizing_twice_gives_the_same_bytes(artifacts: TinyArtifacts, tmp_path: Path) -> None:
    model = tmp_path / "model.tflite"
    shutil.copyfile(artifacts["mamba-f32"] / "model.tflite", model)
    edit(model, named_apart)
    files = [tmp_path / "a.tflite", tmp_path / "deeper" / "b.tflite"]
    files[1].parent.mkdir()
    for seed, file in enumerate(files):
        python("-c", QUANTIZE, str(model), str(file), seed=seed + 1)
    assert files[0].read_bytes() == files[1].read_bytes()
    assert files[0].stat().st_size < model.stat().st_size
