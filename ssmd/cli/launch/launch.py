"""`ssmd launch`: starts a coding agent that uses the running daemon, and changes none of the user's files."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn
from urllib.parse import quote

import typer

from ssmd.cli import completion, options
from ssmd.cli.launch.agents import AGENTS, Agent, Beginning, Setup, Target, leaves_room
from ssmd.cli.output import USAGE, fail, lines
from ssmd.machine.spelling import did_you_mean, printable

if TYPE_CHECKING:
    from ssmd.config import Settings
    from ssmd.daemon.client import Client

NO_KEY = "ssmd"  # sent where the daemon wants none, as most agents need some text
HIDDEN, FOLDER = "<key>", "<folder>"  # in what --print prints
NAMES = ", ".join(AGENTS)


def agents(incomplete: str) -> list[str]:
    """List the agents that begin with `incomplete`."""
    return [name for name in AGENTS if name.startswith(incomplete)]


def launch(
    agent: Annotated[
        str | None, typer.Argument(metavar="AGENT", help=f"{NAMES}; none lists them.", autocompletion=agents)
    ] = None,
    arguments: Annotated[list[str] | None, typer.Argument(metavar="ARGUMENT", help="Behind --, for the agent.")] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="Name of a model, or an alias.", autocompletion=completion.models),
    ] = None,
    print_only: Annotated[bool, typer.Option("--print", help="Print what would run, and run nothing.")] = False,
    show_key: Annotated[bool, typer.Option("--show-key", help="With --print: print the key too.")] = False,
    anyway: Annotated[bool, typer.Option("--anyway", help="Start it even if the context is too small.")] = False,
    config_file: options.Config = None,
    data_dir: options.DataDir = None,
) -> None:
    """Start a coding agent with the running daemon's models: claude, codex, opencode, copilot, pi, qwen, aider,
    continue. For the editors zed and code, --print prints their settings.

    The agent gets its settings by options, variables and files for this run. It ends as it does alone: its exit code is
    the command's.
    """
    from ssmd.config import Settings
    from ssmd.daemon.client import Client

    if agent is None:
        for line in lines(_listed()):
            typer.echo(line)
        return
    chosen = AGENTS.get(agent)
    if chosen is None:
        fail(f"there is no agent {printable(agent)!r}{did_you_mean(agent, AGENTS) or f'; there are: {NAMES}'}", USAGE)
    if chosen.install is None and not print_only:
        fail(f"{agent} is not started by ssmd; `ssmd launch {agent} --print` prints the settings for it", USAGE)
    program = shutil.which(chosen.program)
    if program is None and not print_only:
        fail(f"{chosen.program} is not installed here, or not on PATH; install it with: {chosen.install}")
    settings = Settings(data_dir=data_dir)
    client = Client(_running(settings.data_dir))
    url = client.address.url
    assert url is not None  # as `_running` says
    if f"POST {chosen.path}" not in client.get("/v1", holds={"endpoints": [str]})["endpoints"]:
        said = f"the daemon at {url} does not serve {chosen.path}, which {agent} asks; update ssmd and restart it"
        _refuse(said, only_said=print_only)
    name, context = _model(client, chosen, model)
    own = arguments or []
    beginning = _beginning(chosen, context, own)
    if chosen.install is not None:
        _check_room(client, agent, beginning, name, context, only_said=print_only or anyway)
    target = Target(url, name, _key(settings, client), context, FOLDER, tuple(own))
    if print_only:
        for line in _printed(agent, chosen, chosen.setup(target if show_key else _hidden(target), beginning), own):
            typer.echo(line)
        return
    assert program is not None
    if beginning.kept:
        typer.echo(f"{name} has a context of {context:,} tokens: {agent} starts {beginning.kept}", err=True)
    sys.exit(_run(program, chosen, target, beginning, own))


def _listed() -> list[tuple[str, ...]]:
    """Return a row for each agent: the tokens that it sends, with all tools and with fewest, and where it is."""
    rows: list[tuple[str, ...]] = [("agent", "sends", "at least", "measured", "here")]
    for name, agent in AGENTS.items():
        most, least = agent.beginnings[0].tokens, agent.beginnings[-1].tokens
        here = "only printed, not run" if agent.install is None else shutil.which(agent.program) or agent.install
        sends = (f"{most:,}", "" if least == most else f"{least:,}") if most else ("", "")
        rows.append((name, *sends, agent.version, here))
    return rows


def _running(data_dir: Path) -> Any:
    """Return the address of the running daemon. Ends the command if no daemon listens at a port."""
    from ssmd.daemon import discovery

    address = discovery.find(data_dir)
    if address is None:
        if discovery.running(data_dir) is not None:
            fail(f"the daemon on {data_dir} does not answer yet; try again in a moment, `ssmd logs` may say why")
        fail(f"no daemon runs on {data_dir}; start one in another terminal with: ssmd serve")
    if address.url is None:
        fail(f"the daemon listens at {address.place}, which agents cannot reach; start it without the setting socket")
    return address


def _model(client: Client, agent: Agent, asked: str | None) -> tuple[str, int | None]:
    """Return the name of the model to use, and its context. Raises DaemonError if the daemon does not serve it."""
    from ssmd.daemon import answers

    if asked is None:
        listed = client.get("/v1/models", holds=answers.MODELS)["data"]
        models = {one["id"]: one.get("context_length") for one in listed if _is_a_model(one)}
        if not models:
            fail("the daemon has no model; get one with: ssmd pull smollm2")
        if len(models) > 1:
            room = [name for name, context in models.items() if leaves_room(agent.beginnings[0].tokens, context)]
            fits = f"; with room for what {agent.program} sends: {', '.join(room)}" if room else ""
            fail(f"say which model to use, with --model; the daemon has: {', '.join(models)}{fits}")
        [asked] = models
    entry = client.get(f"/v1/models/{quote(asked, safe='')}", holds={"id": str})
    context = entry.get("context_length")
    return str(entry["id"]), context if isinstance(context, int) else None


def _is_a_model(entry: Mapping[str, Any]) -> bool:
    """Return True for an entry of a model's own name: neither one of its runtimes nor an alias."""
    model = str(entry.get("ssmd", {}).get("model", entry["id"]))
    return bool(entry["id"] == model.partition("@")[0])


def _beginning(agent: Agent, context: int | None, own: Sequence[str]) -> Beginning:
    """Return how much the agent is to send. A user that chooses tools gets no options beside."""
    options_of_ours = {one for beginning in agent.beginnings for one in beginning.arguments if one.startswith("-")}
    if options_of_ours & {argument.partition("=")[0] for argument in own}:
        return replace(agent.beginnings[-1], arguments=(), kept="")
    return agent.beginning(context)


def _refuse(why: str, *, only_said: bool) -> None:
    """End the command with a reason. only_said: print it, and go on."""
    if not only_said:
        fail(why)
    typer.echo(f"warning: {why}", err=True)


def _check_room(
    client: Client, name: str, beginning: Beginning, model: str, context: int | None, *, only_said: bool
) -> None:
    """End the command if the context has no room for what the agent sends. Warns if there is little, or `only_said`."""
    tokens = beginning.tokens
    if context is None or leaves_room(tokens, context):
        return
    said = f"{model} has a context of {context:,} tokens, and {name} sends about {tokens:,} before your words"
    if tokens < context:
        typer.echo(f"{said}: a conversation will be short", err=True)
        return
    fits = _fitting(client, tokens) or "no model that ssmd knows has more"
    _refuse(f"{said}; {fits}; --anyway starts it all the same", only_said=only_said)


def _fitting(client: Client, tokens: int) -> str:
    """Return the models with room for so many tokens, those of the daemon first, then those that can be pulled."""
    listed = client.get("/v1/models")["data"]
    here = [one["id"] for one in listed if _is_a_model(one) and leaves_room(tokens, one.get("context_length"))]
    if here:
        return f"these have room: {', '.join(here)}"
    more = _pullable(tokens)
    return f"these can be pulled and have room: {', '.join(more)}" if more else ""


def _pullable(tokens: int) -> list[str]:
    """Name the chat models of the catalogue that have room for so many tokens on a runtime of the processor."""
    from ssmd.api.own.pulls import BASE
    from ssmd.refit import catalog
    from ssmd.refit.graphfile import StrippedGraph

    graphs = [file for runtime in catalog.on_processor() for file in catalog.files(runtime)]
    headers = [StrippedGraph.open(file).header for file in graphs]
    return sorted({one.name for one in headers if leaves_room(tokens, one.tiers[-1])} - BASE)


def _key(settings: Settings, client: Client) -> str:
    """Return the key for the agent: the user's own, as it outlives a daemon; never the daemon's token.

    The daemon's token may stop the daemon. Without a key in the settings here the daemon grants one.
    """
    from ssmd.api.http.access import first_key
    from ssmd.daemon.client import Client
    from ssmd.daemon.discovery import DaemonError

    key = NO_KEY
    if settings.api_key is not None:
        key = settings.api_key.get_secret_value()
    elif settings.api_keys_file is not None:
        key = first_key(settings.api_keys_file) or NO_KEY
    try:
        Client(replace(client.address, token=key)).get("/v1/models")
    except DaemonError as err:
        if err.status != 401:
            raise
    else:
        return key
    ticket = client.send("POST", "/ssmd/v1/tickets", {}, holds={"ticket": str})["ticket"]
    granted = client.send("POST", "/ssmd/v1/tickets/redeem", {"ticket": ticket}, holds={"key": str})
    hours = int(granted.get("expires_in", 0)) // 3600
    typer.echo(
        f"the daemon's key is not in the settings here: the agent gets one that ends with the daemon, or after {hours} "
        "h; set SSMD_API_KEY for one that stays",
        err=True,
    )
    return str(granted["key"])


def _hidden(target: Target) -> Target:
    return target if target.key == NO_KEY else replace(target, key=HIDDEN)


def _printed(name: str, agent: Agent, setup: Setup, own: Sequence[str]) -> list[str]:
    """Return the lines of --print: the files, and the command as a shell takes it."""
    printed = [] if agent.install is not None else [f"# not run here: merge this into the settings of {name}"]
    for file, text in setup.files.items():
        printed += [f"# {FOLDER}/{file}" if agent.install is not None else f"# {file}", text.rstrip("\n")]
    unset = [f"-u {one}" for one in setup.unset]
    given = [f"{one}={shlex.quote(value)}" for one, value in setup.environment.items()]
    if agent.install is None:
        return printed + [f"# in its environment: {one}" for one in given]
    command = shlex.join([agent.program, *setup.arguments, *own])
    return [*printed, " \\\n  ".join([" ".join(["env", *unset]), *given, command])]


def _run(program: str, agent: Agent, target: Target, beginning: Beginning, own: Sequence[str]) -> int:
    """Run the agent and return its exit code. Its folder is this user's alone, and removed at its end."""
    from ssmd.machine.signals import run_in_front

    with tempfile.TemporaryDirectory(prefix="ssmd-launch-", ignore_cleanup_errors=True) as folder:  # of mode 0700
        setup = agent.setup(replace(target, folder=Path(folder).as_posix()), beginning)
        for name, text in setup.files.items():
            Path(folder, name).write_text(text, "utf-8")
        environment = {name: value for name, value in os.environ.items() if name not in setup.unset}
        try:
            return run_in_front([program, *setup.arguments, *own], {**environment, **setup.environment})
        except OSError as err:
            _unstartable(program, err)


def _unstartable(program: str, err: OSError) -> NoReturn:
    fail(f"{program} cannot be started: {err.strerror or err}")
