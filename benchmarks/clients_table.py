"""Coding agents and client libraries, each by every protocol that it speaks, with a daemon killed between steps.

    benchmarks/clients_table.py [NAME…] [--install] [--folder FOLDER]     prints the table of docs/clients.md

The task has five prompts: list the files, read one, edit it, run it, say so. The client's own shell tool does each
step. In the first and the third step the daemon is killed (SIGKILL) and started again before the result is sent. A tiny
model cannot do a task, so a file dictates its answers (tests/data/scripted); LiteRT computes every state. Token counts
are the daemon's, from its access log; the tiny model's tokenizer makes more tokens of a text than others do.

--install gets the pinned packages from npm and PyPI into FOLDER (default .venv-clients/table, 4 GB), and runs all. It
takes Node. Without it, a client that is not in FOLDER is a row that says so.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from agent_setups import CLIENTS, ENVIRONMENTS, NOT_RUN, Client, Place, Run
from client_libraries import ENVIRONMENTS as FOLDER
from client_libraries import make_environment
from conftest import opened
from daemon_process import conditions
from forked import DaemonProcess
from strangers import forged

ROOT = Path(__file__).parents[1]
SCRIPTED = ROOT / "tests" / "data" / "scripted"
CALC = "def add(a, b):\n    return a - b\n\n\nprint(add(2, 3))\n"
RIGHT = "return a + b"
COMMANDS = ("ls", "cat calc.py", "sed -i 's/a - b/a + b/' calc.py", "python3 calc.py")  # each a step
KILLED = (0, 2)  # the steps at whose ends the daemon is killed
TIMEOUT_S = 240.0  # of one client's task
LOGGED_S = 0.3  # for the access log's line of the answer before a kill
OURS = re.compile(
    r"(ANTHROPIC|OPENAI|CLAUDE|CODEX|COPILOT|OLLAMA|SSMD)_"
)  # variables of the user's that would interfere
HEADS = ("client", "version", "protocol", "first prompt", "cached of each later prompt", "kills", "result")


@dataclass(frozen=True)
class Request:
    """One answered request, as the access log has it. Token counts are 0 where nothing was generated."""

    path: str
    status: int
    prompt: int
    cached: int


@dataclass
class Outcome:
    """One client's run. steps: requests with an answer of the script. others: any other request to a model."""

    steps: list[Request] = field(default_factory=list)
    others: list[Request] = field(default_factory=list)
    kills: int = 0
    failures: list[str] = field(default_factory=list)


class Task:
    """A project folder, and a command that has the daemon killed and waits until it runs again."""

    def __init__(self, folder: Path) -> None:
        self.project = folder / "project"
        self._asked = folder / "asked"
        self._between = folder / "between.sh"
        self.project.mkdir()
        (self.project / "calc.py").write_text(CALC)
        self._between.write_text(f"touch {self._asked}\nwhile [ -e {self._asked} ]; do sleep 0.05; done\n")
        tests = folder / "tests.sh"
        tests.write_text(f"sh {self._between}\npython3 calc.py | grep -q 5\n")
        self.tests = f"sh {tests}"

    def commands(self) -> list[str]:
        """Return the commands that the shell tool runs, those of KILLED with a kill at their ends."""
        return [f"{one}; sh {self._between}" if i in KILLED else one for i, one in enumerate(COMMANDS)]

    def restart_if_asked(self, daemon: DaemonProcess) -> bool:
        """Kill the daemon and start it again if the command waits for that."""
        if not self._asked.exists():
            return False
        time.sleep(LOGGED_S)
        daemon.kill()
        daemon.start()
        self._asked.unlink()
        return True


def tried(client: Client, folder: Path, model: Path) -> Outcome:
    """Have a client do the task with a daemon of its own."""
    outcome = Outcome()
    with tempfile.TemporaryDirectory(prefix="clients-", ignore_cleanup_errors=True) as at:
        task = Task(Path(at))
        script = client.script(task.commands())
        answers = Path(at, "answers.json")
        answers.write_text(json.dumps(script))
        data = Path(at) / "data"
        with scripted(model, data, answers, client.least) as daemon:
            served = daemon.get("/v1/models")[1]["data"][0]["id"]
            url, packages = f"http://127.0.0.1:{daemon.port}", folder / client.environment
            place = Place(url, served, Path(at) / "home", task.project, packages, task.tests)
            place.home.mkdir()
            said = _followed(client.run(place), place, partial(task.restart_if_asked, daemon), outcome)
        log = data.with_name("data.log").read_text()
        left = len(json.loads(answers.read_text()))
        right = RIGHT in (task.project / "calc.py").read_text()
    requests = answered(log)
    outcome.steps = [one for one in requests if one.status == 200 and one.prompt >= max(1, client.least)]
    outcome.others = [one for one in requests if one not in outcome.steps]
    judge(outcome, client, prompts=len(script), left=left, right=right, said=said)
    return outcome


def scripted_model(folder: Path) -> Path:
    """Make a tiny model in a folder whose answers a file dictates. This process's daemons find its runtime."""
    path = (SCRIPTED, ROOT / "tests", ROOT, ROOT / "runtimes", ROOT / "clients")
    os.environ["PYTHONPATH"] = os.pathsep.join(map(str, path))
    return forged(opened()["mamba-f32"], folder / "scripted", {}, runtime="scripted")


def scripted(model: Path, data: Path, answers: Path, least: int) -> DaemonProcess:
    """Return a daemon, not yet started, whose model says what a file has."""
    daemon = DaemonProcess(model, data, "--access-log", "--access-log-format", "json", "--threads", "1")
    daemon._environment |= {"SCRIPTED_ANSWERS": str(answers), "SCRIPTED_LEAST": str(least)}
    return daemon


def _followed(run: Run, place: Place, restart_if_asked: Any, outcome: Outcome) -> str:
    """Run a client's commands to their end, and the daemon's kills meanwhile. Returns what it said last."""
    for name, text in run.files.items():
        Path(place.home, name).write_text(text)
    kept = {name: value for name, value in os.environ.items() if not OURS.match(name)}
    own = {
        "HOME": str(place.home),
        "PWD": str(place.project),
        "IS_SANDBOX": "1",
        "NO_COLOR": "1",
        "PYTHONPATH": "",
        "PYTHONWARNINGS": "ignore",
    }
    said = ""
    for command in run.commands:
        with (place.home / "said.txt").open("w+") as log:
            process = subprocess.Popen(
                command,
                cwd=place.project,
                env={**kept, **own, **run.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            started = time.monotonic()
            try:
                while process.poll() is None and time.monotonic() - started < TIMEOUT_S:
                    outcome.kills += restart_if_asked()
                    time.sleep(0.05)
                if process.poll() is None:
                    outcome.failures.append(f"did not end in {TIMEOUT_S:.0f} s")
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # with what it started
                code = process.wait()
            log.seek(0)
            said = log.read()
        if code:
            outcome.failures.append(f"exit code {code}")
            break
    return said


def answered(log: str) -> list[Request]:
    """Return the POST requests of an access log in JSON, those for one of ssmd's own paths left out."""
    found = []
    for line in log.splitlines():
        if not line.startswith('{"time"'):
            continue
        one: dict[str, Any] = json.loads(line)
        if one["method"] == "POST" and not one["path"].startswith("/ssmd/"):
            tokens = (int(one.get(name, 0)) for name in ("prompt_tokens", "cached_tokens"))
            found.append(Request(one["path"], int(one["status"]), *tokens))
    return found


def judge(outcome: Outcome, client: Client, *, prompts: int, left: int, right: bool, said: str) -> None:
    """Add to an outcome's failures what the client did not do. left: answers that it did not ask for."""
    failures = outcome.failures
    if left:
        failures.append(f"{left} of {prompts} answers were not asked for")
    if not right:
        failures.append("the file was not edited")
    kills = prompts if client.edits else len(KILLED)
    if outcome.kills != kills and not left:
        failures.append(f"{outcome.kills} kills instead of {kills}")
    if wrong := sorted({one.path for one in outcome.steps if one.path != client.protocol}):
        failures.append(f"asked {', '.join(wrong)}")
    if failures and (lines := [line.strip() for line in said.splitlines() if line.strip()]):
        failures.append(f"last line: `{lines[-1][:160].replace('|', '/').replace('`', '')}`")


def row(client: Client, version: str, outcome: Outcome) -> str:
    """Return a client's row of the table."""
    first = f"{outcome.steps[0].prompt:,}" if outcome.steps else "–"
    later = "; ".join(f"{one.cached:,} of {one.prompt:,}" for one in outcome.steps[1:]) or "–"
    result = "**failed**: " + "; ".join(outcome.failures) if outcome.failures else "passed"
    refused = Counter(f"`{one.path}` {one.status}" for one in outcome.others if one.status >= 400)
    result += "".join(f"; {times} × {what}" for what, times in refused.items())
    if beside := sum(one.status == 200 and one.prompt > 0 for one in outcome.others):
        result += f"; {beside} side request{'s' * (beside > 1)}"
    return _line(client.name, version, f"`{client.protocol}`", first, later, str(outcome.kills), result)


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def version_of(package: str) -> str:
    """Return the version of a pinned package: of openai==3.57.0 as of @openai/codex@0.171.0."""
    return re.split("==|(?<=.)@", package)[-1]


def installed(folder: Path, packages: Sequence[str]) -> bool:
    return (folder / "packages.txt").exists() and (folder / "packages.txt").read_text() == "\n".join(packages)


def main(names: Sequence[str], folder: Path, install: bool) -> int:
    chosen = [one for one in CLIENTS if not names or {one.name, one.environment} & {*names}]
    if install:
        for name in dict.fromkeys(one.environment for one in chosen):
            make_environment(folder / name, ENVIRONMENTS[name], in_node="==" not in ENVIRONMENTS[name][0])
    command = " ".join(["benchmarks/clients_table.py", *names])
    print(f"{datetime.now(UTC):%d %B %Y}, `{command}`; {conditions()}\n")
    print(f"{_line(*HEADS)}\n{'| --- ' * len(HEADS)}|", flush=True)
    failed = False
    with tempfile.TemporaryDirectory() as at:
        model = scripted_model(Path(at))
        for client in chosen:
            version = version_of(client.package)
            if not installed(folder / client.environment, ENVIRONMENTS[client.environment]):
                why = "not run: not installed, see --install"
                print(_line(client.name, version, f"`{client.protocol}`", "–", "–", "–", why), flush=True)
                continue
            outcome = tried(client, folder, model)
            failed |= bool(outcome.failures)
            print(row(client, version, outcome), flush=True)
    for name, protocol, why in NOT_RUN:
        if not names or name in names:
            print(_line(name, version_of(ENVIRONMENTS[name][0]), f"`{protocol}`", "–", "–", "–", f"not run: {why}"))
    return int(failed)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = sorted({one.name for one in CLIENTS} | {*ENVIRONMENTS})
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(known))
    parser.add_argument("--install", action="store_true", help="get the pinned packages")
    parser.add_argument("--folder", type=Path, default=FOLDER / "table", help="of the packages")
    given = parser.parse_args()
    if unknown := {*given.names} - {*known}:
        parser.error(f"there is no client {', '.join(sorted(unknown))} here; see --help")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends what it started
    sys.exit(main(given.names, given.folder.resolve(), given.install))
