"""pydantic-ai: agents with each of its ways to an output, tools, streams, a history."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from checks import BASE, MODEL, check, resumed, run
from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

ASKED = "How is the weather in Bonn?"


class Weather(BaseModel):
    city: str = Field(max_length=20)
    unit: Literal["celsius", "fahrenheit"]


def agent(output: Any = str, tokens: int = 200, **fields: Any) -> Agent[None, Any]:
    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=BASE, api_key="none"))
    return Agent(
        model, output_type=output, model_settings={"temperature": 0, "max_tokens": tokens, **fields}, retries=0
    )


@check("chat")
def chat() -> None:
    assert agent(tokens=16).run_sync(ASKED).output


@check("streamed")
def streamed() -> None:
    found = list(agent(tokens=16).run_stream_sync(ASKED).stream_text(debounce_by=None))
    assert found[-1] == agent(tokens=16).run_sync(ASKED).output


@check("two turns")
def two_turns() -> None:
    first = agent(tokens=16).run_sync(ASKED)
    second = agent(tokens=16).run_sync("And in Cologne?", message_history=first.all_messages())
    assert second.output
    resumed(first.usage.input_tokens)


def first_calls(run: Any) -> Any:
    """The settings of a run whose first step has to call, and whose second one has to answer."""
    return {"tool_choice": "none" if run.run_step > 1 else "required", "max_tokens": 60}


def calling(told: list[str]) -> Agent[None, Any]:
    def weather(city: Annotated[str, Field(max_length=20)]) -> str:
        """Tells the weather of a city."""
        told.append(city)
        return "It rains."

    one = agent(parallel_tool_calls=False)
    one.tool_plain(weather)
    return one


@check("tools")
def tools() -> None:
    told: list[str] = []
    assert calling(told).run_sync(ASKED, model_settings=first_calls).output
    assert told
    resumed()


@check("tools streamed")
def tools_streamed() -> None:
    told: list[str] = []
    found = list(calling(told).run_stream_sync(ASKED, model_settings=first_calls).stream_text(debounce_by=None))
    assert found[-1]
    assert told


@check("ToolOutput")
def tool_output() -> None:
    assert isinstance(agent(ToolOutput(Weather)).run_sync(ASKED).output, Weather)


@check("NativeOutput")
def native_output() -> None:
    assert isinstance(agent(NativeOutput(Weather)).run_sync(ASKED).output, Weather)


@check("PromptedOutput")
def prompted_output() -> None:
    # The model decides what the object is like: it is held to the schema.
    held = {"type": "json_object", "schema": Weather.model_json_schema()}
    one = agent(PromptedOutput(Weather), extra_body={"response_format": held})
    assert isinstance(one.run_sync(ASKED).output, Weather)


@check("ToolOutput streamed")
def tool_output_streamed() -> None:
    *_, last = agent(ToolOutput(Weather)).run_stream_sync(ASKED).stream_output(debounce_by=None)
    assert isinstance(last, Weather)


run()
