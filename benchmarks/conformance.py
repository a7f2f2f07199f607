"""Counts of suites that others wrote, and of the behaviours that other servers' own tests ask, against a daemon.

    benchmarks/conformance.py [MODEL] [--suites] [--behaviours] [--folder FOLDER]     prints tables of docs/clients.md

Suites: langchain-tests' standard tests of chat models, by four of langchain's classes, in the environment `python` of
benchmarks/clients_table.py (--install makes it). They ask for calls with certain arguments, so a file dictates what the
tiny model answers. Behaviours: those that the tests of llama.cpp's server, vLLM and Ollama ask of the four protocols,
as requests (benchmarks/behaviours.py). MODEL is for these: an artifact's name or path; default: smollm2.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from agent_setups import ENVIRONMENTS
from behaviours import BEHAVIOURS, Server
from client_libraries import ENVIRONMENTS as FOLDER
from client_libraries import make_environment
from clients_table import scripted, scripted_model
from daemon_process import DaemonProcess, conditions

from ssmd.config import Settings
from ssmd.installed import resolve

SUITE = Path(__file__).parent / "sdks" / "langchain_standard.py"
TIMEOUT_S = 3_600.0
OUTCOMES = ("passed", "failed", "differs", "skipped")  # differs: by choice


@dataclass(frozen=True)
class Result:
    """The result of one test. outcome: of OUTCOMES. why: of one that did not pass."""

    group: str
    name: str
    outcome: str
    why: str


def suites(python: Path) -> Iterator[Result]:
    """Run langchain's standard tests. Raises RuntimeError if pytest did not get to its end."""
    with tempfile.TemporaryDirectory() as at, contextlib.ExitStack() as stack:
        answers = Path(at) / "answers.json"
        answers.write_text("[]")
        daemon = stack.enter_context(scripted(scripted_model(Path(at)), Path(at) / "data", answers, 0))
        model = daemon.get("/v1/models")[1]["data"][0]["id"]
        report = Path(at) / "report.xml"
        settings = Path(at) / "pytest.ini"  # not those of this repository
        scopes = "".join(f"asyncio_default_{of}_loop_scope = session\n" for of in ("fixture", "test"))
        settings.write_text(f"[pytest]\nasyncio_mode = auto\n{scopes}")  # langchain keeps a client for all tests
        command = [
            str(python),
            "-m",
            "pytest",
            "-c",
            str(settings),
            f"--rootdir={at}",
            f"--junitxml={report}",
            str(SUITE),
        ]
        own = {"SUITE_URL": f"http://127.0.0.1:{daemon.port}", "SUITE_MODEL": model, "SUITE_ANSWERS": str(answers)}
        variables = {**os.environ, **own, "PYTHONPATH": "", "HOME": at}
        done = subprocess.run(
            command, cwd=at, env=variables, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        if done.returncode not in (0, 1):
            raise RuntimeError(f"pytest ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        for case in ElementTree.parse(report).iter("testcase"):
            found = next((one for one in case if one.tag in ("failure", "error", "skipped")), None)
            outcome = "passed" if found is None else "skipped" if found.tag == "skipped" else "failed"
            why = "" if found is None else (found.get("message") or "").splitlines()[0]
            yield Result(case.get("classname", "").rpartition(".")[2], case.get("name", ""), outcome, why)


def behaviours(url: str, model: str) -> Iterator[Result]:
    """Check what other servers' tests ask."""
    server = Server(url, model)
    for one in BEHAVIOURS:
        try:
            one.check(server)
        except Exception as err:  # a check may fail in any way
            said = f"{type(err).__name__}: {(str(err).splitlines() or [''])[0][:200]}"
            yield Result(one.source, one.says, *(("differs", one.differs) if one.differs else ("failed", said)))
        else:
            yield Result(one.source, one.says, "passed", "")


def table(results: list[Result], head: str) -> None:
    """Print the counts of each group, and a line for each failure."""
    print(f"\n| {head} | {' | '.join(OUTCOMES)} |\n{'| --- ' * (1 + len(OUTCOMES))}|")
    for group in dict.fromkeys(one.group for one in results):
        counts = Counter(one.outcome for one in results if one.group == group)
        print(f"| {group} | {' | '.join(str(counts[outcome]) for outcome in OUTCOMES)} |")
    print()
    for one in results:
        if one.outcome == "failed":
            print(f"- {one.group}, {one.name}: {one.why}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--suites", action="store_true", help="these alone")
    parser.add_argument("--behaviours", action="store_true", help="these alone")
    parser.add_argument("--install", action="store_true", help="get the pinned packages")
    parser.add_argument("--folder", type=Path, default=FOLDER / "table", help="of the packages")
    asked = parser.parse_args()
    environment = asked.folder.resolve() / "python"
    if asked.install:
        make_environment(environment, ENVIRONMENTS["python"], in_node=False)
    if not asked.behaviours and not environment.exists():
        parser.error(f"there is no environment {environment}; --install makes it, --behaviours needs none")
    print(f"{datetime.now(UTC):%d %B %Y}; {conditions()}", flush=True)
    if not asked.suites:
        settings, named = Settings(), Path(asked.model)
        artifact = (
            named if named.exists() else resolve(asked.model, settings.models_dir, settings.runtime, settings.device)
        )
        with tempfile.TemporaryDirectory() as at, DaemonProcess(artifact, Path(at) / "data") as daemon:
            model = daemon.get("/v1/models")[1]["data"][0]["id"]
            found = list(behaviours(f"http://127.0.0.1:{daemon.port}", model))
        print(f"\n{artifact.parent.name}, {artifact.name}\n\n| asked by | behaviour | result |\n| --- | --- | --- |")
        for one in found:
            print(f"| {one.group} | {one.name} | {f'{one.outcome}: {one.why}'.removesuffix(': ')} |")
        table(found, "behaviours of")
    if not asked.behaviours:
        table(list(suites(environment / "bin" / "python")), "suite")


if __name__ == "__main__":
    main()
