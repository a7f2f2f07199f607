"""Aliases of models as the setting has them: patterns, their order, and texts that are refused."""

from __future__ import annotations

import sys

import pytest

from ssmd.model.aliases import MOST, Alias, parse


@pytest.mark.parametrize(
    ("pattern", "fitting", "others"),
    [
        ("gpt-5", ["gpt-5"], ["gpt-5-mini", "gpt-", "", "GPT-5"]),
        ("claude-*", ["claude-", "claude-opus-4[1m]", "claude-sonnet-4@20250514"], ["claude", "x-claude-y"]),
        ("*-mini", ["gpt-5-mini", "-mini"], ["mini", "gpt-5-mini-2"]),
        ("gpt-*-mini", ["gpt-5-mini", "gpt--mini"], ["gpt-mini", "gpt-5-min"]),
        ("a*b*c", ["abc", "a-b-c", "abbc", "acbc"], ["acb", "ab", "bc", "abcd"]),
        ("ab*ba", ["abba", "ab-ba"], ["aba"]),
        ("a*b*b", ["abb", "a-b-b"], ["ab", "a-b"]),  # the middle is sought in front of the end
        ("**", ["", "x"], []),
        ("*", ["", "any name", "x" * 4096], []),
        ("a[b]?", ["a[b]?"], ["ab", "ab?", "a[b]c"]),
    ],
)
def test_pattern_fits_names(pattern: str, fitting: list[str], others: list[str]) -> None:
    [alias] = parse([f"{pattern}=model"])
    assert [name for name in (*fitting, *others) if alias.fits(name)] == fitting


def test_pattern_of_many_stars_costs_few_calls() -> None:
    """A name of 4,096 characters that fits nearly: a regular expression would try every place of every star."""
    [alias] = parse([f"{'*a' * 6}*b*=model"])
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "c_call"

    sys.setprofile(count)
    try:
        fits = alias.fits("a" * 4096)
    finally:
        sys.setprofile(None)
    assert not fits
    assert calls < 50


def test_aliases_keep_their_order() -> None:
    assert parse([" claude-* = granite ", "*=smollm2@litert"]) == (
        Alias("claude-*", "granite"),
        Alias("*", "smollm2@litert"),
    )


@pytest.mark.parametrize(
    ("texts", "why"),
    [
        (["smollm2"], "'smollm2' is not NAME=MODEL, such as claude-*=smollm2"),
        (["=smollm2"], "is not NAME=MODEL"),
        (["gpt-5="], "is not NAME=MODEL"),
        (["gpt 5=smollm2"], "a name has 1 to 128 printable ASCII characters"),
        ([f"{'x' * 129}=smollm2"], "a name has 1 to 128"),
        (["gpt\x1b[31m=smollm2"], "a name has 1 to 128"),
        (["gpt-5=smol*"], "the name of one installed model"),
        (["gpt-5=a=b"], "the name of one installed model"),
        ([f"{'*a' * 9}=smollm2"], "has more than 8 stars"),
        (["smollm2=smollm2"], "is an alias for itself"),
        (["a=b", "a=c"], "'a=c' would never be used: 'a=b' comes first"),
        (["*=b", "claude-*=c"], "'claude-*=c' would never be used: '*=b' comes first"),
        ([f"a{i}=b" for i in range(MOST + 1)], "there are 257 aliases; at most 256 are allowed"),
    ],
)
def test_wrong_alias_is_refused(texts: list[str], why: str) -> None:
    with pytest.raises(ValueError, match=r".") as refused:
        parse(texts)
    assert why in str(refused.value)
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 250
