"""docs/metrics.md and docs/grafana.json against a daemon that answers: neither tells of what is not there."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import TinyArtifacts
from daemon import soon
from keyfile import bearer, written
from modules import ROOT
from prometheus_client.parser import text_string_to_metric_families
from several import LONG, models_folder, several

PAGE = re.sub(r"```.*?```", "", (ROOT / "docs" / "metrics.md").read_text("utf-8"), flags=re.DOTALL)
DASHBOARD = json.loads((ROOT / "docs" / "grafana.json").read_text("utf-8"))
ALERTS = yaml.safe_load((ROOT / "docs" / "alerts.yml").read_text("utf-8"))
HTTP = (ROOT / "docs" / "http.md").read_text("utf-8")
ALICE = "alice-has-this-one"
SERIES = {"last", "p50", "p95", "n", "since_start", "recent"}
BY_NAME = {"requests", "keys", "turns_not_stored"}  # whose keys are names of something
OF_PROMETHEUS = {"instance", "job"}  # which it adds to all; and `le`, in a histogram's buckets
SUFFIX = {"histogram": ("_bucket", "_sum", "_count")}


@pytest.fixture(scope="module")
def shown(artifacts: TinyArtifacts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the JSON and the exposition of a daemon with one answered, one refused and one running request."""
    folder = tmp_path_factory.mktemp("page")
    keys = written(folder / "keys", f"alice {ALICE}\nbob bob-has-this-one\n")
    mine = bearer(ALICE)
    with several(models_folder(artifacts, folder / "models"), api_keys_file=keys, offline=True) as one:
        one.ask("POST", "/ssmd/v1/pulls", {"model": "mamba-130m"}, mine)
        soon(lambda: one.metrics(mine)["pulls"][0]["state"] == "failed", within_s=60)
        one.chat("llama", headers=mine)
        one.chat("nothing", headers=mine)
        one.quiet()
        soon(lambda: one.metrics(mine)["last"] is not None)
        with one.asking("llama", headers=mine, **LONG) as stream:
            soon(lambda: bool(one.metrics(mine)["running"]))
            found = one.metrics(mine), one.ask("GET", "/metrics", headers=mine).body.decode()
            assert found[0]["running"]
            stream.recv(10)
        yield found


def tables(heading: str) -> Iterator[list[str]]:
    """Rows of the tables under a heading of this level, and below it, cell by cell."""
    level = heading.partition(" ")[0]
    part = PAGE[PAGE.index(f"\n{heading}\n") + len(heading) + 2 :]
    ended = re.search(rf"^#{{1,{len(level)}}} ", part, re.MULTILINE)
    for line in part[: ended.start() if ended else None].splitlines():
        if line.startswith("| `"):
            yield [cell.strip() for cell in line.strip("|").split("|")]


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def fields(value: Any, path: str = "") -> Iterator[str]:
    """Paths of all that stands in the JSON; a series is one thing."""
    if isinstance(value, list):
        assert value, path
        for entry in value:
            yield from fields(entry, f"{path}[]")
    elif isinstance(value, dict) and not value.keys() >= SERIES - {"recent"}:
        for name, entry in value.items():
            where = f"{path}.{name}" if path else name
            yield from fields(entry, f"{path}.*" if path.rpartition(".")[2] in BY_NAME else where)
    else:
        yield path


def test_the_page_documents_every_metrics_field_and_no_others(shown: tuple[dict[str, Any], str]) -> None:
    documented = [name for row in tables("## The JSON") for name in names(row[0])]
    of_series = [name for row in tables("### A series") for name in names(row[0])]
    of_kinds = ["now", "start", "last", "series"]
    assert set(fields(shown[0])) == {name for name in documented if name not in of_series}
    assert len(documented) == len(set(documented) | set(of_series)), "some stand there twice"
    series = shown[0]["ttft_ms"]
    assert {*series} - {"since_start"} | {f"since_start.{name}" for name in series["since_start"]} == set(of_series)
    assert shown[0]["models"][0]["ttft_ms"].keys() == SERIES - {"recent"}
    rows = [row for row in tables("## The JSON") if len(row) == 4]
    assert all(row[2] in of_kinds for row in rows), [row for row in rows if row[2] not in of_kinds]


def test_a_series_is_called_one(shown: tuple[dict[str, Any], str]) -> None:
    of = {name: row[2] for row in tables("## The JSON") if len(row) == 4 for name in names(row[0])}
    for name in ("ttft_ms", "tbt_ms", "tokens_per_s", "cached_share"):
        assert isinstance(shown[0][name], dict)
        assert of[name] == of[f"models[].{name}"] == "series"
    assert sum(kind == "series" for kind in of.values()) == 9


def test_outcomes_states_and_reasons_are_named(shown: tuple[dict[str, Any], str]) -> None:
    told = " ".join(" ".join(row) for row in tables("## The JSON"))
    states = ["starting", "idle", "generating", "draining", "degraded"]
    states += ["unloaded", "loading", "loaded", "unloading", "failed", "waiting", "restoring", "prefill", "decode"]
    for word in (*shown[0]["turns_not_stored"], *states, "ok", "cancelled", "stopped"):
        assert f"`{word}`" in told, word


def test_the_parts_of_ttft_are_explained(shown: tuple[dict[str, Any], str]) -> None:
    parts = [name for row in tables("## Time to the first token") for name in names(row[0])]
    assert parts == ["load_ms", "plan_ms", "queue_ms", "restore_ms", "prefill_ms", "shared_ms"]
    last = shown[0]["last"]
    assert sum(last[part] for part in parts) == pytest.approx(last["ttft_ms"], abs=0.01)
    usage = HTTP.split("\n### Usage\n")[1].split("\n### ")[0]
    assert all(f"`{part}`" in usage and f'"{part}"' in usage for part in parts)


def exposed(text: str) -> dict[str, tuple[str, set[str]]]:
    """Type and labels by metric, as the page and queries call it."""
    found = {}
    for family in text_string_to_metric_families(text):
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        found[family.name + "_total" * (family.type == "counter")] = family.type, labels
    return found


def test_every_metric_of_prometheus_is_in_the_page(shown: tuple[dict[str, Any], str]) -> None:
    rows = [row for row in tables("## Prometheus") if len(row) == 4]
    documented = {names(row[0])[0]: (row[1], set(names(row[2]))) for row in rows}
    assert len(documented) == len(rows)
    found = exposed(shown[1])
    if not Path("/proc").exists():
        documented = {name: what for name, what in documented.items() if not name.startswith("process_")}
    assert found == documented


def queries() -> Iterator[tuple[str, str]]:
    """(query, legend) of each target, and the variables' queries."""
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"], target["legendFormat"]
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["query"]["query"], ""


def alerts() -> Iterator[tuple[str, str]]:
    """(query, what it says) of each rule."""
    for group in ALERTS["groups"]:
        for rule in group["rules"]:
            yield rule["expr"], rule["annotations"]["summary"].replace("$labels.", "").replace("{{ ", "{{")


def test_queries_and_alerts_ask_for_what_there_is(shown: tuple[dict[str, Any], str]) -> None:
    series: dict[str, set[str]] = {"up": OF_PROMETHEUS}
    for name, (kind, labels) in exposed(shown[1]).items():
        for suffix in SUFFIX.get(kind, ("",)):
            series[name + suffix] = labels | OF_PROMETHEUS | ({"le"} if suffix == "_bucket" else set())
    asked = set()
    for query, legend in (*queries(), *alerts()):
        used = re.findall(r"\b(?:ssmd_\w+|process_\w+|up\b)", query)
        assert used, query
        assert set(used) <= series.keys(), query
        asked |= set(used)
        mine = set[str]().union(*(series[name] for name in used))
        wanted = re.findall(r"(\w+)(?:=~|!~|!=|=)\"", query) + re.findall(r"{{(\w+) ?}}", legend)
        for grouped in re.findall(r"by \(([^)]*)\)", query):
            wanted += grouped.split(", ")
        wanted += re.findall(r"label_values\(.*, (\w+)\)", query)
        assert set(wanted) <= mine, (query, legend)
        assert query.count("(") == query.count(")")
    missing = {name for name in series if name.startswith("ssmd_") and not name.endswith(("_sum", "_count"))} - asked
    assert missing == {"ssmd_model_info"}, "all else is shown"


def test_every_alert_is_in_the_page_and_counts_real_errors() -> None:
    rules = {rule["alert"]: rule for group in ALERTS["groups"] for rule in group["rules"]}
    documented = {names(row[0])[0]: row[2] for row in tables("## Alerts")}
    assert documented == {name: rule["labels"]["severity"] for name, rule in rules.items()}
    code = "".join(file.read_text("utf-8") for file in (ROOT / "ssmd").rglob("*.py"))
    [outcomes] = re.findall(r'outcome=~"([^"]+)"', rules["SsmdErrors"]["expr"])
    assert [one for one in outcomes.split("|") if f'code="{one}"' not in code] == []


def test_the_dashboard_belongs_to_no_data_source_of_ours() -> None:
    [source] = [v for v in DASHBOARD["templating"]["list"] if v["type"] == "datasource"]
    assert (source["name"], source["query"]) == ("datasource", "prometheus")
    things = [*DASHBOARD["panels"], *(t for p in DASHBOARD["panels"] for t in p.get("targets", ()))]
    used = [thing["datasource"] for thing in things if thing.get("type") != "row"]
    assert all(one == {"type": "prometheus", "uid": "${datasource}"} for one in used)
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    assert DASHBOARD.get("id") is None
