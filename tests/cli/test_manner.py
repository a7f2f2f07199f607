"""How a person's wishes for answers become fields of a request, and which are refused in words."""

from __future__ import annotations

from typing import Any

import pytest

from ssmd.api.openai.chat_body import read_chat
from ssmd.cli.chat.options import NAMES, Manner


def test_options_left_out_are_not_sent() -> None:
    assert Manner().fields() == {}
    off = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repeat_penalty": 1.0, "repeat_last_n": 0}
    assert Manner(**off).fields() == off  # type: ignore[arg-type]  # of many types; the model's default may be another


def test_each_is_a_field_that_the_daemon_knows() -> None:
    asked = {"top_k": 3, "min_p": 0.1, "repeat_penalty": 1.2, "repeat_last_n": -1, "seed": -4, "stop": ("a", "b")}
    sent = Manner(**asked).fields()  # type: ignore[arg-type]  # of many types
    assert {name: sent[name] for name in asked} == {**asked, "stop": ["a", "b"]}
    body = read_chat({"model": "x", "messages": [], **sent})
    assert (body.top_k, body.min_p, body.repeat_penalty, body.repeat_last_n, body.seed) == (3, 0.1, 1.2, -1, -4)
    assert body.stop == ["a", "b"]


@pytest.mark.parametrize(("given", "sent"), [("5m", "5m"), ("300", 300), ("0", 0), ("-1", -1), ("1h30m", "1h30m")])
def test_keep_alive_is_a_time_or_seconds(given: str, sent: Any) -> None:
    assert Manner(keep_alive=given).fields()["keep_alive"] == sent


def test_one_is_changed_as_it_is_typed_and_back() -> None:
    manner = Manner().changed("top_k", "40").changed("stop", "END").changed("stop", "two words").changed("seed", "7")
    assert (manner.top_k, manner.stop, manner.seed) == (40, ("END", "two words"), 7)
    shown = manner.lines()
    assert [line.split()[0] for line in shown] == list(NAMES)
    assert "stop            'END', 'two words'" in shown
    assert "temperature     (the model's)" in shown
    for name in ("top_k", "stop", "seed"):
        manner = manner.changed(name, "default")
    assert manner == Manner()


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("temperature", "2.1", "from 0 to 2"),
        ("temperature", "nan", "from 0 to 2"),
        ("top_p", "0", "more than 0"),
        ("top_k", "-1", "of 0 or more"),
        ("top_k", "1.5", "a whole number"),
        ("top_k", "9" * 5000, "a whole number"),
        ("min_p", "2", "from 0 to 1"),
        ("repeat_penalty", "0", "from 0.01 to 100"),
        ("repeat_last_n", "-2", "of -1 or more"),
        ("seed", "9" * 30, "a whole number"),
        ("max_tokens", "0", "of 1 or more"),
        ("keep_alive", "soon", "a time such as 5m"),
        ("keep_alive", "1" * 60 + "x", "a time such as 5m"),  # answered at once
        ("stop", "", "a text"),
        ("warmth", "1", "there are: temperature, top_p"),
    ],
)
def test_nonsense_is_refused_by_name(name: str, text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        Manner().changed(name, text)
    assert name in str(caught.value)
    assert len(str(caught.value)) < 300
