"""The tiny artifacts kept in the repository equal today's builds, and are restored for nothing else.

By default test_reproducibility.py builds one of each runtime and compares; here is all the rest.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path

import kept
import numpy as np
import pytest
import tiny
from build.test_reproducibility import check_same, hashes, python
from conftest import BUILT, KEPT, TinyArtifacts
from modules import MODULES, reached_from
from safetensors.numpy import load_file, save_file

from ssmd.model.rope import Rope


@pytest.mark.full
@pytest.mark.parametrize("name", KEPT)
def test_it_is_what_a_build_makes(name: str, artifacts: TinyArtifacts, tmp_path: Path) -> None:
    made = BUILT[name]
    assert kept.keys().get(name) == made.key, "scripts/keep makes it anew"
    source = artifacts.source(name)
    assert kept.restore(name, made.key, source, tmp_path / "restored")
    asked = (*made.asked, "--name", made.variant, "--models-dir", str(tmp_path))
    python("-m", "ssmd", "build", str(source), *asked, seed=1)
    check_same(tmp_path / made.folder, tmp_path / "restored")


def test_it_comes_back_to_the_last_bit(artifacts: TinyArtifacts, tmp_path: Path) -> None:
    artifact, source = artifacts["wgpu-llama-f32"], artifacts.source("wgpu-llama-f32")
    packed = kept.pack(artifact, source)
    assert len(packed) < sum(f.stat().st_size for f in artifact.iterdir()) / 50, "weights are references"
    assert kept.unpack(packed, source, tmp_path / "restored")
    assert hashes(tmp_path / "restored") == hashes(artifact)
    assert kept.pack(tmp_path / "restored", source) == packed


@pytest.mark.parametrize("damage", ["bytes", "weights", "config.json", "chat_template.jinja"])
def test_of_another_source_nothing_is_restored(damage: str, artifacts: TinyArtifacts, tmp_path: Path) -> None:
    artifact, source = artifacts["wgpu-llama-f32"], tmp_path / "source"
    packed = bytearray(kept.pack(artifact, artifacts.source("wgpu-llama-f32")))
    shutil.copytree(artifacts.source("wgpu-llama-f32"), source)
    if damage == "bytes":
        packed[len(packed) // 2] ^= 1
    elif damage == "weights":
        weights = load_file(source / "model.safetensors")
        weights["model.norm.weight"][0] += 1
        save_file(weights, source / "model.safetensors")
    else:
        (source / damage).write_text((source / damage).read_text() + "\n")
    assert not kept.unpack(bytes(packed), source, tmp_path / "restored")
    assert not (tmp_path / "restored").exists()


def test_kept_for_two_processors_and_restored_on_each(
    artifacts: TinyArtifacts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The power of a float32 has another last bit where a processor has AVX-512, and so has a RoPE table."""
    name, key = "wgpu-llama-f32", BUILT["wgpu-llama-f32"].key
    artifact, source = artifacts[name], artifacts.source(name)
    monkeypatch.setattr(kept, "FOLDER", tmp_path)
    here, beside = kept.files_of(name)
    here.write_bytes(kept.pack(artifact, source))
    with monkeypatch.context() as elsewhere:
        plain = Rope.frequencies
        elsewhere.setattr(Rope, "frequencies", lambda rope, rotated: np.nextafter(plain(rope, rotated), np.float32(2)))
        assert not kept.restorable(name, source)
        assert not kept.restore(name, key, source, tmp_path / "none")
        beside.write_bytes(kept.pack(artifact, source))
        assert kept.restore(name, key, source, tmp_path / "there")
    assert kept.restore(name, key, source, tmp_path / "here")
    assert hashes(tmp_path / "there") == hashes(tmp_path / "here") == hashes(artifact)


def test_another_key_for_other_code_packages_and_requests(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = BUILT["llama-int8"]
    before = {r: replace(made, runtime=r).key for r in ("litert", "openvino", "npu", "wgpu")}
    assert len({*before.values(), replace(made, quantization="f32").key, replace(made, variant="qwen3").key}) == 6
    for pattern in (*kept.CODE, f"{kept.FAMILIES}/*.py", *(f"runtimes/ssmd_litert/{n}.py" for n in kept.RUNTIME_CODE)):
        for file in kept.ROOT.glob(pattern):
            copy = tmp_path / file.relative_to(kept.ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, copy)
    monkeypatch.setattr(kept, "ROOT", tmp_path)
    for name, change, same in (
        ("llama", "", True),
        ("llama", "# a word\n", True),
        ("llama", "x = 1\n", False),
        ("layers", "x = 1\n", False),
        ("lfm2", "x = 1\n", True),
        ("registry", "x = 1\n", True),
    ):
        file = tmp_path / kept.FAMILIES / f"{name}.py"
        text = file.read_text()
        file.write_text(text + change)
        kept._made_by.cache_clear()
        assert (made.key == before["litert"]) == same, name
        file.write_text(text)
    kept._made_by.cache_clear()
    monkeypatch.setattr(kept, "version", lambda package: "0")
    assert made.key != before["litert"]
    kept._made_by.cache_clear()


@pytest.mark.parametrize("runtime", kept.RUNTIME_PACKAGES)
def test_a_key_sees_what_a_build_reaches_or_says_why_not(runtime: str) -> None:
    families = {family for family, _ in tiny.VARIANTS.values()}
    seen = {file for family in families for file in kept.files(runtime, family)}
    reached = reached_from([f"ssmd_{runtime}.build", "ssmd.build.builder", "ssmd.authoring.model"])
    unseen = {name for name in reached if MODULES[name] not in seen}
    assert not [name for name in unseen if not any(fnmatch(name, pattern) for pattern in kept.UNSEEN)]


def test_comments_and_docstrings_are_no_code() -> None:
    text = '"""Words.\n\nMore."""\n\n# why\ndef f() -> str:\n    """Words."""\n    # why\n    return """a\nb"""\n'
    assert kept.code_of(text) == 'def f() -> str:\n    return """a\nb"""'
