"""The formats of tool calls (markers, and the notation between them), recognised by a chat template's source."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ssmd.text.calls.body import Body, CallSequence
from ssmd.text.calls.json_object import JsonObject
from ssmd.text.calls.named import ARGS, CALL_ID, NamedCall
from ssmd.text.calls.pythonic import PythonicCall
from ssmd.text.calls.tagged.call import FUNCTION, FUNCTION_END, TaggedCall

_LETTERS = string.ascii_letters + string.digits


@dataclass(frozen=True)
class CallSyntax:
    """The spelling of a format's forced calls: as its templates write them, with arguments in JSON.

    opening, closing: text around all calls. before, middle, after: text around the name and the arguments of one call.
    between: text between two calls.
    """

    before: str
    middle: str
    after: str = ""
    between: str = ""
    opening: str = ""
    closing: str = ""
    several: bool = True


@dataclass(frozen=True)
class Format:
    """A notation of calls. Markers may be control tokens or plain text.

    openings: markers that calls begin with, the usual one first. written: the spelling of forced calls.
    named: makes the parser of a call that begins with its name; each format also has calls as JSON objects.
    tagged: each argument stands between tags of its own.
    closing: the last marker, or "". inner: markers inside a call. bare: a call may also begin without a marker, at the
    start of the answer; its tool must be known. id_length: length of the ids that templates ask for.
    """

    name: str
    openings: tuple[str, ...]
    written: CallSyntax
    named: Callable[[], Body] | None = None
    closing: str = ""
    inner: tuple[str, ...] = ()
    bare: bool = False
    tagged: bool = False
    prefix: str = "call_"
    id_length: int = 24

    @property
    def markers(self) -> tuple[str, ...]:
        return (*self.openings, *([self.closing] if self.closing else []), *self.inner)

    @property
    def closings(self) -> tuple[str, ...]:
        """Return the markers that end a call, also those that match an opening without being the format's own."""
        tags = (f"</{opening[1:]}" for opening in self.openings if re.fullmatch(r"<\w+>", opening))
        return tuple(dict.fromkeys((*([self.closing] if self.closing else []), *tags)))

    def body(self, tools: Mapping[str, Any]) -> CallSequence:
        """Return a parser of the text after an opening marker. tools: the parameters' schema of each, by its name."""
        # An answer may be JSON without being a call, so a call without a marker needs a known name.
        object_ = partial(JsonObject, tools if self.bare else None)
        return CallSequence(object_, self.named, partial(TaggedCall, tools) if self.tagged else None)

    def new_id(self) -> str:
        """Return a new id for a call, of OpenAI's form or of the form that the template requires."""
        return self.prefix + "".join(secrets.choice(_LETTERS) for _ in range(self.id_length))


_OBJECT = CallSyntax('{"name": "', '", "arguments": ', "}", ", ")
HERMES = Format(
    "hermes",
    ("<tool_call>",),
    CallSyntax('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", "\n"),
    closing="</tool_call>",
)
QWEN_3_5 = Format(
    "qwen 3.5",
    ("<tool_call>",),
    CallSyntax(f"<tool_call>\n{FUNCTION}", ">\n", f"{FUNCTION_END}\n</tool_call>", "\n"),
    closing="</tool_call>",
    tagged=True,
)
NEMOTRON = Format(
    "nemotron",
    ("<TOOLCALL>",),
    replace(_OBJECT, opening="<TOOLCALL>[", closing="]</TOOLCALL>"),
    closing="</TOOLCALL>",
)
GRANITE_3 = Format(
    "granite 3",
    ("<|tool_call|>", "<tool_call>"),
    replace(_OBJECT, opening="<|tool_call|>[", closing="]"),
)
LFM2 = Format(
    "lfm2",
    ("<|tool_call_start|>",),
    replace(_OBJECT, opening="<|tool_call_start|>[", closing="]<|tool_call_end|>"),
    PythonicCall,
    closing="<|tool_call_end|>",
)
LLAMA_3 = Format(
    "llama 3",
    ("<|python_tag|>",),
    CallSyntax('{"name": "', '", "parameters": ', "}", several=False),  # its templates refuse more than one
    bare=True,
)
MISTRAL = Format(
    "mistral",
    ("[TOOL_CALLS]",),
    replace(_OBJECT, opening="[TOOL_CALLS] [", closing="]"),
    NamedCall,
    inner=(CALL_ID, ARGS),
    prefix="",
    id_length=9,
)
MISTRAL_11 = replace(MISTRAL, name="mistral 11", written=CallSyntax("[TOOL_CALLS]", ARGS))
FORMATS = (HERMES, QWEN_3_5, NEMOTRON, GRANITE_3, LFM2, LLAMA_3, MISTRAL, MISTRAL_11)
# Texts by which a template's format is recognised. The first one found in its source decides.
_SIGNS = (
    (ARGS, MISTRAL_11),
    ("[TOOL_CALLS]", MISTRAL),
    ("<|tool_call_start|>", LFM2),
    ("<|tool_list_start|>", LFM2),
    ("<|tool_call|>", GRANITE_3),
    ("<TOOLCALL>", NEMOTRON),
    *((f"<tool_call>{line_break}{FUNCTION}", QWEN_3_5) for line_break in ("\\n", "\n")),
    ("<tool_call>", HERMES),
    ("<|python_tag|>", LLAMA_3),
    ('"parameters": ', LLAMA_3),
)


def format_of(source: str) -> Format:
    """Return the format of calls for a chat template's source. A template without tools gets Hermes' format."""
    return next((found for sign, found in _SIGNS if sign in source), HERMES)
