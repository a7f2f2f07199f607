"""The exchange with a remote: the outbox is sent in the order of writing; what others have buried is removed here."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from ssmd.sessions.remote.allowance import Allowance, OverQuota
from ssmd.sessions.remote.body import remote_turn
from ssmd.sessions.remote.recovery import mark_of, recover
from ssmd.sessions.remote.remote import MarkGone, Remote, RemoteTurn
from ssmd.sessions.remote.signing import MachineKey, own_key
from ssmd.sessions.rows import outbox
from ssmd.sessions.rows.outbox import OutboxRow
from ssmd.sessions.store import Store
from ssmd.sessions.turn import StoreError, UnknownSession

log = logging.getLogger(__name__)
MAX_GROUP_BYTES = 1 << 20  # bytes of turns from which they are sent
_AT_ONCE = 50  # rows of the outbox that are sent before they are removed


def send(
    store: Store,
    remote: Remote,
    stopped: Callable[[], bool] = lambda: False,
    sent_of: Callable[[str], None] = lambda session: None,
    removed: Callable[[], None] = lambda: None,
    published: Callable[[set[str]], None] = lambda turns: None,
    allowance: Allowance | None = None,
) -> int:
    """Send what waits in the outbox. Returns how many rows. Raises RemoteError, StoreError.

    sent_of: called with the session of each turn that was sent. removed: called when rows have left the outbox.
    published: called before that, with the turns that were sent. allowance: the bytes that may be sent; beyond it
    tombstones go alone, before OverQuota is raised.
    """
    done, over, allowance = 0, None, Allowance() if allowance is None else allowance
    while not stopped():
        with store.reading() as connection:
            rows = outbox.read(connection, _AT_ONCE, tombstones=over is not None)
        if not rows:
            break
        sent, turns, mark, key = list[int](), set[str](), mark_of(store, remote), own_key(store)
        try:
            for group in _groups(store, rows, key):
                if stopped():
                    break
                group.turns = _still_waiting(store, group.turns)
                if group.buried is not None:
                    remote.bury(group.buried.session, group.buried.turn)
                else:
                    allowance.take(remote, mark.machine, group.nbytes)
                mark = replace(mark, confirmed=remote.publish(group.turns, mark))
                for turn in group.turns:
                    sent_of(turn.place.session)
                    turns.add(turn.place.turn)
                sent += group.rows
        except OverQuota as err:
            over = err
        except MarkGone:  # none of these rows counts as sent
            for session in recover(store, remote):
                sent_of(session)
            continue
        published(turns)
        with store.writing() as connection:
            outbox.remove(connection, sent)
            outbox.set_mark(connection, mark)
        removed()
        done += len(sent)
    if over is not None:
        raise over
    return done


@dataclass
class _Group:
    """Rows of the outbox that are sent together: turns, or one tombstone."""

    rows: list[int] = field(default_factory=list)
    turns: list[RemoteTurn] = field(default_factory=list)
    buried: OutboxRow | None = None
    nbytes: int = 0


def _groups(store: Store, rows: Sequence[OutboxRow], key: MachineKey) -> Iterator[_Group]:
    """Yield rows in their order, turns in groups of MAX_GROUP_BYTES or so: a database asks a round trip of each."""
    group = _Group()
    for row in rows:
        if row.buried:
            if group.rows:
                yield group
            yield _Group([row.id], buried=row)
            group = _Group()
            continue
        if (turn := _turn(store, row, key)) is not None:
            group.turns.append(turn)
            group.nbytes += len(turn.body)
        group.rows.append(row.id)
        if group.nbytes >= MAX_GROUP_BYTES:
            yield group
            group = _Group()
    if group.rows:
        yield group


def _still_waiting(store: Store, turns: Sequence[RemoteTurn]) -> list[RemoteTurn]:
    """Return the turns that are still to be sent: a user may have marked their session as local meanwhile."""
    with store.reading() as connection:
        return [one for one in turns if outbox.waits(connection, one.place.turn)]


def _turn(store: Store, row: OutboxRow, key: MachineKey) -> RemoteTurn | None:
    """Read a turn that is to be sent; None if there is nothing to send of it."""
    assert row.turn is not None  # a row without a turn is a tombstone
    try:
        with store.snapshot() as stored:
            turn = stored.turn(row.turn)
            above = None if turn.parent is None else stored.turn(turn.parent).session
        session = store.session(turn.session)
    except UnknownSession:  # it was removed meanwhile
        return None
    if not turn.sound:
        log.warning("turn %s was altered, and is not sent to the remote; see `ssmd session check`", turn.id)
        return None
    try:
        return remote_turn(turn, session, above, key)
    except StoreError as err:
        log.warning("a turn is not sent to the remote: %s", err)
        return None


def purge(store: Store, remote: Remote) -> int:
    """Remove the sessions and turns that other machines have buried. Returns how many. Raises RemoteError, StoreError.

    Sessions and turns that this one has buried are buried again in a remote that does not know it.
    """
    there = set(remote.buried())
    with store.reading() as connection:
        shared = outbox.names_of(connection, "shared", "behind")
        mine = outbox.names_of(connection, "buried")
        own = outbox.buried_turns(connection)
        turns = outbox.leaves_among(connection, sorted(there - shared - mine))
    gone = 0
    for session in sorted(shared & there):
        with contextlib.suppress(UnknownSession):
            store.delete(session)
            gone += 1
        with store.writing() as connection:
            outbox.set_standing(connection, session, "buried")
    for session in sorted(mine - there):
        remote.bury(session, None)
    for turn in sorted(own.keys() - there):
        if own[turn] not in mine | there:
            remote.bury(own[turn], turn)
    for turn in turns:
        with contextlib.suppress(UnknownSession):
            store.remove_turn(turn, {})
            gone += 1
    return gone
