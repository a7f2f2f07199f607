"""The shapes of answers, for the document that describes them. The modules of the endpoints write the answers."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class Shape(BaseModel):
    """An object that may have more fields than these."""

    model_config = ConfigDict(extra="allow")


class ErrorDetail(Shape):
    message: str
    type: Literal["invalid_request_error", "server_error"]
    param: str | None
    code: str


class Error(Shape):
    error: ErrorDetail


class AnthropicErrorDetail(Shape):
    type: str
    message: str


class AnthropicError(Shape):
    type: Literal["error"]
    error: AnthropicErrorDetail
    request_id: str


class OllamaError(Shape):
    error: str


class Root(Shape):
    object: Literal["ssmd"]
    name: Literal["ssmd"]
    version: str
    description: str
    page: str
    docs: str
    openapi: str
    endpoints: list[str]


class PromptTokensDetails(Shape):
    cached_tokens: int


class OwnUsage(Shape):
    session: str | None
    resume: Literal["exact", "portable", "none"]
    stored: bool
    state_stored: bool
    stopped: bool
    ttft_ms: float
    tbt_ms: float | None
    context_left: int | None
    model: str | None = None
    parted_at: int | None = None
    remote: Literal["sent", "waiting", "off"] | None = None
    ignored: list[str] = []
    dropped: list[str] = []


class Usage(Shape):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    ssmd: OwnUsage


class MessageUsage(Shape):
    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    ssmd: OwnUsage


class Message(Shape):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessageUsage


class InputTokensDetails(Shape):
    cached_tokens: int


class OutputTokensDetails(Shape):
    reasoning_tokens: int


class ResponseUsage(Shape):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int
    ssmd: OwnUsage


class Response(Shape):
    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    model: str
    output: list[dict[str, Any]]
    error: dict[str, Any] | None
    incomplete_details: dict[str, Any] | None
    usage: ResponseUsage | None
    store: bool


class DeletedResponse(Shape):
    id: str
    object: Literal["response.deleted"]
    deleted: Literal[True]


class Conversation(Shape):
    id: str
    object: Literal["conversation"]
    created_at: int
    metadata: dict[str, str]


class DeletedConversation(Shape):
    id: str
    object: Literal["conversation.deleted"]
    deleted: Literal[True]


class Item(Shape):
    id: str
    type: str


class ItemPage(Shape):
    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class TokenCount(Shape):
    input_tokens: int


class OllamaEnd(Shape):
    model: str
    created_at: str
    done: Literal[True]
    done_reason: Literal["stop", "length", "load", "unload"]
    total_duration: int
    load_duration: int
    prompt_eval_count: int | None = None
    prompt_eval_duration: int | None = None
    eval_count: int | None = None
    eval_duration: int | None = None
    ssmd: OllamaUsage | None = None


class OllamaUsage(OwnUsage):
    cached_tokens: int


class OllamaMessage(Shape):
    role: Literal["assistant"]
    content: str
    thinking: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


class OllamaChat(OllamaEnd):
    message: OllamaMessage


class OllamaGenerated(OllamaEnd):
    response: str
    thinking: str | None = None
    context: list[int] | None = None


class OllamaVersion(Shape):
    version: str
    ssmd: str


class OllamaModel(Shape):
    name: str
    model: str
    size: int
    digest: str
    details: dict[str, Any]


class OllamaModelList(Shape):
    models: list[OllamaModel]


class OllamaModelInfo(Shape):
    template: str
    details: dict[str, Any]
    model_info: dict[str, Any]
    capabilities: list[Literal["completion", "tools", "thinking"]]
    modified_at: str


class OllamaStatus(Shape):
    status: str


FinishReason = Literal["stop", "length", "tool_calls"]


class CalledFunction(Shape):
    name: str
    arguments: str


class ToolCall(Shape):
    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(Shape):
    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(Shape):
    index: int
    message: ChatMessage
    logprobs: dict[str, Any] | None
    finish_reason: FinishReason


class ChatCompletion(Shape):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage


class CompletionChoice(Shape):
    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: FinishReason


class Completion(Shape):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage


class Model(Shape):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    context_length: int | None = None
    max_model_len: int | None = None


class Models(Shape):
    object: Literal["list"]
    data: list[Model]


class Rows(Shape):
    """A list of objects that docs/ describes."""

    object: Literal["list"]
    data: list[dict[str, Any]]


class LoadedModel(Shape):
    id: str
    name: str
    state: Literal["unloaded", "loading", "loaded", "unloading", "failed"]
    pinned: bool
    problem: str | None


class Tokens(Shape):
    tokens: list[int] | list[dict[str, Any]]


class Content(Shape):
    content: str


class Prompt(Shape):
    prompt: str


class Health(Shape):
    status: Literal["ok", "degraded", "starting", "shutting_down"]
    model: str | None
    runtime: str | None
    version: str
    loading: list[dict[str, Any]]
    remote: dict[str, Any] | None = None


class Metrics(Shape):
    version: str
    pid: int
    running: list[dict[str, Any]]
    recent: list[dict[str, Any]]
    models: list[dict[str, Any]]


class Session(Shape):
    id: str
    object: Literal["session"]
    title: str | None
    model: str
    created: int
    last_used: int
    head: str
    turn_count: int
    bytes: int
    pinned: bool
    imported: bool


class SessionTurns(Session):
    turns: list[dict[str, Any]]


class Parting(Shape):
    position: int
    session: str
    turn: str
    before: str
    here: str
    there: str


class PartingAnswer(Shape):
    object: Literal["parting"]
    turn: str
    parting: Parting | None


class Sessions(Shape):
    object: Literal["list"]
    data: list[Session]
    has_more: bool


class DeletedSession(Shape):
    id: str
    object: Literal["session.deleted"]
    deleted: Literal[True]


class WarmBeginning(Shape):
    id: str
    object: Literal["warm"]
    name: str
    model: str
    tokens: int
    ready: bool


class StoppedRequest(Shape):
    id: str
    object: Literal["request.stopped"]


class Pull(Shape):
    id: str
    model: str
    state: str


class Ticket(Shape):
    ticket: str
    expires_in: int


class Key(Shape):
    key: str
    expires_in: int


class Shutdown(Shape):
    status: Literal["shutting_down"]
    drain_s: float | None = None
