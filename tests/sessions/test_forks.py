"""Forks: a session that begins at a turn of another one, holds nothing of its own, and outlives it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hostile import join, seal, split
from hypothesis import given, settings
from hypothesis import strategies as st
from keeping import HYBRID, LINEAGE, VOCABULARY, Chat, answer, assert_same, find, new_store, state_of, user, whole
from matching import Conversation, looked_up, match
from sqlalchemy import event, func, select, update

from ssmd.sessions.files.transfer import LocalModel, export_session, import_session
from ssmd.sessions.rows.schema import metadata
from ssmd.sessions.rows.schema import session as session_table
from ssmd.sessions.rows.turns import to_micros
from ssmd.sessions.store import Store
from ssmd.sessions.turn import Session, StoreError, UnknownSession, UnknownTurn, conversation


@pytest.fixture
def chat(store: Store) -> Chat:
    """t1 - t2 - t3, and t2b beside t2."""
    chat = Chat(store, "s")
    chat.say("t1", None, "hi", "hello", system="Be brief.")
    chat.say("t2", "t1", "more", "sure")
    chat.say("t3", "t2", "and?", "done")
    chat.say("t2b", "t1", "less", "fine")
    return chat


def forked(chat: Chat, turn: str | None = None) -> Chat:
    """The fork as a chat that goes on from the other's turns."""
    made = chat.store.fork(chat.info.id, turn)
    fork = Chat(chat.store, made.id, chat.spec)
    fork.info = made.info
    fork.turns = {t.id: replace(chat.turns[t.id], session=made.id) for t in chat.store.turns(made.id)}
    fork.ends = {t: chat.ends[t] for t in fork.turns}
    fork.clock = datetime.now(UTC)
    return fork


def counts(store: Store) -> dict[str, int]:
    with store.reading() as connection:
        return {
            t.name: connection.execute(select(func.count()).select_from(t)).scalar_one() for t in metadata.sorted_tables
        }


def ids_of(store: Store, session: str) -> list[str]:
    turns = store.turns(session)
    assert {t.session for t in turns} == {session}
    assert store.session(session).turns == len(turns)
    return [t.id for t in turns]


def resumes(chat: Chat, turn: str) -> bool:
    """Report if the turn's own checkpoint is found for a continuation, and is the state of its ids."""
    ids = chat.turns[turn].ids
    found = find(chat.store, chat.scope, [*ids.own.tolist(), 1], chat.info.id)
    if found is None or found.position != len(ids) - 1:
        return False
    assert_same(chat.store.load(found.id, chat.spec), state_of(chat.spec, ids.own[:-1]))
    return True


def test_a_fork_is_one_row(store: Store, chat: Chat) -> None:
    before = counts(store)
    made = store.fork("s", "t2")
    after = counts(store)
    assert {name: after[name] - before[name] for name in after if after[name] != before[name]} == {"session": 1}
    assert (made.head, made.base, made.turns, made.nbytes, made.title) == ("t2", "t2", 2, 0, "hi")
    assert made.info == replace(chat.info, id=made.id)
    assert made.last_used_at > store.session("s").last_used_at
    assert ids_of(store, made.id) == ["t1", "t2"]
    assert store.session(made.id) == made
    assert store.session("s").base is None


def test_the_default_is_the_head(store: Store, chat: Chat) -> None:
    assert store.fork("s").head == "t2b"


def test_both_go_on_by_themselves(store: Store, chat: Chat) -> None:
    fork = forked(chat, "t2")
    fork.say("f1", "t2", "else?", "yes")
    fork.say("f2", "f1", "so", "it is")
    fork.say("f1b", "t1", "edited", "there")  # an edit of what it inherited
    chat.say("t4", "t3", "bye", "bye")
    assert ids_of(store, fork.info.id) == ["t1", "t2", "f1", "f2", "f1b"]
    assert ids_of(store, "s") == ["t1", "t2", "t3", "t2b", "t4"]
    assert [t.id for t in store.path("f2")] == ["t1", "t2", "f1", "f2"]
    assert all(resumes(fork, t) for t in ("t2", "f1", "f2", "f1b"))
    assert store.session(fork.info.id).head == "f1b"
    assert store.session("s").head == "t4"
    rebuilt = store.turns(fork.info.id)[3]
    assert (rebuilt.id, rebuilt.stem) == ("f2", "f1")
    assert whole(store, "f2") == (fork.turns["f2"].ids.own.tolist(), fork.turns["f2"].text.own)


def test_what_a_fork_did_not_inherit_is_not_its_own(store: Store, chat: Chat) -> None:
    fork = forked(chat, "t2")
    for other in ("t3", "t2b"):
        fork.ends[other], fork.turns[other] = chat.ends[other], chat.turns[other]
        with pytest.raises(StoreError, match="has a parent in 's'"):
            fork.say("f1", other, "else?", "yes")
        with pytest.raises(UnknownTurn, match=f"has no turn '{other}'"):
            store.fork(fork.info.id, other)
    fork.say("f1", "t2", "else?", "yes")
    chat.ends["f1"], chat.turns["f1"] = fork.ends["f1"], fork.turns["f1"]
    with pytest.raises(StoreError, match="has a parent in"):
        chat.say("t9", "f1", "mine?", "no")
    with pytest.raises(UnknownTurn):
        store.fork("s", "f1")


@pytest.mark.parametrize("bad", ["", "../x", "a b", "x" * 65, "t1\n"])
def test_ids_that_are_none(store: Store, chat: Chat, bad: str) -> None:
    with pytest.raises(StoreError, match="not allowed"):
        store.fork("s", bad)
    with pytest.raises(UnknownSession):
        store.fork(bad)
    assert len(store.sessions()) == 1


def test_a_turn_that_was_removed(store: Store, chat: Chat) -> None:
    Chat(store, "other").say("o1", None, "hi", "hello")
    store.delete("other")
    with pytest.raises(UnknownTurn, match="has no turn 'o1'"):
        store.fork("s", "o1")
    with pytest.raises(UnknownSession, match="no session 'other'"):
        store.fork("other", "o1")


def test_the_origin_is_removed(store: Store, chat: Chat) -> None:
    fork = forked(chat, "t2")
    fork.say("f1", "t2", "else?", "yes")
    seen = [(t.id, whole(store, t.id)) for t in store.turns(fork.info.id)]
    store.delete("s")
    assert [(t.id, whole(store, t.id)) for t in store.turns(fork.info.id)] == seen
    assert all(resumes(fork, t) for t in ("t1", "t2", "f1"))
    with pytest.raises(UnknownSession):
        store.path("t3")
    fork.say("f2", "f1", "on", "and on")
    assert ids_of(store, fork.info.id) == ["t1", "t2", "f1", "f2"]
    store.delete(fork.info.id)
    assert not any(n for name, n in counts(store).items() if name not in ("layout", "total"))


def test_the_fork_is_removed(store: Store, chat: Chat) -> None:
    before, bytes_before = counts(store), store.bytes_stored()
    fork = forked(chat, "t2")
    fork.say("f1", "t2", "else?", "yes")
    store.delete(fork.info.id)
    assert counts(store) == before
    assert store.bytes_stored() == bytes_before
    assert ids_of(store, "s") == ["t1", "t2", "t3", "t2b"]


def test_removing_a_fork_without_turns_does_not_visit_the_others(store: Store, chat: Chat) -> None:
    forks = [store.fork(chat.info.id).info.id for _ in range(50)]
    said: list[str] = []
    event.listen(store._engine, "before_cursor_execute", lambda *args: said.append(args[2]))
    store.delete(forks[7])
    assert sum("UPDATE turn" in text for text in said) <= 1
    assert len(store.sessions()) == 50


def test_forks_of_forks_in_any_order_of_removal(store: Store, chat: Chat) -> None:
    one = forked(chat, "t2")
    one.say("f1", "t2", "else?", "yes")
    two = forked(one, "f1")
    two.say("g1", "f1", "deeper", "still")
    three = forked(two, "t1")  # at what the first of them owns
    three.say("h1", "t1", "early", "bird")
    assert ids_of(store, two.info.id) == ["t1", "t2", "f1", "g1"]
    store.delete("s")
    store.delete(one.info.id)
    assert ids_of(store, two.info.id) == ["t1", "t2", "f1", "g1"]
    assert ids_of(store, three.info.id) == ["t1", "h1"]
    assert all(resumes(two, t) for t in two.turns)
    store.delete(two.info.id)
    assert ids_of(store, three.info.id) == ["t1", "h1"]
    assert counts(store)["turn"] == 2
    assert all(resumes(three, t) for t in three.turns)


def test_which_turns_resume_at_once(store: Store, chat: Chat) -> None:
    fork = forked(chat, "t2")
    new, checkpoints = fork.make("f1", "t2", [user("cut")], "sho")
    store.commit([new], [fork.encode(checkpoints[0])], session=fork.info)  # no state of its end
    assert store.resumable(fork.info.id) == {"t1", "t2"}
    assert store.resumable("s") == {"t1", "t2", "t3", "t2b"}
    with pytest.raises(UnknownSession):
        store.resumable("nobody")


def test_imported_states_serve_the_fork_too(store: Store, chat: Chat, tmp_path: Path) -> None:
    export_session(store, "s", tmp_path / "s.ssmd")
    other = new_store(tmp_path / "other")
    import_session(other, tmp_path / "s.ssmd", local={LINEAGE: LocalModel("made-up", HYBRID, VOCABULARY)})
    made = other.fork("s", "t2b")
    ids = [*chat.turns["t2b"].ids.own.tolist(), 1]
    found = find(other, chat.scope, ids, made.id)
    assert found is not None
    assert (found.origin, found.position) == ("s", len(ids) - 2)
    assert find(other, chat.scope, ids, None) is None
    other.delete("s")
    assert find(other, chat.scope, ids, made.id) == found
    assert other.taken("s"), "its id stays that of the import"
    other.close()


def test_a_later_import_of_an_id_serves_no_fork_of_the_first(store: Store, chat: Chat, tmp_path: Path) -> None:
    export_session(store, "s", tmp_path / "text.ssmd", states="none")
    export_session(store, "s", tmp_path / "forged.ssmd")
    other = new_store(tmp_path / "other")
    import_session(other, tmp_path / "text.ssmd")
    made = other.fork("s", "t2b")
    other.delete("s")
    parts = split((tmp_path / "forged.ssmd").read_bytes())
    document = re.sub(r'"(t\d\w?)"', r'"x\1"', json.dumps(parts.document))  # turns of other names
    (tmp_path / "forged.ssmd").write_bytes(seal(join(replace(parts, document=json.loads(document)))))
    done = import_session(other, tmp_path / "forged.ssmd")
    assert done.checkpoints
    assert done.renamed, "the fork would take its states for those that it began with"
    assert find(other, chat.scope, [*chat.turns["t3"].ids.own.tolist(), 1], made.id) is None
    other.close()


def test_a_fork_is_exported_whole(store: Store, chat: Chat, tmp_path: Path) -> None:
    fork = forked(chat, "t2")
    fork.say("f1", "t2", "else?", "yes")
    done = export_session(store, fork.info.id, tmp_path / "f.ssmd")
    assert (done.turns, done.checkpoints) == (3, 2)
    other = new_store(tmp_path / "other")
    import_session(other, tmp_path / "f.ssmd", local={LINEAGE: LocalModel("made-up", HYBRID, VOCABULARY)})
    assert ids_of(other, fork.info.id) == ["t1", "t2", "f1"]
    assert other.session(fork.info.id).base is None
    other.close()


def echo(store: Store, turn: str, text: str = "next") -> list[Any]:
    return [*conversation(store.path(turn)), user(text)]


def used(store: Store, **seconds: int) -> None:
    """Set when sessions were used last."""
    from ssmd.sessions.rows import database

    with database.writing(store._engine, store.file) as connection:
        for session, at in seconds.items():
            values = {"last_used_at": to_micros(datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=at))}
            connection.execute(update(session_table).where(session_table.c.id == session).values(values))


def test_an_echo_of_both_goes_to_the_one_used_last(store: Store, chat: Chat) -> None:
    made = store.fork("s", "t2")
    for inside in ("t2", "t1"):
        request = echo(store, inside)
        for first, second in ((made.id, "s"), ("s", made.id)):
            used(store, **{first: 2, second: 1})
            found = looked_up(store, request)
            assert (found.session, found.parent) == (first, inside)
            for named in ("s", made.id):
                found = looked_up(store, request, named)
                assert (found.session, found.parent) == (named, inside)
    used(store, **{made.id: 9, "s": 1})
    request = echo(store, "t3")
    assert looked_up(store, request).session == "s", "deeper than what the fork has"
    found = looked_up(store, request, made.id)
    assert (found.session, found.parent) == (made.id, "t2")


moves = st.lists(
    st.tuples(
        st.sampled_from(["say", "say", "say", "fork", "delete"]),
        st.integers(0, 3),  # which session
        st.integers(0, 5),  # which of its turns
        st.sampled_from("xy"),
        st.sampled_from(["1", " 1", "2"]),
    ),
    min_size=1,
    max_size=14,
)


@settings(max_examples=30, deadline=None)
@given(moves, st.lists(st.sampled_from(["x", "y", "1", "2 "]), max_size=7), st.integers(-1, 3))
def test_the_store_is_the_model(
    tmp_path_factory: pytest.TempPathFactory, moves: list[Any], said: list[str], which: int
) -> None:
    """Against sessions that are dicts of turns, where a fork is a copy: the same trees, the same match."""
    store = new_store(tmp_path_factory.mktemp("store") / "data")
    trees: dict[str, dict[str, tuple[Any, ...]]] = {}  # session -> turn -> its conversation
    heads: dict[str, str] = {}
    last_used: dict[str, int] = {}
    for n, (what, a, b, question, reply) in enumerate(moves):
        names = list(trees)
        name = names[a % len(names)] if names and (a or what != "say") else f"s{n}"
        if what == "fork" and names:
            turn = list(trees[name])[b % len(trees[name])]
            name, origin = store.fork(name, turn).id, name
            trees[name] = {
                t: c for t, c in trees[origin].items() if c == trees[origin][turn][: len(c)] and _on(store, t, turn)
            }
            heads[name] = turn
        elif what == "delete" and names:
            store.delete(name)
            del trees[name], heads[name], last_used[name]
            continue
        elif what == "say":
            mine = trees.setdefault(name, {})
            parent = [None, *mine][b % (len(mine) + 1)] if mine else None
            chat = Chat(store, name)
            if parent:
                chat.remember(store.path(parent)[-1], None)
            new, _ = chat.make(f"t{n}", parent, [user(question)], reply)
            store.commit([new], session=store.session(name).info if mine else chat.info)
            mine[new.id] = (*(mine[parent] if parent else ()), user(question), answer(reply))
            heads[name] = new.id
        else:
            continue
        last_used[name] = n
        used(store, **last_used)
    order = [t.id for name in trees for t in store.turns(name)]
    assert {name: set(ids_of(store, name)) for name in trees} == {name: set(tree) for name, tree in trees.items()}
    stored: dict[str, Session] = {s.id: s for s in store.sessions()}
    assert {name: s.head for name, s in stored.items()} == heads
    everything = [
        Conversation(name, t, messages, stored[name].last_used_at, heads[name] == t, int(t[1:]))
        for name, tree in trees.items()
        for t, messages in tree.items()
    ]
    request = [answer(t) if i % 2 else user(t) for i, t in enumerate(said)]
    session = list(trees)[which % len(trees)] if which >= 0 and trees else None
    assert looked_up(store, request, session) == match(request, everything, session)
    assert len(set(order)) == counts(store)["turn"], "a turn that no session has was left"
    store.close()


def _on(store: Store, turn: str, end: str) -> bool:
    return turn in [t.id for t in store.path(end)]
