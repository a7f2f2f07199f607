"""Any course of events: turns, regenerations, edits, choices, forks, removals, moves, restarts, kills, against a model.

After any of them the conversations are complete, and each request continues the session of its history. Tokens that
usage reports as cached were not fed. Each checkpoint equals bit for bit the state of its calls repeated from nothing.
Half of the runs have a template that drops reasoning. SSMD_STEPS sets how many steps are taken, SSMD_SEED which ones.
"""

from __future__ import annotations

import os
import pickle
import random
import re
import shutil
import signal
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, cast

import hypothesis
import pytest
from conftest import TinyArtifacts
from contract.driving import Case
from engine.test_engine import Answer, Asked, user
from engine.test_prompt import read_whole as read_prompt
from engine.test_rerender import THINKING, with_template
from engines import OwnEngine
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from keeping import _empty_database, grown
from recording import Recorder, fingerprint
from sqlalchemy import Connection, select

from ssmd.engine.persist.persistence import Persistence
from ssmd.engine.sampling.params import SamplingParams
from ssmd.engine.terms import Rejection
from ssmd.model.artifact import Artifact
from ssmd.runtime.protocol import Program, get_runtime
from ssmd.sessions.files.transfer import LocalModel, export_session, import_session
from ssmd.sessions.fsck.check import examine
from ssmd.sessions.fsck.repair import check
from ssmd.sessions.line import Line
from ssmd.sessions.rows.checkpoints import named_by
from ssmd.sessions.rows.database import FILE
from ssmd.sessions.rows.holding import read_holding
from ssmd.sessions.rows.schema import checkpoint
from ssmd.sessions.rows.schema import session as session_table
from ssmd.sessions.rows.snapshot import Snapshot
from ssmd.sessions.rows.turns import read_tree
from ssmd.sessions.store import Store
from ssmd.text.messages import Message

STEPS = [50, pytest.param(2000, marks=pytest.mark.full)]
if "SSMD_STEPS" in os.environ:
    STEPS = [int(os.environ["SSMD_STEPS"])]
SEED = os.environ.get("SSMD_SEED")
STEPS_A_RUN = 50
MEMORY = next((d for d in ("/dev/shm",) if os.access(d, os.W_OK)), None)  # no power cut here: nothing to wait for
SYSTEM = Message("system", "You are the keeper of a lighthouse and you never leave it. " * 2)
WORDS = ("Who is there?", "And now?", "Tell me a story about a river.", "Why?", "Grüße aus Köln! 東京", "x" * 40)
Talk = tuple[Message, ...]
Pick = st.integers(0, 2**20)
STOPS = (("e",), (" ", "a"), ("t", "o", "i"))
MOST = 6  # sessions at a time
DEPTH = 9  # messages of a conversation that goes on
EVENTS = (
    *["go_on"] * 6,
    *["regenerate", "edit", "cut_by_a_stop_string"] * 3,
    *["begin", "go_on_from_an_echo", "two_choices", "remove", "move", "fork"] * 2,
    *["begin_with_reasoning", "off_the_record", "collect", "restart", "killed"],
)
KILLED = ("go_on", "go_on", "regenerate", "two_choices", "begin", "remove", "move", "fork", "collect")  # meanwhile
KILLED_WITHIN = 0.15  # s; time for most of them to end
REASONING = re.compile(r"^\s*<think>.*?</think>", re.DOTALL)


def trimmed(messages: Talk) -> Talk:
    """An assistant's outer white space does not count."""
    return tuple(replace(m, content=m.content.strip()) if m.role == "assistant" else m for m in messages)


def plain(messages: Talk) -> Talk:
    """As echoes are compared: nor does reasoning that is left out."""
    told = (replace(m, content=REASONING.sub("", m.content)) if m.role == "assistant" else m for m in messages)
    return trimmed(tuple(told))


def states_in(connection: Connection) -> Sequence[Any]:
    c = checkpoint.c
    return connection.execute(select(c.id, c.key, c.layout, c.lineage, c.position, c.producer, c.origin)).all()


class Sessions(RuleBasedStateMachine):
    """Each run has a store of its own; the program is one for all."""

    artifacts: tuple[Artifact, Artifact]  # the second one's template drops reasoning from earlier turns
    recorder: Recorder
    tolerance: float
    taken = 0  # steps, of all runs
    kills: ClassVar[Counter[str]] = Counter()  # by how far it had come

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="ssmd-machine-", dir=MEMORY))
        self.data = self.folder / "data"
        self.data.mkdir(mode=0o700)
        (self.data / FILE).write_bytes(_empty_database())
        self.model: dict[str, dict[str, Talk]] = {}  # session -> turn -> the conversation up to its answer
        self.checked: dict[int, bytes] = {}  # checkpoint -> fingerprint
        self.quota: int | None = None
        self.recorder.made.clear()  # another store: nothing of it can come back
        self.artifact = self.artifacts[0]

    def open(self) -> None:
        self.store = Store.open(self.data, quota=self.quota)
        if self.quota is not None:
            self.store.collect()
        program = cast(Program, self.recorder)
        self.engine = OwnEngine(self.artifact, program, self.store, max_running=2)
        self.engine.start()

    def teardown(self) -> None:
        self.look(again=True)
        self.sound()
        self.close()
        assert check(self.data).damages == ()
        shutil.rmtree(self.folder)

    @initialize(seed=Pick, drops=st.booleans())
    def two_conversations(self, seed: int, drops: bool = False) -> None:
        self.artifact = self.artifacts[drops]
        self.open()
        self.say((SYSTEM, user("Who is there?")), seed / 2**20, max_tokens=3)
        self.say((user("And now?"),), seed / 2**20, max_tokens=3)

    @rule(what=st.sampled_from(EVENTS), seed=Pick)
    def event(self, what: str, seed: int) -> None:
        """One rule for all, as hypothesis would leave out some of several for a whole run."""
        type(self).taken += 1
        getattr(self, what)(random.Random(seed))

    # What is asked.

    def begin(self, rng: random.Random) -> None:
        system = [SYSTEM] if rng.random() < 0.5 else []
        if len(self.model) < MOST:
            self.say((*system, user(rng.choice(WORDS))), rng.random(), max_tokens=rng.randint(1, 4))

    def go_on(self, rng: random.Random) -> None:
        session, talk = self.pick(rng)
        named = session if rng.random() < 0.5 else None
        self.say((*talk, user(rng.choice(WORDS))), rng.random(), max_tokens=rng.randint(1, 4), session=named)

    def begin_with_reasoning(self, rng: random.Random) -> None:
        """An answer that the client has begun, with reasoning."""
        _, talk = self.pick(rng)
        begun = Message("assistant", f"<think>\n{rng.choice(WORDS)}\n</think>\n\nWell")
        self.say((*talk, user(rng.choice(WORDS)), begun), rng.random(), max_tokens=4)

    def go_on_from_an_echo(self, rng: random.Random) -> None:
        """The client has trimmed the answers, or added white space, or has left out the reasoning."""
        _, talk = self.pick(rng)
        talk = plain(talk) if rng.random() < 0.5 else talk
        space = rng.choice(["", " ", "\n"])
        echo = [replace(m, content=m.content.strip() + space) if m.role == "assistant" else m for m in talk]
        self.say((*echo, user(rng.choice(WORDS))), rng.random(), max_tokens=2)

    def regenerate(self, rng: random.Random) -> None:
        session, talk = self.pick(rng)
        self.say(talk[:-1], rng.random(), max_tokens=3, session=session)

    def edit(self, rng: random.Random) -> None:
        session, talk = self.pick(rng)
        k = rng.choice([i for i, m in enumerate(talk) if m.role == "user"])
        named = session if rng.random() < 0.5 else None
        self.say((*talk[:k], user(f"{rng.choice(WORDS)}!")), rng.random(), max_tokens=2, session=named)

    def two_choices(self, rng: random.Random) -> None:
        _, talk = self.pick(rng)
        self.say((*talk, user("Two, please.")), rng.random(), max_tokens=3, n=2)

    def cut_by_a_stop_string(self, rng: random.Random) -> None:
        _, talk = self.pick(rng)
        self.say((*talk, user("Stop.")), rng.random(), max_tokens=8, stop=rng.choice(STOPS))

    def off_the_record(self, rng: random.Random) -> None:
        _, talk = self.pick(rng)
        self.say((*talk, user(rng.choice(WORDS))), rng.random(), max_tokens=2, store=False)

    # What is done to sessions.

    def remove(self, rng: random.Random) -> None:
        session = rng.choice(list(self.model))
        if len(self.model) > 1:
            self.store.delete(session)
            del self.model[session]
        self.look(again=True)

    def move(self, rng: random.Random) -> None:
        """Out into a file and in again, beside the original or in its place."""
        session, away = rng.choice(list(self.model)), rng.random() < 0.5 or len(self.model) >= MOST
        file = self.folder / "moved.ssmd"
        export_session(self.store, session, file, force=True)
        manifest = self.artifact.manifest
        there = self.model.pop(session) if away else self.model[session]
        if away:
            self.store.delete(session)
        local = {manifest.lineage: LocalModel(manifest.name, manifest.spec, manifest.vocabulary)}
        done = import_session(self.store, file, local=local)
        assert done.renamed or away
        self.model[done.session] = self.conversations(done.session)
        assert sorted(map(repr, self.model[done.session].values())) == sorted(map(repr, there.values()))
        self.look()

    def close(self) -> None:
        self.engine.shutdown(0)
        self.store.close()

    def restart(self, rng: random.Random) -> None:
        self.close()
        self.quota = rng.choice([None, 200_000, 1_000_000])
        self.open()
        self.look(again=True)
        self.sound()

    def fork(self, rng: random.Random) -> None:
        if len(self.model) < MOST:
            session = rng.choice(list(self.model))
            turn, talk = rng.choice(list(self.model[session].items()))
            made = self.store.fork(session, turn)
            found = self.conversations(made.id)
            assert talk in found.values()
            assert all(talk[: len(t)] == t for t in found.values())
            self.model[made.id] = found
        self.look()

    def collect(self, rng: random.Random) -> None:
        quota = int(self.store.bytes_stored() * rng.random())
        assert self.store.collect(quota).left <= quota
        self.look(again=True)

    def killed(self, rng: random.Random) -> None:
        """SIGKILL in the middle of something: it was done as a whole or not at all, and done if it was said to be."""
        self.close()
        what, seed = rng.choice(KILLED), rng.random()
        said = self.folder / "said"
        said.unlink(missing_ok=True)
        opened, tell = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads: all of ours have ended
            child = os.fork()
        if child == 0:
            self.until_killed(what, seed, said, tell)
        os.close(tell)
        os.read(opened, 1)
        os.close(opened)
        time.sleep(rng.random() * KILLED_WITHIN)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        done = self.heard(said)
        self.open()
        found = {s.id: self.conversations(s.id) for s in self.store.sessions()}
        self.kills["after it" if done is not None else "in it, nothing kept" if found == self.model else "in it"] += 1
        if done is not None:
            assert found == done
        else:
            self.whole(what, found)
        self.model = found
        if not found:
            self.say((SYSTEM, user("Who is there?")), 0.5, max_tokens=3)
        self.look(again=True)
        self.sound()

    def until_killed(self, what: str, seed: float, said: Path, tell: int) -> None:
        """In a process of its own."""
        try:
            with said.open("ab", buffering=0) as file:
                self.recorder.tell = lambda made: file.write(pickle.dumps(made))
                self.look = lambda *, again=False: None  # type: ignore[method-assign]  # it would be killed in it
                self.open()
                os.write(tell, b"o")
                getattr(self, what)(random.Random(seed))
                file.write(pickle.dumps(self.model))
                time.sleep(60)
        except BaseException:
            traceback.print_exc()
            said.write_bytes(pickle.dumps(traceback.format_exc()))
        finally:
            os._exit(1)

    def heard(self, said: Path) -> dict[str, dict[str, Talk]] | None:
        """Read the killed process's records. Returns the sessions if it came to its end, else None."""
        done = None
        with said.open("rb") as file:
            while True:
                try:
                    one = pickle.load(file)
                except (EOFError, pickle.UnpicklingError):
                    return done
                assert not isinstance(one, str), one
                if isinstance(one, tuple):
                    self.recorder.made[one[0]] = one[1]
                else:
                    done = one

    def whole(self, what: str, found: Mapping[str, Mapping[str, Talk]]) -> None:
        """Nothing but what was being done can have changed, and that as a whole."""
        gone, come = self.model.keys() - found.keys(), found.keys() - self.model.keys()
        grown = [s for s in self.model.keys() & found.keys() if self.model[s] != found[s]]
        assert all(self.model[s].items() <= found[s].items() for s in grown)
        most = {"remove": (1, 0, 0), "move": (1, 1, 0), "fork": (0, 1, 0), "collect": (0, 0, 0)}.get(what, (0, 1, 1))
        assert all(n <= m for n, m in zip(map(len, (gone, come, grown)), most, strict=True))
        assert len(come) + len(grown) <= 1
        choices = 2 if what == "two_choices" else 1
        assert all(len(found[s]) - len(self.model[s]) == choices for s in grown)
        if what == "move":  # into a session of the same name, or beside it with new names
            assert all(set(found[s].values()) in [set(t.values()) for t in self.model.values()] for s in come)

    # How it is done, and what must be true.

    def pick(self, rng: random.Random) -> tuple[str, Talk]:
        """A session and the conversation up to one of its turns, of the shorter ones: each state is computed again."""
        session = rng.choice(list(self.model))
        talks = list(self.model[session].values())
        return session, rng.choice([t for t in talks if len(t) <= DEPTH] or talks)

    def say(self, messages: Talk, seed: float, *, session: str | None = None, n: int = 1, **fields: Any) -> None:
        self.quiet()
        wanted = self.places(messages) if session is None else {session}
        stored = self.states()
        self.recorder.begun.clear()
        sampling = SamplingParams(temperature=1.0, seed=int(seed * 2**20))
        try:
            asked = Asked(self.engine, *messages, sampling=sampling, session=session, n=n, **fields)
        except Rejection as err:
            if err.code != "context_length_exceeded":
                raise
            return
        (prompt, _), answer = read_prompt(self.store, asked.generation.asked.prompt), asked.answer()
        if fields.get("store", True):
            self.placed(messages, answer, wanted, n)
            self.resumed(answer, prompt, stored, n)
        else:
            assert (answer.usage.session, answer.usage.stored) == (None, False)
        assert answer.usage.cached_tokens in self.recorder.begun, "what was cached is what was restored"
        self.look()

    def quiet(self) -> None:
        """Wait for the engine's background work, so that the same events always find the same store."""
        persistence = self.engine._persistence
        assert isinstance(persistence, Persistence)
        rerenderer = persistence._rerenderer
        deadline = time.monotonic() + 60
        while True:
            with rerenderer._lock:
                if not (self.engine._queue.unfinished or rerenderer._waiting or rerenderer._turn):
                    break
            assert time.monotonic() < deadline
            time.sleep(0.001)
        persistence._writer.flush()

    def places(self, messages: Talk) -> set[str]:
        """The sessions that a request may belong to: those that hold most of its history. Empty: a new one."""
        depth = {s: self.depth(s, messages) for s in self.model}
        most = max(depth.values(), default=0)
        return {s for s, d in depth.items() if d == most > 0}

    def depth(self, session: str, messages: Talk) -> int:
        echo = plain(messages)
        fitting = (len(t) for t in self.model[session].values() if len(t) < len(echo) and echo[: len(t)] == plain(t))
        return max(fitting, default=0)

    def placed(self, messages: Talk, answer: Answer, wanted: set[str], n: int) -> None:
        """The answer is stored, in the right session, one turn a choice, and nothing else changed there."""
        session = answer.usage.session
        assert answer.usage.stored
        assert session is not None
        assert session in wanted or (not wanted and session not in self.model)
        before = self.model.get(session, {})
        found = self.conversations(session)
        fresh = {turn: talk for turn, talk in found.items() if turn not in before}
        assert {turn: talk for turn, talk in found.items() if turn in before} == before
        begun = messages[-1].content if messages[-1].role == "assistant" else ""
        asked = messages[:-1] if begun else messages
        said = [plain((*asked, Message("assistant", begun + answer.texts.get(i, "")))) for i in range(n)]
        assert sorted(map(repr, map(plain, fresh.values()))) == sorted(map(repr, said))
        turns = {t.id: t for t in self.store.turns(session)}
        for turn in fresh:
            # A rerender may have come already, and left out the reasoning that the answer was begun with.
            assert begun or turns[turn].prompt_tokens == answer.usage.prompt_tokens
            assert not begun or fresh[turn][-1].content.startswith("<think>")
            parent = turns[turn].parent
            above = 0 if parent is None else len(found[parent])
            fitting = (len(t) for t in before.values() if said[0][: len(t)] == plain(t) and len(t) < len(messages))
            assert above == max(fitting, default=0)
        assert self.store.session(session).head in fresh
        self.model[session] = found

    def states(self) -> Sequence[Any]:
        """All checkpoints: what names each."""
        with self.store.reading() as connection:
            return states_in(connection)

    def resumed(self, answer: Answer, prompt: list[int], stored: Sequence[Any], n: int) -> None:
        """It began at the deepest state there was for it, and the next request finds one as deep as can be.

        prompt: as it was asked. The turn may have been rerendered since, with reasoning that the echo left out.
        """
        session = str(answer.usage.session)
        own = ("", self.store.session(session).info.imported)
        with self.store.reading() as connection:  # of one moment: a rerender may come at any
            turns = [grown(Snapshot(connection), t.id)[0] for t in read_tree(connection, session)[-n:]]
            now = [row for row in states_in(connection) if row.origin in own]
        begins = Line.of(prompt[:-1])
        fitting = [row.position for row in stored if row.origin in own and named_by(row, begins)]
        assert answer.usage.cached_tokens == max(fitting, default=0)
        for ids in turns if self.quota is None else ():
            assert any(named_by(row, ids) for row in now if row.position >= len(ids) - 1)

    def conversations(self, session: str) -> dict[str, Talk]:
        found: dict[str, Talk] = {}
        for turn in self.store.turns(session):
            above = () if turn.parent is None else found[turn.parent]
            found[turn.id] = trimmed((*above, *turn.conversation))
        return found

    def look(self, *, again: bool = False) -> None:
        """At everything stored. again: also at checkpoints that were looked at already."""
        self.quiet()
        assert {s.id for s in self.store.sessions()} == set(self.model)
        if again:
            assert {s: self.conversations(s) for s in self.model} == self.model
        self.look_at_checkpoints(again=again)
        if self.quota is not None:
            assert self.store.bytes_stored() <= self.quota

    def sound(self) -> None:
        """Assert that `ssmd session check` finds nothing, and that the running totals of sizes are the counted ones."""
        with self.store.reading() as connection:
            assert not examine(connection).damages
            s = session_table.c
            known = select(s.id, s.own_nbytes, s.shared_nbytes).where(s.own_nbytes.is_not(None))
            for name, *sizes in connection.execute(known).all():
                assert tuple(sizes) == read_holding(connection, name).sizes()

    def look_at_checkpoints(self, *, again: bool = False) -> None:
        with self.store.reading() as connection:
            # One view of the store: a rerender may replace a state meanwhile.
            for row in states_in(connection):
                if row.id in self.checked and not (again and row.id % 4 == self.taken % 4):
                    continue
                state = self.store.load_in(connection, row.id, self.artifact.manifest.spec)
                if row.id in self.checked:
                    assert fingerprint(state) == self.checked[row.id], "its bits are the same for ever"
                elif "several runs" not in row.producer:
                    fed = Line.of(self.recorder.fed_to(state))
                    assert named_by(row, fed), "its key is that of the ids that were fed"
                    self.recorder.check(state, self.tolerance)
                self.checked[row.id] = fingerprint(state)


@pytest.fixture(params=["granite", pytest.param("llama", marks=pytest.mark.full)])
def machine(request: pytest.FixtureRequest, artifacts: TinyArtifacts, tmp_path: Path) -> Iterator[type[Sessions]]:
    artifact = Artifact.open(artifacts[f"{request.param}-f32"])
    program = get_runtime("litert").load(artifact, threads=1)
    fields: Mapping[str, Any] = {
        "artifacts": (artifact, with_template(artifact, tmp_path / "drops", THINKING.read_text())),
        "recorder": Recorder(program),
        "tolerance": Case("litert", request.param, "f32").tolerance,
        "kills": Counter(),
    }
    yield type("Sessions", (Sessions,), dict(fields))
    program.close()


COLLECTED = (
    *[("go_on", 829), ("move", 0), *[("go_on", 0)] * 10, ("begin", 158), ("go_on", 0), ("edit", 139647)],
    *[("go_on", 0), ("go_on", 0), ("go_on", 2690), ("remove", 515403), *[("go_on", 0)] * 5, ("restart", 0)],
)


def test_sessions_that_share_rows_are_collected(machine: type[Sessions]) -> None:
    """A course of events after which one session once had less than no bytes."""
    sessions = machine()
    sessions.two_conversations(0)
    for what, seed in COLLECTED:
        getattr(sessions, what)(random.Random(seed))
        sessions.sound()
    sessions.teardown()


def test_a_turn_is_rerendered_before_anyone_looks(machine: type[Sessions], monkeypatch: pytest.MonkeyPatch) -> None:
    """With the reasoning that its echo left out: the state after that was there, and no state of what was asked."""
    sessions = machine()
    resumed = sessions.resumed

    def longest() -> Talk:
        return max((talk for turns in sessions.model.values() for talk in turns.values()), key=len)

    def late(*args: Any) -> None:
        sessions.quiet()
        resumed(*args)

    monkeypatch.setattr(sessions, "resumed", late)
    sessions.two_conversations(0)
    sessions.say((*longest(), user("Why?"), Message("assistant", "<think>\nWhy?\n</think>\n\nWell")), 0, max_tokens=4)
    sessions.say((*plain(longest()), user("And now?")), 0, max_tokens=2)
    sessions.teardown()


@pytest.mark.parametrize("steps", STEPS)
def test_any_course_of_events(machine: type[Sessions], steps: int) -> None:
    runs = steps // 2 // (STEPS_A_RUN - 1) + 3  # one step begins the conversations, and a run may end early
    chosen = machine if SEED is None else hypothesis.seed(int(SEED))(machine)
    run_state_machine_as_test(
        chosen,
        settings=settings(
            max_examples=runs,
            stateful_step_count=STEPS_A_RUN,
            deadline=None,
            derandomize=SEED is None,
            database=None,
            print_blob=True,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        ),
    )
    print(f"{machine.taken} steps; killed {dict(machine.kills)}")
    assert machine.taken >= steps // 2
