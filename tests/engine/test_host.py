"""The host over real artifacts: models come when they are asked for, go when they are idle or in the way, and nothing
is lost over it.
"""

from __future__ import annotations

import math
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from conftest import TinyArtifacts
from daemon import soon
from engine.test_engine import Asked, answered, ask, user
from several import GRANITE, LLAMA, OTHER, models_folder

from ssmd.config import Settings
from ssmd.engine.decode.device import DeviceLock
from ssmd.engine.engine import Engine
from ssmd.engine.host import loader
from ssmd.engine.host import models as shelf
from ssmd.engine.host.host import Host
from ssmd.engine.host.loader import HostedModel, ModelLease, NoMemory, make_room
from ssmd.engine.host.models import Model
from ssmd.engine.host.opening import choice_bytes, close_host, open_host
from ssmd.engine.sampling.params import SamplingParams
from ssmd.engine.terms import Rejection
from ssmd.installed import InstalledModel, read
from ssmd.machine import memory
from ssmd.runtime.protocol import ProgramError

ENDLESS = SamplingParams(temperature=1.0, seed=1, logit_bias={0: -100.0, 2: -100.0})


@pytest.fixture
def models(artifacts: TinyArtifacts, tmp_path: Path) -> Path:
    return models_folder(artifacts, tmp_path / "models")


@pytest.fixture(autouse=True)
def sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model is reckoned by its files alone: what the process grows by when a library is loaded first is no matter."""
    monkeypatch.setattr(memory, "resident", lambda: None)


@contextmanager
def hosting(models: Path, model: str | None = None, lazy: bool = False, **settings: Any) -> Iterator[Host]:
    given = {"models_dir": models, "data_dir": models.parent / "data", "threads": 1, **settings}
    host = open_host(Settings(**given), model, keep=True, lazy=lazy)
    host.ready()
    try:
        yield host
    finally:
        close_host(host)


def lent(host: Host, name: str, **fields: Any) -> ModelLease:
    return host.lend(host.shelf.find(name), **fields).result(60)


def loaded(host: Host) -> set[str]:
    return {row["id"] for row in host.live().models if row["state"] == "loaded"}


def state(host: Host, id_: str) -> dict[str, Any]:
    return next(row for row in host.live().models if row["id"] == id_)


def refusal(future: Future[ModelLease]) -> Rejection:
    with pytest.raises(Rejection) as caught:
        future.result(60)
    return caught.value


def test_models_are_known_by_name_and_by_runtime(models: Path) -> None:
    with hosting(models) as host:
        assert [model.id for model in host.shelf.models()] == [GRANITE, LLAMA, OTHER]
        found = {name: host.shelf.find(name).id for name in ("llama", "granite", OTHER, "llama@openvino-cpu-f32")}
        assert found == {"llama": LLAMA, "granite": GRANITE, OTHER: OTHER, "llama@openvino-cpu-f32": OTHER}
        for name in ("lama", "llama@wgpu", "llama@", "@litert", "../llama", "", "a" * 5000):
            with pytest.raises(Rejection) as caught:
                host.shelf.find(name)
            assert (caught.value.status, caught.value.code) == (404, "model_not_found")
            assert len(caught.value.message) < 200
        assert "granite, llama" in caught.value.message


def test_a_runtime_that_is_asked_for_is_the_only_one(models: Path) -> None:
    with hosting(models, runtime="openvino") as host:
        assert [model.id for model in host.shelf.models()] == [OTHER]
        assert loaded(host) == {OTHER}, "the only one is loaded at the start"
    with hosting(models, "llama") as host:
        assert [model.id for model in host.shelf.models()] == [LLAMA]
        assert host.live().models[0]["idle_until"] is None, "and stays"


def test_a_daemon_that_was_started_for_no_model_loads_none(models: Path) -> None:
    """Though only one is installed: the system starts the daemon with the machine, and maybe no request comes."""
    with hosting(models, runtime="openvino", lazy=True) as host:
        assert loaded(host) == set()
        lent(host, OTHER).release()
        assert host.live().models[0]["idle_until"] is not None, "it goes again"
    with hosting(models, "llama", lazy=True) as host:
        assert loaded(host) == {LLAMA}, "it was named"


def test_a_model_loads_once_for_all_requests_and_unloads_if_idle(models: Path) -> None:
    with hosting(models, keep_alive=0.3) as host:
        assert loaded(host) == set()
        waiting = [host.lend(host.shelf.find("llama")) for _ in range(5)]
        leases = [future.result(60) for future in waiting]
        assert len({id(lease.engine) for lease in leases}) == 1
        said = ask(leases[0].engine, user("Who is there?"))
        for lease in leases[1:]:
            lease.release()
            lease.release()
        time.sleep(0.6)
        assert loaded(host) == {LLAMA}, "one has it still"
        leases[0].release()
        soon(lambda: loaded(host) == set())
        again = lent(host, "llama")
        after = ask(again.engine, user("Who is there?"), answered(said.text), user("And now?"))
        again.release()
        assert (after.usage.resume, after.usage.session) == ("exact", said.usage.session)


def test_how_long_a_model_stays_can_be_said_with_a_request(models: Path) -> None:
    with hosting(models, keep_alive=0.2) as host:
        lent(host, "llama", keep_alive_s=math.inf).release()
        time.sleep(0.5)
        assert loaded(host) == {LLAMA}
        lent(host, "llama", keep_alive_s=30.0).release()
        until = state(host, LLAMA)["idle_until"]
        assert until == pytest.approx(time.time() + 30, abs=2)
        lent(host, "llama", keep_alive_s=0.0).release()
        soon(lambda: loaded(host) == set())


def test_who_was_asked_longest_ago_makes_room(models: Path) -> None:
    size = 33 << 20  # of each, as tiny models are reckoned
    with hosting(models, memory_budget=2 * size) as host:
        for hosted in (LLAMA, OTHER, LLAMA):
            lent(host, hosted).release()
        assert loaded(host) == {LLAMA, OTHER}
        lent(host, GRANITE).release()
        assert loaded(host) == {LLAMA, GRANITE}
        host.pin(host.shelf.find(LLAMA), True)
        lent(host, OTHER).release()
        assert loaded(host) == {LLAMA, OTHER}, "what is pinned stays"
        host.pin(host.shelf.find(OTHER), True)
        refused = refusal(host.lend(host.shelf.find(GRANITE)))
        assert (refused.status, refused.code, refused.retry_after_s) == (503, "no_memory", None)
        assert "pinned models hold" in refused.message
        assert "--memory-budget" in refused.message
        host.pin(host.shelf.find(LLAMA), False)
        lent(host, GRANITE).release()
        assert loaded(host) == {GRANITE, OTHER}


def test_a_model_that_is_larger_than_the_budget(models: Path) -> None:
    with hosting(models, memory_budget=1000) as host:
        refused = refusal(host.lend(host.shelf.find("llama")))
        assert (refused.status, refused.code, refused.retry_after_s) == (503, "no_memory", None)
    with pytest.raises(Rejection, match="models may take"):
        open_host(Settings(models_dir=models, data_dir=models.parent / "data", memory_budget=1000), "llama", keep=False)


def test_a_model_too_large_alone_is_loaded_without_a_set_budget(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available", lambda: 40 << 20)
    with hosting(models) as host:
        assert host.budget == 40 << 20
        monkeypatch.setattr(memory, "available", lambda: 1000)
        lent(host, "llama").release()
        lent(host, "granite").release()
        assert loaded(host) == {GRANITE}


def test_what_a_library_takes_is_no_models(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that came with a model and stays after its unload does not keep the model from loading again."""
    with hosting(models, memory_budget=40 << 20) as host:
        library, own = 100 << 20, 10 << 20
        monkeypatch.setattr(
            memory, "resident", lambda: (library if host._loader.hosted else 0) + own * len(host._loader.engines())
        )
        for name in (LLAMA, GRANITE, LLAMA):
            lent(host, name).release()
            assert loaded(host) == {name}
        assert host._loader.hosted[GRANITE].nbytes < 40 << 20


def test_a_model_is_reckoned_with_what_its_going_gave_back(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with hosting(models, memory_budget=80 << 20) as host:
        monkeypatch.setattr(memory, "resident", lambda: (60 << 20) * len(host._loader.engines()))
        lent(host, LLAMA).release()
        lent(host, GRANITE).release()
        assert host._loader.hosted[GRANITE].nbytes == 60 << 20, "the library was there: all of it is the model's"
        host.unload(host.shelf.find(LLAMA))
        soon(lambda: host._loader.hosted[LLAMA].nbytes == 60 << 20)
        lent(host, LLAMA).release()
        assert loaded(host) == {LLAMA}, "there is room for one of that size"


def test_one_waits_for_the_memory_that_another_answers_with(models: Path) -> None:
    """A request that comes for the other model meanwhile waits its turn, so that none starves."""
    with hosting(models, memory_budget=40 << 20) as host:
        first = lent(host, LLAMA)
        asked = Asked(first.engine, user("On and on"), sampling=ENDLESS, max_tokens=200)
        asked.next()
        second = host.lend(host.shelf.find(GRANITE))
        soon(lambda: host._loader.hosted[LLAMA].leaving)
        third = host.lend(host.shelf.find(LLAMA))
        time.sleep(0.3)
        assert [second.done(), third.done()] == [False, False]
        assert asked.answer().usage.completion_tokens == 200, "it was not cut"
        first.release()
        lease = second.result(60)
        assert loaded(host) == {GRANITE}
        assert not third.done()
        lease.release()
        third.result(60).release()
        assert loaded(host) == {LLAMA}


def test_who_waits_too_long_for_memory_is_told_who_has_it(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "ROOM_S", 0.3)
    with hosting(models, memory_budget=40 << 20) as host:
        first = lent(host, LLAMA)
        refused = refusal(host.lend(host.shelf.find(GRANITE)))
        assert (refused.status, refused.code) == (503, "no_memory")
        assert LLAMA in refused.message
        assert refused.retry_after_s
        lent(host, LLAMA).release()  # not held back any more
        first.release()


def lane(host: Host) -> int:
    """Bytes that an answer of a model takes."""
    program = lent(host, LLAMA).engine.program
    return choice_bytes(program.spec, program.context)


def test_answers_take_no_more_memory_than_models_may(models: Path) -> None:
    with hosting(models) as host:
        each = lane(host)
    with hosting(models, memory_budget=(32 << 20) + 2 * each) as host:
        lease = lent(host, LLAMA)
        asked = [
            Asked(lease.engine, user(f"On and on {n}"), sampling=ENDLESS, max_tokens=60, client=f"client {n}", n=1 + n)
            for n in range(4)
        ]
        most, rows = 0, host.live().running
        while rows:
            most = max(most, lease.engine._worker.in_use)
            assert host.live().memory["used_bytes"] <= host.budget
            rows = host.live().running
        assert most == 3, "one is a part of what the model takes"
        for n, one in enumerate(asked):
            assert one.answer().usage.completion_tokens == 60 * (1 + n)
        lease.release()


def test_a_budget_that_nobody_said_bounds_no_answers(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that takes more than was free is loaded alone; how many answers there is memory for was seen then."""
    monkeypatch.setattr(memory, "available", lambda: 1 << 20)
    with hosting(models) as host:
        lease = lent(host, LLAMA)
        asked = [
            Asked(lease.engine, user(f"On {n}"), sampling=ENDLESS, max_tokens=200, client=f"client {n}")
            for n in range(3)
        ]
        soon(lambda: lease.engine._worker.in_use == 3)
        for one in asked:
            assert one.answer().usage.completion_tokens == 200
        lease.release()


def test_a_model_waits_for_the_memory_of_additional_answers(models: Path) -> None:
    with hosting(models) as host:
        each = lane(host)
    with hosting(models, memory_budget=(64 << 20) + each) as host:
        first = lent(host, LLAMA)

        def asking(n: int, tokens: int = 300) -> Asked:
            return Asked(first.engine, user(f"On {n}"), sampling=ENDLESS, max_tokens=tokens, client=f"client {n}")

        long, others = asking(0), [asking(n) for n in range(1, 6)]
        for one in (long, others[0]):
            one.next()
        lease = host.lend(host.shelf.find(GRANITE)).result(60)
        assert loaded(host) == {LLAMA, GRANITE}, "nothing had to go"
        assert first.engine._worker.in_use <= 2
        assert host.live().memory["used_bytes"] <= host.budget
        for one in (long, *others):
            assert one.answer().usage.completion_tokens == 300
        first.release()
        lease.release()


def test_a_shutdown_while_a_model_is_loaded(models: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Waiting requests get an error, the load comes to its end, and nothing fails over it."""
    began, going_on = threading.Event(), threading.Event()
    with hosting(models) as host:
        load = host._loader._open

        def slowly(*of: Any) -> Engine:
            began.set()
            going_on.wait(60)
            return load(*of)

        host._loader._open = slowly
        waiting = host.lend(host.shelf.find(LLAMA))
        assert began.wait(60)
        host.shutdown(0)
        assert refusal(waiting).code == "shutting_down"
        going_on.set()
        soon(lambda: host._loader.hosted[LLAMA].is_loaded)
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []


def test_what_is_pinned_while_it_was_to_go_stays(models: Path) -> None:
    with hosting(models, memory_budget=40 << 20) as host:
        lease, began = lent(host, LLAMA), host._loader.hosted[LLAMA].loaded_at
        other = host.lend(host.shelf.find(GRANITE))
        soon(lambda: host._loader.hosted[LLAMA].leaving)
        host.pin(host.shelf.find(LLAMA), True)
        lease.release()
        assert refusal(other).code == "no_memory"
        lent(host, LLAMA).release()
        assert host._loader.hosted[LLAMA].loaded_at == began, "it was never let go"


def test_who_gives_up_waiting_holds_nothing(models: Path) -> None:
    with hosting(models, memory_budget=40 << 20) as host:
        first = lent(host, LLAMA)
        second = host.lend(host.shelf.find(GRANITE))
        soon(lambda: host._loader.hosted[LLAMA].leaving)
        assert host.row(host.shelf.find(GRANITE))["queue"] == {"waiting": 1, "running": 0}
        host.give_up(second)
        assert host.row(host.shelf.find(GRANITE))["queue"] == {"waiting": 0, "running": 0}
        lent(host, LLAMA).release()
        given = host.lend(host.shelf.find(LLAMA))
        host.give_up(given)  # it is there already
        first.release()
        assert host._loader.hosted[LLAMA].leases == 0
        assert loaded(host) == {LLAMA}


def test_a_load_that_fails_is_told_and_not_tried_in_a_loop(
    models: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    graph = next((models / "granite").rglob("*.tflite"))
    good = graph.read_bytes()
    graph.unlink()  # it is a link
    graph.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    with hosting(models) as host:
        lent(host, LLAMA).release()
        tried, trial = list[str](), host._loader._trial

        def noting(model: Model) -> None:
            tried.append(model.id)
            trial(model)

        monkeypatch.setattr(host._loader, "_trial", noting)
        for _ in range(3):
            refused = refusal(host.lend(host.shelf.find("granite")))
            assert (refused.status, refused.code, refused.retry_after_s) == (503, "model_load_failed", None)
            assert "sha256" in refused.message
        assert len(tried) == 1
        assert state(host, GRANITE)["state"] == "failed"
        assert "sha256" in state(host, GRANITE)["problem"]
        assert loaded(host) == {LLAMA}
        graph.write_bytes(good)
        refusal(host.lend(host.shelf.find("granite")))  # the manifest is the same
        host.load(host.shelf.find("granite")).result(60).release()
        assert loaded(host) == {LLAMA, GRANITE}
        assert state(host, GRANITE)["problem"] is None


def test_a_replaced_folder_is_loaded_anew_after_its_last_lease(models: Path, artifacts: TinyArtifacts) -> None:
    with hosting(models) as host:
        old = lent(host, "granite")
        before = old.model.manifest.build
        folder = models / "granite" / "litert-cpu-int8"
        folder.rename(models.parent / "aside")
        shutil.copytree(artifacts["granite-f32"], folder)
        new = host.lend(host.shelf.find("granite"))
        said = ask(old.engine, user("Who is there?"))
        assert not new.done(), "who has the old one comes to an end first"
        old.release()
        lease = new.result(60)
        assert lease.model.manifest.build != before
        after = ask(lease.engine, user("Who is there?"), answered(said.text), user("And now?"))
        assert (after.usage.resume, after.usage.session) == ("portable", said.usage.session)
        lease.release()
        shutil.rmtree(models / "granite")
        soon(lambda: loaded(host) == set())
        with pytest.raises(Rejection, match="no model 'granite'"):
            host.shelf.find("granite")


def test_models_take_turns_in_one_session(models: Path) -> None:
    """And a state goes from a runtime to the other."""
    with hosting(models) as host:
        engines = {name: lent(host, name).engine for name in (LLAMA, OTHER, GRANITE)}
        talk = [user("Who is there?")]
        resumed, sessions = [], set()
        for number, name in enumerate((LLAMA, OTHER, GRANITE, LLAMA, GRANITE, OTHER)):
            answer = ask(engines[name], *talk)
            resumed.append(answer.usage.resume)
            sessions.add(answer.usage.session)
            assert host.writer is not None
            turns = host.writer.store.turns(str(answer.usage.session))
            assert len(turns) == number + 1
            talk += [answered(answer.text), user(f"And then, {number}?")]
        assert len(sessions) == 1
        assert resumed == ["none", "portable", "none", "portable", "exact", "portable"], "from the last of the lineage"


def test_rows_tell_how_far_requests_are(models: Path) -> None:
    with hosting(models, max_running=1) as host:
        lease = lent(host, LLAMA)
        asked = [
            Asked(lease.engine, user(f"On and on {n}"), sampling=ENDLESS, max_tokens=300, client="one")
            for n in range(2)
        ]
        asked[0].next()
        soon(lambda: len(host.live().running) == 2)
        rows = {row["id"]: row for row in host.live().running}
        first, second = (rows[one.generation.asked.id] for one in asked)
        assert (first["phase"], second["phase"]) == ("decode", "waiting")
        assert (first["fed"], first["to_feed"]) == (len(asked[0].generation.prompt.ids),) * 2
        assert (second["fed"], second["tokens"], second["ttft_ms"]) == (0, 0, None)
        assert first["ttft_ms"] > 0
        before = host.metrics.snapshot()
        soon(lambda: asked[0].generation.row()["tokens"] > first["tokens"] + 5)
        after = host.metrics.snapshot()
        assert after["tbt_ms"]["since_start"]["n"] > before["tbt_ms"]["since_start"]["n"]
        assert after["generated_tokens"] > before["generated_tokens"]
        assert after["state"] == "generating"
        assert host.live().running[0]["tokens_per_s"] > 0
        for one in asked:
            one.generation.cancel()
            one.answer()
        assert not host.live().running
        assert host.metrics.snapshot()["requests"]["cancelled"] == 2  # before the clients hear of it
        assert host.metrics.snapshot()["state"] == "idle"
        lease.release()


def test_a_shutdown_tells_those_who_wait_for_a_model(models: Path) -> None:
    with hosting(models, memory_budget=40 << 20) as host:
        lent(host, LLAMA)
        waiting = host.lend(host.shelf.find(GRANITE))
        soon(lambda: host._loader.hosted[LLAMA].leaving)
        host.shutdown(0)
        assert refusal(waiting).code == "shutting_down"
        assert refusal(host.lend(host.shelf.find(LLAMA))).code == "shutting_down"


def test_too_many_wait_for_a_model(models: Path) -> None:
    with hosting(models, memory_budget=40 << 20, max_queue=2) as host:
        first = lent(host, LLAMA)
        waiting = [host.lend(host.shelf.find(GRANITE)) for _ in range(3)]
        assert refusal(waiting[2]).code == "queue_full"
        first.release()
        for future in waiting[:2]:
            future.result(60).release()


def test_room_is_made_of_idle_models_first_and_only_as_needed() -> None:
    nowhere = Model("m@litert", InstalledModel("m", Path("m"), None), None)

    def sized(size: int, used: float, leases: int = 0, pinned: bool = False) -> HostedModel:
        return HostedModel(nowhere, 1.0, pinned=pinned, leases=leases, last_used=used, weight=size << 20)

    busy, old, young, pin = sized(50, 1, leases=1), sized(40, 2), sized(40, 3), sized(35, 0, pinned=True)
    everything = [busy, old, young, pin]
    found = {size: make_room(sized(size, 9), everything, 205 << 20) for size in (40, 41, 80, 81, 121, 170)}
    assert found == {
        40: [],
        41: [old],
        80: [old],
        81: [old, young],
        121: [old, young, busy],
        170: [old, young, busy],
    }
    assert make_room(sized(500, 9), everything, 205 << 20) == [old, young, busy], "it was seen to be too large"
    assert make_room(sized(500, 9), everything, 64 << 20) == [old, young, busy]
    with pytest.raises(NoMemory, match="pinned"):
        make_room(sized(20, 9), everything, (64 << 20) - 1)


def test_programs_take_turns() -> None:
    """A thread that asks again at once comes after the waiting ones."""
    turns, order, ready = DeviceLock(), list[str](), threading.Barrier(3)

    def work(name: str) -> None:
        ready.wait()
        for _ in range(50):
            with turns:
                order.append(name)
                time.sleep(0.001)

    threads = [threading.Thread(target=work, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    middle = order[3:-3]
    assert all(len({*middle[i : i + 3]}) == 3 for i in range(len(middle) - 2)), order


def test_others_know_who_is_busy() -> None:
    turns, woken = DeviceLock(), list[str]()
    for name in "ab":
        turns.join(name, partial(woken.append, name))
    assert not turns.others_busy("a")
    turns.busy("b")
    assert turns.others_busy("a")
    assert not turns.others_busy("b")
    turns.idle("b")
    assert (turns.others_busy("a"), woken) == (False, ["a"])
    turns.busy("b")
    turns.leave("b")
    assert (turns.others_busy("a"), woken) == (False, ["a", "a"])


def test_a_long_trial_of_one_keeps_no_other_from_being_loaded(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with hosting(models, memory_budget=40 << 20) as host:
        lent(host, LLAMA).release()
        going, ended = threading.Event(), threading.Event()

        def slow(model: Model) -> None:
            if model.id == OTHER:
                going.set()
                assert ended.wait(60)

        monkeypatch.setattr(host._loader, "_trial", slow)
        waiting = host.lend(host.shelf.find(OTHER))
        assert going.wait(60)
        assert (state(host, OTHER)["state"], loaded(host)) == ("loading", {LLAMA}), "nothing makes room for it yet"
        lent(host, GRANITE).release()
        assert not waiting.done()
        ended.set()
        waiting.result(60).release()
        assert loaded(host) == {OTHER}


def test_a_trial_that_fails_is_told(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with hosting(models) as host:
        answers = iter([ProgramError("it crashed"), RuntimeError("what nobody knows"), None])

        def trial(model: Model) -> None:
            if (err := next(answers)) is not None:
                raise err

        monkeypatch.setattr(host._loader, "_trial", trial)
        assert "it crashed" in refusal(host.lend(host.shelf.find(LLAMA))).message
        assert "it crashed" in refusal(host.lend(host.shelf.find(LLAMA))).message, "and is not tried in a loop"
        assert host.shelf.find("llama").id == OTHER, "the name means another one"
        assert "see the log" in refusal(host.load(host.shelf.find(LLAMA))).message
        host.load(host.shelf.find(LLAMA)).result(60).release()


def test_who_waits_keeps_none_back_that_is_not_in_its_way(models: Path) -> None:
    with hosting(models, memory_budget=105 << 20) as host:
        small = host.shelf.find(LLAMA)
        large = Model(GRANITE, replace(host.shelf.find(GRANITE).found), host.shelf.find(GRANITE).stamp)
        first = lent(host, LLAMA)
        host._loader.hosted[GRANITE] = HostedModel(large, math.inf, weight=80 << 20)
        waits = host.lend(host.shelf.find(GRANITE))
        soon(lambda: host._loader.hosted[LLAMA].leaving)
        behind = host.lend(host.shelf.find(OTHER))
        time.sleep(0.5)
        assert [waits.done(), behind.done()] == [False, False], "it would be in its way"
        host._loader.hosted[GRANITE].weight = 40 << 20  # beside which the other one has room
        host.give_up(waits)
        lent(host, LLAMA).release()
        behind.result(60).release()
        first.release()
        assert small.is_current


def test_a_folder_that_was_replaced_keeps_no_other_back(models: Path, artifacts: TinyArtifacts) -> None:
    with hosting(models) as host:
        old = lent(host, "granite")
        (models / "granite" / "litert-cpu-int8").rename(models.parent / "aside")
        shutil.copytree(artifacts["granite-f32"], models / "granite" / "litert-cpu-int8")
        new = host.lend(host.shelf.find("granite"))
        lent(host, "llama").release()
        assert not new.done()
        old.release()
        new.result(60).release()


def test_a_model_that_was_seen_half_written_is_whole_later(models: Path) -> None:
    file = models / "granite" / "litert-cpu-int8" / "tokenizer.json"
    file.rename(models / "aside")
    with hosting(models) as host:
        refused = refusal(host.lend(host.shelf.find("granite@litert")))
        assert (refused.code, refused.status) == ("model_unusable", 503)
        assert "is missing" in refused.message
        (models / "aside").rename(file)
        soon(lambda: not host.shelf.find(GRANITE).found.problem)
        lent(host, "granite").release()


def test_a_replaced_folder_is_told_of_once(models: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Also while others are loaded, and where it has to wait."""
    caplog.set_level("INFO", "ssmd")
    with hosting(models) as host:
        old = lent(host, "granite")
        (models / "granite" / "litert-cpu-int8" / "artifact.json").touch()
        for name in (LLAMA, OTHER, LLAMA):
            lent(host, name).release()
            host.unload(host.shelf.find(name))
        soon(lambda: loaded(host) == {GRANITE})
        time.sleep(1.3)  # longer than between two looks
        old.release()
        assert sum("was replaced or removed" in record.getMessage() for record in caplog.records) == 1


def test_a_broken_folder_is_not_read_at_every_look(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (models / "granite" / "litert-cpu-int8" / "tokenizer.json").unlink()
    with hosting(models) as host:
        looks = list[str]()

        def noting(name: str, path: Path) -> InstalledModel:
            looks.append(name)
            return read(name, path)

        monkeypatch.setattr(shelf, "read", noting)
        for _ in range(50):
            host.shelf.find("llama")
        assert len(looks) <= 1


def test_programs_of_one_device_take_turns(models: Path) -> None:
    with hosting(models) as host:
        one, other = (lent(host, name).engine for name in (LLAMA, OTHER))
        assert one._worker._turns is other._worker._turns
