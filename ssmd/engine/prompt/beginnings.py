"""Beginnings of a prompt that other prompts may share: the system prompt, tools, and blocks that a client marks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from functools import lru_cache

import numpy as np

from ssmd.engine.prompt.rendering import RenderedPrompt, Renderer, alike
from ssmd.engine.request import Request
from ssmd.engine.terms import Rejection
from ssmd.sessions.line import NOTHING, Line
from ssmd.sessions.turn import local_now, system_prompt
from ssmd.text.messages import BlockEnd, Message
from ssmd.text.telling import MAX_KEPT_CHARS
from ssmd.text.template import TemplateInput

MARKS = 4  # marked blocks of a request whose ends are looked up, the last ones: as many as Anthropic allows
ENDS = 8  # system messages, and blocks in them, whose ends are looked up, the last ones
SYSTEM_CHECKPOINT_TOKENS = 64  # least length of a beginning with a state of its own: a shorter one costs no bucket


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
