"""The gain of drafts by prompt lookup: the steps that they would save, counted on answers generated without them.

    benchmarks/speculation.py ARTIFACT [OTHER…]     folders; of others, built with other --buckets, prices alone

prompt_lookup.py says what is drafted and accepted, speculation.txt has the prompts. Price: a prefill of as many rows in
decode steps, by the least processor time of the process, 1 thread, in turn; its logits are of its last token alone. The
earlier prices come from another graph and 2 threads. Gain: an answer's decode steps by the price of its steps; 1 is
plain decode. Logits of verify steps are compared with those of decode: rms in standard deviations of the latter.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
from daemon_process import conditions
from decode import Took
from prompt_lookup import Prices, Step, price, steps

from ssmd.engine.sampling.params import SamplingParams
from ssmd.engine.sampling.sampler import Sampler
from ssmd.model.artifact import Artifact
from ssmd.runtime import buckets
from ssmd.runtime.protocol import Handle, Logits, Program, get_runtime
from ssmd.text.apart import opened
from ssmd.text.messages import Message

PROMPTS = Path(__file__).with_name("speculation.txt")
DRAWS = {0.0: 1, 0.7: 3}  # answers to a prompt by temperature
TOKENS = 256  # of an answer at most
DRAFTS, MATCHES = range(1, 8), (1, 2, 3)  # tokens that a draft has at most, and a match at least
BRAKED = (3, 7)  # those with a brake
DEPTH, ROUNDS = 200, 100  # tokens before the steps that are timed, and how often
EARLIER: Prices = {4: 1.04, 8: 1.36}
Compared = tuple[int, int, int, float]
HEAD = ("texts", "at", "match", "draft", "steps with a draft", "of no use", "accepted", "tokens a step")


@dataclass(frozen=True)
class Answer:
    kind: str
    temperature: float
    prompt: list[int]
    tokens: list[int] = field(default_factory=list)  # the stop token among them

    @property
    def loops(self) -> bool:
        """True if its last 32 or more tokens repeat those before them."""
        lengths = ((max(n, 32), n) for n in range(1, len(self.tokens)))
        return any(self.tokens[-m:] == self.tokens[-m - n : -n] for m, n in lengths if m + n <= len(self.tokens))


def read(program: Program, ids: Sequence[int]) -> tuple[Handle, Logits]:
    """A handle that was fed the ids, and the logits after them."""
    handle, at = program.new_state(), 0
    for n in buckets.plan(len(ids), program.buckets):
        logits = program.prefill(handle, ids[at : at + n])
        at += n
    return handle, logits


def generate(program: Program, answer: Answer, sampler: Sampler, stops: Sequence[int], most: int) -> list[Logits]:
    """Add an answer's tokens; the logits that each was drawn from."""
    handle, logits = read(program, answer.prompt)
    rows = [logits]
    answer.tokens.append(sampler.sample(logits).token)
    while answer.tokens[-1] not in stops and len(answer.tokens) < most:
        rows.append(program.decode([handle], answer.tokens[-1:])[0])
        answer.tokens.append(sampler.sample(rows[-1]).token)
    program.release(handle)
    return rows


def verify(program: Program, answer: Answer) -> Iterator[Logits]:
    """Yield the same logits from the third on, as steps of 2 to 4 rows give them on a state that steps of 3 made."""
    handle, fed = read(program, answer.prompt)[0], 0
    for i in range(2, len(answer.tokens)):
        if i - fed > 4:
            program.prefill(handle, answer.tokens[fed : fed + 3])
            fed += 3
        twin = program.clone(handle)
        yield program.prefill(twin, answer.tokens[fed:i])
        program.release(twin)
    program.release(handle)


def compared(decoded: Sequence[Logits], verified: Iterator[Logits]) -> Compared:
    """Logits; those that are equal bit for bit; other favourites; the largest rms difference."""
    pairs = list(zip(decoded, verified, strict=True))
    others = sum(int(a.argmax() != b.argmax()) for a, b in pairs)
    rms = max((float(np.std(a - b) / np.std(a)) for a, b in pairs), default=0.0)
    return len(pairs), sum(np.array_equal(a, b) for a, b in pairs), others, rms


def measured(programs: Sequence[Program]) -> list[dict[int, float]]:
    """Times of steps by their rows, ms: 1, and the prefill lengths of each program up to the one for all drafts."""
    took = [defaultdict[int, Took](Took) for _ in programs]
    ids = [7 * i % programs[0].vocabulary for i in range(DEPTH + 256)]
    handles = [read(program, ids[:DEPTH])[0] for program in programs]
    for _, (program, handle, of) in product(range(ROUNDS), list(zip(programs, handles, took, strict=True))):
        enough = min(b for b in program.buckets if b > DRAFTS[-1])
        for rows in (1, *(b for b in program.buckets if b <= enough)):
            twin, fed = program.clone(handle), ids[DEPTH : DEPTH + rows]
            of[rows].round([partial(program.decode, [twin], fed) if rows == 1 else partial(program.prefill, twin, fed)])
            program.release(twin)
    return [{rows: t.ms(1) for rows, t in of.items()} for of in took]


def table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    print(f"\n{title}\n\n| {' | '.join(head)} |\n|{' --- |' * len(head)}")
    for row in rows:
        print(f"| {' | '.join(row)} |", flush=True)


def gains(
    title: str, answers: Sequence[Answer], drafts: Sequence[int], sides: Mapping[str, Prices], brake: Prices | None
) -> None:
    """Print what is gained, in parentheses by the answer that gains least."""
    rows = []
    for kind, at in dict.fromkeys((a.kind, a.temperature) for a in answers):
        own = [a for a in answers if (a.kind, a.temperature) == (kind, at)]
        tokens = [len(a.tokens) - 1 for a in own]
        for shortest, most in product(MATCHES, drafts):
            each = [steps(a.prompt, a.tokens, shortest, most, brake) for a in own]
            taken = sum(each, list[Step]())
            right = [step.accepted for step in taken if step.rows > 1]
            useless, accepted = (n / max(1, len(right)) for n in (right.count(0), sum(right)))
            row = (kind, f"{at}", f"{shortest}", f"{most}", f"{len(right) / len(taken):.0%}", f"{useless:.0%}")
            found = [
                f"{sum(tokens) / price(taken, prices):.2f} "
                f"({min(n / price(one, prices) for n, one in zip(tokens, each, strict=True)):.2f})"
                for prices in sides.values()
            ]
            rows.append((*row, f"{accepted:.2f}", f"{sum(tokens) / len(taken):.2f}", *found))
    table(title, (*HEAD, *(f"gain, {name}" for name in sides)), rows)


def answered(artifact: Artifact, program: Program, most: int, prompts: int | None) -> Iterator[tuple[Answer, Compared]]:
    """Answers to the first `prompts` of each kind, and their logits beside those of verify steps."""
    texts = opened(artifact, apart=False)
    for part in re.split(r"^=== ", PROMPTS.read_text("utf-8"), flags=re.MULTILINE)[1:]:
        kind, _, asked = part.partition("\n")
        for number, prompt in enumerate(asked.strip().split("\n---\n")[:prompts]):
            shown = [Message("user", texts.tokenizer.escape(prompt))]
            ids = texts.tokenizer.encode(texts.template.render(shown, now=datetime.now(UTC)))
            for at, draw in ((t, i) for t, n in DRAWS.items() for i in range(n)):
                answer = Answer(kind, at, ids)
                sampler = Sampler(SamplingParams(temperature=at, seed=number), index=draw)
                rows = generate(program, answer, sampler, artifact.manifest.stop_tokens, most)
                yield answer, compared(rows[2:], verify(program, answer))


def main(folders: Sequence[Path], most: int = TOKENS, prompts: int | None = None) -> None:
    print(conditions())
    artifacts = [Artifact.open(folder) for folder in folders]
    programs = [get_runtime(a.manifest.runtime).load(a, threads=1) for a in artifacts]
    found = list(answered(artifacts[0], programs[0], most, prompts))
    sides, rows = dict[str, Prices](), list[tuple[str, ...]]()
    for i, (artifact, ms) in enumerate(zip(artifacts, measured(programs), strict=True), 1):
        m = artifact.manifest
        print(f"{i}: {m.name} {m.build[:12]}, {m.runtime} {m.quantization}, prefill lengths {m.buckets}")
        sides[f"{i}"] = {n: t / ms[1] for n, t in ms.items() if n > 1}
        rows += [(f"{i}", f"{n}", f"{t:.2f}", f"{t / ms[1]:.2f}", f"{1 - ms[1] / t:.0%}") for n, t in ms.items()]
    rows += [("earlier", f"{n}", "", f"{of:.2f}", f"{1 - 1 / of:.0%}") for n, of in EARLIER.items()]
    table(f"a step after {DEPTH} tokens", ("artifact", "rows", "ms", "price", "slower by, if of no use"), rows)
    rows = []
    for at in DRAWS:
        n, equal, others, rms = zip(*(c for a, c in found if a.temperature == at), strict=True)
        loops = sum(a.loops for a, _ in found if a.temperature == at)
        shares = (f"{sum(part) / max(1, sum(n)):.2%}" for part in (equal, others))
        rows.append(
            (f"{at}", f"{len(n)}", f"{loops}", f"{sum(n):,}", *shares, f"{np.count_nonzero(others)}", f"{max(rms):.3f}")
        )
    head = ("at", "answers", "that loop", "logits", "equal", "other favourite", "answers with one", "largest rms")
    table("logits of verify steps", head, rows)
    answers = [a for a, _ in found if len(a.tokens) > 1]
    first, straight, sides["earlier"] = sides["1"], [a for a in answers if not a.loops], EARLIER
    gains("all answers", answers, DRAFTS, sides, None)
    gains("those that do not end in a loop", straight, DRAFTS, sides, None)
    gains("all, with a brake by the prices of 1", answers, BRAKED, {"1": first}, first)
    print(conditions())


if __name__ == "__main__":
    main([Path(folder) for folder in sys.argv[1:]])
