"""A survey of a whole remote: what is in it, what is damaged, and a copy of it into another one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from ssmd.sessions.remote.body import read_as, read_body
from ssmd.sessions.remote.ends import EndBody
from ssmd.sessions.remote.remote import InvalidTurn, Remote, RemoteError, RemoteTurn, TurnPlace, UnknownVersion

Kind = Literal[
    "turn_damaged",
    "turn_altered",
    "turn_without_parent",
    "state_damaged",
    "pack_missing",
    "pack_damaged",
    "pack_unnamed",
]
# By kind: if something is lost by it, and what to do.
REMEDIES: dict[Kind, tuple[bool, str]] = {
    "turn_damaged": (True, "`ssmd session push ID` on a machine that has the session writes it again"),
    "turn_altered": (
        True,
        "a user wrote it so, and it is not written over: remove its file `sessions/*/SESSION/TURN`, or its row of "
        "ssmd.turn, and give `ssmd session push SESSION` on a machine that has the session",
    ),
    "turn_without_parent": (True, "`ssmd session push ID` on a machine that has the session sends what is missing"),
    "state_damaged": (False, "nothing: its turns are read, and the conversation's next turn replaces it"),
    "pack_missing": (False, "nothing: the turns are read, and the conversation's next turn replaces it"),
    "pack_damaged": (False, "nothing: the turns are read, and the conversation's next turn replaces it"),
    "pack_unnamed": (False, "`ssmd session sweep` removes it once it is a day old"),
}


@dataclass(frozen=True)
class Fault:
    """Something in a remote that is not as it has to be. said: what is wrong with it."""

    kind: Kind
    session: str
    turn: str
    pack: str
    said: str


@dataclass
class Survey:
    """A remote that was read whole. newer: turns and states of a newer version, which were not looked at."""

    turns: int = 0
    states: int = 0
    nbytes: int = 0
    newer: int = 0
    faults: list[Fault] = field(default_factory=list)

    @property
    def sound(self) -> bool:
        """Return True if no turn is damaged, and no state; packs that no row names do no harm."""
        return all(one.kind == "pack_unnamed" for one in self.faults)


def check(remote: Remote) -> Survey:
    """Read all turns, states and packs of a remote. Other machines may go on meanwhile. Raises RemoteError."""
    done, named, there = Survey(), set[str](), set[str]()
    packs = remote.packs
    files = {} if packs is None else dict(packs.names())  # before the rows: what comes meanwhile is not unnamed
    parents: list[tuple[TurnPlace, str]] = []
    for session in remote.sessions():
        names = sorted(remote.turns(session))
        there.update(names)
        for place, raw in _turns(remote, session, names, done):
            try:
                body = read_body(raw, place)
            except UnknownVersion:
                done.newer += 1
                continue
            except InvalidTurn as err:
                done.faults.append(Fault("turn_altered", session, place.turn, "", str(err)))
                continue
            done.turns, done.nbytes = done.turns + 1, done.nbytes + len(raw)
            if body.turn.parent is not None:
                parents.append((place, body.turn.parent))
        for turn in sorted(remote.ends(session)):
            _check_end(remote, TurnPlace(session, turn), done, named)
    for place, parent in parents:
        if parent not in there and remote.fetch(place) is not None:
            said = f"turn {place.turn!r} of the remote goes on from {parent!r}, which is not there"
            done.faults.append(Fault("turn_without_parent", place.session, place.turn, "", said))
    for name, nbytes in files.items():
        if name not in named:
            done.faults.append(Fault("pack_unnamed", "", "", name, f"no state names the pack ({nbytes} bytes)"))
    return done


def _turns(remote: Remote, session: str, names: list[str], done: Survey) -> Iterator[tuple[TurnPlace, bytes]]:
    for turn in names:
        place = TurnPlace(session, turn)
        try:
            raw = remote.fetch(place)
        except UnknownVersion:
            done.newer += 1
        except InvalidTurn as err:
            done.faults.append(Fault("turn_damaged", session, turn, "", str(err)))
        else:
            if raw is not None:  # else it was removed meanwhile
                yield place, raw


def _check_end(remote: Remote, place: TurnPlace, done: Survey, named: set[str]) -> None:
    """Check the state of a turn and its pack."""
    try:
        raw = remote.end(place)
        if raw is None:
            return
        body = read_end_row(raw, place)
    except UnknownVersion:
        done.newer += 1
        return
    except InvalidTurn as err:
        done.faults.append(Fault("state_damaged", place.session, place.turn, "", str(err)))
        return
    named.add(body.pack)
    done.states += 1
    packs = remote.packs
    if packs is None:
        return
    try:
        done.nbytes += len(packs.get(body.pack, body.nbytes))
    except InvalidTurn as err:
        if remote.end(place) == raw:  # else another machine replaced it meanwhile
            kind: Kind = "pack_damaged" if packs.there(body.pack) else "pack_missing"
            done.faults.append(Fault(kind, place.session, place.turn, body.pack, str(err)))


def read_end_row(raw: bytes, place: TurnPlace) -> EndBody:
    """Read the row of a turn's state, of whatever model. Raises InvalidTurn."""
    what = f"the state of turn {place.turn!r} of the remote"
    body = read_as(EndBody, raw, what)
    if body.place != place:
        raise InvalidTurn(f"{what} says that it is of {body.turn!r} of {body.session!r}")
    return body


@dataclass
class CopyCounts:
    """Counts of a copy. there: turns and states that the target had. refused: what is damaged in the source."""

    tombstones: int = 0
    turns: int = 0
    states: int = 0
    nbytes: int = 0
    there: int = 0
    refused: list[str] = field(default_factory=list)


def copy(source: Remote, target: Remote, progress: Callable[[CopyCounts], None] = lambda done: None) -> CopyCounts:
    """Copy a remote into another one, of either kind. What the target has stays, so that it can be called again.

    Tombstones come first. What the target has buried is not copied. Raises RemoteError.
    """
    if source.identity == target.identity:
        raise RemoteError(f"{target.name} is the remote itself: name another one to copy into", lasting=True)
    done, gone = CopyCounts(), set(target.buried())
    _copy_tombstones(source, target, gone, done)
    gone |= set(source.buried())
    for session in source.sessions():
        if session in gone:
            continue
        there = set(target.turns(session))
        for turn in sorted(source.turns(session)):
            if turn in there:
                done.there += 1
            elif turn not in gone:
                _copy_turn(source, target, TurnPlace(session, turn), done)
                progress(done)
        there = set(target.ends(session))
        for turn in sorted(source.ends(session)):
            if turn in there:
                done.there += 1
            elif turn not in gone and source.packs is not None and target.packs is not None:
                _copy_end(source, target, TurnPlace(session, turn), done)
                progress(done)
    return done


def _copy_tombstones(source: Remote, target: Remote, gone: set[str], done: CopyCounts) -> None:
    names = set(source.buried()) - gone
    if names:
        session_of = {turn: session for session in target.sessions() for turn in target.turns(session)}
        for name in sorted(names):
            if name in session_of:
                target.bury(session_of[name], name)
            else:
                target.bury(name, None)
            done.tombstones += 1


def _copy_turn(source: Remote, target: Remote, place: TurnPlace, done: CopyCounts) -> None:
    try:
        raw = source.fetch(place)
        if raw is None:
            return
        body = read_body(raw, place)
    except InvalidTurn as err:
        done.refused.append(str(err))
        return
    target.publish([RemoteTurn(place, body.session.owner, bytes.fromhex(body.chain), raw)])
    done.turns, done.nbytes = done.turns + 1, done.nbytes + len(raw)


def _copy_end(source: Remote, target: Remote, place: TurnPlace, done: CopyCounts) -> None:
    assert source.packs is not None
    assert target.packs is not None
    try:
        raw = source.end(place)
        if raw is None:
            return
        body = read_end_row(raw, place)
        pack = source.packs.get(body.pack, body.nbytes)
    except InvalidTurn as err:
        done.refused.append(str(err))
        return
    target.packs.put([pack])
    target.publish_end(place, body.pack, raw, ())
    done.states, done.nbytes = done.states + 1, done.nbytes + len(pack)
