"""`ssmd session export` and `import`: several at once, with and without states, read anew, and what can go wrong."""

from __future__ import annotations

import json
import os
import stat
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import commands
import pytest
from cli.test_session_cli import Ssmd
from conftest import TinyArtifacts
from daemon import daemon
from hostile import join, seal, split
from keeping import Chat
from whole.test_moving import QUESTIONS, ask, cached, forged, say, session_of, talk

from ssmd.sessions.store import Store


@pytest.fixture
def ssmd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ssmd:
    return Ssmd(tmp_path, monkeypatch)


@pytest.fixture
def chats(ssmd: Ssmd) -> Iterator[Store]:
    store = Store.open(ssmd.data)
    for name in ("ses_1", "ses_2", "ses_3"):
        chat = Chat(store, name)
        chat.say(f"{name}-1", None, f"hi {name}", "hello", system="Be brief.")
        chat.say(f"{name}-2", f"{name}-1", "more", "sure")
        chat.say(f"{name}-2b", f"{name}-1", "less", "fine")
    yield store
    store.close()


def lines(text: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in text.splitlines()]


def test_several_to_a_folder_and_back(ssmd: Ssmd, chats: Store, tmp_path: Path) -> None:
    done = ssmd("export", "ses_1", "ses_3", "ses_1", "--into", "out")
    assert done.stdout.count("3 turns, 2 states") == 2
    assert sorted(os.listdir("out")) == ["ses_1.ssmd", "ses_3.ssmd"]
    assert stat.S_IMODE(os.stat("out").st_mode) == 0o700
    assert stat.S_IMODE(os.stat("out/ses_1.ssmd").st_mode) == 0o600
    refused = ssmd("export", "--all", "--into", "out", code=1)
    assert "exists already" in refused.stderr
    assert not Path("out/ses_2.ssmd").exists(), "nothing is written if something is in the way"
    told = lines(ssmd("export", "--all", "--into", "out", "--force", "--json").stdout)
    assert sorted(str(t["file"]) for t in told) == ["out/ses_1.ssmd", "out/ses_2.ssmd", "out/ses_3.ssmd"]
    ssmd("rm", "ses_1", "ses_2")
    back = lines(ssmd("import", "out/ses_1.ssmd", "out/ses_2.ssmd", "out/ses_3.ssmd", "--json").stdout)
    assert [(b["id"] == f"ses_{i}", b["renamed"]) for i, b in enumerate(back, 1)] == [
        (True, False),
        (True, False),
        (False, True),
    ]


def test_states_of_every_branch_or_none(ssmd: Ssmd, chats: Store) -> None:
    sizes = {}
    for option, states in (("--no-state", 0), ("--force", 2), ("--all-states", 5)):
        told = ssmd.json("export", "ses_1", "x.ssmd", option, "--force")
        assert (told["turns"], told["states"], told["left_out"]) == (3, states, 0)
        sizes[option] = told["bytes"]
    assert sizes["--no-state"] < sizes["--force"] < sizes["--all-states"]
    told = ssmd.json("import", "x.ssmd")
    assert told["states"] == 5


def test_a_bad_file_among_good_ones(ssmd: Ssmd, chats: Store, tmp_path: Path) -> None:
    ssmd("export", "--all", "--into", "out")
    Path("out/ses_2.ssmd").write_bytes(Path("out/ses_2.ssmd").read_bytes()[:-1])
    ssmd("rm", "ses_1", "ses_2", "ses_3")
    done = ssmd("import", "out/ses_1.ssmd", "out/ses_2.ssmd", "out/none.ssmd", "out/ses_3.ssmd", code=1)
    assert "out/ses_2.ssmd cannot be imported: it is cut off or was altered" in done.stderr
    assert "there is no file out/none.ssmd" in done.stderr
    assert "2 of 4 files were not imported" in done.stderr
    assert {s["id"] for s in ssmd.json("list")} == {"ses_1", "ses_3"}


@pytest.mark.parametrize(
    ("args", "code", "reason"),
    [
        (("export",), 2, "ID FILE"),
        (("export", "ses_1"), 2, "ID FILE"),
        (("export", "ses_1", "ses_2", "ses_3"), 2, "--into DIR"),
        (("export", "--all"), 2, "--into DIR"),
        (("export", "--into", "out"), 2, "name the sessions"),
        (("export", "ses_1", "--all", "--into", "out"), 2, "name the sessions"),
        (("export", "ses_1", "x.ssmd", "--no-state", "--all-states"), 2, "contradict"),
        (("export", "ses_1", "nobody", "--into", "out"), 1, "no session 'nobody'"),
        (("export", "ses_1", "../x", "--into", "out"), 1, "no session '../x'"),
        (("import",), 2, "Missing argument"),
        (("import", "nothing.ssmd", "--reread"), 1, "there is no file"),
    ],
)
def test_bad_input(ssmd: Ssmd, chats: Store, args: tuple[str, ...], code: int, reason: str) -> None:
    done = ssmd(*args, code=code)
    assert reason in done.stderr
    assert done.stdout == ""
    assert not Path("out").exists()


def test_ids_that_only_capitals_tell_apart(ssmd: Ssmd, chats: Store) -> None:
    Chat(chats, "SES_1").say("u1", None, "later", "yes")
    assert "capitals" in ssmd("export", "--all", "--into", "out", "--force", code=1).stderr


def test_a_file_cannot_steer_the_terminal(ssmd: Ssmd, chats: Store, tmp_path: Path) -> None:
    ssmd("export", "ses_1", "chat.ssmd")
    parts = split((tmp_path / "chat.ssmd").read_bytes())
    parts.document["session"] |= {"model": "granite\x1b]0;owned\x07\x9b2J", "id": "ses_steers"}
    (tmp_path / "forged.ssmd").write_bytes(seal(join(parts)))
    done = ssmd.json("import", "forged.ssmd")["id"]
    for command in (("list",), ("show", done), ("tree", done)):
        shown = ssmd(*command).stdout
        assert "granite\ufffd]0;owned\ufffd\ufffd2J" in shown
        assert not set(shown) & {"\x1b", "\x07", "\x9b"}, command


def test_a_newer_format(ssmd: Ssmd, chats: Store) -> None:
    ssmd("export", "ses_1", "x.ssmd")
    parts = split(Path("x.ssmd").read_bytes())
    Path("x.ssmd").write_bytes(seal(join(replace(parts, document=parts.document | {"format": 3}))))
    done = ssmd("import", "x.ssmd", code=1)
    assert done.stderr.splitlines()[-1] == (
        "error: x.ssmd cannot be imported: it has format 3, this ssmd reads format 2 alone: "
        "import it with the version that wrote it, or a newer one"
    )


def test_another_model_and_reread(artifacts: TinyArtifacts, tmp_path: Path) -> None:
    """With models installed, as processes of their own beside a daemon that runs."""
    artifacts["llama-f32"]
    models = tmp_path / "models"
    for folder, name in ((models, "llama"), (tmp_path / "other", "granite")):
        folder.mkdir()
        (folder / name).mkdir()
        (folder / name / "litert-cpu-f32").symlink_to(artifacts[f"{name}-f32"])

    def session(*args: str) -> subprocess.CompletedProcess[str]:
        done = commands.ssmd("session", *args, env=os.environ)
        assert done.returncode == 0, done.stderr
        return done

    with daemon(artifacts["llama-f32"], tmp_path / "a") as one:
        messages, replies = talk(one, 2)
        file = tmp_path / "talk.ssmd"
        session("export", session_of(replies[0]), str(file), "--data-dir", str(tmp_path / "a"))
        messages.append(say(QUESTIONS[2]))
        honest = ask(one, messages)
    file.write_bytes(forged(file.read_bytes()))
    with daemon(artifacts["llama-f32"], tmp_path / "b") as one:
        here = ("--data-dir", str(tmp_path / "b"), "--models-dir", str(models))
        told = json.loads(session("import", str(file), "--reread", "--json", *here).stdout)
        assert (told["states"], told["dropped"], told["text_only"]) == (3, 3, None)
        reply = ask(one, messages)
        assert (session_of(reply), cached(reply)) == (told["id"], cached(honest))
        assert abs(reply["choices"][0]["logprobs"]["content"][0]["logprob"] - first_of(honest)) < 1e-3
    there = ("--data-dir", str(tmp_path / "c"), "--models-dir", str(tmp_path / "other"))
    for option in ((), ("--reread",)):
        said = session("import", str(file), *option, *there).stdout
        assert "0 states" in said
        assert "text only: it is of lineage" in said
        assert "models here are: granite (" in said


def first_of(reply: dict[str, object]) -> float:
    choices = reply["choices"]
    assert isinstance(choices, list)
    return float(choices[0]["logprobs"]["content"][0]["logprob"])
