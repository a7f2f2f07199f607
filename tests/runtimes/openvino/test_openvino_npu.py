"""The way to the NPU: what is built for it, what its compiler takes, and the first load in a process of its own.

Core ML and the NPU cannot execute here. What stands in for the device is OpenVINO's CPU plugin (npu_on_cpu.py).
"""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import npu_on_cpu
import numpy as np
import pytest
from flat_programs import altered, conversation
from safetensors.numpy import load_file, save_file

from ssmd.installed import ModelError, resolve
from ssmd.model.artifact import Artifact
from ssmd.runtime.protocol import RuntimeUnavailable
from ssmd.runtime.trial import probed
from ssmd_openvino import library, runtime
from ssmd_openvino.lint import lint, operations
from ssmd_openvino.runtime import WEIGHTS, OpenVINORuntime


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SSMD_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "openvino"


@pytest.fixture
def granite(artifacts: Mapping[str, Path]) -> Artifact:
    return Artifact.open(artifacts["npu-granite-f16"])


# what is built


def test_signatures_are_static_models_with_one_file_of_weights(granite: Artifact) -> None:
    core, manifest = library.openvino().Core(), granite.manifest
    assert (manifest.runtime, manifest.device_class, manifest.quantization) == ("openvino", "npu", "f16")
    names = ("decode", "prefill_16", "prefill_64")
    assert {n for n in manifest.files if n.endswith((".xml", ".bin"))} == {WEIGHTS, *(f"{n}.xml" for n in names)}
    models = {n: core.read_model(granite.file(f"{n}.xml"), granite.file(WEIGHTS)) for n in names}
    for name, model in models.items():
        assert lint(model) == []
        assert not model.is_dynamic()
        assert computing(manifest.conversion["operations"][name]) == computing(operations(model))
    assert manifest.conversion["npu_lint"] == "passed"
    # Three models: had each its own weights, the file would be three times as large.
    largest = max(constants(model) for model in models.values())
    assert granite.file(WEIGHTS).stat().st_size < 1.1 * largest


def computing(counts: Mapping[str, int]) -> dict[str, int]:
    """Constants of float16 are read as such and converted."""
    return {kind: n for kind, n in counts.items() if kind != "Convert"}


def constants(model: Any) -> int:
    return sum(op.get_byte_size() for op in model.get_ops() if op.get_type_name() == "Constant")


# what the compiler takes


def model_of(build: Callable[[Any], tuple[list[Any], list[Any]]]) -> Any:
    opset = import_module("openvino.opset13")
    inputs, outputs = build(opset)
    return library.openvino().Model(outputs, inputs, "m")


def cumulated(op: Any) -> tuple[list[Any], list[Any]]:
    x = op.parameter([1, 8], np.float32)
    return [x], [op.abs(x)]


def opened(op: Any) -> tuple[list[Any], list[Any]]:
    x = op.parameter([1, -1], np.float32)
    return [x], [op.abs(x)]


def strange(op: Any) -> tuple[list[Any], list[Any]]:
    x = op.parameter([1, 8], np.float32)
    return [x], [op.erf(x)]


def double(op: Any) -> tuple[list[Any], list[Any]]:
    x = op.parameter([1, 8], np.float64)
    return [x], [op.abs(x)]


def masked(op: Any) -> tuple[list[Any], list[Any]]:
    x = op.parameter([1, 8], np.float32)
    return [x], [op.multiply(x, op.constant(np.float32(-1e9)))]


def backwards(op: Any) -> tuple[list[Any], list[Any]]:
    x, y = op.parameter([1, 8], np.float32), op.parameter([1, 3], np.float32)
    first, last, axis = (op.constant(np.array([n], np.int64)) for n in (0, -3, 1))
    return [x, y], [op.slice(op.concat([y, x], 1), first, last, axis, axis)]


def one_row(op: Any) -> tuple[list[Any], list[Any]]:
    scores, value = op.parameter([2, 3, 9], np.float32), op.parameter([2, 1, 16], np.float32)
    first, last, step, axis = (op.constant(np.array([n], np.int64)) for n in (8, 9, 1, 2))
    return [scores, value], [op.matmul(op.slice(op.softmax(scores, 2), first, last, step, axis), value, False, False)]


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (cumulated, None),
        (opened, "its shape .* is not fixed"),
        (strange, "operation Erf"),
        (double, "element type f64"),
        (masked, "constant 1e.09 is beyond float16"),
        (backwards, "ends at a negative index"),
        (one_row, "one row of attention"),
    ],
)
def test_lint(build: Any, said: str | None) -> None:
    found = lint(model_of(build))
    if said is None:
        assert found == []
    else:
        assert any(re.search(said, line) for line in found), found


# the first load


def test_a_first_load_is_tried_in_a_process_of_its_own(
    granite: Artifact, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = conversation(OpenVINORuntime().load(granite, device="cpu", threads=1))
    npu_on_cpu.play(monkeypatch)
    first = OpenVINORuntime().load(granite)
    assert first.producer.startswith(f"openvino {library.package_version()}; openvino 2026.")
    [verdict] = cache.rglob("verdict.json")
    assert json.loads(verdict.read_text()) == {"passed": True, "why": ""}
    assert sorted(p.name for p in cache.rglob("*.blob")) == ["decode.blob", "prefill_16.blob", "prefill_64.blob"]
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("tried again"))
    monkeypatch.setattr("ssmd_openvino.compile.Compiler._compile", lambda *_: pytest.fail("compiled again"))
    second = OpenVINORuntime().load(granite)
    assert conversation(second) == conversation(first) == expected


def test_a_driver_that_crashes_does_not_take_the_daemon_along(
    granite: Artifact, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    npu_on_cpu.play(monkeypatch)
    crash = "import ctypes; ctypes.string_at(0)"
    monkeypatch.setattr(runtime, "TRIAL", (sys.executable, "-c", crash))
    with pytest.raises(RuntimeUnavailable, match=r"tried on npu and it crashed \(SIGSEGV\)"):
        OpenVINORuntime().load(granite)
    monkeypatch.setattr(runtime, "TRIAL", npu_on_cpu.COMMAND)  # the driver is the same: no second try
    with pytest.raises(RuntimeUnavailable, match=r"SIGSEGV.*remove .* to have it tried again"):
        OpenVINORuntime().load(granite)
    for file in cache.rglob("verdict.json"):
        file.unlink()
    assert OpenVINORuntime().load(granite)


def test_a_probe_that_crashes_under_way(
    granite: Artifact, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A driver may crash the probe of a blob without weights: the compiled model is then kept with its weights."""
    npu_on_cpu.play(monkeypatch)
    marker = f"npu_on_cpu.py\0weightless\0{granite.path}"

    def kill() -> None:
        for _ in range(2000):
            for entry in Path("/proc").glob("[0-9]*/cmdline"):
                try:
                    if marker in entry.read_text():
                        os.kill(int(entry.parent.name), signal.SIGSEGV)
                        return
                except (OSError, UnicodeDecodeError):
                    continue
            time.sleep(0.005)

    killer = threading.Thread(target=kill)
    killer.start()
    with caplog.at_level(logging.WARNING):
        assert OpenVINORuntime().load(granite)
    killer.join()
    assert re.search(r"first load on npu.*; 3 models, kept in .*-weightless, without their weights", caplog.text)
    assert re.search(r"tried on npu, weightless, and it crashed \(SIGSEGV\)", caplog.text)
    assert re.search(r"3 models, kept in .*, with all weights in each, .* or more", caplog.text)
    verdicts = {
        p.parent.name.partition("-")[2]: json.loads(p.read_text())["passed"] for p in cache.rglob("verdict.json")
    }
    assert verdicts == {"weightless": False, "": True}
    caplog.clear()
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("tried again"))
    assert OpenVINORuntime().load(granite)
    assert "first load" not in caplog.text


def test_a_blob_without_weights_takes_them_from_the_artifact(
    granite: Artifact, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Device and plugin decide which blobs get smaller; each import must be given the artifact's model."""
    npu_on_cpu.play(monkeypatch)
    given: list[dict[str, Any]] = []
    core = library.openvino().Core

    class Watched(core):  # type: ignore[misc, valid-type] # whose base comes at run time
        def import_model(self, blob: bytes, device: str, config: dict[str, Any]) -> Any:
            given.append(config)
            return super().import_model(blob, device, config)

        def compile_model(self, model: Any, device: str, config: dict[str, Any]) -> Any:
            given.append(config)
            return super().compile_model(model, device, config)

    monkeypatch.setattr(library.openvino(), "Core", Watched)
    for weightless in (True, False):
        OpenVINORuntime(probe=False, weightless=weightless).load(granite)
        OpenVINORuntime(probe=False, weightless=weightless).load(granite)
        compiled, imported = given[:3], given[3:]
        assert len(imported) == 3
        assert all(config.get("ENABLE_WEIGHTLESS", False) == weightless for config in compiled)
        assert all(("MODEL_PTR" in config) == weightless for config in imported)
        given.clear()
    assert {p.parent.name.partition("-")[2] for p in cache.rglob("*.blob")} == {"weightless", ""}


def test_wrong_values_are_a_verdict(granite: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    npu_on_cpu.play(monkeypatch)
    other = altered(granite, tmp_path / "other")
    golden = load_file(other.file("golden.safetensors"))
    golden["logits"] = np.ascontiguousarray(golden["logits"][:, ::-1])
    save_file(golden, other.file("golden.safetensors"))
    with pytest.raises(RuntimeUnavailable, match=r"tried on npu and its logits are .* standard deviations off"):
        OpenVINORuntime().load(altered(granite, tmp_path / "other"))


@pytest.mark.parametrize("content", ["", "{", "[]", '{"passed": 1, "why": ""}', '{"passed": true}'])
def test_a_damaged_verdict_is_found_out_again(tmp_path: Path, content: str) -> None:
    (tmp_path / "verdict.json").write_text(content)
    said = json.dumps({"passed": True, "why": ""})
    command = (sys.executable, "-c", f"print('noise'); print({said!r})")
    artifact: Any = type("A", (), {"path": tmp_path})()
    assert probed(command, artifact, "npu", tmp_path).passed
    assert (tmp_path / "verdict.json").read_text() == said


# what a user without one sees


def test_an_artifact_for_the_npu_where_there_is_none(granite: Artifact, artifacts: Mapping[str, Path]) -> None:
    with pytest.raises(RuntimeUnavailable, match="cannot use device 'npu': "):
        OpenVINORuntime().load(granite)
    models = granite.path.parent.parent
    with pytest.raises(ModelError, match=r"openvino-npu-f16: npu: no Intel NPU here .*Core Ultra"):
        resolve("granite", models, "npu")
    with pytest.raises(ModelError, match=r"what works here: .*--device cpu"):
        resolve("granite", models, "npu")
    assert resolve("granite", models, "npu", device="cpu").name == "openvino-npu-f16"


def test_no_artifact_for_the_npu(artifacts: Mapping[str, Path], tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "litert-cpu-f32").symlink_to(artifacts["llama-f32"])
    with pytest.raises(
        ModelError,
        match=r"build one with: ssmd build CHECKPOINT --runtime npu.*no Intel NPU here.*works here: --runtime litert$",
    ):
        resolve("m", tmp_path, "npu")
