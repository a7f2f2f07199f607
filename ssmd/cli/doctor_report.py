"""What `ssmd doctor` says to people: first whether it works and what to do next, then what does, then what does not."""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Iterator
from typing import Any

from ssmd.machine.spelling import shown

MOST_CHARS = 1000  # of a line: reasons come from libraries and files
FULL_BYTES = 32 << 20  # of free disk, below which states are not stored


def lines(found: dict[str, Any], *, verbose: bool = False) -> Iterator[str]:
    """Lines of what was found; `verbose`: a line for every device, and reasons in full."""
    servable = [model for model in found["models"] if not model["problem"]]
    usable = [one for one in found["runtimes"] if not one["why_not"]]
    yield _line(f"ssmd {found['version']} {_verdict(found, usable, servable)}")
    yield _line(f"next: {_next(found, usable, servable)}")
    yield ""
    findings = list(_findings(found, verbose=verbose))
    yield from (_line(f"  ok  {text}") for good, text in findings if good)
    yield from (_line(f"  no  {text}") for good, text in findings if not good)
    if verbose:
        yield _line(f"Python {found['python']}, {found['platform']}")
    else:
        yield "-v: every device, and reasons in full"


def _line(text: str) -> str:
    return shown(" ".join(text.split()) if "\n" in text else text, MOST_CHARS)


def _verdict(found: dict[str, Any], usable: list[dict[str, Any]], servable: list[dict[str, Any]]) -> str:
    if found["settings_problem"]:
        return "cannot start here: its settings are refused"
    if not usable:
        return "cannot answer here yet: no runtime works"
    if found["data_dir"]["problem"]:
        return "cannot keep anything here: its data directory cannot be used"
    if not servable:
        return "cannot answer here yet: no model is ready"
    names = list(dict.fromkeys(model["name"] for model in servable))
    return f"works here: {_listed(names)} can answer, with {_listed(sorted({m['runtime'] for m in servable}))}"


def _next(found: dict[str, Any], usable: list[dict[str, Any]], servable: list[dict[str, Any]]) -> str:
    """What to do next: one thing."""
    if found["settings_problem"]:
        return "mend the settings, as said below"
    if not usable:
        from ssmd.machine.installation import to_add

        windows_on_arm = sys.platform == "win32" and platform.machine().lower() == "arm64"
        return f"install a runtime: {to_add('wgpu' if windows_on_arm else 'litert')}"
    if found["data_dir"]["problem"]:
        return "make the data directory usable, or choose another one with SSMD_DATA_DIR"
    if not servable:
        from ssmd.refit import catalog

        broken = [m["name"] for m in found["models"] if m["name"] in catalog.names()]
        return f"ssmd pull {broken[0]} --force" if broken else "ssmd pull smollm2"
    name, daemon = servable[0]["name"], found["daemon"]
    if daemon and daemon["url"]:
        return f"ssmd run {name}, or an OpenAI client at {daemon['url']}/v1"
    return f"ssmd run {name}, or for OpenAI clients: ssmd serve"


def _findings(found: dict[str, Any], *, verbose: bool) -> Iterator[tuple[bool, str]]:
    """Whether each thing is well, and what is to be said of it."""
    if found["settings_problem"]:
        yield False, f"settings: {found['settings_problem']} (below, defaults stand for it)"
    elif found["settings_file"]:
        yield True, f"settings file {found['settings_file']}"
    yield from map(_model, found["models"])
    if found["models_problem"]:
        yield False, found["models_problem"]
    elif not found["models"]:
        yield False, f"models in {found['models_dir']}: none"
    for runtime in found["runtimes"]:
        yield from _devices(runtime) if verbose else [_runtime(runtime)]
    yield from _places(found)


def _model(model: dict[str, Any]) -> tuple[bool, str]:
    from ssmd.machine.size import show_size

    if model["problem"]:
        return False, f"model {model['name']} ({model['path']}): {model['problem']}"
    size = show_size(model["bytes"])
    return True, f"model {model['name']} for {model['runtime']}, {model['quantization']}, {size} ({model['path']})"


def _runtime(runtime: dict[str, Any]) -> tuple[bool, str]:
    """A runtime in one line: what it can use, the first of it described, or the first sentence of why it cannot."""
    name, usable = runtime["name"], [d for d in runtime["devices"] if not d["problem"]]
    if runtime["why_not"]:
        return False, f"runtime {name}: {runtime['why_not'].partition('. ')[0]}"
    return True, f"runtime {name} on {_listed([d['name'] for d in usable])} ({usable[0]['description']})"


def _devices(runtime: dict[str, Any]) -> Iterator[tuple[bool, str]]:
    if runtime["problem"]:
        yield False, f"runtime {runtime['name']}: {runtime['problem']}"
    for device in runtime["devices"]:
        what = f"runtime {runtime['name']} on {device['name']} ({device['description']})"
        yield not device["problem"], what + (f": {device['problem']}" if device["problem"] else "")


def _places(found: dict[str, Any]) -> Iterator[tuple[bool, str]]:
    """The data directory and its disk, memory, and the daemon."""
    from ssmd.machine.size import show_size

    place = found["data_dir"]
    if place["problem"]:
        yield False, f"data directory {place['path']}: {place['problem']}"
    else:
        stored = (
            "not counted, an older ssmd wrote it" if place["stored_bytes"] is None else show_size(place["stored_bytes"])
        )
        yield True, f"data directory {place['path']}: {stored} stored, of a quota of {show_size(place['quota_bytes'])}"
    if place["open_to_others"]:
        yield (
            False,
            f"data directory {place['path']}: its disk keeps no rights, so other users of it can read all there is",
        )
    if place["free_bytes"] is not None:
        free = f"disk: {show_size(place['free_bytes'])} free"
        if place["free_bytes"] < FULL_BYTES:
            yield False, f"{free}: no state can be stored; free some space, or remove sessions: ssmd session rm"
        else:
            yield True, free
    memory = found["memory"]["available_bytes"]
    if memory is not None:
        yield True, f"memory: {show_size(memory)} free"
    daemon = found["daemon"]
    if daemon is None:
        yield True, "daemon: none runs on this data directory"
    elif daemon["problem"]:
        process = f" (process {daemon['pid']})" if daemon["pid"] else ""
        yield False, f"daemon{process}: {daemon['problem']}"
    else:
        where = daemon["url"] or f"the socket {daemon['socket']}"
        minutes = max(0, time.time() - daemon["started_at"]) / 60
        since = f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.0f} h"
        other = "" if daemon["version"] == found["version"] else f"; this is {found['version']}"
        yield True, f"daemon: ssmd {daemon['version']} at {where}, process {daemon['pid']}, for {since}{other}"


def _listed(names: list[str]) -> str:
    return ", ".join(names[:-1]) + (" and " if names[1:] else "") + names[-1]
