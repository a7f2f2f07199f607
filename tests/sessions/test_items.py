"""Turns as items: calls and results are kept whole, and a turn without them is written as it always was."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from hostile import join, seal, split
from hypothesis import given
from hypothesis import strategies as st
from keeping import LINEAGE, RECURRENT, START, VOCABULARY, Chat, answer, echo_of, new_store, user
from matching import Conversation, match, places

from ssmd.sessions.files.sessionfile import SessionFileError
from ssmd.sessions.files.transfer import LocalModel, export_session, import_session
from ssmd.sessions.fsck.repair import check
from ssmd.sessions.match import Chain, Echo, continues, known, with_ids_of
from ssmd.sessions.store import Store
from ssmd.sessions.turn import NewTurn, items_of, messages_of
from ssmd.text.messages import Message, ToolCall

DATA = Path(__file__).parents[1] / "data"
PLAIN = (
    Message("system", "Be brief."),
    Message("developer", "In French.", "boss"),
    Message("user", "Où ?", "Ann"),
    answer("<think>\nhm\n</think>\n\n Là. "),
)


def call(id_: str, name: str = "weather", arguments: str = '{"city": "Köln", "n": 1}') -> ToolCall:
    return ToolCall(id_, name, arguments)


def called(*calls: ToolCall, said: str = "") -> Message:
    return Message("assistant", said, tool_calls=calls)


def result(of: str, said: str) -> Message:
    return Message("tool", said, tool_call_id=of)


TALK = (
    user("How is it in Köln and in Bonn?"),
    called(call("a"), call("b", arguments='{"city": "Bonn"}'), said="I look."),
    result("b", '{"sky": "heliotrope"}'),
    result("a", "grey"),
)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with closing(new_store(tmp_path / "data")) as store:
        yield store


@pytest.fixture
def chat(store: Store) -> Chat:
    """A turn whose input ends in results, one that answers with calls, and their results below it."""
    chat = Chat(store, "ses_calls", RECURRENT)
    first, _ = chat.make("t1", None, TALK, "Heliotrope and grey.")
    put(chat, first)
    second, _ = chat.make("t2", "t1", [user("Again?")], "")
    put(chat, replace(second, answer=called(call("c"), call("d", "time", ""))))
    third, _ = chat.make("t3", "t2", [result("d", "noon"), result("c", "rain")], "Rain at noon.")
    put(chat, third)
    return chat


def put(chat: Chat, turn: NewTurn) -> None:
    chat.store.commit([turn], session=chat.info)
    chat.remember(turn, None)


# Written as they were


def test_turns_without_calls_are_written_and_found_as_before(store: Store) -> None:
    """By the version before: rows, checksums and chains, byte for byte."""
    chat = Chat(store, "ses_plain", RECURRENT)
    first, checkpoints = chat.make("p1", None, PLAIN[:-1], PLAIN[-1].content)
    store.commit([first], [chat.encode(c) for c in checkpoints], session=chat.info)
    with closing(sqlite3.connect(store.file)) as raw:
        row = raw.execute("SELECT items, answer, hex(chain), hex(whole), hex(checksum) FROM turn").fetchone()
    named = '"type":"message","role"'
    assert row == (
        (
            f'[{{"id":"item_e54ae392907b6d079c873c6a",{named}:"system","content":"Be brief."}},'
            f'{{"id":"item_3f8eddeb69d1b61c5cd9dbb7",{named}:"developer","content":"In French.","name":"boss"}},'
            f'{{"id":"item_62ab714c55c625b28c0c95ef",{named}:"user","content":"Où ?","name":"Ann"}}]'
        ).encode(),
        (
            f'[{{"id":"item_c78a425875fd2522745f2e9e",{named}:"assistant",'
            '"content":"<think>\\nhm\\n</think>\\n\\n Là. "}]'
        ).encode(),
        "99DDB9940D3CC59F33BA45F06A67B2238C16E9AF77BC39EE05547F4A3AEB7307",
        "56619F9B69E0614EB29C91D1ACF8FB966B7E24EE4D8CEC1548299E86B47930A1",
        "F03848BAA33A96D8BE46C6C1C616784A",
    )


def test_a_file_of_format_2_of_before_calls(store: Store, tmp_path: Path) -> None:
    local = {LINEAGE: LocalModel("made-up", RECURRENT, VOCABULARY)}
    done = import_session(store, DATA / "session-file-2.ssmd", local=local)
    assert (done.turns, done.checkpoints, done.text_only) == (2, 2, "")
    first, second = store.turns("ses_plain")
    assert (first.conversation, second.conversation) == (PLAIN, (user("And?"), answer("No.")))
    found = echo_of(store, [*PLAIN, user("And?"), answer("No. "), user("So?")])
    assert found is not None
    assert (found.turn, found.stored) == ("p2", None)
    export_session(store, "ses_plain", tmp_path / "again.ssmd")
    again, before = (split(file.read_bytes()) for file in (tmp_path / "again.ssmd", DATA / "session-file-2.ssmd"))
    assert again.document == before.document


# Kept whole

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
calls = st.builds(ToolCall, texts, texts, texts)
messages = st.one_of(
    st.builds(Message, st.sampled_from(["system", "developer", "user"]), texts, st.one_of(st.none(), texts)),
    st.builds(Message, st.just("assistant"), texts, st.none(), st.lists(calls, max_size=3).map(tuple)),
    st.builds(Message, st.just("tool"), texts, st.one_of(st.none(), texts), st.just(()), texts),
)


@given(st.lists(messages, max_size=6), st.lists(calls, max_size=3), texts)
def test_items_say_the_messages(said: list[Message], calls: list[ToolCall], text: str) -> None:
    conversation = (*said, called(*calls, said=text))
    items, last = items_of("t", conversation)
    assert (*messages_of(items), *messages_of(last)) == conversation
    assert len({item["id"] for item in (*items, *last)}) == len(items) + len(last)
    assert [Message.from_json(json.loads(json.dumps(m.to_json()))) for m in conversation] == list(conversation)


@pytest.mark.parametrize(
    "items",
    [
        [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}],
        [{"type": "message", "role": "user", "content": "x"}, {"type": "function_call", "call_id": "a", "name": "f"}],
        [{"type": "message", "role": "tool", "content": "x"}],
        [{"type": "function_call_output", "call_id": 7, "output": "x"}],
        [{"type": "function_call_output", "output": "x"}],
        [{"type": "reasoning", "content": "x"}],
    ],
)
def test_items_that_say_nothing(items: list[dict[str, object]]) -> None:
    with pytest.raises((ValueError, KeyError)):
        messages_of(items)


def test_a_store_keeps_calls_and_results(chat: Chat) -> None:
    turns = chat.store.turns("ses_calls")
    assert turns[0].messages == TALK
    assert turns[1].answer.tool_calls == (call("c"), call("d", "time", ""))
    assert [m.tool_call_id for m in turns[2].messages] == ["d", "c"]
    assert check(chat.store.file.parent).damages == ()


def test_search_finds_words_of_results_and_of_calls(chat: Chat) -> None:
    for text in ("heliotrope", "noon time", "bonn"):
        assert [s.id for s in chat.store.search(text, 5).sessions] == ["ses_calls"], text
    assert chat.store.search("nowhere", 5).sessions == ()


def test_a_file_keeps_calls_and_results(chat: Chat, tmp_path: Path) -> None:
    file = tmp_path / "calls.ssmd"
    export_session(chat.store, "ses_calls", file)
    with closing(new_store(tmp_path / "other")) as other:
        import_session(other, file)
        here, there = ([t.conversation for t in s.turns("ses_calls")] for s in (chat.store, other))
        assert here == there
        messages = [m for t in there for m in t]
        assert echo_of(other, [*messages, user("So?")]) is not None
        export_session(other, "ses_calls", tmp_path / "again.ssmd")
    assert split(file.read_bytes()).document["turns"] == split((tmp_path / "again.ssmd").read_bytes()).document["turns"]


@pytest.mark.parametrize(
    ("where", "item", "said"),
    [
        (
            "items",
            {"type": "function_call", "call_id": "x", "name": "f", "arguments": "{}"},
            "does not follow an assistant",
        ),
        ("answer", {"type": "function_call_output", "call_id": "x", "output": "y"}, "t1"),
        ("items", {"type": "reasoning", "content": "x"}, "type"),
        ("items", {"type": "function_call_output", "call_id": "x", "output": 7}, "output"),
    ],
)
def test_items_of_a_file_that_lie(chat: Chat, tmp_path: Path, where: str, item: dict[str, object], said: str) -> None:
    file = tmp_path / "calls.ssmd"
    export_session(chat.store, "ses_calls", file)
    parts = split(file.read_bytes())
    parts.document["turns"][0][where].insert(0 if where == "items" else 1, {"id": "item_x", **item})
    (tmp_path / "lies.ssmd").write_bytes(seal(join(parts)))
    with closing(new_store(tmp_path / "other")) as other:
        with pytest.raises(SessionFileError, match=said):
            import_session(other, tmp_path / "lies.ssmd")
        assert other.sessions() == []


# Echoes


def renamed(messages: tuple[Message, ...], ids: str) -> list[Message]:
    """The messages as a client has them that names calls in its own way."""

    def own(id_: str) -> str:
        return f"{ids}{id_}"

    said = []
    for m in messages:
        made = tuple(replace(c, id=own(c.id)) for c in m.tool_calls)
        of = None if m.tool_call_id is None else own(m.tool_call_id)
        said.append(replace(m, tool_calls=made, tool_call_id=of))
    return said


def test_an_echo_is_found_despite_other_call_ids_and_other_json(chat: Chat) -> None:
    store = chat.store
    path = tuple(m for t in store.path("t3") for m in t.conversation)
    echo = renamed(path, "own_")
    other = replace(echo[1].tool_calls[0], arguments='{"n":1,"city":"K\\u00f6ln"}')
    echo[1] = replace(echo[1], tool_calls=(other, echo[1].tool_calls[1]))
    found = echo_of(store, [*echo, user("So?")])
    assert found is not None
    assert (found.turn, found.length) == ("t3", len(path))
    assert continues([*echo, user("So?")], path)
    assert known(path, echo) == path


@pytest.mark.parametrize(
    "change",
    [
        lambda said: said[1].tool_calls[::-1],
        lambda said: said[1].tool_calls[:1],
        lambda said: (replace(said[1].tool_calls[0], name="climate"), said[1].tool_calls[1]),
        lambda said: (replace(said[1].tool_calls[0], arguments="{}"), said[1].tool_calls[1]),
    ],
)
def test_an_echo_that_says_something_else(chat: Chat, change: Callable[[list[Message]], tuple[ToolCall, ...]]) -> None:
    said = [*chat.store.path("t1")[0].conversation, user("So?")]
    assert echo_of(chat.store, said) is not None
    said[1] = replace(said[1], tool_calls=change(said))
    assert echo_of(chat.store, said) is None


def test_results_belong_to_their_calls(chat: Chat) -> None:
    """The same results, each of the other call."""
    said = [*chat.store.path("t1")[0].conversation, user("So?")]
    said[2], said[3] = replace(said[2], tool_call_id="a"), replace(said[3], tool_call_id="b")
    assert echo_of(chat.store, said) is None
    assert not continues(said, chat.store.path("t1")[0].conversation)


def test_new_results_get_the_ids_of_the_stored_calls(chat: Chat) -> None:
    path = tuple(m for t in chat.store.path("t2") for m in t.conversation)
    said = [
        *renamed(path, "own_"),
        result("own_d", "noon"),
        result("other", "x"),
        user("?"),
        answer("!"),
        result("own_c", ""),
    ]
    given_ids = with_ids_of(path[-1], said, len(path))
    assert given_ids[len(path) - 1] == path[-1]
    assert [m.tool_call_id for m in given_ids[len(path) :]] == ["d", "other", None, None, "own_c"]
    assert with_ids_of(path[-1], [*path, user("?")], len(path)) == (*path, user("?"))


names = st.sampled_from(["f", "g"])
written = st.sampled_from(['{"a":1,"b":2}', '{"b": 2, "a": 1}', "", "{}", "x", "null"])
ids = st.sampled_from(["1", "2"])
said_ = st.lists(
    st.one_of(
        st.builds(Message, st.just("user"), st.sampled_from(["a", ""])),
        st.builds(
            called,
            st.builds(ToolCall, st.just("1"), names, written),
            st.builds(ToolCall, st.just("2"), names, written),
            said=st.sampled_from(["", "<think>t</think>", "call 1 1\nf{"]),
        ),
        st.builds(called, st.builds(ToolCall, ids, names, written)),
        st.builds(result, ids, st.sampled_from(["", "of 0\n", "call 1 2\nf{}"])),
        st.just(answer("")),
    ),
    max_size=5,
).map(lambda said: [*said, answer("end")])


@given(said_, said_, st.sampled_from(["", "x"]))
def test_a_chain_tells_echoes_with_calls_from_others(a: list[Message], b: list[Message], prefix: str) -> None:
    b = renamed(tuple(b), prefix)
    one, other = Chain().then(a), Chain().then(b)
    alike = continues([*b, user("more")], a)
    assert alike <= (one.said == other.said)
    assert alike == (match([*b, user("more")], [Conversation("s", "t", tuple(a), START)]).parent is not None)
    assert (one.whole == other.whole) <= (one.said == other.said)
    plain = [[(m.role, m.said, [c.said for c in m.tool_calls]) for m in said] for said in (a, b)]
    assert (one.said == other.said) == (plain[0] == plain[1] and places(a) == places(b))


@given(said_, said_)
def test_a_chain_with_calls_is_carried_on(a: list[Message], b: list[Message]) -> None:
    whole = Chain().then([*a, *b])
    assert Chain().then(a).then(b, a[-1].tool_calls) == whole
    ends = [i + 1 for i, m in enumerate(b) if m.role == "assistant"]
    chain, at = Chain(), 0
    for end in ends:
        chain, at = chain.then(b[at:end], b[at - 1].tool_calls if at else ()), end
    assert chain == Chain().then(b)
    assert Echo.of([*b, user("x")]).chains[-1] == chain
