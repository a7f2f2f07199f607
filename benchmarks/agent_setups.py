"""The clients of benchmarks/clients_table.py: packages, protocols, commands, and the name of each one's shell tool."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from ssmd.cli.launch.agents import AGENTS, CHAT, MESSAGES, RESPONSES, Setup, Target

OLLAMA = "/api/chat"
SDKS = Path(__file__).parent / "sdks"
CONTEXT = 200_000  # tokens to set in agents; the tiny model has no bound
KEY = "none"
PROMPT = "Do the steps of the task in this folder: look, read calc.py, correct it, run it, and say what it prints."
DONE = "Done: it prints 5."
EDITS = ("a - b", "a * b", "a % b", "a + b")  # of a client without tools: its tests fail but for the last one

# Each environment is a folder with these packages of npm ("@") or PyPI ("=="). Agents have one each, as they are big.
ENVIRONMENTS: Mapping[str, tuple[str, ...]] = {
    "claude": ("@anthropic-ai/claude-code@2.1.197",),
    "codex": ("@openai/codex@0.171.0",),
    "copilot": ("@github/copilot@1.0.102",),
    "opencode": ("opencode-ai@1.18.33",),
    "pi": ("@mariozechner/pi-coding-agent@0.73.1",),
    "qwen": ("@qwen-code/qwen-code@0.15.10",),
    "cline": ("cline@3.0.65",),
    "continue": ("@continuedev/cli@1.5.47",),
    "aider": ("aider-chat==0.86.2",),
    "node": (
        *("openai@6.49.0", "@anthropic-ai/sdk@1.14.0", "ollama@0.6.4", "ai@6.0.326", "@ai-sdk/openai@3.0.141"),
        *("@ai-sdk/openai-compatible@2.0.92", "@ai-sdk/anthropic@3.0.140", "ollama-ai-provider-v2@3.6.0", "zod@4.6.7"),
    ),
    "python": (
        *("openai==3.57.0", "anthropic==2.14.0", "ollama==0.6.3", "openai-agents==0.24.0", "llm==0.36"),
        *("langchain-openai==1.7.4", "langchain-ollama==1.1.0", "langchain-anthropic==1.7.10", "litellm==1.110.2"),
        *("pydantic-ai-slim[openai,anthropic]==2.68.0", "langchain-tests==1.1.9"),
    ),
}


@dataclass(frozen=True)
class Place:
    """One run of a client. url: of the daemon, without a path. tests: a command that fails until the file is right."""

    url: str
    model: str
    home: Path
    project: Path
    environment: Path
    tests: str

    def program(self, name: str) -> str:
        """Return the path of a program of the environment."""
        scripts = "bin" if (self.environment / "bin").exists() else "node_modules/.bin"
        return str(self.environment / scripts / name)

    def setup(self, agent: str, *own: str) -> Setup:
        """Return the settings of `ssmd launch` for an agent."""
        chosen = AGENTS[agent]
        target = Target(self.url, self.model, KEY, CONTEXT, str(self.home), own)
        return chosen.setup(target, chosen.beginning(CONTEXT))


@dataclass(frozen=True)
class Run:
    """Commands, one after the other, and what they need. files: texts by name, for the home folder."""

    commands: Sequence[Sequence[str]]
    environment: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Client:
    """A client by one protocol. protocol: the path that its steps ask. least: tokens of its shortest step's prompt.

    argument: of the shell tool, for the command. more: its other arguments. edits: it has no tools, and edits by text.
    """

    name: str
    protocol: str
    environment: str
    package: str
    run: Callable[[Place], Run]
    tool: str = "shell"
    argument: str = "command"
    more: Mapping[str, Any] = field(default_factory=dict)
    least: int = 0
    edits: bool = False

    def script(self, commands: Sequence[str]) -> list[str]:
        """Return the answers of the model, one for each prompt."""
        if self.edits:
            return [_edit(before, after) for before, after in pairwise(EDITS)]
        return [*(self._call(command) for command in commands), DONE]

    def _call(self, command: str) -> str:
        value = [command] if self.argument == "commands" else command
        made = {"name": self.tool, "arguments": {self.argument: value, **self.more}}
        return f"I go on.\n<tool_call>\n{json.dumps(made)}\n</tool_call>"


def _edit(before: str, after: str) -> str:
    """Return an answer with a change, as aider's format `diff` has it."""
    return (
        f"calc.py\n```python\n<<<<<<< SEARCH\n    return {before}\n=======\n    return {after}\n>>>>>>> REPLACE\n```\n"
    )


def _launched(place: Place, agent: str, *own: str, **replaced: str) -> Run:
    """Run an agent as `ssmd launch` does. own: its arguments. replaced: environment."""
    setup = place.setup(agent, *own)
    environment = {**setup.environment, **replaced}
    return Run([[place.program(AGENTS[agent].program), *setup.arguments, *own]], environment, setup.files)


def _rewritten(run: Run, changes: Mapping[str, str]) -> Run:
    """Replace texts in all of a run: agents have the protocol deep in their settings."""

    def text(value: str) -> str:
        for old, new in changes.items():
            value = value.replace(old, new)
        return value

    return Run(
        [[text(part) for part in command] for command in run.commands],
        {name: text(value) for name, value in run.environment.items()},
        {name: text(value) for name, value in run.files.items()},
    )


def _claude(place: Place) -> Run:
    return _launched(place, "claude", "--dangerously-skip-permissions", "-p", PROMPT)


def _codex(place: Place) -> Run:
    # Its own options stand before the subcommand.
    setup = place.setup("codex")
    own = ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", PROMPT)
    return Run([[place.program("codex"), *setup.arguments, *own]], setup.environment)


def _codex_oss(place: Place) -> Run:
    own = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "-m", f"{place.model}:latest", PROMPT)
    command = [place.program("codex"), "exec", "--oss", "--local-provider", "ollama", *own]
    return Run([command], {"CODEX_OSS_BASE_URL": f"{place.url}/v1"})


def _copilot(place: Place) -> Run:
    return _launched(place, "copilot", "--allow-all-tools", "--allow-all-paths", "-p", PROMPT)


def _copilot_responses(place: Place) -> Run:
    run = _copilot(place)
    return Run(run.commands, {**run.environment, "COPILOT_PROVIDER_WIRE_API": "responses"})


def _copilot_messages(place: Place) -> Run:
    run = _copilot(place)
    own = {"COPILOT_PROVIDER_TYPE": "anthropic", "COPILOT_PROVIDER_BASE_URL": place.url}
    return Run(run.commands, {**run.environment, **own})


def _opencode(place: Place) -> Run:
    return _launched(place, "opencode", "run", "--auto", PROMPT)


def _pi(place: Place) -> Run:
    return _launched(place, "pi", "-p", PROMPT)


def _qwen(place: Place) -> Run:
    return _launched(place, "qwen", "--yolo", "-p", PROMPT)


def _qwen_messages(place: Place) -> Run:
    run = _rewritten(_qwen(place), {"--openai-base-url": "", f"{place.url}/v1": ""})
    [command] = run.commands
    kept = ["anthropic" if part == "openai" else part for part in command if part]
    own = {"ANTHROPIC_BASE_URL": place.url, "ANTHROPIC_API_KEY": KEY, "ANTHROPIC_MODEL": place.model}
    return Run([kept], {**run.environment, **own}, run.files)


def _cline(place: Place) -> Run:
    own = ("--data-dir", str(place.home / "cline"))
    known = ("-p", "openai", "-k", KEY, "-m", place.model, "-b", f"{place.url}/v1")
    program = place.program("cline")
    return Run([[program, "auth", *known, *own], [program, "-P", "openai", "-m", place.model, *own, PROMPT]])


def _continue(place: Place) -> Run:
    return _launched(place, "continue", "--auto", "-p", PROMPT)


def _aider(place: Place) -> Run:
    own = ("--no-git", "--yes-always", "--no-pretty", "--edit-format", "diff", "--test-cmd", place.tests, "--auto-test")
    return _launched(place, "aider", *own, "--message", PROMPT, "calc.py")


def _aider_by(place: Place, provider: str) -> Run:
    run = _rewritten(_aider(place), {f"openai/{place.model}": f"{provider}/{place.model}"})
    own = {"ANTHROPIC_API_KEY": KEY, "ANTHROPIC_API_BASE": place.url, "OLLAMA_API_BASE": place.url}
    return Run(run.commands, {**run.environment, **own}, run.files)


def _library(mode: str, program: str) -> Callable[[Place], Run]:
    """Return the run of a library's program, which takes the way that it is to go, the address and the model."""

    def run(place: Place) -> Run:
        in_node = program.endswith(".mjs")
        python = str(place.environment / "bin" / "python")
        command = ["node" if in_node else python, str(SDKS / program), mode, place.url, place.model, PROMPT]
        return Run([command], {"NODE_PACKAGES": str(place.environment), "LITELLM_LOCAL_MODEL_COST_MAP": "True"})

    return run


def _agents() -> list[Client]:
    def agent(name: str, protocol: str, run: Callable[[Place], Run], tool: str, **own: Any) -> Client:
        environment = name.split()[0]
        return Client(name, protocol, environment, ENVIRONMENTS[environment][0], run, tool, **own)

    described = {"description": "A step"}
    bash: dict[str, Any] = {"tool": "bash", "more": described}
    opencode: dict[str, Any] = {**bash, "least": 6_000}  # its request for a title is shorter
    anthropic_pi = {"openai-completions": "anthropic-messages", "/v1": ""}
    return [
        agent("claude", MESSAGES, _claude, "Bash", more=described),
        agent("codex", RESPONSES, _codex, "exec_command", argument="cmd", more={"yield_time_ms": 30_000}),
        agent("codex --oss", RESPONSES, _codex_oss, "exec_command", argument="cmd", more={"yield_time_ms": 30_000}),
        agent("copilot", CHAT, _copilot, **bash),
        agent("copilot", RESPONSES, _copilot_responses, **bash),
        agent("copilot", MESSAGES, _copilot_messages, **bash),
        agent("opencode", CHAT, _opencode, **opencode),
        agent("opencode", RESPONSES, _by(_opencode, {"@ai-sdk/openai-compatible": "@ai-sdk/openai"}), **opencode),
        agent("opencode", MESSAGES, _by(_opencode, {"@ai-sdk/openai-compatible": "@ai-sdk/anthropic"}), **opencode),
        agent("pi", CHAT, _pi, "bash"),
        agent("pi", RESPONSES, _by(_pi, {"openai-completions": "openai-responses"}), "bash"),
        agent("pi", MESSAGES, _by(_pi, anthropic_pi), "bash"),
        agent("qwen", CHAT, _qwen, "run_shell_command", more={**described, "is_background": False}),
        agent("qwen", MESSAGES, _qwen_messages, "run_shell_command", more={**described, "is_background": False}),
        agent("cline", CHAT, _cline, "run_commands", argument="commands"),
        agent("continue", CHAT, _continue, "Bash"),
        agent("continue", MESSAGES, _by(_continue, {'"openai"': '"anthropic"'}), "Bash"),
        agent("aider", CHAT, _aider, "", edits=True),
        agent("aider", MESSAGES, lambda place: _aider_by(place, "anthropic"), "", edits=True),
        agent("aider", OLLAMA, lambda place: _aider_by(place, "ollama_chat"), "", edits=True),
    ]


def _by(run: Callable[[Place], Run], changes: Mapping[str, str]) -> Callable[[Place], Run]:
    return lambda place: _rewritten(run(place), changes)


# Name, protocol, the way that the program is to go, the package that gives the version.
_IN_PYTHON = (
    ("openai (Python)", CHAT, "openai-chat", "openai"),
    ("openai (Python)", RESPONSES, "openai-responses", "openai"),
    ("openai (Python), `previous_response_id`", RESPONSES, "openai-previous", "openai"),
    ("anthropic (Python), `tool_runner`", MESSAGES, "anthropic", "anthropic"),
    ("ollama (Python)", OLLAMA, "ollama", "ollama"),
    ("openai-agents", CHAT, "agents-chat", "openai-agents"),
    ("openai-agents", RESPONSES, "agents-responses", "openai-agents"),
    ("openai-agents, `previous_response_id`", RESPONSES, "agents-previous", "openai-agents"),
    ("openai-agents, conversations", RESPONSES, "agents-conversations", "openai-agents"),
    ("langchain ChatOpenAI", CHAT, "langchain-chat", "langchain-openai"),
    ("langchain ChatOpenAI, `use_responses_api`", RESPONSES, "langchain-responses", "langchain-openai"),
    ("langchain ChatOllama", OLLAMA, "langchain-ollama", "langchain-ollama"),
    ("langchain ChatAnthropic", MESSAGES, "langchain-anthropic", "langchain-anthropic"),
    ("pydantic-ai", CHAT, "pydantic-chat", "pydantic-ai-slim[openai,anthropic]"),
    ("pydantic-ai", RESPONSES, "pydantic-responses", "pydantic-ai-slim[openai,anthropic]"),
    ("pydantic-ai", MESSAGES, "pydantic-anthropic", "pydantic-ai-slim[openai,anthropic]"),
    ("litellm `openai/`", CHAT, "litellm-openai", "litellm"),
    ("litellm `openai/`, responses", RESPONSES, "litellm-responses", "litellm"),
    ("litellm `anthropic/`", MESSAGES, "litellm-anthropic", "litellm"),
    ("litellm `ollama_chat/`", OLLAMA, "litellm-ollama", "litellm"),
    ("llm", CHAT, "llm", "llm"),
)
_IN_NODE = (
    ("openai (Node), `runTools`", CHAT, "openai-chat", "openai"),
    ("openai (Node)", RESPONSES, "openai-responses", "openai"),
    ("anthropic (Node), `toolRunner`", MESSAGES, "anthropic", "@anthropic-ai/sdk"),
    ("ollama (Node)", OLLAMA, "ollama", "ollama"),
    ("AI SDK, compatible", CHAT, "ai-compatible", "ai"),
    ("AI SDK, openai", RESPONSES, "ai-openai", "ai"),
    ("AI SDK, openai.chat", CHAT, "ai-openai-chat", "ai"),
    ("AI SDK, anthropic", MESSAGES, "ai-anthropic", "ai"),
    ("AI SDK, ollama-ai-provider-v2", OLLAMA, "ai-ollama", "ai"),
)


def _libraries(environment: str, program: str, rows: Sequence[tuple[str, str, str, str]], mark: str) -> list[Client]:
    pinned = {one.rpartition(mark)[0]: one for one in ENVIRONMENTS[environment]}
    return [Client(name, path, environment, pinned[of], _library(mode, program)) for name, path, mode, of in rows]


# Tried once, and left out: name, protocol, and what stands against it.
NOT_RUN = (
    ("cline", MESSAGES, "its command takes an address for providers of OpenAI's protocol alone"),
    ("cline", OLLAMA, "its command takes an address for providers of OpenAI's protocol alone"),
    ("continue", RESPONSES, "it asks chat all the same, with `useResponsesApi` too"),
    ("continue", OLLAMA, "its provider `ollama` asks chat"),
)
CLIENTS = (
    *_agents(),
    *_libraries("python", "steps.py", _IN_PYTHON, "=="),
    *_libraries("node", "steps.mjs", _IN_NODE, "@"),
)
