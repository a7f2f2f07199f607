"""The match of a request: the decision itself, and that the store looks up the same one."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from keeping import START, Chat, answer, echo_of, new_store, user
from matching import Conversation, Match, looked_up, match
from sqlalchemy import event

from ssmd.sessions.line import NOTHING, SILENCE
from ssmd.sessions.match import Chain, Echo, continues
from ssmd.sessions.rows.snapshot import read_echoed
from ssmd.sessions.rows.turns import to_micros
from ssmd.sessions.store import Store
from ssmd.sessions.turn import EVERYBODY, Domain, UnknownSession
from ssmd.text.messages import Message, ToolCall

SYSTEM = Message("system", "Be brief.")


def stored(
    session: str, turn: str, *messages: Message, used: int = 0, head: bool = False, seq: int = 0
) -> Conversation:
    return Conversation(session, turn, messages, START + timedelta(seconds=used), head, seq)


ONE = stored("s", "t1", user("hi"), answer("hello "))
TWO = stored("s", "t2", user("hi"), answer("hello "), user("more"), answer("sure"), head=True)


@pytest.mark.parametrize(
    ("there", "messages", "session", "expected"),
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
    tmp_path: Path,
    there: list[Conversation],
    messages: list[Message],
    session: str | None,
    expected: tuple[str | None, str | None, int],
) -> None:
    """Of the model, and of the store."""
    found = match(messages, there, session)
    assert (found.session, found.parent, len(found.new)) == expected
    assert len(found.messages) == len(messages)
    assert found.new == tuple(messages)[len(messages) - len(found.new) :]
    store = new_store(tmp_path / "data")
    there = _write(store, there)
    if session is not None and session not in {c.session for c in there}:
        with pytest.raises(UnknownSession, match=session):
            echo_of(store, messages, session)
    else:
        assert looked_up(store, messages, session) == match(messages, there, session)
    store.close()


def _write(store: Store, there: Sequence[Conversation]) -> list[Conversation]:
    """Write these conversations, with their times and heads, and those they go on from. Returns all of them."""
    made = list(there)
    chats: dict[str, Chat] = {}
    written: dict[tuple[str, tuple[Message, ...]], str] = {}
    for c in sorted(there, key=lambda c: (c.seq, len(c.messages))):
        chat = chats.setdefault(c.session, Chat(store, c.session))
        parent, at = None, 0
        for end in (i for i, m in enumerate(c.messages, 1) if m.role == "assistant"):
            path = (c.session, c.messages[:end])
            if end == len(c.messages) or path not in written:
                name = c.turn if end == len(c.messages) else f"{c.turn}-{end}"
                new, _ = chat.make(name, parent, c.messages[at : end - 1], c.messages[end - 1].content)
                store.commit([new], session=chat.info)
                chat.remember(new, None)
                written[path] = name
                if end < len(c.messages):
                    made.append(replace(c, turn=name, messages=c.messages[:end], is_head=False))
            parent, at = written[path], end
    with closing(sqlite3.connect(store.file)) as raw, raw:
        for c in there:
            raw.execute("UPDATE session SET last_used_at = ? WHERE id = ?", (to_micros(c.last_used_at), c.session))
            if c.is_head:
                raw.execute("UPDATE session SET head = ? WHERE id = ?", (c.turn, c.session))
    return made


def test_stored_messages_stand_in_for_their_echoes(tmp_path: Path) -> None:
    request = [user("hi"), answer("hello"), user("x")]
    found = match(request, [ONE])
    assert found == Match("s", "t1", (user("hi"), answer("hello "), user("x")), (user("x"),))
    store = new_store(tmp_path / "data")
    _write(store, [ONE])
    assert looked_up(store, request) == found
    store.close()


texts = st.sampled_from(
    ["", " ", "a", "a ", "\ta\n", "b", "aa", "<think>x</think>a", "<think>y</think>a ", "x</think>a", "</think>"]
)
messages_ = st.builds(
    Message, st.sampled_from(["system", "user", "assistant"]), texts, st.sampled_from([None, "", "a", "b"])
)


said_ = st.lists(messages_, max_size=4).map(lambda messages: [*messages, answer("end")])  # a chain ends in an answer


@settings(max_examples=300)
@given(said_, said_)
def test_a_chain_tells_echoes_from_others(a: list[Message], b: list[Message]) -> None:
    """Possible echoes have one hash of what was said; those that leave nothing out have one hash of the whole."""
    one, other = Chain().then(a), Chain().then(b)
    alike = len(a) == len(b) and all(x.same_as(y) for x, y in zip(a, b, strict=True))
    assert alike <= (one.said == other.said)
    plain = [[(m.role, m.name, m.said) for m in messages] for messages in (a, b)]
    assert (one.said == other.said) == (plain[0] == plain[1])
    exact = [
        [(m.role, m.name, m.content.strip() if m.role == "assistant" else m.content) for m in messages]
        for messages in (a, b)
    ]
    assert (one.whole == other.whole) == (exact[0] == exact[1])
    assert (one.whole == one.said) or any("</think>" in m.content for m in a if m.role == "assistant")
    assert continues([*b, user("more")], a) == alike
    assert not continues(b, a), "it must add something"


@given(st.lists(messages_, max_size=6))
def test_an_echo_has_chains_of_answers_except_the_last_message(messages: list[Message]) -> None:
    ends = [i + 1 for i, m in enumerate(messages[:-1]) if m.role == "assistant"]
    echo = Echo.of(messages)
    assert list(echo.lengths) == ends
    assert list(echo.chains) == [Chain().then(messages[:end]) for end in ends]


@given(said_, said_, said_)
def test_a_chain_is_carried_on(a: list[Message], b: list[Message], c: list[Message]) -> None:
    """However it is cut, at answers."""
    assert Chain().then([*a, *b, *c]) == Chain().then(a).then(b).then(c) == Chain().then([*a, *b]).then(c)


ANSWERS = ["1", " 1", "2", "<think>a</think>1", "<think>b</think>1"]
turns_ = st.lists(
    # (which session, which earlier turn of it is the parent, what was said, what was answered)
    st.tuples(st.integers(0, 2), st.integers(0, 5), st.sampled_from("xy"), st.sampled_from(ANSWERS)),
    min_size=1,
    max_size=10,
)


@settings(max_examples=50, deadline=None)
@given(
    turns_,
    st.lists(st.sampled_from(["x", "y", "1", "2 ", "<think>a</think>1"]), max_size=7),
    st.sampled_from([None, "s0", "s1"]),
)
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
                echo_of(store, request, session)
            return
        assert looked_up(store, request, session) == match(request, everything, session)
    finally:
        store.close()


@pytest.mark.parametrize("number", ["1790000000000000001", "1790000000000000100"])
def test_of_calls_that_are_one_double_the_verbatim_one_is_found(tmp_path: Path, number: str) -> None:
    """Also below them, where the answers are the same."""
    store = new_store(tmp_path / "data")
    chat = Chat(store, "s")
    for n, one in enumerate(("1790000000000000001", "1790000000000000100")):
        called = replace(answer(""), tool_calls=(ToolCall("c", "f", f'{{"id":{one}}}'),))
        new = replace(chat.make(f"a{n}", None, [user("hi")], "")[0], answer=called)
        below, _ = chat.make(f"b{n}", None, [Message("tool", "ok", tool_call_id="c")], "done")
        store.commit([new, replace(below, parent=new.id, ids=NOTHING, text=SILENCE)], session=chat.info)
    which = "0" if number.endswith("1") else "1"
    said = [user("hi"), replace(answer(""), tool_calls=(ToolCall("d", "f", f'{{"id":{number}}}'),))]
    said += [Message("tool", "ok", tool_call_id="d"), answer("done"), user("more")]
    for length, name in ((3, "a"), (5, "b")):
        found = echo_of(store, said[:length])
        assert found is not None
        assert found.turn == name + which
    store.close()


def test_the_deepest_wins_over_the_one_used_last(tmp_path: Path) -> None:
    """In the store too, whose query puts the best first."""
    store = new_store(tmp_path / "data")
    _grow(store, [(2, 0, "x", "1"), (0, 0, "x", "1"), (0, 1, "y", "2"), (1, 0, "x", "1"), (2, 0, "z", "1")])
    request = [user("x"), answer("1"), user("y"), answer("2"), user("x")]
    found = looked_up(store, request)
    assert (found.session, found.parent) == ("s0", "t2")
    found = looked_up(store, request[:3])
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
    """Looked up by index, not by walking: the plans must not scan the turns, nor the sessions."""
    store = new_store(tmp_path / "data")
    _write(store, [TWO])
    store.fork("s", "t2")
    asked: list[tuple[str, Any]] = []
    with store.reading() as connection:
        event.listen(connection, "before_cursor_execute", lambda *given: asked.append((given[2], given[3])))
        for session in (None, "s"):
            for domain in (EVERYBODY, Domain("a", ("a", ""))):
                assert read_echoed(connection, [*TWO.messages, user("x")], session, domain) is not None
        assert len(asked) >= 8
        for statement, given in list(asked):
            plan = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", given).all()
            scanned = [row.detail for row in plan if re.match(r"SCAN (turn|session)\b", row.detail)]
            assert scanned == [], statement
    store.close()
