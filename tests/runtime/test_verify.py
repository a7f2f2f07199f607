"""Replay of golden values: a good program passes, another one does not, and malformed files are named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from noted import note_all
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

from ssmd.cli import app
from ssmd.model.artifact import GOLDEN, MANIFEST, Artifact, ArtifactError, seal
from ssmd.runtime.protocol import get_runtime
from ssmd.runtime.verify import Report, StepError, tolerance_of, verify


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSMD_CACHE_DIR", str(tmp_path / "cache"))


def load(artifact: Artifact) -> Any:
    return get_runtime(artifact.manifest.runtime).load(artifact)


def altered(source: Path, folder: Path, change: Callable[[dict[str, NDArray[Any]]], object], **fields: Any) -> Artifact:
    """A copy with other golden values, or a manifest that says something else, sealed again."""
    shutil.copytree(source, folder)
    tensors = load_file(folder / GOLDEN)
    change(tensors)
    save_file({n: np.ascontiguousarray(a) for n, a in tensors.items()}, folder / GOLDEN)
    manifest = json.loads((folder / MANIFEST).read_text()) | fields
    (folder / MANIFEST).unlink()
    return seal(folder, {k: v for k, v in manifest.items() if k not in ("format", "files", "build")})


@pytest.mark.parametrize(
    ("name", "worst"), [("llama-f32", 1e-5), ("granite-f32", 1e-5), ("llama-int8", 0.06), ("granite-int8", 0.03)]
)
def test_a_good_artifact_passes(artifacts: Mapping[str, Path], name: str, worst: float) -> None:
    artifact = Artifact.open(artifacts[name])
    report = verify(artifact, load(artifact))
    golden = load_file(artifact.file(GOLDEN))
    assert [s.position for s in report.steps] == golden["positions"].tolist()
    assert {s.call for s in report.steps} == {"prefill", "decode"}
    assert report.passed
    assert 0 < report.worst.rms_relative <= worst
    assert report.worst.rms_error <= report.worst.max_error
    assert report.worst == max(report.steps, key=lambda s: s.rms_relative)


def test_another_models_logits_do_not_pass(artifacts: Mapping[str, Path], tmp_path: Path) -> None:
    def shuffle(tensors: dict[str, NDArray[Any]]) -> None:
        tensors["logits"] = np.random.default_rng(0).permuted(tensors["logits"], axis=1)

    for name in ("llama-f32", "llama-int8"):
        artifact = altered(artifacts[name], tmp_path / name, shuffle)
        report = verify(artifact, load(artifact))
        assert not report.passed
        assert report.worst.rms_relative > 1


def test_one_wrong_token_in_float32_does_not_pass(artifacts: Mapping[str, Path], tmp_path: Path) -> None:
    def change(tensors: dict[str, NDArray[Any]]) -> None:
        tensors["tokens"][20] ^= 1

    artifact = altered(artifacts["granite-f32"], tmp_path / "copy", change)
    report = verify(artifact, load(artifact))
    assert not report.passed
    assert all((s.rms_relative > 1e-4) == (s.position >= 20) for s in report.steps)


def test_a_shift_of_all_logits_is_reported_and_not_judged(artifacts: Mapping[str, Path], tmp_path: Path) -> None:
    def change(tensors: dict[str, NDArray[Any]]) -> None:
        tensors["logits"] += 3

    artifact = altered(artifacts["llama-f32"], tmp_path / "copy", change)
    report = verify(artifact, load(artifact))
    assert report.passed
    assert all(abs(s.shift + 3) < 1e-4 for s in report.steps)


def test_not_a_number_does_not_pass() -> None:
    good = StepError(0, "prefill", 0.0, 0.0, 0.0, 0.0, 0.0)
    bad = StepError(1, "decode", *[float("nan")] * 5)
    for steps in ((good, bad), (bad, good)):
        report = Report(steps, 0.1)
        assert report.worst is bad
        assert not report.passed


def test_the_handle_is_released(artifacts: Mapping[str, Path]) -> None:
    artifact = Artifact.open(artifacts["llama-f32"])
    program = load(artifact)
    for _ in range(20):
        verify(artifact, program)
    assert len(program._slots) == 0


def _cut(name: str, stop: int) -> Callable[[dict[str, NDArray[Any]]], object]:
    return lambda t: t.update({name: t[name][:stop]})


LIES: dict[str, tuple[Callable[[dict[str, NDArray[Any]]], object], str]] = {
    "a tensor less": (lambda t: t.pop("tokens"), "expected tokens"),
    "no tokens": (_cut("tokens", 0), "tokens is"),
    "fewer logits": (_cut("logits", 2), "logits"),
    "another dtype": (lambda t: t.update(tokens=t["tokens"].astype(np.int64)), "tokens is int64"),
    "another vocabulary": (lambda t: t.update(logits=t["logits"][:, :-1]), "logits"),
    "not finite": (lambda t: t["logits"].__setitem__((0, 0), np.nan), "not finite"),
    "ids too large": (lambda t: t["tokens"].__setitem__(0, 10**6), "vocabulary"),
    "negative ids": (lambda t: t["tokens"].__setitem__(0, -1), "vocabulary"),
    "positions beyond": (lambda t: t["positions"].__setitem__(-1, 10**6), "ascend"),
    "positions twice": (lambda t: t["positions"].__setitem__(1, t["positions"][0]), "ascend"),
}


@pytest.mark.parametrize(("change", "message"), LIES.values(), ids=LIES.keys())
def test_malformed_golden_values_are_named(
    artifacts: Mapping[str, Path], tmp_path: Path, change: Callable[[dict[str, NDArray[Any]]], object], message: str
) -> None:
    artifact = altered(artifacts["llama-f32"], tmp_path / "copy", change)
    with pytest.raises(ArtifactError, match=message):
        verify(artifact, load(artifact))


def test_a_file_that_is_no_safetensors(artifacts: Mapping[str, Path], tmp_path: Path) -> None:
    artifact = altered(artifacts["llama-f32"], tmp_path / "copy", lambda t: None)
    for content in (b"", b"{}", b"\xff" * 100):
        artifact.file(GOLDEN).write_bytes(content)
        with pytest.raises(ArtifactError, match="not a safetensors file"):
            verify(artifact, load(artifact))


def test_tolerances_by_scheme() -> None:
    assert tolerance_of("int8-smooth") == tolerance_of("int8") > tolerance_of("f32")
    with pytest.raises(ArtifactError, match="'q7'"):
        tolerance_of("q7")


def test_piecewise_linear_functions_have_their_own_allowance() -> None:
    added = [tolerance_of("f32", segments) - tolerance_of("f32") for segments in (8, 16, 32, 64)]
    assert added == pytest.approx([0.5, 0.156, 0.039, 0.0098], rel=0.01)
    assert tolerance_of("int8", 64) - tolerance_of("int8") == pytest.approx(added[3])


ACTIBA = {"xamba": {"passes": {"cumba": False, "reduba": False, "actiba": 64}}}


@pytest.mark.parametrize(
    ("quantization", "conversion", "rms", "said"),
    [
        ("int8", {}, 0.0, "does not compute what its model does here; build it again"),
        ("int8", {}, 0.49, "its quantization loses that much of the model, 0.49 when it was built"),
        ("f32", {}, 0.49, "does not compute what its model does here; build it again"),
        ("f32", ACTIBA, 0.49, "ActiBA with 64 segments loses that much of the model, 0.49 when it was built"),
        ("int8", ACTIBA, 0.49, "its quantization and ActiBA with 64 segments lose that much of the model, 0.49"),
        ("f32", ACTIBA, 0.005, "does not compute what its model does here; build it again"),  # that much is allowed
        ("f32", {"xamba": [64]}, 0.49, "does not compute what its model does here; build it again"),
    ],
)
def test_a_failure_says_what_it_is_owed_to(
    artifacts: Mapping[str, Path],
    tmp_path: Path,
    quantization: str,
    conversion: dict[str, Any],
    rms: float,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def change(tensors: dict[str, NDArray[Any]]) -> None:
        tensors["logits"] = tensors["logits"][:, ::-1]

    fields = {"quantization": quantization, "conversion": conversion, "quality": {"golden": {"rms": rms, "max": 2.0}}}
    altered(artifacts["llama-f32"], tmp_path / "a", change, **fields)
    monkeypatch.setenv("SSMD_DATA_DIR", str(tmp_path / "data"))
    note_all([str(tmp_path / "a")], tmp_path / "data")
    done = CliRunner().invoke(app, ["verify", str(tmp_path / "a")])
    assert done.exit_code == 1
    assert said in done.output
