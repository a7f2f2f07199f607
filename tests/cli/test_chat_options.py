"""Options of a chat in the terminal: the fields that they become, and the errors for wrong values."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ssmd.api.openai.chat import read_chat
from ssmd.cli import app
from ssmd.cli.chat.options import NAMES, ChatOptions
from ssmd.model.defaults import OPTIONS

OFF = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "dry_multiplier": 0}


def test_options_left_out_are_not_sent() -> None:
    assert ChatOptions().fields() == {}
    assert ChatOptions(OFF).fields() == OFF  # the model's default may be another


def test_each_is_a_field_that_the_daemon_knows() -> None:
    lowest = {name: option.low for name, option in OPTIONS.items()}
    sent = ChatOptions(lowest, seed=-4, stop=("a", "b"), keep_alive="5m").fields()
    assert sent == {**lowest, "seed": -4, "stop": ["a", "b"], "keep_alive": "5m"}
    body = read_chat({"model": "x", "messages": [], **sent})
    assert {name: getattr(body, name) for name in lowest} == lowest
    assert (body.seed, body.stop) == (-4, ["a", "b"])


@pytest.mark.parametrize(("given", "sent"), [("5m", "5m"), ("300", 300), ("0", 0), ("-1", -1), ("1h30m", "1h30m")])
def test_keep_alive_is_a_time_or_seconds(given: str, sent: Any) -> None:
    assert ChatOptions(keep_alive=given).fields()["keep_alive"] == sent


def test_one_is_changed_as_it_is_typed_and_back() -> None:
    options = ChatOptions().changed("top_k", "40").changed("stop", "END").changed("stop", "two words")
    options = options.changed("seed", "7").changed("repeat_penalty", "1.1").changed("dry_multiplier", "0")
    assert options.sampling == {"top_k": 40, "repetition_penalty": 1.1, "dry_multiplier": 0}
    assert (options.stop, options.seed) == (("END", "two words"), 7)
    shown = {line.split()[0]: line.split(maxsplit=1)[1] for line in options.lines()}
    assert tuple(shown) == NAMES
    assert (shown["stop"], shown["temperature"], shown["top_k"]) == ("'END', 'two words'", "(the model's)", "40")
    for name in ("top_k", "stop", "seed", "repetition_penalty", "dry_multiplier"):
        options = options.changed(name, "default")
    assert options == ChatOptions()


def test_a_command_has_each_option() -> None:
    told = CliRunner().invoke(app, ["run", "--help"], env={"COLUMNS": "200"}, catch_exceptions=False).output
    names = [name for own, option in OPTIONS.items() for name in (own, *option.aliases)]
    assert [name for name in names if f"--{name.replace('_', '-')}" not in told] == []


def test_a_whole_number_may_be_written_40_0() -> None:
    options = ChatOptions().changed("top_k", "40.0").changed("seed", "7.0")
    assert options == ChatOptions({"top_k": 40}, seed=7)
    given = CliRunner().invoke(app, ["run", "--top-k", "40.0", "--seed", "7.0", "--session", "x", "--continue"])
    assert "leave one out" in given.output  # the options were read
    given = CliRunner().invoke(app, ["run", "--top-k", "40.5"], env={"COLUMNS": "200"})
    assert given.exit_code == 2
    assert "'40.5' is not a valid integer" in given.output


def test_the_page_has_the_labels_of_the_table() -> None:
    source = (Path(__file__).parents[2] / "clients" / "web" / "composer.js").read_text("utf-8")
    rows = re.findall(r'^  \["(\w+)", "([^"]+)", ([\d.]+), "([^"]+)"\],$', source, re.MULTILINE)
    words = {"top_k": "all", "max_tokens": "2,048 tokens"}
    labelled = {name: option for name, option in OPTIONS.items() if option.label}
    assert [row for row in rows if row[0] != "seed"] == [
        (name, option.label, f"{option.step:g}", words.get(name, f"{option.otherwise:g}"))
        for name, option in labelled.items()
    ]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("temperature", "2.1", "from 0 to 2"),
        ("temperature", "nan", "from 0 to 2"),
        ("top_k", "-1", "of 0 or more"),
        ("top_k", "1.5", "a whole number"),
        ("top_k", "9" * 5000, "a whole number"),
        ("min_p", "2", "from 0 to 1"),
        ("repetition_penalty", "0", "from 0.01 to 100"),
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
        ChatOptions().changed(name, text)
    assert name in str(caught.value)
    assert len(str(caught.value)) < 300
