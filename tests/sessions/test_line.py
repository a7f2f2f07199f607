"""Hashes of conversations of which only the end is at hand: they do not depend on where that begins."""

from __future__ import annotations

import hashlib
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssmd.sessions import line as line_module
from ssmd.sessions.line import (
    EMPTY,
    NOTHING,
    Line,
    Passage,
    advance,
    anchor,
    anchors,
    as_ids,
)

ids_ = st.lists(st.integers(0, 2**31 - 1), max_size=200)
texts_ = st.text(st.sampled_from("ab é東\U0001f600\x00"), max_size=1500)


def cut_at(line: Line, positions: list[int]) -> Line:
    """The line, cut again and again."""
    for position in sorted(positions):
        line = line.cut(position)
    return line


@given(ids_, ids_, st.data())
def test_a_hash_does_not_depend_on_the_cuts(first: list[int], second: list[int], data: st.DataObject) -> None:
    whole = Line.of([*first, *second])
    places = st.lists(st.integers(0, len(first)), max_size=4)
    cut = cut_at(Line.of(first), data.draw(places)).then(second)
    assert len(cut) == len(whole)
    asked = sorted(data.draw(st.lists(st.integers(cut.start, len(whole)), max_size=5)))
    assert cut.hashes(asked) == whole.hashes(asked) == [Line.of(whole.own[:p]).hash(p) for p in asked]
    again = cut.cut(len(cut))
    assert (again.before, again.anchored) == (whole.hash(len(whole)), whole.hash(anchor(len(whole))))
    mark = anchor(cut.start)
    assert cut.hashes([mark, *asked]) == whole.hashes([mark, *asked]), "the one before the cut that is known"


@given(ids_, ids_)
def test_hashes_are_equal_exactly_for_equal_ids(a: list[int], b: list[int]) -> None:
    one, other = Line.of(a), Line.of(b)
    assert (one.hash(len(a)) == other.hash(len(b))) == (a == b)
    if a:
        assert one.hash(len(a) - 1) != one.hash(len(a))
        changed = Line.of([a[0] ^ 1, *a[1:]])
        assert changed.hash(len(a)) != one.hash(len(a))


def test_what_a_hash_is() -> None:
    """It names every stored state: it may never become another one."""
    line = Line.of(range(33))
    data = line.own.tobytes()
    block = hashlib.blake2b(bytes(32) + data[:128], digest_size=32, person=b"ssmd.line.1").digest()
    assert line.hashes([0, 3, 32, 33]) == [bytes(32), bytes(32) + data[:12], block, block + data[128:]]
    assert bytes(32) == EMPTY
    words = Passage("é" * 257)
    whole = hashlib.blake2b(bytes(32) + ("é" * 256).encode(), digest_size=32, person=b"ssmd.line.1").digest()
    assert words.hash(256) == whole
    assert words.hash(257) == whole + "é".encode()


@given(st.binary(max_size=400), st.lists(st.integers(0, 400), max_size=5), st.integers(1, 64))
def test_any_bytes_in_any_parts(data: bytes, cuts: list[int], block: int) -> None:
    running, at = EMPTY, 0
    for end in [*sorted(min(c, len(data)) for c in cuts), len(data)]:
        running, at = advance(running, data[at:end], block), end
    assert running == advance(EMPTY, data, block)
    assert len(running) == 32 + len(data) % block


@given(ids_, st.data())
def test_parts_make_the_whole_again(ids: list[int], data: st.DataObject) -> None:
    places = [0, *sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=5))), len(ids)]
    line, parts = NOTHING, []
    for first, last in pairwise(places):
        line = line.cut(first).then(ids[first:last])
        parts.append(line)
    whole = parts[-1].after(parts[:-1])
    assert (whole.start, whole.own.tolist()) == (0, ids)
    since = data.draw(st.integers(whole.start, len(ids)))
    assert whole.since(since).tolist() == ids[since:]
    assert whole.up_to(since).own.tolist() == ids[:since]
    if len(parts) > 1 and len(parts[0]):
        with pytest.raises(ValueError, match="is not the part before"):
            parts[-1].after([*parts[:-1][1:], NOTHING])


def test_an_end_is_hashed_once() -> None:
    """However many go on from it: a file may have thousands of turns that share one long beginning."""
    line, words = Line.of(range(1000)), Passage("a" * 5000)
    ends = [(line.cut(1000), words.cut(5000)) for _ in range(3)]
    assert {id(ids.before) for ids, _ in ends} == {id(line.hash(1000))}
    assert {id(text.before) for _, text in ends} == {id(words.hash(5000))}
    assert line.hash(1000) == line.cut(7).hash(1000) == line.hashes([1000])[0]


def test_ids_are_hashed_once_for_all_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look-up asks for hundreds of positions, in several steps, and each stored state for its own."""
    blocks: list[int] = []

    def counted(chain: bytes, data: bytes) -> bytes:
        blocks.append(len(data))
        return hash_block(chain, data)

    hash_block = line_module._block
    monkeypatch.setattr(line_module, "_block", counted)
    line = Line.of(range(1000)).then(range(1000))
    shorter, expected = line.up_to(1500), [Line.of(list(range(1000)) * 2).up_to(p).hash(p) for p in (64, 1500, 1999)]
    blocks.clear()
    assert [*line.hashes([64]), *line.hashes([1500, 1999])] == expected
    assert [line.up_to(p).hash(p) for p in (64, 1500, 1999)] == expected
    assert len(blocks) == 2000 * 4 // 128
    assert shorter.hash(1500) == expected[1]


def test_what_is_not_at_hand_is_not_guessed() -> None:
    line = Line.of(range(100)).cut(50)
    assert line.start == 50
    with pytest.raises(ValueError, match="from 50 on are"):
        line.since(49)
    with pytest.raises(ValueError, match="cannot end at 49"):
        line.up_to(49)
    with pytest.raises(ValueError, match="before 50 are not at hand"):
        line.hash(49)
    with pytest.raises(ValueError, match="before 50 are not at hand"):
        line.hashes([1])
    assert line.hashes([48, 50]) == Line.of(range(100)).hashes([48, 50])
    words = Passage("a" * 100).cut(50)
    assert (len(words), words.own) == (100, "a" * 50)
    with pytest.raises(ValueError, match="before 50 is not at hand"):
        words.hash(49)


@pytest.mark.parametrize("bad", [[-1], [2**31], [[1]]])
def test_impossible_ids(bad: list[int]) -> None:
    for make in (as_ids, Line.of, Line.of([1]).then):
        with pytest.raises(ValueError, match="token ids must be"):
            make(bad)


@given(texts_, texts_, st.data())
def test_text_is_hashed_alike_however_it_is_cut(first: str, second: str, data: st.DataObject) -> None:
    whole, cut = Passage(first + second), Passage(first)
    for position in sorted(data.draw(st.lists(st.integers(0, len(first)), max_size=4))):
        cut = cut.cut(position)
    cut = cut.then(second)
    assert len(cut) == len(whole)
    at = data.draw(st.integers(cut.start, len(whole)))
    assert cut.hash(at) == whole.hash(at) == Passage((first + second)[:at]).hash(at)
    assert (whole.hash(len(whole)) == Passage(second + first).hash(len(whole))) == (first + second == second + first)


@given(st.integers(1, 1 << 20), st.integers(1, 1 << 20))
def test_the_anchors_between(a: int, b: int) -> None:
    first, last = sorted((a, b))
    found = anchors(first, last)
    assert found == sorted(set(found))
    assert found[0] == anchor(first) <= first
    assert {anchor(p) for p in (first, (first + last) // 2, last)} <= set(found)
    assert all(anchor(p) == p for p in found)
    assert found[-1] == anchor(last)
    assert len(found) <= 8 * ((last - 1).bit_length() - first.bit_length() + 2)


def test_no_anchors() -> None:
    assert anchors(5, 4) == []
    assert anchors(1, 0) == []
    assert anchors(17, 16) == [16], "that of the position before the first: known beside a cut"
    assert anchors(1, 20) == [*range(1, 17), 18, 20]
