"""Models that a daemon pulls while it runs: one after the other, with progress, and nothing half made left behind."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mirror
import pytest
from conftest import TinyArtifacts
from daemon import soon
from keyfile import bearer, written
from mirror import Mirror
from several import Events, Several, several

from ssmd.api.own.pulls import PACKED
from ssmd.daemon import pulls
from ssmd.model import smollm2
from ssmd.refit import catalog
from ssmd.runtime import devices

ROOT = "/ssmd/v1/pulls"
NAME = "mamba-130m"  # of which the hub here has other weights
WEIGHTS = "model.safetensors"
KEYS = "alice alice-has-this-one\nscreen screens-look-at-this read-only\n"
FIELDS = {
    *("id", "object", "model", "runtime", "quantization", "state", "stage", "done", "total", "unit", "error"),
    *("started_at", "ended_at"),
}


@pytest.fixture(scope="module")
def source(artifacts: TinyArtifacts) -> Path:
    return artifacts.source("llama-f32")


@pytest.fixture
def hub(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Mirror]:
    """The hub, which gives no more than a part of the weights until it is told to."""
    for name in [n for n in os.environ if n.startswith(("HF_", "HUGGING")) or n.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    with mirror.running(catalog.origin_of(NAME), source) as running:
        running.stalls[WEIGHTS] = 200_000
        running.files["config.json"] = mirror.fitting(NAME)
        running.commit_now()
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        yield running


def begin(one: Several, model: str = NAME, runtime: str | None = None, **more: Any) -> dict[str, Any]:
    answer = one.ask("POST", ROOT, {"model": model, "runtime": runtime, **more})
    assert answer.status == 202, answer.body
    row: dict[str, Any] = answer.json
    assert row.keys() == FIELDS
    return row


def rows(one: Several) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = one.ask("GET", ROOT).json["data"]
    return found


def over(one: Several, id_: str) -> dict[str, Any]:
    """The row of a pull that is over."""
    soon(lambda: row_of(one, id_)["ended_at"] is not None, within_s=60)
    return row_of(one, id_)


def row_of(one: Several, id_: str) -> dict[str, Any]:
    return next(row for row in rows(one) if row["id"] == id_)


def weights_come(one: Several) -> None:
    soon(lambda: rows(one)[0]["stage"] == f"fetch {WEIGHTS}" and bool(rows(one)[0]["done"]), within_s=60)


def half_made(one: Several) -> list[Path]:
    return [path for path in one.models.rglob(".*") if path.is_dir()]


@pytest.mark.skipif(smollm2.installed_gguf() is None, reason="SmolLM2's weights are not installed")
def test_a_model_is_pulled_and_answers(three: Several) -> None:
    with Events(three.served) as watching:
        row = begin(three, "smollm2", "litert")
        begun = {name: row[name] for name in ("object", "model", "runtime", "quantization")}
        assert begun == {"object": "pull", "model": "smollm2", "runtime": "litert", "quantization": None}
        done = over(three, row["id"])
        soon(lambda: watching.found[-1]["pulls"][0]["state"] == "done")
        told = [event["pulls"][0] for event in watching.found if event["pulls"]]
    assert (done["state"], done["error"]) == ("done", None)
    assert done["started_at"] <= done["ended_at"] <= time.time()
    stages = {one["stage"] for one in told} - {None}
    assert len(stages) > 1, "the stream shows them"
    assert any(one["total"] and 0 < one["done"] < one["total"] for one in told)
    assert {one["state"] for one in told} <= {"waiting", "running", "done"}
    assert three.metrics()["pulls"] == [done]
    assert "smollm2" in [entry["id"] for entry in three.ask("GET", "/v1/models").json["data"]]
    known = {one["name"]: one for one in three.ask("GET", "/ssmd/v1/catalog").json["data"]}
    made = {one["runtime"]: one["installed"] for one in known["smollm2"]["runtimes"]}
    assert [runtime for runtime, installed in made.items() if installed] == ["litert"]
    again = over(three, begin(three, "smollm2", "litert")["id"])
    assert (again["state"], again["id"] == done["id"]) == ("done", False), "it is here already"
    assert half_made(three) == []


def test_one_at_a_time_and_cancelled(three: Several, hub: Mirror) -> None:
    first = begin(three)
    weights_come(three)
    row = rows(three)[0]
    assert (row["state"], row["unit"], row["stage"]) == ("running", "bytes", f"fetch {WEIGHTS}")
    assert 0 < row["done"] < row["total"]
    assert begin(three)["id"] == first["id"], "the same twice is the same"
    second = begin(three, runtime="openvino")
    assert (second["state"], second["started_at"]) == ("waiting", None)
    waiting = three.ask("DELETE", f"{ROOT}/{second['id']}")
    assert (waiting.status, waiting.json["state"]) == (200, "cancelled")
    assert three.ask("DELETE", f"{ROOT}/{first['id']}").status == 200
    gone = over(three, first["id"])
    assert (gone["state"], gone["error"], gone["done"]) == ("cancelled", None, None)
    assert gone["ended_at"] - gone["started_at"] < 60
    assert half_made(three) == []
    assert three.ask("DELETE", f"{ROOT}/{first['id']}").json == gone, "it is over"
    assert three.ask("DELETE", f"{ROOT}/pull_0").error["code"] == "pull_not_found"
    third = begin(three)
    assert third["id"] not in (first["id"], second["id"])
    assert over(three, three.ask("DELETE", f"{ROOT}/{third['id']}").json["id"])["state"] == "cancelled"


def test_what_fails_says_why(three: Several, hub: Mirror, source: Path) -> None:
    hub.files["config.json"] = (source / "config.json").read_bytes()
    hub.commit_now()
    row = over(three, begin(three)["id"])
    assert row["state"] == "failed"
    assert "no stripped graph of this config" in row["error"]
    assert str(three.models.parent) not in row["error"]
    assert not hub.sent.get(WEIGHTS)
    hub.api = 404, "RepoNotFound"
    row = over(three, begin(three, runtime="openvino")["id"])
    assert "there is no model" in row["error"]
    assert half_made(three) == []


def test_only_so_many_wait(three: Several, hub: Mirror, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulls, "MOST", 2)
    begun = [begin(three), begin(three, runtime="litert")]
    answer = three.ask("POST", ROOT, {"model": NAME, "runtime": "openvino"})
    assert (answer.status, answer.error["code"]) == (503, "pulls_full")
    assert answer.headers["retry-after"]
    assert begin(three)["id"] == begun[0]["id"]
    for row in reversed(begun):
        three.ask("DELETE", f"{ROOT}/{row['id']}")
    for row in begun:
        assert over(three, row["id"])["state"] == "cancelled"


def test_one_that_does_not_end_is_killed(three: Several, hub: Mirror, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulls, "PATIENCE_S", 0.0)
    row = begin(three)
    weights_come(three)
    three.ask("DELETE", f"{ROOT}/{row['id']}")
    assert over(three, row["id"])["state"] == "cancelled"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"model": "gpt-5"}, "model"),
        ({"model": "owner/name"}, "model"),
        ({"model": "--to=/tmp/x"}, "model"),
        ({"model": "smollm2; rm -rf ~"}, "model"),
        ({"model": "../smollm2"}, "model"),
        ({"model": ""}, "model"),
        ({"model": ["smollm2"]}, "model"),
        ({}, "model"),
        ({"model": "mamba-130m", "runtime": "coreml"}, "runtime"),
        ({"model": "smollm2", "runtime": "--force"}, "runtime"),
        ({"model": "mamba-130m", "runtime": "npu"}, "runtime"),
        ({"model": "lfm3-1.7b", "runtime": "wgpu"}, "runtime"),
        ({"model": "lfm2-8b-a1b", "runtime": "litert"}, "runtime"),
        ({"model": "smollm2", "revision": "x"}, "revision"),
        ({"model": "lfm2-350m", "runtime": "litert", "quantization": "int4"}, "quantization"),
        ({"model": "mamba-130m", "quantization": "int4"}, "quantization"),
        ({"model": "smollm2", "runtime": "openvino", "quantization": "--force"}, "quantization"),
        ([], None),
    ],
)
def test_what_cannot_be_pulled_is_refused(body: Any, param: str | None, three: Several) -> None:
    answer = three.ask("POST", ROOT, body)
    assert (answer.status, answer.error["param"]) == (400, param)
    assert len(answer.error["message"]) < 500
    assert rows(three) == []


def test_a_read_only_key_looks_and_no_more(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "runtime_names", lambda: ("litert",))
    with several(models, api_keys_file=written(models.parent / "keys", KEYS)) as one:
        screen = bearer("screens-look-at-this")
        for path in (ROOT, "/ssmd/v1/catalog"):
            assert one.ask("GET", path, headers=screen).status == 200
            assert one.ask("GET", path).status == 401
        for method, path in (("POST", ROOT), ("DELETE", f"{ROOT}/x")):
            refused = one.ask(method, path, {"model": "smollm2"}, screen)
            assert refused.error["code"] == "read_only_key"


def test_the_catalog(three: Several) -> None:
    known = three.ask("GET", "/ssmd/v1/catalog").json
    assert known["object"] == "list"
    assert [one["name"] for one in known["data"]] == catalog.names()
    for one in known["data"]:
        assert one.keys() == {"name", "family", "origin", "about", "base", "download_bytes", "runtimes"}
        assert 50e6 < one["download_bytes"] < 17e9
        assert one["about"]
        assert one["base"] == (one["family"] in ("mamba", "mamba2"))
        assert one["origin"] == catalog.origin_of(one["name"])
        for made in one["runtimes"]:
            keys = {"runtime", "installed", "usable", "problem", "quantizations", "bytes", "memory_bytes"}
            assert made.keys() == keys
            graphs = {catalog.quantization_of(file) for file in catalog.files(made["runtime"], one["name"])}
            assert made["quantizations"] == sorted(graphs or PACKED)
            assert (made["bytes"] is None) == (made["memory_bytes"] is None) == (made["runtime"] == "wgpu")
            assert made["bytes"] is None or made["memory_bytes"] > made["bytes"]
            assert made["usable"] == (made["problem"] is None)
            assert made["installed"] is False
    first = next(one for one in known["data"] if one["name"] == "smollm2")
    usable = {made["runtime"]: made["usable"] for made in first["runtimes"]}
    assert {"litert", "openvino", "npu", "coreml", "wgpu"} == usable.keys()
    assert usable["litert"]
    assert not usable["coreml"]  # Core ML and the NPU cannot execute here
    assert first["family"] == "llama"
