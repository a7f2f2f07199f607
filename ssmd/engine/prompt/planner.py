"""From a request to its prompt: the turn it continues, its text and ids, and the checkpoint to start from."""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime

from ssmd.engine.prompt.rendering import SYSTEM_CHECKPOINT_TOKENS, Beginnings, RenderedPrompt, Renderer
from ssmd.engine.request import Beginning, Request
from ssmd.engine.terms import Rejection, too_long
from ssmd.model.artifact import Manifest
from ssmd.runtime import buckets
from ssmd.runtime.protocol import Program
from ssmd.sessions.checkpoint import Maker, Scope, StoredCheckpoint
from ssmd.sessions.line import Line, Passage
from ssmd.sessions.match import known, with_ids_of
from ssmd.sessions.remote.ends import RemoteReader
from ssmd.sessions.remote.link import Link
from ssmd.sessions.rows.snapshot import Snapshot
from ssmd.sessions.store import Store
from ssmd.sessions.turn import (
    EVERYBODY,
    Domain,
    RenderedPrefix,
    SessionInfo,
    StoreError,
    Turn,
    UnknownSession,
    conversation,
    local_now,
    system_prompt,
    without,
)
from ssmd.text.messages import Message
from ssmd.text.template import Template, TemplateInput
from ssmd.text.tokenizer import Tokenizer, TokenizerError

log = logging.getLogger(__name__)
MOST_WARM = 64  # warm beginnings of one owner: their states are pinned, and no quota takes them
TRUNCATED = 0.6  # share of the context that a prompt may take after its oldest messages were left out
LEAST_ROOM = 0.05  # share of the context to leave for an answer, if it may take that much


@dataclass(frozen=True, eq=False)
class Prompt:
    """The text and ids that a request feeds, and where it belongs in its session."""

    text: Passage  # rendered and escaped; its beginning may be known by a hash only
    ids: Line  # at hand are at least those to feed; earlier ones may be known by a hash only
    stem: str | None  # the turn whose ids end where those at hand begin
    settled: RenderedPrefix | None  # as in the turn
    system: int  # ids of the system prompt, at whose end prefill stops, state kept or not; 0: it does not stop
    info: SessionInfo | None  # the session to store it in; None: nothing is stored
    parent: str | None  # the turn it continues
    new: tuple[Message, ...]  # messages since the parent's answer, without a final assistant message
    begun: str  # text of that final assistant message
    found: StoredCheckpoint | None  # the checkpoint to start from
    cut: int  # messages left out after the system prompt
    heard: Mapping[str, Sequence[Message]]  # by turn id: the client's copy of turns that were found altered
    reread: Callable[[], Prompt]  # builds the prompt from the request's messages alone, if stored data fail
    # Ids of beginnings that other prompts may share: up to the ends of tools, of system blocks, and of marked blocks.
    parts: tuple[int, ...] = ()
    ends: Callable[[Line], tuple[int, tuple[int, ...]]] = lambda ids: (0, ())  # (system, parts) of a prompt's ids

    def reaching(self, ids: Line) -> Prompt:
        """Return the same prompt with more of its ids at hand. Where prefill stops follows from those at hand."""
        if ids.start or not self.ids.start:
            return replace(self, ids=ids)
        system, parts = self.ends(ids)
        return replace(self, ids=ids, system=system, parts=parts)


@dataclass(frozen=True)
class _Place:
    """The session and the turn that a request continues."""

    info: SessionInfo | None  # a new session if the request continues none; None: nothing is stored
    turn: Turn | None = None
    length: int = 0  # messages of the turn's conversation
    stored: tuple[Message, ...] | None = None  # those messages, if they differ from the request's
    heard: Mapping[str, Sequence[Message]] = field(default_factory=dict)  # as in a Prompt


class Planner:
    """Plans prompts for one program. Used from many threads."""

    def __init__(
        self,
        manifest: Manifest,
        program: Program,
        tokenizer: Tokenizer,
        template: Template,
        store: Store | None,
        link: Link | None = None,
        ms_per_token: Callable[[], float | None] = lambda: None,
    ) -> None:
        """link: of the store to a remote, which is asked for conversations that the store has not.

        ms_per_token: returns the time that the program took so far to read a token; None if it has read none.
        """
        self._link, self._ms_per_token = link, ms_per_token
        self.scope = Scope(program.spec.digest(), manifest.lineage, manifest.build)
        self._manifest = manifest
        self._context = program.context
        self._vocabulary, self._producer = program.vocabulary, program.producer
        self._maker = Maker(self.scope, program.producer, program.spec)
        self._rows_alone = not program.spec.recurrent
        self._cell = buckets.grid(program.buckets)
        self._tokenizer = tokenizer
        self._renderer = Renderer(manifest, tokenizer, template, program.context, program.vocabulary)
        self._store = store
        self._beginnings = Beginnings(self._renderer)

    def plan(self, request: Request, go_on: Callable[[], None] = lambda: None) -> Prompt:
        """Plan a request: the ids to feed, its place in a session, and the checkpoint to start from.

        It reads one snapshot of the store.
        go_on: called now and then; what it raises passes through.
        Raises Rejection: an unknown session, a template that refuses, a prompt too long for the context.
        """
        with self._renderer.while_wanted(go_on):
            return self._plan(request) if request.warm is None else self._plan_warm(request, request.warm)

    def text(self, request: Request) -> str:
        """Render a request's messages with the template, as plain text. Raises Rejection."""
        return self._tokenizer.unescape(self._reread(request, self._alone(request), 0).text.own)

    def count(self, request: Request, at_most: int, go_on: Callable[[], None] = lambda: None) -> int:
        """Count the tokens of a request's messages as the template renders them, beyond the context too.

        at_most: counts no further than just above it. go_on: as of `plan`. Raises Rejection.
        """
        text = self._renderer.render(request.messages, local_now(), request.given).text
        try:
            return len(self._tokenizer.ids(text, at_most, go_on))
        except TokenizerError as err:
            raise Rejection(f"the model's tokenizer refuses these messages: {err}", param="messages") from err

    def _plan(self, request: Request) -> Prompt:
        strangers = [t for t in request.sampling.logit_bias if t >= self._vocabulary]
        if strangers:
            raise Rejection(
                f"logit_bias names token {strangers[0]}, ids end at {self._vocabulary - 1}", param="logit_bias"
            )
        if request.sampling.dry is not None:
            self._tokenizer.holding(request.sampling.dry.breakers)  # here, as the worker must not wait for it
        if self._store is None and request.session is not None:
            raise _unknown(request.session)
        if self._link is not None and request.store:
            reader = RemoteReader(self._maker, self._vocabulary, self._context, self._ms_per_token())
            self._link.bring(request.messages, request.domain, request.session, reader)
        place, shown, found, cut = self._alone(request), None, None, 0
        if self._store is not None:
            try:
                with self._store.of(request.domain).snapshot() as stored:
                    place = self._place(request, stored)
                    if place.turn is not None:
                        messages = with_ids_of(place.turn.answer, request.messages, place.length)
                        request = replace(request, messages=messages)
                    cut = place.turn.cut if request.truncate and place.turn is not None else 0
                    shown = self._show(request, place, cut, stored)
                    if (more := self._more_cut(request, place, cut, shown)) > cut:
                        cut, shown = more, self._show(request, place, more, stored)
                    found, shown = self._found(request, place, cut, shown, stored)
            except StoreError as err:
                if request.session is not None:
                    raise _unread(request.session, err) from err
                log.error("the session store cannot be read, the request is answered with what was read of it: %s", err)
        if shown is None or (found is None and shown.ids.start):  # some of it could not be read
            shown = self._reread(request, place, cut)
            if (more := self._more_cut(request, place, cut, shown)) > cut:
                cut, shown = more, self._reread(request, place, more)
        return self._prompt(request, place, cut, shown, found)

    def _reread(self, request: Request, place: _Place, cut: int) -> RenderedPrompt:
        """Render the prompt from the request's messages alone."""
        now = self._now(place)
        begun = self._beginnings.render(request, request.messages[: system_prompt(request.messages)], now)
        return self._renderer.whole(without(request.messages, cut), now, request.given, begun=begun)

    def _prompt(
        self, request: Request, place: _Place, cut: int, shown: RenderedPrompt, found: StoredCheckpoint | None
    ) -> Prompt:
        if not len(shown.ids):
            raise Rejection("the model's chat template renders these messages as an empty prompt", param="messages")
        if self._context is not None and len(shown.ids) >= self._context:
            advice = (
                "Please reduce the length of the messages or completion, start a new conversation, or leave out the "
                "oldest messages with truncation=auto."
            )
            if request.truncate:
                advice = "Truncation left out all it can: please reduce the length of the system or last message."
            raise too_long(self._context, len(shown.ids), param="messages", advice=advice)
        new = request.messages[place.length :]
        continued = bool(new) and new[-1].role == "assistant"
        begun = new[-1].content if continued else ""

        def reread() -> Prompt:
            return self._prompt(request, place, cut, self._reread(request, place, cut), None)

        now = self._now(place)

        marks = self._beginnings.marks(request, shown, now, cut)

        def ends(ids: Line) -> tuple[int, tuple[int, ...]]:
            return self._beginnings.system(request, ids, now), (*self._beginnings.parts(request, ids, now), *marks)

        system, parts = ends(shown.ids)
        return Prompt(
            text=shown.text,
            ids=shown.ids,
            stem=shown.stem,
            settled=shown.settled,
            system=system,
            info=place.info if request.store else None,
            parent=None if place.turn is None else place.turn.id,
            new=new[:-1] if continued else new,
            begun=begun if shown.text.own.endswith(self._tokenizer.escape(begun)) else begun.strip(),
            found=found,
            cut=cut,
            heard=place.heard,
            reread=reread,
            parts=parts,
            ends=ends,
        )

    def _plan_warm(self, request: Request, warm: Beginning) -> Prompt:
        """Plan the reading of a beginning: its ids, and one more to decode, as prefill gives no state for that."""
        if self._store is None:
            raise Rejection("this daemon keeps nothing: it runs with --no-store", status=404, code="no_store")
        if warm.owner is not None and request.domain != EVERYBODY:
            raise Rejection("only the daemon's own user names a key; leave it out", status=403, param="key")
        owner, now = request.domain.owner, local_now()
        try:
            if warm.session is None:
                head, text, ids, parts = self._head_of(request, now)
            else:
                owner, head, text, ids = self._stored_head(self._store.of(request.domain), warm.session)
                parts = ()
            owner = owner if warm.owner is None else warm.owner
            self._check_head(len(ids))
            whole, mine = ids.then([int(ids.own[-1])]), self._store.of(Domain(owner, (owner,)))
            if len(mine.warm()) >= MOST_WARM:
                raise StoreError(f"{MOST_WARM} beginnings are kept warm already; remove one with: ssmd warm --rm NAME")
            with mine.snapshot() as stored:
                found, *_ = stored.resume(self.scope, whole)
        except UnknownSession:
            raise _unknown(str(warm.session)) from None
        except StoreError as err:
            raise Rejection(str(err), status=409, code="no_beginning") from err
        if found is not None and found.position == len(ids) and not found.is_exact(self.scope.build, self._producer):
            found = None  # its own state is to be this build's
        info = replace(self._new_session(owner), pinned=True, title=warm.name, clock=now)

        def prompt(found: StoredCheckpoint | None) -> Prompt:
            return Prompt(
                text=Passage(text),
                ids=whole,
                stem=None,
                settled=None,
                system=len(ids),
                info=info,
                parent=None,
                new=head,
                begun="",
                found=found,
                cut=0,
                heard={},
                reread=lambda: prompt(None),
                parts=parts,
            )

        return prompt(found)

    def _head_of(self, request: Request, now: datetime) -> tuple[tuple[Message, ...], str, Line, tuple[int, ...]]:
        """Return a request's system messages, the text and ids of all that comes first, and its `parts`."""
        head = request.messages[: system_prompt(request.messages)]
        if not head and not request.given.tools:
            said = "there is no system message and no tool at the beginning, so there is nothing to keep warm"
            raise Rejection(said, param="messages")
        text, ids = self._beginnings.render(request, head, now)
        return head, text, ids, self._beginnings.parts(request, ids, now)

    def _stored_head(self, store: Store, session: str) -> tuple[str, tuple[Message, ...], str, Line]:
        """Return owner, system messages, text and ids of a stored conversation's beginning. Raises StoreError."""
        turn, tokens = store.beginning(session)
        if turn.lineage != self._manifest.lineage:
            raise StoreError(f"session {session!r} began with another model; name that one")
        ids, head = turn.ids.up_to(tokens), turn.messages[: system_prompt(turn.messages)]
        return store.session(session).info.owner, head, self._text_of(turn.text.own, ids), ids

    def _check_head(self, tokens: int) -> None:
        """Raise Rejection if a beginning of so many tokens cannot be kept warm."""
        if tokens < SYSTEM_CHECKPOINT_TOKENS:
            raise Rejection(
                f"this beginning has {tokens} tokens; one below {SYSTEM_CHECKPOINT_TOKENS} is read faster than kept",
                param="messages",
            )
        if self._context is not None and tokens + 1 >= self._context:
            raise too_long(self._context, tokens + 1, param="messages", advice="Please leave out some of it.")

    def _text_of(self, text: str, ids: Line) -> str:
        """Return the beginning of a rendered text that these ids spell; "" if none does."""
        least, most, wanted = 0, len(text), ids.own.tolist()
        while least < most:
            middle = (least + most) // 2
            enough = len(self._renderer.ids(text[: self._tokenizer.last_cut(text, middle)])) >= len(wanted)
            least, most = (least, middle) if enough else (middle + 1, most)
        text = text[: self._tokenizer.last_cut(text, least)]
        return text if self._tokenizer.spells(wanted, text) else ""

    def warm_up(self) -> None:
        """Plan a made-up conversation, so that template, tokenizer and queries are ready for the next request."""
        text = secrets.token_hex(12)
        with contextlib.suppress(Rejection):
            self.plan(Request((Message("user", text), Message("assistant", text), Message("user", text)), store=False))

    def _alone(self, request: Request) -> _Place:
        """Return the place of a request that continues nothing: a new session, if it is to be stored."""
        return _Place(self._new_session(request.domain.owner) if request.store and self._store is not None else None)

    def _place(self, request: Request, stored: Snapshot) -> _Place:
        """Find the session of a request and the turn that it continues. Raises UnknownSession."""
        echoed = stored.echoed(request.messages, request.session)
        session = request.session if echoed is None else echoed.session
        if session is None:
            return self._alone(request)
        info = stored.info(session)
        owner = info.owner or request.domain.owner  # a session without an owner now belongs to this caller
        info = replace(info, model=self._manifest.name, lineage=self._manifest.lineage, owner=owner)
        if echoed is None:
            return _Place(info)
        turn = stored.turn(echoed.turn)
        if turn.sound:
            return _Place(info, turn, echoed.length, echoed.stored)
        parent, length, heard = stored.heard(request.messages, turn)
        log.warning("turn %s was altered: it is read again from the client's words", turn.id)
        return _Place(info, parent, length, request.messages[:length], heard)

    def _more_cut(self, request: Request, place: _Place, cut: int, shown: RenderedPrompt) -> int:
        """Return how many messages to leave out, at least `cut`, so that an answer has room."""
        if not request.truncate or self._context is None:
            return cut
        return cut_to_fit(
            request.messages,
            cut,
            len(shown.ids),
            context=self._context,
            max_tokens=request.max_tokens,
            tokens_with=lambda more: len(self._reread(request, place, more).ids),
        )

    def _show(self, request: Request, place: _Place, cut: int, stored: Snapshot) -> RenderedPrompt:
        """Render the prompt, with its stored beginning. Raises Rejection if the template refuses it."""
        turn, messages, now = place.turn, request.messages, self._now(place)
        if turn is None or place.heard:
            return self._reread(request, place, cut)
        new = messages[place.length :]
        if place.stored is None and turn.cut == cut:
            shown = self._renderer.after(turn, without(messages, cut)[0], new, now, request.given)
            if shown is not None:
                return shown
        said = place.stored
        if said is None and turn.sound:
            path = stored.path(turn.id)
            said = conversation(path) if _is_whole(path) else None
        if said is not None:
            messages = (*known(said, messages[: place.length]), *new)
        return self._renderer.whole(without(messages, cut), now, request.given, turn, stored.above)

    def _found(
        self, request: Request, place: _Place, cut: int, shown: RenderedPrompt, stored: Snapshot
    ) -> tuple[StoredCheckpoint | None, RenderedPrompt]:
        """Find the checkpoint to start from. Return it, and `shown` with all ids at hand that follow it."""
        session = None if place.info is None else place.info.id
        try:
            if not request.store:  # the names of sealed states are made of all ids
                ids, stem = stored.reach(shown.ids, shown.stem, 0)
                shown = replace(shown, ids=ids, stem=stem)
            found, ids, stem = stored.resume(self.scope, shown.ids, shown.stem, session)
            if found is not None and self._rows_alone:
                found = stored.lengthen(self.scope, found, ids, self._cell)
            ids, stem = stored.reach(ids, stem, len(ids) - request.sampling.counted(len(ids)))
        except StoreError as err:
            log.warning("stored tokens cannot be used, the conversation is read again: %s", err)
            shown = self._reread(request, place, cut)
            found, ids, stem = stored.resume(self.scope, shown.ids, None, session)
        return found, replace(shown, ids=ids, stem=stem)

    def _now(self, place: _Place) -> datetime:
        return local_now() if place.info is None else place.info.clock

    def _new_session(self, owner: str) -> SessionInfo:
        return SessionInfo(
            id=f"ses_{secrets.token_hex(12)}",
            model=self._manifest.name,
            lineage=self._manifest.lineage,
            clock=local_now(),
            owner=owner,
        )

    def settled(
        self, stored: Snapshot, turn: Turn, info: SessionInfo, given: TemplateInput
    ) -> tuple[RenderedPrompt, bool] | None:
        """Render the beginning of all requests that go on from a stored turn.

        Returns it, and True if the turn's own text agrees with it; None if the template has no such text.
        given: of the turn's request. Raises StoreError.
        """
        try:
            text = self._renderer.rest(turn, stored.first(turn), info.clock, given) if not turn.cut else None
            if text is not None:
                agrees = self._renderer.agrees(text, turn)
                if agrees or turn.stem is None or self._renderer.apart(stored.turn(turn.stem), turn):
                    grown = turn.ids if agrees else turn.ids.up_to(turn.ids.start)
                    at = len(turn.text.own) if agrees else 0
                    return RenderedPrompt(text, grown.then(self._renderer.ids(text.own[at:])), turn.stem), agrees
            path = stored.path(turn.id)
            if not _is_whole(path):
                return None
            messages = without(conversation(path), turn.cut)
            shown = self._renderer.end(messages, info.clock, given, turn, stored.above)
        except Rejection:
            return None
        agrees = shown.text.start == turn.text.start and self._renderer.agrees(shown.text, turn)
        return (shown, agrees) if len(shown.text) else None


def _is_whole(path: Sequence[Turn]) -> bool:
    """Return True if a path has all messages up to its end."""
    return all(t.sound for t in path) and path[0].parent is None


def _unread(session: str, err: StoreError) -> Rejection:
    """Build the error for a request whose session cannot be read: in a new session it would be another conversation."""
    if isinstance(err, UnknownSession):
        return _unknown(session)
    return Rejection(str(err), status=503, code="store_error", retry_after_s=1)


def _unknown(session: str) -> Rejection:
    return Rejection(
        f"there is no session {session!r}; leave `session` out to start one, or list them at /ssmd/v1/sessions",
        status=404,
        code="session_not_found",
        param="session",
    )


def cut_to_fit(
    messages: Sequence[Message],
    cut: int,
    tokens: int,
    *,
    context: int,
    max_tokens: int,
    tokens_with: Callable[[int], int],
) -> int:
    """Return how many messages after the system prompt to leave out, so that an answer has room.

    `cut`, if there is room without them, or nothing more to leave out. Otherwise so many that the prompt takes at most
    TRUNCATED of the context. Then not every turn has to cut again.
    tokens: of the prompt without `cut` messages. tokens_with: returns them for another number.
    """
    if context - tokens >= min(max_tokens, int(context * LEAST_ROOM)):
        return cut
    head = system_prompt(messages)
    # Each remaining part begins with a user's message. The last user's message always stays.
    ends = [i - head for i, m in enumerate(messages) if m.role == "user" and i - head > cut]
    least, most = 0, len(ends) - 1
    while least < most:
        middle = (least + most) // 2
        fits = tokens_with(ends[middle]) <= context * TRUNCATED
        least, most = (least, middle) if fits else (middle + 1, most)
    return ends[least] if ends else cut
