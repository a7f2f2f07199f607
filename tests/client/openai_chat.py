"""The real openai client against the daemon: scenarios that scenarios.py runs.

It has an environment of its own, since the client's pydantic is newer than what model conversion allows.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx2
import openai


def client(url: str, **options: Any) -> openai.OpenAI:
    return openai.OpenAI(**{"base_url": url + "/v1", "api_key": "none", "max_retries": 0, "timeout": 120, **options})


def whole(url: str, arguments: dict[str, Any]) -> Any:
    """A completion that is not streamed, and its headers."""
    raw = client(url).chat.completions.with_raw_response.create(**arguments)
    return {"completion": raw.parse().to_dict(), "headers": dict(raw.headers)}


def stream(url: str, arguments: dict[str, Any]) -> Any:
    """All chunks of a stream, and when they came, in seconds."""
    started = time.perf_counter()
    chunks, times = [], []
    with client(url).chat.completions.create(stream=True, **arguments) as received:
        headers = dict(received.response.headers)
        for chunk in received:
            chunks.append(chunk.to_dict())
            times.append(time.perf_counter() - started)
    return {"chunks": chunks, "times": times, "headers": headers}


def completions(url: str, arguments: dict[str, Any]) -> Any:
    """Completions of several prompts, whole and streamed."""
    whole = client(url).completions.create(**arguments)
    streamed = [""] * len(whole.choices)
    for chunk in client(url).completions.create(stream=True, **arguments):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    return {"whole": whole.to_dict(), "streamed": streamed}


def embeddings(url: str, arguments: dict[str, Any]) -> Any:
    """Ask for embeddings and return the error raised, or None."""
    try:
        client(url).embeddings.create(**arguments)
    except openai.APIStatusError as err:
        return {"class": type(err).__name__, "code": err.code}
    return None


def helper(url: str, arguments: dict[str, Any]) -> Any:
    """The SDK's accumulating helper, which checks the order and completeness of what comes."""
    with client(url).chat.completions.stream(**arguments) as received:
        kinds = [event.type for event in received]
        final = received.get_final_completion()
    return {"kinds": sorted(set(kinds)), "completion": final.to_dict()}


def failures(url: str, requests: list[dict[str, Any]]) -> Any:
    """Send several bad requests and return the error that each raises."""
    found = []
    for arguments in requests:
        extra = arguments.pop("extra_body", {})
        try:
            result = client(url).chat.completions.create(**arguments, extra_body=extra)
            if arguments.get("stream"):
                list(result)
        except openai.APIStatusError as err:
            found.append(
                {
                    "class": type(err).__name__,
                    "status": err.status_code,
                    "message": err.message,
                    "param": err.param,
                    "code": err.code,
                    "type": err.type,
                    "request_id": err.request_id,
                }
            )
        else:
            found.append({"class": None})
    return found


def broken_stream(url: str, arguments: dict[str, Any]) -> Any:
    """Read a stream that fails midway; return its error and the number of chunks before it."""
    n = 0
    try:
        for _ in client(url).chat.completions.create(stream=True, **arguments):
            n += 1
            print("chunk", flush=True, file=sys.stderr)
    except openai.APIError as err:
        return {"chunks": n, "class": type(err).__name__, "message": err.message, "code": err.code}
    return {"chunks": n, "class": None}


def leave(url: str, arguments: dict[str, Any]) -> Any:
    """Read three chunks of a stream and go away."""
    received = client(url).chat.completions.create(stream=True, **arguments)
    chunks = [next(received).to_dict() for _ in range(3)]
    received.close()
    return chunks


def together(url: str, arguments: dict[str, Any]) -> Any:
    """Two streams at once, the second asked when the first has begun: when each chunk of each came."""
    times: list[list[float]] = [[], []]
    begun = threading.Event()

    def one(which: int) -> None:
        for chunk in client(url).chat.completions.create(stream=True, **arguments):
            if chunk.choices and chunk.choices[0].delta.content:
                times[which].append(time.perf_counter())
                begun.set()

    first = threading.Thread(target=one, args=(0,))
    first.start()
    begun.wait(60)
    second = threading.Thread(target=one, args=(1,))
    second.start()
    first.join()
    second.join()
    return times


def models(url: str, arguments: dict[str, Any]) -> Any:
    there = [model.to_dict() for model in client(url).models.list()]
    return {"all": there, "one": client(url).models.retrieve(there[0]["id"]).to_dict()}


def key(url: str, arguments: dict[str, Any]) -> Any:
    """With which of the keys models can be listed."""
    answers = {}
    for given in arguments["keys"]:
        try:
            client(url, api_key=given).models.list()
            answers[given] = "ok"
        except openai.AuthenticationError as err:
            answers[given] = str(err.code)
    return answers


def said(url: str, arguments: list[dict[str, Any]]) -> Any:
    """Completions one after the other, each asked for with a key of its own."""
    return [client(url, api_key=one["key"]).chat.completions.create(**one["body"]).to_dict() for one in arguments]


def at_socket(path: str, arguments: dict[str, Any]) -> Any:
    """A stream's text, over a Unix socket."""
    with openai.DefaultHttpxClient(transport=httpx2.HTTPTransport(uds=path)) as http:
        received = client("http://localhost", http_client=http).chat.completions.create(stream=True, **arguments)
        return "".join(chunk.choices[0].delta.content or "" for chunk in received)


def retried(url: str, arguments: dict[str, Any]) -> Any:
    """A completion, asked for as often as the client thinks fit."""
    asking = client(url, max_retries=arguments["max_retries"]).chat.completions.with_raw_response
    raw = asking.create(**arguments["body"])
    found = raw.parse()
    answer = [chunk.to_dict() for chunk in found] if arguments["body"].get("stream") else found.to_dict()
    return {"answer": answer, "headers": dict(raw.headers), "retries": raw.retries_taken}


SCENARIOS: dict[str, Callable[[str, Any], Any]] = {
    f.__name__: f
    for f in (
        whole,
        stream,
        completions,
        embeddings,
        helper,
        failures,
        broken_stream,
        leave,
        together,
        models,
        key,
        retried,
        said,
        at_socket,
    )
}
