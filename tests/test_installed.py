"""Installed models: which can be served, and which one a name means."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from ssmd.installed import ModelError, installed, resolve
from ssmd.machine import installation
from ssmd.model.artifact import MANIFEST, ArtifactError, build_hash, seal
from ssmd.model.checked import CheckedArtifacts
from ssmd.runtime.protocol import RuntimeUnavailable, get_runtime


def put(models_dir: Path, name: str, folder: str, nbytes: int = 50, **changed: Any) -> Path:
    path = models_dir / name / folder
    path.mkdir(parents=True)
    (path / "tokenizer.json").write_text("{}")
    (path / "golden.safetensors").write_text("golden")
    (path / "model.bin").write_bytes(os.urandom(nbytes))
    runtime, device_class, quantization = folder.split("-")
    fields = {
        "name": name,
        "family": "llama",
        "lineage": "a" * 64,
        "runtime": runtime,
        "device_class": device_class,
        "quantization": quantization,
        "quantization_recipe": {},
        "buckets": [16],
        "context": 512,
        "vocabulary": 300,
        "special_tokens": {},
        "stop_tokens": [2],
        "state": [{"name": "key_0", "kind": "key", "layer": 0, "shape": [2, 16], "dtype": "float32"}],
        "builders": {},
        **changed,
    }
    seal(path, fields)
    return path


def test_a_model_that_a_graph_is_shipped_of(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"'lfm2-350m' here; get it with: ssmd pull lfm2-350m$"):
        resolve("lfm2-350m", tmp_path)


def test_nothing_installed_says_what_to_do(tmp_path: Path) -> None:
    assert installed(tmp_path / "none") == []
    for wanted in (None, "smollm2"):
        with pytest.raises(ModelError, match="ssmd pull smollm2"):
            resolve(wanted, tmp_path / "none")


def test_the_only_model_needs_no_name(tmp_path: Path) -> None:
    path = put(tmp_path, "one", "litert-cpu-int8")
    assert resolve(None, tmp_path) == resolve("one", tmp_path) == path
    put(tmp_path, "two", "litert-cpu-int8")
    with pytest.raises(ModelError, match="one, two"):
        resolve(None, tmp_path)


def test_auto_takes_the_lightest_that_runs_here(tmp_path: Path) -> None:
    put(tmp_path, "m", "litert-cpu-f32", 4000)
    light = put(tmp_path, "m", "litert-cpu-int8", 1000)
    put(tmp_path, "m", "elsewhere-cpu-int8", 10)  # the lightest of all, but nothing runs it
    assert resolve("m", tmp_path) == light
    with pytest.raises(ModelError, match="no runtime is named 'elsewhere'"):
        resolve("m", tmp_path, "elsewhere")
    with pytest.raises(ModelError, match="it has: elsewhere, litert"):
        resolve("m", tmp_path, "openvino")


def test_a_runtime_that_cannot_run_here_is_reported_first(tmp_path: Path) -> None:
    for model in (None, "m"):
        with pytest.raises(ModelError, match=r"runtime coreml: Core ML cannot execute here.*Mac with macOS 15"):
            resolve(model, tmp_path, "coreml")


@pytest.mark.parametrize("broken", [False, True])
def test_auto_takes_litert_of_two_that_weigh_nearly_the_same(tmp_path: Path, broken: bool) -> None:
    """Beside one that cannot be read, too, of which no size is known."""
    if broken:
        (tmp_path / "m" / "litert-cpu-int4").mkdir(parents=True)
    openvino = put(tmp_path, "m", "openvino-cpu-int8", 9000)
    litert = put(tmp_path, "m", "litert-cpu-int8", 10000)
    put(tmp_path, "m", "openvino-npu-f16", 100)  # for a device of its own: not before those for the processor
    assert resolve("m", tmp_path) == litert
    assert resolve("m", tmp_path, "openvino") == openvino
    (tmp_path / "m" / "litert-cpu-int8").rename(tmp_path / "elsewhere")
    put(tmp_path, "m", "litert-cpu-f32", 40000)
    assert resolve("m", tmp_path) == openvino


def test_a_path_is_an_artifact_or_a_models_folder(tmp_path: Path) -> None:
    path = put(tmp_path, "m", "litert-cpu-int8")
    assert resolve(str(path), tmp_path / "elsewhere") == path
    assert resolve(str(path.parent), tmp_path / "elsewhere") == path
    with pytest.raises(ModelError, match="there is no folder"):
        resolve(str(tmp_path / "x"), tmp_path)


@pytest.mark.parametrize("path", ["..", "../n", "m/../../nothing", "/", "~nobody-of-this-name/x"])
def test_a_path_without_an_artifact_is_refused(tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path / "models", "m", "litert-cpu-int8")
    monkeypatch.chdir(tmp_path / "models" / "m")
    with pytest.raises(ModelError):
        resolve(path, tmp_path / "models")


def test_broken_ones_are_listed_with_the_reason(tmp_path: Path) -> None:
    cut = put(tmp_path, "cut", "litert-cpu-int8")
    (cut / "model.bin").write_bytes(b"x")
    gone = put(tmp_path, "gone", "litert-cpu-int8")
    (gone / "model.bin").unlink()
    edited = put(tmp_path, "edited", "litert-cpu-int8")
    (edited / MANIFEST).write_text((edited / MANIFEST).read_text().replace("512", "513"))
    (tmp_path / "empty" / "litert-cpu-int8").mkdir(parents=True)
    (tmp_path / ".building" / "litert-cpu-int8").mkdir(parents=True)  # not ready yet, so not there
    problems = {one.name: one.problem for one in installed(tmp_path)}
    assert set(problems) == {"cut", "gone", "edited", "empty"}
    assert "has 1 bytes, not 50" in problems["cut"]
    assert "is missing" in problems["gone"]
    assert "was altered" in problems["edited"]
    assert "it has no artifact.json" in problems["empty"]
    with pytest.raises(ModelError, match="has 1 bytes"):
        resolve("cut", tmp_path)


def test_a_broken_artifact_does_not_hide_a_good_one(tmp_path: Path) -> None:
    broken = put(tmp_path, "m", "litert-cpu-int8")
    (broken / "model.bin").unlink()
    good = put(tmp_path, "m", "litert-cpu-f32")
    assert resolve("m", tmp_path) == good


@pytest.mark.parametrize(("name", "asks"), [("litert", "interface"), ("openvino", "library"), ("wgpu", "library")])
def test_a_runtime_that_is_not_installed_says_how(name: str, asks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(package: str) -> str:
        raise PackageNotFoundError(package)

    monkeypatch.setattr(import_module(f"ssmd_{name}.{asks}"), "version", absent)
    monkeypatch.setattr(sys, "prefix", str(installation.ROOT / ".venv"))
    with pytest.raises(RuntimeUnavailable, match=rf"not installed .*; install it with: scripts/setup {name}$"):
        get_runtime(name)


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="modes are those of Unix")
@pytest.mark.parametrize("inner", ["", "m", "m/litert-cpu-int8"])
def test_a_folder_that_others_may_write_is_refused(tmp_path: Path, inner: str) -> None:
    """They could put another model, with another template, in the place of this one."""
    put(tmp_path, "m", "litert-cpu-int8")
    open_ = tmp_path / inner
    open_.chmod(0o777)
    with pytest.raises(ModelError, match=f"chmod -R go-w {open_}"):
        resolve("m", tmp_path)
    with pytest.raises(ModelError, match="can be written by every user"):
        installed(tmp_path)
    open_.chmod(0o775)  # of one's own group, as many systems make folders
    assert [i.name for i in installed(tmp_path)] == ["m"]


def test_a_name_that_is_nearly_right(tmp_path: Path) -> None:
    put(tmp_path, "mine", "litert-cpu-int8")
    for wrong, said in (
        ("mlne", f"did you mean mine? installed in {tmp_path}: mine$"),
        ("smolm2", "did you mean smollm2? get it with: ssmd pull smollm2$"),
        ("SmolLM2", "did you mean smollm2? get it with: ssmd pull smollm2$"),
        ("quite-another", f"here; installed in {tmp_path}: mine; ssmd pull gets: granite-4.0-h-micro, "),
        ("x" * 100_000, "here; installed in"),
    ):
        with pytest.raises(ModelError, match=said.replace("?", r"\?")):
            resolve(wrong, tmp_path)
    put(tmp_path, "smollm2", "litert-cpu-int8")
    with pytest.raises(ModelError, match=r"did you mean smollm2\? installed in"):
        resolve("smolm2", tmp_path)


def test_a_runtime_that_a_graph_is_shipped_for(tmp_path: Path) -> None:
    for name in ("smollm2", "mine"):
        put(tmp_path, name, "litert-cpu-int8")
    with pytest.raises(ModelError, match=r"it has: litert; get one with: ssmd pull smollm2 --runtime openvino$"):
        resolve("smollm2", tmp_path, "openvino")
    with pytest.raises(ModelError, match=r"it has: litert$"):
        resolve("mine", tmp_path, "openvino")


def forge(artifact: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a manifest, and write the hash that is right then."""
    whole = json.loads((artifact / MANIFEST).read_text())
    change(whole)
    whole["build"] = build_hash(whole)
    (artifact / MANIFEST).write_text(json.dumps(whole))


INFINITE = float("inf")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m: m["state"][0].update(layer=INFINITE), "'state' has the number inf"),
        (lambda m: m["state"][0].update(shape=[2, INFINITE]), "'state' has the number inf"),
        (lambda m: m.update(quality={"golden": {"rms": float("nan")}}), "'quality' has the number nan"),
        (
            lambda m: m.update(conversion={"a": [{"b": -(10**400)}]}),
            "'conversion' has an integer beyond 9007199254740992",
        ),
        (lambda m: m["files"]["model.bin"].update(size=10**400), "'files' has an integer beyond"),
        (lambda m: m["state"][0].update(layer=1e300), "'key_0' has more than 2147483647 values or layers"),
        (lambda m: m.update(context=1 << 40), "context, vocabulary, buckets or tiers are more than 2147483647"),
        (lambda m: m.update(buckets=[16, 1 << 31]), "context, vocabulary, buckets or tiers are more than 2147483647"),
        (lambda m: m["state"][0].update(shape=[1 << 32, 1 << 32]), "'key_0' has more than 2147483647 values"),
        (lambda m: m.update(state=m["state"] * 4097), "state has 4097 tensors, at most 4096 are read"),
        (lambda m: m.update(special_tokens={"bos": "\ud800"}), "'special_tokens' has half a character"),
        (lambda m: m.update({"\x1b[2J": 1}), r"\x1b[2J: Extra inputs are not permitted"),
        (lambda m: m.update(format="4" * 1_000_000), "…"),
    ],
)
def test_an_odd_manifest_is_a_problem_of_its_model_alone(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], said: str
) -> None:
    """Code that lists all models, or counts their memory, must not fail on it."""
    put(tmp_path, "good", "litert-cpu-int8")
    forge(put(tmp_path, "odd", "litert-cpu-int8"), change)
    good, odd = installed(tmp_path)
    assert (good.problem, good.nbytes) == ("", 58)
    assert said in odd.problem
    assert odd.problem.isprintable()
    assert len(odd.problem) < 1000
    assert odd.nbytes == 0
    with pytest.raises(ArtifactError):
        CheckedArtifacts().open(odd.path)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux is asked for holes")
def test_a_file_that_is_a_hole_is_not_hashed(tmp_path: Path) -> None:
    path = put(tmp_path, "hole", "litert-cpu-int8")
    os.truncate(path / "model.bin", 1 << 40)
    forge(path, lambda m: m["files"]["model.bin"].update(size=1 << 40))
    [one] = installed(tmp_path)
    assert "file 'model.bin' is almost all a hole: " in one.problem
    with pytest.raises(ModelError, match="almost all a hole"):
        resolve("hole", tmp_path)
