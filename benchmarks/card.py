"""Measurements of the wgpu runtime on a GPU, in parts that each have a limit of seconds. scripts/gpu runs it.

    benchmarks/card.py [--only PART]… [--out FOLDER] [--device NAME] [--llama LIBRARY --gguf FILE]

kernels   tests of the shaders, of streams and of the contract on this adapter.         60 s
granite   granite-4.0-h-350m's shape, random weights: steps, prompts, single kernels.   60 s
daemon    a daemon of a tiny model that is killed, and its answers after that.          30 s
falcon    falcon-mamba-7b's shape in float16.                                           90 s
llama     llama.cpp's library on the same card, if one is named.                        40 s

It needs no network. report.md and report.json in FOLDER (default: build/gpu) are rewritten after every part, and a
part's own file after every measurement. So a run that is cut off leaves its results. A software adapter gets shapes of
a few layers: its numbers only show that the command works.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gpu
import numpy as np
from daemon_process import DaemonProcess, conditions
from gpu import MOST, SHAPES, Bench, bandwidth, measured, median_s, table
from llama_library import Library, Llama

from ssmd_wgpu.device import Gpu, choose_adapter
from ssmd_wgpu.library import package_version
from ssmd_wgpu.model import Model
from ssmd_wgpu.op import Op
from ssmd_wgpu.products import Tiling
from ssmd_wgpu.recorder import Dispatch, Region
from ssmd_wgpu.tuning import tiles, warm

ROOT = Path(__file__).parent.parent
LIMITS = {"kernels": 60, "granite": 60, "daemon": 30, "falcon": 90, "llama": 40}  # seconds
SOFTWARE_TIMES = 4  # as long, where the processor computes
SHADERS = "tests/runtimes/wgpu/test_wgpu_shaders.py"
FIRST = "attention_of_streams", "attention_that_goes_on", "matvec_that_reads_ahead", "matvec_of_streams", "mlp"
STREAMS = "tests/runtimes/wgpu/test_wgpu_streams.py"
TESTS = (*(f"{SHADERS}::test_{name}" for name in FIRST), STREAMS, "tests/contract", SHADERS)
OTHERS = "test_parity.py", "test_moving.py"  # want transformers, and LiteRT
FEW = "matvec_of_streams and vulkan or wgpu-vulkan-granite-f32 and resume"  # of these, for a software adapter
CUTS = 1, 2, 4, 6, 8, 12  # submissions of a step
FORMS = ((32, 2, True, 4), (32, 2, True, 1), (32, 4, True, 2), (64, 2, False, 4))  # threads, rows, subgroups, ahead
STEPS = 40
TURNS = ("Remember the number 42", "Which number?", "And its half?")
NO_END = {"0": -100, "2": -100}  # a tiny model's stop tokens never come
TOKENS = 24  # of a turn
_HEAD = "One token of each", "Y = norm(X) W^T", "A whole MLP", "The recurrence of T tokens"
_KIND = "matvec", "matmul", "mlp", "scan"


class Part:
    """A running part. Each `keep` writes its results to its file, and no measurement begins when it is `late`."""

    def __init__(self, name: str, asked: argparse.Namespace) -> None:
        self.asked, self.found = asked, dict[str, Any]()
        self._file = asked.out / f"{name}.json"
        self.adapter = choose_adapter(asked.device)
        self._until = time.monotonic() + limit_s(name, self.adapter.software) - 8

    @property
    def late(self) -> bool:
        return time.monotonic() > self._until

    def keep(self, *_: object) -> None:
        part = self._file.with_suffix(".part")
        part.write_text(json.dumps(self.found, indent=1, default=str))
        part.replace(self._file)

    def say(self, text: str) -> None:
        print(f"    {text}", flush=True)


def limit_s(name: str, software: bool) -> int:
    return LIMITS[name] * (SOFTWARE_TIMES if software else 1)


def clocks(adapter: Gpu | None = None) -> dict[str, str]:
    """Return nvidia-smi's clocks of the card, of a busy one if an adapter is given; {} if there is none."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return {}
    fields = ("name", "driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "power.draw", "temperature.gpu")
    said: list[str] = []

    def ask() -> None:
        command = [program, f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
        try:
            said.append(subprocess.run(command, capture_output=True, text=True, check=False, timeout=10).stdout)
        except (OSError, subprocess.TimeoutExpired):
            said.append("")

    thread = threading.Thread(target=ask)
    thread.start()
    while adapter is not None and thread.is_alive():
        warm(adapter, 0.05)
    thread.join()
    first = said[0].strip().splitlines()[:1]
    return dict(zip(fields, (v.strip() for v in first[0].split(",")), strict=False)) if first else {}


def of_card(part: Part) -> float:
    """Note the adapter and its speed of reading. Returns GB/s."""
    idle = clocks()
    opened = Gpu(part.adapter)
    probe = bandwidth(opened)
    part.found["card"] = {
        "adapter": part.adapter.description,
        "wgpu": package_version(),
        "subgroup": opened.subgroup,
        "coherent": opened.coherent,
        "features": sorted(part.adapter.adapter.features),
        "limits": opened.limits,
        "idle": idle,
        "busy": clocks(opened),
        **probe,
    }
    part.keep()
    part.say(
        f"{part.adapter.description}: reads {probe['read_gb_s']:,.1f} GB/s, empty submission {probe['empty_ms']:.3f} ms"
    )
    return probe["read_gb_s"]


def kernels(part: Part) -> None:
    """Run the tests of the shaders, of streams and of the contract, of those adapters that can be used."""
    left_out = [f"--ignore=tests/contract/{name}" for name in OTHERS]
    few = ["-k", FEW] if part.adapter.software else []
    command = [sys.executable, "-m", "pytest", "-v", "-n", "0", "-p", "no:cacheprovider", "--no-header", "--tb=line"]
    environment = {**os.environ, "SSMD_CONTRACT_RUNTIMES": "wgpu", "PYTHONUNBUFFERED": "1"}
    log = part.asked.out / "kernels.log"
    begin = time.monotonic()
    with log.open("w") as file:
        process = subprocess.Popen(
            [*command, *few, *left_out, *TESTS], cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT
        )
        while process.poll() is None and not part.late:
            time.sleep(0.2)
        stopped = process.poll() is None
        process.kill()
        process.wait()
    lines = log.read_text(errors="replace").splitlines()
    of = {
        what: [m[1] for line in lines if (m := re.match(rf"(\S+::\S+(?: .*)?) {what}\b", line))]
        for what in ("PASSED", "FAILED", "ERROR", "SKIPPED")
    }
    part.found |= {what.lower(): len(names) for what, names in of.items()}
    part.found |= {"wrong": of["FAILED"] + of["ERROR"], "stopped": stopped, "seconds": time.monotonic() - begin}
    part.found["exit"] = process.returncode
    part.keep()
    if process.returncode and not stopped:
        sys.exit("\n".join(lines[-12:]))


def granite(part: Part) -> None:
    read_gb_s = of_card(part)
    for quantization in ("int8", "f16", "int4"):
        if not part.late:
            whole(part, "granite-4.0-h-350m", quantization, read_gb_s)


def falcon(part: Part) -> None:
    whole(part, "falcon-mamba-7b", "f16", of_card(part))


def whole(part: Part, name: str, quantization: Any, read_gb_s: float) -> None:
    """Measure a model as benchmarks/gpu.py does, and the time of each kernel."""
    bench = Bench(Gpu(part.adapter), name, quantization)
    found: dict[str, Any] = {"more": {}}
    part.found.setdefault("rows", []).append(found)

    def kept(row: dict[str, Any]) -> None:
        found.update(row)
        part.keep()

    measured(bench, name, quantization, False, read_gb_s, kept)
    part.say(
        f"{name} {quantization}: {found['tiling']}, load {found['load_s']:.1f} s ({found['tuned_s']:.1f} tuning), "
        f"ms a step {rounded(found['step_ms'])}, prompt {found['prefill_tok_s']:,.0f} tokens/s"
    )
    for shape, taken in found["shapes"].items():
        part.say(f"us of {shape}: {taken}")
    more: dict[str, Any] = found["more"]

    def note(what: str, run: Callable[[], Any]) -> None:
        if part.late:
            return
        warm(bench.model.gpu)
        try:
            more[what] = run()
        except Exception as err:  # one measurement that fails is no reason to lose the others
            more[what] = f"failed: {err}"
        part.say(f"{what}: {rounded(more[what]) if not isinstance(more[what], list) else ''}")
        part.keep()

    tiling, most = bench.model.tiling, bench.model.gpu.subgroup
    forms = [
        replace(tiling, threads_per_row=t, rows_per_thread=r, subgroups=s, ahead=a, rows_of_several=0, shapes=())
        for t, r, s, a in FORMS
        if not s or t <= most
    ]
    cuts = tiles(bench.model.gpu)
    prefill = bench.model.slots.dispatches(bench.model.prefill(MOST), MOST)
    note("ms a step of 1 by submissions", lambda: {n: in_parts(bench, 1, equal(bench.step(1), n)) for n in CUTS})
    note("ms a step of 8 by submissions", lambda: {n: in_parts(bench, 8, equal(bench.step(8), n)) for n in CUTS})
    note("ms a step in submissions that grow", lambda: {n: in_parts(bench, n, growing(bench.step(n))) for n in (1, 8)})
    note("ms of the adapter alone a step", lambda: {n: unread_ms(bench, n) for n in (1, 8)})
    note("ms a step of 1 by matvec", lambda: {str(form): by_tiling(bench, form, 1) for form in forms})
    note("ms a step of 8 by matvec", lambda: {str(form): by_tiling(bench, form, 8) for form in forms})
    note(
        f"tokens/s of a prompt of {MOST} by tile",
        lambda: {f"{t}/{q}": by_tile(bench, replace(tiling, tile=t, quads=q, shapes=())) for t, q in cuts},
    )
    note("kernels of a step of 1", lambda: by_kernel(bench, bench.step(1), 1))
    note("kernels of a step of 8", lambda: by_kernel(bench, bench.step(8), 1))
    note(f"kernels of a prompt of {MOST}", lambda: by_kernel(bench, prefill, MOST))


def rounded(of: Any) -> Any:
    if isinstance(of, dict):
        return {key: rounded(value) for key, value in of.items()}
    return float(f"{of:.4g}") if isinstance(of, float) else of


def equal(step: Sequence[Dispatch], count: int) -> list[Sequence[Dispatch]]:
    size = -(-len(step) // count)
    return [step[at : at + size] for at in range(0, len(step), size)]


def growing(step: Sequence[Dispatch]) -> list[Sequence[Dispatch]]:
    """The first submission is of 8 dispatches, each further one of twice as many as the one before it."""
    parts, at, size = list[Sequence[Dispatch]](), 0, 8
    while at < len(step):
        parts.append(step[at : at + size])
        at, size = at + size, 2 * size
    return parts


def in_parts(bench: Bench, streams: int, parts: Sequence[Sequence[Dispatch]]) -> float:
    """Return the ms of a step that is submitted in these parts, each while the one before it is computed."""
    recorder, slots = bench.model.gpu.recorder, bench.slots[:streams]
    logits = [bench.model.logits(i) for i in range(streams)]

    def step() -> None:
        bench.model.slots.feed(slots, [0] * streams, np.full(streams, 5, np.int32))
        for part in parts[:-1]:
            recorder.submit(part, probed=True)
        recorder.read(parts[-1], logits, probed=True)

    warm(bench.model.gpu, 0.03)
    return 1e3 * median_s(step, 3 if bench.model.gpu.found.software else STEPS)


def unread_ms(bench: Bench, streams: int) -> float:
    """Return the ms that the adapter computes for a step, from steps submitted without a wait between them."""
    recorder, step, count = bench.model.gpu.recorder, bench.step(streams), 8
    small = Region(bench.model.logits(0).buffer, 0, 16)

    def run() -> None:
        for _ in range(count):
            recorder.submit(step)
        recorder.read([], [small])

    empty_s = median_s(lambda: recorder.read([], [small]), 10)
    return 1e3 * (median_s(run, 1 if bench.model.gpu.found.software else 5) - empty_s) / count


def decode_ops(model: Model, tiling: Tiling, streams: int) -> list[Op]:
    made = model._made_of(tiling)
    layers = [op for i in range(len(model.plan.layers)) for op in made.layer(i, streams)]
    return [*made.embedding(), *layers, *made.head(model._logits, model._stride, streams)]


def by_tiling(bench: Bench, tiling: Tiling, streams: int) -> float:
    ops = decode_ops(bench.model, tiling, streams)
    step = bench.model.slots.dispatches(ops, streams, max(1, len(bench.slots[0].pages)))
    warm(bench.model.gpu, 0.05)
    return 1e3 * median_s(lambda: bench.decode(streams, step), 3 if bench.model.gpu.found.software else STEPS)


def by_tile(bench: Bench, tiling: Tiling) -> float:
    model = bench.model
    made, chunked = model._made_of(tiling), tiling.chunked and model._chunked
    layers = [op for i in range(len(model.plan.layers)) for op in made.layer(i, 0, chunked=chunked)]
    ops = [*made.embedding(), *layers, *made.head(model._logits, model._stride, 0)]
    warm(model.gpu, 0.05)
    return MOST / median_s(lambda: bench.prompt(MOST, ops), 1 if model.gpu.found.software else 3)


def by_kernel(bench: Bench, dispatches: Sequence[Dispatch], tokens: int) -> list[dict[str, Any]]:
    """Return the time of each kernel's dispatches, repeated by themselves."""
    opened = bench.model.gpu
    texts = {id(kernel.pipeline): text for text, kernel in opened._kernels.items()}
    small = Region(bench.model.logits(0).buffer, 0, 16)
    groups: dict[int, list[Dispatch]] = {}
    for one in dispatches:
        groups.setdefault(id(one[5][0]), []).append(one)
    empty_s = median_s(lambda: opened.recorder.read([], [small]), 10)
    rows = []
    for key, group in groups.items():
        text = texts[key]
        size = {
            name: int(m[1]) if (m := re.search(rf"const {name} = (\d+)u", text)) else 0
            for name in ("N", "KB", "K", "V_ROWS", "V_BLOCKS")
        }
        times = 1 if opened.found.software else max(1, min(8, 200 // len(group)) // (4 if tokens > 1 else 1))
        repeated = group * times
        seconds = median_s(lambda repeated=repeated: opened.recorder.read(repeated, [small]), 1 if tokens > 1 else 3)
        each = max(0.0, seconds - empty_s) / times / len(group)
        nbytes = 16 * (size["N"] * size["KB"] + size["V_ROWS"] * size["V_BLOCKS"])
        rows.append(
            {"kernel": kind_of(text), "rows": size["N"], "columns": size["K"], "grid": group[0][3:5]}
            | {"count": len(group), "us": 1e6 * each, "all_us": 1e6 * each * len(group)}
            | {"gb_s": nbytes / each / 1e9 if each else 0, "gflop": 2e-9 * size["N"] * size["K"] * tokens}
        )
    return sorted(rows, key=lambda row: -float(row["all_us"]))


def kind_of(text: str) -> str:
    first = next((line for line in text.splitlines() if line.startswith("// ")), text[:60])
    return next((kind for kind, head in zip(_KIND, _HEAD, strict=True) if head in text[:400]), first[3:50])


def daemon(part: Part) -> None:
    """Kill a daemon of a tiny model between two turns, and compare its answers with those of one that runs on."""
    sys.path.insert(0, str(ROOT / "tests"))
    from conftest import opened

    artifact = opened()["wgpu-granite-f32"]
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SSMD_CACHE_DIR"] = str(Path(folder) / "cache")
        begin = time.monotonic()
        killed, control = (DaemonProcess(artifact, Path(folder) / name) for name in ("killed", "control"))
        said: dict[str, list[Any]] = {"killed": [], "control": []}
        messages: list[dict[str, str]] = []

        def turn(one: DaemonProcess, name: str, told: list[dict[str, str]]) -> str:
            options = {"max_tokens": TOKENS, "logit_bias": NO_END, "logprobs": True}
            reply = one.chat(told, **options)
            said[name].append((reply.text, reply.logprobs, reply.usage["ssmd"].get("resume")))
            return reply.text

        with killed:
            part.found["first start s"] = killed.healthy_ms / 1e3
            part.keep()
            for i, question in enumerate(TURNS):
                messages.append({"role": "user", "content": question})
                if i == len(TURNS) - 1:
                    killed.kill()
                    gone = time.monotonic()
                    killed.start()
                    part.found["started again s"] = killed.healthy_ms / 1e3
                answer = turn(killed, "killed", messages)
                if i == len(TURNS) - 1:
                    part.found["from SIGKILL to the whole answer s"] = time.monotonic() - gone
                messages.append({"role": "assistant", "content": answer})
                part.keep()
        tunings = Path(folder) / "killed" / "tunings"
        if tunings.is_dir():  # other tilings sum in another order
            shutil.copytree(tunings, Path(folder) / "control" / "tunings")
        with control:
            for i in range(len(TURNS)):
                turn(control, "control", messages[: 2 * i + 1])
    pairs = list(zip(said["killed"], said["control"], strict=True))
    part.found |= {
        "resume": said["killed"][-1][2],
        "log probabilities": sum(len(a[1]) for a, _ in pairs),
        "that are the same": sum(x == y for a, b in pairs for x, y in zip(a[1], b[1], strict=True)),
        "texts are the same": all(a[0] == b[0] for a, b in pairs),
        "seconds": time.monotonic() - begin,
    }
    part.keep()


def llama(part: Part) -> None:
    if part.asked.llama is None or part.asked.gguf is None:
        part.found["left out"] = "no --llama LIBRARY with --gguf FILE"
        return
    library = Library(part.asked.llama)
    part.found["version"] = library.version
    model = Llama(library, part.asked.gguf, context=1024, streams=8, threads=8)
    ids = [7] * MOST
    model.read(ids)
    part.found["prefill_tok_s"] = MOST / median_s(lambda: model.read(ids), 5)
    for streams in gpu.STREAMS:
        model.split(streams)
        seconds = median_s(lambda streams=streams: model.step([5] * streams), STEPS)
        part.found.setdefault("decode_tok_s", {})[streams] = streams / seconds
        part.keep()
    model.close()


PARTS: dict[str, Callable[[Part], None]] = {f.__name__: f for f in (kernels, granite, daemon, falcon, llama)}


def small() -> None:
    """Shapes of a few layers in place of whole ones, for a software adapter."""
    SHAPES["granite-4.0-h-350m"] |= {"hidden_size": 192, "shared_intermediate_size": 384, "mamba_n_heads": 12}
    SHAPES["granite-4.0-h-350m"] |= {"num_attention_heads": 3, "num_key_value_heads": 1}
    SHAPES["granite-4.0-h-350m"] |= {"num_hidden_layers": 2, "layer_types": ["mamba", "attention"], "vocab_size": 1024}
    SHAPES["falcon-mamba-7b"] |= {"hidden_size": 256, "intermediate_size": 512, "time_step_rank": 16}
    SHAPES["falcon-mamba-7b"] |= {"num_hidden_layers": 1, "vocab_size": 1024}


def report(found: dict[str, Any]) -> str:
    """Return the report of the parts so far, as text."""
    lines = [f"# {found['adapter']}", "", f"{found['conditions']}; wgpu {found['wgpu']}; ssmd {found['commit']}."]
    if found["software"]:
        lines += ["", "**Software: shapes of a few layers; these are no numbers of a GPU.**"]
    parts = found["parts"]
    for name, part in parts.items():
        lines += ["", f"## {name}: {part['how']}, {part['took_s']:.0f} s of {limit_s(name, found['software'])}"]
        if card := part.get("card"):
            lines.append(
                f"Reads {card['read_gb_s']:,.1f} GB/s, copies {card['copy_gb_s']:,.1f}; an empty submission with read "
                f"back {card['empty_ms']:.3f} ms; subgroups of {card['subgroup']}, coherent {card['coherent']}."
            )
            lines += [f"Clocks {when}: {', '.join(card[when].values())}." for when in ("idle", "busy") if card[when]]
        rows = [row for row in part.get("rows", []) if "prefill_tok_s" in row]
        if rows:
            lines += ["", gpu.speeds(rows), ""]
        for row in part.get("rows", []):
            for what, value in row["more"].items():
                head = f"{row.get('model')} {row.get('quant')}, {what}"
                if isinstance(value, list):
                    lines += ["", f"{head}:", "", by_kernel_table(value)]
                else:
                    lines.append(f"{head}: {rounded(value)}")
        known = ("card", "rows", "how", "took_s")
        lines += [f"{key}: {rounded(value)}" for key, value in part.items() if key not in known]
    return "\n".join(lines) + "\n"


def by_kernel_table(rows: Sequence[dict[str, Any]]) -> str:
    head = ["kernel", "rows x columns", "workgroups", "times", "us", "all, us", "GB/s", "TFLOP/s"]
    cells = []
    for r in rows[:14]:
        what = [r["kernel"], f"{r['rows']}x{r['columns']}", "x".join(map(str, r["grid"])), str(r["count"])]
        tflop_s = 1e3 * r["gflop"] / r["us"] if r["us"] else 0.0
        cells.append([*what, f"{r['us']:.1f}", f"{r['all_us']:.0f}", f"{r['gb_s']:.0f}", f"{tflop_s:.2f}"])
    return table(head, cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=LIMITS)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu")
    parser.add_argument("--device")
    parser.add_argument("--llama", type=Path)
    parser.add_argument("--gguf", type=Path)
    parser.add_argument("--part", choices=LIMITS, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    adapter = choose_adapter(asked.device)
    if adapter.software:
        small()
    if asked.part:
        part = Part(asked.part, asked)
        PARTS[asked.part](part)
        part.keep()
        return
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    found: dict[str, Any] = {"adapter": adapter.description, "software": adapter.software, "parts": {}}
    found |= {"conditions": conditions() if platform.system() == "Linux" else platform.platform()}
    found |= {"wgpu": package_version(), "commit": commit.stdout.strip() or "of no commit"}
    for name in asked.only or [n for n in LIMITS if n != "llama" or asked.llama]:
        found["parts"][name] = run(name, asked, limit_s(name, adapter.software))
        (asked.out / "report.json").write_text(json.dumps(found, indent=1))
        (asked.out / "report.md").write_text(report(found))
    print(report(found))
    sys.exit(any(part["how"] != "done" for part in found["parts"].values()))


def run(name: str, asked: argparse.Namespace, limit: int) -> dict[str, Any]:
    """Run a part in a process of its own and return what it found, be it killed at its limit."""
    file = asked.out / f"{name}.json"
    file.unlink(missing_ok=True)
    command = [sys.executable, __file__, "--part", name, "--out", str(asked.out)]
    for option in ("device", "llama", "gguf"):
        if (value := getattr(asked, option)) is not None:
            command += [f"--{option}", str(value)]
    print(f"==> {name}", flush=True)
    begin, how = time.monotonic(), "done"
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        said = process.communicate(timeout=limit)[1]
        if process.returncode:
            how = f"failed: {said[-1500:]}"
    except subprocess.TimeoutExpired:
        how = "stopped at its limit"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, 9)
            process.communicate()
    part = {"how": how, "took_s": time.monotonic() - begin}
    if file.exists():
        part |= json.loads(file.read_text(), object_hook=numbered)
        file.unlink()
    return part


def numbered(of: dict[str, Any]) -> dict[Any, Any]:
    """Numbers as keys, which JSON writes as texts."""
    return {int(key) if key.isdecimal() else key: value for key, value in of.items()}


if __name__ == "__main__":
    main()
