"""`ssmd doctor npu`: what it tells where there is no NPU, and its whole way on OpenVINO's CPU device.

Core ML and the NPU cannot execute here.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import commands
import npu_on_cpu
import numpy as np
import pytest
from conftest import TinyArtifacts
from flat_programs import altered
from safetensors.numpy import load_file, save_file

from ssmd.model.artifact import GOLDEN, Artifact, ArtifactError
from ssmd_openvino import doctor, library
from ssmd_openvino.runtime import WEIGHTS, OpenVINORuntime


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SSMD_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def granite(artifacts: TinyArtifacts) -> Artifact:
    return Artifact.open(artifacts["npu-granite-f16"])


@pytest.fixture
def models(granite: Artifact, artifacts: TinyArtifacts, tmp_path: Path) -> Path:
    """A folder of models with one for the NPU and one for the processor."""
    folder = tmp_path / "models"
    for path in (granite.path, artifacts["openvino-granite-f32"]):
        (folder / "granite" / path.name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "granite" / path.name).symlink_to(path)
    return folder


def asked(models: Path, *arguments: str) -> tuple[int, str, dict[str, Any]]:
    report = models.parent / "report.json"
    places = ("--models-dir", str(models), "--report", str(report))
    done = commands.ssmd("doctor", "npu", *places, *arguments, env=os.environ)
    assert f"written to {report}" in done.stderr
    return done.returncode, done.stdout, json.loads(report.read_text())


def test_without_an_npu_it_says_why(models: Path) -> None:
    code, said, report = asked(models)
    assert code == 1
    assert said.startswith("Core ML and the NPU cannot execute here: no Intel NPU here (there is no /dev/accel/accel*)")
    [found] = report["artifacts"]
    assert (found["built_for"], "ways" in found, report["ok"]) == ("npu", False, False)


def test_without_an_artifact_it_says_so_too(tmp_path: Path) -> None:
    code, said, report = asked(tmp_path / "none")
    assert (code, report["artifacts"]) == (1, [])
    assert "the NPU cannot execute here" in said


def test_on_the_processor_by_its_name(models: Path, granite: Artifact, cache: Path) -> None:
    code, said, report = asked(models, "--device", "cpu")
    assert code == 0, said
    assert "what follows is measured on cpu, not on an NPU" in said
    assert report["openvino"] == library.package_version()
    assert report["devices"]["cpu"]["FULL_DEVICE_NAME"]
    [found] = report["artifacts"]
    assert (found["build"], found["built_for"], found["device"]) == (granite.manifest.build, "npu", "cpu")
    assert set(found["ways"]) == {"whole"}
    assert set(found["ways"]["whole"]["models"]) == {"decode", "prefill_16", "prefill_64"}
    for seen in found["ways"]["whole"]["models"].values():
        assert seen["compile_s"] > 0
        assert granite.file(WEIGHTS).stat().st_size < seen["blob_bytes"] < 10 * granite.file(WEIGHTS).stat().st_size
        assert seen["peak_bytes"] > 1 << 20
    executed = found["ways"]["whole"]["executed"]
    assert executed["passed"]
    assert len(executed["steps"]) == 5
    assert set(executed["prefill_ms"]) == {"16", "64"}
    assert "cpu: golden values passed (worst step" in said
    assert not list(cache.rglob("*.blob"))  # of the processor's nothing is kept


def test_what_fails_is_told_and_the_rest_goes_on(
    granite: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compiler that is killed at one model, a driver whose own words come last, golden values that are not met."""
    other = altered(granite, tmp_path / "other")
    golden = load_file(other.file(GOLDEN))
    save_file({**golden, "logits": np.ascontiguousarray(golden["logits"][:, ::-1])}, other.file(GOLDEN))
    kill = f"import os, sys\nif sys.argv[-1] == 'decode.xml': os.kill(os.getpid(), {int(signal.SIGKILL)})\n"
    run = "from ssmd_openvino.doctor import main; main()\nif 'prefill_64.xml' in sys.argv: print('[1] freed')"
    monkeypatch.setattr(doctor, "COMMAND", (sys.executable, "-c", kill + run))
    lines: list[str] = []
    report = doctor.look([altered(granite, tmp_path / "other")], lines.append, "cpu")
    [found] = report["artifacts"]
    seen = found["ways"]["whole"]
    assert "SIGKILL" in seen["models"]["decode"]["problem"]
    assert seen["models"]["prefill_16"]["compile_s"] > 0
    assert seen["models"]["prefill_64"] == {"problem": "it printed '[1] freed' instead of a result"}
    assert not seen["executed"]["passed"]
    assert "cpu: golden values FAILED (worst step " in lines[-1]
    assert not report["ok"]
    assert any(line.startswith("  decode: ") and "SIGKILL" in line for line in lines)


def test_an_artifact_without_weights_does_not_end_the_look(
    granite: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    altered(granite, tmp_path / "bare").file(WEIGHTS).unlink()
    bare = altered(granite, tmp_path / "bare")
    report = doctor.look([bare], lambda line: None, "cpu")
    seen = report["artifacts"][0]["ways"]["whole"]
    assert all("has no file 'model.bin'" in one["problem"] for one in (*seen["models"].values(), seen["executed"]))
    npu_on_cpu.play(monkeypatch)
    with pytest.raises(ArtifactError, match=r"has no file 'model\.bin'"):
        OpenVINORuntime().load(bare)


def test_where_there_is_an_npu_each_way_is_measured(
    granite: Artifact, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is played by OpenVINO's CPU plugin."""
    play = "import sys; sys.path.insert(0, sys.argv.pop(1)); import npu_on_cpu as npu; npu.play(npu._Patch);"
    tests = str(Path(npu_on_cpu.__file__).parent)
    run = "from ssmd_openvino.doctor import main; main()"
    monkeypatch.setattr(doctor, "COMMAND", (sys.executable, "-c", play + run, tests))
    npu_on_cpu.play(monkeypatch)
    lines: list[str] = []
    report = doctor.look([granite], lines.append)
    assert report["ok"], report
    assert "never executed on one by those who made ssmd" in lines[1]
    [found] = report["artifacts"]
    assert found["device"] == "npu"
    assert list(found["ways"]) == ["weightless", "whole"]
    assert all(seen["executed"]["passed"] for seen in found["ways"].values())
    assert len(list(cache.rglob("*.blob"))) == 6  # which the first load takes from there
