"""The `.ssmd` file: a session goes out and comes in whole, and nothing that was tampered with comes in at all."""

from __future__ import annotations

import hashlib
import json
import os
import re
import sqlite3
import stat
import struct
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from keeping import LINEAGE, SPECS, VOCABULARY, Chat, assert_same, find, new_store, plain, state_of, user, whole
from safetensors import safe_open
from safetensors.numpy import load_file
from sqlalchemy import func, select, update

from ssmd.model.state import StateSpec
from ssmd.sessions.files import contents, document, packing, sessionfile
from ssmd.sessions.files.sessionfile import SessionFileError
from ssmd.sessions.files.transfer import LocalModel, export_session, import_session
from ssmd.sessions.fsck.repair import check
from ssmd.sessions.rows import blobs as blobs_module
from ssmd.sessions.rows.schema import layout, segment
from ssmd.sessions.store import Store
from ssmd.sessions.turn import StoreError, UnknownSession


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = new_store(tmp_path / "here")
    yield opened
    opened.close()


@pytest.fixture
def there(tmp_path: Path) -> Iterator[Store]:
    opened = new_store(tmp_path / "there")
    yield opened
    opened.close()


@pytest.fixture(params=list(SPECS))
def spec(request: pytest.FixtureRequest) -> StateSpec:
    return SPECS[str(request.param)]


def talk(store: Store, spec: StateSpec, session: str = "s") -> Chat:
    """Three turns and a branch at the second."""
    chat = Chat(store, session, spec)
    chat.say("t1", None, "hi", "hello", system="Be brief. 東京 \U0001f600")
    chat.say("t2", "t1", "more", "sure")
    chat.say("t2b", "t1", "less", "fine")
    chat.say("t3", "t2", "and now?", " the end\n")
    return chat


def local(spec: StateSpec) -> dict[str, LocalModel]:
    return {LINEAGE: LocalModel("made-up", spec, VOCABULARY)}


def assert_same_turns(a: Store, b: Store, session: str) -> None:
    for x, y in zip(a.turns(session), b.turns(session), strict=True):
        assert plain(x) == plain(y)
        assert (x.ids.start, x.ids.before, x.ids.anchored) == (y.ids.start, y.ids.before, y.ids.anchored)
        assert whole(a, x.id) == whole(b, y.id)


def test_there_and_on(store: Store, there: Store, spec: StateSpec, tmp_path: Path) -> None:
    chat = talk(store, spec)
    done = export_session(store, "s", tmp_path / "chat.ssmd")
    assert done.turns == 4
    assert done.checkpoints == 2, "the newest turn's end, and its user message"
    assert done.nbytes == (tmp_path / "chat.ssmd").stat().st_size
    result = import_session(there, tmp_path / "chat.ssmd", local=local(spec))
    assert (result.session, result.renamed, result.turns, result.checkpoints) == ("s", False, 4, 2)
    assert_same_turns(store, there, "s")
    read = there.session("s")
    assert read.head == "t3"
    assert read.info == replace(chat.info, imported="s")
    ids = chat.turns["t3"].ids.own
    for prompt, position in (([*ids.tolist(), 1], len(ids) - 1), (ids[:-5].tolist(), len(ids) - 12)):
        found = find(there, chat.scope, prompt, "s")
        assert found is not None
        assert (found.position, found.origin, found.producer) == (position, "s", "numpy 1 cpu 2 threads")
        assert_same(there.load(found.id, spec), state_of(spec, ids[:position]))
    assert find(there, chat.scope, [*ids.tolist(), 1], None) is None, "an import serves nobody else"


def test_it_goes_on_after_a_second_journey(store: Store, there: Store, tmp_path: Path) -> None:
    """A session that was imported, and grew, is exported again with all its rows."""
    spec = SPECS["hybrid"]
    talk(store, spec)
    export_session(store, "s", tmp_path / "1.ssmd")
    import_session(there, tmp_path / "1.ssmd", local=local(spec))
    chat = Chat(there, "s", spec).imported_as("s")
    ids, _ = whole(there, "t3")
    found = find(there, chat.scope, [*ids, 1], "s")
    assert found is not None
    chat.remember(there.path("t3")[-1], found.id)
    turn, checkpoints = chat.make("t4", "t3", [user("again")], "yes")
    encoded = [replace(chat.encode(c), origin="s") for c in checkpoints]
    there.commit([turn], encoded, session=chat.info)
    export_session(there, "s", tmp_path / "2.ssmd")
    result = import_session(store, tmp_path / "2.ssmd", local=local(spec))
    assert result.renamed, "the session it once was is still there"
    assert len(store.sessions()) == 2
    assert store.session("s").turns == 4, "which nothing was added to"
    last = store.path(store.session(result.session).head)[-1]
    assert last.answer.content == "yes"
    ids, _ = whole(store, last.id)
    assert ids == turn.ids.own.tolist()
    found = find(store, chat.scope, [*ids, 1], result.session)
    assert found is not None
    assert found.origin == result.session
    assert_same(store.load(found.id, spec), state_of(spec, turn.ids.own[:-1]))


def test_every_branch_goes_on(store: Store, there: Store, spec: StateSpec, tmp_path: Path) -> None:
    """With all states each branch is resumed where it ended, and what branches share is stored once."""
    chat = talk(store, spec)
    chat.say("t4", "t2b", "and then?", "nothing")
    done = export_session(store, "s", tmp_path / "chat.ssmd", states="all")
    assert (done.turns, done.checkpoints, done.left_out) == (5, 5, 0), "two branches' ends, and where they part"
    result = import_session(there, tmp_path / "chat.ssmd", local=local(spec))
    assert result.checkpoints == 5
    for name in ("t3", "t4"):
        ids = chat.turns[name].ids.own
        found = find(there, chat.scope, [*ids.tolist(), 1], "s")
        assert found is not None
        assert found.position == len(ids) - 1
        assert_same(there.load(found.id, spec), state_of(spec, ids[:-1]))
    if spec.rows:
        with there.reading() as connection:
            rows = connection.scalar(select(func.sum(segment.c.last - segment.c.first)))
        paths = [len(chat.turns[name].ids) - 1 for name in ("t3", "t4")]
        assert rows == sum(paths) - (len(chat.turns["t1"].ids) - 1)


@pytest.mark.parametrize("position", [1, 23, 24, 25, 47, 48, 49, 72])
def test_a_state_of_any_part_of_its_turn(store: Store, there: Store, tmp_path: Path, position: int) -> None:
    """Also of what its turn goes on from, and just of that."""
    spec = SPECS["recurrent"]
    chat = talk(store, spec)
    export_session(store, "s", tmp_path / "chat.ssmd")
    file = rewrite(tmp_path / "chat.ssmd", doc=_set("checkpoints", 0, "position", position))
    assert import_session(there, file, local=local(spec)).checkpoints == 2
    found = find(there, chat.scope, [*chat.turns["t3"].ids.own[:position], 499], "s")
    assert found is not None
    assert found.position == position
    assert export_session(there, "s", tmp_path / "again.ssmd", states="all").left_out == 0
    assert check(there.file.parent).damages == ()


def test_branches_whose_parting_has_no_state_any_more(store: Store, there: Store, tmp_path: Path) -> None:
    """Their rows cannot be shared. States that an import would refuse are left out, the current path's never."""
    spec = SPECS["attention"]
    chat = Chat(store, "s", spec)
    chat.say("t1", None, "hi", "hello", tokens=60)
    for i in range(12):
        chat.say(f"b{i}", "t1", f"branch {i}", "yes", tokens=2)
    with sqlite3.connect(store.file) as raw:  # as thinning may leave it
        raw.execute("PRAGMA foreign_keys=ON")
        raw.execute("DELETE FROM checkpoint WHERE position <= ?", [len(chat.turns["t1"].ids)])
    raw.close()
    done = export_session(store, "s", tmp_path / "chat.ssmd", states="all")
    assert done.checkpoints + done.left_out == 24
    assert 2 < done.checkpoints < 24
    result = import_session(there, tmp_path / "chat.ssmd", local=local(spec))
    assert result.checkpoints == done.checkpoints
    ids = chat.turns["b11"].ids.own
    found = find(there, chat.scope, [*ids.tolist(), 1], "s")
    assert found is not None
    assert_same(there.load(found.id, spec), state_of(spec, ids[:-1]))


def test_more_branches_than_a_file_holds(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "MAX_CHECKPOINTS", 3)
    talk(store, SPECS["hybrid"])
    done = export_session(store, "s", tmp_path / "chat.ssmd", states="all")
    assert (done.checkpoints, done.left_out) == (3, 2)


def test_a_state_that_is_broken_here(store: Store, tmp_path: Path) -> None:
    talk(store, SPECS["hybrid"])
    with sqlite3.connect(store.file) as raw:
        raw.execute("UPDATE segment SET data = zeroblob(length(data))")
    raw.close()
    with pytest.raises(StoreError, match="without states"):
        export_session(store, "s", tmp_path / "chat.ssmd")
    assert export_session(store, "s", tmp_path / "chat.ssmd", states="none").turns == 4
    assert sorted(os.listdir(tmp_path)) == ["chat.ssmd", "here"]


def test_the_same_file_twice(there: Store, store: Store, spec: StateSpec, tmp_path: Path) -> None:
    talk(store, spec)
    export_session(store, "s", tmp_path / "chat.ssmd")
    first = import_session(there, tmp_path / "chat.ssmd")
    second = import_session(there, tmp_path / "chat.ssmd")
    assert (first.session, first.renamed) == ("s", False)
    assert second.session != "s"
    assert second.renamed
    there.delete("s")
    again = [t.answer for t in there.path(there.session(second.session).head)]
    assert again == [t.answer for t in store.path("t3")]


def test_text_alone(store: Store, there: Store, tmp_path: Path) -> None:
    """A session without any stored state moves too."""
    chat = Chat(store, "s")
    turn, _ = chat.make("t1", None, [user("hi")], "hello")
    store.commit([turn], session=chat.info)
    assert export_session(store, "s", tmp_path / "chat.ssmd").checkpoints == 0
    assert import_session(there, tmp_path / "chat.ssmd", local=local(chat.spec)).checkpoints == 0
    assert_same_turns(store, there, "s")


def test_rows_lie_in_the_file_once(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blobs_module, "BLOB_BYTES", 500)
    chat = talk(store, SPECS["attention"])
    export_session(store, "s", tmp_path / "chat.ssmd")
    tensors = load_file(tmp_path / "chat.ssmd")
    rows = sum(t.shape[1] for name, t in tensors.items() if name.startswith("rows.") and name.endswith("key_0"))
    assert rows == len(chat.turns["t3"].ids) - 1


def test_states_of_an_unknown_kind_stay_where_they_are(store: Store, there: Store, tmp_path: Path) -> None:
    """A newer version wrote them. The words leave for another place; a file with them is refused by their kind."""
    talk(store, SPECS["windows"])
    export_session(store, "s", tmp_path / "newer.ssmd")
    newer = rewrite(tmp_path / "newer.ssmd", doc=_set("layout", 1, "kind", "made_up"))
    refused(there, newer, "state tensor 'window_key_1' is of kind 'made_up', which this version of ssmd does not know")
    with store.writing() as connection:
        tensors = [{**t, "kind": t["kind"].replace("window_key", "made_up")} for t in SPECS["windows"].to_json()]
        connection.execute(update(layout).values(tensors=tensors))
    exported = export_session(store, "s", tmp_path / "words.ssmd")
    assert (exported.turns, exported.checkpoints) == (4, 0)
    done = import_session(there, tmp_path / "words.ssmd", local=local(SPECS["windows"]))
    assert (done.turns, done.checkpoints) == (4, 0)


def test_any_safetensors_library_reads_it(store: Store, spec: StateSpec, tmp_path: Path) -> None:
    chat = talk(store, spec)
    export_session(store, "s", tmp_path / "chat.ssmd")
    with safe_open(tmp_path / "chat.ssmd", "numpy") as file:
        said = json.loads(file.metadata()["ssmd"])
        assert [t["id"] for t in said["turns"]] == ["t1", "t2", "t2b", "t3"]
        assert said["layout"] == spec.to_json()
        number = next(i for i, c in enumerate(said["checkpoints"]) if c["kind"] == "turn")
        tails = {t["id"]: file.get_tensor(f"turn.{i}.ids") for i, t in enumerate(said["turns"])}
        assert {t["id"]: t["stem"] for t in said["turns"]} == {"t1": None, "t2": "t1", "t2b": "t1", "t3": "t2"}
        ids = np.concatenate([tails["t1"], tails["t2"], tails["t3"]])
        assert (ids == chat.turns["t3"].ids.own).all()
        assert said["checkpoints"][number]["turn"] == "t3"
        ids = ids[: said["checkpoints"][number]["position"]]
        assert len(ids) == len(chat.turns["t3"].ids) - 1
        expected = state_of(spec, ids)
        for t in spec.tensors:
            if t.recurrent:
                read = file.get_tensor(f"checkpoint.{number}.{t.name}")
            else:
                chunks = said["checkpoints"][number]["rows"]
                read = np.concatenate([file.get_tensor(f"rows.{k}.{t.name}") for k in chunks], 1)
            assert read.tobytes() == expected.tensors[t.name].tobytes()


def test_modes_and_existing_paths(store: Store, tmp_path: Path) -> None:
    talk(store, SPECS["hybrid"])
    file = tmp_path / "chat.ssmd"
    file.write_text("precious")
    with pytest.raises(SessionFileError, match="exists already"):
        export_session(store, "s", file)
    assert file.read_text() == "precious"
    export_session(store, "s", file, force=True)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(SessionFileError, match="exists already"):
        export_session(store, "s", tmp_path / "link")
    with pytest.raises(SessionFileError, match="cannot be written"):
        export_session(store, "s", tmp_path / "no" / "such" / "folder")
    with pytest.raises(SessionFileError, match="cannot be written"):
        export_session(store, "s", tmp_path / "here", force=True)
    with pytest.raises(UnknownSession):
        export_session(store, "nobody", tmp_path / "nobody.ssmd")
    assert sorted(os.listdir(tmp_path)) == ["chat.ssmd", "here", "link"], "nothing half written stays"


# What follows is hostile: files that lie.


@pytest.fixture
def good(tmp_path: Path) -> Path:
    (tmp_path / "here").mkdir()
    (tmp_path / "good.ssmd").write_bytes(_example())
    return tmp_path / "good.ssmd"


def refused(there: Store, file: Path, reason: str = "cannot|not a file|no file", **options: Any) -> None:
    """The import fails with one clear error that names the file, and the store has not changed."""
    before = there.file.read_bytes()
    with pytest.raises(SessionFileError, match=reason) as caught:
        import_session(there, file, **options)
    assert str(file) in str(caught.value)
    there.settle()
    assert there.file.read_bytes() == before
    assert there.sessions() == []
    assert sorted(p.name for p in there.file.parent.parent.iterdir() if p.is_dir()) == ["here", "there"]


def rewrite(
    file: Path,
    *,
    doc: Callable[[dict[str, Any]], None] | None = None,
    header: Callable[[dict[str, Any]], None] | None = None,
    tensors: Callable[[dict[str, np.ndarray[Any, Any]]], None] | None = None,
    raw: Callable[[bytes], bytes] | None = None,
) -> Path:
    """Change a file and put the right hash in again: an attacker can do so too."""
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    head, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    said = json.loads(head["__metadata__"]["ssmd"])
    if tensors is not None:
        arrays = load_file(file)
        tensors(arrays)
        head = {"__metadata__": head["__metadata__"]}
        body = b""
        names = {"int32": "I32", "float32": "F32", "float16": "F16", "int64": "I64"}
        for name, a in arrays.items():
            end = len(body) + a.nbytes
            head[name] = {"dtype": names[str(a.dtype)], "shape": list(a.shape), "data_offsets": [len(body), end]}
            body += a.tobytes()
    if doc is not None:
        doc(said)
    head["__metadata__"] = {"ssmd": json.dumps(said), "sha256": "0" * 64}
    if header is not None:
        header(head)
    text = json.dumps(head).encode()
    if raw is not None:
        text = raw(text)
    changed = len(text).to_bytes(8, "little") + text + body
    digest = hashlib.sha256(changed).hexdigest()
    file = file.with_name("bad.ssmd")
    file.write_bytes(changed.replace(b"0" * 64, digest.encode(), 1))
    return file


def test_the_rewriting_itself_is_sound(good: Path, there: Store) -> None:
    import_session(there, rewrite(good), local=local(SPECS["hybrid"]))
    assert there.session("s").turns == 4


@pytest.mark.parametrize("keep", [0, 1, 7, 8, 9, 100, 5000, -1, -100])
def test_cut(good: Path, there: Store, keep: int) -> None:
    bad = good.with_name("bad.ssmd")
    bad.write_bytes(good.read_bytes()[:keep])
    refused(there, bad, "cut off")


@pytest.mark.parametrize(
    "flood",
    [
        pytest.param(b'{"x":[' + b"[]," * 2_000_000 + b"[]]}", id="lists"),
        pytest.param(b'{"format":2,' + b",".join(b'"k%d":1' % i for i in range(200_000)) + b"}", id="names"),
        pytest.param(b'{"format":2,"turns":[' + b",".join([b"1"] * 1_000_000) + b"]}", id="turns"),
    ],
)
def test_refusing_a_header_costs_little(good: Path, there: Store, flood: bytes) -> None:
    """A hostile header, once parsed, and each of its errors, would be many times as large as it is."""
    bad = rewrite(good, header=lambda head: head["__metadata__"].update(ssmd=flood.decode()))
    tracemalloc.start()
    try:
        refused(there, bad)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 25 * len(flood)


def test_extended(good: Path, there: Store) -> None:
    bad = good.with_name("bad.ssmd")
    bad.write_bytes(good.read_bytes() + b"\0")
    refused(there, bad, "sha256 differs")


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_altered_byte_is_refused(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("x")
    (folder / "here").mkdir()
    (folder / "bad.ssmd").write_bytes(b"")
    octets = bytearray(_example())
    at = data.draw(st.integers(0, len(octets) - 1))
    octets[at] ^= data.draw(st.integers(1, 255))
    (folder / "bad.ssmd").write_bytes(octets)
    there = new_store(folder / "there")
    try:
        refused(there, folder / "bad.ssmd", local=local(SPECS["hybrid"]))
    finally:
        there.close()


@cache
def _example() -> bytes:
    with tempfile.TemporaryDirectory() as name:
        store = new_store(Path(name) / "here")
        talk(store, SPECS["hybrid"])
        export_session(store, "s", Path(name) / "x.ssmd")
        store.close()
        return (Path(name) / "x.ssmd").read_bytes()


def _set(*path: Any) -> Callable[[Any], None]:
    """A change of a document: the value, last, at the keys before it."""

    def change(where: Any) -> None:
        *keys, last, value = path
        for k in keys:
            where = where[k]
        where[last] = value

    return change


def _drop(*path: Any) -> Callable[[Any], None]:
    def change(where: Any) -> None:
        *keys, last = path
        for k in keys:
            where = where[k]
        del where[last]

    return change


def _double(*path: Any) -> Callable[[Any], None]:
    def change(where: Any) -> None:
        for k in path:
            where = where[k]
        where.append(where[0])

    return change


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_set("format", 3), "has format 3, this ssmd reads format 2 alone"),
        (_set("format", True), "has format True"),
        (_set("format", 1), "has format 1, this ssmd reads format 2 alone"),
        (_set("format", "1"), "format"),
        (_drop("format"), "format"),
        (_set("more", 1), "more"),
        (_drop("session"), "session"),
        (_set("session", "id", "../../etc/passwd"), "session.id"),
        (_set("session", "id", "s\n"), "session.id"),
        (_set("session", "head", "nobody"), "head 'nobody'"),
        (_set("session", "lineage", "x"), "session.lineage"),
        (_set("session", "clock", "yesterday"), "not a time"),
        (_set("session", "clock", "2026-11-21T10:00:00"), "not a time with a time zone"),
        (_set("session", "model", "x" * 10_000), "session.model"),
        (_set("turns", []), "turns"),
        (_set("turns", 1, "id", "t1"), "twice"),
        (_set("turns", 1, "id", "a/b"), "turns.1.id"),
        (_set("turns", 1, "parent", "t3"), "before its parent"),
        (_set("turns", 1, "parent", "t2"), "before its parent"),
        (_set("turns", 0, "parent", "nobody"), "before its parent"),
        (_set("turns", 1, "stem", "nobody"), "before its stem"),
        (_set("turns", 1, "stem", "t2"), "before its stem"),
        (_set("turns", 1, "stem", "t3"), "before its stem"),
        (_set("turns", 1, "stem", "../x"), "turns.1.stem"),
        (_set("turns", 1, "stem", 7), "turns.1.stem"),
        (_drop("turns", 1, "stem"), "turns.1.stem"),
        (_set("turns", 1, "ids_shared", 3), "ids_shared"),
        (_set("turns", 1, "cut", 5), "leaves out 5 messages"),
        (_set("turns", 1, "cut", -1), "turns.1.cut"),
        (_set("turns", 1, "prompt_tokens", 10_000), "more prompt tokens"),
        (_set("turns", 1, "prompt_tokens", 1.5), "prompt_tokens"),
        (_set("turns", 1, "prompt_tokens", 10**40), "prompt_tokens"),
        (_set("turns", 1, "created_at", "0001-01-01T00:00:00+23:59"), "not a time"),
        (_set("turns", 1, "created_at", "1970-01-01T00:00:00+23:59"), "not a time"),
        (_set("turns", 1, "created_at", "9998-12-31T23:59:00-23:59"), "not a time"),
        (_set("turns", 3, "text", "\ud800"), "text"),
        (_set("turns", 1, "items", 0, "role", "dog"), "role"),
        (_set("turns", 1, "items", 0, "content", None), "content"),
        (_set("turns", 1, "items", 0, "image", "x"), "image"),
        (_set("turns", 1, "items", 0, "type", "call"), "type"),
        (_set("turns", 1, "items", 0, "id", "a/b"), "items.0.message.id"),
        (_set("turns", 1, "answer", 0, "role", "user"), "answered by the user"),
        (_set("turns", 1, "answer", []), "answer"),
        (_double("turns", 1, "answer"), "answer"),
        (_set("turns", 1, "finish", "<b>"), "finish"),
        (_set("layout", []), "no layout|checkpoints but no layout"),
        (_set("layout", 0, "shape", [12, 4]), "layout"),
        (_set("layout", 0, "shape", [1 << 30, 1 << 30]), "layout"),
        (_set("layout", 0, "shape", []), "not possible"),
        (_set("layout", 0, "kind", "brain"), "'conv_0' is of kind 'brain', which this version of ssmd does not know"),
        (_set("layout", 0, "dtype", "object"), "dtype"),
        (_set("layout", 0, "name", "../conv"), "layout.0.name"),
        (_set("layout", 1, "name", "conv_0"), "repeat"),
        (_set("checkpoints", 0, "turn", "nobody"), "belongs to the turn 'nobody'"),
        (_set("checkpoints", 0, "kind", "other"), "kind"),
        (_set("checkpoints", 0, "position", 0), "position"),
        (_set("checkpoints", 0, "position", 10_000), "not within the ids of its turn"),
        (_set("checkpoints", 0, "position", 70), "KV rows up to"),
        (_set("checkpoints", 0, "position", True), "position"),
        (_set("session", "title", ""), "title"),
        (_set("session", "title", "x" * 201), "title"),
        (_set("session", "title", "\x1b[31mred"), "title"),
        (_set("session", "title", ["x"]), "title"),
        (_drop("checkpoints", 0, "position"), "position"),
        (_set("checkpoints", 0, "build", "zz"), "build"),
        (_set("checkpoints", 0, "rows", []), "KV rows up to 0"),
        (_set("checkpoints", 0, "rows", 0, 999), "chunk 999"),
        (_set("checkpoints", 0, "rows", 0, 1), "rows"),
        (_set("checkpoints", 0, "rows", [0, 0, 0, 0, 0]), "rows"),
        (_drop("checkpoints", 0), "tensors"),
        (_set("rows", 0, "last", 0), "rows"),
        (_set("rows", 0, "last", 13), "rows"),
        (_set("rows", 0, "first", 1), "rows"),
        (_drop("rows", 0), "tensors"),
    ],
)
def test_a_document_that_lies(good: Path, there: Store, change: Callable[[Any], None], reason: str) -> None:
    refused(there, rewrite(good, doc=change), reason, local=local(SPECS["hybrid"]))


def _many(what: str, count: int) -> Callable[[Any], None]:
    def change(said: Any) -> None:
        said[what] = (said[what] * count)[:count]

    return change


@pytest.mark.parametrize(
    ("what", "count"),
    [
        ("turns", document.MAX_TURNS + 1),
        ("rows", document.MAX_ROWS + 1),
        ("checkpoints", document.MAX_CHECKPOINTS + 1),
        ("layout", 10_001),
    ],
)
def test_too_many(good: Path, there: Store, what: str, count: int) -> None:
    refused(there, rewrite(good, doc=_many(what, count)), what)


def test_a_document_that_speaks_of_more_than_there_is(good: Path, there: Store) -> None:
    """Limits allow 20,000 chunks of 10,000 tensors; their names alone would fill the memory."""

    def change(said: Any) -> None:
        said["rows"] = [{"first": 0, "last": 1}] * document.MAX_ROWS
        said["layout"] = [dict(said["layout"][2], name=f"key_{i}") for i in range(9_000)]

    refused(there, rewrite(good, doc=change), "tensors, its document describes 180")


def test_the_same_checkpoint_twice(good: Path, there: Store) -> None:
    def double(said: Any) -> None:
        said["checkpoints"].append(said["checkpoints"][0])

    def copy(arrays: dict[str, Any]) -> None:
        arrays |= {n.replace("checkpoint.0", "checkpoint.2"): a for n, a in arrays.items() if "checkpoint.0" in n}

    refused(there, rewrite(good, doc=double, tensors=copy), "has a checkpoint twice")


def test_a_checkpoint_of_a_turn_without_ids(good: Path, there: Store) -> None:
    def bare(said: Any) -> None:
        for turn in said["turns"]:
            turn |= {"stem": None, "prompt_tokens": 0, "text": ""}

    def empty(arrays: dict[str, Any]) -> None:
        arrays |= {n: np.empty(0, np.int32) for n in arrays if n.startswith("turn.")}

    refused(there, rewrite(good, doc=bare, tensors=empty), "not within the ids of its turn")


def _tensor(name: str, value: Callable[[Any], Any]) -> Callable[[dict[str, Any]], None]:
    def change(arrays: dict[str, Any]) -> None:
        arrays[name] = value(arrays[name].copy())

    return change


def _poke(value: float) -> Callable[[Any], Any]:
    def change(a: Any) -> Any:
        a.reshape(-1)[-1] = value
        return a

    return change


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_tensor("checkpoint.0.ssm_0", _poke(np.nan)), "'checkpoint.0.ssm_0' holds values that are not finite"),
        (_tensor("checkpoint.1.ssm_2", _poke(np.inf)), "not finite"),
        (_tensor("rows.0.key_1", _poke(-np.inf)), "not finite"),
        (_tensor("turn.0.ids", _poke(VOCABULARY)), "the vocabulary is 0 to 499"),
        (_tensor("turn.3.ids", _poke(-1)), "vocabulary"),
        (_tensor("turn.1.ids", lambda a: a.astype(np.float32)), "not a list of ids"),
        (_tensor("turn.1.ids", lambda a: a.reshape(1, -1)), "not a list of ids"),
        (_tensor("turn.1.ids", lambda a: a.astype(np.int64)), "dtype 'I64'"),
        (_tensor("turn.3.ids", lambda a: a[:-2]), "not within the ids of its turn"),
        (_tensor("turn.1.ids", lambda a: a[:-2]), "not within the ids of its turn"),
        (_tensor("turn.0.ids", lambda a: a[:0]), "no ids"),
        (_tensor("checkpoint.0.ssm_0", lambda a: a[:1]), "shape"),
        (_tensor("checkpoint.0.ssm_0", lambda a: a.astype(np.int32)), "does not hold numbers"),
        (_tensor("rows.0.key_1", lambda a: a[:, :-1]), "shape"),
        (lambda arrays: arrays.pop("rows.0.key_1"), "tensors"),
        (lambda arrays: arrays.update({"rows.0.key_9": arrays.pop("rows.0.key_1")}), "not described"),
        (lambda arrays: arrays.update({"../../x": arrays.pop("rows.0.key_1")}), "not described"),
    ],
)
def test_tensors_that_lie(good: Path, there: Store, change: Callable[[dict[str, Any]], None], reason: str) -> None:
    refused(there, rewrite(good, tensors=change), reason, local=local(SPECS["hybrid"]))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_set("turn.0.ids", "data_offsets", [0, 4]), "by its shape"),
        (_set("turn.0.ids", "shape", [1 << 40]), "shape"),
        (_set("turn.0.ids", "shape", [1 << 20] * 8), "by its shape"),
        (_set("turn.0.ids", "shape", [1] * 9), "shape"),
        (_set("turn.0.ids", "shape", [-1]), "shape"),
        (_set("turn.0.ids", "shape", [True]), "shape"),
        (_set("turn.0.ids", "shape", 5), "shape"),
        (_set("turn.0.ids", "dtype", "U8"), "dtype"),
        (_set("turn.0.ids", "dtype", ["I32"]), "dtype"),
        (_set("turn.0.ids", "more", 1), "not described"),
        (_set("turn.0.ids", 7), "not described"),
        (_set("extra", {"dtype": "F32", "shape": [6], "data_offsets": [0, 24]}), "starts at"),
        (_set("extra", {"dtype": "F32", "shape": [0], "data_offsets": [9, 9]}), "starts at"),
        (_drop("turn.0.ids"), "starts at"),
        (_set("__metadata__", 5), "no metadata"),
        (_set("__metadata__", "more", 5), "no metadata"),
        (_drop("__metadata__", "sha256"), "does not carry one sha256"),
        (_set("__metadata__", "ssmd", "[" * 100_000), "not JSON"),
        (_set("__metadata__", "ssmd", "[]"), "not a JSON object"),
        (_set("__metadata__", "ssmd", '{"format": 1, "format": 1}'), "occurs twice"),
        (_drop("__metadata__", "ssmd"), "not JSON"),
    ],
)
def test_a_header_that_lies(good: Path, there: Store, change: Callable[[Any], None], reason: str) -> None:
    refused(there, rewrite(good, header=change), reason)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda text: b"[" * len(text), "not JSON"),
        (lambda text: b"[]", "not a JSON object"),
        (lambda text: b"\xff" + text, "not JSON"),
        (lambda text: text[:-1], "not JSON"),
        (lambda text: text[:-1] + b', "turn.0.ids": {}}', "occurs twice"),
    ],
)
def test_a_header_that_is_none(good: Path, there: Store, change: Callable[[bytes], bytes], reason: str) -> None:
    refused(there, rewrite(good, raw=change), reason)


@pytest.mark.parametrize("length", [0, 1, 1 << 24, 1 << 40, (1 << 64) - 1])
def test_a_header_length_that_lies(good: Path, there: Store, length: int) -> None:
    bad = good.with_name("bad.ssmd")
    bad.write_bytes(struct.pack("<Q", length) + good.read_bytes()[8:])
    refused(there, bad, "cut off or not a session file|not JSON")


def test_too_large(good: Path, there: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessionfile, "MAX_FILE_BYTES", 1000)
    refused(there, good, "larger than 1000 bytes")


def test_states_that_unfold_without_end(good: Path, there: Store) -> None:
    """Many checkpoints may name the same rows; what cannot be shared is bounded by the size of the file."""

    def double(said: Any) -> None:
        said["checkpoints"] += [dict(said["checkpoints"][0], build=f"{i:f>64x}") for i in range(60)]

    def copy(arrays: dict[str, Any]) -> None:
        for i in range(60):
            arrays |= {
                n.replace("checkpoint.0", f"checkpoint.{i + 2}"): a
                for n, a in list(arrays.items())
                if n.startswith("checkpoint.0.")
            }

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contents, "MAX_STATE_FACTOR", 1)
        refused(there, rewrite(good, doc=double, tensors=copy), "states unfold")


def test_another_lineage_comes_as_text_and_says_so(store: Store, there: Store, tmp_path: Path) -> None:
    talk(store, SPECS["hybrid"])
    export_session(store, "s", tmp_path / "good.ssmd")
    others = {
        "c" * 64: LocalModel("granite", SPECS["hybrid"], 9),
        "d" * 64: LocalModel("smollm2", SPECS["attention"], 9),
    }
    done = import_session(there, tmp_path / "good.ssmd", local=others)
    assert re.search(r"lineage aaaaaaaaaaaa \(model 'made-up'\).*granite \(cccc.*smollm2 \(dddd", done.text_only)
    assert (done.turns, done.checkpoints, done.dropped, done.nbytes) == (4, 0, 2, 0)
    assert there.bytes_stored() == 0
    for a, b in zip(store.turns("s"), there.turns("s"), strict=True):
        assert (a.id, a.parent, a.messages, a.answer, a.finish) == (b.id, b.parent, b.messages, b.answer, b.finish)
        assert (len(b.ids), len(b.text), b.prompt_tokens, b.stem) == (0, 0, 0, None)


def test_another_lineage_is_checked_all_the_same(good: Path, there: Store) -> None:
    others = {"c" * 64: LocalModel("granite", SPECS["hybrid"], 9)}
    refused(there, rewrite(good, doc=_set("turns", 1, "parent", "t3")), "before its parent", local=others)
    refused(there, rewrite(good, tensors=_tensor("turn.0.ids", _poke(-1))), "vocabulary", local=others)


def test_another_layout(good: Path, there: Store) -> None:
    refused(there, good, "of layout", local=local(SPECS["attention"]))


@pytest.mark.parametrize("what", ["missing", "folder", "pipe", "empty"])
def test_not_even_a_file(tmp_path: Path, store: Store, there: Store, what: str) -> None:
    file = tmp_path / "x.ssmd"
    if what == "folder":
        file = tmp_path / "there"
    elif what == "pipe":
        os.mkfifo(file)
    elif what == "empty":
        file.touch()
    refused(there, file)


def test_a_session_that_is_too_long_for_a_file(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    talk(store, SPECS["hybrid"])
    for limit in ("MAX_HEADER_BYTES", "MAX_FILE_BYTES"):
        with monkeypatch.context() as patch:
            patch.setattr(sessionfile, limit, 1000)
            with pytest.raises(StoreError, match="for one file"):
                export_session(store, "s", tmp_path / "x.ssmd")
    assert not (tmp_path / "x.ssmd").exists()
