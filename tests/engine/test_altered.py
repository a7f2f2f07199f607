"""Rows of turns that were altered while a daemon has their store open: each request is answered, in its own session, by
a state of just the ids that stand for what it says.
"""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import TinyArtifacts
from engine.test_engine import Asked, program_of, user
from engine.test_growing import QUESTIONS, SYSTEM, Talk, first_token, plan, talked, told
from engine.test_rerender import engine_of
from keeping import whole as whole_of
from sqlalchemy import LargeBinary, String

from ssmd.engine.engine import Engine
from ssmd.engine.persist import writer
from ssmd.engine.terms import Rejection
from ssmd.model.artifact import Artifact
from ssmd.runtime.protocol import Program
from ssmd.sessions.fsck.check import examine
from ssmd.sessions.fsck.repair import repair
from ssmd.sessions.line import Line
from ssmd.sessions.rows.checkpoints import named_by
from ssmd.sessions.rows.schema import checkpoint
from ssmd.sessions.rows.schema import turn as turn_table
from ssmd.sessions.store import Store
from ssmd.sessions.turn import StoreError, UnknownSession, conversation

WHOSE = ("seq", "session", "owner")  # they may change with a turn's owner: an alteration is not seen
FULL = pytest.mark.full
NOT_HEALED = ("id", "parent", "chain", "complete")  # a branch beside it then; and what is true is true, however written
COLUMNS = [c.name for c in turn_table.columns if c.name not in WHOSE]
STEERING = ("id", "parent", "stem", "chain", "items", "ids", "text")  # rows/test_growth.py alters them all


def values(name: str) -> list[str]:
    """Return new values of a column, in SQL: some that it could have, and some that it could not."""
    column = turn_table.c[name]
    if isinstance(column.type, LargeBinary):
        found = [
            f"CAST(x'00' || substr({name}, 2) AS BLOB)",
            f"substr({name}, 2)",
            "x''",
            "zeroblob(32)",
            "'text'",
            "7",
        ]
    elif isinstance(column.type, String):
        found = ["'other'", f"{name} || 'x'", "x'ff'", "''"]
    else:
        found = ["0", f"{name} + 1", "-1", "1000000", "'text'", "x'00'"]
    if name == "parent":
        found += ["id", "(SELECT id FROM turn WHERE seq = 1)", "(SELECT id FROM turn WHERE seq = 4)"]
    return found + (["NULL"] if column.nullable else [])


@pytest.fixture(scope="module")
def loaded(artifacts: TinyArtifacts) -> Iterator[tuple[Artifact, Program]]:
    with program_of(artifacts, "llama-f32") as loaded:
        yield loaded


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is, an answer says whether its turn was stored."""
    monkeypatch.setattr(writer, "COMMIT_PATIENCE_S", 60)


@dataclass
class Talked:
    """A folder with a conversation of three turns, and another one; the first's session; what was said in it, and the
    ids of that.
    """

    folder: Path
    session: str
    said: Talk
    ids: list[int]


@pytest.fixture(scope="module")
def talk(loaded: tuple[Artifact, Program], tmp_path_factory: pytest.TempPathFactory) -> Talked:
    folder = tmp_path_factory.mktemp("talk") / "data"
    with engine_of(*loaded, folder) as (engine, store):
        said = talked(engine, (SYSTEM,), *QUESTIONS[:3])
        session = store.sessions()[0]
        ids, _ = whole_of(store, session.head)
        talked(engine, (SYSTEM,), "Something else.")
    return Talked(folder, session.id, said, ids)


def alter(file: Path, what: str, turns: str) -> bool:
    """Alter rows as a process with write access would, without checks. Returns whether something changed."""
    with closing(sqlite3.connect(file)) as raw:
        raw.execute("PRAGMA foreign_keys = OFF")
        raw.text_factory = bytes
        before = raw.execute("SELECT * FROM turn ORDER BY seq").fetchall()
        try:
            raw.execute(f"UPDATE turn SET {what} WHERE {turns}")
        except sqlite3.IntegrityError:
            return False
        raw.commit()
        return before != raw.execute("SELECT * FROM turn ORDER BY seq").fetchall()


def right(one: tuple[Engine, Store, Program], session: str, talk: Talk, known: list[int], named: bool) -> list[int]:
    """The ids that were fed and generated for a request, whose answer is right in all that is true of each.

    known: ids that it may have gone on from.
    """
    engine, store, program = one
    with store.reading() as connection:
        states = connection.execute(checkpoint.select()).all()
    asked = Asked(engine, *talk, session=session if named else None, max_tokens=4)
    answer = asked.answer()
    assert answer.usage.stored
    assert answer.usage.session == session
    fed = asked.generation.prompt.ids
    ids = fed.after([Line.of(known[: fed.start])] if fed.start else []).own.tolist()
    assert Line.of(ids).hash(len(ids)) == fed.hash(len(fed))
    tokenizer = engine._planner._tokenizer
    sent = engine._planner._renderer.render(talk, store.session(session).info.clock).text
    assert b"".join(map(tokenizer.token_bytes, ids)).decode(errors="replace") == tokenizer.unescape(sent)
    assert answer.usage.prompt_tokens == len(ids)
    assert answer.usage.cached_tokens == max((s.position for s in states if named_by(s, Line.of(ids[:-1]))), default=0)
    expected, tops = first_token(program, program.new_state(), ids)
    assert told(answer)[1] == pytest.approx(tops, abs=0.02)
    assert told(answer)[0] == pytest.approx(expected, abs=0.02)
    return [*ids, *asked.generation.progress.choices[0].tokens]


@pytest.mark.parametrize(
    "turns", ["seq = 3", *(pytest.param(t, marks=FULL) for t in ("seq in (2, 3)", "seq = 2", "seq = 1"))]
)
@pytest.mark.parametrize("column", [c if c in STEERING else pytest.param(c, marks=FULL) for c in COLUMNS])
def test_an_altered_row(
    loaded: tuple[Artifact, Program], talk: Talked, tmp_path: Path, column: str, turns: str
) -> None:
    for i, value in enumerate(values(column)):
        data = tmp_path / str(i)
        shutil.copytree(talk.folder, data)
        with engine_of(*loaded, data) as (engine, store):
            if not alter(store.file, f"{column} = {value}", turns):
                continue
            here, ids = (*talk.said, user("Go on.")), talk.ids
            for named in (False, True, False):
                ids = right((engine, store, loaded[1]), talk.session, here, ids, named)
                said = store.turns(talk.session)[-1].answer
                here = (*here, said, user("And then?"))
            path = store.path(store.session(talk.session).head)
            if turns in ("seq = 3", "seq in (2, 3)"):  # else what goes on from the third does not see it
                assert all(t.sound for t in path), value
                assert conversation(path) == here[:-1], value
                if column not in NOT_HEALED:
                    with store.reading() as connection:
                        assert not examine(connection).damages, value


def test_a_session_whose_row_is_gone_is_not_unknown(loaded: tuple[Artifact, Program], tmp_path: Path) -> None:
    """Its turns exist: a client that names it gets the command that restores it, and then goes on in it."""
    with engine_of(*loaded, tmp_path / "data") as (engine, store):
        talk = talked(engine, (), *QUESTIONS[:2])
        session = store.sessions()[0].id
        with closing(sqlite3.connect(store.file)) as raw, raw:
            assert raw.execute("DELETE FROM session").rowcount == 1
        for ask in (lambda: plan(engine, (*talk, user("And?")), session=session), lambda: store.delete(session)):
            with pytest.raises((Rejection, StoreError), match=f"{session}.*session check --repair") as refused:
                ask()
            assert not isinstance(refused.value, UnknownSession)
            assert getattr(refused.value, "status", 503) == 503
        with pytest.raises(Rejection, match="there is no session 'another'"):
            plan(engine, (*talk, user("And?")), session="another")
    assert repair(tmp_path / "data").repaired
    with engine_of(*loaded, tmp_path / "data") as (engine, store):
        assert [t.session for t in store.turns(session)] == [session, session]
        assert plan(engine, (*talk, user("And?")), session=session).found is not None
