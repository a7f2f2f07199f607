"""One of the n choices of a request while it decodes: from a row of logits to text that may be sent."""

from __future__ import annotations

import secrets
import time
from typing import Literal

from ssmd.engine.grammar import Guide
from ssmd.engine.request import Delta, FinishReason, Request, TokenLogprob
from ssmd.engine.sampling import Sample, Sampler
from ssmd.runtime.protocol import Handle, Logits
from ssmd.sessions.line import Line
from ssmd.text.detokenizer import Detokenizer
from ssmd.text.stops import StopStrings
from ssmd.text.tokenizer import Tokenizer

End = FinishReason | Literal["cancelled"]


class Choice:
    """Sampler, detokenizer and stop strings of choice `index`; they run in the worker, before a token is fed."""

    def __init__(
        self,
        request: Request,
        index: int,
        budget: int,
        tokenizer: Tokenizer,
        stops: frozenset[int],
        prompt: Line,
        guide: Guide | None = None,
    ) -> None:
        """prompt: its ids, of which those that a penalty counts are at hand. guide: its own, of what it may say."""
        self.index = index
        self.turn = f"turn_{secrets.token_hex(12)}"
        self.handle: Handle = None
        self.tokens: list[
            int
        ] = []  # part of the text; the last one may not have been fed, nor those that follow from a
        self.ahead = 0  # grammar, which are so many after the next one to be fed
        self.text = ""
        self.end: End | None = None
        self.cut = False  # text and tokens disagree: a stop string, or a control token inside the answer
        self.times: list[float] = []  # perf_counter at each sampled token
        self._budget = budget
        dry = request.sampling.dry
        breakers = () if dry is None else tokenizer.holding(dry.breakers)
        self._sampler = Sampler(request.sampling, index=index, before=prompt.own, breakers=breakers)
        self._tokenizer = tokenizer
        self._stop_tokens = stops
        self._guide = guide
        self._detokenizer = Detokenizer(tokenizer, begun=request.raw is not None)
        self._stop_strings = StopStrings(request.stop) if request.stop else None
        self._held: list[TokenLogprob] = []  # of tokens whose text is still held back
        self.logprobs: list[TokenLogprob] = []  # of those sent

    def take(self, logits: Logits) -> Delta | None:
        """Sample from `logits` [vocab]; the delta to send, if any. Sets `end` when this choice is over."""
        guide = self._guide
        sample = self._sampler.sample(logits, None if guide is None else guide.mask())
        self.times.append(time.perf_counter())
        if sample.token in self._stop_tokens:
            return self._finish("stop")
        if sample.logprob is not None:
            self._held.append(self._logprob(sample, sample.logprob))
        text, hit = self._say(sample.token)
        if guide is not None and not hit:
            more, hit = self._follow(guide, sample.token)
            text += more
        if hit:
            return self._cut_off(text)
        if guide is not None and guide.ended:
            return self._finish("stop", text)
        if len(self.tokens) >= self._budget:
            return self._finish("length", text)
        return self._delta(text)

    def fed(self, count: int) -> bool:
        """Note that so many of `unfed` were fed; whether the logits after them are for `take`."""
        rest = self.ahead + 1 - count
        self.ahead = max(0, rest - 1)
        return rest == 0

    def cancel(self) -> None:
        """Stop here: what was sent is the answer; tokens whose text was held back disagree with it."""
        if self.end is None:
            self.end = "cancelled"
            self.cut = self.cut or bool(self._held_back()[0])

    @property
    def next_token(self) -> int:
        return self.tokens[-1 - self.ahead]

    @property
    def unfed(self) -> list[int]:
        """The tokens to be fed, before the next one is drawn: more than one where a grammar left no choice."""
        return self.tokens[-1 - self.ahead :]

    def _say(self, token: int) -> tuple[str, bool]:
        """Add a token; the text that is complete with it, and whether that reaches a stop string."""
        self.tokens.append(token)
        if self._tokenizer.is_control(token):
            self.cut = True
        return self._scan(self._detokenizer.push(token))

    def _follow(self, guide: Guide, token: int) -> tuple[str, bool]:
        """Say what is bound to follow a token, as `_say`. Nothing where log-probabilities are asked for: only what is
        drawn has them.
        """
        room = 0 if self._sampler.params.logprobs else self._budget - len(self.tokens)
        text = ""
        for forced in guide.take(token, room):
            self._sampler.skip(forced)
            self.times.append(self.times[-1])
            more, hit = self._say(forced)
            text += more
            if hit:
                return text, True
            self.ahead += 1
        return text, False

    def _finish(self, end: End, text: str = "") -> Delta | None:
        rest, hit = self._held_back()
        if hit:
            return self._cut_off(text + rest)
        self.end = end
        return self._delta(text + rest)

    def _cut_off(self, text: str) -> Delta | None:
        self.end, self.cut = "stop", True
        self._held.clear()  # of tokens that reach into the stop string
        return self._delta(text)

    def _held_back(self) -> tuple[str, bool]:
        """Text not sent yet, and whether a stop string cuts it."""
        text, hit = self._scan(self._detokenizer.flush())
        if not hit and self._stop_strings is not None:
            text += self._stop_strings.flush()
        return text, hit

    def _scan(self, text: str) -> tuple[str, bool]:
        return (text, False) if self._stop_strings is None else self._stop_strings.push(text)

    def _delta(self, text: str) -> Delta | None:
        if not text and not (self._held and self.end):
            return None
        self.text += text
        logprobs, self._held = tuple(self._held), []
        self.logprobs += logprobs
        return Delta(self.index, text, logprobs)

    def _logprob(self, sample: Sample, logprob: float) -> TokenLogprob:
        name, utf8 = self._tokenizer.token_text, self._tokenizer.token_bytes
        top = tuple((name(t), utf8(t), p) for t, p in sample.top)
        return TokenLogprob(name(sample.token), utf8(sample.token), logprob, top)
