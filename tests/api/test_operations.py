"""The table of operations: routes, rights, pools, the document and the docs come from it, and from nothing else."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from conftest import ROOT, TinyArtifacts
from daemon import Daemon, daemon
from keyfile import bearer, written
from operating import app_of, service_of
from serving import Served, serving
from starlette.requests import Request
from starlette.responses import JSONResponse

from ssmd.api.generate.fair_reading import FairPool
from ssmd.api.http.access import Keys
from ssmd.api.openai import chat
from ssmd.api.openapi import described
from ssmd.api.operation import BODY, Operation, Right, Service
from ssmd.api.operations import OPERATIONS
from ssmd.config import Settings

KEYS = {"alice": "alice-has-this-one", "screen": "screens-look-at-this", "own": "t" * 43, "none": ""}
ALLOWED = {  # the keys that each right lets through
    Right.NONE: {"none", "screen", "alice", "own"},
    Right.READ: {"screen", "alice", "own"},
    Right.CHANGE: {"alice", "own"},
    Right.OWN: {"own"},
}
IDS = [f"{one.method} {one.template}" for one in OPERATIONS]
NEW = Operation("GET", "/v1/new", lambda on: _found, "OpenAI", "A new one", answer="Root", key=Right.NONE)


async def _found(request: Request) -> JSONResponse:
    return JSONResponse({"found": request.url.path})


@pytest.fixture(scope="module")
def stubs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Serve every operation with an endpoint that only answers, behind the guard of the real table."""
    file = tmp_path_factory.mktemp("keys") / "keys"
    rows = f"alice {KEYS['alice']}\nscreen {KEYS['screen']} read-only\n"
    keys = Keys.of(Settings(api_keys_file=written(file, rows)), KEYS["own"])

    def stub(one: Operation) -> Operation:
        files: Callable[[Service], Any] | None = None if one.files is None else lambda on: [one.path]
        return replace(one, endpoint=lambda on: _found, files=files)

    with serving(app_of(service_of(map(stub, OPERATIONS), Settings(), keys))) as served:
        yield served


@pytest.mark.parametrize("operation", OPERATIONS, ids=IDS)
def test_the_declared_key_opens_an_operation(operation: Operation, stubs: Served) -> None:
    for name, key in KEYS.items():
        path = operation.path if operation.files else operation.template.replace("{", "").replace("}", "")
        status = stubs.ask(operation.method, path, headers=bearer(key) if key else {}).status
        refused = 401 if name == "none" else 403
        assert status == (200 if name in ALLOWED[operation.right] else refused), name


def test_a_new_operation_is_one_entry() -> None:
    wanted = [one for one in OPERATIONS if one.path in ("/v1", "/openapi.json")]
    with serving(app_of(service_of([*wanted, NEW], Settings(api_key="one-key-for-all")))) as one:
        assert one.ask("GET", "/v1/new").json == {"found": "/v1/new"}
        assert one.ask("POST", "/v1/new").status == 405
        assert "GET /v1/new" in one.ask("GET", "/v1", headers=bearer("one-key-for-all")).json["endpoints"]
        assert one.ask("GET", "/openapi.json").json["paths"]["/v1/new"]["get"]["summary"] == "A new one"
        site = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
        assert one.ask("GET", "/v1/new", headers=site).status == 200


def test_only_declared_paths_answer_at_a_wrong_base() -> None:
    with serving(app_of(service_of([replace(NEW, any_base=True)], Settings()))) as one:
        for path in ("/v1/new", "/new", "//v1/new/", "/api/v1/v1/new"):
            assert one.ask("GET", path).json == {"found": "/v1/new"}, path
    with serving(app_of(service_of([NEW], Settings()))) as one:
        assert one.ask("GET", "/new").status == 404


def test_a_wrong_entry_is_refused() -> None:
    wrong: list[dict[str, Any]] = [
        {"path": "/v1/{new}"},  # the guard does not match parameters
        {"path": "/v1/{new}", "key": None, "max_body_bytes": 5},
        {"key": Right.OWN},  # no command
        {"command": "ssmd stop"},
    ]
    for fields in wrong:
        with pytest.raises(ValueError, match=r"GET /v1/\S*new\S*: "):
            replace(NEW, **fields)


def test_an_object_of_two_pools_is_refused() -> None:
    def make(on: Service) -> FairPool:
        return on.pool

    def endpoint(on: Service) -> Any:
        on.one(make)
        return _found

    looks, texts = (replace(NEW, path=f"/{pool}", endpoint=endpoint, pool=pool) for pool in ("looks", "texts"))
    app_of(service_of([looks, replace(looks, path="/more")], Settings()))
    with pytest.raises(ValueError, match="make is used in two pools, looks and texts"):
        app_of(service_of([looks, texts], Settings()))
    with pytest.raises(ValueError, match="takes turns in the pool of chats"):
        app_of(service_of([replace(NEW, endpoint=chat.endpoint, pool="texts")], Settings()))
    with pytest.raises(ValueError, match="/more names no pool"):
        app_of(service_of([replace(looks, path="/more", pool=None)], Settings()))


def test_a_body_has_the_statuses_of_bodies() -> None:
    for one in OPERATIONS:
        assert (one.body is not None) == ({*BODY} <= {*one.errors}), one.path


@pytest.fixture(scope="module")
def tiny(artifacts: TinyArtifacts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with daemon(artifacts["llama-f32"], tmp_path_factory.mktemp("data"), settings=Settings(offline=True)) as one:
        yield one


POOLED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1},
    "/v1/completions": {"prompt": "x", "max_tokens": 1},
    "/v1/responses": {"input": "x", "max_output_tokens": 1},
    "/v1/responses/input_tokens": {"input": "x"},
    "/tokenize": {"content": "x"},
    "/detokenize": {"tokens": [1]},
    "/apply-template": {"messages": [{"role": "user", "content": "x"}]},
    "/api/chat": {"messages": [{"role": "user", "content": "x"}], "options": {"num_predict": 1}},
    "/api/generate": {"prompt": "x", "options": {"num_predict": 1}},
    "/api/show": {},
}
TRIED = [one for one in OPERATIONS if not (one.effect or one.endless)]


@pytest.mark.parametrize("operation", TRIED, ids=[f"{one.method} {one.template}" for one in TRIED])
def test_work_takes_turns_in_the_declared_pool(
    operation: Operation, tiny: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    used, run = set[str](), FairPool.run

    async def noted(pool: FairPool, *given: Any, **options: Any) -> Any:
        used.add(str(pool._short._thread_name_prefix).removeprefix("ssmd-"))
        return await run(pool, *given, **options)

    monkeypatch.setattr(FairPool, "run", noted)
    body = {"model": tiny.model, **POOLED[operation.path]} if operation.path in POOLED else {}
    path = operation.template.replace("{model}", tiny.model).replace("{session}", "ses_x").replace("{id}", "none")
    answer = tiny.served.ask(operation.method, path, None if operation.method == "GET" else body)
    assert answer.status < 500 or answer.status == operation.status, answer.body
    declared = {operation.pool} | ({"store"} if operation.pool == "chats" else set())
    assert used <= declared, "it works in another pool"
    assert operation.body is None or operation.path not in POOLED or operation.pool in used


def test_the_docs_have_the_table() -> None:
    """Made anew by: .venv/bin/python scripts/endpoints"""
    command = [sys.executable, str(ROOT / "scripts" / "endpoints"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def test_openapi_is_made_of_the_entries() -> None:
    document = described((NEW,))
    assert [*document["paths"]] == ["/v1/new"]
    assert document["paths"]["/v1/new"]["get"]["security"] == []
    assert "401" not in document["paths"]["/v1/new"]["get"]["responses"]
