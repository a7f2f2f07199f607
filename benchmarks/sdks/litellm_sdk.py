"""litellm: as a client of OpenAI's protocol and of vLLM's, with its own message objects in the second turn."""

from __future__ import annotations

import json
from typing import Any, Literal

import litellm
from checks import BASE, MODEL, check, resumed, run
from pydantic import BaseModel, Field

ASKED: list[Any] = [{"role": "user", "content": "How is the weather in Bonn?"}]
FUNCTION = {
    "name": "weather",
    "description": "Tells the weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
TOOLS = [{"type": "function", "function": FUNCTION}]


class Weather(BaseModel):
    city: str = Field(max_length=20)
    unit: Literal["celsius", "fahrenheit"]


def complete(messages: list[Any], provider: str = "openai", **fields: Any) -> Any:
    fields = {"temperature": 0, "max_tokens": 16, **fields}
    return litellm.completion(f"{provider}/{MODEL}", messages, api_base=BASE, api_key="none", num_retries=0, **fields)


@check("chat")
def chat() -> None:
    assert complete(ASKED).choices[0].message.content


@check("streamed")
def streamed() -> None:
    chunks = list(complete(ASKED, stream=True, stream_options={"include_usage": True}))
    whole = litellm.stream_chunk_builder(chunks)
    assert whole.choices[0].message.content == complete(ASKED).choices[0].message.content
    assert whole.usage.completion_tokens <= 16


def turns(provider: str) -> None:
    first = complete(ASKED, provider)
    more = [*ASKED, first.choices[0].message, {"role": "user", "content": "And in Cologne?"}]
    second = complete(more, provider)
    assert second.choices[0].message.content
    assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens


@check("two turns")
def two_turns() -> None:
    turns("openai")


def calls(provider: str) -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    first = complete(ASKED, provider, tools=TOOLS, tool_choice=named, max_tokens=200)
    message = first.choices[0].message
    (call,) = message.tool_calls
    assert list(json.loads(call.function.arguments)) == ["city"]
    result = {"role": "tool", "tool_call_id": call.id, "name": "weather", "content": "It rains."}
    assert complete([*ASKED, message, result], provider, tools=TOOLS).choices[0].message.content
    resumed(first.usage.prompt_tokens)


@check("tools")
def tools() -> None:
    calls("openai")


@check("tools streamed")
def tools_streamed() -> None:
    # One call: a small model goes on calling until max_tokens cuts a call.
    one: dict[str, Any] = {"tool_choice": "required", "parallel_tool_calls": False}
    chunks = complete(ASKED, tools=TOOLS, max_tokens=200, stream=True, **one)
    message = litellm.stream_chunk_builder(list(chunks)).choices[0].message
    assert all(list(json.loads(call.function.arguments)) == ["city"] for call in message.tool_calls)


@check("schema")
def schema() -> None:
    answer = complete(ASKED, response_format=Weather, max_tokens=200)
    Weather.model_validate_json(answer.choices[0].message.content)


@check("hosted_vllm: two turns")
def vllm_turns() -> None:
    turns("hosted_vllm")


@check("hosted_vllm: tools")
def vllm_calls() -> None:
    calls("hosted_vllm")


@check("penalties and min_p")
def penalties() -> None:
    assert complete(ASKED, frequency_penalty=0.5, presence_penalty=0.1, extra_body={"min_p": 0.1}).choices


@check("completions")
def completions() -> None:
    model = f"text-completion-openai/{MODEL}"
    answer = litellm.text_completion("Once upon", model=model, api_base=BASE, api_key="none", max_tokens=8)
    assert answer.choices[0].text


@check("typed errors")
def errors() -> None:
    try:
        complete(ASKED, tools=[{"type": "function", "function": {}}])
    except litellm.BadRequestError:
        return
    raise AssertionError("a tool without a name was taken")


run()
