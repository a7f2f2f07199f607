"""Client libraries and what they do with a daemon: each in an environment of its own, each feature once.

    benchmarks/client_libraries.py [CLIENT…] [--model MODEL] [--record FOLDER]     prints the table of docs/clients.md

The environments are made in .venv-clients, from PyPI and npm: a gigabyte. It takes Node. What is checked stands in
benchmarks/sdks. A small model decides badly: where a library leaves it to the model whether to call, or what an object
is like, the check has the daemon force it. --record writes what the libraries sent, as tests/data/bodies has it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from daemon_process import DaemonProcess, conditions
from overhearing import Exchange, Proxy, overheard

from ssmd.config import Settings
from ssmd.installed import resolve

ROOT = Path(__file__).parents[1]
ENVIRONMENTS = ROOT / ".venv-clients"
PROGRAMS = Path(__file__).parent / "sdks"
FEATURES = ("chat", "streamed", "two turns", "tools", "tools streamed", "schema")  # those with a column
ERRORS = "typed errors"  # the feature whose requests are to be refused


@dataclass(frozen=True)
class Client:
    """A library, the packages that it takes, pinned, and the program in PROGRAMS that checks it."""

    name: str
    program: str
    packages: tuple[str, ...]

    @property
    def folder(self) -> Path:
        return ENVIRONMENTS / self.name.replace(" ", "-")

    @property
    def in_node(self) -> bool:
        return self.program.endswith(".mjs")

    def make(self) -> None:
        """Make the environment, unless it is there with these packages."""
        make_environment(self.folder, self.packages, in_node=self.in_node)

    def command(self, url: str, model: str) -> list[str]:
        python = str(self.folder / "bin" / "python")
        return ["node" if self.in_node else python, str(PROGRAMS / self.program), url, model]


CLIENTS = (
    Client("openai 2", "openai_sdk.py", ("openai==2.54.0",)),
    Client("openai 3", "openai_sdk.py", ("openai==3.57.0",)),
    Client("openai node", "openai_node.mjs", ("openai@6.49.0", "zod@4.6.7")),
    Client("litellm", "litellm_sdk.py", ("litellm==1.110.2",)),
    Client("instructor", "instructor_modes.py", ("instructor==1.17.0",)),
    Client("pydantic-ai", "pydantic_ai_outputs.py", ("pydantic-ai-slim[openai]==2.68.0",)),
    Client("langchain", "langchain_chat.py", ("langchain-openai==1.7.4", "langchain-core==1.8.3")),
    Client(
        "LlamaIndex",
        "llama_index_chat.py",
        ("llama-index-llms-openai-like==0.8.1", "llama-index-llms-openai==0.8.3", "llama-index-core==0.14.25"),
    ),
    Client(
        "AI SDK",
        "ai_sdk.mjs",
        ("ai@6.0.326", "@ai-sdk/openai@3.0.141", "@ai-sdk/openai-compatible@2.0.92", "zod@4.6.7"),
    ),
    Client("llm", "llm_command.py", ("llm==0.36",)),
)


@dataclass(frozen=True)
class Found:
    """The result of a feature. why: the reason of a failure; None if it passed."""

    feature: str
    why: str | None
    exchanges: Sequence[Exchange] = field(default=())


def make_environment(folder: Path, packages: Sequence[str], *, in_node: bool) -> None:
    """Make an environment of npm's or PyPI's packages in a folder, unless it is there with these."""
    stamp = folder / "packages.txt"
    if stamp.exists() and stamp.read_text() == "\n".join(packages):
        return
    folder.mkdir(parents=True, exist_ok=True)
    if in_node:
        _run("npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder), *packages)
    else:
        _run(sys.executable, "-m", "venv", str(folder))
        pip = (str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install", "-q")
        _run(*pip, "--no-input", *packages)
    stamp.write_text("\n".join(packages))


def _run(*command: str) -> None:
    print(f"==> {' '.join(command)}", file=sys.stderr, flush=True)
    subprocess.run(command, check=True, stdout=sys.stderr)


def checked(client: Client, proxy: Proxy, model: str) -> Iterator[Found]:
    """Run a client's program. Yield the result of each feature, with its requests."""
    home = client.folder / "home"
    home.mkdir(exist_ok=True)
    own = {"HOME": str(home), "LITELLM_LOCAL_MODEL_COST_MAP": "True", "PYTHONWARNINGS": "ignore"}
    with (client.folder / "log.txt").open("w") as log:
        program = subprocess.Popen(
            client.command(f"http://127.0.0.1:{proxy.port}", model),
            cwd=client.folder,  # where Node looks for packages
            env={**os.environ, **own},
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        assert program.stdout is not None
        for line in program.stdout:
            if not line.startswith('{"feature"'):  # what a library says besides
                continue
            said, exchanges = json.loads(line), proxy.taken()
            refused = [e for e in exchanges if e.status >= 500 or (e.status >= 400 and said["feature"] != ERRORS)]
            why = said["why"] or (f"{refused[0].path} was answered with {refused[0].status}" if refused else None)
            yield Found(said["feature"], why, exchanges)
        if program.wait():
            yield Found("the program", f"ended with {program.returncode}, see {client.folder / 'log.txt'}")


def row(client: Client, found: Sequence[Found]) -> str:
    """Return a client's row of the table."""
    results = {one.feature: "passed" if one.why is None else "failed" for one in found}
    cells = [results.pop(name, "–") for name in FEATURES]
    more = "; ".join(f"{name} **failed**" if result == "failed" else name for name, result in results.items())
    requests = [exchange for one in found for exchange in one.exchanges]
    ignored = sorted({f"`{name}`" for exchange in requests for name in exchange.ignored})
    packages = "; ".join(client.packages[:1])
    return f"| {packages} | {' | '.join(cells)} | {more} | {len(requests)} | {', '.join(ignored)} |"


def record(folder: Path, client: Client, found: Sequence[Found], shapes: set[str]) -> None:
    """Write the bodies of a client's requests, one of each shape. shapes: those that there are already."""
    kept = []
    for one in found:
        for exchange in one.exchanges:
            shape = f"{exchange.path} {_shape(exchange.body)}"
            if one.feature != ERRORS and shape not in shapes:
                shapes.add(shape)
                kept.append({"feature": one.feature, "path": exchange.path, "body": exchange.body})
    if not kept:
        return
    folder.mkdir(parents=True, exist_ok=True)
    rows = ",\n".join(json.dumps(one, ensure_ascii=False) for one in kept)
    head = json.dumps({"packages": client.packages})[:-1]
    (folder / f"{client.folder.name.lower()}.json").write_text(f'{head}, "requests": [\n{rows}\n]}}\n', "utf-8")


def _shape(value: Any) -> str:
    """Return the structure of a value, without its texts and numbers."""
    if isinstance(value, dict):
        return str({name: _shape(one) for name, one in sorted(value.items())})
    return str([_shape(one) for one in value]) if isinstance(value, list) else type(value).__name__


def main(names: Sequence[str], model: str, folder: Path | None) -> None:
    artifact = Path(model) if Path(model).exists() else resolve(model, Settings().models_dir, "litert")
    clients = [client for client in CLIENTS if not names or client.name in names]
    for client in clients:
        client.make()
    print(f"# client_libraries: {artifact.parent.name}, {artifact.name}; {conditions()}\n")
    print(f"| client | {' | '.join(FEATURES)} | also passed | requests | ignored by name |")
    print(f"| --- |{' --- |' * len(FEATURES)} --- | --- | --- |")
    failed, shapes = [], set[str]()
    with tempfile.TemporaryDirectory() as at, DaemonProcess(artifact, Path(at) / "data") as daemon:
        served = daemon.get("/v1/models")[1]["data"][0]["id"]
        with overheard(daemon.port) as proxy:
            for client in clients:
                found = list(checked(client, proxy, served))
                print(row(client, found), flush=True)
                failed += [f"- {client.packages[0]}, {one.feature}: {one.why}" for one in found if one.why is not None]
                if folder is not None:
                    record(folder, client, found, shapes)
    print("\n" + ("\n".join(failed) or "None failed."))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clients", nargs="*", metavar="CLIENT", help=", ".join(client.name for client in CLIENTS))
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--record", type=Path)
    given = parser.parse_args()
    if unknown := {*given.clients} - {client.name for client in CLIENTS}:
        parser.error(f"there is no client {', '.join(sorted(unknown))} here; see --help")
    main(given.clients, given.model, given.record)
