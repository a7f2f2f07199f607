"""/ssmd/v1/sessions: the conversations kept here: list, read, pin, fork, delete, export, import."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import ConfigDict, Field, field_validator
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from ssmd.api.body import Id, StrictModel, parse_object, read_body, shown, validate
from ssmd.api.download import Downloads, PassingFile, removed
from ssmd.api.keys import caller_of
from ssmd.api.reading import Reading, client_of
from ssmd.api.upload import write_body
from ssmd.engine.host.host import Host
from ssmd.engine.terms import Rejected
from ssmd.machine.room import SPARE_BYTES
from ssmd.sessions.files.packing import States
from ssmd.sessions.files.sessionfile import SessionFileError
from ssmd.sessions.files.transfer import Local, export_session, import_session
from ssmd.sessions.rows.search import words_of
from ssmd.sessions.store import Store
from ssmd.sessions.turn import Session, StoreError, Turn, UnknownSession, UnknownTurn, check_id, title_problem

ROOT = "/ssmd/v1/sessions"
BODY_LIMITS: Mapping[str, int] = {f"{ROOT}/import": 4 << 30}
Result = TypeVar("Result")
_SCRATCH = ".transfer-"
MAX_SEARCH = 200  # characters
MAX_WORDS = 10
SEARCH_S = 1.0  # about how long one request may look; who asks goes on from there
_USAGE = ("cached_tokens", "completion_tokens", "resume", "ttft_ms", "prefill_ms", "restore_ms")
_THREADS = 4  # chat has others: a store that is busy with this must not keep it waiting


def routes(host: Host, store: Store | None) -> list[Route]:
    sessions = _Sessions(host, store)
    return [
        Route(ROOT, sessions.list),
        Route(ROOT + "/import", sessions.import_, methods=["POST"]),
        Route(ROOT + "/{session}", sessions.get),
        Route(ROOT + "/{session}", sessions.change, methods=["PATCH", "POST"]),
        Route(ROOT + "/{session}", sessions.delete, methods=["DELETE"]),
        Route(ROOT + "/{session}/export", sessions.export),
        Route(ROOT + "/{session}/fork", sessions.fork, methods=["POST"]),
    ]


class ForkBody(StrictModel):
    turn: Id | None = None


class _Page(StrictModel):
    """Query parameters: a part of a list, as OpenAI's lists are parted."""

    model_config = ConfigDict(strict=False)  # they are text
    limit: Annotated[int, Field(ge=1, le=1000)] = 100
    after: Id | None = None
    search: Annotated[str, Field(max_length=MAX_SEARCH)] = ""


class Changes(StrictModel):
    """What of a session can be set. title: null for the one that it would have of itself."""

    pinned: bool = False
    title: str | None = None

    @field_validator("title")
    @classmethod
    def _is_a_title(cls, title: str | None) -> str | None:
        if title is not None and (why := title_problem(title)):
            raise ValueError(f"it {why}")
        return title


class _Sessions:
    def __init__(self, host: Host, store: Store | None) -> None:
        self._shelf = host.shelf
        self._kept = store
        self._reading = Reading(host.runs_others, _THREADS)
        self._downloads = Downloads()
        # By a process that was killed: what it took in or was to send, and with another point what it was writing.
        for left in () if store is None else store.file.parent.glob(f"*{_SCRATCH}*"):
            left.unlink(missing_ok=True)

    async def list(self, request: Request) -> JSONResponse:
        store, page = self._store(request), validate(_Page, dict(request.query_params))
        if words_of(page.search):
            return await self._search(request, store, page)
        found = await self._ask(request, lambda: store.sessions(page.limit + 1, page.after))
        data = [_entry(session) for session in found[: page.limit]]
        return JSONResponse({"object": "list", "data": data, "has_more": len(found) > page.limit})

    async def _search(self, request: Request, store: Store, page: _Page) -> JSONResponse:
        if len(words_of(page.search)) > MAX_WORDS:
            raise Rejected(f"search: at most {MAX_WORDS} words are possible", code="invalid_value", param="search")
        found = await self._ask(request, lambda: store.search(page.search, page.limit, page.after, within_s=SEARCH_S))
        data = [_entry(session) for session in found.sessions]
        more = found.after is not None
        return JSONResponse({"object": "list", "data": data, "has_more": more, "after": found.after})

    async def get(self, request: Request) -> JSONResponse:
        store, wanted = self._store(request), _session_id(request)
        session, turns, usages = await self._ask(
            request, lambda: (store.session(wanted), store.turns(wanted), store.usages(wanted))
        )
        return JSONResponse({**_entry(session), "turns": [_turn(turn, usages.get(turn.id)) for turn in turns]})

    async def change(self, request: Request) -> JSONResponse:
        store, wanted = self._store(request), _session_id(request)
        raw = await read_body(request)
        changes = await self._ask(request, lambda: validate(Changes, parse_object(raw)), len(raw))
        if not changes.model_fields_set:
            raise Rejected("pinned or title is required", code="missing_required_parameter", param="pinned")

        def change() -> Session:
            session = store.session(wanted)
            if "pinned" in changes.model_fields_set:
                session = store.pin(wanted, changes.pinned)
            if "title" in changes.model_fields_set:
                session = store.rename(wanted, changes.title)
            return session

        return JSONResponse(_entry(await self._ask(request, change)))

    async def delete(self, request: Request) -> JSONResponse:
        store, wanted = self._store(request), _session_id(request)
        await self._ask(request, lambda: store.delete(wanted))
        return JSONResponse({"id": wanted, "object": "session.deleted", "deleted": True})

    async def fork(self, request: Request) -> JSONResponse:
        """Fork a session. The body may be left out: then the fork begins at the head."""
        store, wanted = self._store(request), _session_id(request)
        raw = await read_body(request)
        asked = await self._ask(request, lambda: validate(ForkBody, parse_object(raw) if raw else {}), len(raw))
        session = await self._ask(request, lambda: store.fork(wanted, asked.turn))
        return JSONResponse(_entry(session), 201)

    async def export(self, request: Request) -> PassingFile:
        store, wanted = self._store(request), _session_id(request)
        choices: dict[str, States] = {"true": "newest", "false": "none", "all": "all"}
        states = _choice(request, "state", choices, "true")
        file = _scratch(store)
        with contextlib.ExitStack() as held:
            held.enter_context(self._downloads.one(client_of(request)))
            held.enter_context(removed(file))
            try:
                await self._ask(request, lambda: export_session(store, wanted, file, states=states, spare=SPARE_BYTES))
            except SessionFileError as err:  # no room on the disk, or more than one file can hold
                said = str(err).replace(str(file), "the file")
                raise Rejected(said, status=507, code="storage_error") from err
            return PassingFile(file, held.pop_all(), f"{wanted}.ssmd")

    async def import_(self, request: Request) -> JSONResponse:
        """The body is the file; it is on disk before anything of it is believed."""
        store = self._store(request)
        believe = _choice(request, "reread", {"true": False, "false": True}, "false")
        file = _scratch(store)
        with removed(file):
            await write_body(request, file)
            try:
                done = await self._ask(
                    request, lambda: import_session(store, file, local=self._local(), believe=believe)
                )
            except SessionFileError as err:
                said = str(err).replace(str(file), "the file")
                raise Rejected(said, code="invalid_session_file") from None
        session = await self._ask(request, lambda: store.session(done.session))
        told = {"renamed": done.renamed, "states": done.checkpoints, "text_only": done.text_only or None}
        return JSONResponse({**_entry(session), **told}, 201)

    def _local(self) -> dict[str, Local]:
        """The models here that states may be for, by lineage."""
        manifests = [(model.name, model.found.manifest) for model in self._shelf.models()]
        return {m.lineage: Local(name, m.spec, m.vocabulary) for name, m in manifests if m is not None}

    async def _ask(self, request: Request, work: Callable[[], Result], nbytes: int = 0) -> Result:
        """Run what blocks on the store, or reads a body so long, in a thread, when it is the client's turn; its errors
        become Rejected, but those of a file's contents.
        """
        try:
            return await self._reading.run(work, client_of(request), nbytes)
        except SessionFileError:
            raise
        except UnknownTurn as err:
            raise Rejected(str(err), status=404, code="turn_not_found", param="turn") from None
        except UnknownSession as err:
            raise Rejected(str(err), status=404, code="session_not_found", param="session") from None
        except StoreError as err:
            raise Rejected(str(err), status=503, code="store_error", retry_after_s=1) from err

    def _store(self, request: Request) -> Store:
        """The store as who asks has it. Raises Rejected: there is none."""
        if self._kept is None:
            raise Rejected("this daemon keeps no sessions: it runs with --no-store", status=404, code="no_store")
        return self._kept.of(caller_of(request.scope).domain)


def _session_id(request: Request) -> str:
    try:
        return check_id("session", request.path_params["session"])
    except StoreError as err:
        raise Rejected(str(err), code="invalid_value", param="session") from None


def _choice(request: Request, name: str, choices: Mapping[str, Result], default: str) -> Result:
    """What the query parameter `name`, the only possible one, stands for. Raises Rejected."""
    if strangers := set(request.query_params) - {name}:
        raise Rejected(f"{shown(min(strangers))} is no parameter here; {name} is", code="unknown_parameter")
    given = request.query_params.getlist(name) or [default]
    if len(given) > 1 or given[0] not in choices:
        raise Rejected(f"{name} must be one of {', '.join(choices)}", code="invalid_value", param=name)
    return choices[given[0]]


def _scratch(store: Store) -> Path:
    """A file beside the database: private like it, and on the disk that has room for what it holds."""
    return store.file.parent / f"{_SCRATCH}{secrets.token_hex(8)}.ssmd"


def _entry(session: Session) -> dict[str, Any]:
    """`bytes`: of its checkpoints, `own_bytes` of which no other session needs. Times in seconds since 1970."""
    return {
        "id": session.id,
        "object": "session",
        "title": session.title,
        "model": session.info.model,
        "lineage": session.info.lineage,
        "created": int(session.created_at.timestamp()),
        "last_used": int(min(session.last_used_at.timestamp(), time.time())),
        "head": session.head,
        "base": session.base,
        "turn_count": session.turns,
        "bytes": session.nbytes,
        "own_bytes": session.own_nbytes,
        "pinned": session.info.pinned,
        "imported": session.info.imported is not None,
    }


def _turn(turn: Turn, usage: Mapping[str, Any] | None) -> dict[str, Any]:
    """One exchange: what was asked since the parent's answer, and the answer. usage: what that took."""
    return {
        "id": turn.id,
        "parent": turn.parent,
        "messages": [message.to_json() for message in turn.conversation],
        "prompt_tokens": turn.prompt_tokens,
        "tokens": len(turn.ids),
        "cut_messages": turn.cut,
        "usage": None if usage is None else {name: usage.get(name) for name in _USAGE},
        "finish_reason": turn.finish,
        "complete": turn.complete,
        "created": int(turn.created_at.timestamp()),
    }
