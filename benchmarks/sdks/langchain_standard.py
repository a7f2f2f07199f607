"""langchain-tests' standard suites of chat models, by each of langchain's ways to a daemon.

Run by benchmarks/conformance.py, in an environment with langchain-tests: `pytest langchain_standard.py`, with the
daemon's address in SUITE_URL, the model's name in SUITE_MODEL, and in SUITE_ANSWERS the file that dictates its answers.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from langchain_anthropic import ChatAnthropic
from langchain_ollama import ChatOllama
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests

URL, MODEL = os.environ["SUITE_URL"], os.environ["SUITE_MODEL"]
TOKENS = 200  # a bound: a small model may go on for ever
MANY = 20  # answers for a test, at least as many as it asks for


def call(name: str, **arguments: Any) -> str:
    made = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{made}\n</tool_call>"


HELLO = "Hello there, I am well."
COMPANIES = ("你好啊集团", "こんにちは株式会社")
JOKE = {"setup": "Why?", "punchline": "So."}
ANSWERS: dict[str, list[str]] = {  # by the beginning of a test's name; the longest counts
    "test_": [HELLO] * MANY,
    "test_tool_calling": [call("magic_function", input=3)] * MANY,
    "test_tool_calling_with_no_arguments": [call("magic_function_no_args")] * MANY,
    "test_bind_runnables_as_tools": [call("greeting_generator", answer_style="Pirate")] * MANY,
    "test_agent_loop": [call("get_weather", location="San Francisco, CA"), HELLO],
    "test_unicode_tool_call": [
        call("unicode_customer", customer_name=name, description="A company")
        for name in ("你好啊集团", "こんにちは株式会社")
    ],
    "test_structured_output": [json.dumps(JOKE, separators=(",", ":"))] * MANY,
    "test_structured_few_shot": [],  # any call will do
    "test_tool_choice": [],
}


@pytest.fixture(autouse=True)
def answers(request: pytest.FixtureRequest) -> None:
    """Write what the model will say in a test. Anthropic's protocol has structured answers as calls."""
    name = request.node.originalname
    said = ANSWERS[max((one for one in ANSWERS if name.startswith(one)), key=len)]
    if name.startswith("test_structured_output") and "Anthropic" in request.cls.__name__:
        said = [call("Joke", **JOKE)] * MANY
    Path(os.environ["SUITE_ANSWERS"]).write_text(json.dumps(said))


class TestChatOpenAI(ChatModelIntegrationTests):
    @property
    def chat_model_class(self) -> Any:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        known = {"model": MODEL, "base_url": f"{URL}/v1", "api_key": "none"}
        return {**known, "temperature": 0, "max_tokens": TOKENS, "stream_usage": True}


class TestChatOpenAIResponses(TestChatOpenAI):
    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {**super().chat_model_params, "use_responses_api": True}


class TestChatOllama(ChatModelIntegrationTests):
    @property
    def chat_model_class(self) -> Any:
        return ChatOllama

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": MODEL, "base_url": URL, "temperature": 0, "num_predict": TOKENS}

    @property
    def has_tool_choice(self) -> bool:
        return False  # Ollama's protocol has none


class TestChatAnthropic(ChatModelIntegrationTests):
    @property
    def chat_model_class(self) -> Any:
        return ChatAnthropic

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": MODEL, "base_url": URL, "api_key": "none", "temperature": 0, "max_tokens": TOKENS}
