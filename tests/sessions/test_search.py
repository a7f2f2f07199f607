"""Search and titles: which sessions a word finds, in what order, how it goes on, and what it costs."""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest
from keeping import Chat, user

from ssmd.sessions.files.transfer import export_session, import_session
from ssmd.sessions.rows import sessions
from ssmd.sessions.rows.database import FILE
from ssmd.sessions.store import Store
from ssmd.sessions.turn import Domain, StoreError, UnknownSession


@pytest.fixture
def talks(store: Store) -> Store:
    """Three sessions; `c` was used last."""
    a = Chat(store, "a")
    a.say("a1", None, "What is the capital of France?", "Paris, on the Seine.", system="You are a guide.")
    a.say("a2", "a1", "And of Italy?", 'Rome. They call it "eternal".\nA\\B')
    b = Chat(store, "b")
    b.say("b1", None, "Où est le café?", "ЗДЕСЬ есть кафе; Straße 日本語")
    c = Chat(store, "c")
    c.say("c1", None, "hi", "hello, user of France")
    c.say("c2", None, "hi again", "role content assistant message")
    return store


def found(store: Store, text: str, limit: int = 100, after: str | None = None) -> list[str]:
    return [session.id for session in store.search(text, limit, after).sessions]


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("paris", ["a"]),
        ("FRANCE", ["c", "a"]),
        ("franc", ["c", "a"]),
        ("france rome", ["a"]),
        ("rome france", ["a"]),
        ("guide", ["a"]),
        ("france nowhere", []),
        ("café", ["b"]),
        ("CAFÉ", ["b"]),
        ("кафе", ["b"]),
        ("Кафе", ["b"]),
        ("здесь", ["b"]),
        ("日本", ["b"]),
        ("straße", ["b"]),
        ('"eternal".', ["a"]),
        ("a\\b", ["a"]),
        ("\\", ["a"]),
        ("%", []),
        ("_", []),
        ("type", []),
        ("message", ["c"]),
        ("rome. they\tcall", ["a"]),
        ("'); DROP TABLE turn; --", []),
        ("x" * 200, []),
    ],
)
def test_words_find_sessions(text: str, ids: list[str], talks: Store) -> None:
    assert found(talks, text) == ids


def test_titles_are_found_too_also_those_that_were_given(talks: Store) -> None:
    talks.rename("b", "Coffee in Paris")
    assert found(talks, "coffee") == ["b"]
    assert found(talks, "paris") == ["b", "a"]
    assert found(talks, "coffee кафе") == ["b"], "one word in the title, the other in a turn"


def test_it_goes_on_where_it_ended(store: Store) -> None:
    for i in range(25):
        Chat(store, f"s{i:02}").say(f"t{i}", None, f"river {i}", "yes" if i % 5 else "a bridge")
    last = [f"s{i:02}" for i in reversed(range(25))]
    pages, after = list[list[str]](), None
    while True:
        page = store.search("river", 10, after)
        pages.append([session.id for session in page.sessions])
        after = page.after
        if after is None:
            break
    assert pages == [last[:10], last[10:20], last[20:]]
    assert found(store, "bridge", 2) == ["s20", "s15"]
    assert found(store, "bridge", 9, "s15") == ["s10", "s05", "s00"]
    assert store.search("bridge", 5).after is None, "there are five"
    with pytest.raises(UnknownSession):
        store.search("bridge", 5, "nobody")


def test_a_search_that_takes_too_long_says_where_it_is(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "TURNS_AT_ONCE", 20)
    for i in range(6):
        chat = Chat(store, f"s{i}")
        parent = None
        for n in range(9):  # more than one portion in all
            chat.say(f"t{i}-{n}", parent, f"river {n}", "yes" if i else "a bridge", tokens=1)
            parent = f"t{i}-{n}"
    page, pages = store.search("bridge", 10, within_s=0), 1
    assert page.sessions == ()
    while page.after is not None:
        page, pages = store.search("bridge", 10, page.after, within_s=0), pages + 1
    assert [session.id for session in page.sessions] == ["s0"]
    assert pages == 3


def test_a_fork_has_what_it_began_with(talks: Store) -> None:
    early, late = talks.fork("a", "a1").id, talks.fork("a", "a2").id
    assert found(talks, "seine") == [late, early, "a"]
    assert found(talks, "rome") == [late, "a"]
    talks.delete("a")
    assert found(talks, "seine") == [late, early]


def test_another_ones_are_not_found(store: Store) -> None:
    for name in ("alice", "bob", ""):
        Chat(store, f"of-{name}", owner=name).say(f"t-{name}", None, "the river", "yes")
    assert found(store.of(Domain("bob", ("bob",))), "river") == ["of-bob"]
    assert set(found(store.of(Domain("alice", ("alice", ""))), "river")) == {"of-alice", "of-"}
    with pytest.raises(UnknownSession):
        store.of(Domain("bob", ("bob",))).rename("of-alice", "mine")
    assert store.session("of-alice").title == "the river"


def test_what_was_altered_hides_nothing_else(talks: Store, tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "data" / FILE)) as other, other:
        other.execute("UPDATE turn SET answer = x'ff00' WHERE id = 'a1'")
        other.execute("UPDATE turn SET items = x'7b' WHERE id = 'b1'")
        other.execute("UPDATE session SET title = x'ff' WHERE id = 'c'")
    assert found(talks, "rome") == ["a"]
    assert found(talks, "seine") == []
    assert found(talks, "france") == ["c", "a"], "by its title"


def test_a_search_keeps_nobody_from_writing(store: Store) -> None:
    """Between portions a turn is committed; what was removed meanwhile is not told."""
    for i in range(3):
        Chat(store, f"s{i}").say(f"t{i}", None, "river", "yes")
    seen: list[int] = []
    reading = store.reading

    def beside():  # type: ignore[no-untyped-def]
        seen.append(len(seen))
        if len(seen) == 2:
            store.delete("s1")
        return reading()

    store.reading = beside  # type: ignore[method-assign]
    assert found(store, "river") == ["s2", "s0"]


def test_ten_thousand_sessions_are_looked_through(store: Store, tmp_path: Path) -> None:
    """Within seconds, also on a busy machine: rows are copied, as to commit so many takes minutes."""
    Chat(store, "s").say("t", None, "What do they tell of the river? " * 20, "There was a bridge. " * 50)
    with closing(sqlite3.connect(tmp_path / "data" / FILE)) as other, other:
        for table, key in (("session", "id"), ("turn", "id")):
            names = [row[1] for row in other.execute(f"PRAGMA table_info({table})")]
            kept = {"id": "id || '-' || n", "session": "session || '-' || n", "head": "head || '-' || n"}
            kept |= {"root": "root || '-' || n", "last_used_at": "last_used_at - n", "seq": "NULL"}
            values = ", ".join(kept.get(name, name) for name in names)
            numbers = "WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c WHERE n < 9999)"
            other.execute(
                f"INSERT INTO {table} {numbers} SELECT {values} FROM {table}, c WHERE {table}.{key} IN ('s', 't')"
            )
    began = time.monotonic()
    assert found(store, "nothing of that") == []
    assert len(found(store, "bridge river", 10)) == 10
    assert time.monotonic() - began < 20


# Titles.


def test_a_title_is_given_and_taken_back(talks: Store) -> None:
    assert talks.session("a").title == "What is the capital of France?"
    assert talks.rename("a", "Capitals").title == "Capitals"
    fork = talks.fork("a", "a1")
    assert fork.title == "Capitals"
    chat = Chat(talks, "a")
    new, _ = chat.make("a3", None, [user("something else")], "yes")
    talks.commit([new], session=chat.info)
    assert talks.session("a").title == "Capitals"
    assert talks.rename("a", None).title == "What is the capital of France?"
    assert talks.rename(fork.id, None).title == "What is the capital of France?"


@pytest.mark.parametrize(
    "title",
    [
        "",
        " ",
        "\u3000",
        "\u200b",
        "\ufeff \u00ad",
        "\u3164",
        "\u2800 \u115f\ufe0f",
        "x" * 201,
        "a\nb",
        "a\x00b",
        "\x1b[31m",
        "a\u2028b",
        "\udcff",
        "\x85",
        *(f"a{c}b" for c in "\x7f\x9b\u061c\u200e\u200f\u202a\u202e\u2066\u2069"),
    ],
)
def test_what_is_no_title(title: str, talks: Store) -> None:
    with pytest.raises(StoreError, match="a title must"):
        talks.rename("a", title)
    assert talks.session("a").title == "What is the capital of France?"


def test_a_first_message_gives_a_title_that_steers_nothing(store: Store) -> None:
    said = "\u2067 \x00 Is\u202e this\x9b2J \x1b[31m\u200fred?\u2069\x7f 日本 é 👩\u200d🚀"
    Chat(store, "a").say("a1", None, said, "yes")
    title = store.session("a").title
    assert title == "Is this2J [31mred? 日本 é 👩\u200d🚀"
    assert store.rename("a", title).title == store.rename("a", None).title == title


@pytest.mark.parametrize(
    "title", ["x", "x" * 200, "Où est 日本?", "<script>alert(1)</script>", "a 'quoted' \"one\" \\"]
)
def test_a_title_travels(title: str, talks: Store, store: Store, tmp_path: Path) -> None:
    file = tmp_path / "a.ssmd"
    export_session(talks, "a", file)
    assert b"title" not in file.read_bytes()
    talks.rename("a", title)
    export_session(talks, "a", file, force=True)
    talks.delete("a")
    done = import_session(talks, file)
    assert talks.session(done.session).title == title
    assert talks.rename(done.session, None).title == "What is the capital of France?"
