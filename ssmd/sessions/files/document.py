"""What a `.ssmd` file says in JSON: the session, its turns, and what its tensors are. See docs/session-file.md."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from ssmd.sessions.turn import ID_PATTERN

FORMAT: Literal[1] = 1
MAX_TURNS = 10_000
MAX_CHECKPOINTS = 256
MAX_ROWS = 20_000  # chunks of KV rows


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


Count = Annotated[int, Field(ge=0, le=1 << 31)]
Id = Annotated[str, Field(pattern=f"^{ID_PATTERN.pattern}$")]
Hex = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Short = Annotated[str, Field(max_length=1000)]


class SessionEntry(_Strict):
    id: Id
    model: Short
    lineage: Hex
    clock: Short
    head: Id


class MessageEntry(_Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: str
    name: str | None = None


class TurnEntry(_Strict):
    """A turn in the header. Its ids are the first `ids_shared` of its parent's and then those of the tensor
    turn.<i>.ids; text likewise.
    """

    id: Id
    parent: Id | None
    messages: Annotated[list[MessageEntry], Field(max_length=100_000)]
    answer: MessageEntry
    ids_shared: Count
    text_shared: Count
    text: str
    prompt_tokens: Count
    finish: Annotated[str, Field(pattern=r"^[a-z_]{1,32}$")]
    complete: bool
    created_at: Short


class TensorEntry(_Strict):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    kind: Short
    layer: Count
    shape: Annotated[list[Annotated[int, Field(ge=1, le=1 << 31)]], Field(max_length=8)]
    dtype: Short


class RowsEntry(_Strict):
    first: Count
    last: Count


class CheckpointEntry(_Strict):
    """A checkpoint in the header. rows: numbers of the chunks that make its KV rows [0, position)."""

    turn: Id
    kind: Literal["system", "user", "turn"]
    build: Hex
    producer: Short
    rows: Annotated[list[Count], Field(max_length=MAX_ROWS)]


class Document(_Strict):
    """What the header says in JSON, besides where the tensors are. layout: StateSpec.to_json(), empty without state."""

    format: Literal[1]
    written_by: Short
    session: SessionEntry
    turns: Annotated[list[TurnEntry], Field(min_length=1, max_length=MAX_TURNS)]
    layout: Annotated[list[TensorEntry], Field(max_length=10_000)]
    checkpoints: Annotated[list[CheckpointEntry], Field(max_length=MAX_CHECKPOINTS)]
    rows: Annotated[list[RowsEntry], Field(max_length=MAX_ROWS)]
