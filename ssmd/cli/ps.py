"""`ssmd ps`: what the running daemon has loaded, and what it does."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import typer

from ssmd.cli import options
from ssmd.daemon import said

if TYPE_CHECKING:
    from ssmd.daemon.discovery import Address

METRICS = "/ssmd/v1/metrics"
_WAITING = ("waiting", "loading")  # phases of requests that the queue counts as waiting


def ps(data_dir: options.DataDir = None, as_json: options.Json = False) -> None:
    """Show what the running daemon does. The models that it has loaded, and the requests that it works on."""
    from ssmd.cli.running import needed
    from ssmd.daemon.place import data_dir as place

    client = needed(place(data_dir))
    found = client.get(METRICS)
    found = found if isinstance(found, dict) else {}
    if as_json:
        at = {"url": client.address.url, "socket": client.address.socket and str(client.address.socket)}
        typer.echo(json.dumps({**at, "pid": client.address.pid, **found}, indent=1))
        return
    for line in _told(found, client.address):
        typer.echo(line)


def _told(found: Mapping[str, Any], address: Address) -> list[str]:
    """What people read. A daemon of another version may say less, or something else: what is missing is not shown."""
    from ssmd.cli.session import plain
    from ssmd.cli.table import lines

    state = f": {said.text(found, 'state')}" if said.text(found, "state") else ""
    why = f" ({said.text(found, 'reason')})" if said.text(found, "reason") else ""
    since = said.ago(time.time() - address.started_at)
    head = f"ssmd {address.version} at {address.place}, process {address.pid}, for {since}{state}{why}{_memory(found)}"
    models = [_model(one) for one in said.each(found, "models") if one.get("state") != "unloaded"]
    requests = [_request(one) for one in said.each(found, "running")]
    told = [head]
    if models:
        names = ("model", "runtime", "device", "quantization", "state", "memory", "until")
        told += ["", *lines([names, *models])]
    elif "models" in found:
        told.append("no model is loaded; the first request for one loads it")
    if requests:
        told += ["", *lines([("request", "session", "model", "phase", "tokens", "tokens/s", "first token"), *requests])]
    waiting = said.number(said.of(found, "queue").get("waiting")) or 0
    more = waiting - sum(one.get("phase") in _WAITING for one in said.each(found, "running"))
    if more > 0:
        told.append(f"{more:.0f} more {'waits for its' if more == 1 else 'wait for their'} turn")
    return [plain(line) for line in told]


def _model(one: Mapping[str, Any]) -> tuple[str, ...]:
    problem = f": {said.text(one, 'problem')}" if said.text(one, "problem") else ""
    what = (said.text(one, key) or said.UNKNOWN for key in ("id", "runtime", "device", "quantization"))
    state = said.text(one, "state") or said.UNKNOWN
    return (*what, f"{state}{problem}", said.size(one.get("resident_bytes")), said.until(one, time.time()))


def _request(one: Mapping[str, Any]) -> tuple[str, ...]:
    tokens, rate, first = (said.number(one.get(key)) for key in ("tokens", "tokens_per_s", "ttft_ms"))
    return (
        *(said.text(one, key) or said.UNKNOWN for key in ("id", "session", "model")),
        said.phase(one),
        said.UNKNOWN if tokens is None else f"{tokens:.0f}",
        said.UNKNOWN if rate is None else f"{rate:.1f}",
        said.UNKNOWN if first is None else f"{first:.0f} ms",
    )


def _memory(found: Mapping[str, Any]) -> str:
    memory = said.of(found, "memory")
    used, budget = said.number(memory.get("used_bytes")), said.number(memory.get("budget_bytes"))
    if used is None:
        return ""
    return f", {said.size(used)}{'' if budget is None else f' of {said.size(budget)}'} for models"
