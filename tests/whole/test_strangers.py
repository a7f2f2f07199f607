"""A stranger's artifact in a real daemon: what its template, tokenizer or model does ends one request, or one start."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import commands
import numpy as np
import pytest
from conftest import TinyArtifacts
from mutants import mutant, reseal
from noted import note_all
from serving import Answer, Served
from several import LLAMA, models_folder
from strangers import GROWS, SLOW, TAKES_LONG, forged, hostile, replacing
from test_server import CHAT, environment, long_stream, running, start

from ssmd.model.artifact import Artifact
from ssmd.model.made import is_made_here
from ssmd.runtime.loading import TIMES
from ssmd.runtime.trial import probed

linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux says so much of a process")
TEMPLATE = (
    "{% if 'strip' in messages[0].content %}{{ ('a' * 900000).strip('b' * 900000 ~ 'a') }}{% endif %}"
    "{% if 'hashes' in messages[0].content %}{{ dict.fromkeys(range(0, 99000 * (2**61 - 1), 2**61 - 1)) }}{% endif %}"
    "{% if 'wrong' in messages[0].content %}{% call(x) dict() %}{% endcall %}{% endif %}"
    "{{ messages[0].content }}"
)
REFUSALS = {
    "strip": "makes a value of more than",
    "hashes": "runs for more than 1 s",
    "wrong": "expected str instance, dict found",
    "boom": "more than 2.1 GB of memory, or crashed",
}


@pytest.fixture(scope="module")
def artifact(artifacts: TinyArtifacts, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model whose template and tokenizer are bombs that a trigger word sets off."""
    path = artifacts["llama-f32"]
    tokenizer = hostile(path / "tokenizer.json", replacing(*GROWS, TAKES_LONG))
    files = {"tokenizer.json": tokenizer, "chat_template.jinja": TEMPLATE.encode()}
    return forged(path, tmp_path_factory.mktemp("strangers") / "llama", files)


def ask(served: Served, content: str) -> Answer:
    model = served.ask("GET", "/v1/models").json["data"][0]["id"]
    body = {"model": model, "messages": [{"role": "user", "content": content}], "max_tokens": 4, "temperature": 0}
    return served.ask("POST", CHAT, body)


def text_of(answer: Answer) -> str:
    assert answer.status == 200, answer.body
    return str(answer.json["choices"][0]["message"]["content"])


class Asking(threading.Thread):
    """A request under way."""

    def __init__(self, served: Served, content: str) -> None:
        super().__init__()
        self._served, self._content = served, content
        self.answer: Answer | None = None
        self.start()

    def run(self) -> None:
        with suppress(OSError):
            self.answer = ask(self._served, self._content)

    def refused(self) -> Answer:
        self.join(60)
        assert self.answer is not None
        return self.answer


def gaps(stream: socket.socket) -> Iterator[tuple[float, bytes]]:
    last, end = time.monotonic(), b""
    while not end.endswith(b"\r\n0\r\n\r\n") and (part := stream.recv(65536)):
        now, end = time.monotonic(), (end + part)[-8:]
        yield now - last, part
        last = now


def most_resident(process: int) -> int:
    found = re.search(r"VmHWM:\s*(\d+) kB", Path(f"/proc/{process}/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def children(process: int) -> list[int]:
    found = Path(f"/proc/{process}/task").glob("*/children")
    return [int(child) for file in found for child in file.read_text().split()]


def until_busy(process: int) -> None:
    """Wait until a process computes."""

    def used() -> int:
        return sum(map(int, Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11:13]))

    before = used()
    while used() < before + 20:
        time.sleep(0.02)


@linux
def test_bombs_end_one_request_and_no_stream(artifact: Path, tmp_path: Path) -> None:
    with running(tmp_path, str(artifact), foreign=True) as (process, served):
        good = text_of(ask(served, "good"))
        before = most_resident(process.pid)
        model = served.ask("GET", "/v1/models").json["data"][0]["id"]
        for word, said in REFUSALS.items():
            with long_stream(served, model) as stream:
                asking, received, longest = Asking(served, word), b"", 0.0
                for gap, part in gaps(stream):
                    received += part
                    longest = max(longest, gap)
                refused = asking.refused()
            assert b"data: [DONE]" in received, received[-200:]
            assert longest < 5, "of a busy machine; a bomb in the daemon stops a stream for all it takes"
            assert (refused.status, refused.error["param"]) == (400, "messages"), word
            assert said in refused.error["message"], word
            assert text_of(ask(served, "good")) == good, word
        assert most_resident(process.pid) < before + (200 << 20)


@linux
@pytest.mark.parametrize("ended", ["the child", "the daemon", "politely"])
def test_who_is_ended_in_the_midst_of_a_job(artifact: Path, tmp_path: Path, ended: str) -> None:
    """The child: one request has an error. The daemon: no child is left. By SIGTERM: it goes on at once, and ends."""
    with running(tmp_path, str(artifact), foreign=True) as (process, served):
        good = text_of(ask(served, "good"))
        [child] = children(process.pid)
        asking = Asking(served, SLOW * 20_000)
        until_busy(child)
        started = time.monotonic()
        if ended == "the child":
            os.kill(child, signal.SIGKILL)
            refused = asking.refused()
            assert (refused.status, refused.error["param"]) == (400, "messages")
            assert "crashed (SIGKILL)" in refused.error["message"]
            assert text_of(ask(served, "good")) == good
            return
        process.send_signal(signal.SIGKILL if ended == "the daemon" else signal.SIGTERM)
        process.wait(20)
        asking.join(20)
        if ended == "politely":
            assert asking.refused().error["code"] == "shutting_down"
        while Path(f"/proc/{child}").exists():
            assert time.monotonic() - started < 5, "the child is still there"
            time.sleep(0.02)


@pytest.mark.parametrize("foreign", [True, False])
def test_no_ids_and_ids_that_the_model_has_not_are_refused(
    artifacts: TinyArtifacts, tmp_path: Path, foreign: bool
) -> None:
    path = artifacts["llama-f32"]
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": 384, "content": "beyond", "special": False})
    files = {"tokenizer.json": json.dumps(tokenizer).encode()}
    files["chat_template.jinja"] = b"{% if messages[-1].content != 'nothing' %}{{ messages[-1].content }}{% endif %}"
    with running(tmp_path, str(forged(path, tmp_path / "odd", files)), foreign=foreign) as (_, served):
        for word, said in (
            ("nothing", "renders these messages as an empty prompt"),
            ("beyond", "makes token 384 of these"),
        ):
            refused = ask(served, word)
            assert (refused.status, refused.error["param"]) == (400, "messages"), refused.body
            assert said in refused.error["message"]
        assert ask(served, "good").status == 200


@pytest.mark.full
def test_a_text_that_takes_long_to_read_is_given_up(artifact: Path, tmp_path: Path) -> None:
    with running(tmp_path, str(artifact), foreign=True) as (_, served):
        refused = ask(served, SLOW * 20_000)
        assert refused.status == 400
        assert "more than 10 s of processor time" in refused.error["message"]
        assert ask(served, "good").status == 200


def test_what_cannot_be_opened_is_not_served(artifacts: TinyArtifacts, tmp_path: Path) -> None:
    path = artifacts["llama-f32"]
    much = hostile(path / "tokenizer.json", replacing(*[({"String": "a"}, "a" * 1000)] * 3))
    process = start(tmp_path, str(forged(path, tmp_path / "b", {"tokenizer.json": much})), foreign=True)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    last = err.strip().splitlines()[-1]
    assert last.startswith("error: ")
    assert "cannot be opened: it took more than 2.1 GB of memory, or crashed" in last


def test_a_build_tries_the_texts_first_and_notes_what_it_made(artifacts: TinyArtifacts, tmp_path: Path) -> None:
    source, env = Path(shutil.copytree(artifacts.source("llama-f32"), tmp_path / "one")), environment(tmp_path)
    build = ("build", str(source), "--runtime", "wgpu")
    done = commands.ssmd(*build, env=env)
    assert done.returncode == 0, done.stderr
    [made] = (tmp_path / "data" / "models" / "one").iterdir()
    assert is_made_here(made, tmp_path / "data")
    tokenizer = source / "tokenizer.json"
    tokenizer.write_bytes(hostile(tokenizer, replacing(*[({"String": "a"}, "a" * 1000)] * 3)))
    refused = commands.ssmd(*build, "--force", env=env)
    assert refused.returncode == 1
    assert "cannot be opened: it took more than 2.1 GB of memory, or crashed" in refused.stderr
    assert is_made_here(made, tmp_path / "data")


def mutated(data: bytes, seed: int) -> bytes:
    """A file in which bytes were changed, numbers are too large, or which was cut."""
    rng = random.Random(seed)
    made = bytearray(data)
    for _ in range(rng.choice((1, 4, 64))):
        most = len(made) - 8
        at = rng.randrange(8, most if rng.random() < 0.5 else min(4096, most))
        made[at : at + 4] = rng.choice((b"\xff\xff\xff\x7f", b"\0\0\0\x80", rng.randbytes(4), b"\0\0\0\0"))
    return bytes(made[: rng.randrange(16, len(made))] if rng.random() < 0.2 else made)


def verify(artifact: Path, tmp_path: Path, *, foreign: bool = True) -> subprocess.CompletedProcess[str]:
    env = {**environment(tmp_path), "SSMD_CACHE_DIR": str(tmp_path / "cache")}
    return commands.ssmd("verify", str(artifact), env=env, foreign=foreign)


def out_of_range(model: bytes, signature: str) -> bytes:
    """A .tflite file one of whose signatures looks its positions up far beyond the table."""
    import flatbuffers
    from ai_edge_litert import schema_py_generated as schema

    made = schema.ModelT.InitFromPackedBuf(model)
    [graph] = [made.subgraphs[s.subgraphIndex] for s in made.signatureDefs if s.signatureKey.decode() == signature]
    length = int(signature.split("_")[1])
    counts = np.arange(length, dtype=np.int32)

    def counts_up(data: Any) -> bool:
        return data is not None and np.array_equal(np.asarray(data, np.uint8), counts.view(np.uint8))

    [counted] = [t for t in graph.tensors if counts_up(made.buffers[t.buffer].data) and list(t.shape) == [length]]
    for buffer in made.buffers:
        if buffer.size > 1:  # after the flatbuffer, whose length changes
            buffer.data = np.frombuffer(model, np.uint8, buffer.size, buffer.offset)
            buffer.offset = buffer.size = 0
    counted.buffer = len(made.buffers)
    made.buffers.append(schema.BufferT())
    made.buffers[-1].data = (counts - 1_000_000_000).view(np.uint8)
    builder = flatbuffers.Builder(len(model))
    builder.Finish(made.Pack(builder), b"TFL3")
    return bytes(builder.Output())


def test_every_signature_is_tried_at_the_first_load(artifacts: TinyArtifacts, tmp_path: Path) -> None:
    """Also those that golden values do not need."""
    path = artifacts["llama-f32"]
    model = out_of_range((path / "model.tflite").read_bytes(), "prefill_64")
    bad = forged(path, tmp_path / "bad", {"model.tflite": model})
    (tmp_path / "here").mkdir()
    assert verify(bad, tmp_path / "here", foreign=False).returncode == 0, "golden values do not need it"
    done = verify(bad, tmp_path)
    assert done.returncode == 1
    assert "LiteRtRunCompiledModel failed with status" in done.stderr, done.stderr


FEW = (0,)


@pytest.mark.parametrize("seed", [pytest.param(n, marks=[] if n in FEW else [pytest.mark.full]) for n in range(50)])
@pytest.mark.parametrize(
    ("model", "name"),
    [("llama-f32", "model.tflite"), ("openvino-llama-f32", "model.xml"), ("openvino-llama-f32", "model.bin")],
)
def test_a_mutated_model_computes_what_it_should_or_is_an_error(
    artifacts: TinyArtifacts, tmp_path: Path, model: str, name: str, seed: int
) -> None:
    path = artifacts[model]
    bad = forged(path, tmp_path / "bad", {name: mutated((path / name).read_bytes(), seed)})
    done = verify(bad, tmp_path)
    assert done.returncode in (0, 1), done
    if done.returncode:
        assert [line.startswith("error: ") for line in done.stderr.strip().splitlines()[1:]] == [True], done.stderr


def test_the_verdict_is_kept_and_a_damaged_one_does_not_count(artifacts: TinyArtifacts, tmp_path: Path) -> None:
    path = artifacts["llama-f32"]
    first, again = verify(path, tmp_path), verify(path, tmp_path)
    assert (first.returncode, "first load on cpu" in first.stderr) == (0, True), first
    assert (again.returncode, "first load on cpu" in again.stderr) == (0, False), again
    [verdict] = (tmp_path / "cache" / "first-loads").glob("*/verdict.json")
    verdict.write_bytes(b"[" * 100_000)
    tried = verify(path, tmp_path)
    assert (tried.returncode, "first load on cpu" in tried.stderr) == (0, True), tried
    verdict.write_text(json.dumps({"passed": False, "why": "it crashed"}))
    refused = verify(path, tmp_path)
    assert refused.returncode == 1
    assert "was not made here, was tried in a process of its own, and it crashed" in refused.stderr


def test_health_and_ps_report_the_stage_of_a_first_load(artifacts: TinyArtifacts, tmp_path: Path) -> None:
    models, extra = models_folder(artifacts, tmp_path / "models"), {"SSMD_CACHE_DIR": str(tmp_path / "cache")}
    env = environment(tmp_path / "strange", **extra)  # so its data directory does not know the models
    with start(tmp_path / "strange", "--models-dir", str(models), foreign=True, extra=extra) as process:
        try:
            assert process.stdout is not None
            served = Served(int(process.stdout.readline().rpartition(":")[2].partition("/")[0]))
            assert served.ask("GET", "/health").json["loading"] == []
            body = {"model": LLAMA, "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
            asking = threading.Thread(target=served.ask, args=("POST", CHAT, body))
            asking.start()
            seen, listed = dict[str, float](), ""
            while asking.is_alive():
                for one in served.ask("GET", "/health").json["loading"]:
                    assert (one["model"], served.ask("GET", "/health").json["status"]) == (LLAMA, "ok")
                    seen.setdefault(str(one["stage"]), one["seconds"])
                if any("trial load 2" in stage for stage in seen) and not listed:
                    listed = commands.ssmd("ps", env=env).stdout
                time.sleep(0.02)
            health = served.ask("GET", "/health").json
        finally:
            process.kill()
    trials = [f"trial load {n} of {TIMES} on cpu, in a process of its own, with golden values" for n in range(1, 6)]
    assert [stage for stage in seen if "trial" in stage] == trials
    assert list(seen.values()) == sorted(seen.values())
    assert re.search(r"llama@litert .*loading: trial load \d of 5 on cpu", listed)
    assert (health["model"], health["loading"]) == ("llama", [])


def test_a_daemon_serves_its_other_models_beside_mutants(artifacts: TinyArtifacts, tmp_path: Path) -> None:
    path, models = artifacts["llama-f32"], tmp_path / "models"
    shutil.copytree(path, models / "good" / path.name)
    note_all([str(models / "good")], tmp_path / "data")
    said = {"crash": "was tried in a process of its own, and ", "infinite": "has the number inf", "hole": "all a hole"}
    for name in said:
        (models / name).mkdir()
    mutant(path, models / "crash" / "one", 14)
    shutil.copytree(path, models / "infinite" / "one")
    reseal(models / "infinite" / "one", lambda whole: whole["state"][0].update(layer=float("inf")))
    mutant(path, models / "hole" / "one", 25)
    extra = {"SSMD_CACHE_DIR": str(tmp_path / "cache")}
    with start(tmp_path, "--models-dir", str(models), foreign=True, extra=extra) as process:
        try:
            assert process.stdout is not None
            served = Served(int(process.stdout.readline().rpartition(":")[2].partition("/")[0]))
            body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
            for name, why in said.items():
                refused = served.ask("POST", CHAT, {**body, "model": name})
                assert refused.status == 503, refused.body
                assert name in refused.error["message"]
                assert why in refused.error["message"]
                assert served.ask("POST", CHAT, {**body, "model": "good"}).status == 200
            listed = [one["id"] for one in served.ask("GET", "/v1/models").json["data"]]
            assert {"good", "crash"} <= set(listed)
        finally:
            process.kill()


def test_what_was_made_here_is_loaded_at_once(artifacts: TinyArtifacts, tmp_path: Path) -> None:
    done = verify(artifacts["llama-f32"], tmp_path, foreign=False)
    assert (done.returncode, done.stderr.count("first load")) == (0, 0)
    assert not (tmp_path / "cache" / "first-loads").exists()


def test_a_model_that_crashes_at_times_is_tried_more_than_once(tmp_path: Path, artifacts: TinyArtifacts) -> None:
    """One of 210 mutated models passed the first try, and crashed in the daemon: it reads outside of its file."""
    tried = tmp_path / "tried"
    tried.mkdir()
    code = "import os, sys; n = len(os.listdir(sys.argv[1])); open(f'{sys.argv[1]}/{n}', 'w'); n > 2 and os.abort(); "
    command = [sys.executable, "-c", code + 'print(\'{"passed": true, "why": ""}\')', str(tried)]
    artifact = Artifact.open(artifacts["llama-f32"])
    assert probed(command, artifact, "cpu", tmp_path / "once").passed
    verdict = probed(command, artifact, "cpu", tmp_path / "often", times=TIMES)
    assert (verdict.passed, verdict.why, len(list(tried.iterdir()))) == (False, "it crashed (SIGABRT)", 4)
