"""Where stored prompts differ from earlier ones, and with which words: from the store, and as a user sees it.

In these turns a token is a character.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from cli.test_session_cli import Ssmd, ssmd
from keeping import Chat, user

from ssmd.sessions.line import Line, Passage
from ssmd.sessions.rows.partings import Parting
from ssmd.sessions.store import Store
from ssmd.sessions.turn import Domain

__all__ = ["ssmd"]
CLOCK = "You keep the lighthouse. It is {}. Be brief.\n"


def say(chat: Chat, turn: str, parent: str | None, text: str, *, after: str | None = None) -> None:
    """Store a turn whose prompt adds a text to its parent's, or to another text `after`."""
    above = after if after is not None else chat.turns[parent].text.own if parent is not None else ""
    new, _ = chat.make(turn, parent, [user(text)], "ok")
    prompt = f"{above}<{text}>"
    new = replace(
        new, ids=Line.of([ord(c) for c in prompt + "ok"]), prompt_tokens=len(prompt), text=Passage(prompt + "ok")
    )
    chat.store.commit([new], [], session=chat.info)
    chat.turns[turn], chat.ends[turn] = new, (None, new.ids.own)


def parting(store: Store, turn: str) -> Parting | None:
    return store.partings(store.path(turn)[-1:]).get(turn)


@pytest.fixture
def store(ssmd: Ssmd) -> Store:
    return Store.open(ssmd.data)


def test_a_conversation_parts_from_the_most_alike(store: Store) -> None:
    """Of all that the same owner began before. Later ones and other owners' do not count."""
    chats = [Chat(store, f"ses_{n}", owner="anna") for n in range(3)]
    say(chats[0], "t0", None, CLOCK.format("noon"))
    say(chats[1], "t1", None, "Nothing of the kind.")
    say(Chat(store, "ses_b", owner="ben"), "b", None, CLOCK.format("one o'clock"))
    say(chats[2], "t2", None, CLOCK.format("one o'clock"))
    assert parting(store, "t0") is None
    found = parting(store, "t2")
    assert found is not None
    assert (found.session, found.turn, found.position) == ("ses_0", "t0", len("<You keep the lighthouse. It is "))
    assert found.before.endswith("lighthouse. It is ")
    assert found.here.startswith("one o'clock. Be")
    assert found.there.startswith("noon. Be")


def test_a_forks_beginning_hides_its_owners_other_sessions(store: Store) -> None:
    """Ben forked a session of Anna's while they shared all. Its turns are hers still, also after she removes it."""
    say(Chat(store, "ses_0", owner="anna"), "t0", None, CLOCK.format("noon, says Anna"))
    say(Chat(store, "ses_1", owner="anna"), "t1", None, CLOCK.format("one o'clock"))
    fork = store.of(Domain("ben", None)).fork("ses_1").id
    anna, ben = store.of(Domain("anna", ("anna",))), store.of(Domain("ben", ("ben",)))
    turns = ben.turns(fork)
    assert [turn.id for turn in turns] == ["t1"]
    assert anna.partings(turns)["t1"].turn == "t0"
    assert ben.partings(turns) == {}
    anna.delete("ses_1")
    say(Chat(store, "ses_2", owner="anna"), "t2", None, CLOCK.format("one at night"))
    assert anna.partings(store.path("t2"))["t2"].turn == "t0", "ses_1 is Ben's now"


def test_it_is_found_how_far_a_conversation_is_the_same(store: Store) -> None:
    """A client sends a whole conversation that no turn matches: it goes on, or differs in its third turn."""
    chat = Chat(store, "ses_0")
    for n in range(4):
        say(chat, f"t{n}", f"t{n - 1}" if n else None, f"question {n}")
    whole = chat.turns["t3"].text.own
    say(Chat(store, "ses_1"), "on", None, "", after=whole)
    assert parting(store, "on") is None
    say(Chat(store, "ses_2"), "off", None, "", after=whole.replace("question 2", "question B"))
    found = parting(store, "off")
    assert found is not None
    assert (found.position, found.here[:3], found.there[:3]) == (whole.index("2>"), "B>o", "2>o")
    say(chat, "t2b", "t1", "question B")
    edit = parting(store, "t2b")
    assert edit is not None
    assert (edit.turn, edit.here[:1], edit.there[:1]) == ("t2", "B", "2")
    say(chat, "t2c", "t1", "question B")
    assert parting(store, "t2c") is None, "it was asked again"


def test_a_turn_parts_from_the_one_that_it_continues(store: Store) -> None:
    """A template wrote other words above."""
    chat = Chat(store, "ses_0")
    say(chat, "t0", None, "first")
    say(chat, "t1", "t0", "second")
    say(chat, "t2", "t1", "third", after="<first>ok<SECOND>ok")
    assert parting(store, "t1") is None
    found = parting(store, "t2")
    assert found is not None
    assert (found.turn, found.position, found.here[:3]) == ("t1", len("<first>ok<"), "SEC")


def test_any_edit_is_found_where_it_is(store: Store) -> None:
    draw, chat = random.Random(3), Chat(store, "ses_0")
    text = "".join(draw.choices("abcdef ", k=200))
    say(chat, "t", None, text)
    for n in range(25):
        at = draw.randrange(len(text))
        other = text[:at] + "XYZ"[: draw.randrange(1, 4)] + text[at + draw.randrange(3) :]
        chat = Chat(store, f"ses_of_{n}")
        say(chat, f"t_{n}", None, other)
        found = parting(store, f"t_{n}")
        assert found is not None
        assert found.position >= at + 1
        assert (found.here[:1] == "X") == (found.position == at + 1)
        assert len(found.here) <= 48
        store.delete(f"ses_of_{n}")


def test_a_user_sees_why_a_prompt_was_read(ssmd: Ssmd, store: Store) -> None:
    say(Chat(store, "ses_0"), "turn_0", None, CLOCK.format("noon"))
    chat = Chat(store, "ses_1")
    say(chat, "turn_1", None, CLOCK.format("\x1b[31mone\u202e\x07"))
    say(chat, "turn_2", "turn_1", "And now?")
    store.close()
    plain = ssmd("show", "ses_1").stdout
    assert "tokens" not in plain
    shown = ssmd("show", "ses_1", "--why").stdout
    lines = [line for line in shown.splitlines() if line.startswith(("turn_", "  "))]
    length = len("<" + CLOCK.format("\x1b[31mone\u202e\x07") + ">")
    assert lines == [
        f"turn_1: a prompt of {length} tokens; the first 32 are those of turn_0 of ses_0",
        '  here:  "…p the lighthouse. It is |\\u001b[31mone\\u202e\\u0007. Be brief.\\n>ok…"',
        '  there: "…p the lighthouse. It is |noon. Be brief.\\n>ok…"',
        f"turn_2: a prompt of {length + 12} tokens; it goes on from the turn above",
    ]
    assert all(c.isprintable() or c == "\n" for c in shown)
    first, second = ssmd.json("show", "ses_1", "--why")["tree"]
    assert (first["parting"]["position"], first["parting"]["turn"], second["parting"]) == (32, "turn_0", None)
    assert "parting" not in ssmd.json("show", "ses_1")["tree"][0]
