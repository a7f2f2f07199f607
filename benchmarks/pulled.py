"""The cost of `ssmd pull` at a model's true size: memory, disk and time; then a conversation over a SIGKILL.

    benchmarks/pulled.py NAME RUNTIME [QUANTIZATION] [--calibrate TEXT] [--folder FOLDER] [--keep]

A hub on this machine makes the checkpoint's shards from a seed as they are asked for (ssmd/model/random_source.py), in
bfloat16; they are never on its disk. The artifact is pulled into FOLDER, served, and removed again unless --keep. The
text of such a model has no meaning; memory, disk and time do not depend on it. It runs on Linux.

*Peak*: VmHWM of the largest process and what its children hold, mapped files too; its bound is 1.2 times the artifact
and 2 GB. *Unmapped*: the most memory that is no page of a file, of all processes together. *Disk*: the most in FOLDER,
source and artifact. *Load*: of a process that loads it again. *Resident*: PSS of the daemon after ten answers.
The question after the SIGKILL was asked before it too, with store: false. So its answer may go on from that state.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import mirror
from daemon_process import SSMD, HostProcess, conditions
from true_shape import MODELS, SHAPES, tree

from ssmd.cli.making import smollm2_source
from ssmd.config import Settings
from ssmd.families.registry import family_of
from ssmd.model.random_source import SeededSource

SEED = 7
SHARD_BYTES = 1 << 30
LOOK_S = 0.05  # between two looks at the processes
ANSWERS = 10
TEXTS = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")


class Shard:
    """The bytes of a safetensors file in bfloat16, made when they are read."""

    def __init__(self, source: SeededSource, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._source, self._shapes = source, shapes
        entries, end = dict[str, Any](), 0
        for name, shape in shapes.items():
            begin, end = end, end + 2 * math.prod(shape)
            entries[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
        header = json.dumps(entries).encode()
        header += b" " * (-len(header) % 8)
        self._head = len(header).to_bytes(8, "little") + header
        self._ends = [len(self._head) + entry["data_offsets"][1] for entry in entries.values()]
        self._kept: tuple[int, bytes] = (0, b"")  # the part that was read last, and its offset

    def __len__(self) -> int:
        size: int = self._ends[-1]
        return size

    def __getitem__(self, part: slice) -> bytes:
        first, last, _ = part.indices(len(self))
        found = b""
        while first < last:
            at, made = self._part(first)
            found += made[first - at : last - at]
            first = min(last, at + len(made))
        return found

    @cached_property
    def sha256(self) -> str:
        digest = hashlib.sha256()
        for at in range(0, len(self), 1 << 20):
            digest.update(self[at : at + (1 << 20)])
        return digest.hexdigest()

    def _part(self, place: int) -> tuple[int, bytes]:
        """Return a part of the file that has this place, and its offset: some rows of one tensor."""
        at, made = self._kept
        if not at <= place < at + len(made):
            self._kept = (0, self._head) if place < len(self._head) else self._rows(place)
        return self._kept

    def _rows(self, place: int) -> tuple[int, bytes]:
        number = next(i for i, end in enumerate(self._ends) if place < end)
        name, shape = list(self._shapes.items())[number]
        begin = self._ends[number] - 2 * math.prod(shape)
        row = 2 * math.prod(shape[1:])
        count = max(1, (4 << 20) // row)
        first = (place - begin) // row // count * count
        return begin + first * row, bfloat16(self._source.tensor(name, shape, first, first + count))


def bfloat16(values: np.ndarray[Any, np.dtype[np.float32]]) -> bytes:
    """Round values to bfloat16, halves to even."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()


@contextlib.contextmanager
def hub(name: str) -> Iterator[mirror.Mirror]:
    """Run a hub that has the checkpoint of a model of scripts/models, with SmolLM2's tokenizer."""
    config, origin = SHAPES[name], json.loads((MODELS / f"{name}.json").read_text())["origin"]
    family = family_of(config)
    bindings = family.bindings(family.parse(config)).values()
    shapes = {tensor: shape for one in bindings for tensor, shape in one.reads.items()}
    parts: list[dict[str, tuple[int, ...]]] = [{}]
    for tensor, shape in shapes.items():
        if parts[-1] and 2 * sum(map(math.prod, [*parts[-1].values(), shape])) > SHARD_BYTES:
            parts.append({})
        parts[-1][tensor] = shape
    with smollm2_source(Settings(), lambda line: None) as texts:
        files: dict[str, Any] = {text: (texts / text).read_bytes() for text in TEXTS}
    files["config.json"] = json.dumps(config).encode()
    places = dict[str, str]()
    for i, part in enumerate(parts, 1):
        shard = f"model-{i:05}-of-{len(parts):05}.safetensors" if len(parts) > 1 else "model.safetensors"
        files[shard] = Shard(SeededSource(config, SEED), part)
        places |= dict.fromkeys(part, shard)
    if len(parts) > 1:
        files["model.safetensors.index.json"] = json.dumps({"metadata": {}, "weight_map": places}).encode()
    with mirror.running(origin, files) as made:
        yield made


@dataclass
class Costs:
    """The most that a command took so far: bytes, and seconds."""

    peak: int = 0
    unmapped: int = 0
    disk: int = 0
    cpu_s: float = 0.0
    wall_s: float = 0.0

    def look(self, root: int, folder: Path) -> None:
        """Look at a process and all below it, and at the bytes in a folder."""
        found = [known for known in map(memory_of, tree(root)) if known]
        if found:
            largest = max(found, key=lambda known: known["VmHWM"])
            others = sum(known["VmRSS"] for known in found) - largest["VmRSS"]
            self.peak = max(self.peak, largest["VmHWM"] + others)
            self.unmapped = max(self.unmapped, sum(known["VmRSS"] - known["RssFile"] for known in found))
        self.disk = max(self.disk, on_disk(folder))


def memory_of(pid: int) -> dict[str, int]:
    """Return the memory of a process by the fields of /proc, in bytes; nothing if it has ended."""
    wanted = ("VmHWM", "VmRSS", "RssFile")
    with contextlib.suppress(OSError):
        lines = (line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        found = {line[0].rstrip(":"): int(line[1]) << 10 for line in lines if line and line[0].rstrip(":") in wanted}
        return found if len(found) == len(wanted) else {}
    return {}


def on_disk(folder: Path) -> int:
    """Return the bytes that the files in a folder take of the disk."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(place, name)).st_blocks * 512
    return total


def measured(command: list[str], folder: Path) -> Costs:
    """Run a command to its end. Returns what it took; raises SystemExit if it fails."""
    costs, began = Costs(), time.perf_counter()
    process = subprocess.Popen([*SSMD, *command])
    while True:
        pid, status, used = os.wait4(process.pid, os.WNOHANG)
        if pid:
            break
        costs.look(process.pid, folder)
        time.sleep(LOOK_S)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"ssmd {' '.join(command)} ended with {process.returncode}")
    costs.cpu_s, costs.wall_s = used.ru_utime + used.ru_stime, time.perf_counter() - began
    return costs


def pss(pid: int) -> int:
    """Return the bytes of a process, shared pages by their share."""
    rows = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(row.split()[1]) << 10 for row in rows if row.startswith("Pss:"))


def served(name: str, folder: Path) -> tuple[float, int, int, list[str]]:
    """Serve an installed model: ask, kill it, ask again. Returns s of a load, bytes resident and at most, and words.

    The words are those of each second answer about how it went on, and if it is the same as without the kill.
    """
    questions = [{"role": "user", "content": text} for text in ("Name a river.", "And another one?")]

    def chat(daemon: HostProcess, *said: dict[str, Any], **fields: Any) -> Any:
        return daemon.chat(said, model=name, max_tokens=24, logprobs=True, **fields)

    with HostProcess(folder / "sessions", "--threads", "2", models_dir=folder / "models") as daemon:
        assert daemon.process is not None
        chat(daemon, questions[0], store=False)  # its first load, which may prepare weights
        daemon.unloaded(name)
        began = time.perf_counter()
        daemon.model(name, "load")
        while daemon.model(name, "load")["state"] != "loaded":
            time.sleep(0.01)
        load_s = time.perf_counter() - began
        for number in range(ANSWERS):
            chat(daemon, {"role": "user", "content": f"Say the number {number}."}, store=False)
        resident = pss(daemon.process.pid)
        most = memory_of(daemon.process.pid)["VmHWM"]
        first = chat(daemon, questions[0])
        spoken = {"role": "assistant", "content": first.text}
        unkilled = chat(daemon, questions[0], spoken, questions[1], store=False)
        daemon.kill()
        daemon.start()
        again = chat(daemon, questions[0], spoken, questions[1])
        same = (unkilled.text, unkilled.logprobs) == (again.text, again.logprobs)
        cached = again.usage["prompt_tokens_details"]["cached_tokens"]
        words = [again.usage["ssmd"]["resume"], f"{cached} of {again.usage['prompt_tokens']} tokens cached"]
        return load_s, resident, most, [*words, "the same bits" if same else "OTHER BITS"]


def measure(
    name: str, runtime: str, quantization: str | None, text: Path | None, folder: Path, *, keep: bool
) -> list[str]:
    """Pull a model into a folder and serve it. Returns the columns of its row. text: to calibrate with."""
    os.environ |= {"SSMD_DATA_DIR": str(folder / "data"), "SSMD_MODELS_DIR": str(folder / "models")}
    os.environ |= {"SSMD_CACHE_DIR": str(folder / "cache"), "HF_HUB_DISABLE_TELEMETRY": "1"}
    if (here := folder / "models" / name).exists():
        raise SystemExit(f"{here} is there already, and might be served instead: take another FOLDER")
    command = ["pull", name, "--runtime", runtime, *(["--quant", quantization] if quantization else [])]
    command += ["--calibrate", str(text)] if text else []
    try:
        with hub(name) as running:
            os.environ["HF_ENDPOINT"] = running.url
            print(f"pull {name}; load {os.getloadavg()[0]:.1f}", flush=True)
            costs = measured(command, folder)
        [artifact] = here.glob(f"{runtime}-*")
        nbytes = sum(f.stat().st_size for f in artifact.rglob("*") if f.is_file())
        load_s, resident, most, words = served(name, folder)
    finally:
        if not keep:
            shutil.rmtree(folder / "models", ignore_errors=True)
            shutil.rmtree(folder / "data", ignore_errors=True)
    gb = [nbytes, costs.peak, 1.2 * nbytes + 2e9, costs.unmapped, costs.disk, resident, most]
    artifact_gb, peak, bound, unmapped, disk, resident_gb, most_gb = (f"{n / 1e9:.2f}" for n in gb)
    memory = [artifact_gb, f"{peak} ({bound})", unmapped, disk]
    times = [f"{costs.cpu_s:.0f}", f"{costs.wall_s:.0f}", f"{load_s:.1f}"]
    return [name, artifact.name, *memory, *times, f"{resident_gb} / {most_gb}", "; ".join(words)]


COLUMNS = (
    *("model", "artifact", "GB", "peak of the pull, GB (bound)", "unmapped, GB", "disk, GB"),
    *("CPU s", "s", "load s", "resident / most served, GB", "after a SIGKILL"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=SHAPES)
    parser.add_argument("runtime")
    parser.add_argument("quantization", nargs="?")
    parser.add_argument("--calibrate", type=Path, metavar="TEXT", help="which ssmd pull gets")
    parser.add_argument("--folder", type=Path, help="for all files; else a temporary one")
    parser.add_argument("--keep", action="store_true", help="leave the artifact in FOLDER, which has none of it yet")
    asked = parser.parse_args()
    said = conditions()
    with contextlib.ExitStack() as stack:
        folder = asked.folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ssmd-pulled-")))
        row = measure(asked.name, asked.runtime, asked.quantization, asked.calibrate, folder, keep=asked.keep)
    print(f"# pulled: {said}; 2 threads\n| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}")
    print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
