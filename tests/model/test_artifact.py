"""Artifact format 3: what opens, and every lie that must not."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ssmd.model.artifact import MANIFEST, Artifact, ArtifactError, build_hash, read_manifest, seal

STATE = [
    {"name": "conv_0", "kind": "conv", "layer": 0, "shape": [8, 3], "dtype": "float32"},
    {"name": "ssm_0", "kind": "ssm", "layer": 0, "shape": [2, 4, 8], "dtype": "float32"},
    {"name": "key_1", "kind": "key", "layer": 1, "shape": [2, 16], "dtype": "float16"},
    {"name": "value_1", "kind": "value", "layer": 1, "shape": [2, 16], "dtype": "float16"},
]


def fields(**changed: Any) -> dict[str, Any]:
    return {
        "name": "tiny",
        "family": "granitemoehybrid",
        "lineage": "a" * 64,
        "runtime": "litert",
        "device_class": "cpu",
        "quantization": "int8",
        "quantization_recipe": {"weights": "int8"},
        "buckets": [16, 64],
        "context": 512,
        "vocabulary": 300,
        "special_tokens": {"bos": None, "eos": "<|im_end|>"},
        "stop_tokens": [2],
        "state": STATE,
        "builders": {"ssmd-daemon": "0.1.0"},
        **changed,
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "tiny"
    path.mkdir()
    for name in ("tokenizer.json", "golden.safetensors", "model.tflite"):
        (path / name).write_bytes(name.encode() * 50)
    return path


def test_a_sealed_folder_opens(folder: Path) -> None:
    seal(folder, fields())
    artifact = Artifact.open(folder)
    assert artifact.manifest.buckets == (16, 64)
    assert artifact.manifest.spec.digest() == "d178dab832ab886cf382b7e29a2a1dc8"  # a change would orphan stored states
    assert artifact.file("model.tflite").read_bytes() == b"model.tflite" * 50
    assert sorted(artifact.manifest.files) == ["golden.safetensors", "model.tflite", "tokenizer.json"]


def test_the_build_names_the_content(folder: Path) -> None:
    first = seal(folder, fields()).manifest.build
    assert seal(folder, fields()).manifest.build == first
    (folder / "model.tflite").write_bytes(b"other")
    assert seal(folder, fields()).manifest.build != first


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda p: (p / "model.tflite").unlink(), "'model.tflite' is missing"),
        (lambda p: (p / "model.tflite").write_bytes(b"model"), "cut off or was altered"),
        (lambda p: (p / "model.tflite").write_bytes(b"m0del.tflite" * 50), "sha256 differs"),
        (lambda p: (p / MANIFEST).unlink(), "has no artifact.json"),
        (lambda p: (p / MANIFEST).write_text("{"), "is not JSON"),
        (lambda p: (p / MANIFEST).write_text("[" * 100_000), "is not JSON"),
        (lambda p: (p / MANIFEST).write_text("[1]"), "not a JSON object"),
        (lambda p: (p / MANIFEST).write_text(" " * (9 << 20)), "larger than"),
    ],
)
def test_damage_is_named(folder: Path, damage: Callable[[Path], object], says: str) -> None:
    seal(folder, fields())
    damage(folder)
    with pytest.raises(ArtifactError, match=says):
        Artifact.open(folder)


def test_a_link_in_place_of_a_file_is_refused(folder: Path, tmp_path: Path) -> None:
    seal(folder, fields())
    (folder / "model.tflite").rename(tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", folder / "model.tflite")
    with pytest.raises(ArtifactError, match="not a plain file"):
        Artifact.open(folder)


def rewrite(folder: Path, change: Callable[[dict[str, Any]], object], *, rehash: bool = True) -> None:
    whole = json.loads((folder / MANIFEST).read_text())
    change(whole)
    if rehash:
        whole["build"] = build_hash(whole)
    (folder / MANIFEST).write_text(json.dumps(whole))


@pytest.mark.parametrize("number", [1, 2])
def test_earlier_formats_open(folder: Path, number: int) -> None:
    seal(folder, fields())
    rewrite(folder, lambda m: m.update(format=number))
    assert Artifact.open(folder).manifest.tiers == ()


def test_golden_values_are_no_part_of_the_build(folder: Path) -> None:
    """As those of an artifact that was refitted are its own. But they are checked like any file."""
    build = seal(folder, fields()).manifest.build
    (folder / "golden.safetensors").write_bytes(b"others")
    with pytest.raises(ArtifactError, match=r"golden\.safetensors"):
        Artifact.open(folder)
    resealed = seal(folder, fields(golden="itself", quality={"golden": {"rms": 0.5}}))
    assert (resealed.manifest.build, resealed.manifest.golden) == (build, "itself")
    (folder / "model.tflite").write_bytes(b"another")
    assert seal(folder, fields()).manifest.build != build
    rewrite(folder, lambda m: m.update(format=2))
    before = json.loads((folder / MANIFEST).read_text())["build"]
    rewrite(folder, lambda m: m["files"]["golden.safetensors"].update(sha256="0" * 64))
    assert json.loads((folder / MANIFEST).read_text())["build"] != before  # in that format they were


def test_an_edited_manifest_is_refused(folder: Path) -> None:
    seal(folder, fields())
    rewrite(folder, lambda m: m.update(context=1024), rehash=False)
    with pytest.raises(ArtifactError, match="altered"):
        read_manifest(folder)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda m: m.update(format=4), "format 4, this ssmd reads up to format 3"),
        (lambda m: m.update(name="../evil"), "name"),
        (lambda m: m.update(extra=1), "extra"),
        (lambda m: m.pop("lineage"), "lineage"),
        (lambda m: m.update(buckets=[64, 16]), "not ascending"),
        (lambda m: m.update(buckets=[]), "buckets"),
        (lambda m: m.update(buckets=[0]), "buckets"),
        (lambda m: m.update(context=None), "needs a context"),
        (lambda m: m.update(tiers=[512, 64]), "not ascending"),
        (lambda m: m.update(tiers=[64, 256]), "up to the context"),
        (lambda m: m.update(tiers=[0, 512]), "tiers"),
        (lambda m: m.update(stop_tokens=[300]), "outside the vocabulary"),
        (lambda m: m.update(stop_tokens=[-1]), "stop_tokens"),
        (lambda m: m.update(vocabulary=1.5), "vocabulary"),
        (lambda m: m["state"][0].update(shape=[-1, 3]), "not possible"),
        (lambda m: m["state"][0].update(kind="kv"), "of kind 'kv', which this version of ssmd does not know"),
        (lambda m: m["state"][0].update(name="ssm_0"), "repeat"),
        (lambda m: m["files"].update({"../x": {"sha256": "0" * 64, "size": 1}}), "not allowed"),
        (lambda m: m["files"].update({"/etc/passwd": {"sha256": "0" * 64, "size": 1}}), "not allowed"),
        (lambda m: m["files"].update({"a//b": {"sha256": "0" * 64, "size": 1}}), "not allowed"),
        (lambda m: m["files"].update({MANIFEST: {"sha256": "0" * 64, "size": 1}}), "cannot list itself"),
        (lambda m: m["files"].pop("golden.safetensors"), "required files"),
        (lambda m: m["files"]["model.tflite"].update(size=-1), "size"),
    ],
)
def test_a_manifest_that_lies_is_refused(folder: Path, change: Callable[[dict[str, Any]], object], says: str) -> None:
    seal(folder, fields())
    rewrite(folder, change)
    with pytest.raises(ArtifactError, match=says):
        Artifact.open(folder)
