"""Rendering of a conversation and of its beginnings: its text and ids, as a continuation of a stored turn if possible.

If a template is proven to keep what it wrote (text/jinja/appending.py), only the messages that a request adds to its
turn are rendered and tokenized. Nothing of the turns above is read. Beginnings are what other prompts may share: the
system prompt, tools, and blocks that a client marks.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property, lru_cache, partial

import numpy as np

from ssmd.engine.request import Request
from ssmd.engine.terms import Rejection
from ssmd.model.artifact import Manifest
from ssmd.sessions.line import NOTHING, Ids, Line, Passage
from ssmd.sessions.turn import RenderedPrefix, Turn, local_now, system_prompt
from ssmd.text.messages import BlockEnd, Message
from ssmd.text.telling import MAX_KEPT_CHARS, AdaptedInput, MessageAdapter
from ssmd.text.template import NOTHING_MORE, RenderedText, Template, TemplateError, TemplateInput
from ssmd.text.tokenizer import Tokenizer, TokenizerError

_VERSION = 1  # of the changes to messages before a template gets them
_MAX_TRIED = 64  # turns above the last one that are compared with a prompt
_go_on: ContextVar[Callable[[], None]] = ContextVar("go_on", default=lambda: None)
Above = Callable[[Turn], Turn | None]  # the turn above one, None at the root or if it cannot be read
MARKS = 4  # marked blocks of a request whose ends are looked up, the last ones: as many as Anthropic allows
ENDS = 8  # system messages, and blocks in them, whose ends are looked up, the last ones
SYSTEM_CHECKPOINT_TOKENS = 64  # least length of a beginning with a state of its own: a shorter one costs no bucket


@dataclass(frozen=True)
class RenderedPrompt:
    """A conversation as the model reads it. stem: the turn at whose end the text and ids held here begin."""

    text: Passage
    ids: Line
    stem: str | None
    settled: RenderedPrefix | None = None


class Renderer:
    """Renders for one program's template and tokenizer. Used from many threads."""

    def __init__(
        self, manifest: Manifest, tokenizer: Tokenizer, template: Template, context: int | None, vocabulary: int
    ) -> None:
        self._lineage = manifest.lineage
        self._context = context
        self._vocabulary = vocabulary
        self._tokenizer = tokenizer
        self._template = template
        self._telling = MessageAdapter(template.source, tokenizer.escape, lambda: self._takes_system)
        parts = (
            _VERSION,
            manifest.files["tokenizer.json"].sha256,
            manifest.special_tokens.model_dump(),
            template.source,
        )
        self._identity = hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    @property
    def tells_time(self) -> bool:
        """Return True if the rendered text may depend on the clock."""
        return "strftime_now" in self._template.source

    def render(
        self,
        messages: Sequence[Message],
        now: datetime,
        given: TemplateInput = NOTHING_MORE,
        *,
        tools_last: bool = False,
    ) -> RenderedText:
        """Render the whole text. Raises Rejection if the template refuses the messages.

        tools_last: as of MessageAdapter.first.
        """
        told = self._telling.told(given)
        shown, added = self._telling.conversation(messages, told, tools_last=tools_last)
        try:
            return _without(self._template.render_settled(shown, now=now, given=told.given), added)
        except TemplateError as err:
            together = self._telling.alternating(messages, told, tools_last=tools_last)
            if together != shown:
                with suppress(TemplateError):
                    return RenderedText(self._template.render(together, now=now, given=told.given), None)
            raise _refusal(err) from err

    @cached_property
    def _takes_system(self) -> bool:
        try:
            self._template.render([Message("system", "a"), Message("user", "b")], now=datetime.now(UTC))
        except TemplateError:
            return False
        return True

    @staticmethod
    @contextmanager
    def while_wanted(go_on: Callable[[], None]) -> Iterator[None]:
        """Call `go_on` now and then while this thread tokenizes within, so that it can raise if the client left."""
        before = _go_on.set(go_on)
        try:
            yield
        finally:
            _go_on.reset(before)

    def encode(self, text: str, begun: tuple[str, Line] | None = None) -> Line:
        """Return the ids of a whole text. begun: a text that it may begin with, and its ids. Raises Rejection."""
        if begun is not None and text.startswith(begun[0]) and self._tokenizer.ends_at_control(text, len(begun[0])):
            return begun[1].then(self.ids(text[len(begun[0]) :]))
        return Line(self.ids(text))

    def ids(self, text: str) -> Ids:
        """Return the ids of a part of a text. Beyond a context's length, only enough to show that. Raises Rejection."""
        try:
            ids = self._tokenizer.ids(text, self._context, _go_on.get())
        except TokenizerError as err:
            raise Rejection(f"the model's tokenizer refuses these messages: {err}", param="messages") from err
        if len(ids) and (most := int(ids.max())) >= self._vocabulary:
            said = f"the model's tokenizer makes token {most} of these messages, the model's ids end at"
            raise Rejection(f"{said} {self._vocabulary - 1}", param="messages")
        return ids

    def whole(
        self,
        messages: Sequence[Message],
        now: datetime,
        given: TemplateInput = NOTHING_MORE,
        turn: Turn | None = None,
        above: Above | None = None,
        *,
        begun: tuple[str, Line] | None = None,
    ) -> RenderedPrompt:
        """Render a whole conversation, with stored ids for the deepest turn whose text it continues.

        Generated text need not tokenize back into the sampled ids, and those are the ids that the state saw.
        turn: the stored turn that the conversation continues. begun: as of `encode`. Raises Rejection.
        """
        render = partial(self.render, messages, now, given)
        rendered, shown = self._rendered(messages, given, turn, above, render, begun)
        return replace(shown, settled=self._settled(rendered, 0, given))

    def _rendered(
        self,
        messages: Sequence[Message],
        given: TemplateInput,
        turn: Turn | None,
        above: Above | None,
        render: Callable[..., RenderedText],
        begun: tuple[str, Line] | None = None,
    ) -> tuple[RenderedText, RenderedPrompt]:
        """Render a whole text, with the tools where the text of `turn` has them. Return it, and it with its ids.

        Those are the stored ids of the deepest turn that it continues, from `turn` upward. render: of these messages;
        it takes `tools_last`.
        """
        rendered = render()
        shown = self._grown(rendered.text, turn, above)
        if shown is None and turn is not None and self._telling.orders_tools(messages[0], self._telling.told(given)):
            old = render(tools_last=True)
            if (found := self._grown(old.text, turn, above)) is not None:
                return old, found
        return rendered, shown or RenderedPrompt(Passage(rendered.text), self.encode(rendered.text, begun), None)

    def _grown(self, text: str, turn: Turn | None, above: Above | None) -> RenderedPrompt | None:
        """Return a whole text with the ids of the deepest turn that it continues, from `turn` upward; None if none."""
        for _ in range(_MAX_TRIED):
            if turn is None or above is None:
                break
            if self._goes_on(text, turn):
                start = turn.text.start
                passage = Passage(text[start:], start, turn.text.before)
                return RenderedPrompt(passage, turn.ids.then(self.ids(text[len(turn.text) :])), turn.stem)
            turn = above(turn)
        return None

    def _goes_on(self, text: str, turn: Turn) -> bool:
        """Return True if the text begins with a turn's text, can be encoded apart there, and can use its ids."""
        start, end = turn.text.start, len(turn.text)
        if not turn.text.own or not len(turn.ids) or turn.lineage != self._lineage:  # without ids, or another model's
            return False
        if not text.startswith(turn.text.own, start) or Passage(text).hash(start) != turn.text.before:
            return False
        return self._tokenizer.ends_at_control(text, end)

    def after(
        self, turn: Turn, first: Message, new: Sequence[Message], now: datetime, given: TemplateInput = NOTHING_MORE
    ) -> RenderedPrompt | None:
        """Render the end of a conversation that continues a turn: the turn's own text and the text of new messages.

        first: the conversation's first message. None if the template may have changed what it wrote before, or if the
        text does not continue the turn's.
        """
        rendered = self._after(turn, first, new, now, given)
        if rendered is None:
            return None
        text, base = rendered.text, turn.text.start
        end = len(turn.text) - base
        if not text.startswith(turn.text.own) or not self._tokenizer.ends_at_control(text, end):
            return None
        ids = turn.ids.then(self.ids(text[end:]))
        return RenderedPrompt(
            Passage(text, base, turn.text.before), ids, turn.stem, self._settled(rendered, base, given)
        )

    def _after(
        self, turn: Turn, first: Message, new: Sequence[Message], now: datetime, given: TemplateInput
    ) -> RenderedText | None:
        """Render from the beginning of the turn's own text on; `settled` counts from there."""
        settled, told = turn.settled, self._telling.told(given)
        if (
            settled is None
            or settled.template != self._identified(told)
            or turn.lineage != self._lineage
            or not turn.sound
        ):
            return None
        own = turn.length - turn.cut - len(turn.conversation)  # messages shown before those of the turn
        base = settled.characters - turn.text.start
        if not 0 <= base <= len(turn.text.own) or settled.messages < max(own, 1) or first.role == "assistant":
            return None
        tail = [*turn.conversation[settled.messages - own :], *new]
        shown = [self._telling.message(m) for m in tail]
        begins, added = self._telling.first(first, told)
        skipped = settled.messages + added
        try:
            found = self._template.render_after(begins, skipped, shown, now=now, given=told.given)
        except TemplateError as err:
            raise _refusal(err) from err
        if found is None:
            return None
        rendered = _without(found, added)
        moved = rendered.settled and replace(rendered.settled, characters=rendered.settled.characters + base)
        return RenderedText(turn.text.own[:base] + rendered.text, moved)

    def _settled(self, rendered: RenderedText, base: int, given: TemplateInput) -> RenderedPrefix | None:
        found = rendered.settled
        if found is None:
            return None
        return RenderedPrefix(found.messages, found.characters + base, self._identified(self._telling.told(given)))

    def _identified(self, told: AdaptedInput) -> str:
        """Return a digest of all that a proof holds for: the template, and the tools and variables that it renders."""
        return hashlib.sha256((self._identity + told.key).encode()).hexdigest() if told.key else self._identity

    def beginning(self, messages: Sequence[Message], now: datetime, given: TemplateInput = NOTHING_MORE) -> str:
        """Return the text rendered for these messages before any next user message, cut at its last control token."""
        a, b = (self.render([*messages, Message("user", probe)], now, given).text for probe in ("a", "b"))
        return a[: self._tokenizer.last_cut(a, _common(a, b))]

    def shares(
        self, shown: RenderedPrompt, heads: Iterable[Sequence[Message]], now: datetime, given: TemplateInput
    ) -> Iterator[int]:
        """Yield how many ids a prompt shares with each of these beginnings of its conversation.

        The text is encoded from the last control token before that place, so that little is read again. A beginning
        that the template refuses is left out.
        """
        own, start = shown.text.own, shown.text.start
        for head in heads:
            try:
                text = self.render(head, now, given).text
            except Rejection:
                continue
            common = _common(own, text[start:])
            cut = self._tokenizer.last_cut(own, common)
            at = len(shown.ids) - len(self.ids(own[cut:]))
            if at < shown.ids.start:  # the rest holds an answer whose ids are others
                continue
            yield at + alike(self.ids(own[cut:common]), shown.ids.since(at))

    def end(
        self,
        messages: Sequence[Message],
        now: datetime,
        given: TemplateInput = NOTHING_MORE,
        turn: Turn | None = None,
        above: Above | None = None,
    ) -> RenderedPrompt:
        """Return the text with which every continuation of these messages begins, as `rest`; ids as of `whole`."""

        def render(*, tools_last: bool = False) -> RenderedText:
            a, b = (self.render([*messages, one], now, given, tools_last=tools_last) for one in _probes(messages[-1]))
            return RenderedText(a.text[: self._end(a, b)], None)

        return self._rendered(messages, given, turn, above, render)[1]

    def _end(self, a: RenderedText, b: RenderedText) -> int:
        """Return where two renderings part that differ in the last message.

        If it is known where that message begins, the end is no later: continuations are rendered from there on.
        """
        common = _common(a.text, b.text)
        return self._tokenizer.last_cut(a.text, common if a.settled is None else min(common, a.settled.characters))

    def rest(self, turn: Turn, first: Message, now: datetime, given: TemplateInput = NOTHING_MORE) -> Passage | None:
        """Return the beginning of every continuation of a turn, from its own text on; None if unknown."""
        a, b = (self._after(turn, first, [probe], now, given) for probe in _probes(turn.answer))
        if a is None or b is None or turn.settled is None or turn.settled.characters <= turn.text.start:
            return None
        return Passage(a.text[: self._end(a, b)], turn.text.start, turn.text.before)

    def agrees(self, text: Passage, turn: Turn) -> bool:
        """Return True if a turn's text is a prefix of `text`, from the same start, and can be encoded apart there."""
        if text.start != turn.text.start or text.before != turn.text.before:
            return False
        return text.own.startswith(turn.text.own) and self._tokenizer.ends_at_control(text.own, len(turn.text.own))

    def apart(self, stem: Turn, turn: Turn) -> bool:
        """Return True if the ids of a turn's own text do not depend on the text of its stem, which precedes it."""
        before = stem.text.own
        return bool(before) and self._tokenizer.ends_at_control(before + turn.text.own, len(before))


def alike(a: Ids, b: Ids) -> int:
    """Count the ids with which both begin."""
    least = min(len(a), len(b))
    same = a[:least] == b[:least]
    return least if same.all() else int(same.argmin())


def _without(rendered: RenderedText, added: int) -> RenderedText:
    """Return the rendering without the `added` messages in the counts. They were put before the conversation."""
    settled = rendered.settled
    if settled is None or not added:
        return rendered
    messages = settled.messages - added
    return replace(rendered, settled=replace(settled, messages=messages) if messages > 0 else None)


def _probes(answer: Message) -> Iterator[Message]:
    """Yield two messages that may come next: the user's, or the result of a call."""
    call = answer.tool_calls[0].id if answer.tool_calls else None
    for content in ("a", "b"):
        yield Message("user", content) if call is None else Message("tool", content, tool_call_id=call)


def _refusal(err: TemplateError) -> Rejection:
    return Rejection(f"the model's chat template refuses these messages: {err}", param="messages")


def _common(a: str, b: str) -> int:
    """Count the characters with which both begin."""
    least, most = 0, min(len(a), len(b))
    while least < most:
        middle = (least + most + 1) // 2
        if a[least:middle] == b[least:middle]:
            least = middle
        else:
            most = middle - 1
    return least


class Beginnings:
    """Renders beginnings, and counts the ids of a prompt that are theirs. Used from many threads."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._kept = lru_cache(maxsize=64)(self._rendered)

    def system(self, request: Request, ids: Line, now: datetime) -> int:
        """Count the ids of a prompt's system prompt; 0 if they are few, or not ids of their own.

        Also 0 if they are not at hand: then the prompt starts from a state after them.
        """
        if ids.start:
            return 0
        _, tokens = self.render(request, request.messages[: system_prompt(request.messages)], now)
        fits = SYSTEM_CHECKPOINT_TOKENS <= len(tokens) < len(ids) - 1
        return len(tokens) if fits and np.array_equal(ids.own[: len(tokens)], tokens.own) else 0

    def parts(self, request: Request, ids: Line, now: datetime) -> tuple[int, ...]:
        """Count the ids up to the end of the tools, and of the blocks and messages of the system prompt but the last.

        The prompt is compared with the rendering of these alone. Of blocks and messages the last ENDS count, and any of
        the last MARKS that are marked.
        """
        system, tools = system_prompt(request.messages), request.given.tools
        if ids.start or not (system or request.marked_tools):
            return ()
        last = BlockEnd(system - 1, None, marked=True)  # the end of the whole system prompt
        blocks = [b for b in request.blocks if b.message < system and b != last]
        ends = [*blocks, *(BlockEnd(i, None, marked=False) for i in range(system - 1))]
        ends.sort(key=lambda b: (b.message, b.characters is None, b.characters))
        marked = [b for b in request.blocks if b.marked][-MARKS:]
        found = []
        if 0 < request.marked_tools < len(tools):
            some = replace(request, given=replace(request.given, tools=tools[: request.marked_tools]))
            found.append(self.render(some, (), now)[1])
        if tools and system:
            found.append(self.render(request, (), now)[1])
        for end in {*ends[-ENDS:], *(b for b in marked if b in blocks)}:
            found.append(self.render(request, _up_to(request.messages, end), now)[1])
        return tuple(alike(beginning.own, ids.own) for beginning in found)

    def marks(self, request: Request, shown: RenderedPrompt, now: datetime, cut: int) -> tuple[int, ...]:
        """Count the ids up to the ends of the marked blocks behind the system prompt, of the last MARKS.

        Of a request that opens a conversation also up to where its last block begins: agents say the same before the
        user's words each time. The end of the prompt has a state in any case. cut: messages that were left out; then no
        mark counts.
        """
        first, last = system_prompt(request.messages), len(request.messages) - 1
        marked = [b for b in request.blocks if b.marked][-MARKS:]
        marked = [b for b in marked if b.message >= first and (b.message < last or b.characters is not None)]
        heads = [_up_to(request.messages, end) for end in dict.fromkeys((*marked, *_opening(request, first)))]
        return tuple(self._renderer.shares(shown, heads, now, request.given)) if heads and not cut else ()

    def render(self, request: Request, head: Sequence[Message], now: datetime) -> tuple[str, Line]:
        """Render the beginning that all conversations with these first messages share. request: its other facts."""
        return self._of_owner(tuple(head), request.given, now, request.domain.owner)

    def _of_owner(self, head: tuple[Message, ...], given: TemplateInput, now: datetime, owner: str) -> tuple[str, Line]:
        render = self._kept if len(given.text) <= MAX_KEPT_CHARS else self._rendered
        return render(head, given, now if self._renderer.tells_time else None, owner)

    def _rendered(
        self, head: tuple[Message, ...], given: TemplateInput, now: datetime | None, owner: str
    ) -> tuple[str, Line]:
        """Render the beginning that all conversations with this system prompt, these tools and variables share.

        Returns its text and ids, up to the last control token.
        owner: part of the cache key, so that response time reveals nothing about other owners.
        """
        clock = now or local_now()
        try:
            text = self._renderer.beginning(head, clock, given)
        except Rejection:
            return "", NOTHING
        # A client's system prompt changes more often than its tools.
        kept = bool(head and given.tools) and len(given.text) <= MAX_KEPT_CHARS
        return text, self._renderer.encode(text, self._of_owner((), given, clock, owner) if kept else None)


def _opening(request: Request, first: int) -> list[BlockEnd]:
    """Return the end of what stands before the last block, or message, of a conversation that has no answer yet.

    first: index of the first message behind the system prompt.
    """
    last = len(request.messages) - 1
    if last < first or any(message.role == "assistant" for message in request.messages[first:]):
        return []
    length = len(request.messages[last].content)
    ends = [b for b in request.blocks if b.message == last and b.characters is not None and b.characters < length]
    return ends[-1:] or ([BlockEnd(last - 1, None, marked=False)] if last > first else [])


def _up_to(messages: Sequence[Message], end: BlockEnd) -> tuple[Message, ...]:
    """Return the messages up to the end of a block."""
    last = messages[end.message]
    part = last if end.characters is None else replace(last, content=last.content[: end.characters])
    return (*messages[: end.message], part)
