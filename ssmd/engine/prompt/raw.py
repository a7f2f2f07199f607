"""Raw prompts: text or ids as a client sends them, without a template, and the stored states that they go on from."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from ssmd.engine.prompt.planner import Prompt
from ssmd.engine.request import Delta, Event, Finish, Request
from ssmd.engine.terms import Rejection, too_long
from ssmd.runtime.protocol import Program
from ssmd.sessions.checkpoint import Scope, StoredCheckpoint
from ssmd.sessions.line import Ids, Line, Passage, as_ids
from ssmd.sessions.store import Store
from ssmd.sessions.turn import StoreError
from ssmd.text.tokenizer import Detokenizer, Tokenizer, TokenizerError

log = logging.getLogger(__name__)
PARAM = "prompt"


class RawPlanner:
    """Plans raw prompts for one program. They belong to no session: only states are kept of them. Thread-safe."""

    def __init__(self, scope: Scope, program: Program, tokenizer: Tokenizer, store: Store | None) -> None:
        self._scope, self._tokenizer, self._store = scope, tokenizer, store
        self._context, self._vocabulary = program.context, program.vocabulary

    def plan(self, request: Request, go_on: Callable[[], None] = lambda: None) -> Prompt:
        """Plan the ids to feed and the state to start from. Raises Rejection, and what `go_on` raises."""
        strangers = [t for t in request.sampling.logit_bias if t >= self._vocabulary]
        if strangers:
            raise Rejection(
                f"logit_bias names token {strangers[0]}, ids end at {self._vocabulary - 1}", param="logit_bias"
            )
        raw = request.raw
        given = self.ids(raw, at_most=self._context, go_on=go_on) if isinstance(raw, str) else self.checked(raw or ())
        if not len(given):
            raise Rejection("the prompt is empty; the model needs at least one token to go on from", param=PARAM)
        if self._context is not None and len(given) >= self._context:
            advice = "Please reduce the length of the prompt."
            raise too_long(self._context, len(given), param=PARAM, advice=advice)
        ids = Line(given)
        return self._prompt(ids, self._found(request, ids))

    def ids(
        self,
        text: str,
        *,
        begin: bool = True,
        controls: bool = True,
        param: str = PARAM,
        at_most: int | None = None,
        go_on: Callable[[], None] = lambda: None,
    ) -> Ids:
        """Return the ids of a text. Raises Rejection.

        begin: put the tokenizer's beginning before it. controls: read the text of control tokens as control tokens.
        param: the field's name in errors. at_most: of a longer text, at least so many ids and not all are returned.
        """
        tokenizer = self._tokenizer
        try:
            ids = tokenizer.ids(tokenizer.quote(text) if controls else tokenizer.escape(text), at_most, go_on)
        except TokenizerError as err:
            raise Rejection(f"the model's tokenizer refuses this text: {err}", param=param) from err
        before = tokenizer.beginning if begin else ()
        if tuple(ids[: len(before)].tolist()) != before:  # the text may begin with it already
            ids = as_ids([*before, *ids.tolist()])
        return self.checked(ids, param)

    def fewest(self, text: str, enough: int) -> int:
        """Return a number of ids that a text has at the least, as of the tokenizer."""
        return self._tokenizer.fewest(text, enough)

    def checked(self, ids: Sequence[int] | Ids, param: str = PARAM) -> Ids:
        """Return the ids as an array, if all are in the model's vocabulary. Raises Rejection."""
        try:
            found = as_ids(ids)
        except (ValueError, OverflowError):
            found = None
        if found is None or (len(found) and int(found.max()) >= self._vocabulary):
            raise Rejection(
                f"{param} has a token id that this model does not have; ids go from 0 to {self._vocabulary - 1}",
                code="invalid_value",
                param=param,
            )
        return found

    def written(self, ids: Sequence[int]) -> str:
        """Return the text of ids, with control tokens by their names."""
        detokenizer, parts = Detokenizer(self._tokenizer), list[str]()
        for token in ids:
            if self._tokenizer.is_control(token):
                parts += [detokenizer.flush(), self._tokenizer.token_text(token)]
            else:
                parts.append(detokenizer.push(token))
        return "".join([*parts, detokenizer.flush()])

    def piece(self, token: int) -> bytes:
        """Return the bytes of a token."""
        return self._tokenizer.token_bytes(token)

    def text(self, request: Request) -> str:
        """Return the text of a request's prompt."""
        raw = request.raw
        return raw if isinstance(raw, str) else self.written(raw or ())

    def _found(self, request: Request, ids: Line) -> StoredCheckpoint | None:
        if self._store is None:
            return None
        try:
            with self._store.of(request.domain).snapshot() as stored:
                return stored.resume(self._scope, ids)[0]
        except StoreError as err:
            log.error("the session store cannot be read, the prompt is read whole: %s", err)
            return None

    def _prompt(self, ids: Line, found: StoredCheckpoint | None) -> Prompt:
        return Prompt(
            text=Passage(""),
            ids=ids,
            stem=None,
            settled=None,
            system=0,
            info=None,
            parent=None,
            new=(),
            begun="",
            found=found,
            cut=0,
            heard={},
            reread=lambda: self._prompt(ids, None),
        )


def echoing(deliver: Callable[[Event], None], text: str, choices: int) -> Callable[[Event], None]:
    """Return a function that delivers a generation's events, with the prompt's text at each choice's beginning."""
    silent = set(range(choices))

    def deliver_after(event: Event) -> None:
        if isinstance(event, Delta) and event.index in silent:
            silent.discard(event.index)
            deliver(Delta(event.index, text))
        elif isinstance(event, Finish):
            for index in sorted(silent):
                deliver(Delta(index, text))
        deliver(event)

    return deliver_after
