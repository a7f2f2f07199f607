"""`ssmd ps`: what the running daemon has loaded, and what it does."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import typer

from ssmd.cli import options

if TYPE_CHECKING:
    from ssmd.daemon.discovery import Address

METRICS = "/ssmd/v1/metrics"
_UNKNOWN = "-"
_MOST = 1e18


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

    state = f": {_text(found, 'state')}" if _text(found, "state") else ""
    why = f" ({_text(found, 'reason')})" if _text(found, "reason") else ""
    since = _ago(time.time() - address.started_at)
    head = f"ssmd {address.version} at {address.place}, process {address.pid}, for {since}{state}{why}{_memory(found)}"
    models = [_model(one) for one in _each(found, "models") if one.get("state") != "unloaded"]
    requests = [_request(one) for one in _each(found, "running")]
    told = [head]
    if models:
        names = ("model", "runtime", "device", "quantization", "state", "memory", "until")
        told += ["", *lines([names, *models])]
    elif "models" in found:
        told.append("no model is loaded; the first request for one loads it")
    if requests:
        told += ["", *lines([("request", "session", "model", "phase", "tokens", "tokens/s", "first token"), *requests])]
    waiting = _of(found, "queue").get("waiting")
    if isinstance(waiting, int) and waiting > 0:
        told.append(f"{waiting} more wait for their turn")
    return [plain(line) for line in told]


def _model(one: Mapping[str, Any]) -> tuple[str, ...]:
    problem = f": {_text(one, 'problem')}" if _text(one, "problem") else ""
    what = (_text(one, key) or _UNKNOWN for key in ("id", "runtime", "device", "quantization"))
    state = _text(one, "state") or _UNKNOWN
    return (*what, f"{state}{problem}", _size(one.get("resident_bytes")), _until(one))


def _until(one: Mapping[str, Any]) -> str:
    """How long a model stays loaded."""
    if one.get("state") != "loaded":
        return _UNKNOWN
    if one.get("pinned") is True:
        return "pinned"
    queue = _of(one, "queue")
    if queue.get("running") or queue.get("waiting"):
        return "in use"
    until = _number(one.get("idle_until"))
    return "for ever" if until is None else f"in {_ago(until - time.time())}"


def _request(one: Mapping[str, Any]) -> tuple[str, ...]:
    phase = _text(one, "phase") or _UNKNOWN
    fed, to_feed = _number(one.get("fed")), _number(one.get("to_feed"))
    if phase == "prefill" and fed is not None and to_feed:
        phase = f"prefill {fed:.0f}/{to_feed:.0f}"
    tokens, rate, first = (_number(one.get(key)) for key in ("tokens", "tokens_per_s", "ttft_ms"))
    return (
        *(_text(one, key) or _UNKNOWN for key in ("id", "session", "model")),
        phase,
        _UNKNOWN if tokens is None else f"{tokens:.0f}",
        _UNKNOWN if rate is None else f"{rate:.1f}",
        _UNKNOWN if first is None else f"{first:.0f} ms",
    )


def _memory(found: Mapping[str, Any]) -> str:
    memory = _of(found, "memory")
    used, budget = _number(memory.get("used_bytes")), _number(memory.get("budget_bytes"))
    if used is None:
        return ""
    return f", {_size(used)}{'' if budget is None else f' of {_size(budget)}'} for models"


def _each(found: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    value = found.get(key)
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def _of(found: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = found.get(key)
    return value if isinstance(value, dict) else {}


def _text(found: Mapping[str, Any], key: str) -> str:
    value = found.get(key)
    return value if isinstance(value, str) else ""


def _number(value: Any) -> float | None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if number and abs(value) < _MOST else None  # NaN is not


def _size(value: Any) -> str:
    from ssmd.machine.size import show_size

    nbytes = _number(value)
    return _UNKNOWN if nbytes is None else show_size(int(nbytes))


def _ago(seconds: float) -> str:
    """A time in one unit: `40 s`, `5 min`, `3 h`, `2 d`."""
    seconds = max(0.0, seconds)
    for unit, length, most in (("s", 1, 100), ("min", 60, 100), ("h", 3600, 48)):
        if seconds < most * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds / 86400:.0f} d"
