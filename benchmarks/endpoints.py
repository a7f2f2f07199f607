"""Requests for each POST of the interface, as large as a client may send them: made from openapi.json.

An endpoint whose body the document describes needs an entry in BODIES. A new one without an entry is an error. Its
entry in the table of operations may have an `effect`, which leaves it out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ssmd.api.operations import OPERATIONS

JSON = "application/json"
# POSTs that are left out, and the reason for each.
LEFT_OUT = {one.template: one.effect for one in OPERATIONS if one.effect and one.method == "POST"}


@dataclass(frozen=True)
class Sizes:
    """Sizes of the bodies. text: characters; ids: tokens; words: of a prompt that the model has room for."""

    text: int = 500_000
    ids: int = 120_000
    words: int = 1_000


@dataclass(frozen=True)
class Target:
    """Objects that the requests name. file: an exported session."""

    model: str
    session: str
    file: bytes
    sizes: Sizes = Sizes()

    @property
    def text(self) -> str:
        """A text of short words, half as many tokens as characters."""
        return ("a b " * (self.sizes.text // 4 + 1))[: self.sizes.text]

    def chat(self, content: str) -> dict[str, Any]:
        """Fields of a chat that has one token for its answer."""
        messages = [{"role": "user", "content": content}]
        return {"model": self.model, "messages": messages, "max_tokens": 1, "store": False}


def _system(content: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": content}]


def _items(on: Target) -> dict[str, Any]:
    return {"items": [{"role": "user", "content": on.text}] * 20}


Body = Callable[[Target], Any]  # returns bytes, or what becomes JSON
BODIES: Mapping[str, Body] = {
    "/v1/chat/completions": lambda on: on.chat("word " * on.sizes.words),
    "/v1/completions": lambda on: {"model": on.model, "prompt": on.text, "max_tokens": 1},
    "/v1/responses": lambda on: {**on.chat(""), "messages": None, "input": "word " * on.sizes.words},
    "/v1/responses/input_tokens": lambda on: {**on.chat(""), "messages": None, "input": on.text},
    "/v1/conversations": _items,
    "/v1/conversations/{id}": lambda on: {"metadata": {str(i): "m" * 512 for i in range(16)}},
    "/v1/conversations/{id}/items": _items,
    "/v1/messages": lambda on: on.chat("word " * on.sizes.words),
    "/v1/messages/count_tokens": lambda on: on.chat(on.text),
    "/api/chat": lambda on: on.chat("word " * on.sizes.words),
    "/api/generate": lambda on: {"model": on.model, "prompt": on.text, "raw": True, "options": {"num_predict": 1}},
    "/api/show": lambda on: {"model": on.model, "system": on.text},
    "/tokenize": lambda on: {"model": on.model, "content": on.text},
    "/detokenize": lambda on: {"model": on.model, "tokens": [i % 100 + 20 for i in range(on.sizes.ids)]},
    "/apply-template": lambda on: on.chat(on.text),
    "/ssmd/v1/sessions/import": lambda on: on.file,
    "/ssmd/v1/sessions/{session}": lambda on: {"title": "t" * 80},
    "/ssmd/v1/sessions/{session}/fork": lambda on: {},
    "/ssmd/v1/warm": lambda on: {**on.chat("word "), "messages": _system("word " * on.sizes.words), "idle": True},
    "/ssmd/v1/tickets/redeem": lambda on: {"ticket": on.text},
}


def _unasked(on: Target) -> dict[str, str]:
    return {"input": on.text}


def requests(document: Mapping[str, Any], on: Target, port: int = 0) -> Iterator[tuple[str, bytes]]:
    """Yield (path as in the document, raw HTTP request) for each POST but those of LEFT_OUT.

    Endpoints that take no body get one all the same. Raises LookupError for an endpoint without an entry in BODIES, and
    for an entry without an endpoint.
    """
    posts = {path: methods["post"] for path, methods in document["paths"].items() if "post" in methods}
    if strangers := sorted({*LEFT_OUT, *BODIES} - posts.keys()):
        raise LookupError(f"benchmarks/endpoints.py names {', '.join(strangers)}: openapi.json has no such POST")
    for path, operation in posts.items():
        if path in LEFT_OUT:
            continue
        if path not in BODIES and "requestBody" in operation:
            raise LookupError(
                f"benchmarks/endpoints.py has no body for POST {path}: add to BODIES the largest that a client may "
                "send, or to its entry in the table of operations an `effect`, the reason to leave it out"
            )
        body = BODIES.get(path, _unasked)(on)
        kind = "application/octet-stream" if isinstance(body, bytes) else JSON
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        at = path.replace("{model}", on.model).replace("{session}", on.session).replace("{id}", "none")
        head = (
            f"POST {at} HTTP/1.1\r\nhost: localhost:{port}\r\nconnection: close\r\n"
            f"content-type: {kind}\r\ncontent-length: {len(raw)}\r\n\r\n"
        )
        yield path, head.encode() + raw
