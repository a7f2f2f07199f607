"""A file is hashed once, also across processes, unless it was written to since."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import TinyArtifacts

from ssmd.model import checked
from ssmd.model.artifact import MANIFEST, Artifact, ArtifactError
from ssmd.model.checked import CheckedArtifacts


@pytest.fixture
def artifact(artifacts: TinyArtifacts, tmp_path: Path) -> Path:
    return Path(shutil.copytree(artifacts["llama-f32"], tmp_path / "artifact"))


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The artifacts whose files were hashed."""
    found: list[Path] = []
    opening = Artifact.open

    def noted(path: Path) -> Artifact:
        found.append(path)
        return opening(path)

    monkeypatch.setattr(Artifact, "open", noted)
    return found


def test_files_are_hashed_once(artifact: Path, tmp_path: Path, hashed: list[Path]) -> None:
    one = CheckedArtifacts(tmp_path)
    assert one.open(artifact).manifest == one.open(artifact).manifest
    assert hashed == [artifact]
    assert CheckedArtifacts(tmp_path).open(artifact).path == artifact
    assert hashed == [artifact], "as another process knows"
    assert (tmp_path / checked.FILE).stat().st_mode & 0o777 == 0o600
    CheckedArtifacts(None).open(artifact)
    assert hashed == [artifact] * 2


def model_file(artifact: Path) -> Path:
    return next(artifact.glob("*.tflite"))


def turned(file: Path) -> None:
    """A bit turned, and the times of the file as they were, as far as a user can set them."""
    at = file.stat()
    with file.open("r+b") as data:
        byte = data.read(1)
        data.seek(0)
        data.write(bytes([byte[0] ^ 1]))
    os.utime(file, ns=(at.st_atime_ns, at.st_mtime_ns))


def swapped(file: Path) -> None:
    other = file.with_name("other")
    shutil.copy2(file, other)
    turned(other)
    other.replace(file)


@pytest.mark.parametrize("write", [turned, swapped])
@pytest.mark.parametrize("again", [False, True])
def test_what_was_written_to_is_hashed_again(
    artifact: Path, tmp_path: Path, hashed: list[Path], write: Callable[[Path], None], again: bool
) -> None:
    one = CheckedArtifacts(tmp_path)
    one.open(artifact)
    write(model_file(artifact))
    for _ in range(2):
        with pytest.raises(ArtifactError, match="sha256 differs"):
            (CheckedArtifacts(tmp_path) if again else one).open(artifact)
    assert hashed == [artifact] * 3


def test_another_folder_is_another_artifact(artifact: Path, tmp_path: Path, hashed: list[Path]) -> None:
    CheckedArtifacts(tmp_path).open(artifact)
    copy = Path(shutil.copytree(artifact, tmp_path / "copy"))
    CheckedArtifacts(tmp_path).open(copy)
    assert hashed == [artifact, copy]
    (copy / MANIFEST).write_text((copy / MANIFEST).read_text() + " ")
    CheckedArtifacts(tmp_path).open(copy)
    assert hashed == [artifact, copy, copy]


def test_a_list_that_others_can_write_is_not_believed(artifact: Path, tmp_path: Path, hashed: list[Path]) -> None:
    CheckedArtifacts(tmp_path).open(artifact)
    (tmp_path / checked.FILE).chmod(0o666)
    CheckedArtifacts(tmp_path).open(artifact)
    assert hashed == [artifact] * 2


@pytest.mark.parametrize("missing", ["file", "folder"])
def test_a_file_that_is_missing_is_named(artifact: Path, tmp_path: Path, missing: str) -> None:
    one = CheckedArtifacts(tmp_path / "nowhere")
    one.open(artifact)
    if missing == "file":
        model_file(artifact).unlink()
    else:
        shutil.rmtree(artifact)
    with pytest.raises(ArtifactError, match=r"is missing|is no artifact"):
        one.open(artifact)
