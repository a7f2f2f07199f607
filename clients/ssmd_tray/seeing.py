"""The conversion from a sight of a daemon to the tray's view."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from ssmd import __version__
from ssmd.daemon import said
from ssmd.daemon.discovery import Address
from ssmd_tray.history import History, Point
from ssmd_tray.view import MOST_ROWS, Icon, Model, Quantity, Request, View, plain
from ssmd_tray.watching import Observation

_AT_WORK = ("restoring", "prefill", "decode")
_MINUTES = "in the last five minutes"
_REASONS = {  # docs/http-daemon.md, Health
    "disk_full": "the disk is full: what is said now is not kept",
    "read_only": "the disk is read-only: turns are not kept",
    "locked": "another program holds the database: turns are not kept",
    "damaged": "the database is damaged: `ssmd session check` says more",
    "replaced": "the database was removed or replaced: turns are not kept; restart the daemon",
    "late": "the disk is slow: turns are kept late",
    "error": "turns are not kept; the log says why",
}


class ViewBuilder:
    """The converter, which keeps the lines of the last minutes for views. clock: seconds since 1970."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._ttft, self._tbt = History(), History()
        self._of: tuple[int, float] | None = None  # process and start of the daemon that counts

    def view(self, sight: Observation) -> View:
        """Return the view of a sight. Never raises, for any answer of the daemon."""
        found = sight.found
        if found is not None and sight.address is not None:
            self._add(found, sight.address, sight.at)
        told: Mapping[str, Any] = {} if found is None else found
        icon, headline = _headline(sight)
        ttft = _quantity("time to first token", said.of(told, "ttft_ms"), self._ttft.points(sight.at))
        tbt = _quantity("time between tokens", said.of(told, "tbt_ms"), self._tbt.points(sight.at))
        requests = [_request(one) for one in said.each(told, "running")]
        models = [_model(one, self._clock()) for one in said.each(told, "models")]
        stored, share = _stored(told)
        rate, cached = said.of(told, "tokens_per_s"), said.of(told, "cached_share")
        return View(
            icon=icon,
            headline=headline,
            daemon=_daemon(sight, self._clock()),
            notice=_notice(sight),
            tooltip=f"ssmd: {headline}" + (f"\nTTFT {ttft.last}, TBT {tbt.last}" if found is not None else ""),
            ttft=ttft,
            tbt=tbt,
            rate=_number(rate.get("last"), ".1f"),
            cached=_share(cached),
            stored=stored,
            stored_share=share,
            requests=tuple(requests[:MOST_ROWS]),
            more_requests=max(0, len(requests) - MOST_ROWS),
            models=tuple(models[:MOST_ROWS]),
            more_models=max(0, len(models) - MOST_ROWS),
            base_url=None if sight.address is None or sight.address.url is None else f"{sight.address.url}/v1",
            why_no_url=_why_no_url(sight.address),
            runs=sight.process is not None,
            answers=found is not None,
        )

    def _add(self, found: Mapping[str, Any], address: Address, at: float) -> None:
        who = address.pid, address.started_at
        if self._of is not None and self._of != who:
            self._ttft.restart()
            self._tbt.restart()
        self._of = who
        self._ttft.add(said.of(found, "ttft_ms"), at)
        self._tbt.add(said.of(found, "tbt_ms"), at)


def _headline(sight: Observation) -> tuple[Icon, str]:
    """Return the icon's state, and the daemon's state in a few words."""
    found = sight.found
    if found is None:
        starting = sight.process is not None and sight.address is None
        return (Icon.LOADING, "starts or ends") if starting else (Icon.AWAY, "away")
    state = said.text(found, "state")
    models = said.each(found, "models")
    loading = next((one for one in models if one.get("state") == "loading"), None)
    running = said.each(found, "running")
    at_work = next((one for one in running if one.get("phase") in _AT_WORK), None)
    loaded = [one for one in models if one.get("state") == "loaded"]
    if state == "degraded":
        return Icon.DEGRADED, "degraded"
    if state == "draining":
        return Icon.LOADING, "comes to its end"
    if at_work is not None or (state == "generating" and loading is None):
        return Icon.GENERATING, _with("generating", None if at_work is None else said.text(at_work, "model"))
    if loading is not None:
        return Icon.LOADING, _with("loading", said.text(loading, "id"))
    if state == "starting":
        return Icon.LOADING, "starts"
    names = ", ".join(said.text(one, "id") for one in loaded[:2]) + (", …" if len(loaded) > 2 else "")
    if len(loaded) == 1 and (device := said.text(loaded[0], "device")):
        names += f" on {device}"
    return Icon.IDLE, _with("idle", names) if names else "idle, no model is loaded"


def _with(doing: str, what: str | None) -> str:
    return plain(f"{doing}: {what}" if what else doing)


def _daemon(sight: Observation, now: float) -> str:
    """Return a line with the daemon's process, address and uptime."""
    if sight.address is None:
        return f"process {sight.process}" if sight.process else ""
    one = sight.address
    since = said.ago(now - one.started_at)
    memory = said.number(said.of(sight.found or {}, "memory").get("resident_bytes"))
    resident = "" if memory is None else f", {said.size(memory)} in memory"
    return plain(f"ssmd {one.version} at {one.place}, process {one.pid}, for {since}{resident}")


def _notice(sight: Observation) -> str:
    if sight.found is None:
        return plain(sight.problem, 400)
    told = []
    if said.text(sight.found, "state") == "degraded":
        reason = said.text(sight.found, "reason")
        told.append(_REASONS.get(reason) or f"turns are not kept as they should be ({reason})")
    if sight.address is not None and sight.address.version != __version__:
        told.append(f"the daemon is ssmd {sight.address.version}, this is {__version__}")
    return plain("; ".join(told), 400)


def _why_no_url(address: Address | None) -> str:
    if address is None:
        return "no daemon answers"
    return "" if address.url is not None else "the daemon listens at a socket alone; the page and clients need a port"


def _quantity(name: str, series: Mapping[str, Any], points: tuple[Point, ...]) -> Quantity:
    last, p50, p95 = (_ms(series.get(key)) for key in ("last", "p50", "p95"))
    most = _ms(max((point.ms for point in points), default=None))
    line = f"; the line has {len(points)} values, at most {most}" if points else ""
    spoken = f"{name}: last {last}, median {p50} and 95th percentile {p95} {_MINUTES}{line}"
    return Quantity(last, p50, p95, points, most, spoken)


def _request(one: Mapping[str, Any]) -> Request:
    id_ = said.text(one, "id")
    tokens, rate = said.number(one.get("tokens")), said.number(one.get("tokens_per_s"))
    doing = said.phase(one)
    doing += f", {tokens:.0f} tokens" if tokens else ""
    doing += f", {rate:.0f} tokens/s" if rate is not None else ""
    model = plain(said.text(one, "model") or said.UNKNOWN, 60)
    return Request(id_ if 0 < len(id_) <= 128 else None, model, plain(doing, 80), plain(f"request to {model}: {doing}"))


def _model(one: Mapping[str, Any], now: float) -> Model:
    state, id_ = said.text(one, "state") or said.UNKNOWN, said.text(one, "id")
    until = said.until(one, now)
    doing = {"unloaded": "not loaded", "loaded": until if until == "in use" else f"loaded, goes {until}"}.get(
        state, state
    )
    if state == "loaded" and until in ("pinned", "for ever"):
        doing = "loaded"
    if problem := said.text(one, "problem"):
        doing += f": {problem}"
    memory = said.size(one.get("resident_bytes")) if state == "loaded" else ""
    pinned = one.get("pinned") is True
    spoken = f"{id_}, {doing}{', pinned' if pinned else ''}{f', {memory}' if memory else ''}"
    busy = state in ("loading", "unloading")
    return Model(plain(id_, 128), plain(doing, 80), memory, state == "loaded", busy, pinned, plain(spoken))


def _stored(found: Mapping[str, Any]) -> tuple[str, float | None]:
    """Return a text with stored bytes and sessions, and the used part of the quota."""
    nbytes, quota = said.number(found.get("stored_bytes")), said.number(found.get("quota_bytes"))
    if nbytes is None:
        return said.UNKNOWN, None
    text = said.size(nbytes) + (f" of {said.size(quota)}" if quota else "")
    kept = said.of(found, "sessions")
    count, pinned = said.number(kept.get("count")), said.number(kept.get("pinned"))
    if count is not None:
        text += f", {count:.0f} session{'' if count == 1 else 's'}{f', {pinned:.0f} pinned' if pinned else ''}"
    return text, min(1.0, max(0.0, nbytes / quota)) if quota and quota > 0 else None


def _share(series: Mapping[str, Any]) -> str:
    last, p50 = said.number(series.get("last")), said.number(series.get("p50"))
    if last is None:
        return said.UNKNOWN
    return f"{last:.0%}" + ("" if p50 is None else f" (median {p50:.0%})")


def _ms(value: Any) -> str:
    found = said.number(value)
    if found is None:
        return said.UNKNOWN
    if abs(found) >= 10_000:
        return f"{found / 1000:.1f} s"
    return f"{found:.0f} ms" if abs(found) >= 100 else f"{found:.1f} ms"


def _number(value: Any, how: str) -> str:
    found = said.number(value)
    return said.UNKNOWN if found is None else format(found, how)
