"""The terminal of a chat: Ctrl-Z, one that draws nothing, and a history that cannot be kept."""

from __future__ import annotations

import os
import shutil
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import pexpect
import pytest
from chats import ANSWERS, ASKED, BEGUN, ENDLESS, STORED, Home
from conftest import TinyArtifacts
from terminal import CTRL_C, CTRL_D, UP, plain, terminal
from test_server import running

from ssmd.cli.chat.history import ChatHistory
from ssmd.cli.chat.terminal import WordWrap

CTRL_Z = "\x1a"
SHELL = "exec sh -i"  # job control; many leave the modes of the terminal as they find them
STOPPED = r"Stopped .*\n"


@pytest.fixture(scope="module")
def home(artifacts: TinyArtifacts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    """With a daemon that serves `mamba`, whose answers have no end."""
    models = tmp_path_factory.mktemp("models")
    shutil.copytree(artifacts["mamba-f32"], models / "mamba" / "litert-cpu-f32")
    one = Home(tmp_path_factory.mktemp("home"), models)
    with running(one.path, "mamba"):
        yield one


def test_ctrl_z_in_an_answer(home: Home) -> None:
    """The shell has its terminal as it was; afterwards keys are neither shown in the answer nor lost."""
    with terminal(SHELL, home.env) as shell:
        shell.line(f"$SSMD run mamba {ENDLESS}")
        shell.until(BEGUN)
        shell.line("Tell me a long story")
        shell.until(ANSWERS)
        shell.type(CTRL_Z)
        shell.until(STOPPED)
        shell.line("stty -a </dev/tty")
        assert {"echo", "icrnl", "icanon"} <= set(shell.until("echoke").split())
        shell.line("fg")
        shell.until("run mamba.*\n")
        shell.type("And wh")
        shell.type(CTRL_C)
        assert "And wh" not in shell.until(STORED)
        shell.line("at then?")
        assert "And what then?" in shell.until(ANSWERS)
        shell.type(CTRL_Z)
        shell.until(STOPPED)
        shell.line("bg")
        shell.until(r"\[1\].*run mamba.*\n")
        shell.line("fg")
        shell.until("fg\r\n")
        shell.type(CTRL_C)
        shell.until(STORED)
        shell.line("Once more")
        shell.until(ANSWERS)
        shell.type("unseen")
        shell.type(CTRL_C)
        assert "unseen" not in shell.until(STORED)
        shell.type(CTRL_C + CTRL_D)
        shell.until("continue with")
        shell.line("exit")
        shell.end()
    assert home.asked() == ["Tell me a long story", "And what then?", "Once more"]


def test_ctrl_z_at_the_prompt(home: Home) -> None:
    """It is no part of the message, which stands there again afterwards."""
    with terminal(SHELL, home.env) as shell:
        shell.line(f"$SSMD run mamba {ASKED}")
        shell.until(BEGUN)
        shell.type("To be con")
        shell.until("con")
        shell.type(CTRL_Z)
        shell.until(STOPPED)
        shell.line("fg")
        shell.until("To be con")
        shell.line("tinued")
        shell.until(STORED)
        shell.type(CTRL_D)
        shell.until("continue with")
        shell.line("exit")
        shell.end()
    assert home.asked() == ["To be continued"]


def test_ctrl_c_ends_an_edit(home: Home) -> None:
    with home.chat(model="mamba") as chat:
        for text in ("One", "Two"):
            chat.line(text)
            chat.until(STORED)
        chat.line("/edit")
        chat.until("> Two")
        chat.type(CTRL_C)
        chat.until("the last message stays")
        chat.line("Three")
        chat.until(STORED)
        chat.type(CTRL_D)
        chat.end()
    assert home.asked() == ["One", "Two", "Three"]


def test_one_that_draws_nothing(home: Home) -> None:
    with terminal(f"TERM=dumb $SSMD run mamba {ASKED}", home.env) as chat:
        shown = ""
        for line, then in (("One", STORED), ("Two", STORED), ("/edit", "Enter alone sends: Two"), ("", STORED)):
            chat.line(line)
            chat.child.expect(then)
            shown += f"{chat.child.before}{chat.child.after}"
        chat.type(CTRL_D)
        chat.child.expect(pexpect.EOF)
    assert "\x1b" not in shown + str(chat.child.before)
    assert home.asked() == ["One", "Two"]


def test_a_history_that_cannot_be_written_any_more(home: Home) -> None:
    """One line says so, and the chat goes on."""
    file = home.data / "chat_history"
    file.unlink(missing_ok=True)
    with home.chat(model="mamba") as chat:
        chat.line("One")
        chat.until(STORED)
        file.unlink()
        file.mkdir()
        chat.line("Two")
        said = chat.until(STORED)
        assert said.count(f"note: messages are not kept for later chats: {file}: Is a directory\n") == 1
        chat.type(UP)
        chat.until("Two")
        chat.line("!")
        assert "note" not in chat.until(STORED)
        chat.type(CTRL_D)
        chat.end()
    with home.chat(model="mamba") as chat:
        chat.line("Three")
        assert "not kept" in chat.until(STORED)
        chat.type(CTRL_D)
        chat.end()
    file.rmdir()
    assert home.asked() == ["Three"]


def kept(history: ChatHistory) -> list[str]:
    return [*history.load_history_strings()]


def test_what_a_history_is(tmp_path: Path) -> None:
    """A file of prompt_toolkit's own kind. If it is removed, the next one has the same mode."""
    file = tmp_path / "history"
    one = ChatHistory(file)
    one.store_string("first")
    one.store_string("two\nlines \udce9")
    assert kept(ChatHistory(file)) == ["two\nlines ?", "first"]
    file.unlink()
    os.umask(os.umask(0))
    one.store_string("later")
    assert (one.problem, kept(ChatHistory(file))) == ("", ["later"])
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


@pytest.mark.parametrize("what", ["link", "pipe", "folder", "nowhere", "stranger's"])
def test_what_is_no_history(tmp_path: Path, what: str) -> None:
    file, other = tmp_path / "history", tmp_path / "other"
    other.touch()
    if what == "link":
        file.symlink_to(other)
    elif what == "pipe":
        os.mkfifo(file)
    elif what == "folder":
        file.mkdir()
    elif what == "nowhere":
        file = tmp_path / "none" / "history"
    elif os.getuid() != 0:
        pytest.skip("files are given away by root alone")
    else:
        file.touch()
        os.chown(file, 12345, 12345)
    one = ChatHistory(file)
    one.store_string("a secret")
    assert one.problem.startswith(f"messages are not kept for later chats: {file}: ")
    assert plain(one.problem).count("\n") == 0
    assert not other.read_bytes()
    assert what in ("nowhere", "folder", "pipe") or not file.read_bytes()


def wrapped(text: str, columns: int, piece: int = 3) -> list[str]:
    """The lines that a terminal gets of a text which comes in pieces."""
    got: list[str] = []
    wrap = WordWrap(got.append, lambda: columns)
    for begin in range(0, len(text), piece):
        wrap.add(text[begin : begin + piece])
    wrap.end()
    return "".join(got).split("\n")


ADDRESS = "https://example.org/a/path/that/no/line/holds"


CODE = "   ```py\n   x = 1 + 2 + 3 + 4 + 5\n   ```\n"
ROW = "| a row | of a table | is left |\n"
WIDE = "\u65e5\u672c\u8a9e\u306e\u6587\u7ae0\u3067\u3059\u3002\u6b21"


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("The quick brown fox jumps over it.", ["The quick brown", "fox jumps over", "it."]),
        ("exactly sixteen. \nnext", ["exactly sixteen.", "next"]),
        ("- a list item of words\n\n  end", ["- a list item of", "words", "", "  end"]),
        (f"See {ADDRESS} for all that is more", [f"See {ADDRESS} for all that", "is more"]),
        (WIDE, [WIDE[:7], WIDE[7:]]),
        (f"1. so:\n\n{CODE}and a few words more", ["1. so:", "", *CODE.splitlines(), "and a few words", "more"]),
        (f"{ROW}and a few words more", [ROW.strip(), "and a few words", "more"]),
    ],
    ids=["words", "edge", "list", "address", "wide", "code", "table"],
)
def test_a_line_ends_between_two_words(text: str, lines: list[str]) -> None:
    for piece in (1, 3, 100):
        assert wrapped(text, 16, piece) == lines
    assert wrapped(text, 0) == text.split("\n")


def test_a_line_of_many_spaces_is_looked_at_once() -> None:
    """It took minutes where each character had all those before it looked at."""
    text = " " * 200_000 + "| a row"
    assert wrapped(text, 16) == [text]


def test_a_window_that_is_resized_breaks_the_next_words() -> None:
    got: list[str] = []
    widths = [30]
    wrap = WordWrap(got.append, lambda: widths[-1])
    wrap.add("some words for a wide window, ")
    widths.append(12)
    wrap.add("and some for a narrow one")
    wrap.end()
    assert "".join(got) == "some words for a wide window,\nand some for\na narrow one"


def test_text_is_wrapped_on_a_terminal_that_draws_alone(tmp_path: Path) -> None:
    script, text = tmp_path / "script.py", "a few words, and more"
    script.write_text(
        f"from ssmd.cli.chat.terminal import Screen\nwith Screen() as s:\n    s.show({text!r})\nprint()\n"
    )
    python = f"{sys.executable} {script}"
    runs = f"{python}; {python} | cat; TERM=dumb {python}"
    with terminal(f"stty -echo; echo ready; read go; stty cols 12; {runs}", dict(os.environ)) as shell:
        shell.until("ready\r\n")  # the terminal's first size is set after the shell's start
        shell.line("go")
        lines = shell.until("(?s)more.*more.*more\r\n").splitlines()
    assert lines == ["a few words,", "and more", text, text]
