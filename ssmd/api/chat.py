"""/v1/chat/completions: a whole answer, or a stream of chunks."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from ssmd.api import sse
from ssmd.api.body import parse_object, read_body
from ssmd.api.chat_body import ChatBody, read_chat, to_request
from ssmd.api.delivery import Delivery, Gone
from ssmd.api.errors import INTERNAL, error_body
from ssmd.api.models import check_served
from ssmd.engine import Engine
from ssmd.generation import Delta, Done, Failed, Rejected, TokenLogprob, Usage
from ssmd.inflight import Generation

log = logging.getLogger(__name__)


class ChatCompletions:
    """The ASGI app of the endpoint. A reader that takes nothing for `stall_s` seconds is given up."""

    def __init__(self, engine: Engine, stall_s: float) -> None:
        self._engine = engine
        self._stall_s = stall_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        delivery = Delivery()
        try:
            raw = await read_body(HttpRequest(scope, receive))
            body, generation = await asyncio.to_thread(self._begin, raw, delivery)
        except Rejected as err:
            self._engine.metrics.request_failed(err.code)
            raise
        watcher = asyncio.create_task(delivery.watch(receive))
        ended = False
        try:
            if body.stream:
                await self._stream(body, generation, delivery, send)
            else:
                answer = await self._whole(generation, delivery)
                await JSONResponse(answer, headers=_headers(generation))(scope, receive, send)
            ended = True
        except Gone:
            log.info("request %s: the client went away", generation.id)
        except sse.Stalled:
            log.warning("request %s: the client has not read for %.0f s, given up", generation.id, self._stall_s)
        finally:
            watcher.cancel()
            if not ended:
                generation.cancel()

    def _begin(self, raw: bytes, delivery: Delivery) -> tuple[ChatBody, Generation]:
        """Everything that takes time before the request waits in the engine's queue."""
        body = read_chat(parse_object(raw))
        check_served(self._engine, body.model)
        request = to_request(body, self._engine.artifact.manifest.vocabulary)
        return body, self._engine.submit(request, delivery)

    async def _whole(self, generation: Generation, delivery: Delivery) -> dict[str, Any]:
        texts: dict[int, list[str]] = {}
        logprobs: dict[int, list[dict[str, Any]]] = {}
        while True:
            event = await delivery.next()
            if isinstance(event, Failed):
                raise event.error
            if isinstance(event, Done):
                break
            texts.setdefault(event.index, []).append(event.text)
            logprobs.setdefault(event.index, []).extend(map(_logprob, event.logprobs))
        choices = [
            {
                "index": i,
                "message": {"role": "assistant", "content": "".join(texts.get(i, ())), "refusal": None},
                "logprobs": {"content": logprobs[i], "refusal": None} if logprobs.get(i) else None,
                "finish_reason": reason,
            }
            for i, reason in enumerate(event.finish_reasons)
        ]
        return {**self._envelope(generation, "chat.completion"), "choices": choices, "usage": _usage(event.usage)}

    async def _stream(self, body: ChatBody, generation: Generation, delivery: Delivery, send: Send) -> None:
        event = await delivery.next()
        if isinstance(event, Failed):  # nothing was sent yet: a plain error response can still say it
            raise event.error
        envelope = self._envelope(generation, "chat.completion.chunk")
        if body.include_usage:
            envelope["usage"] = None
        stream = sse.EventStream(send, self._stall_s)
        await stream.open(_headers(generation))
        try:
            for i in range(body.n or 1):
                await stream.write(_chunk(envelope, i, {"role": "assistant", "content": "", "refusal": None}))
            while isinstance(event, Delta):
                logprobs = [_logprob(entry) for entry in event.logprobs]
                await stream.write(_chunk(envelope, event.index, {"content": event.text}, logprobs=logprobs))
                event = await delivery.next()
            if isinstance(event, Failed):
                await stream.write(sse.encode(error_body(event.error)))
            else:
                for i, reason in enumerate(event.finish_reasons):
                    await stream.write(_chunk(envelope, i, {}, finish_reason=reason))
                if body.include_usage:
                    await stream.write(sse.encode({**envelope, "choices": [], "usage": _usage(event.usage)}))
                await stream.write(sse.DONE)
        except (Gone, sse.Stalled):
            raise
        except Exception:  # a bug, after the status left: the client must still hear of it
            log.exception("request %s failed while streaming", generation.id)
            generation.cancel()
            await stream.write(sse.encode(error_body(INTERNAL)))
        await stream.close()

    def _envelope(self, generation: Generation, kind: str) -> dict[str, Any]:
        manifest = self._engine.artifact.manifest
        return {
            "id": f"chatcmpl-{generation.id}",
            "object": kind,
            "created": int(time.time()),
            "model": manifest.name,
            "system_fingerprint": f"fp_{manifest.build[:12]}",
        }


def routes(engine: Engine, stall_s: float) -> list[Route]:
    return [Route("/v1/chat/completions", ChatCompletions(engine, stall_s), methods=["POST"])]


def _headers(generation: Generation) -> dict[str, str]:
    return {} if generation.session is None else {"x-ssmd-session": generation.session}


def _chunk(
    envelope: Mapping[str, Any],
    index: int,
    delta: dict[str, Any],
    *,
    logprobs: list[dict[str, Any]] | None = None,
    finish_reason: str | None = None,
) -> bytes:
    choice = {
        "index": index,
        "delta": delta,
        "logprobs": {"content": logprobs, "refusal": None} if logprobs else None,
        "finish_reason": finish_reason,
    }
    return sse.encode({**envelope, "choices": [choice]})


def _logprob(entry: TokenLogprob) -> dict[str, Any]:
    return {
        **_token(entry.token, entry.utf8, entry.logprob),
        "top_logprobs": [_token(token, utf8, logprob) for token, utf8, logprob in entry.top],
    }


def _token(token: str, utf8: bytes, logprob: float) -> dict[str, Any]:
    """JSON has no -Infinity; OpenAI writes -9999.0 for a token that cannot come."""
    return {"token": token, "logprob": max(float(logprob), -9999.0), "bytes": list(utf8)}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "ssmd": {
            "session": usage.session,
            "resume": usage.resume,
            "stored": usage.stored,
            "ttft_ms": round(usage.ttft_ms, 3),
            "tbt_ms": None if usage.tbt_ms is None else round(usage.tbt_ms, 3),
            "prefill_ms": round(usage.prefill_ms, 3),
            "restore_ms": round(usage.restore_ms, 3),
        },
    }
