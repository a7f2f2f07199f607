"""LlamaIndex's OpenAILike: chat, streams, tools, schemas, and completions, which are what it takes by default."""

from __future__ import annotations

from typing import Any, Literal

from checks import BASE, MODEL, check, resumed, run
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, Field

ASKED = [ChatMessage(role="user", content="How is the weather in Bonn?")]


class Weather(BaseModel):
    """The weather of a city."""

    city: str = Field(max_length=20)
    unit: Literal["celsius", "fahrenheit"]


def weather(city: str) -> str:
    """Tells the weather of a city."""
    return f"It rains in {city}."


TOOL = FunctionTool.from_defaults(weather)


def model(tokens: int = 16, **fields: Any) -> Any:
    given = {"is_chat_model": True, "is_function_calling_model": True, "temperature": 0, **fields}
    return OpenAILike(
        model=MODEL, api_base=BASE, api_key="none", max_tokens=tokens, max_retries=0, context_window=2048, **given
    )


@check("chat")
def chat() -> None:
    assert model().chat(ASKED).message.content


@check("streamed")
def streamed() -> None:
    *_, last = model().stream_chat(ASKED)
    assert last.message.content == model().chat(ASKED).message.content


@check("two turns")
def two_turns() -> None:
    first = model().chat(ASKED)
    more = [*ASKED, first.message, ChatMessage(role="user", content="And in Cologne?")]
    assert model().chat(more).message.content
    resumed(first.raw.usage.prompt_tokens)


@check("tools")
def tools() -> None:
    first = model(200).chat_with_tools([TOOL], chat_history=ASKED, tool_required=True, allow_parallel_tool_calls=False)
    (call,) = model().get_tool_calls_from_response(first)
    result = ChatMessage(role="tool", content=weather(**call.tool_kwargs), tool_call_id=call.tool_id)
    result.additional_kwargs["tool_call_id"] = call.tool_id
    second = model().chat_with_tools([TOOL], chat_history=[*ASKED, first.message, result])
    assert second.message.content
    resumed(first.raw.usage.prompt_tokens)


@check("tools streamed")
def tools_streamed() -> None:
    *_, last = model(200).stream_chat_with_tools([TOOL], chat_history=ASKED, tool_required=True)
    assert model().get_tool_calls_from_response(last)[0].tool_kwargs["city"]


@check("schema")
def schema() -> None:
    one = model(200, should_use_structured_outputs=True)
    found = one.structured_predict(Weather, PromptTemplate("How is the weather in {city}?"), city="Bonn")
    assert isinstance(found, Weather)


@check("schema by a call")
def schema_by_a_call() -> None:
    found = model(200).as_structured_llm(Weather).chat(ASKED).raw
    assert isinstance(found, Weather)


@check("completions")
def completions() -> None:
    one = model(is_chat_model=False)
    *_, last = one.stream_complete("Once upon")
    assert last.text == one.complete("Once upon").text


run()
