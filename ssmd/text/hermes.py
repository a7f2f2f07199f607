"""The Hermes format of tools and calls, for a model whose template does not support tools.

Most open models were trained on it, so models that were not can often follow it too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ssmd.text.arguments import read_arguments
from ssmd.text.messages import Message, ToolCall

_TOOLS = """\
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a JSON object with the function's name and its arguments within <tool_call></tool_call> \
XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <arguments-json-object>}}
</tool_call>"""


def system_prompt(tools: Sequence[Mapping[str, Any]]) -> str:
    """Return the part of a system prompt that describes the tools and the notation of calls."""
    return _TOOLS.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))


def in_words(message: Message) -> Message:
    """Return a message without tool fields: calls become part of its text, a call's result a user's message.

    Other messages are returned unchanged.
    """
    if message.role == "tool":
        return Message("user", f"<tool_response>\n{message.content}\n</tool_response>")
    if not message.tool_calls:
        return message
    said = [message.content] if message.content else []
    return replace(message, content="\n".join([*said, *map(_called, message.tool_calls)]), tool_calls=())


def _called(call: ToolCall) -> str:
    # Arguments stand as the model wrote them: its next prompt then goes on from what it was fed. Clients in JavaScript
    # write them again without spaces, which models seldom do.
    arguments = call.arguments.strip() or "{}"
    known = read_arguments(arguments)
    if known is None:
        arguments = json.dumps(arguments, ensure_ascii=False)
    elif arguments == json.dumps(known, ensure_ascii=False, separators=(",", ":")):
        arguments = json.dumps(known, ensure_ascii=False)
    name = json.dumps(call.name, ensure_ascii=False)
    return f'<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>'
