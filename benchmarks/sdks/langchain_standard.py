"""langchain-tests' standard suites of chat models, by each of langchain's ways to a daemon.

Run by benchmarks/conformance.py, in an environment with langchain-tests: `pytest langchain_standard.py`, with the
daemon's address in SUITE_URL and the model's name in SUITE_MODEL.
"""

from __future__ import annotations

import os
from typing import Any

from langchain_anthropic import ChatAnthropic
from langchain_core.language_models import BaseChatModel
from langchain_ollama import ChatOllama
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests

URL, MODEL = os.environ["SUITE_URL"], os.environ["SUITE_MODEL"]
TOKENS = 200  # a bound: a small model may go on for ever


class _Standard(ChatModelIntegrationTests):
    """The suite with what the daemon has: no images, no PDFs, no sound."""

    @property
    def supports_image_inputs(self) -> bool:
        return False

    @property
    def supports_json_mode(self) -> bool:
        return False  # the model decides the object there, and a small one decides badly


class TestChatOpenAI(_Standard):
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        known = {"model": MODEL, "base_url": f"{URL}/v1", "api_key": "none"}
        return {**known, "temperature": 0, "max_tokens": TOKENS, "stream_usage": True}


class TestChatOpenAIResponses(TestChatOpenAI):
    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {**super().chat_model_params, "use_responses_api": True}


class TestChatOllama(_Standard):
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatOllama

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": MODEL, "base_url": URL, "temperature": 0, "num_predict": TOKENS}

    @property
    def has_tool_choice(self) -> bool:
        return False  # Ollama's protocol has none


class TestChatAnthropic(_Standard):
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatAnthropic

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": MODEL, "base_url": URL, "api_key": "none", "temperature": 0, "max_tokens": TOKENS}
