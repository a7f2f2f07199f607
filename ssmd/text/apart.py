"""Untrusted chat templates and tokenizers, run in a child process. Their output is limited and checked.

A template is a program, and the regular expressions and replacements of a tokenizer.json can amount to one. Whatever
they do, only one request fails. This process keeps only operations that no text can make costly: converting tokens to
bytes, and cutting and marking texts.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ssmd.machine.child import Child, ChildError, Packet
from ssmd.model.artifact import Artifact, SpecialTokens
from ssmd.text.messages import Message
from ssmd.text.template import (
    MAX_SOURCE,
    NOTHING_MORE,
    ChatTemplate,
    RenderedText,
    StablePrefix,
    Template,
    TemplateError,
    TemplateInput,
)
from ssmd.text.tokenizer import Reader, Tokenizer, TokenizerError, tokenizer_bytes

MODULE = "ssmd.text.confined"
ERRORS: dict[str, type[ValueError]] = {"template": TemplateError, "tokenizer": TokenizerError}
# Bytes beside what Python and its libraries take: the largest vocabularies in use (256,000 tokens) take 0.4 GB to read.
MEMORY = 2 << 30
# Seconds of processor time. The longest template in use compiles in 0.1 s, the largest vocabulary is read in 2.
OPEN_S = 30.0
RENDER_S = 15.0  # more than the meter allows (text/jinja/meter.py)
TEXT = "A river does not remember the rain that filled it: 17 gulls, one late train.\n"
READ_S = 10.0  # a piece of 32,768 characters takes 0.05 s, a whole one of 524,288 some seconds
_MOST_STOPS = 4096  # most stop tokens that fit the head of a message to the child; models have up to five


@dataclass(frozen=True)
class Texts:
    """An artifact's template and tokenizer. close: kills their child process, if they have one."""

    template: Template
    tokenizer: Tokenizer
    close: Callable[[], None] = lambda: None


def opened(artifact: Artifact, *, apart: bool) -> Texts:
    """Open an artifact's template and tokenizer. apart: in a child process, as they may be untrusted.

    Raises TemplateError or TokenizerError.
    """
    path, stop_tokens = artifact.file("tokenizer.json"), artifact.manifest.stop_tokens
    source, special = _source(artifact.file("chat_template.jinja")), artifact.manifest.special_tokens
    if not apart:
        return Texts(ChatTemplate(source, special), Tokenizer.open(path, stop_tokens=stop_tokens))
    return open_texts(path, stop_tokens, source, special)


def _source(path: Path) -> str:
    """Read a template's source without its byte order mark, of at most MAX_SOURCE characters. Raises TemplateError."""
    try:
        with path.open(encoding="utf-8-sig") as file:  # editors on Windows write the mark
            source = file.read(MAX_SOURCE + 1)
    except UnicodeDecodeError as err:
        raise TemplateError(f"the chat template is not valid UTF-8: {err}") from err
    if len(source) > MAX_SOURCE:
        raise TemplateError(f"the chat template has more than the {MAX_SOURCE} characters that are allowed")
    return source


def open_texts(path: Path, stop_tokens: Sequence[int], source: str, special: SpecialTokens) -> Texts:
    """Open a tokenizer.json and a template's source in a child. Raises TemplateError or TokenizerError."""
    if len(source) > MAX_SOURCE:
        raise TemplateError(f"the chat template has {len(source)} characters, at most {MAX_SOURCE} are allowed")
    if len(stop_tokens) > _MOST_STOPS:
        raise TokenizerError(f"{len(stop_tokens)} tokens end an answer, at most {_MOST_STOPS} are allowed")
    nonce = secrets.token_hex(12)
    opening: dict[str, Any] = {"do": "open", "tokenizer": str(path.absolute()), "stop_tokens": list(stop_tokens)}
    # The hash makes sure that each new child opens the same file as this process.
    sha256 = hashlib.sha256(tokenizer_bytes(path)).hexdigest()
    opening |= {"sha256": sha256, "nonce": nonce, "special": special.model_dump()}
    child = Child(MODULE, MEMORY, Packet(opening, encoded(source)), OPEN_S)
    try:
        try:
            answer = _checked(child.open())
        except ChildError as err:
            raise TokenizerError(f"{path.parent}: its tokenizer and chat template cannot be opened: {err}") from err
        reader = Reader(nonce, answer.head.get("start_matters") is not False, TextReader(child))
        tokenizer = Tokenizer.open(path, stop_tokens=stop_tokens, reader=reader, sha256=sha256)
    except BaseException:
        child.close()
        raise
    return Texts(TemplateApart(source, child), tokenizer, child.close)


def check(path: Path, stop_tokens: Sequence[int], source: str, special: SpecialTokens) -> None:
    """Check that an untrusted tokenizer.json and template open, and that a text can be tokenised.

    Raises TemplateError or TokenizerError.
    """
    texts = open_texts(path, stop_tokens, source, special)
    try:
        texts.tokenizer.encode(TEXT)
    finally:
        texts.close()


class TextReader:
    """Tokenises texts in a child."""

    def __init__(self, child: Child) -> None:
        self._child = child

    def __call__(self, text: str) -> NDArray[np.int32]:
        """Return the token ids of a marked text. Raises TokenizerError."""
        try:
            body = _checked(self._child.ask(Packet({"do": "read"}, encoded(text)), READ_S)).body
        except ChildError as err:
            raise TokenizerError(f"the tokenizer cannot read the text: {err}") from err
        if len(body) % 4:
            raise TokenizerError(f"the tokenizer's process returned {len(body)} bytes; ids have 4 bytes each")
        ids = np.frombuffer(body, "<i4")
        if len(ids) and ids.min() < 0:
            raise TokenizerError("the tokenizer's process returned ids below 0")
        return ids


class TemplateApart:
    """Renders a template in a child, with the same results as ChatTemplate. Thread-safe."""

    def __init__(self, source: str, child: Child) -> None:
        self.source = source
        self._child = child

    @cached_property
    def variables(self) -> frozenset[str]:
        """Return the names that the template looks up, as ChatTemplate.variables. Raises TemplateError."""
        try:
            found = json_of(_checked(self._child.ask(Packet({"do": "variables"}), RENDER_S)).body)
        except (ChildError, ValueError) as err:
            raise TemplateError(f"the chat template's variables are not known: {err}") from err
        return frozenset(name for name in found if isinstance(name, str)) if isinstance(found, list) else frozenset()

    def render(
        self, messages: Sequence[Message], *, now: datetime, generate: bool = True, given: TemplateInput = NOTHING_MORE
    ) -> str:
        """Render, as ChatTemplate.render does."""
        return _text(self._asked({"do": "render", "generate": generate}, messages, now, given))

    def render_settled(
        self, messages: Sequence[Message], *, now: datetime, given: TemplateInput = NOTHING_MORE
    ) -> RenderedText:
        """Render, and return which part is settled, as ChatTemplate.render_settled does."""
        rendered = _rendered(self._asked({"do": "settled"}, messages, now, given), len(messages))
        if rendered is None:
            raise TemplateError("the chat template's process returned no text")
        return rendered

    def render_after(
        self,
        first: Message,
        skipped: int,
        tail: Sequence[Message],
        *,
        now: datetime,
        given: TemplateInput = NOTHING_MORE,
    ) -> RenderedText | None:
        """Render from a message on, as ChatTemplate.render_after does. Raises TemplateError if the child ends."""
        asked = {"do": "after", "skipped": skipped}
        return _rendered(self._asked(asked, [first, *tail], now, given), skipped + len(tail))

    def _asked(
        self, fields: dict[str, Any], messages: Sequence[Message], now: datetime, given: TemplateInput
    ) -> Packet:
        asked = {"messages": [m.to_json() for m in messages], "tools": given.tools, "variables": given.variables}
        body = encoded(json.dumps(asked, ensure_ascii=False))
        try:
            return _checked(self._child.ask(Packet({**fields, "now": now.isoformat()}, body), RENDER_S))
        except ChildError as err:
            raise TemplateError(f"the chat template cannot be used: {err}") from err


def encoded(text: str) -> bytes:
    """Encode a text as UTF-8. Lone surrogates are encoded too; the reader refuses them."""
    return text.encode("utf-8", "surrogatepass")


def decoded(data: bytes) -> str:
    """Decode the bytes of `encoded`. Raises ValueError."""
    return data.decode("utf-8", "surrogatepass")


def json_of(data: bytes) -> Any:
    """Parse a body as JSON. Raises ValueError."""
    return json.loads(decoded(data))


def _checked(answer: Packet) -> Packet:
    """Return a child's answer. Raises the error that it reports: ChildError, TemplateError or TokenizerError."""
    if "error" not in answer.head:
        return answer
    said = str(answer.head.get("said"))
    raise ERRORS.get(str(answer.head["error"]), ChildError)(said)


def _text(answer: Packet) -> str:
    """Return the text of a child's answer. Raises TemplateError."""
    try:
        return decoded(answer.body)
    except UnicodeDecodeError as err:
        raise TemplateError(f"the chat template's process returned invalid UTF-8: {err}") from err


def _rendered(answer: Packet, messages: int) -> RenderedText | None:
    if answer.head.get("none"):
        return None
    text = _text(answer)
    match answer.head.get("settled"):
        case [int(count), int(characters)] if 0 < count <= messages and 0 <= characters <= len(text):
            return RenderedText(text, StablePrefix(count, characters))
    return RenderedText(text, None)
