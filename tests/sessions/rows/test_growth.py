"""A turn's additions to those above it: found by hashes, whatever was rewritten, removed or altered meanwhile."""

from __future__ import annotations

import sqlite3
import tempfile
from contextlib import closing
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from keeping import (
    HYBRID,
    LINEAGE,
    START,
    Chat,
    answer,
    assert_same,
    echo_of,
    new_store,
    plain,
    resume,
    state_of,
    user,
    whole,
)
from sqlalchemy import LargeBinary, String

from ssmd.sessions.checkpoint import NewCheckpoint
from ssmd.sessions.fsck.repair import check, repair
from ssmd.sessions.line import NOTHING, SILENCE, Line, Passage
from ssmd.sessions.rows.database import FILE
from ssmd.sessions.rows.schema import turn as turn_table
from ssmd.sessions.rows.turns import _MAX_STEMS
from ssmd.sessions.store import Store
from ssmd.sessions.turn import NewTurn, RenderedPrefix, StoreError, Turn, conversation
from ssmd.text.messages import Message


@pytest.fixture
def chat(store: Store) -> Chat:
    """t1 - t2 - t3."""
    chat = Chat(store, "s")
    chat.say("t1", None, "hi", "hello", system="Be brief.")
    chat.say("t2", "t1", "more", "<think>well</think>sure")
    chat.say("t3", "t2", "and?", "done")
    return chat


def last(store: Store, turn: str) -> Turn:
    return store.path(turn)[-1]


def kept(store: Store, turn: str) -> tuple[str | None, int, int]:
    """(stem, ids, characters) of a turn: how much of both it keeps itself."""
    with closing(sqlite3.connect(store.file)) as raw:
        query = "SELECT stem, length(ids) / 4, length(CAST(text AS TEXT)) FROM turn WHERE id = ?"
        stem, ids, characters = raw.execute(query, (turn,)).fetchone()
        return stem, ids, characters


def test_a_turn_keeps_what_it_adds(store: Store, chat: Chat) -> None:
    for name, stem in (("t1", None), ("t2", "t1"), ("t3", "t2")):
        turn = chat.turns[name]
        above = len(chat.turns[stem].text) if stem else 0
        assert kept(store, name) == (stem, 24, len(turn.text) - above)
        assert whole(store, name) == (turn.ids.own.tolist(), turn.text.own)


def test_only_the_end_has_to_be_at_hand(store: Store, chat: Chat) -> None:
    for since in (len(chat.turns["t3"].ids), len(chat.turns["t2"].ids), 3):
        new, _ = chat.make(f"from{since}", "t3", [user("next")], f"reply {since}")
        cut = replace(new, ids=new.ids.cut(since), text=new.text.cut(min(since, len(chat.turns["t1"].text))))
        store.commit([cut], session=chat.info)
        assert kept(store, new.id)[:2] == ("t3", 24)
        assert whole(store, new.id) == (new.ids.own.tolist(), new.text.own)


def test_what_diverges_goes_on_from_further_up(store: Store, chat: Chat) -> None:
    """As where a template leaves the reasoning of earlier answers out: its words are there, its ids are not."""
    first, second = chat.turns["t1"], chat.turns["t2"]
    base = replace(chat.make("t4", "t3", [user("next")], "yes")[0], prompt_tokens=30)
    for name, ids, text, stem in (
        ("both", [*first.ids.own, 1, 2, 3], f"{first.text.own} other", "t1"),
        ("ids", [*first.ids.own, 1, 2, 3], f"{second.text.own} other", "t1"),
        ("text", [*second.ids.own, 1, 2, 3], f"{first.text.own} other", "t1"),
        ("none", [*first.ids.own[:-1], 1, 2, 3], second.text.own, None),
        ("no text", [*second.ids.own, 1], "", None),
        ("shorter", [*second.ids.own[:-1]], second.text.own, "t1"),
        ("the same", [*second.ids.own], second.text.own, "t2"),
    ):
        made = replace(base, id=name.replace(" ", "-"), ids=Line.of(ids), text=Passage(text), parent="t3")
        store.commit([made], session=chat.info)
        stored = last(store, made.id)
        assert (stored.stem, stored.parent, stored.root, stored.depth) == (stem, "t3", "t1", 3), name
        assert stored.prompt_tokens == min(30, len(ids))
        assert whole(store, made.id) == ([int(i) for i in ids], text)
    assert check(store.file.parent).damages == ()


def test_another_models_ids_are_passed_over(store: Store, chat: Chat) -> None:
    """A turn that another model answered; then the first one again."""
    new, _ = chat.make("t4", "t3", [user("next")], "yes")
    store.commit([replace(new, lineage="c" * 64)], session=chat.info)
    assert kept(store, "t4")[:2] == (None, len(new.ids)), "its ids mean other text, though they are the same"
    chat.remember(new, None)
    again, _ = chat.make("t5", "t3", [user("next")], "back")
    store.commit([replace(again, parent="t4")], session=chat.info)
    assert last(store, "t5").stem == "t3"
    assert whole(store, "t5") == (again.ids.own.tolist(), again.text.own)


def rewritten(chat: Chat, turn: str, ids: Line, text: str) -> bool:
    fed = ids.up_to(len(ids) - 1)
    saved = NewCheckpoint("turn", fed, state_of(HYBRID, fed.own), turn=turn)
    return chat.store.rewrite(turn, ids, Passage(text), chat.encode(saved)) is not None


def test_what_it_went_on_from_was_rewritten_meanwhile(store: Store, chat: Chat) -> None:
    """While the request was answered its parent's ids became others: its own can stand for nothing, its words stay."""
    new, _ = chat.make("t4", "t3", [user("next")], "yes")
    cut = replace(
        new,
        ids=new.ids.cut(len(chat.turns["t3"].ids)),
        text=new.text.cut(len(chat.turns["t3"].text)),
        settled=RenderedPrefix(7, len(chat.turns["t3"].text) + 1, "f" * 64),
    )
    ids = chat.turns["t3"].ids.own.copy()
    ids[-1] ^= 1
    assert rewritten(chat, "t3", Line.of(ids), chat.turns["t3"].text.own)
    store.commit([cut], session=chat.info)
    stored = last(store, "t4")
    assert stored.sound
    assert (stored.stem, stored.prompt_tokens, stored.settled) == (None, 0, None)
    assert whole(store, "t4") == ([], "")
    assert [m.content for m in stored.conversation] == ["next", "yes"]
    whole_new = replace(new, id="t4b")  # all of it at hand: it goes on from what is still the same
    store.commit([whole_new], session=chat.info)
    assert last(store, "t4b").stem == "t2"
    assert whole(store, "t4b") == (new.ids.own.tolist(), new.text.own)
    below = replace(chat.make("t5", "t3", [user("so")], "yes")[0], parent="t4")
    store.commit([below], session=chat.info)  # what has no ids is passed over
    assert (last(store, "t5").stem, whole(store, "t5")[0]) == ("t2", below.ids.own.tolist())
    assert check(store.file.parent).damages == ()


def test_a_rewritten_turn_stays_an_addition(store: Store, chat: Chat) -> None:
    text, ids = chat.turns["t3"].text.own, chat.turns["t3"].ids.own
    with closing(sqlite3.connect(store.file)) as raw:
        before = raw.execute("SELECT nbytes FROM total WHERE name = 'turns'").fetchone()
    other = Line.of([*ids[:-5].tolist(), 1, 2, 3, 4, 5, 6])
    assert rewritten(chat, "t3", other, f"{text} and more")
    assert kept(store, "t3") == ("t2", 25, len(text) + 9 - len(chat.turns["t2"].text))
    assert whole(store, "t3") == (other.own.tolist(), f"{text} and more")
    with closing(sqlite3.connect(store.file)) as raw:
        after = raw.execute("SELECT nbytes FROM total WHERE name = 'turns'").fetchone()
        assert after[0] - before[0] == 4 + 9
        assert raw.execute("SELECT sum(nbytes) FROM turn").fetchone() == after
    cut = other.cut(len(chat.turns["t2"].ids)).then([7])  # no more at hand than what it adds
    assert rewritten_cut(chat, "t3", cut, Passage(f"{text}!").cut(len(chat.turns["t2"].text)))
    assert whole(store, "t3") == ([*other.own.tolist(), 7], f"{text}!")
    assert not rewritten(chat, "t2", Line.of([1, 2, 3]), "no"), "it was continued"
    assert whole(store, "t2")[0] == chat.turns["t2"].ids.own.tolist()
    assert check(store.file.parent).damages == ()


def rewritten_cut(chat: Chat, turn: str, ids: Line, text: Passage) -> bool:
    """As `rewritten`, with less at hand."""
    stem = chat.turns["t2"].ids
    full = Line.of([*stem.own.tolist(), *ids.own.tolist()])
    fed = full.up_to(len(full) - 1)
    saved = chat.encode(NewCheckpoint("turn", fed, state_of(HYBRID, fed.own), turn=turn))
    assert full.hash(len(full)) == ids.hash(len(ids))
    return chat.store.rewrite(turn, ids, text, saved) is not None


@pytest.mark.parametrize(("between", "stem"), [(_MAX_STEMS - 1, "t1"), (_MAX_STEMS, None)])
def test_what_is_too_far_up_is_not_looked_for(store: Store, between: int, stem: str | None) -> None:
    """Turns of which only the words are known lie between."""
    chat = Chat(store, "s")
    chat.say("t1", None, "hi", "hello")
    names = ["t1", *(f"bare{i}" for i in range(between))]
    bare = [
        NewTurn(name, "s", above, (user("q"),), answer("a"), NOTHING, 0, SILENCE, "stop", True, START)
        for above, name in pairwise(names)
    ]
    store.commit(bare, session=chat.info)
    new, _ = chat.make("far", "t1", [user("next")], "yes")
    cut = replace(new, id="cut", ids=new.ids.cut(20), text=new.text.cut(5))
    store.commit([replace(t, parent=names[-1]) for t in (new, cut)], session=chat.info)
    assert kept(store, "far")[:2] == (stem, 24 if stem else 48)
    assert whole(store, "far") == (new.ids.own.tolist(), new.text.own)
    assert last(store, "cut").stem == stem
    assert whole(store, "cut") == (whole(store, "far") if stem else ([], ""))


def test_siblings_go_on_from_one_another_only_where_they_do(store: Store, chat: Chat) -> None:
    """Turns of one commit: each has its parent's as its stem, never a sibling's."""
    one, _ = chat.make("t4", "t3", [user("next")], "yes")
    other = replace(chat.make("t4b", "t3", [user("next")], "no")[0], parent="t3")
    below = replace(one, id="t5", parent="t4")
    store.commit([one, other, below], session=chat.info)
    assert [kept(store, name)[:2] for name in ("t4", "t4b", "t5")] == [("t3", 24), ("t3", 24), ("t4", 0)]
    assert whole(store, "t5") == whole(store, "t4")


class TestResume:
    def test_what_is_to_be_fed_is_read(self, store: Store, chat: Chat) -> None:
        """As far as the checkpoint, and no further."""
        end = chat.turns["t3"].ids
        prompt = end.cut(len(end)).then([1, 2, 3])
        found, line, stem = resume(store, chat.scope, prompt, "t3", "s")
        assert found is not None
        assert (found.position, line.start, stem) == (71, 48, "t2"), "one id before the end of t3 is to be fed too"
        assert line.own.tolist() == [*end.own[48:].tolist(), 1, 2, 3]
        assert_same(store.load(found.id, HYBRID), state_of(HYBRID, end.own[:71]))
        deeper, line, stem = resume(store, chat.scope, prompt, "t3", "s", skip={found.id})
        assert deeper is not None
        assert (deeper.position, line.start, stem) == (60, 48, "t2")
        skip = {found.id, deeper.id}
        deepest, line, stem = resume(store, chat.scope, prompt, "t3", "s", skip=skip)
        assert deepest is not None
        assert (deepest.position, line.start) == (47, 0), "more is read at once, the further it has to look"
        assert stem is None

    def test_without_a_state_all_ids_are_read(self, store: Store, chat: Chat) -> None:
        store.collect(0)
        end = chat.turns["t3"].ids
        found, line, stem = resume(store, chat.scope, end.cut(len(end)).then([1]), "t3", "s")
        assert (found, line.start, line.own.tolist(), stem) == (None, 0, [*end.own.tolist(), 1], None)

    @settings(max_examples=30, deadline=None)
    @given(st.data())
    def test_it_is_what_all_ids_would_find(self, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
        """However little is at hand, and whatever is passed over."""
        store = new_store(tmp_path_factory.mktemp("store") / "data")
        chat = Chat(store, "s")
        for i in range(7):
            chat.say(f"t{i}", f"t{i - 1}" if i else None, f"q{i}", "a", tokens=data.draw(st.integers(1, 9)))
        turn = data.draw(st.integers(0, 6))
        end = chat.turns[f"t{turn}"].ids
        more = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=3))
        skip = data.draw(st.sets(st.integers(1, 14)))
        found, line, stem = resume(store, chat.scope, end.cut(len(end)).then(more), f"t{turn}", "s", skip=skip)
        expected, _, _ = resume(store, chat.scope, end.then(more), None, "s", skip=skip)
        assert found == expected
        assert line.start <= (found.position if found else 0)
        assert [*end.own.tolist(), *more][line.start :] == line.own.tolist()
        assert line.start == (len(chat.turns[stem].ids) if stem else 0)
        store.close()

    @pytest.mark.parametrize("turn", ["t1", "t2", "t3"])
    def test_what_was_altered_is_not_fed(self, store: Store, chat: Chat, turn: str) -> None:
        store.collect(0)
        alter(store, f"UPDATE turn SET ids = zeroblob(length(ids)) WHERE id = '{turn}'")
        end = chat.turns["t3"].ids
        with pytest.raises(StoreError, match=f"the tokens of turn '{turn}' are not those that were written"):
            resume(store, chat.scope, end.cut(len(end)).then([1]), "t3", "s")

    def test_a_stem_that_is_gone(self, store: Store, chat: Chat) -> None:
        end = chat.turns["t3"].ids
        prompt = end.cut(len(end)).then([1])
        store.delete("s")
        with pytest.raises(StoreError, match="no turn 't3' any more"):
            resume(store, chat.scope, prompt, "t3", "s")


def alter(store: Store, *statements: str) -> None:
    with closing(sqlite3.connect(store.file)) as raw, raw:
        for statement in statements:
            assert raw.execute(statement).rowcount == 1, statement


COLUMNS = [c.name for c in turn_table.columns if c.name not in ("seq", "id", "session", "owner")]


def values(name: str) -> list[str]:
    """Return new values of a column, in SQL."""
    column = turn_table.c[name]
    if isinstance(column.type, LargeBinary):
        found = [f"substr({name}, 2)", "zeroblob(32)", "'text'"]
    elif isinstance(column.type, String):
        found = ["'other'", "CAST(x'ff' AS TEXT)"]
    else:
        found = [f"{name} + 1", "-1", "'text'"]
    if name == "parent":
        found += ["id", "'t3'", "'u1'"]
    return found + (["NULL"] if column.nullable else [])


@cache
def _two_sessions() -> bytes:
    """The database of what is altered."""
    with tempfile.TemporaryDirectory() as folder, closing(new_store(Path(folder) / "data")) as store:
        one, other = Chat(store, "s"), Chat(store, "u")
        other.say("u1", None, "apart", "yes")
        one.say("t1", None, "hi", "hello", system="Be brief.")
        one.say("t2", "t1", "more", "<think>well</think>sure")
        one.say("t3", "t2", "and?", "done")
        store.close()
        return store.file.read_bytes()


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("turn", ["t1", "t2"])
def test_whatever_was_altered_the_words_go_on(tmp_path: Path, turn: str, column: str) -> None:
    """A client's echo says what an altered turn said: it is written down anew, and the conversation is whole."""
    for n, value in enumerate(values(column)):
        (tmp_path / f"{n}").mkdir(mode=0o700)
        (tmp_path / f"{n}" / FILE).write_bytes(_two_sessions())
        store = Store.open(tmp_path / f"{n}")
        one = Chat(store, "s")
        said = conversation(store.path("t2"))
        before = plain(last(store, turn))
        alter(store, f"UPDATE turn SET {column} = {value} WHERE id = '{turn}'")
        if plain(last(store, turn)) == before:
            continue  # it was that already, or the database kept it from becoming anything else
        request = [*said, user("next")]
        _go_on(store, one, request)
        assert check(store.file.parent).damages == () or repair(store.file.parent).repaired
        assert check(store.file.parent).damages == ()
        # Its place is unknown, or no request repeats its words: a repair takes out what cannot be read.
        if column != "parent" and not (turn == "t1" and column in ("items", "answer")):
            assert conversation(store.path("after")) == (*request, answer("then"))
        assert conversation(store.path("u1")) == (user("apart"), answer("yes"))
        store.close()


@pytest.mark.parametrize("value", ["x'ff'", "CAST(x'ff' AS TEXT)"])
@pytest.mark.parametrize("column", ["id", "parent"])
def test_a_tree_is_told_whatever_its_turns_are_called(store: Store, chat: Chat, column: str, value: str) -> None:
    """Lists of turns are written as JSON, in UTF-8."""
    alter(store, f"UPDATE turn SET {column} = {value} WHERE id = 't2'")
    told = [(t.id, t.parent) for t in store.turns("s")]
    assert told[1] == {"id": ("", "t1"), "parent": ("t2", None)}[column]
    assert told[0] == ("t1", None)


def _go_on(store: Store, chat: Chat, request: list[Message]) -> None:
    """As the engine does: look up, hear what was altered, commit."""
    heard: Any = {}
    with store.snapshot() as stored:
        found = stored.echoed(request, "s")
        turn = stored.turn(found.turn) if found else None
        length = found.length if found else 0
        if found is not None and turn is not None and not turn.sound:
            turn, length, heard = stored.heard(request, turn)
    if found is not None:
        assert [m.content for m in found.stored or ()] in ([], [m.content for m in request[: found.length]])
    new = NewTurn(
        "after",
        "s",
        turn.id if turn else None,
        tuple(request[length:]),
        answer("then"),
        Line.of([1, 2, 3]),
        2,
        Passage("whole"),
        "stop",
        True,
        START,
        lineage=LINEAGE,
    )
    store.commit([new], session=chat.info, heard=heard)
    path = store.path("after")
    assert all(t.sound for t in path if t.id in heard)
    assert whole(store, "after") == ([1, 2, 3], "whole")
    if all(t.sound for t in path):
        assert conversation(path) == (*request, answer("then"))
        echoed = echo_of(store, [*request, answer("then"), user("again")])
        assert echoed is not None
        assert echoed.turn == "after"


def test_what_was_heard_is_what_was_said(store: Store, chat: Chat) -> None:
    """Two in a row, with reasoning that the echo leaves out: the client's word is what there is of it."""
    alter(store, *(f"UPDATE turn SET items = x'00' WHERE id = '{name}'" for name in ("t1", "t2")))
    request = [
        Message("system", "Be brief."), user("hi"), answer(" hello"), user("more"), answer("sure"), user("next"),
    ]  # fmt: skip
    with store.snapshot() as stored:
        found = stored.echoed(request)
        assert found is not None
        assert (found.session, found.turn, found.length) == ("s", "t2", 5)
        turn, length, heard = stored.heard(request, stored.turn("t2"))
    assert turn is not None
    assert (turn.id, turn.sound, length) == ("t2", False, 5)
    assert {name: list(said) for name, said in heard.items()} == {"t1": request[:3], "t2": request[3:5]}
    new, _ = chat.make("t4", "t2", [user("next")], "yes")
    with pytest.raises(StoreError, match="'t2' was altered"):
        store.commit([new], session=chat.info)
    assert not last(store, "t2").sound, "all or nothing"
    store.commit([new], session=chat.info, heard=heard)
    assert all(t.sound for t in store.path("t4"))
    assert conversation(store.path("t4"))[:6] == tuple(request)
    assert whole(store, "t2") == ([], "")
    store.commit([replace(new, id="t5")], session=chat.info, heard={"t3": [user("never"), answer("said")]})
    assert last(store, "t3").conversation == (user("and?"), answer("done")), "what is sound is not written anew"


def test_what_was_heard_of_one_whose_beginning_is_broken(store: Store, chat: Chat) -> None:
    """No client repeats the root: the commit is refused, and changes nothing."""
    alter(store, *(f"UPDATE turn SET items = x'00' WHERE id = '{name}'" for name in ("t1", "t2")))
    new, _ = chat.make("t4", "t2", [user("next")], "yes")
    with pytest.raises(StoreError, match="'t1' was altered"):
        store.commit([new], session=chat.info, heard={"t2": [user("more"), answer("sure")]})
    assert [t.sound for t in store.path("t3")] == [False, False, True]


def test_an_altered_turn_further_up_keeps_nobody_from_writing(store: Store, chat: Chat) -> None:
    """A prompt that diverges is compared with what stands above its parent too."""
    alter(store, "UPDATE turn SET ids = zeroblob(length(ids)) WHERE id = 't2'")
    new, _ = chat.make("t4", "t3", [user("next")], "yes")
    other = replace(new, ids=Line.of([1, 2, 3]), text=Passage("other"))
    store.commit([other], session=chat.info)
    assert whole(store, "t4") == ([1, 2, 3], "other")
    assert rewritten(chat, "t4", Line.of([1, 2, 4]), "another")
    assert whole(store, "t4") == ([1, 2, 4], "another")
