"""`ssmd run` in a pseudo-terminal: with a daemon, and without. What is kept is read from the store, not the screen."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import commands
import pytest
from chats import ANSWERS, ASKED, BEGUN, ENDLESS, STORED, Home
from conftest import TinyArtifacts
from terminal import ALT_ENTER, CTRL_C, CTRL_D, ENTER, PASTE, PASTED, UP, Terminal, terminal
from test_server import running

from ssmd.cli.chat.talk import ContextRoom, Daemon, Talk


@pytest.fixture(scope="module")
def models(artifacts: TinyArtifacts, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models, of the names that they were built with; mamba has no context's end."""
    path = tmp_path_factory.mktemp("models")
    for name in ("llama", "mamba"):
        shutil.copytree(artifacts[f"{name}-f32"], path / name / "litert-cpu-f32")
    return path


@pytest.fixture(scope="module")
def home(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    """With a daemon that serves `llama`."""
    one = Home(tmp_path_factory.mktemp("home"), models)
    with running(one.path, "llama"):
        yield one


@pytest.fixture(params=["daemon", "alone"])
def either(request: pytest.FixtureRequest, home: Home, models: Path, tmp_path: Path) -> Home:
    """With a daemon, and without."""
    return home if request.param == "daemon" else Home(tmp_path, models)


def test_one_answer_is_the_daemons(home: Home) -> None:
    asked = ("run", "llama", "Tell me a story", "--temperature", "0", "--max-tokens", "8")
    before = {s.id for s in home.sessions()}
    said, told = home.ssmd(*asked)
    assert re.fullmatch(r"using the daemon at http://127\.0\.0\.1:\d+\n", told)
    assert home.said() == [("user", "Tell me a story"), ("assistant", said[:-1])]
    alone, told = home.ssmd(*asked, "--threads", "1")
    assert "not used: --threads applies only where the model is loaded; the model is loaded here" in told
    assert alone == said
    assert len({s.id for s in home.sessions()} - before) == 2  # both kept, in one store
    assert home.ssmd("run", "llama", *asked[3:], given="Tell me a story")[0] == said
    assert "it does not serve 'mamba'" in home.ssmd("run", "mamba", "x", *asked[3:])[1]


def test_no_store_keeps_nothing(either: Home) -> None:
    either.ssmd("run", "llama", "Count", "--max-tokens", "2", "--temperature", "0")
    before = [s.id for s in either.sessions()]
    with either.chat(f"{ASKED} --no-store") as chat:
        chat.line("A secret")
        chat.until("; not stored]")
        chat.line("/sessions")
        assert "error: nothing is stored" in chat.until("--no-store\r\n")
        chat.line("Another one")
        assert ", 0 cached" in chat.until("; not stored]")  # a state that is not kept is not there
        chat.type(CTRL_D)
        assert "continue with" not in chat.end()
    assert [s.id for s in either.sessions()] == before
    history = either.data / "chat_history"
    assert not history.exists() or "secret" not in history.read_text()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("run llama <&-", "stdin is empty; give a prompt ('llama' was taken for the model): ssmd run MODEL PROMPT"),
        ("run llama ''", "the prompt is empty; "),
        ("run llama ' '", "the prompt is empty; "),
        ('run llama "$BAD"', "the prompt is not UTF-8"),
        ('run llama x --system "$BAD"', "--system is not UTF-8"),
        ('run llama x --session "$BAD"', "--session is not UTF-8"),
        ('run llama x --stop "$BAD"', "--stop is not UTF-8"),
        ('run "$BAD" x', "the model's name is not UTF-8"),
        ('run llama <"$FILE"', "stdin is not UTF-8"),
        ('run llama x <"$FILE"', "stdin is not UTF-8"),
        ("run llama x </bin/sh", "stdin is not text: "),
        ("run llama x </dev/zero", "stdin is longer than 16 MiB; "),
    ],
)
@pytest.mark.parametrize(
    "locale",
    [
        pytest.param("C", marks=pytest.mark.full),  # test_in_a_locale_without_a_charset sees the same of one of them
        "C.UTF-8",
    ],
)
def test_what_cannot_be_a_prompt_is_a_wrong_command_line(
    home: Home, tmp_path: Path, given: str, said: str, locale: str
) -> None:
    _is_refused(home, tmp_path, given, said, locale)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32"])
def test_a_prompt_in_a_file_of_windows_is_read(home: Home, tmp_path: Path, encoding: str) -> None:
    (tmp_path / "file").write_bytes("Tell me a café story".encode(encoding))
    done = _shell(home, '$SSMD run llama --max-tokens 2 <"$FILE"', FILE=str(tmp_path / "file"))
    assert (done.returncode, home.said()[0]) == (0, ("user", "Tell me a café story"))


def test_in_a_locale_without_a_charset(home: Home, tmp_path: Path) -> None:
    _is_refused(home, tmp_path, 'run llama "$BAD"', "the prompt is not UTF-8", "C")


def _is_refused(home: Home, tmp_path: Path, given: str, said: str, locale: str) -> None:
    (tmp_path / "file").write_bytes(b"caf\xe9")
    done = _shell(home, f"$SSMD {given}", LC_ALL=locale, BAD="caf\udce9", FILE=str(tmp_path / "file"))
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(f"error: {re.escape(said)}.*\n", done.stderr), done.stderr


def test_stdin_and_a_prompt_are_one_message(home: Home) -> None:
    asked = ("run", "llama", "What is its name?", "--max-tokens", "2", "--temperature", "0")
    said = home.ssmd(*asked, given="\ufeffMy dog is Rex.\n  He is old.\n\n")[1]
    assert "note: the prompt follows 29 bytes of stdin\n" in said
    assert home.asked() == ["My dog is Rex.\n  He is old.\n\nWhat is its name?"]
    assert "note: the prompt follows" not in home.ssmd(*asked, given="\n")[1]
    assert home.asked() == ["What is its name?"]
    closed = _shell(home, '$SSMD run llama "My dog?" --max-tokens 2 --temperature 0 <&-')
    assert (closed.returncode, home.asked()) == (0, ["My dog?"])


def test_a_stdin_that_never_says_anything_is_an_error(home: Home, tmp_path: Path) -> None:
    """Callers leave such a pipe open: no answer may pass for one to its input. Where a terminal shows that it is waited
    for, it is."""
    run = "run llama 'Is anybody there?' --max-tokens 2 --temperature 0"
    before = "import sys, runpy, importlib; importlib.import_module('ssmd.cli.run').UNATTENDED_S = 0.5"
    program = f"{before}; sys.argv[0] = 'ssmd'; runpy.run_module('ssmd', run_name='__main__')"
    words = [sys.executable, "-c", program, *shlex.split(run)]
    piped = subprocess.PIPE
    with subprocess.Popen(words, env=home.env, stdin=piped, stdout=piped, stderr=piped, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert (process.wait(60), process.stdout.read()) == (2, "")
        assert re.fullmatch("error: stdin was silent for 0 s; .* </dev/null; .*<FILE\n", process.stderr.read())
    late = f"until [ -e {tmp_path / 'go'} ]; do sleep 0.1; done; echo It is late."
    with terminal(f"({late}) | $SSMD {run}; echo ended $?", home.env) as one:
        one.until("waiting for stdin.*\n")
        (tmp_path / "go").touch()
        one.until("ended 0")
    assert home.asked() == ["It is late.\n\nIs anybody there?"]


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_stream_that_is_closed_is_one_that_nobody_reads(home: Home, closed: str) -> None:
    home.ssmd("run", "llama", "Hello", "--max-tokens", "2", "--temperature", "0")
    done = _shell(home, f"$SSMD session list {closed}")
    assert (done.returncode, done.stderr) == (0, "")
    assert bool(done.stdout) == (closed == "2>&-")


def _shell(home: Home, command: str, **extra: str) -> subprocess.CompletedProcess[str]:
    env = {**home.env, "SSMD": f"{sys.executable} -m ssmd", **extra}
    return subprocess.run(["/bin/sh", "-c", command], env=env, capture_output=True, text=True, timeout=60)


def test_run_continues_a_session_by_id_by_id_prefix_or_as_last(either: Home) -> None:
    asked = ("--temperature", "0", "--max-tokens", "4", "--json")
    first = json.loads(either.ssmd("run", "llama", "One", *asked)[0])
    assert first["usage"]["completion_tokens"] == 4
    either.ssmd("run", "llama", "Another", *asked)
    again = json.loads(either.ssmd("run", "llama", "Two", "--session", first["session"][:18], *asked)[0])
    assert again["session"] == first["session"]
    assert again["usage"]["ssmd"]["resume"] == "exact"
    for question in (("llama", "Three"), ("And four?",)):  # words with spaces are no model's name
        later = json.loads(either.ssmd("run", *question, "-c", *asked)[0])
        assert later["session"] == first["session"]
        assert either.said()[-1] == ("assistant", later["text"])
    assert either.asked() == ["One", "Two", "Three", "And four?"]
    several = commands.ssmd("run", "llama", "x", "--session", "ses_", env=either.env)
    assert several.returncode == 1
    assert "sessions begin with 'ses_'" in several.stderr
    for wrong in (["--session", "ses_x", "-c"], ["-c", "--no-store"], ["--keep-alive", "soon"], ["--min-p", "2"]):
        assert commands.ssmd("run", "llama", "x", *wrong, env=either.env).returncode == 2


def test_options_reach_the_sampler(home: Home) -> None:
    plain = ("run", "llama", "Say it again", "--max-tokens", "12", "--no-store", "--temperature", "0")
    said = home.ssmd(*plain)[0]
    assert home.ssmd(*plain, "--repeat-penalty", "50", "--repeat-last-n", "-1")[0] != said
    assert home.ssmd(*plain, "--stop", said[1:4])[0] == said[0] + "\n"
    flat = (*plain[:-1], "2", "--seed", "5")
    drawn = home.ssmd(*flat)[0]
    assert home.ssmd(*flat)[0] == drawn != said
    for narrow in (("--top-k", "1"), ("--min-p", "1"), ("--top-p", "0.0000001")):
        assert home.ssmd(*flat, *narrow)[0] == said


def test_pasted_lines_blocks_and_slashes_are_messages(either: Home) -> None:
    lines = "first\nsecond\nthird"
    wanted = [lines, "quoted\n\n/help is text", "a\nb", "/etc/hosts is a file", "/tmp too"]
    typed = [
        f"{PASTE}{lines}{PASTED}",
        '"""quoted\r\r/help is text"""',
        f"a{ALT_ENTER}b",
        "//etc/hosts is a file",
        " /tmp too",
    ]
    with either.chat() as chat:
        for text in typed:
            chat.line(text)
            chat.until(STORED)
        chat.line("/quit")
        assert "continue with: ssmd run --session" in chat.end()
    assert either.asked() == wanted


def test_what_is_typed_is_kept_for_this_user_alone(home: Home) -> None:
    with home.chat() as chat:
        chat.line("Something to remember")
        chat.until(STORED)
        chat.line("/quit")
        chat.end()
    file = home.data / "chat_history"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert "+Something to remember\n" in file.read_text()
    with home.chat() as chat:
        chat.type(UP * 2)  # the one before is /quit
        chat.line("!")
        chat.until(STORED)
        chat.type(CTRL_D)
        chat.end()
    assert home.asked() == ["Something to remember!"]


def test_a_long_history_loses_its_older_half(home: Home) -> None:
    file = home.data / "chat_history"
    file.write_text("".join(f"\n# 2026-11-24 00:00:0{n % 10}.0\n+entry {n:06}\n" for n in range(40_000)))
    with home.chat() as chat:
        chat.type(UP)
        chat.until("entry 039999")
        chat.type(CTRL_C)
        chat.type(CTRL_D)
        chat.end()
    left = file.read_text()
    assert len(left) < 1 << 20
    assert left.startswith("\n# ")
    assert "entry 039999" in left
    file.write_text("")


def test_ctrl_c_stops_the_answer_and_loses_nothing_typed(models: Path, tmp_path: Path) -> None:
    """Typed before Ctrl-C, it stands at the next prompt; it is not shown in the answer; what was said is kept."""
    home = Home(tmp_path, models)
    with running(home.path, "mamba"), home.chat(ENDLESS, "mamba") as chat:
        chat.line("Tell me a long story")
        chat.until(ANSWERS)
        chat.type("And wh")
        chat.type(CTRL_C)
        shown = chat.until(STORED)
        assert shown.endswith(" …\n[stopped; stored]")
        assert "And" not in shown
        chat.line("at then?")
        chat.until("And what then")
        chat.until(ANSWERS)
        chat.type(f"{PASTE}pasted\nmeanwhile{PASTED}")
        chat.type(CTRL_C)
        assert "pasted" not in chat.until(STORED)
        chat.line("")
        chat.until(ANSWERS)
        chat.type(CTRL_C)
        chat.until(STORED)
        chat.type(CTRL_C)
        chat.until("Ctrl-D ends the chat")
        chat.type("a line to clear")
        chat.until("to clear")
        chat.type(CTRL_C)
        chat.type(CTRL_D)
        chat.end()
        [session] = home.sessions()
        turns = home.turns(session.id)
    assert [t.parent for t in turns] == [None, *(t.id for t in turns[:-1])]  # each goes on from what was kept
    assert [t.messages[-1].content for t in turns] == ["Tell me a long story", "And what then?", "pasted\nmeanwhile"]
    assert not any(t.complete for t in turns)


def test_ctrl_c_right_after_enter_stops_the_answer(models: Path, tmp_path: Path) -> None:
    """However early it comes. Text typed in between stays. The terminal never has to report its cursor."""
    home = Home(tmp_path, models)
    with running(home.path, "mamba"), home.chat(ENDLESS, "mamba") as chat:
        shown = chat.child.logfile_read = io.StringIO()
        chat.child.delaybeforesend = None
        for after_ms in (0, 1, 3, 8, 15, 30, 60):
            chat.until(r"\?25h")  # the prompt is drawn: from here on a key is a byte
            chat.type(f"Tell me a story{ENTER}next")
            time.sleep(after_ms / 1e3)
            chat.type(CTRL_C)
            chat.until("stopped; (not )?stored", 10)
            chat.until("> next")
            chat.type(CTRL_C)  # clears the line
            chat.type(CTRL_C)
            chat.until("ends the chat")
        chat.type(CTRL_D)
        chat.end()
    assert "\x1b[6n" not in shown.getvalue()


def test_a_one_shot_answer_that_is_stopped_ends_with_130(models: Path, tmp_path: Path) -> None:
    home = Home(tmp_path, models)
    command = f"trap : INT; $SSMD run mamba 'Tell me' {ENDLESS}; echo ended $?"
    with terminal(command, home.env) as one:
        one.until(r"\?25h(?s:\x1b\[[0-9;?]*[A-Za-z]|[^\w\x1b])*\w", 60)  # the bar is gone, and the answer begins
        one.type(CTRL_C)
        assert one.until(r"ended \d+").endswith(" …\n[stopped; stored]\nended 130")
    [turn] = home.turns(home.sessions()[0].id)
    assert not turn.complete


def test_every_command(home: Home) -> None:
    with home.chat() as chat:
        chat.line("/session")
        chat.until("a new one: nothing is kept yet")
        chat.line("/fork")
        chat.until("error: this chat is not stored yet")
        chat.line("/regen")
        chat.until("error: nothing was asked yet")
        chat.line("One")
        chat.until(STORED)
        chat.line("Two")
        chat.until(STORED)
        session = home.sessions()[0].id
        chat.line("/help")
        helped = chat.until("after a space")
        for name in [
            "help",
            "session",
            "sessions",
            "tree",
            "fork",
            "regen",
            "more",
            "edit",
            "system",
            "set",
            "stats",
            "model",
            "quit",
        ]:
            assert f"/{name} " in helped
        chat.line("/session")
        chat.until(session)

        chat.line("/set temperature 2")
        chat.line("/set seed 1")
        chat.line("/set top_p much")
        chat.until("error: top_p is 'much', expected a number from 0 to 1")
        chat.line("/set")
        chat.until(r"temperature +2\.0.*seed +1")
        chat.line("/regen")
        chat.until(STORED)
        one, two, regenerated = home.turns(session)
        assert two.parent == regenerated.parent == one.id
        assert two.messages == regenerated.messages
        assert two.answer != regenerated.answer  # as it was drawn at another temperature
        chat.line("/set temperature default")

        chat.line("/edit")
        chat.until("> Two")
        chat.line(" and a half")
        chat.until(STORED)
        edited = home.turns(session)[-1]
        assert (edited.parent, edited.messages[-1].content) == (one.id, "Two and a half")

        chat.line("/tree")
        drawn = chat.until(rf"\*  {edited.id[:13]}.*\n")
        assert "4 turns, 3 branches" in drawn
        for turn in (one, two, regenerated):
            assert turn.id[:13] in drawn

        chat.line(f"/fork {two.id[:12]}")
        chat.until(r"session ses_\w+: 2 turns")
        chat.line("In the fork")
        chat.until(STORED)
        fork = home.sessions()[0]
        assert (fork.id != session, fork.base) == (True, two.id)
        assert home.asked() == ["One", "Two", "In the fork"]

        chat.line("/sessions")
        listed = chat.until(session)
        assert re.search(rf"\* +1 {fork.id}", listed)
        chat.line("/session 2")
        chat.until(f"session {session}: 2 turns")
        chat.line(f"/session {fork.id[:20]}")
        chat.until(f"session {fork.id}: 3 turns")
        chat.line("/session 999")
        chat.until("error: the list has")
        chat.line("/session nothing")
        chat.until("error: there is no session 'nothing'")

        chat.line("/system Be brief.")
        chat.until(r"\x1b\[\?2004lBe brief\.\r\n")
        chat.line("Go on")
        chat.until(STORED)
        assert home.said()[0] == ("system", "Be brief.")
        assert home.sessions()[0].id == fork.id
        chat.line('/system ""')
        chat.until("there is no system prompt")

        chat.line("/stats")
        chat.until("answer: no")
        chat.line("/model")
        chat.until("model: llama; there are: llama")
        chat.line("/model lama")
        chat.until(r"error: there is no model 'lama' here; did you mean llama\?")
        chat.line("/bye")
        assert f"ssmd run --session {fork.id}" in chat.end()


def test_an_answer_that_was_cut_goes_on(home: Home) -> None:
    with home.chat() as chat:
        chat.line("/more")
        chat.until("error: there is no answer yet")
        chat.line("Count")
        chat.until(r"\(cut at its limit; /more continues it\)\r\n")
        chat.until(STORED)
        cut = home.said()[-1][1]
        chat.line("/more")
        chat.until(STORED)
        longer = home.said()[-1][1]
        assert longer.startswith(cut)
        assert len(longer) > len(cut)
        chat.line("And now?")
        assert ", 0 cached" not in chat.until(STORED)
        chat.line("/session")
        assert 0 < int(re.findall(r"context: (\d+) of 512 tokens", chat.until("% full"))[0]) < 512
        chat.type(CTRL_D)
        chat.end()
    assert [text for _, text in home.said()[:3]] == ["Count", longer, "And now?"]
    assert len(home.turns(home.sessions()[0].id)) == 3


def test_an_answer_that_fills_the_context_cannot_go_on() -> None:
    asked = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because"}]
    one = Talk(Daemon(lambda: None), "llama", messages=asked, finish="length", room=ContextRoom(512, 0, 0))
    assert one.ended().startswith("the last question and its answer fill the context")
    assert Talk(Daemon(lambda: None), "llama", messages=asked * 2, finish="length", room=one.room).ended() == ""
    one.room, one.finish = ContextRoom(512, 100, 0), "stop"
    assert one.ended() == "the last answer is complete"


def test_the_end_of_the_context_is_no_wall(home: Home) -> None:
    """A chat of more than three contexts: what is left out is told each time, and all of it is kept."""
    told = []
    with home.chat() as chat:
        for n in range(24):
            chat.line(f"{n}: {'and so on, ' * 14}")
            told.append(chat.until(STORED))
        chat.type(CTRL_D)
        chat.end()
    assert len(home.asked()) == 24
    full = [n for n, text in enumerate(told) if "of 512 tokens are left; then old messages drop out)" in text]
    cut = [n for n, text in enumerate(told) if re.search(r"the oldest \d+ messages: .* reads on from '\d+: and", text)]
    assert len(cut) > 1
    assert full[0] < cut[0]
    assert len(full) <= len(cut) + 1  # each end that comes near is told of once


@pytest.mark.parametrize("typed", ["/sesion", "/usr/bin/env", "/HELP me", "/"])
def test_an_unknown_command_goes_to_nobody(home: Home, typed: str) -> None:
    before = {s.id: s.turns for s in home.sessions()}
    with home.chat() as chat:
        chat.line(typed)
        said = chat.until("error: .*\n")
        assert f"there is no command {typed.split()[0]}" in said
        assert ("did you mean /session?" in said) == (typed == "/sesion")
        chat.line("/exit")
        chat.end()
    assert {s.id: s.turns for s in home.sessions()} == before


def test_the_daemon_is_killed_and_comes_back_elsewhere(models: Path, tmp_path: Path) -> None:
    """In the middle of an answer, then between two: one line each time, and the message is not lost."""
    home = Home(tmp_path, models)
    with running(home.path, "mamba") as (process, served):
        chatting = home.chat(ENDLESS, "mamba")
        chat = chatting.__enter__()
        try:
            chat.line("/set max_tokens 4")
            chat.line("Hello")
            chat.until(STORED)
            [before] = home.sessions()
            chat.line("/set max_tokens 100000")
            chat.line("Tell me a long story")
            chat.until(ANSWERS)
            process.kill()
            process.wait()
            said = chat.until("Enter sends it again")
            assert said.count("error: ") == 1
            assert re.search(r"\nerror: the daemon went away in the middle of an answer; your message is kept", said)
            chat.line("")
            assert "error: no daemon runs any more; start it with: ssmd serve" in chat.until("Enter sends it again")
            with running(home.path, "mamba") as (_, moved):
                assert moved.port != served.port
                chat.line("")
                chat.until(f"using the daemon at {moved.url}\r\n[^\x1b]")
                chat.type(CTRL_C)
                chat.until(STORED)
                chat.line("/set max_tokens 4")
                chat.line("And then?")
                chat.until(STORED)
                chat.type(CTRL_D)
                chat.end()
                [after] = home.sessions()
                assert after.id == before.id
                assert home.asked() == ["Hello", "Tell me a long story", "And then?"]
        finally:
            chatting.__exit__(None, None, None)


def test_chat_goes_on_in_a_new_session_after_its_own_is_removed(home: Home) -> None:
    with home.chat() as chat:
        chat.line("One")
        chat.until(STORED)
        gone = home.sessions()[0].id
        home.ssmd("session", "rm", gone)
        chat.line("Two")
        chat.until("the session was removed")
        chat.line("")
        chat.until(STORED)
        chat.type(CTRL_D)
        chat.end()
    assert home.asked() == ["One", "Two"]
    assert gone not in [s.id for s in home.sessions()]


ENDS = {"/quit": ["/quit\r"], "Ctrl-D": [CTRL_D], "a signal": []}


@pytest.mark.parametrize("how", ENDS)
def test_the_terminal_is_as_it_was(home: Home, tmp_path: Path, how: str) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    command = f"stty -a >{before}; $SSMD run llama {ASKED}; stty -a >{after}"
    with terminal(command, home.env) as one:
        one.until(BEGUN)
        one.line("Hello")
        one.until(STORED)
        for keys in ENDS[how]:
            one.type(keys)
        if not ENDS[how]:
            os.kill(_child_of(one.child.pid), signal.SIGTERM)
        assert "\x1b[?2004l" in _raw(one)
    assert before.read_text() == after.read_text()
    assert "-echo " not in after.read_text()


def _raw(one: Terminal) -> str:
    import pexpect

    one.child.expect(pexpect.EOF)
    return str(one.child.before)


def _child_of(process: int) -> int:
    [child] = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return int(child)


def test_an_answer_does_not_steer_the_terminal() -> None:
    from ssmd.cli.chat import terminal as module

    text = "".join(map(chr, range(0xA0))).translate(module._CONTROLS)
    assert {c for c in text if not c.isprintable()} == {"\n", "\t"}


def test_lines_of_a_chat_whose_output_goes_elsewhere(home: Home, tmp_path: Path) -> None:
    """Each typed line is read without a drawn prompt; stdout has the answers alone."""
    with terminal(f"$SSMD run llama {ASKED} >{tmp_path / 'out'}", home.env) as one:
        one.until(BEGUN)
        one.line("First")
        one.until(STORED)
        one.type(CTRL_C)
        one.until("Ctrl-D ends the chat")
        one.line("Second")
        one.until(STORED)
        one.type(CTRL_D)
        one.end()
    answers = [content for role, content in home.said() if role == "assistant"]
    assert (tmp_path / "out").read_text() == "".join(f"{a}\n" for a in answers) + "\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_one_shot_answer_that_is_ended_leaves_no_file(models: Path, tmp_path: Path, number: signal.Signals) -> None:
    home = Home(tmp_path, models)
    home.env["TMPDIR"] = str(tmp_path / "temporary")
    (tmp_path / "temporary").mkdir()
    command = [sys.executable, "-m", "ssmd", "run", "mamba", "Tell me", "--max-tokens", "100000"]
    before = signal.signal(number, signal.SIG_DFL)  # which the tests may have been started to ignore, as by nohup
    try:
        process = subprocess.Popen(command, env=home.env, stdout=subprocess.PIPE)
    finally:
        signal.signal(number, before)
    with process:
        assert process.stdout is not None
        assert process.stdout.read(1)
        assert [*(tmp_path / "temporary").glob("ssmd-*")]
        process.send_signal(number)
        assert process.wait(30) == 128 + number
    assert list((tmp_path / "temporary").iterdir()) == []


def test_nohup_still_holds(models: Path, tmp_path: Path) -> None:
    home = Home(tmp_path, models)
    command = "trap '' HUP; exec $SSMD run mamba 'Tell me' --max-tokens 300"
    env = {**home.env, "SSMD": f"{sys.executable} -m ssmd"}
    with subprocess.Popen(["/bin/sh", "-c", command], env=env, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.read(1)
        process.send_signal(signal.SIGHUP)
        process.stdout.read()
    assert process.returncode == 0


def test_a_daemon_that_cannot_be_found_is_told_of(models: Path, tmp_path: Path) -> None:
    """Its lock is held, but its address is unknown: the model is loaded a second time, and the user is warned."""
    home = Home(tmp_path, models)
    with running(home.path, "llama") as (process, _):
        file = home.data / "daemon.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "pid": 1}))
        told = home.ssmd("run", "llama", "Hello", "--max-tokens", "2")[1]
    state = "does not answer yet (starting, stopping or repairing)"
    assert told.startswith(f"process {process.pid} uses {home.data} and {state}; the model is loaded here")


def test_where_no_socket_can_be_a_port_with_a_token_serves(models: Path, tmp_path: Path) -> None:
    """The folder for temporary files has too long a path; nothing is left in it."""
    home = Home(tmp_path, models)
    folder = tmp_path / ("long" * 40)
    folder.mkdir()
    home.env["TMPDIR"] = str(folder)
    assert home.ssmd("run", "llama", "Hello", "--max-tokens", "2")[0]
    assert list(folder.iterdir()) == []
