"""The checks at the end of a round of remote_campaign.py: turns as told, once; bits as an undisturbed control's."""

from __future__ import annotations

import contextlib
import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from campaign_clients import Client, Reach, Turn
from cluster import Cluster
from sqlalchemy import select
from talkers import CHAT, ask, body_of, told_by

from ssmd.model.state import StateSpec
from ssmd.sessions.fsck.repair import check
from ssmd.sessions.remote.body import TurnBody
from ssmd.sessions.remote.postgres.postgres import PostgresRemote
from ssmd.sessions.remote.sharing import pull_session
from ssmd.sessions.rows.schema import checkpoint, layout, turn, turn_checkpoint
from ssmd.sessions.store import Store

TIE = 1e-3  # nats between the two likeliest tokens, where another order of sums may choose the other one
Row = tuple[str, str, str]  # session, turn, text of the answer; by question


class Campaign(Protocol):
    """A round, as its checks use it."""

    folder: Path
    names: tuple[str, ...]
    counts: Counter[str]
    failures: list[str]


class Check:
    """Compares the remote, the machines' stores and a control with what clients were told."""

    def __init__(
        self, of: Campaign, cluster: Cluster, database: str, packs: Path, clients: Sequence[Client], reach: Reach
    ) -> None:
        self.of, self.reach, self.clients = of, reach, clients
        self._url = cluster.url(database, packs=str(packs))
        self._rows = cluster.admin("SELECT session, turn, body FROM ssmd.turn", database)
        [[states]] = cluster.admin("SELECT count(*) FROM ssmd.ending", database)
        self.of.counts.update({"turns in the remote": len(self._rows), "states in the remote": int(states)})
        self._other: list[tuple[Turn, str]] = []  # what the control answered otherwise
        self._alike = defaultdict[str, set[str]](set)  # by machine: questions whose tokens it fed as the control did

    def turns(self) -> Iterator[Turn]:
        """Yield all that clients were told to be stored, answers of other daemons to the same request too."""
        for client in self.clients:
            for talk in client.talks:
                for one in talk:
                    yield from (each for each in (one, *one.others) if each.stored)

    def remote(self) -> None:
        """Find each turn in the remote once, and in the store of the daemon that answered; and nothing twice."""
        rows = defaultdict[str, list[Row]](list)
        names = Counter[str]()
        for session, name, body in self._rows:
            given, [answered] = TurnBody.model_validate_json(bytes(body)).turn.said
            question = [message.content for message in given if message.role == "user"][-1]
            rows[question].append((session, name, answered.content))
            names[name] += 1
        stores = {name: _turns_of(self.of.folder / name) for name in self.of.names}
        for one in self.turns():
            self.of.counts["turns told"] += 1
            found = rows.get(one.question, [])
            here = found if one.sent is None else stores[one.name].get(one.question, [])
            if not all((one.session, one.text) in [(s, text) for s, _, text in some] for some in (found, here)):
                self.of.counts["lost"] += 1
                self._fail(one, f"the remote has {found}, {one.name} has {here}")
            elif more := [name for _, name, _ in found if names[name] > 1]:
                self.of.counts["twice"] += 1
                self._fail(one, f"turns {more} are in the remote more than once: {found}")
            else:
                self.of.counts["found"] += 1
        for client in self.clients:
            for talk in client.talks:
                for one in talk:
                    self._branches(one, len(rows.get(one.question, ())))
        self._take({session for session, *_ in self._rows})

    def _fail(self, one: Turn, what: str) -> None:
        about = f"{one.question!r} of {one.session}, told by {one.name} as {one.sent}"
        self.of.failures.append(f"{about}: {what}; {one.text!r}; {one.attempts}")

    def _branches(self, one: Turn, found: int) -> None:
        """Count a request that was answered more than once, and judge if it had to be."""
        if found <= 1:
            return
        self.of.counts["second branches"] += found - 1
        died = any(each.ending != "answered" for each in one.attempts)
        began, ended = one.attempts[0].began, one.attempts[-1].ended
        if not one.keyed or not (died or self._local(one) or self.reach.was_away(one.names, began, ended)):
            self.of.counts["of these unexplained"] += 1
            self._fail(one, f"it was answered {found} times, and each daemon reached the remote; {one.others}")

    def _local(self, one: Turn) -> bool:
        """Return True if the first answer left before the remote had it."""
        return one.sent != "sent"

    def _take(self, sessions: set[str]) -> None:
        """Let a new machine take all conversations, and check all stores."""
        remote, store = PostgresRemote.open(self._url, create=False), Store.open(self.of.folder / "new")
        with contextlib.closing(store), contextlib.closing(remote):
            for session in sorted(sessions):
                try:
                    pull_session(store, remote, session, {})
                    self.of.counts["sessions a new machine took"] += 1
                except Exception as err:
                    self.of.failures.append(f"a new machine could not take session {session}: {err!r}")
        for name in (*self.of.names, "new"):
            if damages := check(self.of.folder / name).damages:
                self.of.failures.append(f"the store {name} is damaged: {damages[:3]}")

    def answers(self, port: int) -> None:
        """Let the control answer all conversations, as they were told, and compare tokens and log probabilities."""
        for client in self.clients:
            for talk in client.talks:
                alike = True
                for one in talk:
                    got = ask(port, "POST", CHAT, body_of(one.fields["model"], one.messages, one.fields))
                    if got.status != 200:
                        self._fail(one, f"the control says {got.status} {got.body[:300]!r}")
                        break
                    told = told_by(got.body, one.fields["stream"])
                    alike = alike and one.cached == told.cached and one.name not in one.strays
                    self._compare(one, told.text, told.tokens, alike=alike)
                    if alike:
                        self._alike[one.name].add(one.question)

    def _compare(self, one: Turn, text: str, tokens: list[Any], *, alike: bool) -> None:
        """alike: it resumed where the control did, in this turn and all before, and fed the same tokens at a time."""
        if one.text == text:
            self.of.counts["answers as the control's"] += 1
            exact = one.tokens == tokens
            self.of.counts["to the last bit" if exact else "of another cut"] += 1
            if alike and not exact:
                self._fail(one, f"resumed at {one.cached} as the control did, its log probabilities differ")
        elif not alike and _is_tie(one.tokens, tokens):
            self.of.counts["near ties"] += 1
        elif not alike:
            self._other.append((one, text))
        else:
            self._fail(one, f"the control says {text!r}")

    def states(self) -> None:
        """Compare the states that are stored with the control's of the same tokens. The control has ended.

        Another answer is right if other ids were fed: a daemon that had not got a turn read its text, in other tokens.
        """
        for one, text in self._other:
            if _prompts(self.of.folder / one.name, one) & _prompts(self.of.folder / "control", one):
                self._fail(one, f"the control says {text!r} to the same ids")
            else:
                self.of.counts["of other tokens of the same text"] += 1
        control = _states_of(self.of.folder / "control")
        for name in self.of.names:
            for key, (digest, turns) in _states_of(self.of.folder / name).items():
                if key not in control:
                    continue
                self.of.counts["states compared"] += 1
                if digest == control[key][0]:
                    self.of.counts["states to the last bit"] += 1
                    continue
                self.of.counts["states of another cut"] += 1
                if turns and turns <= self._alike[name]:
                    self.of.failures.append(f"a state of {name}, of turns {sorted(turns)}, is not the control's")


def _is_tie(ours: list[Any], theirs: list[Any]) -> bool:
    """Return True if the first token that differs was about as likely as the one that the other daemon chose."""
    for a, b in zip(ours, theirs, strict=False):
        if a["token"] != b["token"]:
            likely = {each["token"]: float(each["logprob"]) for each in a["top_logprobs"]}
            return abs(float(a["logprob"]) - likely.get(b["token"], -1e9)) < TIE
    return False


def _prompts(folder: Path, asked: Turn) -> set[bytes]:
    """Return the ids of the prompts that end with a question, as a store has them."""
    found, store = set[bytes](), Store.open(folder)
    with contextlib.closing(store):
        names = [(session, name) for session, name, _ in _turns_of(folder)[asked.question]]
        for one in (one for session, name in names for one in store.turns(session) if one.id == name):
            with store.snapshot() as stored:
                line, _ = stored.reach(one.ids, one.stem, 0)
            found.add(line.own[: one.prompt_tokens].tobytes())
    return found


def _turns_of(folder: Path) -> dict[str, list[Row]]:
    """Return the turns of a store, by question."""
    found = defaultdict[str, list[Row]](list)
    store = Store.open(folder)
    with contextlib.closing(store):
        for session in store.sessions():
            for one in store.turns(session.id):
                question = [message.content for message in one.messages if message.role == "user"][-1]
                found[question].append((session.id, one.id, one.answer.content))
    return found


def _states_of(folder: Path) -> dict[tuple[bytes, str], tuple[str, set[str]]]:
    """Return a digest of the numbers of each state of a store, and its turns' questions, by tokens and producer."""
    questions = {name: question for question, rows in _turns_of(folder).items() for _, name, _ in rows}
    found: dict[tuple[bytes, str], tuple[str, set[str]]] = {}
    c = checkpoint.c
    store = Store.open(folder)
    with contextlib.closing(store), store.reading() as connection:
        specs = {d: StateSpec.from_json(t) for d, t in connection.execute(select(layout.c.digest, layout.c.tensors))}
        for id_, key, producer, its in connection.execute(select(c.id, c.key, c.producer, c.layout)).all():
            state, running = store.load_in(connection, id_, specs[its]), hashlib.sha256()
            for name in sorted(state.tensors):
                running.update(state.tensors[name].tobytes())
            link = turn_checkpoint.c
            named = select(turn.c.id).join(turn_checkpoint, link.turn == turn.c.id).where(link.checkpoint == id_)
            found[bytes(key), producer] = running.hexdigest(), {questions[one] for one in connection.scalars(named)}
    return found
