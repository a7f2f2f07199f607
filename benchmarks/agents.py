"""Coding agents' conversations, made by rules from recorded shapes: the tokens that each request reads, and its writes.

    benchmarks/agents.py MODEL [--agents claude,opencode,pi,codex] [--scale 0.1] [--store-false]
                               [--llama BINARY GGUF] [--killed]
    benchmarks/agents.py MODEL --day 30 --quota 200MB [--agents …] [--scale 0.1] [--pause 0]

MODEL: the name or folder of an artifact, whose context must hold the longest prompt: 25,000 tokens at scale 1. A shape
(tests/data/agents) has lengths in tokens of the artifact's tokenizer, and the places that change; its text is made of
words without meaning. The client is real HTTP, streams, and repeats what the model answered. A step's call is forced,
so that every model makes it. Each agent has a daemon with an empty data directory. Then the first two agents take turns
at one daemon. Rows have medians. *read*: prompt tokens that were fed before the answer. *new*: those of them that no
server could spare, as no earlier prompt or answer of the data directory begins with the tokens up to there. *read/new*
is by sums: 1.00 is the least. *TTFT* is by the client's clock; after a start, a kill and an unload it has the model's
load in it. *CPU* and *written* (blocks, /proc/PID/io) include the daemon's work up to the next request. *on disk*:
growth of the data directory. BINARY: llama-server, or a Python that has the wheel xllamacpp; with --llama it runs the
same trace, and *llama read* is what it read. Its prompts may be shorter, so *read to its* compares the tokens read for
a token of a prompt, and *re-read to its* those of them that are not new. *warm* leaves out requests after a kill and an
unload. With --killed there are two requests: a first turn and, after SIGKILL and a start, the next one. That takes a
tenth of the time, for large models.

With --day so many conversations follow one another at one daemon, each of an agent by chance, in a session, a folder
and at an edit of its own; after each of them an older one goes on. Below the table stand the states that went for lack
of room, by if a request had ever gone on from them, and what `ssmd session check` says.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import sqlite3
import statistics
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from daemon_process import DaemonProcess, Reply, ServerProcess, conditions
from llama_server import LlamaServer
from tokenizers import Tokenizer

from ssmd.config import Settings
from ssmd.installed import resolve
from ssmd.sessions.fsck.repair import check
from ssmd.sessions.rows.database import FILE

Fields = dict[str, Any]

SHAPES = Path(__file__).parents[1] / "tests" / "data" / "agents"
AGENTS = ("claude", "claude-interactive", "opencode", "pi", "codex")
PAUSE_S = 1.0  # between requests, as while an agent runs a tool: the daemon then does what it does when idle
STEPS = 3  # calls of a turn
IN_TURN = 3  # turns of each of two agents
ANSWER_TOKENS = 12
LEAST_TOOL = 60  # tokens of a tool's definition; smaller ones are joined where a scale would make them so
CALL = {"type": "function", "function": {"name": "shell", "arguments": '{"command": "ls"}'}}
COLD = ("after kill -9", "after an unload")
LEAST_CHANGE = 4  # tokens of a part that changes
DICTIONARY = (  # the words of all texts
    "the a of to and in is it for on with as this that be are use when only file files path line lines command result "
    "search read write edit list name type value text never always must should if not no one all before after above "
    "below code test run call output input error user answer question task project folder change keep short long plain"
)


class Words:
    """Text of a given number of tokens, the same for the same key."""

    def __init__(self, tokenizer: Path) -> None:
        self._tokenizer: Any = Tokenizer.from_file(str(tokenizer))
        self._dictionary = DICTIONARY.split()

    def ids(self, text: str) -> list[int]:
        found: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return found

    def count(self, text: str) -> int:
        return len(self.ids(text))

    def text(self, tokens: int, key: str, *, changes: bool = False) -> str:
        """Return a text. changes: it differs from that of any other key in its first tokens."""
        drawn = random.Random(key)
        words = [f"{drawn.getrandbits(64):016x}"] if changes else []
        while True:
            words += drawn.choices(self._dictionary, k=tokens)
            text = " ".join(words)
            encoded = self._tokenizer.encode(text, add_special_tokens=False)
            if len(encoded.ids) >= tokens:
                return text[: encoded.offsets[tokens - 1][1]]


def shape_of(name: str) -> Fields:
    """Return a shape as its file has it, with what it takes from another one."""
    found: Fields = json.loads((SHAPES / f"{name}.json").read_text())
    return {**shape_of(found["like"]), **found} if "like" in found else found


class Agent:
    """Makes the messages and tools of one agent. scale: factor of all lengths."""

    def __init__(self, name: str, words: Words, scale: float) -> None:
        self.name, self.shape = name, shape_of(name)
        self._words, self._scale = words, scale
        self.tools = self._tools(self.shape["tools"], self.shape["shell"])

    def text(self, tokens: int, key: str, *, changes: bool = False) -> str:
        least = LEAST_CHANGE if changes else 1
        return self._words.text(max(least, round(tokens * self._scale)), f"{self.name} {key}", changes=changes)

    def opening(self, shape: Sequence[Fields], state: Fields) -> tuple[list[Fields], list[str]]:
        """Return the messages before the user's words, and the parts of text that stand in one message with these.

        state: what each kind of change depends on.
        """
        made, joined = [], []
        for place, message in enumerate(shape):
            headed = place == 0 and self.shape["header"] and shape is self.shape["opening"]
            parts = [self._header(state)] if headed else []
            for i, part in enumerate(message["parts"]):
                kind = part["changes"]
                key = f"{message['role']} {place} {i} {state.get(kind, '')} {part['tokens']}"
                parts.append(self.text(part["tokens"], key, changes=kind != "never"))
            if message.get("joins"):
                joined = parts
            else:
                made.append({"role": message["role"], "content": [_part(text) for text in parts]})
        return made, joined

    def _header(self, state: Fields) -> str:
        """Return Claude Code's billing header, as interactive sessions and others have it."""
        version = f"2.1.197.{random.Random(state['session']).getrandbits(12):03x}"
        if self.shape["header"] == "session":
            return f"x-anthropic-billing-header: cc_version={version}; cc_entrypoint=sdk-cli;"
        nonce = f"{random.Random(state['request']).getrandbits(20):05x}"
        return f"x-anthropic-billing-header: cc_version={version}; cc_entrypoint=cli; cch={nonce};"

    def _tools(self, lengths: Sequence[int], shell: int) -> list[Fields]:
        """Return tools, the one that is called first in the list's place `shell`."""
        total = sum(lengths) * self._scale
        count = max(1, min(len(lengths), round(total / LEAST_TOOL)))
        if count < len(lengths):
            lengths, shell = [round(total / count / self._scale)] * count, 0
        return [self._tool("shell" if i == shell else f"tool{i}", tokens) for i, tokens in enumerate(lengths)]

    def _tool(self, name: str, tokens: int) -> Fields:
        parameters = {
            "type": "object",
            "properties": {"command": {"type": "string", "enum": ["ls"]}},
            "required": ["command"],
            "additionalProperties": False,
        }
        function: Fields = {"name": name, "description": "", "parameters": parameters}
        made = {"type": "function", "function": function}
        rest = round(tokens * self._scale) - self._words.count(json.dumps(made))
        function["description"] = self._words.text(max(1, rest), f"{self.name} {name}")
        return made

    def some_tools(self, chosen: Sequence[int]) -> list[Fields]:
        """Return a sub-agent's tools, by their places at scale 1; the one that is called is always among them."""
        return [one for i, one in enumerate(self.tools) if i in chosen or one["function"]["name"] == "shell"]


class Conversation:
    """One conversation of an agent, as its client keeps it."""

    def __init__(self, agent: Agent, state: Fields, *, part: str | None = None) -> None:
        """state: as of Agent.opening. part: "title" or "subagent" for such a one of the agent's shape."""
        self.agent, self.state = agent, state
        shape = agent.shape[part] if part else agent.shape
        self._shape = shape["opening"]
        self.tools = [] if part == "title" else agent.some_tools(shape["tools"]) if part else agent.tools
        self._later: list[Fields] = []

    def body(self, request: int) -> Fields:
        """Return the request that goes on from here. request: its number in the trace."""
        opening, joined = self.agent.opening(self._shape, {**self.state, "request": request})
        first, *others = self._later
        if joined:
            first = {"role": "user", "content": [*map(_part, joined), _part(first["content"])]}
        body: Fields = {"messages": [*opening, first, *others]}
        return {**body, "tools": self.tools} if self.tools else body

    def say(self, tokens: int, key: str) -> None:
        """Add a message of the user."""
        self._later.append({"role": "user", "content": self.agent.text(tokens, f"says {self.state['session']} {key}")})

    def hear(self, reply: Reply) -> None:
        """Add the model's answer, and for each of its calls a result, which may be long."""
        answer: Fields = {"role": "assistant", "content": reply.text or None if reply.calls else reply.text}
        self._later.append({**answer, "tool_calls": reply.calls} if reply.calls else answer)
        sizes = self.agent.shape["results"]
        for call in reply.calls:
            count = sum(message["role"] == "tool" for message in self._later)
            text = self.agent.text(sizes[count % len(sizes)], f"result {self.state['session']} {count}")
            self._later.append({"role": "tool", "tool_call_id": call["id"], "content": text})

    def compact(self, summary: str) -> None:
        """Begin anew, with a summary in place of all messages."""
        self._later = [{"role": "user", "content": summary}]


@dataclass(frozen=True)
class Row:
    """A request and its cost. cpu_ms, written and on_disk (bytes) are up to the next request."""

    agent: str
    kind: str
    prompt: int
    cached: int
    resume: str
    ttft_ms: float
    new: int = 0  # tokens of the prompt that no earlier one has in this order
    cpu_ms: float = 0.0
    written: int = 0
    on_disk: int = 0


@dataclass
class Client:
    """The client of a trace at one server. named: the server takes `tool_choice` with a tool's name."""

    server: ServerProcess
    model: str
    data: Path
    store: bool | None  # None: as the shape has it
    pause_s: float
    named: bool = True
    rows: list[Row] = field(default_factory=list)
    sent: list[tuple[Fields, int]] = field(default_factory=list)  # of each row: the body, and tokens of the answer

    def ask(self, kind: str, talk: Conversation, *, calls: bool = False, beside: Conversation | None = None) -> Reply:
        """Send a conversation, and add the answer to it. calls: force a call. beside: one that is sent meanwhile."""
        before = self._counters()
        title: list[Reply] = []
        thread = threading.Thread(target=lambda: title.append(self._send(beside, False)) if beside else None)
        thread.start()
        body = talk.body(len(self.rows))
        reply = self._send(talk, calls)
        thread.join()
        unfed = calls and self.named  # text that ssmd's grammar forces is fed with the next prompt
        if calls and not reply.calls:  # another server's grammar lets random weights run out of tokens before the call
            reply, unfed = replace(reply, calls=[{**CALL, "id": f"call_{len(self.rows)}"}]), True
        talk.hear(reply)
        time.sleep(self.pause_s)
        cpu_ms, written, on_disk = (now - then for now, then in zip(self._counters(), before, strict=True))
        beside_it = None if beside is None else beside.body(len(self.rows))
        costs = {"cpu_ms": cpu_ms, "written": int(written), "on_disk": int(on_disk)}
        self._note(kind, talk, body, reply, unfed=unfed, **costs)
        for other in title:
            assert beside_it is not None
            self._note("title, beside the first", talk, beside_it, other)
        if beside is not None and not title:
            raise RuntimeError("the request for a title failed: the thread's error stands above")
        return reply

    def _send(self, talk: Conversation, calls: bool) -> Reply:
        body = talk.body(len(self.rows))
        if calls:
            body["tool_choice"] = {"type": "function", "function": {"name": "shell"}} if self.named else "required"
        store = talk.agent.shape["store"] if self.store is None else self.store
        tokens = 100 if calls else ANSWER_TOKENS
        return self.server.chat(body.pop("messages"), model=self.model, max_tokens=tokens, store=store, **body)

    def _note(
        self, kind: str, talk: Conversation, body: Fields, reply: Reply, *, unfed: bool = False, **costs: Any
    ) -> None:
        """Add a row. unfed: the next prompt has another answer, or one that was not fed."""
        usage = reply.usage
        cached = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0))
        resume = usage.get("ssmd", {}).get("resume", "")
        row = Row(talk.agent.name, kind, int(usage["prompt_tokens"]), cached, resume, reply.ttft_ms, **costs)
        self.rows.append(row)
        self.sent.append((body, 0 if unfed else int(usage["completion_tokens"])))

    def with_new(self, words: Words) -> list[Row]:
        """Return the rows with `new`, by the server's template. After the trace, as it takes the server's time."""
        known: list[tuple[list[int], int]] = []
        found = []
        for row, (body, answer) in zip(self.rows, self.sent, strict=True):
            ids = words.ids(self.server.post("/apply-template", {"model": self.model, **body})["prompt"])
            new = len(ids) - max((_common(ids, *one) for one in known), default=0)
            found.append(replace(row, new=min(new, row.prompt - row.cached)))  # what one server spares can be spared
            known.append((ids, answer))
        return found

    def _counters(self) -> tuple[float, int, int]:
        """Return the server's CPU time in ms, bytes written, and bytes of the files in the data directory."""
        assert self.server.process is not None
        proc = Path(f"/proc/{self.server.process.pid}")
        times = (proc / "stat").read_text().rpartition(")")[2].split()[11:13]
        io = dict(line.split(": ") for line in (proc / "io").read_text().splitlines())
        files = 0
        for folder, _, names in os.walk(self.data):
            files += sum(_size(Path(folder, name)) for name in names)
        return sum(map(int, times)) * 1e3 / os.sysconf("SC_CLK_TCK"), int(io["write_bytes"]), files

    def restart(self) -> None:
        self.server.kill()
        self.server.start()

    def unload(self) -> None:
        """Have the daemon let the model go."""
        while self.server.post(f"/ssmd/v1/models/{self.model}/unload", {})["state"] != "unloaded":
            time.sleep(0.02)


def steps(client: Client, talk: Conversation, kind: str, count: int, beside: Conversation | None = None) -> None:
    """Send the user's last words, and the results of `count` calls one after the other. kind: of the first request."""
    client.ask(kind, talk, calls=count > 0, beside=beside)
    for i in range(count):
        client.ask("step", talk, calls=i + 1 < count)


def trace(client: Client, agent: Agent, *, unloads: bool = True) -> None:
    """Send the trace of one agent. unloads: the server can let its model go."""
    words, here = agent.shape["words"], {"session": "A", "edit": 0, "directory": 0, "day": 0}
    talk = Conversation(agent, here)

    def turn(kind: str, of: Conversation, number: int, count: int = 1) -> None:
        of.say(words[number % len(words)], str(number))
        steps(client, of, kind, count)

    title = Conversation(agent, here, part="title") if agent.shape["title"] else None
    if title is not None:
        title.say(agent.shape["title"]["words"], "title")
    talk.say(words[0], "0")
    steps(client, talk, "first", STEPS, beside=title)
    turn("next turn", talk, 1, STEPS)
    if agent.shape["subagent"]:
        sub = Conversation(agent, {**here, "session": "sub-agent"}, part="subagent")
        sub.say(agent.shape["subagent"]["words"], "task")
        steps(client, sub, "sub-agent", 1)
        turn("next turn", talk, 2)
    client.restart()
    turn("after kill -9", talk, 3)
    if unloads:
        client.unload()
        turn("after an unload", talk, 4)
    turn("new session", Conversation(agent, {**here, "session": "B"}), 0)
    if any(part["changes"] == "edit" for message in agent.shape["opening"] for part in message["parts"]):
        turn("new session, file edited", Conversation(agent, {**here, "session": "C", "edit": 1}), 0)
    turn("new session, elsewhere", Conversation(agent, {"session": "D", "edit": 2, "directory": 1, "day": 1}), 0)
    turn("new session, elsewhere", Conversation(agent, {"session": "E", "edit": 3, "directory": 2, "day": 1}), 0)
    turn("old session", talk, 5)
    compaction = agent.shape["compaction"]
    talk.say(compaction["request"], "summarise")
    client.ask("summary of all", talk)
    talk.compact(agent.text(compaction["summary"], "summary"))
    steps(client, talk, "after compaction", 1)


def killed(client: Client, agent: Agent) -> None:
    """Send two turns of one conversation, with SIGKILL and a start between them."""
    talk = Conversation(agent, {"session": "A", "edit": 0, "directory": 0, "day": 0})
    for number, kind in enumerate(("first", "after kill -9")):
        if number:
            client.restart()
        talk.say(agent.shape["words"][number], str(number))
        steps(client, talk, kind, 0)
        print(f"{agent.name}, {kind}: resume {client.rows[-1].resume}", flush=True)


def in_turn(client: Client, agents: Sequence[Agent]) -> None:
    """Two agents, or more, take turns at one server."""
    talks = [Conversation(agent, {"session": "A", "edit": 0, "directory": 0, "day": 0}) for agent in agents]
    for number in range(IN_TURN):
        for talk in talks:
            words = talk.agent.shape["words"]
            talk.say(words[number % len(words)], str(number))
            steps(client, talk, "in turn, first" if number == 0 else "in turn", 1)


def day(client: Client, agents: Sequence[Agent], count: int) -> States:
    """Hold a day's conversations. Returns the states that it left."""
    drawn, talks, states = random.Random("day"), list[Conversation](), States(client.data)
    for number in range(count):
        agent = drawn.choice(agents)
        words = agent.shape["words"]
        place = {"edit": drawn.randrange(3), "directory": drawn.randrange(2), "day": 0}
        talks.append(Conversation(agent, {"session": f"day {number}", **place}))
        for kind, talk in (("new conversation", talks[-1]), ("older conversation", drawn.choice(talks[-8:]))):
            talk.say(words[number % len(words)], f"{kind} {number}")
            steps(client, talk, kind, 1)
            states.look()
    return states


class States:
    """The states in a data directory, and those that went since earlier looks."""

    def __init__(self, data: Path) -> None:
        self._file = data / FILE
        self._used: dict[int, bool] = {}  # of each state that was seen: a request went on from it
        self._there: set[int] = set()

    def look(self) -> None:
        with contextlib.closing(sqlite3.connect(f"file:{self._file}?mode=ro", uri=True)) as database:
            found = dict(database.execute("SELECT id, last_used_at != created_at FROM checkpoint"))
        self._used |= {number: bool(used) for number, used in found.items()}
        self._there = set(found)

    def __str__(self) -> str:
        counts = Counter((used, number in self._there) for number, used in self._used.items())
        went, stayed = ([counts[used, there] for used in (False, True)] for there in (False, True))
        return (
            f"{len(self._used)} states were seen. Of those that no request went on from {went[0]} went and {stayed[0]} "
            f"stayed; of the others {went[1]} went and {stayed[1]} stayed"
        )


def measure_day(
    artifact: Path, words: Words, agents: Sequence[Agent], count: int, quota: str, pause_s: float
) -> list[Row]:
    """Hold a day's conversations at one daemon with a quota. Returns a row for each request, and prints the rest."""
    with tempfile.TemporaryDirectory() as at:
        data = Path(at) / "data"
        with DaemonProcess(artifact, data, "--quota", quota) as daemon:
            client = Client(daemon, daemon.get("/v1/models")[1]["data"][0]["id"], data, None, pause_s)
            states = day(client, agents, count)
            rows = client.with_new(words)
            stored = daemon.get("/ssmd/v1/metrics")[1]["sessions"]
        size = (data / FILE).stat().st_size
        print(f"{states}. The database has {size / 1e6:.1f} MB: {json.dumps(stored)}")
        print("; ".join(map(str, check(data).damages)) or "ssmd session check: all sound", end="\n\n")
    tokens, read = sum(row.prompt for row in rows), sum(row.prompt - row.cached for row in rows)
    written = sum(row.written for row in rows)
    print(
        f"{written / tokens:,.0f} bytes written for a token of a prompt, {written / read:,.0f} for one that was read\n"
    )
    return rows


def _part(text: str) -> Fields:
    return {"type": "text", "text": f"{text}\n"}


def _common(ids: Sequence[int], earlier: Sequence[int], answer: int) -> int:
    """Count the first tokens that a prompt shares with an earlier one and its answer, of which the last is not fed."""
    least = min(len(ids) - 1, len(earlier))
    same = next((i for i in range(least) if ids[i] != earlier[i]), least)
    return min(same + max(0, answer - 1), len(ids) - 1) if same == len(earlier) else same


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:  # removed since it was listed
        return 0


def show(rows: Sequence[Row], peer: Sequence[Row] | None = None) -> None:
    """Print a table with a row for each kind of request, and one for all of an agent. peer: of llama-server."""
    heads: tuple[str, ...] = ("agent", "request", "n", "prompt", "cached", "read", "new", "read/new")
    heads += ("TTFT ms", "CPU ms", "written kB", "on disk kB")
    heads += () if peer is None else ("llama prompt", "llama read", "its read/new", "read to its", "re-read to its")
    print(f"| {' | '.join(heads)} |\n{'| --- ' * len(heads)}|")
    kinds: dict[tuple[str, str], list[Row]] = defaultdict(list)
    others: dict[tuple[str, str], list[Row]] | None = None if peer is None else defaultdict(list)
    total, warm = "**all: sums; TTFT: median**", "**warm: sums; TTFT: median**"
    totals = (total,) if peer is None else (warm, total)
    for grouped, made in ((kinds, rows), (others, peer)):
        for row in made or ():
            for kind in (row.kind, *(one for one in totals if one == total or row.kind not in COLD)):
                if grouped is not None:
                    grouped[row.agent, kind].append(row)
    for agent in dict.fromkeys(row.agent for row in rows):
        listed = [kind for of, kind in kinds if of == agent and kind not in totals]
        for kind in (*listed, *totals):
            of = sum if kind in totals else statistics.median
            _line(agent, kind, kinds[agent, kind], of, None if others is None else others[agent, kind])


def _line(
    agent: str,
    kind: str,
    rows: Sequence[Row],
    of: Callable[[Sequence[float]], float],
    peer: Sequence[Row] | None = None,
) -> None:
    def cell(values: Sequence[float], scale: float = 1.0) -> str:
        return f"{of(values) / scale:,.0f}"

    counts = [cell([getattr(row, name) for row in rows]) for name in ("prompt", "cached")]
    reads, new = [row.prompt - row.cached for row in rows], [row.new for row in rows]
    read = (cell(reads), cell(new), f"{sum(reads) / max(1, sum(new)):.2f}")
    ttft = f"{statistics.median(row.ttft_ms for row in rows):,.0f}"
    costs: tuple[str, ...] = (
        cell([row.cpu_ms for row in rows]),
        cell([row.written for row in rows], 1e3),
        cell([row.on_disk for row in rows], 1e3),
    )
    if peer is not None:
        its_reads, its_new = [row.prompt - row.cached for row in peer], [row.new for row in peer]
        its = cell([row.prompt for row in peer]) if peer else ""
        costs += (its, cell(its_reads) if peer else "", f"{sum(its_reads) / max(1, sum(its_new)):.2f}" if peer else "")
        costs += (_ratio(_share(rows), _share(peer)), _ratio(_share(rows, again=True), _share(peer, again=True)))
    print(f"| {' | '.join((agent, kind, str(len(rows)), *counts, *read, ttft, *costs))} |", flush=True)


def _share(rows: Sequence[Row], *, again: bool = False) -> float:
    """Return the tokens read for a token of a prompt; again: of those that are not new."""
    read = sum(row.prompt - row.cached - (row.new if again else 0) for row in rows)
    return read / max(1, sum(row.prompt for row in rows))


def _ratio(ours: float, its: float) -> str:
    return f"{ours / its:.2f}" if its else ""


def measure(
    artifact: Path,
    words: Words,
    agents: Sequence[Agent],
    store: bool | None,
    pause_s: float = PAUSE_S,
    run: Callable[[Client, Agent], None] = trace,
) -> list[Row]:
    """Run the traces with daemons of one artifact. Returns a row for each request. run: sends an agent's requests."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as at:
        for group in [[agent] for agent in agents] + ([list(agents[:2])] if len(agents) > 1 else []):
            data = Path(at) / "+".join(agent.name for agent in group)
            with DaemonProcess(artifact, data) as daemon:
                client = Client(daemon, daemon.get("/v1/models")[1]["data"][0]["id"], data, store, pause_s)
                if len(group) == 1:
                    run(client, group[0])
                else:
                    in_turn(client, group)
                rows += client.with_new(words)
    return rows


def measure_llama(
    binary: Path, gguf: Path, words: Words, agents: Sequence[Agent], context: int, threads: int, pause_s: float
) -> list[Row]:
    """The same with llama-server, which keeps nothing over a kill and cannot unload its model."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as at:
        for group in [[agent] for agent in agents] + ([list(agents[:2])] if len(agents) > 1 else []):
            folder = Path(at) / "+".join(agent.name for agent in group)
            with LlamaServer(binary, gguf, folder, context=context, threads=threads) as server:
                if not rows:
                    print(f"llama-server: {server.producer()}; its defaults for prompt cache and checkpoints\n")
                client = Client(server, "gguf", folder, None, pause_s, named=False)
                if len(group) == 1:
                    trace(client, group[0], unloads=False)
                else:
                    in_turn(client, group)
                rows += client.with_new(words)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--agents", default=",".join(AGENTS), help="with commas between them")
    parser.add_argument("--scale", type=float, default=1.0, help="factor of all lengths")
    parser.add_argument("--pause", type=float, default=PAUSE_S, help="seconds between requests")
    parser.add_argument("--store-false", action="store_true", help="`store: false` in all requests")
    parser.add_argument("--killed", action="store_true", help="two turns, with SIGKILL between them; of one agent")
    parser.add_argument("--day", type=int, metavar="COUNT", help="conversations, in place of the traces")
    parser.add_argument("--quota", default="200MB", help="of the daemon with --day")
    parser.add_argument("--llama", nargs=2, type=Path, metavar=("BINARY", "GGUF"))
    parser.add_argument("--llama-context", type=int, default=32768, help="tokens")
    parser.add_argument("--llama-threads", type=int, default=os.cpu_count() or 1)
    asked = parser.parse_args()
    names = asked.agents.split(",")
    if unknown := [name for name in names if name not in AGENTS]:
        parser.error(f"there is no shape {unknown[0]!r}; there are {', '.join(AGENTS)}")
    if asked.killed and (len(names) > 1 or asked.llama):
        parser.error("--killed takes one agent, and no --llama")
    settings = Settings()
    artifact = resolve(asked.model, settings.models_dir, settings.runtime, settings.device)
    words = Words(artifact / "tokenizer.json")
    agents = [Agent(name, words, asked.scale) for name in names]
    form = "store: false" if asked.store_false else "store as each agent has it"
    print(f"# agents: {artifact.parent.name}, {artifact.name}, lengths × {asked.scale}, {form}; {conditions()}\n")
    if asked.day is not None:
        print(f"{asked.day} conversations, quota {asked.quota}")
        show(measure_day(artifact, words, agents, asked.day, asked.quota, asked.pause))
        return
    peer = None
    if asked.llama is not None:
        binary, gguf = asked.llama
        peer = measure_llama(binary, gguf, words, agents, asked.llama_context, asked.llama_threads, asked.pause)
    run = killed if asked.killed else trace
    show(measure(artifact, words, agents, False if asked.store_false else None, asked.pause, run), peer)


if __name__ == "__main__":
    main()
