"""instructor: its modes for answers that are objects, whole and as they come."""

from __future__ import annotations

from typing import Any, Literal

import instructor
import openai
from checks import BASE, MODEL, check, run
from pydantic import BaseModel, Field

ASKED: list[Any] = [{"role": "user", "content": "How is the weather in Bonn? Answer as JSON."}]
# In these two modes it is the model that decides whether the answer is the object: it is held to one.
BLOCK = r'```json\n\{"city": "[A-Z][a-z]{2,9}", "unit": "(celsius|fahrenheit)"\}\n```'


class Weather(BaseModel):
    city: str = Field(max_length=20)
    unit: Literal["celsius", "fahrenheit"]


def client(mode: Any) -> Any:
    return instructor.from_openai(openai.OpenAI(base_url=BASE, api_key="none", max_retries=0, timeout=120), mode=mode)


def create(mode: Any, **fields: Any) -> Weather:
    answer = client(mode).chat.completions.create(
        model=MODEL, messages=ASKED, response_model=Weather, max_retries=0, max_tokens=200, temperature=0, **fields
    )
    assert isinstance(answer, Weather)
    return answer


@check("TOOLS")
def tools() -> None:
    create(instructor.Mode.TOOLS)


@check("JSON_SCHEMA")
def json_schema() -> None:
    create(instructor.Mode.JSON_SCHEMA)


@check("JSON")
def json_object() -> None:
    held = {"type": "json_object", "schema": Weather.model_json_schema()}
    create(instructor.Mode.JSON, extra_body={"response_format": held})


@check("MD_JSON")
def in_markdown() -> None:
    create(instructor.Mode.MD_JSON, extra_body={"guided_regex": BLOCK})


@check("TOOLS streamed")
def partial() -> None:
    found = list(
        client(instructor.Mode.TOOLS).chat.completions.create_partial(
            model=MODEL, messages=ASKED, response_model=Weather, max_tokens=200, temperature=0
        )
    )
    assert Weather.model_validate(found[-1].model_dump())
    assert len(found) > 2


@check("JSON_SCHEMA streamed")
def partial_schema() -> None:
    found = list(
        client(instructor.Mode.JSON_SCHEMA).chat.completions.create_partial(
            model=MODEL, messages=ASKED, response_model=Weather, max_tokens=200, temperature=0
        )
    )
    assert Weather.model_validate(found[-1].model_dump())


run()
