"""langchain-openai: messages, streams, tools with their results, and its three ways to a schema."""

from __future__ import annotations

from typing import Any, Literal

from checks import BASE, MODEL, check, resumed, run
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

ASKED: list[Any] = [SystemMessage("You are terse."), HumanMessage("How is the weather in Bonn?")]


class Weather(BaseModel):
    """The weather of a city."""

    city: str = Field(max_length=20)
    unit: Literal["celsius", "fahrenheit"]


def weather(city: str, unit: str) -> str:
    """Tells the weather of a city."""
    return f"It rains in {city}, {unit}."


TOOL = tool(args_schema=Weather)(weather)


def model(tokens: int = 16, **fields: Any) -> Any:
    return ChatOpenAI(
        model=MODEL, base_url=BASE, api_key="none", temperature=0, max_retries=0, max_tokens=tokens, **fields
    )


@check("chat")
def chat() -> None:
    answer = model().invoke(ASKED)
    assert answer.content
    assert answer.usage_metadata["output_tokens"] <= 16


@check("streamed")
def streamed() -> None:
    *rest, last = model(stream_usage=True).stream(ASKED)
    whole = model().invoke(ASKED)
    assert "".join(chunk.content for chunk in (*rest, last)) == whole.content


@check("two turns")
def two_turns() -> None:
    first = model().invoke(ASKED)
    second = model().invoke([*ASKED, first, HumanMessage("And in Cologne?")])
    assert second.usage_metadata["input_token_details"]["cache_read"] >= first.usage_metadata["input_tokens"]


@check("tools")
def tools() -> None:
    first = model(200).bind_tools([TOOL], tool_choice="weather").invoke(ASKED)
    (call,) = first.tool_calls
    result = TOOL.invoke(call)
    assert isinstance(result, ToolMessage)
    assert model().bind_tools([TOOL]).invoke([*ASKED, first, result]).content
    resumed(first.usage_metadata["input_tokens"])


@check("tools streamed")
def tools_streamed() -> None:
    bound = model(200).bind_tools([TOOL], tool_choice="any", parallel_tool_calls=False)
    whole: Any = None
    for chunk in bound.stream(ASKED):
        whole = chunk if whole is None else whole + chunk
    (call,) = whole.tool_calls
    Weather.model_validate(call["args"])


def structured(method: str, **fields: Any) -> None:
    one = model(200, **fields).with_structured_output(Weather, method=method)
    assert isinstance(one.invoke(ASKED), Weather)


@check("schema")
def schema() -> None:
    structured("json_schema")


@check("function_calling")
def function_calling() -> None:
    structured("function_calling")


@check("json_mode")
def json_mode() -> None:
    # The model decides what the object is like: it is held to the schema.
    held = {"type": "json_object", "schema": Weather.model_json_schema()}
    structured("json_mode", extra_body={"response_format": held})


@check("schema streamed")
def schema_streamed() -> None:
    *_, last = model(200).with_structured_output(Weather, method="json_schema").stream(ASKED)
    assert isinstance(last, Weather)


@check("several at once")
def batch() -> None:
    assert len(model().batch([ASKED, ASKED, ASKED])) == 3


@check("logprobs")
def logprobs() -> None:
    assert model(logprobs=True, top_logprobs=2).invoke(ASKED).response_metadata["logprobs"]["content"]


run()
