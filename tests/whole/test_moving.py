"""Sessions that move between daemons: to another build, to another model, and from a hostile sender."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import TinyArtifacts
from daemon import Daemon, daemon
from hostile import Parts, join, seal, split
from keeping import Chat, new_store
from keeping import answer as said
from matching import looked_up
from serving import Answer
from sqlalchemy import select, update

from ssmd.model.artifact import Artifact
from ssmd.runtime.protocol import get_runtime
from ssmd.sessions.checkpoint import Scope
from ssmd.sessions.files import sessionfile
from ssmd.sessions.files.rereading import Rereader
from ssmd.sessions.files.transfer import LocalModel, export_session, import_session
from ssmd.sessions.rows.database import FILE
from ssmd.sessions.rows.schema import checkpoint, turn
from ssmd.sessions.rows.turns import sealed
from ssmd.sessions.store import Store
from ssmd.text.messages import Message
from ssmd.text.tokenizer import Tokenizer

# Long enough for a checkpoint of its own, which all conversations under it share.
SYSTEM = {"role": "system", "content": "You keep a lighthouse far out at sea. " * 3 + "Answer in a few plain words."}
QUESTIONS = ("What is the capital of Italy?", "Tell me about the river.", "And who crosses the bridge?")
SAMPLING = {"temperature": 1.0, "seed": 7, "logprobs": True, "top_logprobs": 5}
Messages = list[dict[str, str]]


def say(text: str, role: str = "user") -> dict[str, str]:
    return {"role": role, "content": text}


def ask(one: Daemon, messages: Messages, **fields: Any) -> dict[str, Any]:
    answer = one.chat(messages=messages, **{**SAMPLING, **fields})
    assert answer.status == 200, answer.body
    return dict(answer.json)


def write(store: Store, *turns: str, **fields: Any) -> None:
    """Write other values into rows of turns, as if they had been written so."""
    with store.writing() as connection:
        for row in connection.execute(select(turn).where(turn.c.id.in_(turns))).mappings().all():
            connection.execute(update(turn).where(turn.c.id == row["id"]), sealed({**row, **fields}))


def text(reply: Mapping[str, Any]) -> str:
    return str(reply["choices"][0]["message"]["content"])


def logprobs(reply: Mapping[str, Any]) -> list[float]:
    return [t["logprob"] for t in reply["choices"][0]["logprobs"]["content"]]


def cached(reply: Mapping[str, Any]) -> int:
    return int(reply["usage"]["prompt_tokens_details"]["cached_tokens"])


def session_of(reply: Mapping[str, Any]) -> str:
    return str(reply["usage"]["ssmd"]["session"])


def resume(reply: Mapping[str, Any]) -> str:
    return str(reply["usage"]["ssmd"]["resume"])


def talk(one: Daemon, turns: int) -> tuple[Messages, list[dict[str, Any]]]:
    """The messages so far, the last answer among them, and the replies."""
    messages, replies = [SYSTEM], []
    for question in QUESTIONS[:turns]:
        messages.append(say(question))
        replies.append(ask(one, messages))
        messages.append(say(text(replies[-1]), "assistant"))
    return messages, replies


def exported(one: Daemon, session: str, query: str = "") -> bytes:
    answer = one.served.ask("GET", f"/ssmd/v1/sessions/{session}/export{query}")
    assert answer.status == 200, answer.body
    return answer.body


def imported(one: Daemon, data: bytes, query: str = "") -> Answer:
    return one.served.ask("POST", f"/ssmd/v1/sessions/import{query}", data)


@pytest.mark.parametrize("family", [pytest.param("llama", marks=pytest.mark.full), "granite"])  # which has KV rows too
def test_to_another_build(family: str, artifacts: TinyArtifacts, tmp_path: Path) -> None:
    with daemon(artifacts[f"{family}-f32"], tmp_path / "a") as one:
        messages, replies = talk(one, 2)
        file = exported(one, session_of(replies[0]))
    messages.append(say(QUESTIONS[2]))
    with daemon(artifacts[f"{family}-int8"], tmp_path / "fresh") as one:
        fresh = ask(one, messages)
    with daemon(artifacts[f"{family}-int8"], tmp_path / "b") as one:
        told = imported(one, file)
        assert (told.status, told.json["states"], told.json["text_only"]) == (201, 3, None)
        moved = ask(one, messages)
        assert session_of(moved) == session_of(replies[0])
        assert (resume(moved), cached(moved)) == ("portable", cached(fresh) + len(ids_of(replies[-1])))
        # What int8 makes of a state that f32 computed is what it would have computed itself, within its rounding.
        assert abs(logprobs(moved)[0] - logprobs(fresh)[0]) < 0.5
        on = ask(one, [*messages, say(text(moved), "assistant"), say("Why?")])
        assert resume(on) == "exact"
        assert session_of(on) == session_of(replies[0])


def ids_of(reply: Mapping[str, Any]) -> range:
    """All that was fed when the answer ended: what the next request finds cached."""
    usage = reply["usage"]
    return range(usage["prompt_tokens"] + usage["completion_tokens"] - 1)


def test_to_another_model(artifacts: TinyArtifacts, tmp_path: Path) -> None:
    with daemon(artifacts["llama-f32"], tmp_path / "a") as one:
        messages, replies = talk(one, 2)
        file, session = exported(one, session_of(replies[0])), session_of(replies[0])
    messages.append(say(QUESTIONS[2]))
    with daemon(artifacts["granite-f32"], tmp_path / "fresh") as one:
        fresh = ask(one, messages)
    with daemon(artifacts["granite-f32"], tmp_path / "b") as one:
        told = imported(one, file)
        assert (told.status, told.json["states"]) == (201, 0)
        assert "lineage" in told.json["text_only"]
        assert "'llama'" in told.json["text_only"]
        assert told.json["turn_count"] == 2
        moved = ask(one, messages)
        assert session_of(moved) == session
        assert (resume(moved), cached(moved)) == ("none", 0)
        assert logprobs(moved) == logprobs(fresh), "what was read anew is what a client without a session gets"
        on = ask(one, [*messages, say(text(moved), "assistant"), say("Why?")])
        assert session_of(on) == session
        assert (resume(on), cached(on)) == ("exact", len(ids_of(moved)))
        listed = one.served.ask("GET", f"/ssmd/v1/sessions/{session}").json
        assert (listed["model"], listed["turn_count"]) == ("granite", 4)
        back = exported(one, session)
        assert {len(split(back).tensors[f"turn.{i}.ids"]["shape"]) for i in range(4)} == {1}
        assert [split(back).tensors[f"turn.{i}.ids"]["shape"][0] > 0 for i in range(4)] == [False, False, True, True]
    with daemon(artifacts["granite-f32"], tmp_path / "c") as one:  # the states of its new model travel on
        assert imported(one, back).json["states"] == 3
        third = [*messages, say(text(moved), "assistant"), say("Why?"), say(text(on), "assistant"), say("So?")]
        assert resume(ask(one, third)) == "exact"


def test_a_session_that_two_models_answer(artifacts: TinyArtifacts, tmp_path: Path) -> None:
    """Each feeds its own ids only: what the other's mean to it is noise."""
    with daemon(artifacts["llama-f32"], tmp_path / "a") as one:
        messages, replies = talk(one, 1)
    session = session_of(replies[0])
    messages.append(say(QUESTIONS[1]))
    with daemon(artifacts["granite-f32"], tmp_path / "a") as one:
        second = ask(one, messages, session=session)
    with sqlite3.connect(tmp_path / "a" / FILE) as raw:
        seen = raw.execute("SELECT lineage FROM turn ORDER BY seq").fetchall()
        assert len(set(seen)) == len(seen) == 2
        raw.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        shutil.copytree(tmp_path / "a", tmp_path / "control")
    raw.close()
    with closing(Store.open(tmp_path / "a")) as store:
        first, other = store.turns(session)
        assert (other.parent, other.stem) == (first.id, None)
        # Another tokenizer's ids, as the tiny models share one.
        write(store, other.id, ids=bytes(other.ids.own.nbytes))
    messages += [say(text(second), "assistant"), say(QUESTIONS[2])]
    with daemon(artifacts["llama-f32"], tmp_path / "control") as one:
        control = ask(one, messages, session=session)
    with daemon(artifacts["llama-f32"], tmp_path / "a") as one:
        third = ask(one, messages, session=session)
        parts = split(exported(one, session))
    assert [parts.tensors[f"turn.{i}.ids"]["shape"][0] > 0 for i in range(3)] == [True, False, True]
    assert [t["text"] == "" for t in parts.document["turns"]] == [False, True, False]
    assert [t["stem"] for t in parts.document["turns"]] == [None, None, first.id]
    assert third["usage"]["prompt_tokens"] == control["usage"]["prompt_tokens"]
    assert cached(third) == cached(control) == len(ids_of(replies[0]))
    assert logprobs(third) == logprobs(control)


# The rest are forged files from a hostile sender.


def forged(data: bytes, change: Callable[[Parts], None] = lambda parts: None) -> bytes:
    """Every state in the file is another, and the file is sound."""
    parts = split(data)
    body = bytearray(parts.body)
    for entry in parts.tensors.values():
        if entry["dtype"] != "I32":
            first, last = entry["data_offsets"]
            values = np.frombuffer(bytes(body[first:last]), "<f4" if entry["dtype"] == "F32" else "<f2")
            body[first:last] = (values[::-1] + values.dtype.type(1)).tobytes()
    change(parts)
    return seal(join(replace(parts, body=bytes(body))))


def strangers(one: Daemon) -> list[list[float]]:
    """Return other clients' logprobs: a new conversation, its next turn, and the first words of the imported one."""
    new = [SYSTEM, say("Is the lamp lit?")]
    first = ask(one, new)
    second = ask(one, [*new, say(text(first), "assistant"), say("And now?")])
    same = ask(one, [SYSTEM, say(QUESTIONS[0])])
    return [logprobs(first), logprobs(second), logprobs(same)]


def other_build(parts: Parts) -> None:
    for entry in parts.document["checkpoints"]:
        entry["build"] = "f" * 64


BUILDS: dict[str, Callable[[Parts], None]] = {"own build": lambda parts: None, "another build": other_build}
USUAL = (("llama-f32", "own build"), ("granite-int8", "another build"))  # each kind of a state, each kind of a lie


@pytest.mark.parametrize(
    ("model", "change"),
    [
        pytest.param(m, c, marks=[] if (m, b) in USUAL else [pytest.mark.full], id=f"{m}-{b}")
        for m in ("llama-f32", "granite-f32", "granite-int8")
        for b, c in BUILDS.items()
    ],
)
def test_forged_states_change_nobody_elses_answers(
    model: str, change: Callable[[Parts], None], artifacts: TinyArtifacts, tmp_path: Path
) -> None:
    with daemon(artifacts[model], tmp_path / "a") as one:
        messages, replies = talk(one, 2)
        true = exported(one, session_of(replies[0]))
    assert {c["kind"] for c in split(true).document["checkpoints"]} == {"system", "user", "turn"}
    messages.append(say(QUESTIONS[2]))
    with daemon(artifacts[model], tmp_path / "control") as one:
        expected = strangers(one)
    with daemon(artifacts[model], tmp_path / "honest") as one:
        assert imported(one, true).status == 201
        honest = ask(one, messages)
    with daemon(artifacts[model], tmp_path / "b") as one:
        told = imported(one, forged(true, change))
        assert (told.status, told.json["states"]) == (201, 3)
        session = told.json["id"]
        assert strangers(one) == expected, "before the forged session was used"
        victim = ask(one, messages)
        assert session_of(victim) == session
        assert cached(victim) == cached(honest)
        assert logprobs(victim) != logprobs(honest), "the forgery does nothing: nothing was tested"
        regenerated = ask(one, messages, session=session)
        assert session_of(regenerated) == session
    assert one.store is not None
    with daemon(artifacts[model], tmp_path / "b") as one, daemon(artifacts[model], tmp_path / "control") as control:
        assert strangers(one) == strangers(control), "after it was used, and what grew from it was stored"
        assert one.store is not None
        with one.store.reading() as connection:
            origins = connection.execute(select(checkpoint.c.origin, checkpoint.c.position)).all()
        assert {o for o, _ in origins} == {"", session}
        deepest = max(position for _, position in origins)
        assert [o for o, position in origins if position == deepest] == [session], "what grew from it stays with it"


def test_an_import_takes_no_conversation_over(artifacts: TinyArtifacts, tmp_path: Path) -> None:
    """A forged copy of a conversation that is kept here: clients that name no session go on with their own."""
    with daemon(artifacts["llama-f32"], tmp_path / "a") as one:
        messages, replies = talk(one, 2)
        true = exported(one, session_of(replies[0]))
        messages.append(say(QUESTIONS[2]))
        told = imported(one, forged(true))
        assert told.json["renamed"] is True
        mine = ask(one, messages)
        assert session_of(mine) == session_of(replies[0])
        assert resume(mine) == "exact"
        theirs = ask(one, messages, session=told.json["id"])
        assert session_of(theirs) == told.json["id"]
        assert logprobs(theirs) == logprobs(mine), "where there is a state of our own, even the import goes on from it"


def test_the_choice_between_equal_conversations(tmp_path: Path) -> None:
    with closing(new_store(tmp_path / "data")) as store:
        mine, theirs = Chat(store, "mine"), Chat(store, "theirs").imported_as("theirs")
        theirs.clock += timedelta(days=1)
        mine.say("t1", None, "hi", "hello")
        theirs.say("t2", None, "hi", "hello")
        theirs.say("t3", "t2", "a", "b")
        theirs.say("t4", None, "hi", "hello")
        used = {s.id: (s.last_used_at, s.head) for s in store.sessions()}
        assert used["theirs"] > used["mine"]
        assert used["theirs"][1] == "t4"
        hi, deeper = (Message("user", "hi"), said("hello")), (Message("user", "a"), said("b"))
        asked = (*hi, Message("user", "more"))
        found = looked_up(store, asked)
        assert (found.session, found.parent) == ("mine", "t1")
        found = looked_up(store, (*hi, *deeper, *asked))
        assert (found.session, found.parent) == ("theirs", "t3")
        store.delete("mine")
        found = looked_up(store, asked)
        assert (found.session, found.parent) == ("theirs", "t4")


@pytest.mark.parametrize("model", ["llama-f32", "granite-f32"])
def test_reread_believes_no_state(model: str, artifacts: TinyArtifacts, tmp_path: Path) -> None:
    with daemon(artifacts[model], tmp_path / "a") as one:
        messages, replies = talk(one, 2)
        messages.append(say(QUESTIONS[2]))
        true = exported(one, session_of(replies[0]))
        honest = ask(one, messages)
    file = tmp_path / "forged.ssmd"
    file.write_bytes(forged(true))
    artifact = Artifact.open(artifacts[model])
    manifest = artifact.manifest
    store = Store.open(tmp_path / "b")
    program = get_runtime("litert").load(artifact, threads=1)
    tokenizer = Tokenizer.open(artifact.file("tokenizer.json"), stop_tokens=manifest.stop_tokens)
    scope = Scope(program.spec.digest(), manifest.lineage, manifest.build)
    seen: list[tuple[int, int]] = []
    rereader = Rereader(program, tokenizer, scope, lambda read, of: seen.append((read, of)))
    local = {manifest.lineage: LocalModel(manifest.name, manifest.spec, manifest.vocabulary)}
    done = import_session(store, file, local=local, rereader=rereader)
    assert (done.checkpoints, done.dropped, done.text_only) == (3, 3, "")
    assert seen[-1] == (len(ids_of(replies[1])), len(ids_of(replies[1])))
    with store.reading() as connection:
        assert set(connection.scalars(select(checkpoint.c.origin))) == {""}
    program.close()
    store.close()
    with daemon(artifacts[model], tmp_path / "b") as one:
        reply = ask(one, messages)
        assert session_of(reply) == done.session
        assert cached(reply) == cached(honest) == len(ids_of(replies[1]))
        np.testing.assert_allclose(logprobs(reply), logprobs(honest), atol=1e-3)


def test_reread_believes_no_ids(artifacts: TinyArtifacts, tmp_path: Path) -> None:
    """Ids that do not spell the turn's text would let it say one thing and mean another."""
    with daemon(artifacts["llama-f32"], tmp_path / "a") as one:
        _, replies = talk(one, 2)
        parts = split(exported(one, session_of(replies[0])))
    first, last = parts.tensors["turn.0.ids"]["data_offsets"]
    middle = (first + last) // 8 * 4
    body = parts.body[:middle] + (7).to_bytes(4, "little") + parts.body[middle + 4 :]
    file = tmp_path / "forged.ssmd"
    file.write_bytes(seal(join(replace(parts, body=body))))
    artifact = Artifact.open(artifacts["llama-f32"])
    manifest = artifact.manifest
    store = Store.open(tmp_path / "b")
    program = get_runtime("litert").load(artifact, threads=1)
    tokenizer = Tokenizer.open(artifact.file("tokenizer.json"), stop_tokens=manifest.stop_tokens)
    rereader = Rereader(program, tokenizer, Scope(program.spec.digest(), manifest.lineage, manifest.build))
    done = import_session(store, file, rereader=rereader)
    assert (done.checkpoints, done.text_only) == (0, "its ids do not spell its text")
    assert [len(t.ids) for t in store.turns(done.session)] == [0, 0]
    program.close()
    store.close()


def test_reread_over_http_takes_the_messages_alone(artifacts: TinyArtifacts, tmp_path: Path) -> None:
    with daemon(artifacts["llama-f32"], tmp_path / "a") as one:
        messages, replies = talk(one, 2)
        file = exported(one, session_of(replies[0]))
        messages.append(say(QUESTIONS[2]))
    with daemon(artifacts["llama-f32"], tmp_path / "fresh") as one:
        fresh = ask(one, messages)
    with daemon(artifacts["llama-f32"], tmp_path / "b") as one:
        told = imported(one, forged(file), "?reread=true")
        assert (told.status, told.json["states"], bool(told.json["text_only"])) == (201, 0, True)
        reply = ask(one, messages)
        assert (session_of(reply), cached(reply)) == (told.json["id"], 0)
        assert logprobs(reply) == logprobs(fresh)


def test_with_and_without_states_over_http(artifacts: TinyArtifacts, tmp_path: Path) -> None:
    with daemon(artifacts["llama-f32"], tmp_path / "a") as one:
        messages, replies = talk(one, 2)
        session = session_of(replies[0])
        ask(one, [*messages[:2], messages[2], say("Something else?")])  # a branch
        states = {q: len(split(exported(one, session, q)).document["checkpoints"]) for q in ("", "?state=all")}
        assert states == {"": 3, "?state=all": 6}
        bare = split(exported(one, session, "?state=false"))
        assert (bare.document["checkpoints"], bare.document["layout"]) == ([], [])
        assert len(bare.document["turns"]) == 3
        for query, code in (
            ("?state=no", "invalid_value"),
            ("?state=true&state=false", "invalid_value"),
            ("?states=all", "unknown_parameter"),
        ):
            answer = one.served.ask("GET", f"/ssmd/v1/sessions/{session}/export{query}")
            assert (answer.status, answer.error["code"]) == (400, code)
        assert imported(one, b"x", "?reread=maybe").error["param"] == "reread"
        assert imported(one, b"x", "?reread=true").error["code"] == "invalid_session_file"


def test_a_session_that_fits_no_file(artifacts: TinyArtifacts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with daemon(artifacts["llama-f32"], tmp_path / "a") as one:
        path = f"/ssmd/v1/sessions/{session_of(talk(one, 1)[1][0])}/export"
        monkeypatch.setattr(sessionfile, "MAX_HEADER_BYTES", 100)
        refused = one.served.ask("GET", path)
        assert (refused.status, refused.error["code"]) == (507, "storage_error")
        assert "too long for one file" in refused.error["message"]
        monkeypatch.undo()
        assert one.store is not None
        write(one.store, *(t.id for t in one.store.turns(path.split("/")[-2])), finish="no such end!")
        refused = one.served.ask("GET", path)
        assert (refused.status, refused.error["code"]) == (507, "storage_error")
        assert "does not fit into a file: finish" in refused.error["message"]


def test_while_the_daemon_runs(artifacts: TinyArtifacts, tmp_path: Path) -> None:
    """Another process's store, as the command line has it."""
    with daemon(artifacts["llama-f32"], tmp_path / "a") as one:
        messages, replies = talk(one, 1)
        store = Store.open(tmp_path / "a")
        export_session(store, session_of(replies[0]), tmp_path / "x.ssmd")
        done = import_session(store, tmp_path / "x.ssmd")
        store.close()
        assert done.renamed
        on = ask(one, [*messages, say("Why?")], session=done.session)
        assert (session_of(on), resume(on)) == (done.session, "exact")
        assert len(one.turns(done.session)) == 2


def test_json_of_a_forged_file_is_what_any_reader_sees() -> None:
    """The helpers themselves: taken apart and put together again, a file says the same."""
    data = (Path(__file__).parents[1] / "data" / "session-file-2-states.ssmd").read_bytes()
    again = split(seal(join(split(data))))
    assert json.dumps(again.document) == json.dumps(split(data).document)
    assert again.body == split(data).body
