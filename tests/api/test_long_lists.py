"""Pages of long lists of items: of one long turn, of a long path with branches, and of a conversation."""

from __future__ import annotations

import json
import secrets
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from keeping import open_store

from ssmd.api.openai.responses.stored import ConversationItems, ItemList, Page, ResponseItems
from ssmd.engine.terms import Rejection
from ssmd.sessions.line import NOTHING, SILENCE
from ssmd.sessions.reply import NewReply, ReplyKey
from ssmd.sessions.rows import conversations, paths, turns
from ssmd.sessions.rows.excerpts import BLOCK, LONG
from ssmd.sessions.rows.snapshot import Snapshot
from ssmd.sessions.store import Store
from ssmd.sessions.turn import NewTurn, SessionInfo, StoreError, TurnRemoved
from ssmd.text.messages import Message, ToolCall

Fields = dict[str, Any]
NOW = datetime(2026, 1, 1, tzinfo=UTC)
SESSION = SessionInfo("ses_1", "m", "0" * 64, NOW)
FACTS: Fields = {"model": "m", "echo": {}, "origins": {}, "usage": {}, "created": 1, "begun": 0}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    one = open_store(tmp_path / "data")
    yield one
    one.close()


def put(store: Store, parent: str | None, messages: Sequence[Message], said: str = "x", **facts: Any) -> str:
    """Store a response. Returns the id of its turn."""
    name = f"turn_{secrets.token_hex(12)}"
    turn = NewTurn(
        id=name,
        session=facts.pop("session", SESSION).id,
        parent=parent,
        messages=tuple(messages),
        answer=Message("assistant", said),
        ids=NOTHING,
        prompt_tokens=0,
        text=SILENCE,
        finish="stop",
        complete=True,
        created_at=NOW,
    )
    key = ReplyKey(secrets.token_bytes(32), bytes(32), timedelta(minutes=10), named=False)
    told = None if facts.pop("plain", False) else {**FACTS, **facts}
    store.commit([turn], session=replace(SESSION, id=turn.session), reply=NewReply(key, True, {"id": "x"}, told))
    return name


def page(of: ItemList, **query: Any) -> Fields:
    found: Fields = json.loads(bytes(of.page(Page(**query)).body))
    return found


def every(of: ItemList, order: str, limit: int) -> list[Fields]:
    """All items, page by page."""
    found: list[Fields] = []
    while True:
        one = page(of, order=order, limit=limit, **({"after": found[-1]["id"]} if found else {}))
        found += one["data"]
        if not one["has_more"]:
            return found


def long_input() -> list[Message]:
    """Messages of all kinds, more than a turn's blocks are made for."""
    found: list[Message] = []
    for i in range(LONG // 3 + 30):
        call = ToolCall(f"c{i}", "f", '{"a": "é"}')
        found += (Message("user", f"u{i} ü"), Message("assistant", f"<think>\nh{i}\n</think>\n\na{i}", None, (call,)))
        found += (Message("tool", f"r{i}", tool_call_id=f"c{i}"),)
    return found


def test_a_page_of_a_long_turn_reads_few_messages(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    given = long_input()
    first = put(store, None, given, "the end")
    head = put(store, first, [Message("user", "more")])
    blocks: list[int] = []
    block = Snapshot.block

    def noted(stored: Snapshot, turn: str, told: Any, number: int) -> tuple[Message, ...]:
        blocks.append(number)
        return block(stored, turn, told, number)

    with store.snapshot() as stored:
        monkeypatch.setattr("ssmd.api.openai.responses.stored._is_long", lambda facts: False)
        whole = every(ResponseItems(stored, head, FACTS), "asc", 100)
        monkeypatch.undo()
        assert len(whole) == len(given) // 3 * 5 + 2
        assert whole[-2]["content"][0]["text"] == "the end"
        monkeypatch.setattr(Snapshot, "block", noted)
        some = Snapshot.said
        monkeypatch.setattr(Snapshot, "said", lambda s, ids: some(s, [one for one in ids if one != first or 1 / 0]))
        for order, listed in (("asc", whole), ("desc", whole[::-1])):
            assert every(ResponseItems(stored, head, FACTS), order, 37) == listed
            for start in (1, 200, len(listed) - 3):
                blocks.clear()
                one = page(ResponseItems(stored, head, FACTS), order=order, limit=5, after=listed[start - 1]["id"])
                assert one["data"] == listed[start : start + 5]
                assert len(blocks) <= 2, "a page of five items has parts of two blocks at most"
    assert len(given) / BLOCK > 4


def test_an_altered_block_is_not_shown(store: Store, tmp_path: Path) -> None:
    name = put(store, None, long_input())
    with sqlite3.connect(tmp_path / "data" / "sessions.sqlite3") as connection:
        connection.execute("update turn set items = cast(replace(items, 'u3 ', 'v3 ') as blob)")
    with store.snapshot() as stored:
        with pytest.raises(StoreError, match="was altered"):
            page(ResponseItems(stored, name, FACTS), order="asc")
        assert page(ResponseItems(stored, name, FACTS), order="desc")["data"]


def test_a_broken_path_is_reported(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "EVERY", 8)
    line: list[str] = []
    for i in range(30):
        line.append(put(store, line[-1] if line else None, [Message("user", str(i))]))
    with sqlite3.connect(tmp_path / "data" / "sessions.sqlite3") as connection:
        connection.execute("update turn set parent = null where id = ?", [line[20]])
    for order in ("asc", "desc"):
        with store.snapshot() as stored, pytest.raises(StoreError, match="was altered; see"):
            every(ResponseItems(stored, line[-1], FACTS), order, 100)


def test_a_place_of_a_long_path_is_found(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "EVERY", 8)
    line: list[str] = []
    aside: list[str] = []
    for i in range(43):
        if i % 5 == 3:
            aside.append(put(store, line[-1], [Message("user", f"aside {i}")]))
        plain = i in (20, 36)  # a turn that came by another protocol keeps no places
        line.append(put(store, line[-1] if line else None, [Message("user", str(i))], plain=plain))
    monkeypatch.setattr(paths, "_CLIMB", paths._climb())
    for last in (0, 5, 7, 8, 9, 16, 17, 20, 21, 36, 42):
        with store.reading() as connection:
            expected = turns.read_path_ids(connection, line[last])
            assert expected == line[: last + 1]
            if last not in (20, 36) and last > 8:
                monkeypatch.setattr(paths, "read_path_ids", None)  # and not by reading all of it
            path = paths.TurnPath(connection, line[last])
            assert path.size == last + 1
            for number in (*range(last, -1, -3), *range(0, last + 1, 2)):
                assert path.ids([number]) == [line[number]]
            assert path.ids(range(path.size)) == expected
            for number, name in enumerate(line):
                assert path.find(name) == (number if number <= last else None)
            assert [path.find(name) for name in (*aside, "turn_x")] == [None] * (len(aside) + 1)
            monkeypatch.undo()
            monkeypatch.setattr(paths, "EVERY", 8)


def test_pages_of_a_path_with_branches_have_no_gap(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "EVERY", 8)
    head, other = None, ""
    for i in range(30):
        other = put(store, head, [Message("user", "other")]) if i == 11 else other
        head = put(store, head, [Message("user", str(i))])
    with store.snapshot() as stored:
        of = ResponseItems(stored, str(head), FACTS)
        whole = every(of, "asc", 100)
        assert [item["content"][0]["text"] for item in whole[::2]] == [str(i) for i in range(30)]
        assert every(of, "desc", 7) == whole[::-1]
        assert every(of, "asc", 7) == whole
        with pytest.raises(Rejection, match="no item"):
            page(of, after=f"msg_{other.partition('_')[2]}_0")


def test_a_response_of_an_old_state_is_not_appended(store: Store) -> None:
    """Of two that read the same conversation, the later one is refused: nothing of it is stored."""
    with store.writing() as connection:
        one = conversations.create(connection, {}, NOW, "", None)
    place = {"id": one.id, "entry": 1, "given": 1, "custom": []}
    mine = replace(SESSION, id=one.id)
    put(store, None, [Message("user", "a")], session=mine, conversation=place)
    with pytest.raises(TurnRemoved, match="was changed"):
        put(store, None, [Message("user", "b")], session=mine, conversation=place)
    assert len(store.turns(one.id)) == 2
    with store.snapshot() as stored:
        items = every(ConversationItems(stored, stored.conversation(one.id)), "asc", 100)
    assert [item["content"][0]["text"] for item in items] == ["a", "x"]


def test_a_full_store_takes_no_more_conversations(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "_LEAST_TEXT_BYTES", 1000)
    with store.writing() as connection:
        conversations.create(connection, {}, NOW, "", 1000)
    with pytest.raises(StoreError, match="conversations take"), store.writing() as connection:
        conversations.create(connection, {}, NOW, "", 1000)
    assert len(store.sessions()) == 1
