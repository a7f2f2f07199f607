"""Ollama's discovery: version, tags, show, ps; names with tags; pulls, removals; requests in clients' shapes."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from api.test_ollama import lines_of, options, user, whole_of
from conftest import TinyArtifacts
from daemon import NO_END, Daemon, daemon, soon
from several import LLAMA, OTHER, Several, models_folder, several

from ssmd.api.ollama import models as ollama_models
from ssmd.api.ollama import pulls as ollama_pulls
from ssmd.api.ollama.models import VERSION
from ssmd.api.own import pulls as own_pulls
from ssmd.config import Settings
from ssmd.daemon.pulls import Pull, Pulls
from ssmd.engine.host.models import untagged

Fields = dict[str, Any]
HTML = {"accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}


def get(one: Several, path: str) -> Any:
    answer = one.ask("GET", path)
    assert answer.status == 200, answer.body
    return answer.json


def shown(one: Several, name: str) -> Fields:
    answer = one.ask("POST", "/api/show", {"model": name})
    assert answer.status == 200, answer.body
    found: Fields = answer.json
    return found


def test_what_vscode_asks(three: Several) -> None:
    """Version, tags, a show for each model, and a chat over OpenAI's interface with the name that tags has."""
    version = tuple(map(int, get(three, "/api/version")["version"].split(".")))
    assert version >= (0, 6, 4)
    names = [entry["model"] for entry in get(three, "/api/tags")["models"]]
    assert names == ["granite:latest", "llama:latest"]
    for name in names:
        info = shown(three, name)
        architecture = info["model_info"]["general.architecture"]
        assert info["model_info"]["general.basename"] == name.removesuffix(":latest")
        assert info["model_info"][f"{architecture}.context_length"] > 100
        assert "tools" in info["capabilities"]
        assert three.chat(name).status == 200


def test_tags_have_the_fields_that_zed_requires(three: Several) -> None:
    for entry in get(three, "/api/tags")["models"]:
        assert datetime.fromisoformat(entry["modified_at"]).tzinfo is UTC
        assert entry["size"] > 1000
        assert re.fullmatch("[0-9a-f]{64}", entry["digest"])
        details = entry["details"]
        assert all(type(details[name]) is str for name in ("format", "family", "parameter_size", "quantization_level"))
        assert details["families"] == [details["family"]]
        assert entry["name"] == entry["model"]


def test_show_has_the_template_and_what_a_model_can(three: Several) -> None:
    info = shown(three, "llama")
    assert "messages" in info["template"]
    assert info["capabilities"] == ["completion", "tools"]
    assert info["details"]["family"] == "llama"
    assert three.ask("POST", "/api/show", {"name": "llama:latest", "verbose": True, "system": "x"}).json == info


def test_the_capabilities_follow_from_the_template() -> None:
    def able(name: str, template: str) -> list[str]:
        return ollama_models._capabilities(name, template)

    templates = Path(__file__).parents[1] / "data" / "templates"
    assert able("qwen3", (templates / "qwen3.jinja").read_text("utf-8")) == ["completion", "tools", "thinking"]
    assert able("smollm2", (templates / "smollm2.jinja").read_text("utf-8")) == ["completion", "tools"]
    assert able("mamba2-130m", "{{ messages }}") == ["completion"]
    assert [ollama_models._parameters(name) for name in ("qwen3-0.6b", "smollm2", "lfm2-350m", "own")] == [
        *("0.6B", "135M", "350M", "")
    ]


def test_ps_lists_what_is_loaded(three: Several) -> None:
    assert get(three, "/api/ps") == {"models": []}
    body = {"model": "llama", "messages": [user("a")], "options": options(num_predict=1), "stream": False}
    whole_of(three.ask("POST", "/api/chat", {**body, "keep_alive": "10m"}))
    [row] = get(three, "/api/ps")["models"]
    until = datetime.fromisoformat(row["expires_at"])
    assert 500 < (until - datetime.now(UTC)).total_seconds() <= 600
    assert (row["name"], row["size_vram"]) == ("llama:latest", 0)
    assert row["size"] > 0
    assert row["context_length"] == three.row(three.host.shelf.find("llama").id)["context"]
    whole_of(three.ask("POST", "/api/chat", {**body, "keep_alive": -1}))
    three.ask("POST", "/api/chat", {**body, "model": OTHER if "litert" in three.host.shelf.find("llama").id else LLAMA})
    rows = {row["name"]: row for row in get(three, "/api/ps")["models"]}
    assert rows["llama:latest"]["expires_at"].startswith("9999-")
    assert len(rows) == 2
    assert all(name == "llama:latest" or name.startswith("llama@") for name in rows)


def test_a_tag_is_part_of_a_name_or_latest(three: Several) -> None:
    find = three.host.shelf.find
    assert find("llama:latest") is find("llama")
    assert find(f"{OTHER}:latest") is find(OTHER)
    assert untagged("granite-4.0-h:350m") == "granite-4.0-h-350m"
    assert untagged("qwen3:0.6b") == "qwen3-0.6b"
    for path, body in (("/api/chat", {"messages": [user("a")]}), ("/api/generate", {"prompt": "a"})):
        asked = {"model": "llama:latest", "stream": False, "options": options(num_predict=1), **body}
        assert whole_of(three.ask("POST", path, asked))["model"] == "llama:latest", "as the client named it"
    unknown = three.ask("POST", "/api/chat", {"model": "llama:7b", "messages": [user("a")]})
    assert (unknown.status, "llama:7b" in unknown.json["error"]) == (404, True)
    assert three.chat("llama:latest").json["model"] == "llama"


# The root


def test_the_root_is_ollamas_for_a_client_that_wants_no_page(three: Several) -> None:
    for accept in ({}, {"accept": "*/*"}, {"accept": "application/json"}):
        answer = three.ask("GET", "/", headers=accept)
        assert (answer.status, answer.body) == (200, b"Ollama is running")
        assert answer.headers["content-type"].startswith("text/plain")
        assert three.ask("HEAD", "/", headers=accept).status == 200
    page = three.ask("GET", "/", headers=HTML)
    assert page.body.startswith(b"<!doctype html>")
    assert page.headers["vary"] == answer.headers["vary"] == "accept"
    assert three.ask("GET", "/", headers={**HTML, "if-none-match": page.headers["etag"]}).status == 304


def test_any_base_of_a_client_is_answered(three: Several) -> None:
    for path in ("//api/version", "/api/version/", "/v1/api/version", "/api/api/version", "/v1//api/version/"):
        assert get(three, path)["version"] == VERSION
    assert three.ask("GET", "/x/api/version").status == 404


# Pulls


class Script:
    """Takes the place of a pull's process: it does one step for each call of `go`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *steps: Fields, code: int = 0) -> None:
        def run(pulls: Pulls, pull: Pull, errors: Any) -> int:
            for step in steps:
                pulls._hear(pull, json.dumps({"done": None, "total": None, "unit": None, **step}).encode())
                time.sleep(0.5)
            errors.write(b"error: the hub at /home/x is away" if code else b"")
            return code

        monkeypatch.setattr(Pulls, "_pull", run)


def test_a_pull_tells_its_progress(three: Several, monkeypatch: pytest.MonkeyPatch) -> None:
    Script(monkeypatch, {"stage": "fetching"}, {"stage": "weights", "done": 5, "total": 9, "unit": "bytes"})
    answer = three.ask("POST", "/api/pull", {"model": "smollm2:latest", "insecure": True})
    assert answer.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in answer.body.splitlines()]
    assert lines[-1] == {"status": "success"}
    assert {"status": "fetching"} in lines
    [counted] = [line for line in lines if "total" in line]
    [row] = three.ask("GET", "/ssmd/v1/pulls").json["data"]
    assert counted == {"status": "weights", "digest": row["id"], "total": 9, "completed": 5}
    assert (row["model"], row["state"]) == ("smollm2", "done")
    whole = three.ask("POST", "/api/pull", {"name": "smollm2", "stream": False})
    assert (whole.status, whole.json) == (200, {"status": "success"})


@pytest.mark.parametrize("name", [":latest", ":", "@", "smollm2@litert", "x" * 4096, "../smollm2", "hf.co/a/b"])
def test_a_name_that_cannot_be_pulled_is_refused(three: Several, name: str) -> None:
    answer = three.ask("POST", "/api/pull", {"model": name})
    assert answer.status == 400, answer.body
    assert list(answer.json) == ["error"]


def test_a_silent_pull_is_filled_with_spaces(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Script(monkeypatch, {"stage": "fetching"}, {"stage": "fetching"}, {"stage": "fetching"})
    with several(models, stream_comment=0.05) as one:
        lines = one.ask("POST", "/api/pull", {"model": "smollm2"}).body.splitlines()
    assert any(line.startswith(b" ") for line in lines)
    assert [json.loads(line)["status"] for line in lines][-2:] == ["fetching", "success"]


@pytest.mark.parametrize("stream", [True, False])
def test_waiting_for_a_pull_reads_it_when_it_changes(
    models: Path, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """Hundreds of clients may wait for one, each of which looks five times a second in the event loop."""
    Script(monkeypatch, *[{"stage": "fetching"}] * 4)
    monkeypatch.setattr(ollama_pulls, "_LOOK_S", 0.001)
    read: list[str] = []
    told = own_pulls._told

    def counted(row: Fields) -> Fields:
        read.append(row["id"])
        return told(row)

    monkeypatch.setattr(own_pulls, "_told", counted)
    with several(models) as one:
        assert one.ask("POST", "/api/pull", {"model": "smollm2", "stream": stream}).status == 200
    assert len(read) < 12


def test_a_pull_that_fails_says_why(three: Several, monkeypatch: pytest.MonkeyPatch) -> None:
    Script(monkeypatch, {"stage": "fetching"}, code=1)
    lines = three.ask("POST", "/api/pull", {"model": "qwen3:0.6b"}).body.splitlines()
    said = json.loads(lines[-1])["error"]
    assert "qwen3-0.6b could not be pulled: the hub at … is away" in said
    whole = three.ask("POST", "/api/pull", {"model": "qwen3:0.6b", "stream": False})
    assert (whole.status, whole.json) == (500, {"error": said})


def test_a_pull_goes_on_when_its_client_leaves(three: Several, monkeypatch: pytest.MonkeyPatch) -> None:
    Script(monkeypatch, {"stage": "fetching"}, {"stage": "weights"})
    raw = b'{"model": "smollm2"}'
    head = f"POST /api/pull HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(raw)}\r\n\r\n".encode()
    with three.served.connect(head + raw) as one:
        assert b"200 OK" in one.recv(1 << 16)

    def states() -> list[str]:
        return [row["state"] for row in three.ask("GET", "/ssmd/v1/pulls").json["data"]]

    assert states() in (["waiting"], ["running"])
    soon(lambda: states() == ["done"])


# Removals


def test_a_model_is_removed_as_by_rm(three: Several) -> None:
    whole_of(three.ask("POST", "/api/chat", {"model": "granite"}))
    kept = sorted(path for path in three.models.rglob("*") if "granite" not in str(path))
    answer = three.ask("DELETE", "/api/delete", {"model": "granite:latest"})
    assert (answer.status, answer.body) == (200, b"")
    assert not (three.models / "granite").exists()
    assert sorted(three.models.rglob("*")) == kept
    assert [entry["name"] for entry in get(three, "/api/tags")["models"]] == ["llama:latest"]
    soon(lambda: get(three, "/api/ps") == {"models": []})
    assert three.ask("DELETE", "/api/delete", {"model": "granite"}).status == 404


def test_one_runtime_of_a_model_is_removed(three: Several) -> None:
    path = three.host.shelf.find(OTHER).path
    assert three.ask("DELETE", "/api/delete", {"name": OTHER}).status == 200
    assert not path.exists()
    assert three.host.shelf.find("llama").id == LLAMA


def test_no_model_is_removed_by_another_name_of_it(three: Several) -> None:
    """Folders of several models have one name, such as litert-cpu-f32: each is found by it, none is removed."""
    before = sorted(three.models.rglob("*"))
    for model in three.host.shelf.models():
        for name in (model.path.name, f"{model.path.name}:latest", f"{model.path.name}@{model.manifest.runtime}"):
            answer = three.ask("DELETE", "/api/delete", {"model": name})
            assert answer.status == 404, (name, answer.body)
    assert sorted(three.models.rglob("*")) == before


@pytest.mark.parametrize("name", ["..", "../data", "/etc", "granite/..", "granite\\..", ".", "", "~", "gran*"])
def test_no_other_folder_is_removed(three: Several, name: str) -> None:
    before = sorted(three.models.parent.rglob("*"))
    answer = three.ask("DELETE", "/api/delete", {"model": name})
    assert answer.status in (400, 404), answer.body
    assert sorted(three.models.parent.rglob("*")) == before


def test_a_link_to_a_model_is_not_followed(artifacts: TinyArtifacts, tmp_path: Path) -> None:
    folder = models_folder(artifacts, tmp_path / "models")
    outside = tmp_path / "outside"
    shutil.move(folder / "granite", outside)
    os.symlink(outside, folder / "granite")
    with several(folder) as one:
        answer = one.ask("DELETE", "/api/delete", {"model": "granite"})
        assert (answer.status, "is a link" in answer.json["error"]) == (400, True)
        assert str(tmp_path) not in answer.json["error"]
        assert any(outside.rglob("artifact.json"))


def test_a_model_elsewhere_is_not_removed(artifacts: TinyArtifacts, tmp_path: Path) -> None:
    """A daemon of one folder removes neither that, nor a model of its name that is installed."""
    folder = models_folder(artifacts, tmp_path / "models")
    with daemon(artifacts["llama-f32"], None, settings=Settings(models_dir=folder)) as one:
        answer = one.served.ask("DELETE", "/api/delete", {"model": one.model})
        assert (answer.status, "cannot be removed here" in answer.json["error"]) == (400, True)
    assert (folder / "llama").exists()
    assert artifacts["llama-f32"].exists()


# Recorded requests

CLIENTS: dict[str, tuple[str, Fields]] = {
    "ollama-python": (
        "/api/chat",
        {
            "stream": False,
            "options": {"num_ctx": 4096, "temperature": 0},
            "keep_alive": "5m",
            "messages": [user("hi")],
            "tools": [
                {
                    "type": "function",
                    "function": {
                        "name": "run_shell_command",
                        "description": "Runs a command",
                        "parameters": {
                            "type": "object",
                            "properties": {"command": {"type": "string"}},
                            "required": ["command"],
                        },
                    },
                }
            ],
            "think": False,
        },
    ),
    "ollama-python, streamed": (
        "/api/chat",
        {"stream": True, "format": {"type": "object"}, "messages": [user("hi")], "tools": []},
    ),
    "Home Assistant": (
        "/api/chat",
        {
            "stream": True,
            "options": {"num_ctx": 8192},
            "keep_alive": "-1s",
            "think": False,
            "format": None,
            "tools": [
                {
                    "type": "function",
                    "function": {
                        "name": "HassTurnOn",
                        "description": "Turns on",
                        "parameters": {
                            "type": "object",
                            "properties": {
                                "name": {"type": "string"},
                                "domain": {"type": "array", "items": {"type": "string"}},
                            },
                            "required": [],
                        },
                    },
                }
            ],
            "messages": [
                {"role": "system", "content": "Current time is 10:31:00. You control the house."},
                user("Turn on the lamp"),
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [{"function": {"name": "HassTurnOn", "arguments": {"name": "lamp"}}}],
                },
                {"role": "tool", "content": '{"success": true}'},
            ],
        },
    ),
    "Zed": (
        "/api/chat",
        {
            "stream": True,
            "keep_alive": -1,
            "options": {"num_ctx": 8192, "stop": [], "temperature": 1.0},
            "think": None,
            "tools": [],
            "messages": [
                {"role": "system", "content": "You are an agent."},
                {"role": "user", "content": "List the files"},
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [
                        {"id": "call_a", "function": {"name": "list_directory", "arguments": {"path": "."}}}
                    ],
                    "images": None,
                    "thinking": None,
                },
                {"role": "tool", "tool_name": "list_directory", "content": "a.txt"},
            ],
        },
    ),
    "Open WebUI": (
        "/api/chat",
        {
            "stream": True,
            "options": {"temperature": 0.8, "num_ctx": 2048, "stop": ["###"], "num_keep": 24},
            "format": None,
            "keep_alive": None,
            "messages": [user("hi"), {"role": "assistant", "content": "hello"}, {"role": "user", "content": "and?"}],
        },
    ),
    "langchain-ollama": (
        "/api/chat",
        {
            "stream": True,
            "options": {"mirostat": None, "num_predict": None, "temperature": 0.0, "top_k": None},
            "format": "",
            "keep_alive": None,
            "think": None,
            "messages": [{"role": "user", "content": "hi", "images": []}],
        },
    ),
    "an older client of prompts": (
        "/api/generate",
        {"prompt": "hi", "system": "", "template": "", "context": [], "options": {"num_thread": 8}, "suffix": ""},
    ),
}


@pytest.fixture(scope="module")
def tiny(artifacts: TinyArtifacts) -> Iterator[Daemon]:
    with daemon(artifacts["mamba-f32"], None) as one:
        yield one


@pytest.mark.parametrize("client", CLIENTS)
def test_a_request_in_a_clients_shape_is_answered(tiny: Daemon, client: str) -> None:
    """ollama-python's shape was recorded; the others were written by what is known of these programs."""
    path, body = CLIENTS[client]
    asked = {**body, "model": f"{tiny.model}:latest"}
    asked["options"] = {**(body.get("options") or {}), "num_predict": 4, "logit_bias": NO_END}
    answer = tiny.served.ask("POST", path, asked)
    last = whole_of(answer) if body.get("stream") is False else lines_of(answer)[-1]
    assert last["eval_count"] == 4 or "format" in body
    ignored = set(last["ssmd"].get("ignored", []))
    assert ignored <= {"options.num_ctx", "options.num_keep", "options.num_thread"}
