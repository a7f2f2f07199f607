"""Deltas put together: what has come of an answer, for who hears of it later."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from ssmd.engine.request import CallDelta, Delta
from ssmd.text.messages import ToolCall


def joined(deltas: Iterable[Delta]) -> list[Delta]:
    """The same in as few deltas as tell it, in one choice's order; without log-probabilities."""
    found = []
    for _, alike in groupby(deltas, key=_kind):
        first, *more = alike
        if first.call is None:
            text = "".join(delta.text for delta in (first, *more))
            if text:
                found.append(Delta(first.index, text, reasoning=first.reasoning))
            continue
        arguments = "".join(delta.call.arguments for delta in (first, *more) if delta.call is not None)
        call = CallDelta(first.call.number, first.call.id, first.call.name, arguments)
        found.append(Delta(first.index, "", call=call))
    return found


def calls_of(deltas: Sequence[Delta]) -> tuple[ToolCall, ...]:
    """The calls that deltas of one choice tell of, each as far as it came."""
    calls: list[tuple[CallDelta, list[str]]] = []
    for delta in deltas:
        if delta.call is not None:
            if delta.call.name:
                calls.append((delta.call, []))
            calls[-1][1].append(delta.call.arguments)
    return tuple(ToolCall(call.id, call.name, "".join(arguments)) for call, arguments in calls)


def _kind(delta: Delta) -> tuple[bool, int, bool]:
    """What joins with its like: a call begins alone, and its arguments follow."""
    call = delta.call
    return delta.reasoning, -1 if call is None else call.number, call is not None and bool(call.name)
