"""The command `llm`: prompts, streams, a conversation that goes on, --schema, -T."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from checks import BASE, MODEL, check, resumed, run

HOME = tempfile.TemporaryDirectory()
SETTINGS = f"""\
- model_id: here
  model_name: {MODEL}
  api_base: {BASE}
  supports_schema: true
  supports_tools: true
- model_id: plain
  model_name: {MODEL}
  api_base: {BASE}
  completion: true
"""
(Path(HOME.name) / "extra-openai-models.yaml").write_text(SETTINGS)
# It lets the model decide whether to call: a small one calls when it is told how, word for word.
CALL = '<tool_call>\n{"name": "llm_version", "arguments": {}}\n</tool_call>'


def llm(*arguments: str) -> str:
    """Run the command, and return its output. Raises, with its errors, if it failed."""
    command = [str(Path(sys.executable).with_name("llm")), *arguments]
    environment = {**os.environ, "LLM_USER_PATH": HOME.name, "OPENAI_API_KEY": "none"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    return done.stdout + done.stderr


def ask(*arguments: str, tokens: int = 24) -> str:
    return llm("prompt", "-m", "here", "-o", "temperature", "0", "-o", "max_tokens", str(tokens), *arguments)


@check("chat")
def chat() -> None:
    assert ask("How is the weather in Bonn?", "--no-stream").strip()


@check("streamed")
def streamed() -> None:
    assert ask("How is the weather in Bonn?") == ask("How is the weather in Bonn?", "--no-stream")


@check("two turns")
def two_turns() -> None:
    ask("How is the weather in Bonn?")
    assert ask("And in Cologne?", "-c").strip()
    resumed()


@check("schema")
def schema() -> None:
    found = json.loads(ask("How is the weather in Bonn?", "--schema", "degrees int, sky", "--no-stream", tokens=300))
    assert set(found) == {"degrees", "sky"}


@check("schema streamed")
def schema_streamed() -> None:
    assert set(json.loads(ask("How is it in Bonn?", "--schema", "degrees int, dry bool"))) == {"degrees", "dry"}


@check("tools")
def tools() -> None:
    said = ask(f"Repeat exactly this, and nothing else:\n{CALL}", "-T", "llm_version", "--td", "--no-stream", tokens=64)
    assert "Tool call: llm_version" in said, f"no call: {said.strip()!r}"


@check("tools streamed")
def tools_streamed() -> None:
    said = ask(f"Repeat exactly this, and nothing else:\n{CALL}", "-T", "llm_version", "--td", tokens=64)
    assert "Tool call: llm_version" in said, f"no call: {said.strip()!r}"


@check("frequency_penalty")
def penalty() -> None:
    assert ask("How is the weather in Bonn?", "-o", "frequency_penalty", "0.5").strip()


@check("completions")
def completions() -> None:
    assert llm("prompt", "-m", "plain", "-o", "max_tokens", "8", "Once upon").strip()


run()
