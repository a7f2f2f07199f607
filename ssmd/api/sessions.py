"""/ssmd/v1/sessions: the conversations kept here: list, read, delete."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from ssmd.generation import Rejected
from ssmd.sessions.store import Store
from ssmd.sessions.turn import Session, StoreError, Turn, UnknownSession, check_id

BODY_LIMITS: Mapping[str, int] = {}
Result = TypeVar("Result")


async def ask(work: Callable[[], Result]) -> Result:
    """Run what blocks on the store in a thread; its errors become Rejected."""
    try:
        return await asyncio.to_thread(work)
    except UnknownSession as err:
        raise Rejected(str(err), status=404, code="session_not_found", param="session") from None
    except StoreError as err:
        raise Rejected(str(err), status=503, code="store_error", retry_after_s=1) from err


def routes(store: Store | None) -> list[Route]:
    def kept() -> Store:
        if store is None:
            raise Rejected("this daemon keeps no sessions: it runs with --no-store", status=404, code="no_store")
        return store

    def session_id(request: Request) -> str:
        given: str = request.path_params["session"]
        try:
            return check_id("session", given)
        except StoreError as err:
            raise Rejected(str(err), code="invalid_value", param="session") from None

    async def listing(request: Request) -> JSONResponse:
        found = await ask(kept().sessions)
        return JSONResponse({"object": "list", "data": [_entry(session) for session in found]})

    async def one(request: Request) -> JSONResponse:
        where, wanted = kept(), session_id(request)
        session = await ask(lambda: where.session(wanted))
        turns = await ask(lambda: where.turns(wanted))
        return JSONResponse({**_entry(session), "turns": [_turn(turn) for turn in turns]})

    async def delete(request: Request) -> JSONResponse:
        where, wanted = kept(), session_id(request)
        await ask(lambda: where.delete(wanted))
        return JSONResponse({"id": wanted, "object": "session.deleted", "deleted": True})

    root = "/ssmd/v1/sessions"
    return [
        Route(root, listing),
        Route(root + "/{session}", one),
        Route(root + "/{session}", delete, methods=["DELETE"]),
    ]


def _entry(session: Session) -> dict[str, Any]:
    """`bytes`: of its checkpoints, those shared with other sessions included. Times in seconds since 1970."""
    return {
        "id": session.id,
        "object": "session",
        "title": session.title,
        "model": session.info.model,
        "lineage": session.info.lineage,
        "created": int(session.created_at.timestamp()),
        "last_used": int(session.last_used_at.timestamp()),
        "head": session.head,
        "turn_count": session.turns,
        "bytes": session.nbytes,
        "pinned": session.info.pinned,
        "imported": session.info.imported is not None,
    }


def _turn(turn: Turn) -> dict[str, Any]:
    """One exchange: what was asked since the parent's answer, and the answer."""
    return {
        "id": turn.id,
        "parent": turn.parent,
        "messages": [message.to_json() for message in turn.conversation],
        "prompt_tokens": turn.prompt_tokens,
        "finish_reason": turn.finish,
        "complete": turn.complete,
        "created": int(turn.created_at.timestamp()),
    }
