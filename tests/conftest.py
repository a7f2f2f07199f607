"""Tiny artifacts for all tests: each is restored from what the repository keeps of it, or built, when a test first asks
for it, and stays in .cache for the next run. And an empty store for those that want one."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

import filelock
import kept
import pytest
import tiny

from ssmd.cli.making import converter_of
from ssmd.config import Settings

if TYPE_CHECKING:
    from ssmd.sessions.store import Store

if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # as of what a script runs in the background: processes inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).parent.parent
CACHE = ROOT / ".cache" / "artifacts"
SOURCES = ROOT / ".cache" / "sources"
ONE_EACH = (
    *("llama", "granite", "granite-groups", "qwen3", "mamba", "falcon-mamba", "lfm2"),
    *("mamba2-groups", "bamba-last", "falcon-h1-norm", "nemotron-h-biases", "lfm3", "qwen3.5"),
)
WITH_WINDOWS = ("litert", "openvino")  # the runtimes that compute attention within a window
EXPERTS, SERVING_EXPERTS = ("lfm2-moe",), ("openvino", "wgpu")
QUICK = tuple(f"wgpu-{variant}-f32" for variant in EXPERTS)  # not kept, as a build takes three seconds
TIERS = {"llama-int8": "128,512", "granite-f32": "64,512"}  # with more than one KV tier
SCALE = 4.0  # the smallest normal number divided by it is a subnormal one
MADE_ELSEWHERE = "TESTED_ARTIFACTS"  # two folders, with | between them
# Variables of MKL, PyTorch and NumPy that choose other kernels, whose last bits differ.
NUMERIC = ("MKL_CBWR", "ATEN_CPU_CAPABILITY", "NPY_DISABLE_CPU_FEATURES", "NPY_ENABLE_CPU_FEATURES")
BUILDS = ".builds"  # a line for each that was built, and the seconds it took
RUNTIMES = ("litert", "openvino", "wgpu", "coreml")
# Runtimes from elsewhere that the contract suite is asked to run on, and with which families (docs/add-a-runtime.md).
ASKED = os.environ.get("SSMD_CONTRACT_RUNTIMES", "").split(",")
FOREIGN = tuple(name for name in ASKED if name and name not in (*RUNTIMES, "npu"))
FAMILIES = tuple(os.environ.get("SSMD_CONTRACT_FAMILIES", "granite,mamba").split(","))
for _setting in ("config", "cache_dir", *Settings.model_fields):  # the user's own daemon has some
    os.environ.pop(f"SSMD_{_setting.upper()}", None)


@dataclass(frozen=True)
class Tiny:
    """The parameters of a build: `runtime` as `ssmd build` takes it."""

    variant: str
    runtime: str
    quantization: str
    tiers: str = "512"

    @property
    def folder(self) -> str:
        made = {"npu": "openvino-npu", "wgpu": "wgpu-gpu", "coreml": "coreml-gpu"}.get(
            self.runtime, f"{self.runtime}-cpu"
        )
        if self.runtime in FOREIGN:
            made = f"{self.runtime}-{converter_of(self.runtime).device_class}"
        return f"{self.variant}/{made}-{self.quantization}{'-stateless' if self.stateless else ''}"

    @property
    def stateless(self) -> bool:
        """Core ML's states are float16: what is to be float32 has none."""
        return (self.runtime, self.quantization) == ("coreml", "f32")

    @property
    def asked(self) -> tuple[str, ...]:
        """Options of `ssmd build`."""
        what = ("--runtime", self.runtime, "--quant", self.quantization)
        tiers = self.tiers.rpartition(",")[2] if self.runtime == "coreml" else self.tiers  # which has one
        variant = ("--variant", "stateless") if self.stateless else ()
        return (*what, "--buckets", "16,64", "--context", tiers, *variant)

    @property
    def key(self) -> str:
        """Return the digest of everything it is made of: another key, another artifact."""
        code = foreign_code(self.runtime) if self.runtime in FOREIGN else ()
        family, fields = tiny.VARIANTS[self.variant]
        return kept.key(self.runtime, family, (*self.asked, fields, *code))


@cache
def foreign_code(runtime: str) -> tuple[bytes, ...]:
    """Read the modules of a runtime from elsewhere: with others its artifacts are built anew."""
    [entry] = entry_points(group="ssmd.runtimes", name=runtime)
    [folder] = import_module(entry.module.partition(".")[0]).__path__
    return tuple(file.read_bytes() for file in sorted(Path(folder).rglob("*.py")))


def _built() -> Iterator[tuple[str, Tiny]]:
    """Names of LiteRT's artifacts have no prefix."""
    for runtime in RUNTIMES:
        served = [v for v in tiny.VARIANTS if runtime in SERVING_EXPERTS or not tiny.has_experts(v)]
        for variant, quantization in [*((v, "f32") for v in served), ("llama", "int8"), ("granite", "int8")]:
            if tiny.VARIANTS[variant][0] == "lfm3" and runtime not in WITH_WINDOWS:
                continue
            name = f"{variant}-{quantization}"
            made = Tiny(variant, runtime, quantization, TIERS.get(name, "512"))
            yield name if runtime == "litert" else f"{runtime}-{name}", made
    for variant in EXPERTS:
        yield f"openvino-{variant}-int8", Tiny(variant, "openvino", "int8")
    yield "llama-int4", Tiny("llama", "litert", "int4")
    yield "qwen3.5-int8", Tiny("qwen3.5", "litert", "int8")
    yield "npu-granite-f16", Tiny("granite", "npu", "f16")
    for variant in ("granite", "llama", "mamba"):
        yield f"coreml-{variant}-f16", Tiny(variant, "coreml", "f16")
    yield "coreml-llama-int4", Tiny("llama", "coreml", "int4")
    for runtime in FOREIGN:
        yield from ((f"{runtime}-{family}-f32", Tiny(family, runtime, "f32")) for family in FAMILIES)


BUILT = dict(_built())
KEPT = tuple(
    n
    for n, made in BUILT.items()
    if made.variant in (*ONE_EACH, *EXPERTS) and made.runtime not in FOREIGN and n not in QUICK
)  # in tests/data/artifacts


def params(names: Iterable[str]) -> list[Any]:
    """Names of artifacts as pytest's parameters: those that take long to build are for `scripts/test --full`."""
    return [pytest.param(name, marks=[] if name in (*KEPT, *QUICK) else [pytest.mark.full]) for name in names]


@dataclass(frozen=True)
class TinyArtifacts(Mapping[str, Path]):
    """`artifacts["granite-int8"]` is the folder of an artifact; names are those of BUILT. Read only: copy to alter.

    `folder` is a models directory with those that were asked for, `sources` what they are built from.
    """

    folder: Path
    sources: Path

    def __getitem__(self, name: str) -> Path:
        made = BUILT[name]
        path = self.folder / made.folder
        with _locked(self.folder / f".lock-{made.variant}"):  # two processes at once make it once
            if not path.exists():
                source = self._source(made.variant)
                path.parent.mkdir(exist_ok=True)
                if not (name in KEPT and kept.restore(name, made.key, source, path)):
                    start = time.monotonic()
                    # Processes of their own: transformers and the converters warn, log and keep gigabytes.
                    _run("-m", "ssmd", "build", str(source), *made.asked, "--models-dir", str(self.folder))
                    with (self.folder / BUILDS).open("a") as file:
                        file.write(f"{name} {time.monotonic() - start:.0f}\n")
        return path

    def _source(self, variant: str) -> Path:
        """Write a source. The common ones are written together: importing transformers takes longest."""
        source = self.sources / variant
        with _locked(self.sources / ".lock"):
            if not _whole(source):
                wanted = ONE_EACH if variant in ONE_EACH else (variant,)
                _run("tests/tiny.py", str(source.parent), *(v for v in wanted if not _whole(source.parent / v)))
        return source

    def __iter__(self) -> Iterator[str]:
        return iter(BUILT)

    def __len__(self) -> int:
        return len(BUILT)

    def source(self, name: str) -> Path:
        """The source checkpoint that artifact `name` was built from."""
        return self._source(BUILT[name].variant)


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    file.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(file):
        yield


def _whole(source: Path) -> bool:
    return (source / "generation_config.json").exists()  # which is written last


def plain_environment() -> dict[str, str]:
    """Return this process's environment, less the variables by which numbers would be computed in another way."""
    return {name: value for name, value in os.environ.items() if name not in NUMERIC}


def _run(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=plain_environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{arguments} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


@pytest.fixture(scope="session")
def artifacts() -> TinyArtifacts:
    return opened()


def opened() -> TinyArtifacts:
    """Return the artifacts of today's code, or another system's where nothing can be built (scripts/wine)."""
    if there := os.environ.get(MADE_ELSEWHERE):
        return TinyArtifacts(*map(Path, there.split("|")))
    made = sorted((name, made.key) for name, made in BUILT.items())
    folder, sources = CACHE / _digest(made), SOURCES / _digest(kept.made_of_sources())
    for newest in (folder, sources):
        _forget(keep=newest)
    return TinyArtifacts(folder, sources)


def _digest(of: object) -> str:
    return hashlib.sha256(repr(of).encode()).hexdigest()[:16]


def _forget(keep: Path) -> None:
    """Remove all but the newest sets."""
    sets = sorted((p for p in keep.parent.glob("*") if p.is_dir()), key=lambda p: p.stat().st_mtime, reverse=True)
    for old in sets[6:]:
        if old != keep:
            shutil.rmtree(old, ignore_errors=True)


def pytest_runtest_teardown() -> None:
    """Check that no test changed this process for later ones.

    LiteRT's converter belongs into a process of its own: it raises Python's recursion limit to 100,000, so that hostile
    JSON overflows the stack in a later test, and its JAX forbids to fork. A library that takes subnormal numbers for
    zero changes the numbers of whatever is computed after it.
    """
    assert "litert_torch" not in sys.modules, "LiteRT's converter was imported by this test, or one before"
    assert sys.float_info.min / SCALE > 0, "this test, or one before, turned subnormal numbers off in its thread"


def pytest_sessionstart(session: pytest.Session) -> None:
    session.config.stash[_BUILT_BEFORE] = len(_builds())


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Say what was built that is usually restored."""
    lines = [line.split() for line in _builds()[config.stash[_BUILT_BEFORE] :]]
    if stale := [(name, int(seconds)) for name, seconds in lines if name in KEPT]:
        terminalreporter.write_sep("=", "kept artifacts are not of this code, or not of this processor", yellow=True)
        terminalreporter.line(
            f"{len(stale)} of {len(KEPT)} were built from source, which took {sum(s for _, s in stale)} s, among them "
            f"{stale[0][0]}: scripts/keep makes tests/data/artifacts anew"
        )


_BUILT_BEFORE = pytest.StashKey[int]()


def _builds() -> list[str]:
    file = opened().folder / BUILDS
    return file.read_text().splitlines() if file.exists() else []


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ssmd's wheel, built once for all processes of this run."""
    pytest.importorskip("hatchling")
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "wheel"
    folder.mkdir(exist_ok=True)
    with _locked(folder / ".lock"):
        if not list(folder.glob("*.whl")):
            _run("-m", "hatchling", "build", "-t", "wheel", "-d", str(folder))
    [built] = folder.glob("*.whl")
    return built


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """An empty store, in the folder `data`."""
    from keeping import new_store

    opened = new_store(tmp_path / "data")
    yield opened
    opened.close()
