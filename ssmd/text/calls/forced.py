"""The grammar, for llguidance, of an answer that must be tool calls with arguments valid by their schemas."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ssmd.text.calls.formats import CallSyntax, Format
from ssmd.text.calls.tagged import grammar as tagged
from ssmd.text.closed import closed
from ssmd.text.markers import first
from ssmd.text.messages import THINK_END

# The spacing of JSON in templates. An answer is then rendered as it was generated, so that its state can be resumed.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}}
_ANY = r"(.|\n)*"


def forced(
    format_: Format,
    tools: Sequence[Mapping[str, Any]],
    *,
    several: bool,
    thought: str | None,
    controls: Mapping[str, int],
    free: str = "",
    begun: bool = False,
) -> str:
    """Return a grammar in Lark for calls of these tools.

    several: allow more than one call. thought: the opening of reasoning, which may come before the calls; "" if the
    prompt opened it, so that it must be closed; None: no reasoning. controls: ids of markers that are control tokens.
    free: name of a grammar for an answer without calls. begun: the grammar begins after the calls' first marker; more
    than one call is then possible only if that marker opens them all. Raises UnsupportedSchema, for arguments in tags.
    """
    written = _behind(format_) if begun else format_.written
    rules = []
    before = ""
    if thought is not None:
        before = "thought SPACES" if thought == "" else "(thought SPACES)?"
        rules += _thought(thought, controls)
    if begun:
        before = "SPACES"
        rules.append(r"SPACES: /\s{0,2}/")
    more = f" ({_text(written.between, controls)} call)*" if several and written.several else ""
    start = [before, _text(written.opening, controls), f"call{more}", _text(written.closing, controls)]
    rules.append(f"call: {' | '.join(f'call{i}' for i in range(len(tools)))}")
    if free:
        rules.append(f"calls: {' '.join(filter(None, start))}")
        start = [f"calls | @{free}"]
    for i, tool in enumerate(tools):
        function = tool["function"]
        name = str(function["name"])
        name = name if format_.tagged else json.dumps(name, ensure_ascii=False)[1:-1]
        head = _text(written.before + name + written.middle, controls)
        tail = _text(written.after, controls)
        rules.append(f"call{i}: {head} arguments{i} {tail}".rstrip())
        if format_.tagged:
            rules += tagged.rules(f"arguments{i}", _schema(function.get("parameters")), _SPACING)
        else:
            schema = {**_schema(function.get("parameters")), "x-guidance": _SPACING}
            rules.append(f"arguments{i}: %json {json.dumps(schema)}")
    return "\n".join([f"start: {' '.join(filter(None, start))}", *rules]) + "\n"


def _behind(format_: Format) -> CallSyntax:
    """Return the notation of calls after their first marker."""
    written, marker = format_.written, format_.openings[0]
    if written.opening.startswith(marker):
        return replace(written, opening=written.opening.removeprefix(marker).lstrip())
    return replace(written, before=written.before.removeprefix(marker).lstrip(), several=False)


def _schema(parameters: Any) -> dict[str, Any]:
    """Return the schema of a call's arguments, always an object; an empty one for a tool without parameters."""
    schema = parameters if isinstance(parameters, dict) and parameters else _NO_ARGUMENTS
    return {**closed(schema), "type": "object"}


def _thought(begins: str, controls: Mapping[str, int]) -> list[str]:
    if THINK_END in controls:
        opening = f"<[{controls[begins]}]> " if begins in controls else f"{json.dumps(begins)} " if begins else ""
        return [f"thought: {opening}/{_ANY}/ <[{controls[THINK_END]}]>", r"SPACES: /\s{0,2}/"]
    return [f"thought[lazy]: /{begins}{_ANY}<\\/think>/", r"SPACES: /\s{0,2}/"]


def _text(text: str, controls: Mapping[str, int]) -> str:
    """Return a text in Lark, with its control tokens as token ids."""
    parts = []
    while text:
        at, marker = first(text, controls)
        if at:
            parts.append(json.dumps(text[:at], ensure_ascii=False))
        if marker:
            parts.append(f"<[{controls[marker]}]>")
        text = text[at + len(marker) :]
    return " ".join(parts)
