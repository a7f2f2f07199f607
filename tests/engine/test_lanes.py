"""The number of choices that decode at once, and the choices of a step: by memory, and by the cost of a step."""

from __future__ import annotations

import logging
import sys
from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ssmd.engine.decode.sharing import FAIR, FairShare, Open
from ssmd.engine.host.opening import affordable
from ssmd.machine import memory
from ssmd.model.state import StateSpec, TensorSpec

SPEC = StateSpec(
    (
        TensorSpec("ssm_0", "ssm", 0, (48, 32, 128), "float32"),  # 786,432 bytes
        TensorSpec("key_1", "key", 1, (4, 64), "float16"),  # 512 bytes a token, and 1,024 in a cache
        TensorSpec("value_1", "value", 1, (4, 64), "float16"),
    )
)
EACH = 2 * 786_432 + 2048 * 2 * (512 + 1024)


@pytest.mark.parametrize(
    ("free", "found"),
    [(8 * EACH * 4 // 3 + 4, 8), (8 * EACH * 4 // 3 - 100, 7), (3 * EACH * 4 // 3 + 4, 3), (EACH, 1), (0, 1)],
)
def test_no_more_than_there_is_memory_for(free: int, found: int, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert affordable(SPEC, 8192, 8, free) == (found, 1)
    assert (f"memory for {found} choices at a time, not for 8" in caplog.text) == (found < 8)


def test_a_limit_of_this_process_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    resource = pytest.importorskip("resource")
    monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "_STATUS", tmp_path / "status")
    (tmp_path / "meminfo").write_text("MemAvailable: 900 kB\n")
    (tmp_path / "status").write_text("VmSize: 300 kB\n")
    for limit, left in ((resource.RLIM_INFINITY, 900 << 10), (1000 << 10, 700 << 10), (200 << 10, 0)):
        monkeypatch.setattr(resource, "getrlimit", lambda which, limit=limit: (limit, limit))
        assert memory.available() == (left if sys.platform == "linux" else None)


def test_clients_take_turns_at_reading() -> None:
    """Also where no choice decodes: a client with one short prompt does not wait for eight long ones."""
    long, short = ([reading(client)] * n for client, n in (("a", 8), ("b", 1)))
    shares = FairShare(8)
    read = []
    for _ in range(4):
        [first, *_] = shares.in_turn([*long, *short])
        shares.spend(first, 0.5)
        read.append(first.asked.request.client)
    assert read in (["a", "b", "a", "b"], ["b", "a", "b", "a"])


def reading(client: str) -> Any:
    asked = SimpleNamespace(request=SimpleNamespace(client=client), started=0.0)
    return SimpleNamespace(asked=asked, progress=SimpleNamespace(admitted=0.0))


def test_a_short_context_takes_less() -> None:
    assert affordable(SPEC, 256, 8, 8 * EACH // 2) == (8, 2)
    assert affordable(SPEC, None, 8, 8 * EACH // 2)[0] < 8


@pytest.mark.parametrize(("lanes", "spare"), [(9, 1), (11, 3), (16, 8), (40, 8)])
def test_as_many_spare_lanes_as_there_is_memory_for(lanes: int, spare: int) -> None:
    assert affordable(SPEC, 8192, 8, lanes * EACH * 4 // 3 + 4) == (8, spare)


def test_a_system_that_does_not_tell_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ssmd.engine.host.opening.available", lambda: None)
    assert affordable(SPEC, 2048, 8) == (8, 8)


def test_memory_that_is_free(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    assert memory.available() is None
    (tmp_path / "meminfo").write_text("MemTotal:  100 kB\nMemAvailable:      60 kB\n")
    assert memory.available() == 60 << 10
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("5000\n")
    assert memory.available() == 60 << 10
    (tmp_path / "memory.max").write_text("25000\n")
    assert memory.available() == 20000
    (tmp_path / "memory.stat").write_text("anon 1000\nfile 4000\ninactive_file 2500\nactive_file 1500\n")
    assert memory.available() == 24000  # pages of files go before memory is refused
    (tmp_path / "memory.current").write_text("30000\n")
    assert memory.available() == 0


def answers(**counts: int) -> list[Open]:
    """Open choices of clients; a choice is known by its client and number."""
    made = []
    for client, count in counts.items():
        request = SimpleNamespace(asked=SimpleNamespace(request=SimpleNamespace(client=client)))
        made += [cast(Open, (request, f"{client}{i}")) for i in range(count)]
    return made


def batched(streams: int) -> float:
    """Four together cost 1.6 times one, eight 2.7 times."""
    return {0: 0.0, 1: 1.0}.get(streams, 1.6 if streams <= 4 else 2.7 + (streams - 8) * (streams > 8))


def steps(shares: FairShare, unended: list[Open], count: int) -> list[list[str]]:
    return [[str(choice) for _, choice in shares.choices(unended)] for _ in range(count)]


def test_all_of_one_client_are_in_each_step() -> None:
    assert steps(FairShare(8, step_cost=batched), answers(a=8), 1) == [[f"a{i}" for i in range(8)]]


def test_who_has_more_fills_the_lanes_that_cost_nothing() -> None:
    found = steps(FairShare(8, step_cost=batched), answers(a=7, b=1), 14)
    assert {len(step) for step in found} == {4}
    assert all("b0" in step for step in found)
    counted = Counter(choice for step in found for choice in step)
    assert counted["b0"] == 14
    assert {counted[f"a{i}"] for i in range(7)} == {6}  # three in each step, in turn
    assert all(len(set(step)) == len(step) for step in found)


def test_a_prompt_that_ends_takes_a_place_of_the_step() -> None:
    shares = FairShare(8, step_cost=batched)
    assert len(shares.choices(answers(a=7, b=1), beside=1)) == 3
    assert len(shares.choices(answers(a=3, b=1, c=1, d=1), beside=1)) == 6  # five cost what eight do, and none is left


def test_each_client_has_a_token_in_each_step_at_any_cost() -> None:
    found = steps(FairShare(8, step_cost=batched), answers(a=2, b=1, c=2, d=1, e=1), 6)
    for step in found:
        assert {choice[0] for choice in step} == set("abcde")
    assert len(found[0]) == 7  # all of them, as eight cost what five do


def test_where_steps_are_serial_each_client_has_one_choice() -> None:
    found = steps(FairShare(8), answers(a=5, b=2), 10)
    assert all(sorted(choice[0] for choice in step) == ["a", "b"] for step in found)
    counted = Counter(choice for step in found for choice in step)
    assert {counted[f"a{i}"] for i in range(5)} == {2}
    assert FAIR < 2
