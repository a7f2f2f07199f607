"""/ssmd/v1/sessions: the conversations kept here: list, read, pin, fork, delete, export, import."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any, BinaryIO, TypeVar

from pydantic import ConfigDict, Field, field_validator
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from ssmd.api.generate.fair_reading import FairPool, client_of
from ssmd.api.http.access import caller_of
from ssmd.api.http.body import READ_TIMEOUT_S, Id, StrictModel, brief, object_with, parse_object, read_body, validate
from ssmd.api.operation import Service
from ssmd.engine.terms import Rejection
from ssmd.machine.room import SPARE_BYTES, check_room
from ssmd.machine.size import show_size
from ssmd.sessions.files.packing import States
from ssmd.sessions.files.sessionfile import SessionFileError
from ssmd.sessions.files.transfer import LocalModel, export_session, import_session
from ssmd.sessions.rows.sessions import words_of
from ssmd.sessions.store import Store
from ssmd.sessions.turn import Session, StoreError, Turn, UnknownSession, UnknownTurn, check_id, title_problem

MAX_FILE_BYTES = 4 << 30  # of a session file
Result = TypeVar("Result")
_SCRATCH = ".transfer-"
MAX_SEARCH = 200  # characters of a search
MAX_WORDS = 10
SEARCH_S = 1.0  # about how long one request may search; the client continues from there
_USAGE = ("cached_tokens", "completion_tokens", "resume", "ttft_ms", "prefill_ms", "restore_ms", "parted_at")

LEAST_BYTES = 1 << 20  # bytes of a file that a client must send or take within READ_TIMEOUT_S

log = logging.getLogger(__name__)
MOST = 16
MOST_OF_ONE = 4
RETRY_AFTER_S = 5


class ForkBody(StrictModel):
    turn: Id | None = None


class _TurnChoice(StrictModel):
    turn: Id | None = None  # None: the session's head


class _Page(StrictModel):
    """Query parameters of a part of a list, as in OpenAI's lists."""

    model_config = ConfigDict(strict=False)  # query parameters are text
    limit: Annotated[int, Field(ge=1, le=1000)] = 100
    after: Id | None = None
    search: Annotated[str, Field(max_length=MAX_SEARCH)] = ""


class SessionChanges(StrictModel):
    """The settings of a session that a request can change. title: null restores the default title."""

    pinned: bool = False
    title: str | None = None

    @field_validator("title")
    @classmethod
    def _is_a_title(cls, title: str | None) -> str | None:
        if title is not None and (why := title_problem(title)):
            raise ValueError(f"it {why}")
        return title


class Sessions:
    """The handlers."""

    def __init__(self, on: Service) -> None:
        store = on.store
        self._shelf = on.host.shelf
        self._kept = store
        self._pool = on.pool
        self._downloads = Downloads()
        # Left by a process that was killed: files that it received or was to send, or had not finished.
        for left in () if store is None else store.file.parent.glob(f"*{_SCRATCH}*"):
            left.unlink(missing_ok=True)

    async def list(self, request: Request) -> Response:
        store, page = self._store(request), validate(_Page, dict(request.query_params))
        if words_of(page.search):
            return await self._search(request, store, page)

        def listed() -> Response:
            found = store.sessions(page.limit + 1, page.after)
            data = [_entry(session) for session in found[: page.limit]]
            return _json("data", data, {"object": "list", "has_more": len(found) > page.limit})

        return await self._ask(request, listed)

    async def _search(self, request: Request, store: Store, page: _Page) -> Response:
        if len(words_of(page.search)) > MAX_WORDS:
            raise Rejection(f"search: at most {MAX_WORDS} words are possible", code="invalid_value", param="search")

        def listed() -> Response:
            found = store.search(page.search, page.limit, page.after, within_s=SEARCH_S)
            fields = {"object": "list", "has_more": found.after is not None, "after": found.after}
            return _json("data", [_entry(session) for session in found.sessions], fields)

        return await self._ask(request, listed)

    async def get(self, request: Request) -> Response:
        store, wanted = self._store(request), _session_id(request)

        def whole() -> Response:
            session, turns, usages = store.session(wanted), store.turns(wanted), store.usages(wanted)
            return _json("turns", [_turn(turn, usages.get(turn.id)) for turn in turns], _entry(session))

        return await self._ask(request, whole)

    async def parting(self, request: Request) -> JSONResponse:
        """Return where the prompt of a turn differs from an earlier one, and with which words."""
        store, wanted = self._store(request), _session_id(request)
        asked = validate(_TurnChoice, dict(request.query_params)).turn

        def found() -> dict[str, Any]:
            name = store.session(wanted).head if asked is None else asked
            turn = next((one for one in store.turns(wanted) if one.id == name), None)
            if turn is None:
                raise UnknownTurn(f"session {wanted} has no turn {name}")
            parting = store.partings([turn]).get(name)
            return {"object": "parting", "turn": name, "parting": None if parting is None else asdict(parting)}

        return JSONResponse(await self._ask(request, found))

    async def change(self, request: Request) -> JSONResponse:
        store, wanted = self._store(request), _session_id(request)
        changes = await self._pool.body(request, SessionChanges)
        if not changes.model_fields_set:
            raise Rejection("pinned or title is required", code="missing_required_parameter", param="pinned")

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
                await self._ask(
                    request, lambda: export_session(store, wanted, file, states=states, spare=SPARE_BYTES), long=True
                )
            except SessionFileError as err:  # no room on the disk, or more than one file can hold
                said = str(err).replace(str(file), "the file")
                raise Rejection(said, status=507, code="storage_error") from err
            return PassingFile(file, held.pop_all(), f"{wanted}.ssmd")

    async def import_(self, request: Request) -> JSONResponse:
        """Import a session from the body. The file is written to disk before it is checked."""
        store = self._store(request)
        believe = _choice(request, "reread", {"true": False, "false": True}, "false")
        file = _scratch(store)
        with removed(file):
            await write_body(request, file, self._pool, client_of(request))
            try:
                done = await self._ask(
                    request, lambda: import_session(store, file, local=self._local(), believe=believe), long=True
                )
            except SessionFileError as err:
                said = str(err).replace(str(file), "the file")
                raise Rejection(said, code="invalid_session_file") from None
        session = await self._ask(request, lambda: store.session(done.session))
        told = {"renamed": done.renamed, "states": done.checkpoints, "text_only": done.text_only or None}
        return JSONResponse({**_entry(session), **told}, 201)

    def _local(self) -> dict[str, LocalModel]:
        """Return the installed models that states may be for, by lineage."""
        manifests = [(model.name, model.found.manifest) for model in self._shelf.models()]
        return {m.lineage: LocalModel(name, m.spec, m.vocabulary) for name, m in manifests if m is not None}

    async def _ask(
        self, request: Request, work: Callable[[], Result], nbytes: int = 0, *, long: bool = False
    ) -> Result:
        """Run work that blocks on the store in a thread, when it is the client's turn. nbytes, long: as of the pool.

        Its errors become Rejection, but those of a file's contents.
        """
        try:
            return await self._pool.run(work, client_of(request), nbytes, long=long)
        except SessionFileError:
            raise
        except UnknownTurn as err:
            raise Rejection(str(err), status=404, code="turn_not_found", param="turn") from None
        except UnknownSession as err:
            raise Rejection(str(err), status=404, code="session_not_found", param="session") from None
        except StoreError as err:
            raise Rejection(str(err), status=503, code="store_error", retry_after_s=1) from err

    def _store(self, request: Request) -> Store:
        """Return the store as the caller's domain sees it. Raises Rejection if the daemon has none."""
        if self._kept is None:
            raise Rejection("this daemon keeps no sessions: it runs with --no-store", status=404, code="no_store")
        return self._kept.of(caller_of(request.scope).domain)


def _session_id(request: Request) -> str:
    try:
        return check_id("session", request.path_params["session"])
    except StoreError as err:
        raise Rejection(str(err), code="invalid_value", param="session") from None


def _choice(request: Request, name: str, choices: Mapping[str, Result], default: str) -> Result:
    """Return the choice that the query parameter `name` selects. Raises Rejection; any other parameter is refused."""
    if strangers := set(request.query_params) - {name}:
        raise Rejection(f"{brief(min(strangers))} is not a parameter here; {name} is", code="unknown_parameter")
    given = request.query_params.getlist(name) or [default]
    if len(given) > 1 or given[0] not in choices:
        raise Rejection(f"{name} must be one of {', '.join(choices)}", code="invalid_value", param=name)
    return choices[given[0]]


def _scratch(store: Store) -> Path:
    """Return the path of a new file beside the database: private like it, and on the disk that has the space."""
    return store.file.parent / f"{_SCRATCH}{secrets.token_hex(8)}.ssmd"


def _json(name: str, values: Sequence[Any], fields: Mapping[str, Any]) -> Response:
    """Encode an answer with a long array; in the thread that made it."""
    return Response(object_with(name, values, fields), media_type="application/json")


def _entry(session: Session) -> dict[str, Any]:
    """Describe a session. `bytes`: of its checkpoints; no other one needs `own_bytes` of them. Times: s since 1970."""
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
    """Describe one exchange: the input since the parent's answer, and the answer. usage: of the answer."""
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


async def write_body(
    request: Request,
    file: Path,
    pool: FairPool,
    client: str,
    *,
    within_s: float = READ_TIMEOUT_S,
    spare: int = SPARE_BYTES,
) -> None:
    """Write the body into a new private file. It is stored after that, so its size must be free twice.

    pool, client: where the writing takes its turns, and as which client.
    Raises Rejection: 507 if there is no room for it, 408 if `LEAST_BYTES` take longer than `within_s`.
    """
    parts, left_s, seen = aiter(request.stream()), within_s, 0
    try:
        check_room(file.parent, 2 * int(request.headers.get("content-length", 0)) + spare)
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
            while True:
                began = time.monotonic()  # the disk's own time does not count
                try:
                    async with asyncio.timeout(left_s):
                        part = await anext(parts, None)
                except TimeoutError:
                    raise _late(within_s) from None
                if part is None:
                    return
                left_s, seen = left_s - (time.monotonic() - began), seen + len(part)
                if seen >= LEAST_BYTES:
                    left_s, seen = within_s, 0
                await pool.run(partial(_write, out, part, file.parent, spare), client, least_s=0.0)
    except OSError as err:
        reason = err.strerror or str(err)
        raise Rejection(f"the file cannot be kept here: {reason}", status=507, code="storage_error") from err


def _write(out: BinaryIO, part: bytes, folder: Path, spare: int) -> None:
    check_room(folder, len(part) + spare)
    out.write(part)


def _late(within_s: float) -> Rejection:
    return Rejection(
        f"less than {show_size(LEAST_BYTES)} of the body arrived within {within_s:g} s", status=408, code="body_timeout"
    )


class Downloads:
    """Files that are made or sent, by client. In the event loop only."""

    def __init__(self) -> None:
        self._of: Counter[str] = Counter()

    @contextlib.contextmanager
    def one(self, client: str) -> Iterator[None]:
        """Count a file of a client until it is removed. Raises Rejection (503) if there are too many."""
        if self._of[client] >= MOST_OF_ONE or self._of.total() >= MOST:
            raise Rejection(
                f"{self._of[client]} files are on their way to this client, {self._of.total()} to all, of at most "
                f"{MOST_OF_ONE} and {MOST}; try again when one has arrived",
                status=503,
                code="exports_full",
                retry_after_s=RETRY_AFTER_S,
            )
        self._of[client] += 1
        try:
            yield
        finally:
            self._of[client] -= 1
            self._of = +self._of


class PassingFile(FileResponse):
    """A file that is removed after it was sent, or could not be sent. Then `held` is closed too.

    A client that takes less than `LEAST_BYTES` of it within `within_s` is disconnected.
    """

    def __init__(
        self, file: Path, held: contextlib.ExitStack, name: str = "file", *, within_s: float = READ_TIMEOUT_S
    ) -> None:
        super().__init__(file, filename=name, media_type="application/octet-stream")
        self._held, self._within_s = held, within_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        left_s, taken = self._within_s, 0

        async def send_in_time(message: Message) -> None:
            nonlocal left_s, taken
            began = time.monotonic()  # the disk's own time does not count
            async with asyncio.timeout(left_s):
                await send(message)
            left_s, taken = left_s - (time.monotonic() - began), taken + len(message.get("body", b""))
            if taken >= LEAST_BYTES:
                left_s, taken = self._within_s, 0

        with self._held:
            try:
                await super().__call__(scope, receive, send_in_time)
            except TimeoutError:
                log.warning("a client reads so slowly that its export is given up")


@contextlib.contextmanager
def removed(file: Path) -> Iterator[None]:
    """Remove a file at the end, if it is there."""
    try:
        yield
    finally:
        file.unlink(missing_ok=True)
