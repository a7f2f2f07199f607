"""/ssmd/v1/runtimes: what can be used here, found out once a minute at most, without paths of this computer."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from operating import app_of, service_of
from serving import Served, serving

from ssmd.api.own import pulls
from ssmd.api.own.operations import OPERATIONS
from ssmd.config import Settings
from ssmd.runtime.devices import RuntimeStatus, find
from ssmd.runtime.protocol import Device

PATH = "/ssmd/v1/runtimes"


@contextmanager
def served() -> Iterator[Served]:
    with serving(app_of(service_of([one for one in OPERATIONS if one.path == PATH], Settings()))) as one:
        yield one


def test_what_the_doctor_finds() -> None:
    with served() as one:
        before = time.time()
        answer = one.ask("GET", PATH)
        assert answer.status == 200
        assert before <= answer.json["looked_at"] <= time.time()
        rows = {row["name"]: row for row in answer.json["data"]}
        [cpu] = [device for device in rows["litert"]["devices"] if device["name"] == "cpu"]
        assert cpu == {"name": "cpu", "description": cpu["description"], "usable": True, "problem": None}
        assert rows["litert"]["usable"]
        assert rows["litert"]["problem"] is None
        assert [*rows] == [found.name for found in find()]
        assert one.ask("GET", PATH).json == answer.json


def test_many_who_ask_at_once_have_one_look(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[float] = []

    def slow(*, limit_s: float) -> list[RuntimeStatus]:
        looks.append(limit_s)
        time.sleep(0.3)
        return []

    monkeypatch.setattr(pulls, "find", slow)
    monkeypatch.setattr(pulls, "KEPT_S", 0.5)
    with served() as one:
        askers = [threading.Thread(target=one.ask, args=("GET", PATH)) for _ in range(8)]
        for asker in askers:
            asker.start()
        for asker in askers:
            asker.join()
        assert looks == [pulls.LIMIT_S]
        time.sleep(0.6)
        one.ask("GET", PATH)
        assert len(looks) == 2


@pytest.mark.parametrize(
    ("problem", "told"),
    [
        ("install it with: /home/ada/.venv/bin/python -m pip install x", "install it with: … -m pip install x"),
        ("install it with: '/home/ada b/.venv/bin/python' -m pip", "install it with: '…' -m pip"),
        ("(OSError: /home/ada/x.so: no such file)", "(OSError: …: no such file)"),
        (r"C:\Users\Ada\x.dll is missing", "… is missing"),
        ("no /dev/dri/renderD*, no /dev/accel/accel*", "no /dev/dri/renderD*, no /dev/accel/accel*"),
        ("see https://aka.ms/vs/17/release/x.exe", "see https://aka.ms/vs/17/release/x.exe"),
        ("run scripts/setup litert", "run scripts/setup litert"),
    ],
)
def test_no_path_of_the_user_is_told(problem: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [RuntimeStatus("one", problem, ()), RuntimeStatus("two", "", (Device("cpu", "a processor", problem),))]
    monkeypatch.setattr(pulls, "find", lambda *, limit_s: found)
    with served() as one:
        rows = one.ask("GET", PATH).json["data"]
    assert [row["problem"] for row in rows] == [told, told]
    assert rows[1]["devices"][0]["problem"] == told
    assert not any(row["usable"] for row in rows)
