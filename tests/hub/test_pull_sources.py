"""The source of a pull: refused before it is fetched, removed once its artifact is there, resumed after kills."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import commands
import filelock
import mirror
import pytest
from conftest import TinyArtifacts
from huggingface_hub import constants
from mirror import Mirror, sharded, surroundings
from refitting import stripped

from ssmd.families.fields import FamilyError
from ssmd.hub import download
from ssmd.hub.hub import HubError, HubUnreachable
from ssmd.hub.pull import Look, PulledSource, Purpose, pull, used_up
from ssmd.machine.size import show_size
from ssmd.model.artifact import MANIFEST, Artifact
from ssmd.model.source import Source
from ssmd.refit import catalog
from ssmd.refit.graphfile import StrippedGraph

NAME, ORIGIN, WEIGHTS = "tiny-granite", "acme/tiny-granite", "model.safetensors"
FORM = "litert-cpu-int8"
KILLS = int(os.environ.get("SSMD_KILLS", "4"))
SEED = int(os.environ.get("SSMD_SEED", "7"))
MOST_TWICE = 64 << 10  # bytes of a file in a socket when its reader is killed


@pytest.fixture(scope="module")
def graphs(artifacts: TinyArtifacts, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The graphs that are shipped: one, of a tiny model."""
    folder = tmp_path_factory.mktemp("graphs")
    built, source = Artifact.open(artifacts["granite-int8"]), Source.open(artifacts.source("granite-int8"))
    graph = stripped(built, source, NAME)
    graph.save(folder / catalog.file_name(NAME, "litert", "cpu", "int8"))
    return folder


@pytest.fixture
def before(graphs: Path) -> str:
    """Code that a command runs first, which has these graphs alone."""
    return f"from pathlib import Path; from ssmd.refit import catalog; catalog.SHIPPED = Path({str(graphs)!r}); "


@pytest.fixture
def hub(artifacts: TinyArtifacts) -> Iterator[Mirror]:
    """A hub with the model in two shards."""
    with mirror.running(ORIGIN, sharded(artifacts.source("granite-int8"))) as running:
        yield running


def ran(home: Path, hub: Mirror | None, before: str, *words: str) -> subprocess.CompletedProcess[str]:
    hurry = "from ssmd.hub import download; download.WAITS_S = (0.01,) * 4; "
    return commands.ssmd(*words, env=surroundings(home, hub), before=hurry + before)


def done(home: Path, hub: Mirror | None, before: str, *words: str) -> dict[str, Any]:
    one = ran(home, hub, before, "pull", NAME, "--json", *words)
    assert (one.returncode, one.stderr) == (0, "")
    said: dict[str, Any] = json.loads(one.stdout)
    return said


def refused(home: Path, hub: Mirror | None, before: str, *words: str) -> str:
    one = ran(home, hub, before, *words)
    assert (one.returncode, one.stderr.count("\n")) == (1, 1), one
    return one.stderr


def left(home: Path) -> list[str]:
    """All files of sources, and all hidden ones beside artifacts."""
    sources = [p for p in (home / "data/sources").rglob("*") if p.is_file() and p.name != "revisions.json"]
    return [str(p.relative_to(home)) for p in (*sources, *(home / "data/models").rglob(".*"))]


def made(home: Path) -> dict[str, bytes]:
    """The files of the artifact, without its manifest's time."""
    folder = home / "data/models" / NAME / FORM
    files = {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    return {**files, MANIFEST: Artifact.open(folder).manifest.build.encode()}


def fetched(hub: Mirror) -> list[str]:
    return sorted({a.path.rpartition("/")[2] for a in hub.asked if "/resolve/" in a.path})


def test_a_source_is_removed_when_its_artifact_is_there(
    artifacts: TinyArtifacts, hub: Mirror, before: str, tmp_path: Path
) -> None:
    """The artifact has the bytes of one from a folder, which stays. A second pull fetches the config alone."""
    one = ran(tmp_path, hub, before, "pull", NAME)
    assert (one.returncode, one.stderr) == (0, "")
    assert "\nthe source, " in one.stdout
    assert "is removed: --keep-source keeps it" in one.stdout
    assert not left(tmp_path)
    own = shutil.copytree(artifacts.source("granite-int8"), tmp_path / "own")
    whole = sorted(own.iterdir())
    done(tmp_path / "other", None, before, "--from", str(own))
    assert sorted(own.iterdir()) == whole
    assert made(tmp_path) == made(tmp_path / "other")
    hub.asked.clear()
    again = ran(tmp_path, hub, before, "pull", NAME)
    assert again.stdout.count(f"{FORM} is here already; --force makes it again\n") == 1
    assert fetched(hub) == ["config.json"]
    assert not left(tmp_path)
    hub.asked.clear()
    assert "is here already" in ran(tmp_path, None, before, "pull", NAME, "--offline").stdout
    said = refused(tmp_path, None, before, "pull", NAME, "--offline", "--force")
    assert "is not here and --offline" in said


def test_a_source_stays_with_keep_source(hub: Mirror, before: str, tmp_path: Path) -> None:
    said = done(tmp_path, hub, before, "--keep-source")
    path = Path(said["path"])
    assert Source.open(path).tensors
    hub.asked.clear()
    assert done(tmp_path, hub, before, "--force")["path"] == str(path)
    assert not fetched(hub)
    assert path.is_dir()


def test_a_pull_without_memory_fetches_no_weights(hub: Mirror, before: str, tmp_path: Path) -> None:
    full = "import ssmd.machine.memory as m; m.available = lambda: 5_000_000; "
    said = refused(tmp_path, hub, before + full, "pull", NAME)
    assert "error: this pull takes about " in said
    assert " of memory, and 5.0 MB are free: close other programs" in said
    assert "`ssmd pull --anyway`" in said  # `ssmd run` and a daemon's pull say so too, and have no such option
    assert fetched(hub) == ["config.json"]
    assert not left(tmp_path)
    assert done(tmp_path, hub, before + full, "--anyway")["fetched"]


def test_a_build_without_memory_fetches_no_weights(hub: Mirror, tmp_path: Path) -> None:
    full = "import ssmd.machine.memory as m; m.available = lambda: 5_000_000; "
    asked = ("build", ORIGIN, "--runtime", "wgpu", "--quant", "f32", "--context", "64", "--buckets", "16")
    said = refused(tmp_path, hub, full, *asked)
    assert "error: this build takes about " in said
    assert "`ssmd build --anyway`" in said
    assert fetched(hub) == ["config.json"]
    built = ran(tmp_path, hub, full, *asked, "--anyway")
    assert (built.returncode, built.stderr) == (0, "")


def test_the_disk_has_to_take_source_and_artifact(hub: Mirror, before: str, graphs: Path, tmp_path: Path) -> None:
    source = sum(len(b) for n, b in hub.files.items() if n != "README.md")
    artifact = sum(f.size for f in StrippedGraph.open(next(graphs.iterdir())).header.files)
    free = source + artifact // 2
    little = f"import shutil, types; shutil.disk_usage = lambda path: types.SimpleNamespace(free={free}); "
    said = refused(tmp_path, hub, before + little, "pull", NAME)
    assert f" are to be fetched and {show_size(artifact)} to be written beside them and the disk of " in said
    assert f"has {show_size(free)} free: make room, or choose another disk with SSMD_DATA_DIR" in said
    assert fetched(hub) == ["config.json", "model.safetensors.index.json"]


def test_no_weights_are_fetched_for_want_of_a_graph(artifacts: TinyArtifacts, before: str, tmp_path: Path) -> None:
    with mirror.running("acme/tiny-llama", artifacts.source("llama-f32")) as hub:
        said = refused(tmp_path, hub, before, "pull", "acme/tiny-llama", "--runtime", "litert")
        assert "with PyTorch it can be built: ssmd build acme/tiny-llama --runtime litert" in said
        assert fetched(hub) == ["config.json"]
        assert not left(tmp_path)


def test_an_installed_model_needs_no_room(artifacts: TinyArtifacts, before: str, tmp_path: Path) -> None:
    with mirror.running(ORIGIN, artifacts.source("granite-int8")) as hub:  # its weights are one file
        made = done(tmp_path, hub, before)["artifact"]
        hub.asked.clear()
        full = "import shutil, types; shutil.disk_usage = lambda path: types.SimpleNamespace(free=100_000); "
        assert done(tmp_path, hub, before + full)["artifact"] == made
        assert fetched(hub) == ["config.json"]


def _refuse(config: object) -> Purpose:
    raise FamilyError("the model has experts")


@pytest.mark.parametrize("look", [lambda config: Purpose(needed=False), _refuse], ids=["installed", "refused"])
def test_a_pull_without_weights_keeps_those_of_another(
    look: Look, hub: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another command fetched a part of them, and goes on with it later."""
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    form = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", form)
    monkeypatch.setattr(download, "WAITS_S", ())
    shard = max((n for n in hub.files if n.endswith(".safetensors")), key=lambda n: len(hub.files[n]))
    hub.breaks[shard] = [len(hub.files[shard]) // 2]
    with pytest.raises(HubUnreachable, match="are kept"):
        pull(ORIGIN, "main", tmp_path, lambda *_: None)
    with contextlib.suppress(HubError):
        pull(ORIGIN, "main", tmp_path, lambda *_: None, look=look)
    [part] = tmp_path.rglob(shard)
    assert part.stat().st_size == len(hub.files[shard]) // 2


def test_a_source_kept_a_moment_ago_is_not_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mark is there when one command looks, and gone when it has the lock: another one kept the source."""
    source = PulledSource(ORIGIN, "main", "0" * 40, tmp_path / "0", {}, fetched=False)
    source.path.mkdir()
    mark = tmp_path / ".0.temporary"
    mark.touch()
    acquire = filelock.FileLock.acquire

    def acquire_later(lock: filelock.FileLock) -> object:
        mark.unlink()
        return acquire(lock)

    monkeypatch.setattr(filelock.FileLock, "acquire", acquire_later)
    with used_up(source):
        pass
    assert [p.name for p in tmp_path.iterdir()] == ["0"]


@pytest.mark.parametrize("status", [416, 429, 503])
def test_a_refusal_while_resuming_loses_nothing(status: int, hub: Mirror, before: str, tmp_path: Path) -> None:
    shard = max((n for n in hub.files if n.endswith(".safetensors")), key=lambda n: len(hub.files[n]))
    size = len(hub.files[shard])
    hub.breaks[shard] = [size // 2, *[0] * 4]
    assert f"{size // 2} of {size} bytes are kept" in refused(tmp_path, hub, before, "pull", NAME)
    hub.breaks.clear()
    hub.refuse = (status, "")
    said = refused(tmp_path, hub, before, "pull", NAME)
    assert ("does not have the rest" if status == 416 else f"HTTP {status}") in said
    [part] = (tmp_path / "data/sources").rglob(shard)
    assert part.stat().st_size == size // 2
    hub.refuse = None
    with mirror.running(ORIGIN, hub.files) as storage:
        hub.storage = storage.url  # another host has the rest
        assert done(tmp_path, hub, before)["artifact"]
        assert storage.sent[shard] == size - size // 2
    assert not left(tmp_path)


def test_killed_pulls_go_on_and_leave_nothing(hub: Mirror, before: str, tmp_path: Path) -> None:
    """Each kill comes at a random moment of a pull. No file is fetched twice, and no half artifact has a name."""
    began = time.monotonic()
    done(tmp_path / "true", hub, before)
    took = time.monotonic() - began
    hub.sent.clear()
    hub.buffer = 4096  # else a file counts as sent that its reader never saw
    rng, home = random.Random(SEED), tmp_path / "home"
    folder = home / "data/models" / NAME / FORM
    for _ in range(KILLS):
        process = commands.start("pull", NAME, "--force", env=surroundings(home, hub), before=before)
        time.sleep(rng.uniform(0, took))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        if folder.exists():
            assert made(home) == made(tmp_path / "true")
            shutil.rmtree(folder)
            hub.sent.clear()
        twice = {n: b for n, b in hub.sent.items() if b > len(hub.files[n]) + KILLS * MOST_TWICE}
        assert not twice
    done(home, hub, before)
    assert made(home) == made(tmp_path / "true")
    assert not left(home)


def test_a_disk_that_fills_up_loses_nothing(hub: Mirror, before: str, graphs: Path, tmp_path: Path) -> None:
    """It fills up while the artifact is written; then it has room again."""
    source = sum(map(len, hub.files.values()))
    artifact = sum(f.size for f in StrippedGraph.open(next(graphs.iterdir())).header.files)
    folder, env = tmp_path / "data", surroundings(tmp_path, hub)
    folder.mkdir()
    plenty = "import shutil, types; shutil.disk_usage = lambda path: types.SimpleNamespace(free=1 << 40); "
    program = f"{before}{plenty}import runpy, sys; runpy.run_module('ssmd', None, '__main__')"
    pull = shlex.join((sys.executable, "-c", program, "pull", NAME))
    small = f"mount -t tmpfs -o mode=700,size={source + artifact // 2} none {folder} || exit 77"
    hidden = f"find {folder}/models -name '.*'"
    once = f"{pull}; echo ended $?; {hidden}"
    script = f"{small}; {once}; mount -o remount,size=1g {folder}; {once}"
    words = ["unshare", "--mount", "--map-root-user", "sh", "-c", script]
    one = subprocess.run(words, env=env, text=True, capture_output=True, check=False)
    if one.returncode == 77 or "unshare" in one.stderr:
        pytest.skip("no file system can be mounted here")
    seen = [line for line in one.stdout.splitlines() if line.startswith(("ended", f"{folder}/models/{NAME}/."))]
    assert seen == ["ended 1", "ended 0"], one
    assert one.stderr.count("\n") == 1, one.stderr
    assert f"error: no room on the disk for {folder}/models/{NAME}/{FORM} (No space left on device): " in one.stderr
    assert {n: b for n, b in hub.sent.items() if b != len(hub.files[n])} == {}
