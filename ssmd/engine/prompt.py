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
        """Raises Rejected: an unknown session, a template that refuses, a prompt too long for the context."""
        strangers = [t for t in request.sampling.logit_bias if t >= self._vocabulary]
        if strangers:
            raise Rejected(
                f"logit_bias names token {strangers[0]}, ids end at {self._vocabulary - 1}", param="logit_bias"
            )
        matched = self._match(request)
        info, path = self._place(request, matched)
        now = datetime.now(UTC) if info is None else info.clock
        text = self._render(matched.messages, now)
        ids = self._ids(text, path)
        if self._context is not None and len(ids) >= self._context:
            raise Rejected(
                f"this model's context is {self._context} tokens and the messages come to {len(ids)}; "
                "shorten them, or start a new conversation",
                code="context_length_exceeded",
                param="messages",
            )
        last = matched.new[-1] if matched.new else None
        continued = last is not None and last.role == "assistant"
        begun = last.content if last is not None and continued else ""
        return Prompt(
            text=text,
            ids=ids,
            system=self._system(matched.messages, text, ids, now) if request.store and self._store else 0,
            info=info if request.store else None,
            parent=matched.parent,
            new=matched.new[:-1] if continued else matched.new,
            begun=begun if text.endswith(self._tokenizer.escape(begun)) else begun.strip(),
            found=self.find(ids, None if info is None else info.id),
        )

    def warm_up(self) -> None:
        """Plan a conversation that nobody has, so that template, tokenizer and queries are ready for the next one."""
        text = secrets.token_hex(12)
        with contextlib.suppress(Rejected):
            self.plan(Request((Message("user", text), Message("assistant", text), Message("user", text)), store=False))

    def _match(self, request: Request) -> Match:
        alone = Match(None, None, request.messages, request.messages)
        if self._store is None:
            if request.session is not None:
                raise Rejected(_unknown(request.session), status=404, code="session_not_found", param="session")
            return alone
        try:
            return match(request.messages, self._store.candidates(request.messages, request.session), request.session)
        except UnknownSession as err:
            raise Rejected(
                _unknown(str(request.session)), status=404, code="session_not_found", param="session"
            ) from err
        except StoreError as err:
            log.error("the session store cannot be read, the request is answered without it: %s", err)
            return alone

    def _place(self, request: Request, matched: Match) -> tuple[SessionInfo | None, Sequence[Turn]]:
        """The session that the request belongs to and the turns above it; a new one is not written yet."""
        if self._store is None:
            return None, ()
        if matched.session is None:
            return self._new_session() if request.store else None, ()
        try:
            info = self._store.session(matched.session).info
            info = replace(info, model=self._manifest.name, lineage=self._manifest.lineage)
            return info, () if matched.parent is None else self._store.path(matched.parent)
        except StoreError as err:  # deleted this instant, say
            raise Rejected(_unknown(matched.session), status=404, code="session_not_found", param="session") from err

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

    def _system(self, messages: Sequence[Message], text: str, ids: Ids, now: datetime) -> int:
        head = tuple(messages[: next((i for i, m in enumerate(messages) if m.role not in ("system", "developer")), 0)])
        beginning, tokens = self._beginning(head, now if "strftime_now" in self._template.source else None)
        fits = SYSTEM_CHECKPOINT_TOKENS <= len(tokens) < len(ids) - 1 and text.startswith(beginning)
        return len(tokens) if fits and np.array_equal(ids[: len(tokens)], tokens) else 0

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

    def find(self, ids: Ids, session: str | None, skip: Sequence[int] = ()) -> Found | None:
        """The deepest usable checkpoint for `ids`, passing over those in `skip`."""
        if self._store is None:
            return None
        try:
            return self._store.find(self.scope, ids, session, skip=skip)
        except StoreError as err:
            log.error("no checkpoint can be looked up, the prompt is read whole: %s", err)
            return None


def _unknown(session: str) -> str:
    return f"there is no session {session!r}; leave `session` out to start one, or list them at /ssmd/v1/sessions"
