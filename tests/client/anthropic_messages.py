"""The real anthropic client against the daemon: scenarios that scenarios.py runs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import anthropic


def client(url: str, **options: Any) -> anthropic.Anthropic:
    return anthropic.Anthropic(**{"base_url": url, "api_key": "none", "max_retries": 0, "timeout": 120, **options})


def conversation(url: str, turns: list[dict[str, Any]]) -> Any:
    """Ask turn after turn, streamed by the SDK's helper; its own blocks go back. Return the final messages."""
    messages: list[Any] = []
    found = []
    for turn in turns:
        content = turn.pop("content")
        if isinstance(content, list):  # results of the calls before them, in order
            made = [block.id for block in messages[-1]["content"] if block.type == "tool_use"]
            content = [{"tool_use_id": id_, **result} for id_, result in zip(made, content, strict=True)]
        messages.append({"role": "user", "content": content})
        with client(url).messages.stream(messages=messages, **turn) as stream:
            events = list(stream)
            final = stream.get_final_message()
        [usage] = [event.usage.to_dict() for event in events if event.type == "message_delta"]
        messages.append({"role": "assistant", "content": final.content})
        kinds = sorted({event.type for event in events})
        found.append({"kinds": kinds, "message": final.to_dict(), "usage": usage})
    return found


def runner(url: str, arguments: dict[str, Any]) -> Any:
    """Have the client's own loop run a tool that returns "12 degrees". Return its final message."""

    def get_weather(city: str) -> str:
        """Tell the weather of a city."""
        return "12 degrees"

    final = client(url).beta.messages.tool_runner(**arguments, tools=[anthropic.beta_tool(get_weather)]).until_done()
    return {"message": final.to_dict()}


def whole(url: str, arguments: dict[str, Any]) -> Any:
    """A message that is not streamed, its count beforehand, and the id of the request."""
    asking = {name: value for name, value in arguments.items() if name in ("model", "messages", "system", "tools")}
    counted = client(url).messages.count_tokens(**asking).input_tokens
    message = client(url).messages.create(**arguments)
    beta = client(url).beta.messages.create(**arguments, betas=["of-tomorrow-2030-01-01"])
    return {
        "counted": counted,
        "message": message.to_dict(),
        "beta": beta.to_dict(),
        "request_id": message._request_id,
    }


def failures(url: str, requests: list[dict[str, Any]]) -> Any:
    """Send several bad requests and return the error that each raises."""
    found = []
    for arguments in requests:
        options = arguments.pop("options", {})
        try:
            result = client(url, **options).messages.create(**arguments)
            if arguments.get("stream"):
                list(result)
        except anthropic.APIStatusError as err:
            fields = {"class": type(err).__name__, "status": err.status_code, "body": err.body}
            found.append({**fields, "request_id": err.request_id})
        else:
            found.append({"class": None})
    return found


def broken_stream(url: str, arguments: dict[str, Any]) -> Any:
    """Read a stream that fails midway; return its error."""
    try:
        for event in client(url).messages.create(stream=True, **arguments):
            print(event.type, flush=True, file=sys.stderr)
    except anthropic.APIStatusError as err:
        return {"class": type(err).__name__, "body": err.body}
    return {"class": None}


SCENARIOS: dict[str, Callable[[str, Any], Any]] = {
    f.__name__: f for f in (conversation, runner, whole, failures, broken_stream)
}
