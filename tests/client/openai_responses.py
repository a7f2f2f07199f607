"""The real openai client's responses: scenarios that scenarios.py runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Literal

import openai
from pydantic import BaseModel


def client(url: str, **options: Any) -> openai.OpenAI:
    return openai.OpenAI(**{"base_url": url + "/v1", "api_key": "none", "max_retries": 0, "timeout": 120, **options})


class City(BaseModel):
    city: Literal["Bonn"]


def conversation(url: str, turns: list[dict[str, Any]]) -> Any:
    """Ask turn after turn by the streaming helper, which checks the order of events; its own items go back."""
    items: list[Any] = []
    found = []
    for turn in turns:
        said = turn.pop("said")
        if isinstance(said, list):  # outputs of the calls before them, in order
            made = [item.call_id for item in items if getattr(item, "type", "") == "function_call"][-len(said) :]
            items += [
                {"type": "function_call_output", "call_id": i, "output": o} for i, o in zip(made, said, strict=True)
            ]
        else:
            items.append({"role": "user", "content": said})
        with client(url).responses.stream(input=items, **turn) as stream:
            kinds = sorted({event.type for event in stream})
            final = stream.get_final_response()
        items += final.output
        found.append({"kinds": kinds, "response": final.to_dict(), "text": final.output_text})
    return found


def whole(url: str, arguments: dict[str, Any]) -> Any:
    """A response that is not streamed, its count beforehand, one that is parsed, and the raw events of a stream."""
    asking = {name: value for name, value in arguments.items() if name in ("model", "input", "instructions", "tools")}
    counted = client(url).responses.input_tokens.count(**asking).input_tokens
    response = client(url).responses.create(**arguments)
    parsed = client(url).responses.parse(text_format=City, **arguments).output_parsed
    events = [event.type for event in client(url).responses.create(stream=True, **arguments)]
    said = {"counted": counted, "response": response.to_dict(), "text": response.output_text}
    return {**said, "parsed": None if parsed is None else parsed.city, "events": events}


def state(url: str, arguments: dict[str, Any]) -> Any:
    """A response that goes on from another, both retrieved, their items, and the first one deleted."""
    responses = client(url).responses
    first = responses.create(**arguments)
    second = responses.create(**{**arguments, "input": "And then?"}, previous_response_id=first.id)
    again = responses.retrieve(second.id)
    items = [item.to_dict() for item in responses.input_items.list(second.id, order="asc", limit=1)]  # all pages
    responses.delete(first.id)
    try:
        responses.retrieve(first.id)
        gone = None
    except openai.NotFoundError as err:
        gone = err.message
    return {
        "first": first.to_dict(),
        "second": second.to_dict(),
        "again": again.to_dict(),
        "items": items,
        "gone": gone,
    }


def background(url: str, arguments: dict[str, Any]) -> Any:
    """A response that is polled, one whose stream is left and followed again, and one that is cancelled."""
    responses, begun = client(url).responses, {"queued", "in_progress"}
    first = responses.create(background=True, **arguments)
    polled = [first.status]
    while (whole := responses.retrieve(first.id)).status in begun:
        time.sleep(0.05)
    left = []
    with responses.create(background=True, stream=True, **arguments) as stream:
        for event in stream:
            left.append(event)
            if event.type == "response.output_text.delta":
                break
    id_ = left[0].response.id
    rest = list(responses.retrieve(id_, stream=True, starting_after=left[-1].sequence_number))
    again = list(responses.retrieve(id_, stream=True))
    third = responses.create(background=True, **{**arguments, "max_output_tokens": 20_000})
    cancelled = [responses.cancel(third.id).status for _ in range(2)]
    return {
        "polled": [*polled, whole.status],
        "text": whole.output_text,
        "followed": [[event.type, event.sequence_number] for event in (*left, *rest)],
        "again": [[event.type, event.sequence_number] for event in again],
        "texts": ["".join(e.delta for e in told if e.type.endswith("text.delta")) for told in ((*left, *rest), again)],
        "cancelled": [*cancelled, responses.retrieve(third.id).status],
    }


def failures(url: str, requests: list[dict[str, Any]]) -> Any:
    """Send several bad requests and return the error that each raises."""
    found = []
    for arguments in requests:
        try:
            client(url).responses.create(**arguments)
        except openai.APIStatusError as err:
            found.append({"class": type(err).__name__, "param": err.param, "code": err.code})
        else:
            found.append({"class": None})
    return found


SCENARIOS: dict[str, Callable[[str, Any], Any]] = {
    f.__name__: f for f in (conversation, whole, state, background, failures)
}
