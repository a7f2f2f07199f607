"""The agents that `ssmd launch` knows: how each is pointed at a daemon, and how many tokens it sends before the user.

No file of the user's is changed. Settings go by options and variables, and by files in a folder for one run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
NO_END = 131_072  # tokens of context to set in an agent for a model without a bound
SMALL = 4_096  # tokens of a context that has no room for extras
MOST_OUTPUT = 8_192  # largest bound of an answer to set in an agent: a title or a summary must end


@dataclass(frozen=True)
class Target:
    """The daemon and the model that an agent is to use."""

    url: str  # without a path
    model: str
    key: str = field(repr=False)
    context: int | None  # tokens; None: without an end
    folder: str  # for files of this run
    own: tuple[str, ...] = ()  # the user's arguments for the agent

    @property
    def window(self) -> int:
        """Return the context to set in the agent, in tokens."""
        return NO_END if self.context is None else self.context

    @property
    def output(self) -> int:
        """Return the bound of an answer to set in the agent, in tokens: a quarter of the context."""
        return min(MOST_OUTPUT, max(256, self.window // 4))


@dataclass(frozen=True)
class Setup:
    """An agent's settings for one run. arguments: before those of the user. unset: variables that would interfere.

    files: texts by name, for the folder of the target.
    """

    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    unset: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Beginning:
    """The tokens that an agent sends before the user's words: system prompt and tools, measured once.

    arguments: options that make the agent send this much. kept: the words for the user about that.
    """

    tokens: int
    arguments: tuple[str, ...] = ()
    kept: str = ""


@dataclass(frozen=True)
class Agent:
    """An agent. beginnings: the longest first; the first that leaves room in the model's context is used.

    version: the one that was measured. install: None for an editor, whose settings are only printed.
    """

    program: str
    install: str | None
    path: str  # of the endpoint that it asks
    version: str
    beginnings: tuple[Beginning, ...]
    setup: Callable[[Target, Beginning], Setup]

    def beginning(self, context: int | None) -> Beginning:
        """Return the longest beginning that leaves a quarter of the context free, or else the shortest."""
        return next((one for one in self.beginnings if leaves_room(one.tokens, context)), self.beginnings[-1])


def leaves_room(tokens: int, context: int | None) -> bool:
    """Return True if a beginning takes three quarters of a context at most. A step of an agent adds 110 to 250."""
    return context is None or tokens <= context * 3 // 4


def _claude(target: Target, beginning: Beginning) -> Setup:
    """Keep the system prompt still: no attribution header, and cwd, date and git status behind it.

    With --bare it takes its key from ANTHROPIC_API_KEY alone; otherwise it would ask the user about that one. Variables
    in the user's settings.json win over the environment, and those of --settings over both.
    """
    bare = "--bare" in (*beginning.arguments, *target.own)
    key, other = ("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN")[:: 1 if bare else -1]
    models = ("ANTHROPIC_MODEL", "ANTHROPIC_DEFAULT_HAIKU_MODEL", "ANTHROPIC_DEFAULT_SONNET_MODEL")
    environment = {
        "ANTHROPIC_BASE_URL": target.url,
        key: target.key,
        **dict.fromkeys((*models, "ANTHROPIC_DEFAULT_OPUS_MODEL", "CLAUDE_CODE_SUBAGENT_MODEL"), target.model),
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(target.window),
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(target.output),
    }
    arguments = (
        *beginning.arguments,
        "--exclude-dynamic-system-prompt-sections",
        *("--model", target.model, "--settings", f"{target.folder}/settings.json"),
    )
    unset = (other, "CLAUDE_CODE_USE_BEDROCK", "CLAUDE_CODE_USE_VERTEX")
    settings = {"env": {**environment, **dict.fromkeys(unset, "")}}
    return Setup(arguments, environment, unset, {"settings.json": json.dumps(settings)})


_CODEX_IDLE_MS = 1_800_000  # it gives up a stream after five minutes, comments or not: a long first prompt takes longer


def _codex(target: Target, beginning: Beginning) -> Setup:
    provider: dict[str, str | int] = {
        "name": "ssmd",
        "base_url": f"{target.url}/v1",
        "wire_api": "responses",
        "env_key": "OPENAI_API_KEY",
    }
    provider |= {"stream_idle_timeout_ms": _CODEX_IDLE_MS}
    settings = {
        "model_provider": '"ssmd"',
        "model_providers.ssmd": "{" + ", ".join(f"{name} = {json.dumps(one)}" for name, one in provider.items()) + "}",
        "model": json.dumps(target.model),
        "model_context_window": str(target.window),
        "model_auto_compact_token_limit": str(target.window - target.output),
        "web_search": '"disabled"',
    }
    arguments = tuple(part for name, value in settings.items() for part in ("-c", f"{name}={value}"))
    return Setup(arguments, {"OPENAI_API_KEY": target.key})


def _opencode(target: Target, beginning: Beginning) -> Setup:
    model = {"name": target.model, "limit": {"context": target.window, "output": target.output}, "tool_call": True}
    config = {
        "provider": {
            "ssmd": {
                "npm": "@ai-sdk/openai-compatible",
                "name": "ssmd",
                "options": {"baseURL": f"{target.url}/v1", "apiKey": target.key},
                "models": {target.model: model},
            }
        },
        "model": f"ssmd/{target.model}",
        "small_model": f"ssmd/{target.model}",
    }
    return Setup(environment={"OPENCODE_CONFIG_CONTENT": json.dumps(config), "OPENCODE_DISABLE_AUTOUPDATE": "1"})


def _copilot(target: Target, beginning: Beginning) -> Setup:
    environment = {
        "COPILOT_PROVIDER_BASE_URL": f"{target.url}/v1",
        "COPILOT_PROVIDER_TYPE": "openai",
        "COPILOT_PROVIDER_WIRE_API": "completions",
        "COPILOT_PROVIDER_API_KEY": target.key,
        "COPILOT_MODEL": target.model,
        "COPILOT_PROVIDER_MAX_PROMPT_TOKENS": str(target.window - target.output),
        "COPILOT_PROVIDER_MAX_OUTPUT_TOKENS": str(target.output),
        "COPILOT_OFFLINE": "true",
    }
    return Setup(environment=environment, unset=("COPILOT_PROVIDER_BEARER_TOKEN", "COPILOT_PROVIDER_MODEL_ID"))


_PI_RESERVE = 16_384  # tokens that pi keeps free: it compacts a conversation that leaves fewer


def _pi(target: Target, beginning: Beginning) -> Setup:
    """Register a provider by an extension, as pi's own models.json is the user's.

    In a context that is not much larger than its reserve pi would compact after each turn, and allow the summary more
    tokens than the context has. So the extension ends such a compaction, and sets a reserve that fits the context.
    """
    model = {
        "id": target.model,
        "name": target.model,
        "reasoning": False,
        "input": ["text"],
        "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
        "contextWindow": target.window,
        "maxTokens": target.output,
        "compat": {"supportsReasoningEffort": False},
    }
    provider = {"baseUrl": f"{target.url}/v1", "apiKey": target.key, "api": "openai-completions", "models": [model]}
    text = f'export default (pi) => {{\n  pi.registerProvider("ssmd", {json.dumps(provider)});\n'
    if target.window < 2 * _PI_RESERVE:
        room = target.window - target.output
        text += (
            '  pi.on("session_before_compact", ({ preparation }) => {\n'
            f"    preparation.settings.reserveTokens = {target.output};\n"
            f"    return preparation.tokensBefore <= {room} ? {{ cancel: true }} : undefined;\n"
            "  });\n"
        )
    text += "};\n"
    arguments = ("-e", f"{target.folder}/ssmd.js", "--provider", "ssmd", "--model", target.model)
    return Setup(arguments, files={"ssmd.js": text})


def _qwen(target: Target, beginning: Beginning) -> Setup:
    """Give the context's length in the file of defaults, which every other settings file of its overrides."""
    defaults = {"model": {"generationConfig": {"contextWindowSize": target.window}}}
    environment = {
        "OPENAI_API_KEY": target.key,
        "QWEN_CODE_MAX_OUTPUT_TOKENS": str(target.output),
        "QWEN_CODE_SYSTEM_DEFAULTS_PATH": f"{target.folder}/defaults.json",
    }
    address = ("--auth-type", "openai", "--openai-base-url", f"{target.url}/v1", "--model", target.model)
    return Setup((*beginning.arguments, *address), environment, files={"defaults.json": json.dumps(defaults)})


def _aider(target: Target, beginning: Beginning) -> Setup:
    """Leave its map of the repository, 1,024 tokens and more, out of a small context.

    Its own variables win over the user's .aider.conf.yml.
    """
    model = f"openai/{target.model}"
    limits = {
        "max_tokens": target.output,
        "max_input_tokens": target.window - target.output,
        "max_output_tokens": target.output,
        "litellm_provider": "openai",
        "mode": "chat",
    }
    arguments = (
        *("--model", model, "--weak-model", model, "--editor-model", model),
        *("--model-metadata-file", f"{target.folder}/models.json", "--no-show-model-warnings"),
        *("--no-check-update", "--no-show-release-notes", "--no-analytics"),
        *(() if target.window > SMALL else ("--map-tokens", "0")),
    )
    environment = {"AIDER_OPENAI_API_BASE": f"{target.url}/v1", "AIDER_OPENAI_API_KEY": target.key}
    return Setup(arguments, environment, files={"models.json": json.dumps({model: limits})})


def _continue(target: Target, beginning: Beginning) -> Setup:
    """Give it a whole configuration, in JSON, which is YAML too."""
    model = {
        "name": target.model,
        "provider": "openai",
        "model": target.model,
        "apiBase": f"{target.url}/v1",
        "apiKey": target.key,
        "contextLength": target.window,
        "roles": ["chat", "edit", "apply"],
        "defaultCompletionOptions": {"contextLength": target.window, "maxTokens": target.output},
        "capabilities": ["tool_use"],
    }
    config = {"name": "ssmd", "version": "1.0.0", "schema": "v1", "models": [model]}
    return Setup(("--config", f"{target.folder}/config.yaml"), files={"config.yaml": json.dumps(config)})


def _zed(target: Target, beginning: Beginning) -> Setup:
    model = {
        "name": target.model,
        "max_tokens": target.window,
        "max_output_tokens": target.output,
        "capabilities": {"tools": True, "images": False, "parallel_tool_calls": True, "prompt_cache_key": False},
    }
    provider = {"api_url": f"{target.url}/v1", "available_models": [model]}
    settings = {
        "language_models": {"openai_compatible": {"ssmd": provider}},
        "agent": {"default_model": {"provider": "ssmd", "model": target.model}},
    }
    return Setup(environment={"SSMD_API_KEY": target.key}, files={"settings.json": _shown(settings)})


def _code(target: Target, beginning: Beginning) -> Setup:
    model = {
        "name": target.model,
        "url": f"{target.url}/v1/chat/completions",
        "toolCalling": True,
        "vision": False,
        "maxInputTokens": target.window - target.output,
        "maxOutputTokens": target.output,
        "requiresAPIKey": False,
    }
    settings = {"github.copilot.chat.customOAIModels": {target.model: model}}
    return Setup(files={"settings.json": _shown(settings)})


def _shown(settings: Mapping[str, Any]) -> str:
    return json.dumps(settings, indent=2)


# Tokens of system prompt and tools, by SmolLM2's tokenizer over the requests' JSON, in November 2026.
AGENTS: Mapping[str, Agent] = {
    "claude": Agent(
        "claude",
        "npm install -g @anthropic-ai/claude-code",
        MESSAGES,
        "2.1.197",
        (
            Beginning(20_110),
            Beginning(3_140, ("--tools", "Bash,Read,Edit"), "with the tools Bash, Read and Edit alone"),
            Beginning(
                1_180,
                ("--bare", "--tools", "Bash,Read,Edit"),
                "with the tools Bash, Read and Edit alone, and with --bare",
            ),
        ),
        _claude,
    ),
    "codex": Agent("codex", "npm install -g @openai/codex", RESPONSES, "0.171.0", (Beginning(9_520),), _codex),
    "opencode": Agent("opencode", "npm install -g opencode-ai", CHAT, "1.18.33", (Beginning(7_690),), _opencode),
    "copilot": Agent("copilot", "npm install -g @github/copilot", CHAT, "1.0.102", (Beginning(12_670),), _copilot),
    "pi": Agent("pi", "npm install -g @mariozechner/pi-coding-agent", CHAT, "0.73.1", (Beginning(1_460),), _pi),
    "qwen": Agent("qwen", "npm install -g @qwen-code/qwen-code", CHAT, "0.15.10", (Beginning(19_240),), _qwen),
    "aider": Agent(
        "aider",
        "uv tool install aider-chat",
        CHAT,
        "0.86.2",
        (Beginning(660),),
        _aider,
    ),
    "continue": Agent("cn", "npm install -g @continuedev/cli", CHAT, "1.5.47", (Beginning(1_920),), _continue),
    "zed": Agent("zed", None, CHAT, "", (Beginning(0),), _zed),
    "code": Agent("code", None, CHAT, "", (Beginning(0),), _code),
}
