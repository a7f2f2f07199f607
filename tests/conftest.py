"""Tiny artifacts for all tests: each is built when a test first asks for it, and kept for the next run."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
import tiny

ROOT = Path(__file__).parent.parent
CACHE = ROOT / ".cache" / "artifacts"
# What an artifact's bytes depend on; a change in any of these builds it anew.
CODE = (
    "ssmd/families/*.py",
    "ssmd/authoring/*.py",
    "ssmd/build/*.py",
    *(
        f"runtimes/*/{n}.py"
        for n in ("build", "weights_on_disk", "constants", "recipe", "convert", "lint", "xamba", "piecewise")
    ),
    *(f"runtimes/ssmd_wgpu/{n}.py" for n in ("pack", "plan", "reference")),
    "runtimes/ssmd_coreml/stacks.py",
)
FILES = ("ssmd/model/source.py", "ssmd/model/state.py", "ssmd/model/artifact.py", "ssmd/cli/build.py", "tests/tiny.py")
PACKAGES = (
    *("torch", "transformers", "tokenizers", "litert-torch", "ai-edge-quantizer", "openvino", "nncf"),
    "coremltools",
)
ONE_EACH = (
    *("llama", "granite", "granite-groups", "qwen3", "mamba", "falcon-mamba", "lfm2"),
    *("mamba2-groups", "bamba-last", "falcon-h1-norm"),
)
VARIANTS = tuple(tiny.VARIANTS) if os.environ.get("SSMD_FULL") else ONE_EACH  # which `scripts/test --full` sets
TIERS = {"llama-int8": "128,512", "granite-f32": "64,512"}  # with more than one KV tier
RUNTIMES = ("litert", "openvino", "wgpu", "coreml")


@dataclass(frozen=True)
class Tiny:
    """How an artifact is built: `runtime` as `ssmd build` takes it."""

    variant: str
    runtime: str
    quantization: str
    tiers: str = "512"

    @property
    def folder(self) -> str:
        made = {"npu": "openvino-npu", "wgpu": "wgpu-gpu", "coreml": "coreml-gpu"}.get(
            self.runtime, f"{self.runtime}-cpu"
        )
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


def _built() -> Iterator[tuple[str, Tiny]]:
    """Names of LiteRT's artifacts have no prefix."""
    for runtime in RUNTIMES:
        for variant, quantization in [*((v, "f32") for v in VARIANTS), ("llama", "int8"), ("granite", "int8")]:
            name = f"{variant}-{quantization}"
            made = Tiny(variant, runtime, quantization, TIERS.get(name, "512"))
            yield name if runtime == "litert" else f"{runtime}-{name}", made
    yield "npu-granite-f16", Tiny("granite", "npu", "f16")
    for variant in ("granite", "llama", "mamba"):
        yield f"coreml-{variant}-f16", Tiny(variant, "coreml", "f16")
    yield "coreml-llama-int4", Tiny("llama", "coreml", "int4")


BUILT = dict(_built())


@dataclass(frozen=True)
class TinyArtifacts(Mapping[str, Path]):
    """`artifacts["granite-int8"]` is the folder of an artifact; names are those of BUILT. Read only: copy to alter.

    `folder` is a models directory with those that were asked for.
    """

    folder: Path

    def __getitem__(self, name: str) -> Path:
        made = BUILT[name]
        variant, path = made.variant, self.folder / made.folder
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / f".lock-{variant}").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # two processes at once build it once
            if not path.exists():
                # Processes of their own: transformers and the converters warn, log and keep gigabytes.
                source = self.folder / ".source" / variant
                if not (source / "generation_config.json").exists():  # which is written last
                    _run("tests/tiny.py", str(source), variant)
                _run("-m", "ssmd", "build", str(source), *made.asked, "--models-dir", str(self.folder))
        return path

    def __iter__(self) -> Iterator[str]:
        return iter(BUILT)

    def __len__(self) -> int:
        return len(BUILT)

    def source(self, name: str) -> Path:
        """The source checkpoint that artifact `name` was built from."""
        self[name]
        return self.folder / ".source" / BUILT[name].variant


def _run(*arguments: str) -> None:
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{arguments} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


def _version(package: str) -> str | None:
    """None: tests of what needs it cannot run, others can."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@pytest.fixture(scope="session")
def artifacts() -> TinyArtifacts:
    digest = hashlib.sha256(repr((BUILT, [(p, _version(p)) for p in PACKAGES])).encode())
    for file in sorted({*(f for pattern in CODE for f in ROOT.glob(pattern)), *(ROOT / f for f in FILES)}):
        digest.update(file.read_bytes())
    folder = CACHE / digest.hexdigest()[:16]
    _forget(keep=folder)
    return TinyArtifacts(folder)


def _forget(keep: Path) -> None:
    """Remove all but the newest sets."""
    sets = sorted((p for p in CACHE.glob("*") if p.is_dir()), key=lambda p: p.stat().st_mtime, reverse=True)
    for old in sets[6:]:
        if old != keep:
            shutil.rmtree(old, ignore_errors=True)
