"""The cost of a schema per token, and the gain where it leaves no choice: an engine's own steps, in turn in one run.

    benchmarks/structured.py [MODEL…]     artifacts' names or paths; default: smollm2 granite-4.0-h-350m

Time between tokens: an answer of some hundred tokens, free and held to a schema whose strings are the model's to say,
at the same place after the same prompt; and the ratio of the steps of each that other work disturbed least, a tenth of
them. Forced tokens: an answer to a schema of long names, as tools have it, with
what is forced fed at once and with every token drawn. Reading: the time until a grammar is ready, without a trial in
the child process, with one that starts the process, with one more, and when it comes again.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

from daemon_process import conditions

from ssmd.api.openai.fields import of_grammar, of_regex, of_schema
from ssmd.config import Settings
from ssmd.engine.engine import Engine
from ssmd.engine.metrics import Metrics
from ssmd.engine.request import Delta, Event, Failure, Finish, Request
from ssmd.engine.sampling import grammar
from ssmd.engine.sampling.grammar import Grammars
from ssmd.engine.sampling.kept import GrammarMemory
from ssmd.engine.sampling.params import SamplingParams
from ssmd.engine.sampling.trial import is_plain
from ssmd.engine.terms import Grammar
from ssmd.installed import resolve
from ssmd.model.artifact import Artifact
from ssmd.runtime.protocol import get_runtime
from ssmd.text.messages import Message

ROUNDS = 7
TOKENS = 120
QUESTION = Message("user", "Where is the ferry to the northern islands, and when does it leave today?")
STRINGS: dict[str, Any] = {"type": "array", "items": {"type": "string", "minLength": 400}, "minItems": 9}
NAMES = ("departure_time_of_the_ferry", "name_of_the_harbour_in_town", "number_of_passengers_on_board", "is_it_late")
TOOL: dict[str, Any] = {
    "type": "object",
    "properties": {
        "function_to_be_called_next": {"const": "look_up_the_timetable_of_the_ferry_company"},
        **{name: {"enum": [f"the_first_of_the_{name}", f"no_{name}_was_given"]} for name in NAMES},
    },
    "required": ["function_to_be_called_next", *NAMES],
    "additionalProperties": False,
}


CODE: dict[str, Any] = {"type": "string", "pattern": "^[A-Z]{2}[0-9]{4}$"}
GBNF = 'root ::= "[]" item ("," item)*\nitem ::= [0-9]+ | "\\"" [a-z]* "\\""\n'


def grammars(number: int) -> dict[str, Grammar]:
    """Return a grammar of each kind. No two numbers have an equal one."""
    wide = {f"property_{i}_{number}": CODE if i % 5 == 0 else {"type": "string"} for i in range(100)}
    parts = {f"part_{i}": {"type": "object", "properties": wide} for i in range(10)}
    return {
        "a plain schema": of_schema({**TOOL, "title": f"{number}"}, "json_schema"),
        "one with a pattern": of_schema({"properties": {f"code_{number}": CODE}}, "json_schema"),
        "of 1,000 properties": of_schema({"properties": parts}, "json_schema"),
        "a regular expression": of_regex(f"[a-f]{{2,8}}-{number}", "guided_regex"),
        "GBNF": of_grammar(GBNF.replace("]", f"{number}]", 1), "grammar"),
    }


def readings(engine: Engine, rounds: int) -> list[str]:
    """Return the rows of the table of reading."""
    shared, rows, number = engine._grammars, [], 0

    def ms(read: Grammars, kind: str, number: int, *, trial: bool = True) -> float:
        grammar = grammars(number)[kind]
        began = time.perf_counter()
        if trial:
            read.read(grammar)
        else:
            read._read(grammar, plain=True, memory=GrammarMemory(0))
        return (time.perf_counter() - began) * 1e3

    for kind in grammars(0):
        columns: list[list[float]] = [[], [], [], []]
        for _ in range(rounds):
            number += 3
            columns[0].append(ms(shared, kind, number, trial=False))
            fresh = Grammars(engine._texts.tokenizer, engine.artifact.manifest.stop_tokens, engine.program.vocabulary)
            for _ in fresh.warm_up():
                pass
            columns[1] += [ms(fresh, kind, number + 1)]
            columns[2] += [ms(fresh, kind, number + 2)]
            columns[3] += [ms(fresh, kind, number + 2)]
            fresh.close()
        plain = "yes" if is_plain(grammars(0)[kind]) else "no"
        rows.append(f"| {kind} | {plain} | " + " | ".join(f"{statistics.median(one):.1f}" for one in columns) + " |")
    return rows


def times_of(engine: Engine, schema: dict[str, Any] | None, seed: int) -> tuple[list[float], float]:
    """Return the ms at which each token was known, and the time of the whole answer after the first."""
    ended, error = threading.Event(), list[Failure]()

    def deliver(event: Event) -> None:
        if isinstance(event, Failure):
            error.append(event)
        if not isinstance(event, Delta):
            assert isinstance(event, Finish | Failure)
            ended.set()

    stops = {token: -100.0 for token in engine.artifact.manifest.stop_tokens}
    sampling = SamplingParams(temperature=0.7, top_p=0.95, seed=seed, logit_bias=stops)
    asked = None if schema is None else of_schema(schema, "response_format")
    request = Request((QUESTION,), sampling, TOKENS, store=False, grammar=asked)
    generation = engine.submit(request, deliver)
    ended.wait()
    if error:
        raise error[0].error
    times = [moment * 1e3 for moment in generation.progress.choices[0].times]
    return times, times[-1] - times[0]


def gaps_of(times: Sequence[float]) -> tuple[list[float], list[tuple[int, float]]]:
    """Return the times between drawn tokens, and (tokens, time) of each run of tokens that was fed at once."""
    drawn, runs, behind = [], [], 0
    for before, now in pairwise(times):
        if now == before:
            behind += 1
        elif behind:
            runs.append((behind + 1, now - before))
            behind = 0
        else:
            drawn.append(now - before)
    return drawn, runs


def measure(artifact: Artifact, rounds: int) -> tuple[str, str, list[str]]:
    """Return a row of each table, and the rows of the table of reading."""
    program = get_runtime(artifact.manifest.runtime).load(artifact)
    engine = Engine(artifact, program, None, metrics=Metrics().of(artifact.manifest.name))
    engine.start()
    free, bound, least, drawn, at_once, one_by_one = (list[float]() for _ in range(6))
    forced: list[tuple[int, float]] = []
    try:
        for schema in (None, STRINGS, TOOL):  # makes all that is made once
            times_of(engine, schema, 0)
        for i in range(rounds):
            without, with_ = (gaps_of(times_of(engine, schema, i)[0])[0] for schema in (None, STRINGS))
            free.append(statistics.median(without))
            bound.append(statistics.median(with_))
            least.append(statistics.quantiles(with_, n=10)[0] / statistics.quantiles(without, n=10)[0])
            times, whole = times_of(engine, TOOL, i)
            at_once.append(whole)
            forced += gaps_of(times)[1]
            with patch.object(grammar, "FORCED_LEAST", 1 << 30):
                times, whole = times_of(engine, TOOL, i)
            one_by_one.append(whole)
            drawn.append(statistics.median(gaps_of(times)[0]))
        third = readings(engine, rounds)
    finally:
        engine.shutdown()
        program.close()
    name = f"{artifact.manifest.name} {artifact.manifest.runtime}"
    a, b = statistics.median(free), statistics.median(bound)
    ratio = statistics.median(y / x for x, y in zip(free, bound, strict=True))
    undisturbed = statistics.median(least)
    first = f"| {name} | {program.vocabulary:,} | {a:.2f} | {b:.2f} | {ratio:.3f} | {undisturbed:.3f} |"
    count, took = sum(n for n, _ in forced), sum(ms for _, ms in forced)
    each, step = took / count, statistics.median(drawn)
    x, y = statistics.median(at_once), statistics.median(one_by_one)
    second = f"| {name} | {count / len(forced):.1f} | {each:.2f} | {step:.2f} | {step / each:.1f} | {x:.0f} | {y:.0f} |"
    return first, second, third


def main(names: Sequence[str], rounds: int = ROUNDS) -> None:
    settings = Settings()
    print(f"# structured: {conditions()}; medians of {rounds} rounds")
    rows = []
    for name in names:
        path = Path(name) if Path(name).exists() else resolve(name, settings.models_dir, "auto")
        rows.append(measure(Artifact.open(path), rounds))
    heads = ("model", "vocabulary", "TBT free, ms", "with a schema, ms", "ratio", "of the least tenths")
    print(f"| {' | '.join(heads)} |")
    print("| --- | --- | --- | --- | --- | --- |")
    print("\n".join(first for first, _, _ in rows))
    more = ("model", "tokens in a run", "ms each", "drawn, ms each", "times as fast", "whole answer, ms", "drawn, ms")
    print(f"\n| {' | '.join(more)} |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    print("\n".join(second for _, second, _ in rows))
    last = ("grammar", "plain", "without a trial, ms", "first, ms", "another, ms", "again, ms")
    for name, (_, _, third) in zip(names, rows, strict=True):
        print(f"\nReading for {name}:\n| {' | '.join(last)} |\n| --- | --- | --- | --- | --- | --- |")
        print("\n".join(third))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=["smollm2", "granite-4.0-h-350m"])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    said = parser.parse_args()
    main(said.models, said.rounds)
