"""The JSON document in a `.ssmd` file: the session, its turns, and its tensors. See docs/session-file.md."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, TypeAdapter

from ssmd.model.strict import Strict
from ssmd.sessions.turn import ID_PATTERN, messages_of, title_problem
from ssmd.text.messages import Message

FORMAT: Literal[2] = 2
MAX_TURNS = 10_000
MAX_CHECKPOINTS = 256
MAX_ROWS = 20_000  # chunks of KV rows


Count = Annotated[int, Field(ge=0, le=1 << 31)]
Id = Annotated[str, Field(pattern=f"^{ID_PATTERN.pattern}$")]
Hex = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Short = Annotated[str, Field(max_length=1000)]


def _checked(title: str | None) -> str | None:
    if title is not None and (why := title_problem(title)):
        raise ValueError(f"a title {why}")
    return title


class SessionEntry(Strict):
    """The session in the header. title: given by a user; absent if there is none."""

    id: Id
    model: Short
    lineage: Hex
    clock: Short
    head: Id
    title: Annotated[str | None, AfterValidator(_checked)] = None


class SaidEntry(Strict):
    """A message among the items. id: its own, which HTTP shows too."""

    id: Id
    type: Literal["message"]
    role: Literal["system", "developer", "user", "assistant"]
    content: str
    name: str | None = None


class CallEntry(Strict):
    """A call made by the assistant's message before it. arguments: JSON, or a part of it if the answer was cut off."""

    id: Id
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class OutputEntry(Strict):
    """The result of a call."""

    id: Id
    type: Literal["function_call_output"]
    call_id: str
    output: str
    name: str | None = None


ItemEntry = Annotated[SaidEntry | CallEntry | OutputEntry, Field(discriminator="type")]
_ITEMS: TypeAdapter[list[ItemEntry]] = TypeAdapter(list[ItemEntry])


def as_entries(items: Sequence[dict[str, Any]]) -> list[ItemEntry]:
    """Convert items to entries of the file. Raises ValidationError."""
    return _ITEMS.validate_python(items)


class TurnEntry(Strict):
    """A turn in the header. Its ids are those of its stem, then the tensor turn.<i>.ids; its text likewise.

    cut: messages after the system prompt that are in neither.
    """

    id: Id
    parent: Id | None
    text: str
    prompt_tokens: Count
    finish: Annotated[str, Field(pattern=r"^[a-z_]{1,32}$")]
    complete: bool
    created_at: Short
    stem: Id | None
    cut: Count = 0
    items: Annotated[list[ItemEntry], Field(fail_fast=True, max_length=100_000)]
    answer: Annotated[list[ItemEntry], Field(fail_fast=True, min_length=1, max_length=100_000)]

    @property
    def said(self) -> tuple[Sequence[Message], Sequence[Message]]:
        """Return the messages of the input, and those of the answer. Raises ValueError."""
        items, answer = ([item.model_dump() for item in said] for said in (self.items, self.answer))
        return messages_of(items), messages_of(answer)


class TensorEntry(Strict):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    kind: Short
    layer: Count
    shape: Annotated[list[Annotated[int, Field(ge=1, le=1 << 31)]], Field(fail_fast=True, max_length=8)]
    dtype: Short


class RowsEntry(Strict):
    first: Count
    last: Count


class CheckpointEntry(Strict):
    """A checkpoint in the header: of the first `position` ids of its turn.

    rows: numbers of the chunks that make its KV rows [0, position).
    """

    turn: Id
    kind: Literal["system", "user", "turn"]
    build: Hex
    producer: Short
    rows: Annotated[list[Count], Field(fail_fast=True, max_length=MAX_ROWS)]
    position: Annotated[int, Field(ge=1, le=1 << 31)]


class Document(Strict):
    """The header's JSON document, without the places of tensors. layout: StateSpec.to_json(), empty without state."""

    written_by: Short
    session: SessionEntry
    layout: Annotated[list[TensorEntry], Field(fail_fast=True, max_length=10_000)]
    rows: Annotated[list[RowsEntry], Field(fail_fast=True, max_length=MAX_ROWS)]
    format: Literal[2]
    turns: Annotated[list[TurnEntry], Field(fail_fast=True, min_length=1, max_length=MAX_TURNS)]
    checkpoints: Annotated[list[CheckpointEntry], Field(fail_fast=True, max_length=MAX_CHECKPOINTS)]
