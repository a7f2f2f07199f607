"""The real ollama client against the daemon: scenarios that scenarios.py runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ollama


def conversation(url: str, arguments: dict[str, Any]) -> Any:
    """Ask turn after turn, streamed; the client's own messages go back. Return the last line of each turn.

    results: of the calls of the turn before, in order; they name their functions.
    """
    client, found = ollama.Client(url, timeout=120), []
    messages: list[Any] = []
    for turn in arguments.pop("turns"):
        if isinstance(turn, list):
            calls = messages[-1].tool_calls
            names = [call.function.name for call in calls]
            messages += [{"role": "tool", "tool_name": n, "content": r} for n, r in zip(names, turn, strict=True)]
        else:
            messages.append({"role": "user", "content": turn})
        message = ollama.Message(role="assistant", content="", thinking="", tool_calls=[])
        for part in client.chat(messages=messages, stream=True, **arguments):
            message.content += part.message.content or ""
            message.thinking += part.message.thinking or ""
            message.tool_calls = [*message.tool_calls, *(part.message.tool_calls or [])]
        messages.append(message)
        found.append({"message": message.model_dump(), "last": part.model_dump(mode="json")})
    return found


def surface(url: str, arguments: dict[str, Any]) -> Any:
    """Return the answers of the other methods."""
    client, model = ollama.Client(url, timeout=120), arguments["model"]
    listed, shown = client.list(), client.show(model)
    whole = client.chat(model, [{"role": "user", "content": "a"}], options={"num_predict": 2}, think=False)
    first = client.generate(model, "a", options={"num_predict": 2}, keep_alive="5m")
    second = client.generate(model, "b", context=first.context, options={"num_predict": 2})
    running = client.ps()
    return {
        "list": [one.model for one in listed.models],
        "modified": listed.models[0].modified_at.isoformat(),
        "show": {"capabilities": shown.capabilities, "info": dict(shown.modelinfo or {})},
        "ps": [[one.model, one.expires_at.isoformat(), one.context_length] for one in running.models],
        "whole": whole.model_dump(mode="json"),
        "contexts": [len(first.context or []), len(second.context or [])],
        "load": [client.generate(model).done_reason, client.chat(model, keep_alive=0).done_reason],
    }


def failures(url: str, requests: list[list[Any]]) -> Any:
    """Call methods with arguments that fail; return (status, text) of the error that each raises."""
    client, found = ollama.Client(url, timeout=120), []
    for method, arguments in requests:
        try:
            result = getattr(client, method)(**arguments)
            found.append([None, [*map(str, result)] if arguments.get("stream") else str(result)])
        except ollama.ResponseError as err:
            found.append([err.status_code, err.error])
    return found


SCENARIOS: dict[str, Callable[[str, Any], Any]] = {f.__name__: f for f in (conversation, surface, failures)}
