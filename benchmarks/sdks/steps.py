"""A task of several steps by one Python library over one protocol: `steps.py WAY URL MODEL PROMPT`; ways are WAYS.

The library sends the results of its shell tool until the model calls it no more, with its own loop where it has one.
Its own message objects go back.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

WAY, URL, MODEL, PROMPT = sys.argv[1:5]
BASE, KEY, SYSTEM = f"{URL}/v1", "none", "You work in a folder by a shell."
PARAMETERS = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
FUNCTION = {"name": "shell", "description": "Run a command.", "parameters": PARAMETERS}
TOOL: dict[str, Any] = {"type": "function", "function": FUNCTION}


def shell(command: str) -> str:
    """Run a command in the project's folder and return what it prints.

    Args:
        command: the command line.
    """
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def asked(arguments: Any) -> str:
    """Run a call's arguments, an object or its text."""
    return shell(**(json.loads(arguments) if isinstance(arguments, str) else arguments))


def openai_chat() -> Any:
    from openai import OpenAI

    client = OpenAI(base_url=BASE, api_key=KEY)
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": PROMPT}]
    while True:
        with client.chat.completions.stream(model=MODEL, messages=messages, tools=[TOOL]) as stream:
            message = stream.get_final_completion().choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return message.content
        for call in message.tool_calls:
            result = asked(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def openai_responses(*, previous: bool = False) -> Any:
    from openai import OpenAI

    client = OpenAI(base_url=BASE, api_key=KEY)
    items: list[Any] = [{"role": "user", "content": PROMPT}]
    known: dict[str, Any] = {"model": MODEL, "instructions": SYSTEM, "tools": [{"type": "function", **FUNCTION}]}
    while True:
        with client.responses.stream(input=items, **known) as stream:
            answer = stream.get_final_response()
        calls = [one for one in answer.output if one.type == "function_call"]
        if not calls:
            return answer.output_text
        results = [
            {"type": "function_call_output", "call_id": call.call_id, "output": asked(call.arguments)} for call in calls
        ]
        if previous:
            items, known["previous_response_id"] = results, answer.id
        else:
            items += [*answer.output, *results]


def anthropic() -> Any:
    from anthropic import Anthropic, beta_tool

    client = Anthropic(base_url=URL, api_key=KEY)
    runner = client.beta.messages.tool_runner(
        model=MODEL,
        max_tokens=400,
        system=SYSTEM,
        tools=[beta_tool(shell)],
        messages=[{"role": "user", "content": PROMPT}],
        stream=True,
    )
    last: Any = None
    for stream in runner:
        last = stream.get_final_message()
    return last.content[-1].text


def ollama() -> Any:
    from ollama import Client

    client, messages = Client(URL), [{"role": "system", "content": SYSTEM}, {"role": "user", "content": PROMPT}]
    while True:
        message = client.chat(MODEL, messages=messages, tools=[shell]).message
        messages.append(message)
        if not message.tool_calls:
            return message.content
        for call in message.tool_calls:
            result = asked(dict(call.function.arguments))
            messages.append({"role": "tool", "tool_name": call.function.name, "content": result})


def openai_agents(*, chat: bool = False, previous: bool = False, conversations: bool = False) -> Any:
    # By their names: benchmarks/agents.py has the package's name, where types are checked.
    agents: Any = import_module("agents")
    model_of: Any = (
        import_module("agents.models.openai_chatcompletions").OpenAIChatCompletionsModel
        if chat
        else import_module("agents.models.openai_responses").OpenAIResponsesModel
    )
    from openai import AsyncOpenAI

    agents.set_tracing_disabled(True)

    async def run() -> Any:
        client = AsyncOpenAI(base_url=BASE, api_key=KEY)
        tools = [agents.function_tool(shell)]
        agent = agents.Agent(name="worker", instructions=SYSTEM, model=model_of(MODEL, client), tools=tools)
        session = agents.OpenAIConversationsSession(openai_client=client) if conversations else None
        result = agents.Runner.run_streamed(agent, PROMPT, session=session, auto_previous_response_id=previous)
        async for _ in result.stream_events():
            pass
        return result.final_output

    return asyncio.run(run())


def langchain(of: str) -> Any:
    from langchain_core.messages import HumanMessage, SystemMessage
    from langchain_core.tools import tool

    model: Any
    if of == "ollama":
        from langchain_ollama import ChatOllama

        model = ChatOllama(model=MODEL, base_url=URL)
    elif of == "anthropic":
        from langchain_anthropic import ChatAnthropic

        model = ChatAnthropic(model=MODEL, base_url=URL, api_key=KEY, max_tokens=400)
    else:
        from langchain_openai import ChatOpenAI

        model = ChatOpenAI(model=MODEL, base_url=BASE, api_key=KEY, use_responses_api=of == "responses")
    one = tool(shell)
    bound, messages = model.bind_tools([one]), [SystemMessage(SYSTEM), HumanMessage(PROMPT)]
    while True:
        whole: Any = None
        for chunk in bound.stream(messages):
            whole = chunk if whole is None else whole + chunk
        messages.append(whole)
        if not whole.tool_calls:
            return whole.text
        messages += [one.invoke(call) for call in whole.tool_calls]


def pydantic_ai(of: str) -> Any:
    from pydantic_ai import Agent

    model: Any
    if of == "anthropic":
        from anthropic import AsyncAnthropic
        from pydantic_ai.models.anthropic import AnthropicModel
        from pydantic_ai.providers.anthropic import AnthropicProvider

        client = AsyncAnthropic(base_url=URL, api_key=KEY)
        model = AnthropicModel(MODEL, provider=AnthropicProvider(anthropic_client=client))
    else:
        from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
        from pydantic_ai.providers.openai import OpenAIProvider

        kind = OpenAIResponsesModel if of == "responses" else OpenAIChatModel
        model = kind(MODEL, provider=OpenAIProvider(base_url=BASE, api_key=KEY))
    return Agent(model, instructions=SYSTEM, tools=[shell]).run_sync(PROMPT).output


def litellm(of: str) -> Any:
    import litellm

    base = BASE if of == "openai" else URL
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": PROMPT}]
    known: dict[str, Any] = {"api_base": base, "api_key": KEY, "tools": [TOOL], "num_retries": 0}
    while True:
        message = litellm.completion(f"{of}/{MODEL}", messages, **known).choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return message.content
        for call in message.tool_calls:
            result = asked(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "name": "shell", "content": result})


def litellm_responses() -> Any:
    import litellm

    items: list[Any] = [{"role": "user", "content": PROMPT}]
    known: dict[str, Any] = {"api_base": BASE, "api_key": KEY, "tools": [{"type": "function", **FUNCTION}]}
    while True:
        answer: Any = litellm.responses(input=items, model=f"openai/{MODEL}", instructions=SYSTEM, **known)
        calls = [one for one in answer.output if one.type == "function_call"]
        items += [one.model_dump(exclude_none=True) for one in answer.output]
        if not calls:
            return answer.output[-1].content[0].text
        for call in calls:
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": asked(call.arguments)})


def llm() -> Any:
    folder = Path(os.environ["HOME"]) / "llm"
    folder.mkdir()
    model = {"model_id": "daemon", "model_name": MODEL, "api_base": BASE, "supports_tools": True}
    (folder / "extra-openai-models.yaml").write_text(json.dumps([model]))
    functions = "import subprocess\ndef shell(command: str) -> str:\n    'Run a command.'\n"
    functions += "    return subprocess.run(command, shell=True, capture_output=True, text=True).stdout\n"
    command = [str(Path(sys.executable).with_name("llm")), "-m", "daemon", "--key", KEY, "-s", SYSTEM]
    own = {**os.environ, "LLM_USER_PATH": str(folder)}
    subprocess.run([*command, "--functions", functions, "--chain-limit", "9", PROMPT], env=own, check=True)


WAYS: dict[str, Callable[[], Any]] = {
    "openai-chat": openai_chat,
    "openai-responses": openai_responses,
    "openai-previous": lambda: openai_responses(previous=True),
    "anthropic": anthropic,
    "ollama": ollama,
    "agents-chat": lambda: openai_agents(chat=True),
    "agents-responses": openai_agents,
    "agents-previous": lambda: openai_agents(previous=True),
    "agents-conversations": lambda: openai_agents(conversations=True),
    "langchain-chat": lambda: langchain("chat"),
    "langchain-responses": lambda: langchain("responses"),
    "langchain-ollama": lambda: langchain("ollama"),
    "langchain-anthropic": lambda: langchain("anthropic"),
    "pydantic-chat": lambda: pydantic_ai("chat"),
    "pydantic-responses": lambda: pydantic_ai("responses"),
    "pydantic-anthropic": lambda: pydantic_ai("anthropic"),
    "litellm-openai": lambda: litellm("openai"),
    "litellm-responses": litellm_responses,
    "litellm-anthropic": lambda: litellm("anthropic"),
    "litellm-ollama": lambda: litellm("ollama_chat"),
    "llm": llm,
}

if __name__ == "__main__":
    print(WAYS[WAY]())
