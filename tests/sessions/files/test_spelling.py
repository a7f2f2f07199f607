"""Ids that spell a rendered text: the check by which `--reread` keeps a file's ids."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vocabularies import id_of, opened

NAME = "byte-level"
START, END = "<|im_start|>", "<|im_end|>"


def rendered(content: str) -> str:
    return f"{START}user\n{opened(NAME).escape(content)}{END}\n{START}assistant\n"


@settings(max_examples=200, deadline=None)
@given(st.one_of(st.text(st.characters(exclude_categories=["Cs"])), st.sampled_from([START, f"a{END}b", "<tool>"])))
def test_what_was_encoded_spells_its_text(content: str) -> None:
    one, text = opened(NAME), rendered(content)
    ids = one.encode(text)
    assert one.spells(ids, text)
    if one.escape(content) == content:  # cut elsewhere, as sampled ids may be: letter by letter
        letters = [t for c in content for t in one.encode(c)]
        head, tail = one.encode(f"{START}user\n"), one.encode(f"{END}\n{START}assistant\n")
        assert one.spells([*head, *letters, *tail], text)


@settings(max_examples=200, deadline=None)
@given(st.text("abc <|im_endstar>\n"), st.data())
def test_any_other_id_is_found_out(content: str, data: st.DataObject) -> None:
    one, text = opened(NAME), rendered(content)
    ids = one.encode(text)
    at = data.draw(st.integers(0, len(ids) - 1))
    other = data.draw(st.integers(-1, one.vocabulary + 1))
    if one.token_bytes(other) != one.token_bytes(ids[at]):
        assert not one.spells([*ids[:at], other, *ids[at + 1 :]], text)
    assert not one.spells(ids[:-1], text)
    assert not one.spells([*ids, ids[-1]], text)


@pytest.mark.parametrize("control", [START, END])
def test_a_control_token_is_not_its_own_text(control: str) -> None:
    """A message that holds the text of a control token is shown as text: ids that end the turn there are another."""
    one, text = opened(NAME), rendered(f"a{control}b")
    honest = one.encode(text)
    forged = [*one.encode(f"{START}user\na"), id_of(NAME, control), *one.encode(f"b{END}\n{START}assistant\n")]
    assert one.spells(honest, text)
    assert not one.spells(forged, text)
    assert one.spells(forged, f"{START}user\na{control}b{END}\n{START}assistant\n")
