"""The declared surface against the app: every route is in the document, and what it says of each comes."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from conftest import TinyArtifacts
from daemon import Daemon, daemon
from keyfile import bearer
from pydantic import BaseModel
from serving import Answer
from starlette.applications import Starlette
from starlette.routing import Route

from ssmd.api import shapes
from ssmd.api.http.security import Security
from ssmd.api.openai import unserved
from ssmd.api.openapi import described
from ssmd.api.operation import Operation
from ssmd.api.operations import OPERATIONS
from ssmd.app import create_app
from ssmd.config import Settings

KEY = "somebody-has-this-one"
MODEL_OF = {"{model}": "llama", "{session}": "ses_none", "{id}": "none", "{file}": "index.html"}
# Statuses that any client can provoke on every route: (headers, error code).
PROVOKED: dict[int, tuple[dict[str, str], str]] = {
    400: ({"content-length": "5", "transfer-encoding": "chunked"}, "invalid_content_length"),
    401: ({"authorization": "Bearer nothing-of-the-kind"}, "invalid_api_key"),
    403: ({"host": "elsewhere.example"}, "host_not_allowed"),
    413: ({"content-length": str(1 << 40)}, "body_too_large"),
    415: ({"content-type": "text/plain"}, "unsupported_media_type"),
}
ROWS = sorted(OPERATIONS, key=lambda one: (one.method, one.template))
IDS = [f"{one.method} {one.template}" for one in ROWS]


@pytest.fixture(scope="module")
def tiny(artifacts: TinyArtifacts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    settings = Settings(api_key=KEY, offline=True)
    with daemon(artifacts["llama-f32"], tmp_path_factory.mktemp("data"), settings=settings) as one:
        yield one


def at(path: str) -> str:
    for name, value in MODEL_OF.items():
        path = path.replace(name, value)
    return path


def ask(one: Daemon, method: str, path: str, body: Any = None, **headers: str) -> Answer:
    return one.served.ask(method, at(path), body, {**bearer(KEY), **headers})


def test_the_document_lists_every_route_and_no_others(tiny: Daemon) -> None:
    app = create_app(tiny.host, Settings())
    assert isinstance(app, Security)
    assert isinstance(app._app, Starlette)
    found = set()
    for route in app._app.routes:
        assert isinstance(route, Route)
        found |= {(method, route.path_format) for method in (route.methods or ()) if method != "HEAD"}
    assert found == {(one.method, one.template) for one in OPERATIONS}
    paths = ask(tiny, "GET", "/openapi.json").json["paths"]
    assert {(method.upper(), path) for path, methods in paths.items() for method in methods} == found


def test_every_endpoint_is_a_coroutine(tiny: Daemon) -> None:
    """Starlette runs other endpoints in threads of its own, past the gate (ssmd/api/generate/fair_reading.py)."""
    app = create_app(tiny.host, Settings())
    assert isinstance(app, Security)
    assert isinstance(app._app, Starlette)
    for route in app._app.routes:
        assert isinstance(route, Route)
        one = route.endpoint
        called = one if inspect.isfunction(one) or inspect.ismethod(one) else type(one).__call__
        assert inspect.iscoroutinefunction(called), f"{route.path} is answered by {one}"


@pytest.mark.parametrize("operation", ROWS, ids=IDS)
def test_what_a_route_may_answer_is_what_it_answers(operation: Operation, tiny: Daemon) -> None:
    method, path = operation.method, operation.template
    for status, (headers, code) in PROVOKED.items():
        if status not in operation.bad and (operation.endless or operation.effect):
            continue  # it would answer, and not end, or end what others here ask
        body = b"{}" if status == 415 else None
        answer = ask(tiny, method, path, body, **headers)
        if status in operation.bad:
            assert answer.status == status
            check_error(operation, answer, code)
        else:
            assert answer.status != status, (answer.status, answer.body)
    if 404 in operation.bad:
        unknown = path.replace("{model}", "gpt-2").replace("{file}", "none")
        unknown += "?after=ses_none" if path.endswith("/sessions") else ""
        asked = _asking(operation, "gpt-2")
        if path == "/v1/conversations":  # which names no model, and finds an item
            asked = {"items": [{"type": "item_reference", "id": "none"}]}
        answer = ask(tiny, method, unknown, asked)
        assert (answer.status in (400, 404), answer.status in operation.bad) == (True, True), answer.body
    if operation.body is not None and not operation.body.optional:
        answer = ask(tiny, method, path, b"[]")
        assert answer.status == 400
        check_error(operation, answer, "invalid_json")


def check_error(operation: Operation, answer: Answer, code: str) -> None:
    getattr(shapes, operation.error).model_validate(answer.json, strict=True)
    if operation.error == "Error":
        assert answer.error["code"] == code


def test_the_root_names_what_is_served_there(tiny: Daemon) -> None:
    said = ask(tiny, "GET", "/v1").json
    assert ask(tiny, "GET", "/v1/").json == said
    assert all(ask(tiny, "GET", said[name]).status == 200 for name in ("page", "docs", "openapi"))
    assert {"POST /v1/chat/completions", "GET /v1/models"} <= set(said["endpoints"])
    assert not {f"POST {path}" for path in unserved.WHY} & set(said["endpoints"])


def _asking(operation: Operation, model: str) -> Any:
    """A body of a route that names a model."""
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1},
        "/apply-template": {"messages": [{"role": "user", "content": "x"}]},
        "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1},
        "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "x"}]},
        "/v1/completions": {"prompt": "x", "max_tokens": 1},
        "/v1/responses": {"input": "x", "max_output_tokens": 1},
        "/v1/responses/input_tokens": {"input": "x"},
        "/api/chat": {"messages": [{"role": "user", "content": "x"}], "options": {"num_predict": 1}, "stream": False},
        "/api/generate": {"prompt": "x", "options": {"num_predict": 1}, "stream": False},
        "/api/show": {},
        "/tokenize": {"content": "x"},
        "/ssmd/v1/warm": {"messages": [{"role": "system", "content": "x " * 80}]},
        "/detokenize": {"tokens": [1]},
    }
    found = bodies.get(operation.path)
    return found if found is None else {"model": model, **found}


def _good(one: Operation) -> bool:
    """Report if a plain request succeeds: it needs no existing object, ends nothing and fetches nothing."""
    needs = ("{session}", "{id}", "/import", "/redeem")
    return one.method != "PATCH" and not (any(part in one.path for part in needs) or one.effect or one.endless)


GOOD = [one for one in ROWS if _good(one)]


@pytest.mark.parametrize("operation", GOOD, ids=[f"{one.method} {one.template}" for one in GOOD])
def test_what_a_route_answers_has_its_declared_shape(operation: Operation, tiny: Daemon) -> None:
    body = _asking(operation, "llama") or ({} if operation.path in unserved.WHY else None)
    answer = ask(tiny, operation.method, operation.template, body)
    assert answer.status == operation.status, answer.body
    if isinstance(operation.answer, tuple):
        assert operation.answer == ("*/*",) or answer.headers["content-type"] in operation.answer
    else:
        shape: type[BaseModel] = getattr(shapes, operation.answer)
        shape.model_validate(answer.json, strict=True)


def test_the_document_holds_together() -> None:
    """Every reference leads somewhere, and no status is there that no route may answer."""
    document = json.loads(json.dumps(described(OPERATIONS)))
    refs: list[str] = []
    walk(document, lambda one: refs.append(one["$ref"]) if isinstance(one.get("$ref"), str) else None)
    assert refs
    for ref in refs:
        at_: Any = document
        for part in ref.removeprefix("#/").split("/"):
            at_ = at_[part]
    by_row = {(one.method, one.template): one for one in OPERATIONS}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            one = by_row[method.upper(), path]
            assert {int(status) for status in operation["responses"]} == {one.status, *one.bad}
    ids = [operation["operationId"] for methods in document["paths"].values() for operation in methods.values()]
    assert len(ids) == len(set(ids)) == len(OPERATIONS)


def walk(value: Any, see: Callable[[dict[str, Any]], None]) -> None:
    if isinstance(value, dict):
        see(value)
        for one in value.values():
            walk(one, see)
    elif isinstance(value, list):
        for one in value:
            walk(one, see)


def test_the_page_runs_nothing_and_fetches_nothing(tiny: Daemon) -> None:
    answer = tiny.served.ask("GET", "/docs")  # without a key
    assert answer.status == tiny.served.ask("GET", "/openapi.json").status == 200
    html = answer.body.decode()
    assert "<script" not in html
    assert not re.search(r"(?:src|href)=\"(?!#|/openapi\.json\")", html)
    assert re.match(r"default-src 'none'; style-src 'sha256-[^']+'; ", answer.headers["content-security-policy"])
    for one in OPERATIONS:
        assert one.template in html
    for anchor in re.findall(r'href="#([^"]+)"', html):
        assert f'id="{anchor}"' in html


def test_a_start_does_not_import_what_describes_it() -> None:
    late = ("fastapi", "ssmd.api.shapes")
    code = f"import sys, ssmd.app, ssmd.server; print([m for m in {late} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "[]"
