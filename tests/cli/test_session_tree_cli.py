"""`ssmd session tree|fork`: what a person sees of a conversation with branches."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from cli.test_session_cli import Ssmd
from keeping import Chat, user

from ssmd.sessions.rows.conversations import ADDED, OPENING
from ssmd.sessions.rows.warm import WARM
from ssmd.sessions.store import Store
from ssmd.text.messages import Message, ToolCall


@pytest.fixture
def ssmd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ssmd:
    return Ssmd(tmp_path, monkeypatch)


@pytest.fixture
def chat(ssmd: Ssmd) -> Chat:
    store = Store.open(ssmd.data)
    chat = Chat(store, "ses_1")
    chat.say(
        "turn_aaaaaaaaaaaa", None, "What is [red]markup[/red]?", "<think>\nhm\n</think>\n\nhello\x1b[2J", system="Be"
    )
    chat.say("turn_bbbbbbbb1111", "turn_aaaaaaaaaaaa", "more", "sure " * 20)
    chat.say("turn_bbbbbbbb2222", "turn_bbbbbbbb1111", "and then?", "then")
    chat.say("turn_cccccccccccc", "turn_aaaaaaaaaaaa", "less", "fine")
    cut, checkpoints = chat.make("turn_dddddddddddd", None, [user("another beginning")], "n")
    cut = replace(cut, complete=False, finish="cancelled")
    store.commit([cut], [chat.encode(checkpoints[0])], session=chat.info)
    return chat


def test_tree(ssmd: Ssmd, chat: Chat) -> None:
    shown = ssmd("tree", "ses_1").stdout
    assert shown.splitlines() == [
        "ses_1  made-up  5 turns, 3 branches",
        "|--+ turn_aaaaaaaaa  user: What is [red]markup[/red]? (and 1 before)  assistant: hello\ufffd[2J  [stop]",
        "| |--+ turn_bbbbbbbb1  user: more  assistant: sure sure sure sure sure sure sure su...  [stop]",
        "| | -+ turn_bbbbbbbb2  user: and then?  assistant: then  [stop]",
        "| `--+ turn_ccccccccc  user: less  assistant: fine  [stop]",
        "`-*  turn_ddddddddd  user: another beginning  assistant: n  [cancelled, incomplete]",
    ]


def test_calls_and_results_are_shown(ssmd: Ssmd, chat: Chat) -> None:
    call = ToolCall("call_1", "weather", '{"city": "B\x1bonn"}')
    made, _ = chat.make("turn_eeeeeeeeeeee", None, [user("How is it?")], "")
    chat.store.commit([replace(made, answer=Message("assistant", "", tool_calls=(call,)))], session=chat.info)
    chat.remember(made, None)
    result = Message("tool", "It rains.", tool_call_id="call_1")
    told, _ = chat.make("turn_ffffffffffff", "turn_eeeeeeeeeeee", [result], "Rain.")
    chat.store.commit([told], session=chat.info)
    lines = ssmd("tree", "ses_1").stdout.splitlines()[-2:]
    assert lines[0].endswith('user: How is it?  assistant: calls weather({"city": "B\ufffdonn"})  [stop]')
    assert lines[1].endswith("tool: It rains.  assistant: Rain.  [stop]")
    shown = ssmd("show", "ses_1").stdout
    assert 'assistant: calls weather({"city": "B\ufffdonn"})\n\ntool: It rains.\n\nassistant: Rain.\n' in shown
    tree = ssmd.json("tree", "ses_1")["tree"]
    assert tree[-2]["answer"]["tool_calls"] == [call.to_json()]
    assert tree[-1]["messages"] == [{"role": "tool", "content": "It rains.", "tool_call_id": "call_1"}]


@pytest.mark.parametrize("finish", [OPENING, ADDED, WARM])
def test_a_turn_without_an_answer_has_none(ssmd: Ssmd, finish: str) -> None:
    chat = Chat(Store.open(ssmd.data), "ses_9")
    made, _ = chat.make("turn_a", None, [user("I am 30.")], "")
    chat.store.commit([replace(made, answer=Message("assistant", ""), finish=finish)], session=chat.info)
    assert ssmd("tree", "ses_9").stdout.splitlines() == [
        "ses_9  made-up  1 turn, 1 branch",
        "*  turn_a  user: I am 30.  (no answer)",
    ]
    assert ssmd("show", "ses_9").stdout == "ses_9  made-up  1 turn, 0.0 MB\n\nuser: I am 30.\n"


def test_tree_as_json(ssmd: Ssmd, chat: Chat) -> None:
    told = ssmd.json("tree", "ses_1")
    assert (told["id"], told["base"], told["turns"]) == ("ses_1", None, 5)
    assert [(t["id"][5:6], (t["parent"] or "")[5:6], t["depth"], t["resumable"], t["head"]) for t in told["tree"]] == [
        ("a", "", 0, True, False),
        ("b", "a", 1, True, False),
        ("b", "b", 2, True, False),
        ("c", "a", 1, True, False),
        ("d", "", 0, False, True),
    ]
    assert told["tree"][0]["answer"]["content"].startswith("<think>")


def test_a_long_conversation_goes_straight_down(ssmd: Ssmd, chat: Chat) -> None:
    long = Chat(chat.store, "ses_2")
    for i in range(30):
        long.say(f"turn_{i}", f"turn_{i - 1}" if i else None, f"q{i}", f"a{i}", tokens=2)
    lines = ssmd("tree", "ses_2").stdout.splitlines()
    assert lines[0].endswith("30 turns, 1 branch")
    assert all(line.startswith(("-+ turn_", "*+ turn_")) for line in lines[1:])
    assert lines[-1].startswith("*+ turn_29")


def test_fork(ssmd: Ssmd, chat: Chat) -> None:
    made = ssmd("fork", "ses_1", "--turn", "turn_bbbbbbbb2").stdout
    found = re.fullmatch(r"(ses_[0-9a-f]{24}): 3 turns, begins at turn_bbbbbbbb2222\n", made)
    assert found
    shown = ssmd("tree", found[1]).stdout.splitlines()
    assert shown[0] == f"{found[1]}  made-up  3 turns, 1 branch, forked at turn_bbbbbbbb2"
    assert [line[:2] for line in shown[1:]] == ["-+", "-+", "*+"]
    told = ssmd.json("fork", "ses_1")
    assert (told["base"], told["head"], told["turns"]) == ("turn_dddddddddddd", "turn_dddddddddddd", 1)
    again = ssmd.json("fork", found[1], "--turn", "turn_a")
    assert (again["base"], again["turns"]) == ("turn_aaaaaaaaaaaa", 1)
    assert len(ssmd.json("list")) == 4


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (("tree", "nobody"), "no session 'nobody'"),
        (("tree", "../../etc"), "no session"),
        (("fork", "nobody"), "no session 'nobody'"),
        (("fork", "ses_1", "--turn", "turn_x"), "session 'ses_1' has no turn 'turn_x'"),
        (("fork", "ses_1", "--turn", "turn_b"), "2 turns begin with 'turn_b'"),
        (("fork", "ses_1", "--turn", "../turn"), "not allowed"),
        (("fork", "ses_1", "--turn", ""), "turns begin with ''"),
    ],
)
def test_bad_input(ssmd: Ssmd, chat: Chat, args: tuple[str, ...], reason: str) -> None:
    done = ssmd(*args, code=1)
    assert reason in done.stderr
    assert done.stdout == ""
    assert len(chat.store.sessions()) == 1


def test_a_session_is_named_by_the_beginning_of_its_id(ssmd: Ssmd, chat: Chat, tmp_path: Path) -> None:
    Chat(chat.store, "sea_2").say("turn_gggggggggggg", None, "another one", "yes")
    assert ssmd("show", "ses").stdout == ssmd("show", "ses_1").stdout
    assert ssmd("tree", "ses").stdout == ssmd("tree", "ses_1").stdout
    assert ssmd("rename", "sea", "Sea").stdout == "Sea\n"
    assert ssmd("export", "sea", str(tmp_path / "one.ssmd")).stdout.startswith(str(tmp_path / "one.ssmd"))
    assert ssmd.json("fork", "sea")["base"] == "turn_gggggggggggg"
    assert "3 sessions begin with 'se': " in ssmd("show", "se", code=1).stderr
    assert "no session ''" in ssmd("show", "", code=1).stderr
    assert "no session 'sea'" in ssmd("rm", "sea", code=1).stderr, "what cannot be undone takes the whole id"
