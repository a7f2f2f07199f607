"""`ssmd launch`, with a program in an agent's place that writes down how it was started."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import commands
import pytest
from conftest import TinyArtifacts
from daemon import soon
from keyfile import written
from noted import note_all
from serving import serving
from standing import TOKEN, found_at

from ssmd.api.http.access import Keys
from ssmd.app import create_app
from ssmd.cli.launch.agents import AGENTS, Beginning, Target
from ssmd.config import Settings
from ssmd.engine.host.opening import close_host, open_host

KEY = "a-key-of-the-user"
AGENT = """#!{python}
import json, os, signal, stat, sys, time
given = [*sys.argv[1:], *os.environ.values()]
files = [one for one in given if "/ssmd-launch-" in one and os.path.isfile(one)]
modes = [stat.S_IMODE(os.stat(os.path.dirname(one)).st_mode) for one in files]
texts = {{os.path.basename(one): open(one).read() for one in files}}
said = dict(arguments=sys.argv[1:], environment=dict(os.environ), files=texts, modes=modes)
out = os.environ["AGENT_OUT"]
def leave(number, frame):
    open(out + "-signal", "w").write(str(number))
    sys.exit(9)
for one in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
    signal.signal(one, leave)
open(out + "-new", "w").write(json.dumps(said))
os.rename(out + "-new", out)
while "--wait" in sys.argv:
    time.sleep(0.05)
if "--killed" in sys.argv:
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(7)
"""

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the program in the agent's place is a script")


@dataclass(frozen=True)
class Place:
    """A daemon that commands find, and a folder of programs for their PATH."""

    folder: Path
    url: str

    @property
    def env(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("SSMD_", "ANTHROPIC_"))}
        own = {"PATH": f"{self.folder / 'bin'}", "AGENT_OUT": str(self.folder / "out.json"), "HOME": str(self.folder)}
        own |= {"XDG_CONFIG_HOME": str(self.folder / "config"), "TMPDIR": str(self.folder / "tmp")}
        return {**kept, **own, "SSMD_DATA_DIR": str(self.folder / "data"), "ANTHROPIC_API_KEY": "sk-of-the-user"}

    def launch(self, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        return commands.ssmd("launch", *arguments, env={**self.env, **env})

    def started(self) -> Any:
        """Return how the agent was started last."""
        return json.loads((self.folder / "out.json").read_text())


@contextmanager
def daemon_of(folder: Path, models: Mapping[str, Path], **settings: Any) -> Iterator[Place]:
    """A daemon that serves these artifacts by these names; the agents are on its commands' PATH."""
    for name, artifact in models.items():
        (folder / "data" / "models" / name).mkdir(parents=True)
        (folder / "data" / "models" / name / artifact.name).symlink_to(artifact)
    (folder / "data").chmod(0o700)
    for name in ("bin", "tmp"):
        (folder / name).mkdir()
    note_all(map(str, models.values()), folder / "data")
    for agent in AGENTS.values():
        script = folder / "bin" / agent.program
        script.write_text(AGENT.format(python=sys.executable))
        script.chmod(0o755)
    chosen = Settings(data_dir=folder / "data", threads=1, **settings)
    host = open_host(chosen, None, keep=False, lazy=True)
    host.ready()
    try:
        app = create_app(host, chosen, Keys.of(chosen, TOKEN))
        with serving(app) as served, found_at(folder / "data", served.url):
            yield Place(folder, served.url)
    finally:
        close_host(host)


@pytest.fixture(scope="module")
def place(artifacts: TinyArtifacts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A model without an end, and an alias of it."""
    models = {"mamba": artifacts["mamba-f32"]}
    with daemon_of(tmp_path_factory.mktemp("launch"), models, aliases="gpt-5=mamba") as place:
        yield place


def test_agent_gets_the_daemon_and_its_own_arguments(place: Place) -> None:
    done = place.launch("claude", "--", "-p", "it's me")
    assert (done.returncode, done.stdout, done.stderr) == (7, "", ""), "the exit code is the agent's"
    said = place.started()
    assert said["arguments"][-2:] == ["-p", "it's me"]
    assert "--exclude-dynamic-system-prompt-sections" in said["arguments"]
    assert said["arguments"][said["arguments"].index("--model") + 1] == "mamba"
    environment = said["environment"]
    assert environment["ANTHROPIC_BASE_URL"] == place.url
    assert environment["ANTHROPIC_AUTH_TOKEN"] == "ssmd"
    assert environment["CLAUDE_CODE_ATTRIBUTION_HEADER"] == "0"
    assert "ANTHROPIC_API_KEY" not in environment
    own = json.loads(said["files"]["settings.json"])["env"]
    assert own["ANTHROPIC_BASE_URL"] == place.url, "the user's settings.json would win over the environment"
    assert own["ANTHROPIC_API_KEY"] == ""


@pytest.mark.parametrize("agent", [name for name, one in AGENTS.items() if one.install is not None])
def test_agent_is_told_url_and_model_and_leaves_no_file(agent: str, place: Place) -> None:
    before = {one.name for one in place.folder.iterdir()}
    assert place.launch(agent).returncode == 7
    said = place.started()
    everything = json.dumps([said["arguments"], said["environment"], said["files"]])
    assert place.url in everything
    assert "mamba" in everything
    assert set(said["modes"]) <= {stat.S_IRWXU}, "its files are this user's alone"
    assert list((place.folder / "tmp").iterdir()) == []
    assert {one.name for one in place.folder.iterdir()} <= before | {"out.json"}
    assert TOKEN not in everything, "the daemon's own token may stop the daemon"


def test_alias_names_the_model(place: Place) -> None:
    assert place.launch("pi", "--model", "gpt-5").returncode == 7
    assert place.started()["arguments"][-2:] == ["--model", "gpt-5"]


def test_agent_ended_by_a_signal(place: Place) -> None:
    assert place.launch("pi", "--", "--killed").returncode == 128 + signal.SIGKILL


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_goes_to_the_agent(number: signal.Signals, place: Place) -> None:
    """And its folder is removed when the agent has ended. No terminal sends the agent one of its own."""
    out, caught = place.folder / "out.json", place.folder / "out.json-signal"
    for one in (out, caught):
        one.unlink(missing_ok=True)
    words = [sys.executable, "-m", "ssmd", "launch", "pi", "--", "--wait"]
    env = {**place.env, "PYTHONPATH": os.pathsep.join(one for one in sys.path if one)}
    with subprocess.Popen(words, env=env, stdin=subprocess.DEVNULL, start_new_session=True) as process:
        try:
            soon(out.exists, 60)
            assert len(list((place.folder / "tmp").iterdir())) == 1
            process.send_signal(number)
            assert process.wait(60) == 9
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert caught.read_text() == str(int(number))
    assert list((place.folder / "tmp").iterdir()) == []


# What is printed.


def test_print_runs_nothing_and_a_shell_can_run_it(place: Place) -> None:
    (place.folder / "out.json").unlink(missing_ok=True)
    done = place.launch("opencode", "--print", "--", "run", "it's; rm -rf $HOME")
    assert (done.returncode, done.stderr) == (0, "")
    assert not (place.folder / "out.json").exists()
    words = shlex.split(done.stdout)
    assert words[0] == "env"
    assert words[-3:] == ["opencode", "run", "it's; rm -rf $HOME"]
    [content] = [word.partition("=")[2] for word in words if word.startswith("OPENCODE_CONFIG_CONTENT=")]
    config = json.loads(content)
    assert config["provider"]["ssmd"]["options"]["baseURL"] == f"{place.url}/v1"
    assert config["model"] == config["small_model"] == "ssmd/mamba"
    assert config["provider"]["ssmd"]["models"]["mamba"]["limit"]["output"] == 8192, "a title comes to its end"


@pytest.mark.parametrize("editor", ["zed", "code"])
def test_editors_are_only_printed(editor: str, place: Place) -> None:
    done = place.launch(editor)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"`ssmd launch {editor} --print` prints the settings" in done.stderr
    printed = place.launch(editor, "--print")
    assert printed.returncode == 0
    first, *rest = printed.stdout.splitlines()
    assert first == f"# not run here: merge this into the settings of {editor}"
    assert place.url in json.dumps(json.loads("\n".join(one for one in rest if not one.startswith("#"))))


# Keys.


def test_key_is_the_users_and_hidden_in_print(artifacts: TinyArtifacts, tmp_path: Path) -> None:
    with daemon_of(tmp_path, {"mamba": artifacts["mamba-f32"]}, api_key=KEY) as place:
        assert place.launch("claude", SSMD_API_KEY=KEY).returncode == 7
        assert place.started()["environment"]["ANTHROPIC_AUTH_TOKEN"] == KEY
        hidden = place.launch("claude", "--print", SSMD_API_KEY=KEY).stdout
        assert KEY not in hidden
        assert "ANTHROPIC_AUTH_TOKEN='<key>'" in hidden
        assert KEY in place.launch("claude", "--print", "--show-key", SSMD_API_KEY=KEY).stdout
        bare = place.launch("claude", "--", "--bare", SSMD_API_KEY=KEY)
        assert bare.returncode == 7
        assert place.started()["environment"]["ANTHROPIC_API_KEY"] == KEY
        granted = place.launch("aider")
        assert granted.returncode == 7
        assert "the daemon's key is not in the settings here" in granted.stderr
        key = place.started()["environment"]["AIDER_OPENAI_API_KEY"]
        assert key not in (KEY, TOKEN)
        asked = Request(f"{place.url}/v1/models", headers={"authorization": f"Bearer {key}"})
        assert urlopen(asked).status == 200


def test_key_of_a_file_is_the_first_that_may_generate(artifacts: TinyArtifacts, tmp_path: Path) -> None:
    file = written(
        tmp_path / "keys", f"# ours\nscreen screens-look-only read-only\nalice {KEY}\nbob another-long-key\n"
    )
    with daemon_of(tmp_path, {"mamba": artifacts["mamba-f32"]}, api_keys_file=file) as place:
        assert place.launch("aider", SSMD_API_KEYS_FILE=str(file)).returncode == 7
        assert place.started()["environment"]["AIDER_OPENAI_API_KEY"] == KEY


# Contexts.


def target(context: int | None) -> Target:
    return Target("http://127.0.0.1:1", "m", "k", context, "/f")


@pytest.mark.parametrize(
    ("context", "tokens", "bare", "tools"),
    [
        (None, 20_110, False, False),
        (32_768, 20_110, False, False),
        (26_000, 3_140, False, True),
        (8_192, 3_140, False, True),
        (2_048, 1_180, True, True),
    ],
)
def test_small_context_gets_fewer_tools(context: int | None, tokens: int, bare: bool, tools: bool) -> None:
    claude = AGENTS["claude"]
    beginning = claude.beginning(context)
    assert beginning.tokens == tokens
    setup = claude.setup(target(context), beginning)
    assert ("--bare" in setup.arguments, "--tools" in setup.arguments) == (bare, tools)
    assert ("ANTHROPIC_API_KEY" in setup.environment) == bare, "with --bare it takes no other key"
    assert bool(beginning.kept) == bool(beginning.arguments), "the user is told"
    assert int(setup.environment["CLAUDE_CODE_MAX_OUTPUT_TOKENS"]) <= (context or 32_768) // 4


@pytest.mark.parametrize("name", AGENTS)
def test_measured_beginnings_go_from_long_to_short(name: str) -> None:
    found = AGENTS[name].beginnings
    assert [one.tokens for one in found] == sorted((one.tokens for one in found), reverse=True)
    assert found[0].arguments == ()
    assert AGENTS[name].setup(target(None), Beginning(0)) != AGENTS[name].setup(target(2048), Beginning(0))


def test_context_that_is_too_small_is_told(artifacts: TinyArtifacts, tmp_path: Path) -> None:
    models = {"mamba": artifacts["mamba-f32"], "llama": artifacts["llama-f32"]}
    with daemon_of(tmp_path, models) as place:
        several = place.launch("copilot")
        assert (several.returncode, several.stdout) == (1, "")
        assert (
            "say which model to use, with --model; the daemon has: llama, mamba; with room for what copilot sends: "
            "mamba\n" in several.stderr
        )
        small = place.launch("copilot", "--model", "llama")
        assert (small.returncode, small.stdout) == (1, "")
        assert (
            "copilot sends about 12,670 before your words; these have room: mamba; --anyway starts it" in small.stderr
        )
        assert small.stderr.count("\n") == 1
        assert not (tmp_path / "out.json").exists()
        anyway = place.launch("copilot", "--model", "llama", "--anyway")
        assert anyway.returncode == 7
        assert anyway.stderr.startswith("warning: llama has a context of")
        printed = place.launch("copilot", "--model", "llama", "--print")
        assert (printed.returncode, printed.stderr[:8]) == (0, "warning:")


def test_catalogue_is_named_where_no_model_has_room(artifacts: TinyArtifacts, tmp_path: Path) -> None:
    with daemon_of(tmp_path, {"llama": artifacts["llama-f32"]}) as place:
        said = place.launch("qwen").stderr
        assert "these can be pulled and have room: " in said
        pulled = said.partition("have room: ")[2].partition(";")[0].split(", ")
        assert "granite-4.0-h-350m" in pulled
        assert "smollm2" not in pulled, "its 8,192 tokens are not enough"
        assert "mamba2-130m" not in pulled, "it was not trained to answer"


def test_list_has_each_agent_and_the_way_to_it(place: Place) -> None:
    done = place.launch()
    assert (done.returncode, done.stderr) == (0, "")
    head, *rows = [line.split() for line in done.stdout.splitlines()]
    assert head == ["agent", "sends", "at", "least", "measured", "here"]
    assert [row[0] for row in rows] == list(AGENTS)
    assert rows[0] == ["claude", "20,110", "1,180", "2.1.197", str(place.folder / "bin" / "claude")]
    lost = place.launch(PATH="/nonexistent").stdout
    assert "npm install -g @openai/codex" in lost


# What is refused.


def test_refusals_say_what_to_do(place: Place, tmp_path: Path) -> None:
    lost = place.launch("pi", PATH="/nonexistent")
    install = "npm install -g @mariozechner/pi-coding-agent"
    assert lost.returncode == 1
    assert lost.stderr == f"error: pi is not installed here, or not on PATH; install it with: {install}\n"
    assert place.launch("pi", "--print", PATH="/nonexistent").returncode == 0
    misspelt = place.launch("claud")
    assert (misspelt.returncode, misspelt.stderr) == (2, "error: there is no agent 'claud'; did you mean claude?\n")
    unknown = place.launch("pi", "--model", "mumba/../x")
    assert unknown.returncode == 1
    assert unknown.stderr.startswith("error: Model not found: there is no model 'mumba/../x' here; ")
    none = place.launch("pi", SSMD_DATA_DIR=str(tmp_path / "other"))
    assert none.returncode == 1
    assert (
        none.stderr
        == f"error: no daemon runs on {tmp_path / 'other'}; start one in another terminal with: ssmd serve\n"
    )


def test_daemon_at_a_socket_is_out_of_reach(tmp_path: Path, artifacts: TinyArtifacts, place: Place) -> None:
    at = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(at))
        with found_at(tmp_path / "data", None, socket=at):
            done = place.launch("pi", SSMD_DATA_DIR=str(tmp_path / "data"))
    assert done.returncode == 1
    assert "which agents cannot reach; start it without the setting socket" in done.stderr


@pytest.mark.parametrize(("context", "room"), [(8192, 6144), (32_767, 24_576), (32_768, None), (None, None)])
def test_pi_compacts_a_small_context_when_it_is_full(context: int | None, room: int | None) -> None:
    """Its own reserve is larger than such a context, so it would compact after each turn."""
    setup = AGENTS["pi"].setup(Target("http://h", "m", "k", context, "/f"), Beginning(1))
    text = setup.files["ssmd.js"]
    assert text.startswith("export default (pi) => {\n  pi.registerProvider(")
    assert (f"tokensBefore <= {room} ? {{ cancel: true }}" in text) == (room is not None)
    assert ("session_before_compact" in text) == (room is not None)
