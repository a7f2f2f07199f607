"""Hermes' format: how a model whose template knows no tools is told of them, and how it calls them.

It is what most open models were trained on, so that others make something of it, too.
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
    """What a model is told of its tools, beside what else its system prompt says."""
    return _TOOLS.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))


def in_words(message: Message) -> Message:
    """A message whose calls stand in its text, or the user's message that tells a call's result; others as they are."""
    if message.role == "tool":
        return Message("user", f"<tool_response>\n{message.content}\n</tool_response>")
    if not message.tool_calls:
        return message
    said = [message.content] if message.content else []
    return replace(message, content="\n".join([*said, *map(_called, message.tool_calls)]), tool_calls=())


def _called(call: ToolCall) -> str:
    # Arguments stand as the model wrote them: its next prompt then goes on from what it was fed.
    arguments = call.arguments.strip() or "{}"
    if read_arguments(arguments) is None:
        arguments = json.dumps(arguments, ensure_ascii=False)
    name = json.dumps(call.name, ensure_ascii=False)
    return f'<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>'
