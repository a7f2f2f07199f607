"""One GGUF file of a hub's model: `ssmd pull NAME --from owner/name:FILE`."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import commands
import mirror
import pytest
from conftest import TinyArtifacts
from gguffiles import write_gguf
from mirror import Mirror
from test_server import environment

from ssmd.model.artifact import Artifact

NAME, FILE = "acme/tiny-GGUF", "tiny.Q8_0.gguf"


@pytest.fixture(scope="module")
def files(artifacts: TinyArtifacts, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    written = write_gguf(artifacts.source("llama-f32"), tmp_path_factory.mktemp("gguf") / "a.gguf", "Q8_0")
    return {FILE: written.read_bytes(), "other.gguf": b"GGUF", "README.md": b"# tiny"}


@pytest.fixture
def hub(files: dict[str, bytes]) -> Iterator[Mirror]:
    with mirror.running(NAME, files) as running:
        running.lfs = (*running.lfs, ".gguf")
        yield running


def run(home: Path, hub: Mirror | None, *words: str) -> subprocess.CompletedProcess[str]:
    """Run ssmd with that hub; a download that breaks off is not tried again."""
    env = {k: v for k, v in environment(home).items() if not k.startswith("HF_") and not k.lower().endswith("_proxy")}
    env |= {"HF_HOME": str(home / "hf"), "HF_HUB_DOWNLOAD_TIMEOUT": "20"}
    env |= {} if hub is None else {"HF_ENDPOINT": hub.url}
    return commands.ssmd(*words, env=env, before="from ssmd.hub import download; download.WAITS_S = ()")


def pull(home: Path, hub: Mirror | None, file: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Pull it for wgpu, which takes any config."""
    return run(home, hub, "pull", "mine", "--from", f"{NAME}:{file}", "--runtime", "wgpu", *arguments)


def test_a_file_is_pulled_resumed_and_removed_or_kept(hub: Mirror, tmp_path: Path) -> None:
    """Nothing else of the model is fetched. The file is removed after that, or kept for later and offline pulls."""
    hub.breaks[FILE] = [100_000]
    done = pull(tmp_path, hub, FILE)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
    assert f"100000 of {len(hub.files[FILE])} bytes are kept, and the same command goes on from there" in done.stderr
    done = pull(tmp_path, hub, FILE)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert f"{FILE} of {NAME} main is {hub.commit}: " in done.stdout
    assert "the weights are Q8_0, F32 in the file and int8 here: this adds an error of " in done.stdout
    [folder] = tmp_path.glob("**/mine/wgpu-gpu-int8")
    made = Artifact.open(folder)
    assert hub.sent[FILE] < len(hub.files[FILE]) + 100_000
    assert "the source, " in done.stdout
    assert not list(tmp_path.rglob("*.gguf"))
    assert {a.path.rpartition("/")[2] for a in hub.asked if "/resolve/" in a.path} == {FILE}
    sent = dict(hub.sent)
    done = pull(tmp_path, hub, FILE)
    assert (done.returncode, hub.sent) == (0, sent)
    assert f"{FILE} of {NAME} main is {hub.commit}: not fetched, as the model is here" in done.stdout
    assert "is here already; --force makes it again" in pull(tmp_path, None, FILE, "--offline").stdout
    assert pull(tmp_path, hub, FILE, "--force", "--keep-source").returncode == 0
    done = pull(tmp_path, None, FILE, "--force", "--offline")
    assert (done.returncode, len(list(tmp_path.rglob("*.gguf")))) == (0, 1)
    assert Artifact.open(folder).manifest.build == made.manifest.build
    done = pull(tmp_path, None, "other.gguf", "--offline", "--force")
    assert "other.gguf of acme/tiny-GGUF at 'main' is not here and --offline" in done.stderr


def test_a_file_that_is_not_there_is_refused_by_name(hub: Mirror, tmp_path: Path) -> None:
    assert (
        f"has no file gone.gguf at main; its GGUF files: other.gguf, {FILE}\n"
        in pull(tmp_path, hub, "gone.gguf").stderr
    )
    for name in ("../tiny.gguf", "README.md"):
        done = pull(tmp_path, hub, name)
        assert (done.returncode, done.stderr.count("\n")) == (1, 1)
        assert f"'{name}' is not a file's name for {NAME}: expected one as NAME.gguf, without folders" in done.stderr
    done = run(tmp_path, hub, "pull", f"{NAME}:{FILE}", "--to", str(tmp_path / "to"))
    assert (done.returncode, "--to fetches a whole checkpoint, not one file of it" in done.stderr) == (2, True)
    assert not hub.sent
    assert not list(tmp_path.glob("**/mine"))


def test_a_file_that_is_no_model_says_so(hub: Mirror, tmp_path: Path) -> None:
    done = pull(tmp_path, hub, "other.gguf")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "other.gguf: it ends at byte 4, within its header: it is cut off, download it again" in done.stderr


def test_a_pull_by_the_files_name_alone(hub: Mirror, tmp_path: Path) -> None:
    """owner/name:FILE in the model's place: the model is named after the file."""
    done = run(tmp_path, hub, "pull", f"{NAME}:{FILE}", "--runtime", "wgpu")
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert "try: ssmd run tiny.Q8_0" in done.stdout or "tiny.Q8_0/wgpu-gpu-int8" in done.stdout
