"""The openai library, 2.x or 3.x: chat, its helpers for streams, schemas and tools, completions, errors."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Literal

import openai
from checks import BASE, MODEL, check, resumed, run
from pydantic import BaseModel, Field

client = openai.OpenAI(base_url=BASE, api_key="none", max_retries=0, timeout=120)
SAME: dict[str, Any] = {"model": MODEL, "temperature": 0}
ASKED: list[Any] = [{"role": "user", "content": "How is the weather in Bonn?"}]


class Weather(BaseModel):
    """Tells the weather of a city."""

    city: str = Field(max_length=20)
    unit: Literal["celsius", "fahrenheit"]


TOOL: Any = openai.pydantic_function_tool(Weather, name="weather")
NAMED: Any = {"type": "function", "function": {"name": "weather"}}


@check("chat")
def chat() -> None:
    answer = client.chat.completions.create(messages=ASKED, max_tokens=16, **SAME)
    assert answer.choices[0].message.content
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


@check("streamed")
def streamed() -> None:
    whole = client.chat.completions.create(messages=ASKED, max_tokens=32, **SAME)
    chunks = client.chat.completions.create(
        messages=ASKED, max_tokens=32, stream=True, stream_options={"include_usage": True}, **SAME
    )
    *rest, last = chunks
    assert "".join(c.choices[0].delta.content or "" for c in rest) == whole.choices[0].message.content
    assert last.usage.completion_tokens == whole.usage.completion_tokens


@check("two turns")
def two_turns() -> None:
    first = client.chat.completions.create(messages=ASKED, max_tokens=16, **SAME)
    more = [*ASKED, first.choices[0].message, {"role": "user", "content": "And in Cologne?"}]
    second = client.chat.completions.create(messages=more, max_tokens=16, **SAME)
    assert second.usage.ssmd["session"] == first.usage.ssmd["session"]
    assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens
    assert second.usage.prompt_tokens > first.usage.prompt_tokens + first.usage.completion_tokens


@check("tools")
def tools() -> None:
    first = client.chat.completions.create(messages=ASKED, tools=[TOOL], tool_choice=NAMED, **SAME)
    message = first.choices[0].message
    (call,) = message.tool_calls
    assert call.function.name == "weather"
    Weather.model_validate_json(call.function.arguments)
    more = [*ASKED, message, {"role": "tool", "tool_call_id": call.id, "content": "It rains."}]
    second = client.chat.completions.create(messages=more, tools=[TOOL], max_tokens=16, **SAME)
    assert second.choices[0].message.content
    resumed(first.usage.prompt_tokens)


@check("tools streamed")
def tools_streamed() -> None:
    asked: dict[str, Any] = {"messages": ASKED, "tools": [TOOL], "tool_choice": "required", "max_tokens": 200}
    with client.chat.completions.stream(**asked, parallel_tool_calls=False, **SAME) as stream:
        kinds = {event.type for event in stream}
        (call,) = stream.get_final_completion().choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Weather)
    assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds


@check("schema")
def schema() -> None:
    answer = client.chat.completions.parse(messages=ASKED, response_format=Weather, max_tokens=200, **SAME)
    assert isinstance(answer.choices[0].message.parsed, Weather)


@check("schema streamed")
def schema_streamed() -> None:
    with client.chat.completions.stream(messages=ASKED, response_format=Weather, max_tokens=200, **SAME) as stream:
        kinds = {event.type for event in stream}
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Weather)
    assert {"content.delta", "content.done"} <= kinds


@check("parsed calls")
def parsed_calls() -> None:
    answer = client.chat.completions.parse(messages=ASKED, tools=[TOOL], tool_choice=NAMED, max_tokens=200, **SAME)
    assert isinstance(answer.choices[0].message.tool_calls[0].function.parsed_arguments, Weather)


@check("JSON object")
def json_object() -> None:
    kind: Any = {"type": "json_object"}
    asked: list[Any] = [{"role": "user", "content": 'Say {"city": "Bonn"} as JSON.'}]
    answer = client.chat.completions.create(messages=asked, response_format=kind, max_tokens=200, **SAME)
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(answer.choices[0].message.content), dict)


@check("n and logprobs")
def choices() -> None:
    answer = client.chat.completions.create(
        messages=ASKED, n=3, logprobs=True, top_logprobs=2, seed=3, temperature=1, max_tokens=8, model=MODEL
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert all(len(one.top_logprobs) == 2 for choice in answer.choices for one in choice.logprobs.content)


@check("completions")
def completions() -> None:
    whole = client.completions.create(prompt=["Once upon", "The river"], max_tokens=8, **SAME)
    texts = ["", ""]
    for chunk in client.completions.create(prompt=["Once upon", "The river"], max_tokens=8, stream=True, **SAME):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices]


@check("async")
def in_async() -> None:
    async def ask() -> int:
        async with openai.AsyncOpenAI(base_url=BASE, api_key="none", max_retries=0, timeout=120) as one:
            stream = await one.chat.completions.create(messages=ASKED, max_tokens=8, stream=True, **SAME)
            return len([chunk async for chunk in stream])

    assert asyncio.run(ask()) > 3


@check("typed errors")
def errors() -> None:
    wrong: list[tuple[type[Exception], dict[str, Any]]] = [
        (openai.NotFoundError, {"model": "gpt-9", "messages": ASKED}),
        (openai.BadRequestError, {"model": MODEL, "messages": []}),
        (openai.BadRequestError, {"model": MODEL, "messages": ASKED, "tools": [{"type": "function", "function": {}}]}),
    ]
    for kind, asked in wrong:
        try:
            client.chat.completions.create(**asked)
        except kind:
            continue
        raise AssertionError(f"{asked} was answered")


run()
