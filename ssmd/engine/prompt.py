"""From a request to what has to be fed: the turn it continues, its text and ids, the checkpoint to start from."""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import lru_cache

import numpy as np

from ssmd.engine.request import Rejected, Request
from ssmd.model.artifact import Manifest
from ssmd.runtime.protocol import Program
from ssmd.sessions.checkpoint import Found, Ids, Scope
from ssmd.sessions.match import Match, match
from ssmd.sessions.rows.snapshot import Snapshot
from ssmd.sessions.store import Store
from ssmd.sessions.turn import SessionInfo, StoreError, Turn, UnknownSession, conversation
from ssmd.text.messages import Message
from ssmd.text.template import ChatTemplate, TemplateError
from ssmd.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)
SYSTEM_CHECKPOINT_TOKENS = 64  # a shorter beginning fits the bucket of what follows it: feeding it again is free


@dataclass(frozen=True)
class Prompt:
    """What a request feeds and where it belongs.

    text: rendered and escaped. system: how many of `ids` are the system prompt's (0: no checkpoint there). info: the
    session to keep it in, None to keep nothing. parent: the turn it continues. new: the messages since that turn's
    answer, without a final assistant message, whose text is `begun`. found: the checkpoint to start from.
    """

    text: str
    ids: Ids
    system: int
    info: SessionInfo | None
    parent: str | None
    new: tuple[Message, ...]
    begun: str
    found: Found | None


@dataclass(frozen=True)
class _Place:
    """Where a request belongs. info: its session, a new one if it continues none. path: turns above it, root first."""

    matched: Match
    info: SessionInfo | None
    path: Sequence[Turn]


@dataclass(frozen=True)
class _Shown:
    """A conversation as the model reads it. now: the time that the template was told."""

    text: str
    ids: Ids
    now: datetime


class Planner:
    """Plans prompts for one program. Used from many threads."""

    def __init__(
        self, manifest: Manifest, program: Program, tokenizer: Tokenizer, template: ChatTemplate, store: Store | None
    ) -> None:
        self.scope = Scope(program.spec.digest(), manifest.lineage, manifest.build)
        self._manifest = manifest
        self._context = program.context
        self._vocabulary = program.vocabulary
        self._tokenizer = tokenizer
        self._template = template
        self._store = store
        self._beginning = lru_cache(maxsize=64)(self._render_beginning)

    def plan(self, request: Request) -> Prompt:
        """What a request feeds, where it belongs and which state it starts from: all of one moment of the store.

        Raises Rejected: an unknown session, a template that refuses, a prompt too long for the context.
        """
        strangers = [t for t in request.sampling.logit_bias if t >= self._vocabulary]
        if strangers:
            raise Rejected(
                f"logit_bias names token {strangers[0]}, ids end at {self._vocabulary - 1}", param="logit_bias"
            )
        if self._store is None and request.session is not None:
            raise _unknown(request.session)
        place, shown, found = self._alone(request), None, None
        if self._store is not None:
            try:
                with self._store.snapshot() as stored:
                    place = self._place(request, stored)
                    shown = self._show(place)
                    found = stored.find(self.scope, shown.ids, None if place.info is None else place.info.id)
            except StoreError as err:
                if isinstance(err, UnknownSession) and request.session is not None:
                    raise _unknown(request.session) from err
                log.error("the session store cannot be read, the request is answered with what was read of it: %s", err)
        if shown is None:
            shown = self._show(place)
        new = place.matched.new
        continued = bool(new) and new[-1].role == "assistant"
        begun = new[-1].content if continued else ""
        keeps = request.store and self._store is not None
        return Prompt(
            text=shown.text,
            ids=shown.ids,
            system=self._system(place.matched.messages, shown) if keeps else 0,
            info=place.info if request.store else None,
            parent=place.matched.parent,
            new=new[:-1] if continued else new,
            begun=begun if shown.text.endswith(self._tokenizer.escape(begun)) else begun.strip(),
            found=found,
        )

    def warm_up(self) -> None:
        """Plan a conversation that nobody has, so that template, tokenizer and queries are ready for the next one."""
        text = secrets.token_hex(12)
        with contextlib.suppress(Rejected):
            self.plan(Request((Message("user", text), Message("assistant", text), Message("user", text)), store=False))

    def _alone(self, request: Request) -> _Place:
        """The place of a request that continues nothing: in a new session, if it is kept."""
        new = self._new_session() if request.store and self._store is not None else None
        return _Place(Match(None, None, request.messages, request.messages), new, ())

    def _place(self, request: Request, stored: Snapshot) -> _Place:
        """The session that the request belongs to and the turns above it. Raises UnknownSession."""
        matched = match(request.messages, stored.candidates(request.messages, request.session), request.session)
        if matched.session is None:
            return self._alone(request)
        info = replace(stored.info(matched.session), model=self._manifest.name, lineage=self._manifest.lineage)
        return _Place(matched, info, () if matched.parent is None else stored.path(matched.parent))

    def _show(self, place: _Place) -> _Shown:
        """What the model is to read. Raises Rejected: the template refuses it, or it does not fit the context."""
        now = datetime.now(UTC) if place.info is None else place.info.clock
        text = self._render(place.matched.messages, now)
        ids = self._ids(text, place.path)
        if self._context is not None and len(ids) >= self._context:
            raise Rejected(
                f"this model's context is {self._context} tokens and the messages come to {len(ids)}; "
                "shorten them, or start a new conversation",
                code="context_length_exceeded",
                param="messages",
            )
        return _Shown(text, ids, now)

    def _new_session(self) -> SessionInfo:
        return SessionInfo(
            id=f"ses_{secrets.token_hex(12)}",
            model=self._manifest.name,
            lineage=self._manifest.lineage,
            clock=datetime.now(UTC),
        )

    def _render(self, messages: Sequence[Message], now: datetime) -> str:
        known = "developer" in self._template.source  # else it is what OpenAI made of it: a system message
        shown = [
            replace(
                m,
                role="system" if m.role == "developer" and not known else m.role,
                content=self._tokenizer.escape(m.content),
            )
            for m in messages
        ]
        try:
            return self._template.render(shown, now=now)
        except TemplateError as err:
            raise Rejected(f"the model's chat template refuses these messages: {err}", param="messages") from err

    def _ids(self, text: str, path: Sequence[Turn]) -> Ids:
        """Stored ids for the deepest turn whose text this prompt continues; the tokenizer sees the rest only.

        Generated text need not tokenise back into the ids that were sampled: those are what the state saw.
        """
        for turn in reversed(path):
            at = len(turn.text)
            if not at or turn.lineage != self._manifest.lineage:  # imported as text, or answered by another model
                continue
            if self.continues(text, turn.text):
                return np.concatenate([turn.ids, np.array(self._tokenizer.encode(text[at:]), np.int32)])
        return np.array(self._tokenizer.encode(text), np.int32)

    def _system(self, messages: Sequence[Message], shown: _Shown) -> int:
        """How many ids of a prompt are its system prompt's; 0 if they are few, or are not ids of their own."""
        head = tuple(messages[: next((i for i, m in enumerate(messages) if m.role not in ("system", "developer")), 0)])
        beginning, tokens = self._beginning(head, shown.now if "strftime_now" in self._template.source else None)
        fits = SYSTEM_CHECKPOINT_TOKENS <= len(tokens) < len(shown.ids) - 1 and shown.text.startswith(beginning)
        return len(tokens) if fits and np.array_equal(shown.ids[: len(tokens)], tokens) else 0

    def _render_beginning(self, head: tuple[Message, ...], now: datetime | None) -> tuple[str, Ids]:
        """What every conversation under this system prompt begins with, up to the last control token, and its ids."""
        try:
            text = self._beginning_of(head, now or datetime.now(UTC))
        except Rejected:
            return "", np.empty(0, np.int32)
        return text, np.array(self._tokenizer.encode(text), np.int32)

    def _beginning_of(self, messages: Sequence[Message], now: datetime) -> str:
        """What is rendered for these messages whatever the user says next, up to the last control token."""
        a, b = (self._render([*messages, Message("user", probe)], now) for probe in ("a", "b"))
        common = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        return a[: self._tokenizer.last_cut(a, common)]

    def settled(self, path: Sequence[Turn], info: SessionInfo) -> tuple[str, Ids]:
        """What every request begins with that goes on from a stored turn, and its ids. `path`: root first.

        ("", no ids) if the template has no such text.
        """
        try:
            text = self._beginning_of(conversation(path), info.clock)
        except Rejected:
            text = ""
        return text, self._ids(text, path)

    def continues(self, text: str, stored: str) -> bool:
        """Whether stored text can be told apart at the beginning of `text`, so that its ids can stand for it."""
        return text.startswith(stored) and self._tokenizer.ends_at_control(text, len(stored))


def _unknown(session: str) -> Rejected:
    return Rejected(
        f"there is no session {session!r}; leave `session` out to start one, or list them at /ssmd/v1/sessions",
        status=404,
        code="session_not_found",
        param="session",
    )
