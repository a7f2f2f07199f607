"""Every operation of the HTTP API: the tables of its fronts. A front adds its own here, in one line."""

from __future__ import annotations

from ssmd.api.anthropic import operations as anthropic
from ssmd.api.ollama import operations as ollama
from ssmd.api.openai import operations as openai
from ssmd.api.openai.responses import operations as responses
from ssmd.api.own import operations as own

OPERATIONS = (
    *own.PAGE,
    *openai.OPERATIONS,
    *responses.OPERATIONS,
    *anthropic.OPERATIONS,
    *ollama.OPERATIONS,
    *own.OPERATIONS,
    *openai.UNSERVED,
    *ollama.UNSERVED,
)
