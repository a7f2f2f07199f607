"""Stop strings in a stream against a naive search in the whole text."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssmd.text.stops import StopStrings


def cut_ref(text: str, stops: list[str]) -> tuple[str, bool]:
    """The text before the stop string that ends first; of those that end together, the longest."""
    for end in range(1, len(text) + 1):
        ending = [s for s in stops if text[:end].endswith(s)]
        if ending:
            return text[: end - max(map(len, ending))], True
    return text, False


def run(pieces: list[str], stops: list[str]) -> tuple[list[str], bool]:
    stream = StopStrings(stops)
    sent = []
    for piece in pieces:
        text, hit = stream.push(piece)
        sent.append(text)
        if hit:
            return sent, True
    sent.append(stream.flush())
    return sent, False


@given(
    pieces=st.lists(st.text("ab\n", max_size=5), max_size=30),
    stops=st.lists(st.text("ab\n", min_size=1, max_size=6), max_size=4),
)
def test_any_cutting_into_pieces_gives_the_naive_cut(pieces: list[str], stops: list[str]) -> None:
    sent, hit = run(pieces, stops)
    assert ("".join(sent), hit) == cut_ref("".join(pieces), stops)


@given(text=st.text("ab", max_size=40), stops=st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=3))
def test_no_more_is_held_back_than_could_start_a_stop_string(text: str, stops: list[str]) -> None:
    stream = StopStrings(stops)
    sent = ""
    for i, char in enumerate(text, start=1):
        piece, hit = stream.push(char)
        sent += piece
        if hit:
            return
        held = text[len(sent) : i]
        longest = max((n for s in stops for n in range(len(s)) if text[:i].endswith(s[:n])), default=0)
        assert len(held) == longest


@pytest.mark.parametrize(
    ("pieces", "stops", "expected"),
    [
        (["Hello", " wor", "ld STO", "P now"], ["STOP"], ["Hello", " wor", "ld ", ""]),
        (["abc", "d"], ["abcd", "bc"], ["a"]),
        (["xabc"], ["c", "bc", "abc"], ["x"]),
        (["a\n", "\nb"], ["\n\n"], ["a", ""]),
        (["no stops"], [], ["no stops", ""]),
        (["ends with ST"], ["STOP"], ["ends with ", "ST"]),
    ],
)
def test_overlaps(pieces: list[str], stops: list[str], expected: list[str]) -> None:
    assert run(pieces, stops)[0] == expected


def test_after_a_hit_nothing_more_comes() -> None:
    stream = StopStrings(["x"])
    assert stream.push("axb") == ("a", True)
    assert stream.push("more") == ("", True)
    assert stream.flush() == ""


@given(text=st.text("ab", max_size=30), stops=st.lists(st.text("ab", min_size=1, max_size=6), max_size=4))
def test_the_stop_string_that_was_hit_is_named(text: str, stops: list[str]) -> None:
    stream = StopStrings(stops)
    sent, hit = stream.push(text)
    assert (stream.found is not None) is hit
    if stream.found is not None:
        assert stream.found in stops
        assert text.startswith(sent + stream.found)
        assert sent == cut_ref(text, stops)[0]


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopStrings(["a", ""])


def test_a_text_that_nearly_matches_everywhere_takes_linear_time() -> None:
    stream = StopStrings(["a" * 1000 + "b"])
    start = time.process_time()
    for _ in range(20_000):
        stream.push("aaaaaaaaaa")
    assert time.process_time() - start < 5
    assert stream.flush() == "a" * 1000
