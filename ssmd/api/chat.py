"""/v1/chat/completions: a whole answer, or a stream of chunks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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
from ssmd.api.idempotency import REPLAYED, Mark, Repeats, in_place_of
from ssmd.api.models import check_served
from ssmd.engine.engine import Engine
from ssmd.engine.generation import Generation
from ssmd.engine.replay import events
from ssmd.engine.request import Delta, Done, Failed, Rejected, Request, TokenLogprob, Usage

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Head:
    """What is known of an answer before its first event. created: seconds since 1970."""

    id: str
    created: int
    session: str | None
    replayed: bool = False
    cancel: Callable[[], None] = lambda: None

    @property
    def headers(self) -> dict[str, str]:
        session = {} if self.session is None else {"x-ssmd-session": self.session}
        return session | ({REPLAYED: "true"} if self.replayed else {})


class ChatCompletions:
    """The ASGI app of the endpoint. A reader that takes nothing for `stall_s` seconds is given up."""

    def __init__(self, engine: Engine, stall_s: float, api_key: str) -> None:
        self._engine = engine
        self._stall_s = stall_s
        self._repeats = Repeats(engine, api_key)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        delivery, head, watcher = Delivery(), None, None
        ended = False
        try:
            http = HttpRequest(scope, receive)
            raw = await read_body(http)
            watcher = asyncio.create_task(delivery.watch(receive))
            body, head = await self._begin(raw, self._repeats.mark(http.headers, raw), delivery)
            if body.stream:
                await self._stream(body, head, delivery, send)
            else:
                answer = await self._whole(head, delivery)
                await JSONResponse(answer, headers=head.headers)(scope, receive, send)
            ended = True
        except Rejected as err:
            if head is None:  # else the engine has counted it
                self._engine.metrics.request_failed(err.code)
            raise
        except Gone:
            log.info("request %s: the client went away", "that waited" if head is None else head.id)
        except sse.Stalled:
            log.warning("request %s: the client has not read for %.0f s, given up", head and head.id, self._stall_s)
        finally:
            if watcher is not None:
                watcher.cancel()
            if head is not None and not ended:
                head.cancel()

    async def _begin(self, raw: bytes, mark: Mark, delivery: Delivery) -> tuple[ChatBody, Head]:
        """Everything that takes time before the request waits in the engine's queue, or is answered as before."""
        body, request = await asyncio.to_thread(self._read, raw)
        if not (request.store and self._engine.keeps):
            return body, _head(await asyncio.to_thread(self._engine.submit, request, delivery))
        attempt, reply = await self._repeats.enter(mark, delivery)
        if reply is not None and reply.complete:
            attempt.end()
            delivery.replay(events(reply))
            return body, Head(reply.answer["id"], reply.answer["created"], reply.session, replayed=True)
        try:
            request = in_place_of(request, mark, reply)
            generation = await asyncio.to_thread(self._engine.submit, request, delivery)
        except BaseException as err:  # whatever it is: who repeats the request must not wait for this one
            attempt.end(err if isinstance(err, Rejected) else INTERNAL)
            raise
        attempt.follow(delivery, generation.asked.id)
        return body, _head(generation)

    def _read(self, raw: bytes) -> tuple[ChatBody, Request]:
        body = read_chat(parse_object(raw))
        check_served(self._engine, body.model)
        return body, to_request(body, self._engine.artifact.manifest.vocabulary)

    async def _whole(self, head: Head, delivery: Delivery) -> dict[str, Any]:
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
        return {**self._envelope(head, "chat.completion"), "choices": choices, "usage": _usage(event.usage)}

    async def _stream(self, body: ChatBody, head: Head, delivery: Delivery, send: Send) -> None:
        event = await delivery.next()
        if isinstance(event, Failed):  # nothing was sent yet: a plain error response can still say it
            raise event.error
        envelope = self._envelope(head, "chat.completion.chunk")
        if body.include_usage:
            envelope["usage"] = None
        stream = sse.EventStream(send, self._stall_s)
        await stream.open(head.headers)
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
            log.exception("request %s failed while streaming", head.id)
            head.cancel()
            await stream.write(sse.encode(error_body(INTERNAL)))
        await stream.close()

    def _envelope(self, head: Head, kind: str) -> dict[str, Any]:
        manifest = self._engine.artifact.manifest
        return {
            "id": f"chatcmpl-{head.id}",
            "object": kind,
            "created": head.created,
            "model": manifest.name,
            "system_fingerprint": f"fp_{manifest.build[:12]}",
        }


def routes(engine: Engine, stall_s: float, api_key: str = "") -> list[Route]:
    return [Route("/v1/chat/completions", ChatCompletions(engine, stall_s, api_key), methods=["POST"])]


def _head(generation: Generation) -> Head:
    asked = generation.asked
    return Head(asked.id, asked.created, asked.session, cancel=generation.cancel)


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
