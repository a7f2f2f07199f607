"""Who continues what: the decision itself, and that the store looks up the same one."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from keeping import START, Chat, answer, new_store, user

from ssmd.sessions.match import Chain, Conversation, Match, echoed_chains, match
from ssmd.sessions.store import Store
from ssmd.sessions.turn import UnknownSession
from ssmd.text.messages import Message

SYSTEM = Message("system", "Be brief.")


def stored(
    session: str, turn: str, *messages: Message, used: int = 0, head: bool = False, seq: int = 0
) -> Conversation:
    return Conversation(session, turn, messages, START + timedelta(seconds=used), head, seq)


ONE = stored("s", "t1", user("hi"), answer("hello "))
TWO = stored("s", "t2", user("hi"), answer("hello "), user("more"), answer("sure"), head=True)


@pytest.mark.parametrize(
    ("known", "messages", "session", "expected"),
    [
        pytest.param([], [user("hi")], None, (None, None, 1), id="nothing stored"),
        pytest.param([ONE], [user("hi")], None, (None, None, 1), id="the same beginning is no echo"),
        pytest.param([ONE], [user("hi"), answer("hello "), user("x")], None, ("s", "t1", 1), id="continues"),
        pytest.param([ONE], [user("hi"), answer("  hello"), user("x")], None, ("s", "t1", 1), id="echo was trimmed"),
        pytest.param([ONE], [user(" hi"), answer("hello"), user("x")], None, (None, None, 3), id="user text is exact"),
        pytest.param([ONE], [user("hi"), answer("hullo"), user("x")], None, (None, None, 3), id="another answer"),
        pytest.param([ONE, TWO], [user("hi"), answer("hello"), user("x")], None, ("s", "t1", 1), id="a branch"),
        pytest.param([ONE, TWO], [user("hi"), answer("hello"), user("more")], None, ("s", "t1", 1), id="a sibling"),
        pytest.param([TWO], [*TWO.messages, user("x")], None, ("s", "t2", 1), id="deep"),
        pytest.param([ONE, TWO], [*TWO.messages, user("x")], None, ("s", "t2", 1), id="the deepest"),
        pytest.param([ONE], [user("hi"), answer("hello"), user("a"), user("b")], None, ("s", "t1", 2), id="two new"),
        pytest.param([ONE], [SYSTEM, *ONE.messages, user("x")], None, (None, None, 4), id="another system prompt"),
        pytest.param([ONE], [SYSTEM, *ONE.messages, user("x")], "s", ("s", None, 4), id="branch at the root of s"),
        pytest.param([ONE], [user("bye")], "s", ("s", None, 1), id="a session id and nothing in common"),
        pytest.param([ONE], [user("hi"), answer("hello ")], None, (None, None, 2), id="a final answer is input"),
        pytest.param([ONE], [user("hi"), answer("hel")], "s", ("s", None, 2), id="continued answer, known session"),
        pytest.param([ONE], [*ONE.messages, answer("x")], None, ("s", "t1", 1), id="answer after the answer"),
        pytest.param([TWO], [*ONE.messages, user("more"), answer("su")], None, (None, None, 4), id="cut short"),
        pytest.param([ONE], [*ONE.messages, user("x")], "other", ("other", None, 3), id="another session is named"),
        pytest.param(
            [stored("new", "n", *ONE.messages, used=9), stored("old", "o", *ONE.messages, used=5)],
            [*ONE.messages, user("x")],
            None,
            ("new", "n", 1),
            id="used last",
        ),
        pytest.param(
            [stored("new", "n", *ONE.messages, used=9), stored("old", "o", *TWO.messages, used=5)],
            [*TWO.messages, user("x")],
            None,
            ("old", "o", 1),
            id="deeper beats used last",
        ),
        pytest.param(
            [stored("s", "b", *ONE.messages, seq=2), stored("s", "a", *ONE.messages, head=True, seq=1)],
            [*ONE.messages, user("x")],
            None,
            ("s", "a", 1),
            id="equal siblings: the head",
        ),
        pytest.param(
            [stored("s", "a", *ONE.messages, seq=1), stored("s", "b", *ONE.messages, seq=2)],
            [*ONE.messages, user("x")],
            None,
            ("s", "b", 1),
            id="equal siblings: the last written",
        ),
    ],
)
def test_decision(
    known: list[Conversation],
    messages: list[Message],
    session: str | None,
    expected: tuple[str | None, str | None, int],
) -> None:
    found = match(messages, known, session)
    assert (found.session, found.parent, len(found.new)) == expected
    assert len(found.messages) == len(messages)
    assert found.new == tuple(messages)[len(messages) - len(found.new) :]


def test_stored_messages_stand_in_for_their_echoes() -> None:
    found = match([user("hi"), answer("hello"), user("x")], [ONE])
    assert found == Match("s", "t1", (user("hi"), answer("hello "), user("x")), (user("x"),))


texts = st.sampled_from(["", " ", "a", "a ", "\ta\n", "b", "aa"])
messages_ = st.builds(
    Message, st.sampled_from(["system", "user", "assistant"]), texts, st.sampled_from([None, "", "a", "b"])
)


@given(st.lists(messages_, max_size=4), st.lists(messages_, max_size=4))
def test_chain_is_equal_exactly_for_echoes(a: list[Message], b: list[Message]) -> None:
    alike = len(a) == len(b) and all(x.same_as(y) for x, y in zip(a, b, strict=True))
    assert (Chain().then(a).digest() == Chain().then(b).digest()) == alike


@given(st.lists(messages_, max_size=6))
def test_echoed_chains_are_those_of_the_answers_but_the_last_message(messages: list[Message]) -> None:
    expected = [Chain().then(messages[: i + 1]).digest() for i, m in enumerate(messages[:-1]) if m.role == "assistant"]
    assert echoed_chains(messages) == expected


turns_ = st.lists(
    # (which session, which earlier turn of it is the parent, what was said, what was answered)
    st.tuples(st.integers(0, 2), st.integers(0, 5), st.sampled_from("xy"), st.sampled_from(["1", " 1", "2"])),
    min_size=1,
    max_size=10,
)


@settings(max_examples=60, deadline=None)
@given(turns_, st.lists(st.sampled_from(["x", "y", "1", "2 "]), max_size=7), st.sampled_from([None, "s0", "s1"]))
def test_the_store_looks_up_the_match(
    tmp_path_factory: pytest.TempPathFactory,
    turns: list[tuple[int, int, str, str]],
    said: Sequence[str],
    session: str | None,
) -> None:
    request = [answer(t) if i % 2 else user(t) for i, t in enumerate(said)]
    store = new_store(tmp_path_factory.mktemp("store") / "data")
    try:
        everything, chats = _grow(store, turns)
        if session is not None and session not in chats:
            with pytest.raises(UnknownSession, match=session):
                store.candidates(request, session)
            return
        assert match(request, store.candidates(request, session), session) == match(request, everything, session)
    finally:
        store.close()


def test_the_deepest_wins_over_the_one_used_last(tmp_path: Path) -> None:
    """In the store too, whose query puts the best first."""
    store = new_store(tmp_path / "data")
    _grow(store, [(2, 0, "x", "1"), (0, 0, "x", "1"), (0, 1, "y", "2"), (1, 0, "x", "1"), (2, 0, "z", "1")])
    request = [user("x"), answer("1"), user("y"), answer("2"), user("x")]
    found = match(request, store.candidates(request))
    assert (found.session, found.parent) == ("s0", "t2")
    found = match(request[:3], store.candidates(request[:3]))
    assert (found.session, found.parent) == ("s2", "t0"), "of equally deep ones that of the session used last"
    store.close()


def _grow(store: Store, turns: list[tuple[int, int, str, str]]) -> tuple[list[Conversation], dict[str, Chat]]:
    """Write the turns; return each as a conversation, as match would see it with everything in memory."""
    chats: dict[str, Chat] = {}
    paths: dict[str, tuple[Message, ...]] = {}
    for n, (which, above, said, reply) in enumerate(turns):
        chat = chats.setdefault(f"s{which}", Chat(store, f"s{which}"))
        earlier = [None, *chat.turns]
        parent = earlier[above % len(earlier)]
        # Sessions are interleaved, so that the one used last changes.
        chat.clock = START + timedelta(seconds=n)
        new, _ = chat.make(f"t{n}", parent, [user(said)], reply)
        store.commit([new], session=chat.info)
        chat.remember(new, None)
        paths[new.id] = (*(paths[parent] if parent else ()), user(said), answer(reply))
    heads = {s.id: s for s in store.sessions()}
    found = [
        Conversation(
            t.session, t.id, paths[t.id], heads[t.session].last_used_at, heads[t.session].head == t.id, int(t.id[1:])
        )
        for chat in chats.values()
        for t in chat.turns.values()
    ]
    return found, chats


def test_ten_thousand_sessions_do_not_slow_it_down(tmp_path: Path) -> None:
    """Looked up by index, not by walking: the plan must not scan the turns."""
    from sqlalchemy import text

    store = Store.open(tmp_path / "data")
    with store.reading() as connection:
        plan = connection.execute(
            text("EXPLAIN QUERY PLAN SELECT id FROM turn WHERE chain IN (x'00', x'01') ORDER BY length DESC")
        )
        assert any("ix_turn_chain" in row.detail for row in plan)
    store.close()
