"""Graphs for the NPU given to the NPU's own compiler, which needs no NPU (docs/npu.md, docs/notes/xamba.md).

    benchmarks/npu_compile.py tiny [NAME…] [--platforms 4000,3720,5010]    tests' tiny models, built by `ssmd build`.
    benchmarks/npu_compile.py artifact FOLDER… [--platforms …]             existing artifacts.
    benchmarks/npu_compile.py xamba [--platforms …]                        the forms of benchmarks/xamba.py's block.

OpenVINO's package for Windows has that compiler, the one for Linux has not. So it runs under Wine:
apt install wine64 wine gcc-mingw-w64-x86-64. The package comes by pip, of the version that is installed here. All stays
in --folder (default .cache/npu_compile). **It compiles; nothing is executed: Core ML and the NPU cannot execute here.**
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from daemon_process import conditions

from ssmd_openvino import library
from ssmd_openvino.runtime import ELSEWHERE, WEIGHTS

ROOT = Path(__file__).parent.parent
PLATFORMS = {"3720": "Meteor Lake", "4000": "Lunar Lake", "5010": "Panther Lake"}
TINY = (
    *("granite", "granite-groups", "mamba", "falcon-mamba", "lfm2", "mamba2-groups", "bamba-last"),
    *("falcon-h1-norm", "nemotron-h-biases", "qwen3", "llama", "lfm3", "qwen3.5"),
)
BUILT = ("--quant", "f16", "--buckets", "16,64", "--context", "128")
LIMIT_S = 7200  # of one compile, on the clock
SCHEDULE = "compileTimeScheduleTrace.json"  # the compiler's name of the file, which it writes where it runs
XAMBA = (64, 256)  # segments of ActiBA besides those of the block's own forms


@dataclass(frozen=True)
class Compiled:
    """The result of one compile: seconds of the processor and bytes, or the reason of a failure."""

    seconds: float = 0.0
    nbytes: int = 0
    why_not: str = ""

    def __str__(self) -> str:
        return f"no: {self.why_not}" if self.why_not else f"{self.seconds:.1f} s, {self.nbytes / 1e6:.1f} MB"


class Compiler:
    """The compiler of OpenVINO's package for Windows, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        for tool, package in (("wine", "wine64 wine"), ("x86_64-w64-mingw32-gcc", "gcc-mingw-w64-x86-64")):
            if shutil.which(tool) is None:
                raise SystemExit(f"there is no {tool} here: apt install {package}")
        version = library.package_version()
        self._libraries = folder / f"openvino-{version}" / "openvino" / "libs"
        self._folder = folder
        if not self._libraries.is_dir():
            self._fetch(version, folder)
        source, self._program = Path(__file__).with_suffix(".c"), self._libraries / "npu_compile.exe"
        subprocess.run(["x86_64-w64-mingw32-gcc", "-O2", "-o", str(self._program), str(source)], check=True)
        env = {**os.environ, "WINEPREFIX": str(folder / "wine"), "WINEDEBUG": "-all"}
        self._there: dict[str, Any] = {"env": env, "cwd": self._libraries}

    @staticmethod
    def _fetch(version: str, folder: Path) -> None:
        wheels = folder / "wheels"
        what = ("--platform", "win_amd64", "--python-version", "3.11", "--only-binary=:all:", "--no-deps")
        pip = [sys.executable, "-m", "pip", "download", "-q", *what, "--dest", str(wheels), f"openvino=={version}"]
        subprocess.run(pip, check=True)
        [wheel] = wheels.glob(f"openvino-{version}*.whl")
        with zipfile.ZipFile(wheel) as archive:
            wanted = [name for name in archive.namelist() if name.startswith("openvino/libs/")]
            archive.extractall(folder / f"openvino-{version}", wanted)

    def heading(self, platform: str) -> None:
        """Print the compiler, the platform or platforms, and the conditions."""
        version, where = (
            library.package_version(),
            ", ".join(PLATFORMS.get(p, "not known") for p in platform.split(",")),
        )
        print(f"# The NPU compiler of OpenVINO {version} for Windows under Wine, NPU_PLATFORM {platform} ({where});")
        print(f"# {conditions()}; seconds of one core.")
        print("# Compiled, not executed: Core ML and the NPU cannot execute here.")

    def compile(
        self, model: Path, weights: Path, platform: str, *, whole: bool = False, trace: Path | None = None
    ) -> Compiled:
        """Compile a model with the properties that ssmd gives it.

        whole: with the weights in the blob. trace: the file that the compiler's schedule is to be written into.
        """
        properties = {"NPU_COMPILER_TYPE": "PLUGIN", "NPU_PLATFORM": platform, **ELSEWHERE}
        properties["ENABLE_WEIGHTLESS"] = "NO" if whole else "YES"
        if trace is not None:
            properties["NPU_COMPILATION_MODE_PARAMS"] = "enable-schedule-trace=true"
        blob = self._folder / "compiled.blob"
        blob.unlink(missing_ok=True)
        files = [_windows(model), _windows(weights), "NPU", _windows(blob)]
        command = ["wine", str(self._program), *files, *(f"{k}={v}" for k, v in properties.items())]
        before = _processor_s()
        try:
            done = subprocess.run(command, **self._there, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        except subprocess.TimeoutExpired:
            return Compiled(why_not=f"not done after {LIMIT_S} s")
        said = done.stdout.strip().rpartition("\n")[2]
        if done.returncode or said != "ok":
            return Compiled(why_not=said or f"exit code {done.returncode}")
        if trace is not None:
            (self._libraries / SCHEDULE).replace(trace)
        return Compiled(_processor_s() - before, blob.stat().st_size)


def _processor_s() -> float:
    """Seconds of the processor that all processes took which were waited for: other work does not make them more."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _windows(path: Path) -> str:
    """Return a path as Wine shows it to a program."""
    return "Z:" + str(path.resolve()).replace("/", "\\")


def table(head: Sequence[str], rows: Iterator[list[str]]) -> None:
    print("", f"| {' | '.join(head)} |", f"| {' | '.join('---' for _ in head)} |", sep="\n")
    for row in rows:
        print(f"| {' | '.join(row)} |", flush=True)
    print()


def tiny(compiler: Compiler, folder: Path, names: Sequence[str], platform: str) -> None:
    signatures = ("decode", "prefill_16", "prefill_64")

    def rows() -> Iterator[list[str]]:
        for name in names:
            artifact = built(folder, name)
            made = [compiler.compile(artifact / f"{s}.xml", artifact / WEIGHTS, platform) for s in signatures]
            yield [name, *map(str, made)]

    table(("tiny config", "decode", "prefill 16", "prefill 64"), rows())


def built(folder: Path, name: str) -> Path:
    """Return the NPU artifact of a tiny model, built by the command that a user types."""
    artifact = folder / "models" / name / "openvino-npu-f16"
    if not artifact.exists():
        source = folder / "sources" / name
        asked = ["build", str(source), "--runtime", "npu", *BUILT, "--models-dir", str(folder / "models")]
        for command in (["tests/tiny.py", str(source.parent), name], ["-m", "ssmd", *asked]):
            subprocess.run([sys.executable, *command], capture_output=True, check=True, cwd=ROOT)
    return artifact


def artifacts(compiler: Compiler, folders: Sequence[Path], platform: str, *, weightless: bool) -> None:
    """weightless: leave out the compiles with the weights in the blob."""
    ways = {"without weights": False} if weightless else {"without weights": False, "with weights": True}

    def rows() -> Iterator[list[str]]:
        for folder in folders:
            for model in sorted(folder.glob("*.xml")):
                made = [compiler.compile(model, folder / WEIGHTS, platform, whole=whole) for whole in ways.values()]
                yield [f"{folder.parent.name} {model.stem}", *map(str, made)]

    table(("model", *ways), rows())


def block(compiler: Compiler, folder: Path, platform: str) -> None:
    """The forms of a Mamba-2 layer, which benchmarks/xamba.py measures on the CPU."""
    from xamba import BLOCK, FORMS, TOKENS, random_module, rewritten

    from ssmd_openvino.convert import converted

    chosen = [(form.name, form.naive, TOKENS, form.passes) for form in FORMS]
    chosen += [(f"products + ActiBA {n}", False, TOKENS, f"actiba={n}") for n in XAMBA]
    chosen += [("one token (T = 1)", False, 1, None), ("the same + ReduBA + ActiBA 32", False, 1, "reduba,actiba=32")]
    module = random_module(BLOCK)
    file = folder / "block.xml"

    def rows() -> Iterator[list[str]]:
        for name, naive, length, passes in chosen:
            module.naive = naive
            model = rewritten(converted(module, TOKENS, length), passes)
            library.openvino().save_model(model, file, compress_to_fp16=True)
            yield [name, str(compiler.compile(file, file.with_suffix(".bin"), platform, whole=True))]

    table(("form", "compiled"), rows())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("tiny", "artifact", "xamba"))
    parser.add_argument(
        "names", nargs="*", help="of tiny models (default: one of each family), or folders of artifacts"
    )
    parser.add_argument("--platforms", default="4000", help=", ".join(f"{k} {v}" for k, v in PLATFORMS.items()))
    parser.add_argument("--weightless", action="store_true", help="of artifacts, only without the weights in the blob")
    parser.add_argument("--folder", type=Path, default=ROOT / ".cache" / "npu_compile")
    asked = parser.parse_args()
    folder: Path = asked.folder
    folder.mkdir(parents=True, exist_ok=True)
    compiler = Compiler(folder)
    for platform in asked.platforms.split(","):
        compiler.heading(platform)
        if asked.what == "tiny":
            tiny(compiler, folder, asked.names or TINY, platform)
        elif asked.what == "artifact":
            artifacts(compiler, [Path(name) for name in asked.names], platform, weightless=asked.weightless)
        else:
            block(compiler, folder, platform)


if __name__ == "__main__":
    main()
