"""A conversation of thousands of turns: what a request reads and writes of it, and moving it. Counted, not timed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
from keeping import (
    LINEAGE,
    PRODUCER,
    RECURRENT,
    START,
    VOCABULARY,
    answer,
    assert_same,
    echo_of,
    grown,
    new_store,
    resume,
    state_of,
    user,
)

from ssmd.sessions.checkpoint import NewCheckpoint, Scope
from ssmd.sessions.files.transfer import LocalModel, export_session, import_session
from ssmd.sessions.line import NOTHING, SILENCE
from ssmd.sessions.rows.blobs import EncodedCheckpoint, encode
from ssmd.sessions.store import Store
from ssmd.sessions.turn import NewTurn, SessionInfo, conversation

TURNS = [2000, pytest.param(5000, marks=pytest.mark.full)]
TOKENS = 100
SCOPE = Scope(RECURRENT.digest(), LINEAGE, "b" * 64)
HERE = {LINEAGE: LocalModel("made-up", RECURRENT, VOCABULARY)}


def talk(turns: int, session: str) -> list[NewTurn]:
    """A conversation, each turn with what it adds."""
    ids, text = NOTHING, SILENCE
    made: list[NewTurn] = []
    for i in range(turns):
        asked, said = f"question {i} " + "of many words " * 12, f"answer {i} " + "that is long " * 12
        ids = ids.cut(len(ids)).then(np.random.default_rng([len(session), i]).integers(0, VOCABULARY, TOKENS))
        text = text.cut(len(text)).then(f"<user>{asked}</><assistant>{said}")
        name, above = f"{session}{i}", f"{session}{i - 1}" if i else None
        at = START + timedelta(seconds=i)
        prompt = len(ids) - TOKENS // 2
        made.append(NewTurn(name, session, above, (user(asked),), answer(said), ids, prompt, text, "stop", True, at))
    return made


def end_of(store: Store, turn: str) -> EncodedCheckpoint:
    """The state at the end of a turn."""
    ids, _ = grown(store, turn)
    fed = ids.up_to(len(ids) - 1)
    made = NewCheckpoint("turn", fed, state_of(RECURRENT, fed.own), turn=turn)
    return encode(made, scope=SCOPE, producer=PRODUCER, spec=RECURRENT)


@pytest.fixture(scope="module", params=TURNS)
def turns(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def kept(turns: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """Two conversations, `short` of 50 turns and `long`; each with the state at its end."""
    store = new_store(tmp_path_factory.mktemp("long") / "data")
    for session, count in (("short", 50), ("long", turns)):
        made = talk(count, session)
        store.adopt(SessionInfo(session, "made-up", LINEAGE, START), made, [], head=made[-1].id)
        last = store.path(made[-1].id)[-1]
        assert store.rewrite(last.id, last.ids, last.text, end_of(store, last.id)) is not None
    yield store
    store.close()


def test_each_turn_is_stored_as_what_it_adds(kept: Store, turns: int) -> None:
    stored = kept.turns("long")
    assert [t.stem for t in stored] == [None, *(t.id for t in stored[:-1])]
    assert {len(t.ids.own) for t in stored} == {TOKENS}
    ids, text = grown(kept, stored[-1].id)
    assert len(ids) == len(ids.own) == turns * TOKENS
    assert text.own.count("<user>") == turns


def test_it_moves_whole(kept: Store, turns: int, tmp_path: Path) -> None:
    """An exported file can be imported."""
    file = tmp_path / "long.ssmd"
    done = export_session(kept, "long", file)
    assert (done.turns, done.checkpoints, done.left_out) == (turns, 1, 0)
    other = new_store(tmp_path / "there")
    came = import_session(other, file, local=HERE)
    assert (came.turns, came.checkpoints, came.text_only) == (turns, 1, "")
    head = other.session("long").head
    (ids, text), (their_ids, their_text) = grown(kept, head), grown(other, head)
    assert np.array_equal(ids.own, their_ids.own)
    assert text.own == their_text.own
    said = conversation(kept.path(head))
    assert conversation(other.path(head)) == said
    for store in (kept, other):
        echoed = echo_of(store, [*said, user("more")])
        assert echoed is not None
        assert (echoed.turn, echoed.length, echoed.stored) == (head, 2 * turns, None)
        turn = store.path(head)[-1]
        found, ids, _ = resume(store, SCOPE, turn.ids.then([1, 2, 3]), turn.stem, "long")
        assert found is not None
        assert (found.position, ids.start) == (turns * TOKENS - 1, (turns - 1) * TOKENS)
        assert_same(store.load(found.id, RECURRENT), state_of(RECURRENT, grown(store, head)[0].own[:-1]))
    other.close()


def test_ids_that_must_be_fed_are_read_back(kept: Store, turns: int) -> None:
    """Without a state at its end a turn is read from the beginning: all ids, in a few reads."""
    turn = kept.path(kept.session("long").head)[-1]
    found, _, _ = resume(kept, SCOPE, turn.ids.then([1]), turn.stem, "long")
    assert found is not None
    nothing, ids, stem = resume(kept, SCOPE, turn.ids.then([1]), turn.stem, "long", skip=[found.id])
    assert (nothing, stem, ids.start, len(ids.own)) == (None, None, 0, turns * TOKENS + 1)
    assert np.array_equal(ids.own[:-1], grown(kept, turn.id)[0].own)


def test_a_turn_goes_on_from_the_end(kept: Store) -> None:
    """The same row, whether 50 turns stand above it or thousands."""
    for session in ("short", "long"):
        head = kept.path(kept.session(session).head)[-1]
        ids, text = head.ids.then([7] * TOKENS), head.text.then("<user>more</><assistant>yes")
        new = replace(talk(1, session)[0], id=f"{session}-more", parent=head.id, ids=ids, text=text)
        kept.commit([new], session=kept.session(session).info)
        stored = kept.path(new.id)[-1]
        assert (stored.stem, stored.ids.start, len(stored.ids.own)) == (head.id, len(head.ids), TOKENS)
        assert stored.text.own == "<user>more</><assistant>yes"
