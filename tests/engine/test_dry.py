"""DRY against its definition, written out: every earlier place where the last tokens stand is looked at, one by one."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import pytest
from conftest import TinyArtifacts
from hypothesis import given, settings
from hypothesis import strategies as st
from several import models_folder, several

from ssmd.engine.sampling.params import Dry, SamplingParams
from ssmd.engine.sampling.sampler import DryPenalty, Sampler
from ssmd.model.defaults import ALL_TOKENS
from ssmd.text.tokenizer import Tokenizer

V = 8


def penalties_ref(said: Sequence[int], dry: Dry, breakers: Collection[int]) -> dict[int, float]:
    ids = list(said) if dry.last_n == ALL_TOKENS else list(said[-dry.last_n :])
    longest: dict[int, int] = {}
    for place in range(len(ids) - 1):
        n = 0
        while n <= place and ids[place - n] == ids[-1 - n] and ids[-1 - n] not in breakers:
            n += 1
            if n == dry.allowed_length + 50:
                break
        follows = ids[place + 1]
        if n >= dry.allowed_length and follows not in breakers:
            longest[follows] = max(n, longest.get(follows, 0))
    return {token: dry.multiplier * dry.base ** (n - dry.allowed_length) for token, n in longest.items()}


@settings(max_examples=200, deadline=None)
@given(
    before=st.lists(st.integers(0, V - 1), max_size=120),
    said=st.lists(st.integers(0, V - 1), max_size=40),
    last_n=st.sampled_from([ALL_TOKENS, 1, 2, 7, 30, 500]),
    allowed=st.integers(1, 4),
    breakers=st.sets(st.integers(0, V - 1), max_size=2),
)
def test_what_is_subtracted(before: list[int], said: list[int], last_n: int, allowed: int, breakers: set[int]) -> None:
    dry = Dry(0.8, 1.75, allowed, last_n)
    penalty = DryPenalty(dry, breakers, np.array(before, np.int32))
    for n in range(len(said) + 1):
        logits = np.zeros(V, np.float32)
        penalty.penalize(logits)
        expected = penalties_ref(before + said[:n], dry, breakers)
        np.testing.assert_allclose(-logits, [expected.get(token, 0.0) for token in range(V)], rtol=1e-5)
        if n < len(said):
            penalty.add(said[n])


def test_a_long_repetition_is_found_however_often_room_is_made() -> None:
    words = np.random.default_rng(1).integers(0, 50, 700).tolist()
    dry = Dry(1.0, 1.2)
    penalty = DryPenalty(dry, (), np.array([], np.int32))
    for token in [*words, *words[:600]]:
        penalty.add(token)
    logits = np.zeros(50, np.float32)
    penalty.penalize(logits)
    assert -logits[words[600]] == pytest.approx(1.2**50, rel=1e-5)
    assert (-logits).max() == -logits[words[600]]


def test_an_answer_stops_repeating_the_prompt() -> None:
    prompt = np.array([1, 2, 3, 4, 5, 1, 2, 3], np.int32)
    logits = np.zeros(V, np.float32)
    logits[4] = 3.0
    for multiplier, token in ((0.0, 4), (0.8, 4), (2.0, 0)):  # 2 * 1.75 is more than 3
        params = SamplingParams(temperature=0.0, dry=Dry(multiplier))
        assert Sampler(params, before=prompt).sample(logits).token == token
    params = SamplingParams(temperature=0.0, dry=Dry(2.0))
    assert Sampler(params, before=prompt, breakers=(2,)).sample(logits).token == 4
    assert params.counted(100) == 100
    assert SamplingParams(dry=Dry(2.0, last_n=7), repetition_penalty=1.1, repeat_last_n=9).counted(100) == 9


def test_tokens_that_hold_a_breaker(artifacts: TinyArtifacts) -> None:
    tokenizer = Tokenizer.open(artifacts["mamba-f32"] / "tokenizer.json")
    found = tokenizer.holding(("e", "?!"))
    assert found == {t for t in range(tokenizer.vocabulary) if b"e" in tokenizer.token_bytes(t)}
    assert tokenizer.holding(()) == frozenset()


def test_through_the_api(artifacts: TinyArtifacts, tmp_path_factory: pytest.TempPathFactory) -> None:
    with several(models_folder(artifacts, tmp_path_factory.mktemp("dry") / "models")) as one:
        greedy: dict[str, Any] = {"temperature": 0.0, "max_tokens": 200, "store": False}
        plain = one.chat("llama", **greedy).json["choices"][0]["message"]["content"]
        dry = one.chat("llama", **greedy, dry_multiplier=5.0, dry_base=3.0, dry_sequence_breakers=[])
        assert dry.status == 200
        assert dry.json["choices"][0]["message"]["content"] != plain
        assert one.chat("llama", **greedy, dry_multiplier=0.0).json["choices"][0]["message"]["content"] == plain
        wrong: tuple[tuple[str, Any], ...] = (
            ("dry_multiplier", -1),
            ("dry_base", 0.5),
            ("dry_allowed_length", 0),
            ("dry_penalty_last_n", -2),
            ("dry_sequence_breakers", [""]),
            ("dry_sequence_breakers", ["x"] * 17),
            ("typical_p", 1.1),
            ("xtc_probability", -0.1),
            ("xtc_threshold", 2),
        )
        for field, value in wrong:
            answer = one.chat("llama", **{field: value})
            assert (answer.status, answer.error["param"].split("[")[0]) == (400, field)
