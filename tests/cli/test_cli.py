"""The commands, as a person and a script meet them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import commands
from conftest import TinyArtifacts
from strangers import forged
from test_server import environment

from ssmd import __version__
from ssmd.model.defaults import Default, write


def ssmd(home: Path, *arguments: str, given: str = "") -> subprocess.CompletedProcess[str]:
    return commands.ssmd(*arguments, env=environment(home), given=given)


def good(home: Path, *arguments: str, given: str = "") -> str:
    done = ssmd(home, *arguments, given=given)
    assert done.returncode == 0, done.stderr
    return done.stdout


def refused(home: Path, *arguments: str, given: str = "") -> str:
    done = ssmd(home, *arguments, given=given)
    assert (done.returncode, done.stdout) == (1, ""), done
    said = done.stderr.splitlines()
    assert len(said) == 1, done.stderr
    assert said[0].startswith("error: ")
    return said[0]


def answer(*arguments: str) -> Sequence[str]:
    """Of the tiny model, always the same."""
    return ("run", *arguments, "--temperature", "0", "--max-tokens", "8", "--threads", "1")


def test_help_names_the_commands_and_loads_nothing_heavy(home: Path) -> None:
    said = good(home, "--help")
    for command in ("serve", "run", "build", "pull", "list", "show", "verify", "bench", "doctor", "session"):
        assert re.search(rf"\b{command}\b", said)
    assert good(home, "--version") == f"ssmd {__version__}\n"
    loaded = (
        "import sys, ssmd.cli; heavy = ('numpy', 'pydantic', 'sqlalchemy', 'starlette', 'huggingface_hub', 'httpx2');"
        "print([m for m in heavy if m in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", loaded], text=True) == "[]\n"


def test_usage_errors_are_2(home: Path) -> None:
    for arguments in (["nothing"], ["serve", "--port", "x"], ["run", "tiny", "x", "--max-tokens", "0"]):
        assert ssmd(home, *arguments).returncode == 2


def test_list_names_good_and_broken(home: Path) -> None:
    rows = {row["name"]: row for row in json.loads(good(home, "list", "--json"))}
    assert rows["tiny"]["problem"] is None
    assert (rows["tiny"]["runtime"], rows["tiny"]["quantization"]) == ("litert", "f32")
    assert "has 3 bytes" in rows["broken"]["problem"]
    table = good(home, "list")
    assert "broken: file 'model.tflite'" in table
    assert re.search(r"tiny +litert +cpu +f32 +512", table)
    empty = ssmd(home, "list", "--models-dir", str(home / "none"))
    assert (empty.returncode, empty.stdout) == (0, "")
    assert "ssmd pull smollm2" in empty.stderr


def test_show(home: Path, artifacts: TinyArtifacts) -> None:
    manifest = json.loads((artifacts["llama-f32"] / "artifact.json").read_text())
    shown = json.loads(good(home, "show", "tiny", "--json"))
    assert shown["build"] == manifest["build"]
    assert shown["state_bytes"]["fixed"] == 0  # attention only
    assert manifest["lineage"] in good(home, "show", "tiny")
    assert shown["defaults"] == {}
    assert re.search(r"^sampling +temperature 1$", good(home, "show", "tiny"), re.MULTILINE)
    assert "has 3 bytes" in refused(home, "show", "broken")
    assert "installed in" in refused(home, "show", "unknown")


def test_show_tells_defaults_with_their_source(home: Path, artifacts: TinyArtifacts, tmp_path: Path) -> None:
    tiny = tmp_path / "tiny"
    shutil.copytree(artifacts["llama-f32"], tiny)
    write(tiny, {"temperature": Default(0.2, "a card"), "top_p": Default(0.9, "a card"), "top_k": Default(5, "a file")})
    assert "temperature 0.2, top_p 0.9 (a card); top_k 5 (a file)\n" in good(home, "show", str(tiny))
    shown = json.loads(good(home, "show", str(tiny), "--json"))["defaults"]
    assert shown["temperature"] == {"value": 0.2, "source": "a card"}


def test_a_default_that_cannot_be_is_refused_at_the_start(home: Path) -> None:
    for given, why in (("temprature=1", "did you mean temperature?"), ("temperature=3", "a number from 0 to 2")):
        done = ssmd(home, "serve", "tiny", "--port", "0", "--default", given)
        assert done.returncode == 2
        assert "--default" in done.stderr
        assert why in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1


def test_what_a_manifest_says_steers_no_terminal(home: Path, artifacts: TinyArtifacts, tmp_path: Path) -> None:
    builders = {"\x1b]0;x\x07": "\x9b2J"}
    path = forged(artifacts["llama-f32"], tmp_path / "forged", {}, builders=builders)
    assert all(c.isprintable() or c == "\n" for c in good(home, "show", str(path)))


def test_verify(home: Path, tmp_path: Path) -> None:
    report = json.loads(good(home, "verify", "tiny", "--json"))
    assert report["passed"] is True
    assert max(step["rms_relative"] for step in report["steps"]) < 1e-4
    assert "passed: worst rms" in good(home, "verify", "tiny")
    assert "has 3 bytes" in refused(home, "verify", "broken")
    assert "is no artifact" in refused(home, "verify", str(tmp_path))


def test_run_answers_a_prompt(home: Path) -> None:
    said = good(home, *answer("tiny", "Tell me a story"))
    assert said.endswith("\n")
    assert said.strip()
    assert good(home, *answer("tiny"), given="Tell me a story") == said
    assert "stdin is empty" in ssmd(home, *answer("tiny"), given="").stderr


def test_run_goes_on_with_a_session(home: Path) -> None:
    first = ssmd(home, *answer("tiny", "My name is Ada and I count boats on the bridge."), "--stats")
    assert "0 cached (none)" in first.stderr or "cached" in first.stderr
    [session] = [
        s for s in json.loads(good(home, "session", "list", "--json")) if s["title"].startswith("My name is Ada")
    ]
    second = ssmd(home, *answer("tiny", "And then?"), "--session", session["id"], "--stats")
    assert second.returncode == 0, second.stderr
    assert "(exact)" in second.stderr
    shown = json.loads(good(home, "session", "show", session["id"], "--json"))
    assert shown["turns"] == 2
    assert "no session" in refused(home, *answer("tiny", "x"), "--session", "unknown")
    assert ssmd(home, *answer("tiny", "x"), "--session", "unknown", "--no-store").returncode == 2


def test_run_refuses_what_it_cannot_do(home: Path) -> None:
    assert "has 3 bytes" in refused(home, *answer("broken", "x"))
    assert "context" in refused(home, *answer("tiny", "river " * 2000))
    assert ssmd(home, "run", "tiny", "x", "--temperature", "nan").returncode == 2
    assert "SSMD_PORT" in ssmd_with(home, {"SSMD_PORT": "-1"}, "list")


def ssmd_with(home: Path, extra: dict[str, str], *arguments: str) -> str:
    done = commands.ssmd(*arguments, env={**environment(home), **extra})
    assert done.returncode == 1
    return done.stderr
