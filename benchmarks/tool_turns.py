"""Tool calls and schemas by the real openai client: what each request costs after a kill, and whether answers hold.

    benchmarks/tool_turns.py [MODEL…]     names or paths of artifacts; default: smollm2 granite-4.0-h-350m

Turns: a forced call, its result, a second call, its result, all streamed; SIGKILL and a restart before each. Another
daemon, which is not killed, gets the same requests and does not stream. Calls written otherwise: the cost of a result
if the model spaces its JSON differently or adds text; at once, and after the daemon was idle. A schema: answers at
temperature 1, each checked by jsonschema; of the first model. `scripts/test` makes the client's environment.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from daemon_process import DaemonProcess, conditions
from jsonschema import Draft202012Validator

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from openai_client import openai

from ssmd.config import Settings
from ssmd.installed import resolve

Fields = dict[str, Any]

IDLE_S = 3.0  # time for states that an idle daemon computes again
ANSWERS = 200
WEATHER: Fields = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["celsius", "fahrenheit"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
FUNCTION: Fields = {"name": "weather", "description": "Tells the weather of a city.", "parameters": WEATHER}
TOOLS = [{"type": "function", "function": FUNCTION}]
NAMED = {"type": "function", "function": {"name": "weather"}}
ARGUMENTS = r'\{"city": "[A-Z][a-z]{2,8}", "unit": "celsius"\}'
CALL = rf'<tool_call>\n\{{"name": "weather", "arguments": {ARGUMENTS}\}}\n</tool_call>'
OTHERWISE = {  # regular expressions of answers that are calls
    "as templates write it": CALL,
    "without spaces": CALL.replace(r"\n", "").replace(": ", ":").replace(", ", ","),
    "arguments before the name": rf'<tool_call>\n\{{"arguments": {ARGUMENTS}, "name": "weather"\}}\n</tool_call>',
    "after a sentence and an empty line": rf"Let me see\.\n\n{CALL}",
    "two calls": rf"{CALL}\n{CALL}",
    "not closed": CALL.removesuffix(r"\n</tool_call>"),
}
PLACES: Fields = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 1, "maxLength": 24},
        "population": {"type": "integer", "minimum": 1, "maximum": 40_000_000},
        "size": {"enum": ["small", "middling", "big"]},
        "rivers": {"type": "array", "items": {"type": "string", "pattern": "^[A-Z][a-z]{1,12}$"}, "maxItems": 3},
        "mayor": {"anyOf": [{"$ref": "#/$defs/person"}, {"type": "null"}]},
    },
    "required": ["city", "population", "size", "rivers", "mayor"],
    "additionalProperties": False,
    "$defs": {
        "person": {
            "type": "object",
            "properties": {"name": {"type": "string", "maxLength": 16}, "age": {"type": "integer", "maximum": 99}},
            "required": ["name", "age"],
            "additionalProperties": False,
        }
    },
}
COUNTRIES = ("France", "Peru", "Japan", "Kenya", "Norway")


@dataclass(frozen=True)
class Answer:
    """The client's answer: its message, the reason of its end, and its cost."""

    message: Fields
    finish: str
    usage: Fields

    @staticmethod
    def of(completion: Fields) -> Answer:
        choice = completion["choices"][0]
        return Answer(choice["message"], choice["finish_reason"], completion["usage"])

    @staticmethod
    def streamed(chunks: Sequence[Fields]) -> Answer:
        """The answer that these chunks come to; its usage is in the last one."""
        message: Fields = {"role": "assistant", "content": None, "tool_calls": []}
        finish = ""
        for choice in (choice for chunk in chunks for choice in chunk["choices"]):
            delta, finish = choice["delta"], choice["finish_reason"] or finish
            if delta.get("content"):
                message["content"] = (message["content"] or "") + delta["content"]
            for part in delta.get("tool_calls") or ():
                if part["index"] == len(message["tool_calls"]):
                    message["tool_calls"].append({key: part[key] for key in ("id", "type", "function")})
                else:
                    message["tool_calls"][part["index"]]["function"]["arguments"] += part["function"]["arguments"]
        if not message["tool_calls"]:
            del message["tool_calls"]
        return Answer(message, finish, chunks[-1]["usage"])

    @property
    def prompt(self) -> int:
        return int(self.usage["prompt_tokens"])

    @property
    def cached(self) -> int:
        return int(self.usage["prompt_tokens_details"]["cached_tokens"])

    @property
    def said(self) -> tuple[Any, ...]:
        """All that two answers can have in common: ids of calls are drawn anew."""
        calls = [call["function"] for call in self.message.get("tool_calls") or ()]
        names = [(call["name"], call["arguments"]) for call in calls]
        return self.message.get("content"), names, self.finish, self.usage["completion_tokens"]


@dataclass(frozen=True)
class Client:
    """The openai client, in its own process for each request, as it would be after a restart of everything."""

    daemon: DaemonProcess
    model: str
    streams: bool

    def ask(self, messages: Sequence[Fields], **fields: Any) -> Answer:
        body = {"model": self.model, "messages": messages, "tools": TOOLS, "temperature": 0.8, "seed": 7, **fields}
        url = f"http://127.0.0.1:{self.daemon.port}"
        if self.streams:
            return Answer.streamed(openai("stream", url, {**body, "stream_options": {"include_usage": True}})["chunks"])
        return Answer.of(openai("whole", url, body)["completion"])


def results(answer: Answer, *said: str) -> list[Fields]:
    """Return an answer with calls as the client sends it back, and the result of each call."""
    calls = answer.message["tool_calls"]
    told = [{"role": "tool", "tool_call_id": c["id"], "content": t} for c, t in zip(calls, said, strict=True)]
    return [answer.message, *told]


def turns(client: Client, *, killed: bool) -> tuple[list[Answer], list[Fields]]:
    """Two calls and what the model says to their results; the whole conversation."""
    messages: list[Fields] = [{"role": "user", "content": "How is the weather in Bonn?"}]
    answers = []

    def ask(**fields: Any) -> Answer:
        if killed:
            client.daemon.kill()
            client.daemon.start()
        answers.append(client.ask(messages, **fields))
        return answers[-1]

    messages += results(ask(tool_choice=NAMED, max_tokens=100), "It rains, 8 degrees.")
    messages += [ask(tool_choice="none", max_tokens=24).message, {"role": "user", "content": "And in Cologne?"}]
    messages += results(ask(tool_choice="required", parallel_tool_calls=False, max_tokens=100), "It snows.")
    messages.append(ask(tool_choice="none", max_tokens=24).message)
    return answers, messages


def check_stored(daemon: DaemonProcess, session: str, messages: Sequence[Fields]) -> None:
    """Raises if the session does not hold a conversation as the client has it, word for word."""
    found = daemon.get(f"/ssmd/v1/sessions/{session}")[1]["turns"]
    stored = [message for turn in found for message in turn["messages"]]
    names = ("role", "content", "tool_call_id")
    plain, theirs = (
        [({name: m.get(name) or None for name in names}, _calls(m)) for m in told] for told in (stored, messages)
    )
    if plain != theirs:
        raise RuntimeError(f"the session has {plain}, the client {theirs}")


def _calls(message: Fields) -> list[tuple[Any, ...]]:
    calls = message.get("tool_calls") or ()
    return [(call["id"], call["function"]["name"], call["function"]["arguments"]) for call in calls]


def show_turns(artifact: Path, folder: Path) -> None:
    """Print what each request cost. Raises if a kill, or the stream, made a difference."""
    with DaemonProcess(artifact, folder / "killed") as daemon:
        model = daemon.get("/v1/models")[1]["data"][0]["id"]
        answers, messages = turns(Client(daemon, model, streams=True), killed=True)
        check_stored(daemon, answers[0].usage["ssmd"]["session"], messages)
    with DaemonProcess(artifact, folder / "whole") as daemon:
        control, _ = turns(Client(daemon, model, streams=False), killed=False)
    print("| request | prompt_tokens | cached_tokens | fed | of these new | completion_tokens | resume |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    names = ("a question, a named call", "its result", "a question, a required call", "its result")
    before = 0
    for name, answer in zip(names, answers, strict=True):
        new = answer.prompt - before
        before = answer.prompt + answer.usage["completion_tokens"]
        cells = (answer.prompt, answer.cached, answer.prompt - answer.cached, new, answer.usage["completion_tokens"])
        print(f"| {name} | {' | '.join(map(str, cells))} | {answer.usage['ssmd']['resume']} |")
    for earlier, later in pairwise(answers):
        if later.cached < earlier.prompt:
            raise RuntimeError(f"{later.cached} tokens cached, {earlier.prompt} were there before the last answer")
    if [a.said for a in answers] != [a.said for a in control]:
        raise RuntimeError(f"{[a.said for a in answers]} is not {[a.said for a in control]}")
    print("\nStreamed after kills, and not streamed without one: the same answers. The session has every message.")


def show_otherwise(artifact: Path, folder: Path) -> None:
    """Print what the result of a call costs that the model wrote in its own way."""
    heads = ("a call", "prompt + completion", "prompt with its result", "cached, killed right after the call")
    print(f"\n| {' | '.join(heads)} | killed when idle |")
    print("| --- | --- | --- | --- | --- |")
    with DaemonProcess(artifact, folder / "otherwise") as daemon:
        client = Client(daemon, daemon.get("/v1/models")[1]["data"][0]["id"], streams=False)
        for name, pattern in OTHERWISE.items():
            cached = []
            for wait_s in (0.0, IDLE_S):
                system = {"role": "system", "content": f"{wait_s:.0f} {name}"}  # nothing in common with others
                asked = [system, {"role": "user", "content": "How is the weather in Bonn?"}]
                call = client.ask(asked, max_tokens=150, extra_body={"guided_regex": pattern})
                time.sleep(wait_s)
                daemon.kill()
                daemon.start()
                told = results(call, *["It rains."] * len(call.message["tool_calls"]))
                after = client.ask([*asked, *told], tool_choice="none", max_tokens=8)
                if after.cached < call.prompt - 1:
                    raise RuntimeError(f"{name}: {after.cached} cached of a prompt of {call.prompt}")
                cached.append(after.cached)
            cost = f"{call.prompt} + {call.usage['completion_tokens']} | {after.prompt}"
            print(f"| {name} | {cost} | {cached[0]} | {cached[1]} |", flush=True)


def show_schema(artifact: Path, folder: Path, count: int) -> None:
    """Print how many answers at temperature 1 are valid. Raises if one is not."""
    validator = Draft202012Validator(PLACES)
    asked = {"type": "json_schema", "json_schema": {"name": "place", "schema": PLACES, "strict": True}}
    with DaemonProcess(artifact, folder / "schema") as daemon:
        model = daemon.get("/v1/models")[1]["data"][0]["id"]
        bodies: list[Fields] = [
            {
                "messages": [{"role": "user", "content": f"Tell me of a city in {COUNTRIES[i % len(COUNTRIES)]}."}],
                "model": model,
                "response_format": asked,
                "temperature": 1,
                "seed": i,
                "max_tokens": 400,
            }
            for i in range(count)
        ]
        parts = [bodies[i : i + 10] for i in range(0, count, 10)]
        url = f"http://127.0.0.1:{daemon.port}"
        found = [one for part in parts for one in openai("said", url, [{"key": "none", "body": b} for b in part])]
    texts = [one["choices"][0]["message"]["content"] for one in found]
    ends = Counter(one["choices"][0]["finish_reason"] for one in found)
    wrong = [text for text in texts if not _valid(validator, text)]
    tokens = sum(one["usage"]["completion_tokens"] for one in found)
    print(f"\nA strict schema at temperature 1: {count - len(wrong)} of {count} valid, {len(set(texts))} of them")
    print(f"different, {tokens / count:.0f} tokens each; ended with {dict(ends)}. The first: {texts[0]}")
    if wrong:
        raise RuntimeError(f"not valid: {wrong}")


def _valid(validator: Any, text: str) -> bool:
    try:
        return bool(validator.is_valid(json.loads(text)))
    except ValueError:
        return False


def main(models: Sequence[str], answers: int = ANSWERS) -> None:
    print(f"# tool_turns: {conditions()}")
    for i, name in enumerate(models):
        artifact = Path(name) if Path(name).exists() else resolve(name, Settings().models_dir, "litert")
        with tempfile.TemporaryDirectory() as at:
            print(f"\n{artifact.parent.name}, {artifact.name}\n", flush=True)
            show_turns(artifact, Path(at))
            show_otherwise(artifact, Path(at))
            if i == 0:
                show_schema(artifact, Path(at), answers)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=["smollm2", "granite-4.0-h-350m"])
    parser.add_argument("--answers", type=int, default=ANSWERS, help="how many a schema is asked for")
    given = parser.parse_args()
    main(given.models, given.answers)
