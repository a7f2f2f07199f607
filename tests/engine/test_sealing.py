"""Sealed states: found and opened by the text alone, in its trust domain, for their time; nothing else tells them."""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from engine.test_engine import Answer, ask, user
from engines import OwnEngine

from ssmd.engine.persist import writer as writer_module
from ssmd.engine.request import Request
from ssmd.model.artifact import Artifact
from ssmd.runtime.protocol import Program
from ssmd.sessions.checkpoint import ON_DISK, Digested, Scope, Seal, digest, prefix_keys
from ssmd.sessions.fsck.repair import check
from ssmd.sessions.rows import checkpoints as checkpoint_rows
from ssmd.sessions.rows.loose import SHARE
from ssmd.sessions.store import Store
from ssmd.sessions.turn import Domain
from ssmd.text.messages import Message

SYSTEM = Message("system", "You are the keeper of a lighthouse. " * 12)
UNSTORED = Request((SYSTEM, user("Who is there?")), store=False)
KEPT: dict[str, Any] = {"store": False, "retention": "24h"}


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "COMMIT_PATIENCE_S", 60)
    monkeypatch.setattr("ssmd.engine.metrics.Pace.pays", lambda *_: True)


def answered(text: str) -> Message:
    return Message("assistant", text)


def talk_after(first: Answer) -> tuple[Message, ...]:
    return SYSTEM, user("Who is there?"), answered(first.text), user("And now?")


def files_of(folder: Path) -> bytes:
    return b"".join(p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file())


def test_an_unstored_conversation_is_not_read_again(engine: OwnEngine, loaded: tuple[Artifact, Program]) -> None:
    control = OwnEngine(*loaded, None)
    control.start()
    first = ask(engine, SYSTEM, user("Who is there?"), **KEPT)
    assert (first.usage.session, first.usage.stored, first.usage.cached_tokens) == (None, False, 0)
    assert first.text == ask(control, SYSTEM, user("Who is there?")).text
    again = ask(engine, SYSTEM, user("Who is there?"), **KEPT)
    assert again.usage.cached_tokens == again.usage.prompt_tokens - 1
    assert (again.text, again.logprobs, again.usage.resume) == (first.text, first.logprobs, "exact")
    second = ask(engine, *talk_after(first), **KEPT)
    assert second.usage.cached_tokens >= first.usage.prompt_tokens - 1
    control.shutdown(0)


def test_it_survives_a_restart_and_nothing_lists_it(
    loaded: tuple[Artifact, Program], store: Store, tmp_path: Path
) -> None:
    before = OwnEngine(*loaded, store)
    before.start()
    first = ask(before, SYSTEM, user("Who is there?"), **KEPT)
    before.shutdown(0)
    assert store.sessions() == []
    assert not store.search("lighthouse", 10).sessions
    assert not check(tmp_path / "data").damages
    after = OwnEngine(*loaded, store)
    after.start()
    second = ask(after, *talk_after(first), **KEPT)
    assert second.usage.cached_tokens >= first.usage.prompt_tokens - 1
    assert second.usage.resume == "exact"
    after.shutdown(0)


def test_no_file_tells_the_text_the_ids_or_the_state(
    loaded: tuple[Artifact, Program], store: Store, tmp_path: Path
) -> None:
    """The state as it would be stored openly, its ids, hashes and keys are in no file of the data directory."""
    engine = OwnEngine(*loaded, store)
    engine.start()
    answer = ask(engine, SYSTEM, user("Who is there?"), **KEPT)
    prompt = engine._planner.plan(UNSTORED)
    engine.shutdown(0)
    store.move_log()
    data = files_of(tmp_path / "data")
    for text in (SYSTEM.content, "keeper of a lighthouse", "Who is there?", answer.text):
        assert text.encode() not in data
    ids, spec = prompt.ids, loaded[1].spec
    assert ids.own.tobytes()[:64] not in data
    scope = Scope(spec.digest(), loaded[0].manifest.lineage, loaded[0].manifest.build)
    positions = range(32, len(ids))  # a hash of fewer ids begins with zeros
    for hashed in [*ids.hashes(positions), *prefix_keys(scope.layout, scope.lineage, ids, positions)]:
        assert hashed[:32] not in data
    for hashed in ids.hashes(positions):
        assert ON_DISK.key(scope.layout, scope.lineage, hashed) not in data
    handle = loaded[1].new_state()
    loaded[1].prefill(handle, ids.own[:64].tolist())
    state = loaded[1].save(handle)
    loaded[1].release(handle)
    for name, array in state.tensors.items():
        plain = np.ascontiguousarray(array).tobytes()
        assert not any(
            plain[at : at + 64] in data for at in range(0, len(plain) - 64, 64) if any(plain[at : at + 64])
        ), name


def test_the_check_finds_an_open_state(loaded: tuple[Artifact, Program], store: Store, tmp_path: Path) -> None:
    """The search of the test above finds text, ids and states of a stored conversation."""
    engine = OwnEngine(*loaded, store)
    engine.start()
    ask(engine, SYSTEM, user("Who is there?"))
    ids = engine._planner.plan(UNSTORED).ids
    engine.shutdown(0)
    store.move_log()
    data = files_of(tmp_path / "data")
    assert b"keeper of a lighthouse" in data
    assert ids.own.tobytes()[:64] in data


@pytest.mark.parametrize("retention", ["none", "in_memory"])
def test_a_request_may_ask_for_less(
    retention: str, loaded: tuple[Artifact, Program], store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = OwnEngine(*loaded, store)
    one.start()
    for cached in (False, retention == "in_memory"):
        answer = ask(one, SYSTEM, user("Who is there?"), store=False, retention=retention)
        assert (answer.usage.cached_tokens > 0) == cached
    one.shutdown(0)
    other_process = (ON_DISK, Seal("memory", bytes(32)))
    monkeypatch.setattr(checkpoint_rows, "SEALS", other_process)
    two = OwnEngine(*loaded, store)
    two.start()
    assert ask(two, SYSTEM, user("Who is there?"), store=False, retention="none").usage.cached_tokens == 0
    two.shutdown(0)
    assert store.bytes_stored() == 0, "what no process opens any more goes when the next one begins"


def test_another_key_finds_nothing(engine: OwnEngine, store: Store) -> None:
    anna, ben = Domain("anna", ("anna",)), Domain("ben", ("ben",))
    ask(engine, SYSTEM, user("Who is there?"), domain=anna, **KEPT)
    assert ask(engine, SYSTEM, user("Who is there?"), domain=ben, **KEPT).usage.cached_tokens == 0
    assert ask(engine, SYSTEM, user("Who is there?"), domain=anna, **KEPT).usage.cached_tokens > 0


def test_stored_and_unstored_states_share_no_rows(engine: OwnEngine, store: Store, tmp_path: Path) -> None:
    """Either kind starts from the other one, but a stored state never needs a sealed one's rows."""
    first = ask(engine, SYSTEM, user("Who is there?"), **KEPT)
    stored = ask(engine, *talk_after(first))
    assert stored.usage.cached_tokens >= first.usage.prompt_tokens - 1
    again = ask(engine, *talk_after(first), answered(stored.text), user("More."), **KEPT)
    assert again.usage.cached_tokens > stored.usage.cached_tokens
    assert engine.writer is not None
    engine.writer.flush()
    with store.writing() as connection:
        shared = connection.exec_driver_sql(
            "SELECT count(*) FROM checkpoint_segment a JOIN checkpoint x ON x.id = a.checkpoint "
            "JOIN checkpoint_segment b ON b.segment = a.segment JOIN checkpoint y ON y.id = b.checkpoint "
            "WHERE (x.kind = 'sealed') <> (y.kind = 'sealed')"
        ).scalar_one()
    assert shared == 0
    assert not check(tmp_path / "data").damages
    assert store.sweep(0, 0) > 0
    last = ask(engine, *talk_after(first), answered(stored.text), user("More."))
    assert last.usage.cached_tokens >= stored.usage.prompt_tokens


@pytest.mark.parametrize("table", ["piece", "segment"])
@pytest.mark.parametrize("change", ["data = zeroblob(length(data))", "data = substr(data, 1, 40)", "swapped"])
def test_an_altered_state_is_read_again(table: str, change: str, engine: OwnEngine, store: Store) -> None:
    """Also with a checksum that fits: the tag is over every byte, its place and the ids."""
    first = ask(engine, SYSTEM, user("Who is there?"), **KEPT)
    assert engine.writer is not None
    engine.writer.flush()
    with sqlite3.connect(store.file) as other:
        rows = other.execute(f"SELECT rowid, data, first FROM {table}").fetchall()
        if not rows:
            pytest.skip("this model has none")
        for (rowid, data, _), (_, before, _) in zip(rows, [rows[-1], *rows], strict=False):
            new = {"data = zeroblob(length(data))": bytes(len(data)), "swapped": before}.get(change, data[:40])
            fits = xxhash.xxh3_128_digest(new)
            other.execute(f"UPDATE {table} SET data = ?, checksum = ? WHERE rowid = ?", (new, fits, rowid))
    other.close()
    if change == "swapped" and len({data for _, data, _ in rows}) < 2:
        pytest.skip("there is one part only")
    again = ask(engine, SYSTEM, user("Who is there?"), **KEPT)
    assert (again.text, again.logprobs) == (first.text, first.logprobs)
    assert again.usage.cached_tokens == 0


def test_a_renamed_state_is_read_again(engine: OwnEngine, store: Store) -> None:
    """Two states exchange their names, with digests that fit: neither opens for the other's text."""
    talks = [(Message("system", f"You are keeper {n}. {SYSTEM.content}"), user("Who is there?")) for n in range(2)]
    first = [ask(engine, *talk, **KEPT) for talk in talks]
    assert engine.writer is not None
    engine.writer.flush()
    with sqlite3.connect(store.file) as other:
        columns = "id, position, key, anchor, build, origin"
        rows = other.execute(f"SELECT {columns} FROM checkpoint ORDER BY position, id").fetchall()
        other.execute("UPDATE checkpoint SET key = key || id")
        for one, two in zip(rows[::2], rows[1::2], strict=True):
            assert one[1] == two[1], "both talks have as many tokens"
            for (number, position, *_), (_, _, key, anchor, build, origin) in ((one, two), (two, one)):
                fits = digest((key, build, origin), position, *parts_of(other, number))
                values = key, anchor, fits, number
                other.execute("UPDATE checkpoint SET key = ?, anchor = ?, digest = ? WHERE id = ?", values)
    other.close()
    for talk, before in zip(talks, first, strict=True):
        again = ask(engine, *talk, **KEPT)
        assert (again.text, again.logprobs) == (before.text, before.logprobs)
        assert again.usage.cached_tokens == 0


def parts_of(database: sqlite3.Connection, checkpoint: int) -> tuple[list[Digested], list[Digested]]:
    """Return (first, last, checksum) of a checkpoint's segments and of its pieces."""
    segments = (
        "SELECT first, last, checksum FROM segment JOIN checkpoint_segment ON segment = id WHERE checkpoint = ? "
        "ORDER BY first"
    )
    pieces = "SELECT first, last, checksum FROM piece WHERE checkpoint = ? ORDER BY first"
    return database.execute(segments, (checkpoint,)).fetchall(), database.execute(pieces, (checkpoint,)).fetchall()


def test_sealed_states_give_way_first(engine: OwnEngine, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    ask(engine, SYSTEM, user("Who is there?"), **KEPT)
    stored = ask(engine, user("Keep this."))
    assert engine.writer is not None
    engine.writer.flush()
    result = store.collect(store.bytes_stored() - 1)
    assert result.sessions == {}
    kept = ask(engine, user("Keep this."), answered(stored.text), user("Still there?"))
    assert kept.usage.cached_tokens >= stored.usage.prompt_tokens - 1


def test_a_long_talk_keeps_its_end_and_its_beginning(
    engine: OwnEngine, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its states thin out when they exceed their share: the next request starts from the newest one."""
    talk: tuple[Message, ...] = (SYSTEM,)
    assert engine.writer is not None
    share = 0
    for n in range(8):
        first = ask(engine, *talk, user("Go on."), max_tokens=1, **KEPT)
        engine.writer.flush()
        talk = *talk, user("Go on."), answered("yes")
        if n == 3:
            share = store.bytes_stored()
            monkeypatch.setattr(store, "quota", SHARE * share)
        if n > 3:
            assert store.bytes_stored() <= share
            assert first.fed <= 64 or rows_only(engine)
    again = ask(engine, SYSTEM, user("Another question?"), **KEPT)
    assert again.usage.cached_tokens >= 64
    assert not check(tmp_path / "data").damages


def rows_only(engine: OwnEngine) -> bool:
    """Return True if a state is only rows of caches: then the share bounds how much of a conversation can stay."""
    return not any(t.recurrent for t in engine.program.spec.tensors)


def test_a_clock_set_back_keeps_no_state_of_a_process(engine: OwnEngine, store: Store) -> None:
    ask(engine, SYSTEM, user("Who is there?"), max_tokens=1, store=False, retention="in_memory")
    assert engine.writer is not None
    engine.writer.flush()
    with store.writing() as connection:
        connection.exec_driver_sql("UPDATE checkpoint SET created_at = created_at + 3600000000")
    store.drop_unopenable(time.time_ns() // 1000)
    assert store.bytes_stored() == 0


def test_a_state_above_its_share_is_not_written(
    engine: OwnEngine, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(engine, SYSTEM, user("Who is there?"), max_tokens=1, **KEPT)
    assert engine.writer is not None
    engine.writer.flush()
    if rows_only(engine):
        pytest.skip("each of its states adds few rows")
    monkeypatch.setattr(store, "quota", 2 * store.bytes_stored())
    assert store.sweep() == 3

    def made() -> int:
        with store.reading() as connection:
            (count,) = connection.exec_driver_sql("SELECT seq FROM sqlite_sequence WHERE name = 'checkpoint'").one()
            return int(count)

    before = made()
    assert ask(engine, SYSTEM, user("Who is there?"), max_tokens=1, **KEPT).text
    engine.writer.flush()
    assert made() == before


@pytest.mark.parametrize("column", ["position", "parent", "rows_nbytes"])
def test_an_altered_number_stops_no_other_turn(
    column: str, engine: OwnEngine, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n in range(3):
        ask(engine, SYSTEM, user(f"Number {n}?"), max_tokens=1, **KEPT)
    assert engine.writer is not None
    engine.writer.flush()
    with sqlite3.connect(store.file) as other:
        value = "id + 1" if column == "parent" else "'abc'"
        other.execute(
            f"UPDATE checkpoint SET {column} = {value} WHERE id % 2 = 0 AND id < (SELECT max(id) FROM checkpoint)"
        )
    other.close()
    monkeypatch.setattr(store, "quota", store.bytes_stored() + 1)
    assert ask(engine, user("Keep this."), max_tokens=1).usage.state_stored
    assert ask(engine, SYSTEM, user("Number 9?"), max_tokens=1, **KEPT).text
