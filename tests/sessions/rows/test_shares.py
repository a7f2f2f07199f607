"""Shares of the quota: an owner above its share gives way first, so that no client pushes out what others stored."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from keeping import RECURRENT, START, Chat, new_store, user
from sessions.rows.test_retention import WIDE, check_sound, resumed_at, talk

from ssmd.model.state import StateSpec
from ssmd.sessions.rows.holding import bytes_by_owner, read_holding
from ssmd.sessions.rows.retention import part_of_largest
from ssmd.sessions.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = new_store(tmp_path / "data")
    yield store
    store.close()


def owner_talks(
    store: Store, owner: str, sessions: int, turns: int = 1, *, hours: int = 0, spec: StateSpec = WIDE
) -> list[Chat]:
    """Sessions of an owner, each used an hour after the one before. hours: of the first, after START."""
    chats = []
    for n in range(sessions):
        chat = Chat(store, f"{owner}-{hours + n}", spec, owner=owner)
        chat.clock = START + timedelta(hours=hours + n)
        for i in range(turns):
            name = f"{chat.info.id}-{i}"
            chat.say(name, f"{chat.info.id}-{i - 1}" if i else None, f"{name} asks", "yes")
        chats.append(chat)
    return chats


def kept(store: Store, chats: list[Chat]) -> list[bool]:
    """For each session: True if a request would go on from the end of its last turn."""
    lasts = [(chat, next(reversed(chat.turns))) for chat in chats]
    return [resumed_at(store, chat, last) == len(chat.turns[last].ids) - 1 for chat, last in lasts]


def states(store: Store, chat: Chat) -> int:
    with store.reading() as connection:
        return len(read_holding(connection, chat.info.id).checkpoints)


def bytes_of(store: Store, *owners: str) -> list[int]:
    with store.writing() as connection:
        found = bytes_by_owner(connection)
    return [found[owner] for owner in owners]


def test_a_flood_pushes_out_no_states_of_another_owner(store: Store) -> None:
    quiet = owner_talks(store, "quiet", 3)
    store.quota = 4 * store.bytes_stored()
    loud = owner_talks(store, "loud", 20, hours=10)
    assert all(kept(store, quiet))
    assert kept(store, loud) == [False] * 11 + [True] * 9, "of its own, those used longest ago go"
    assert store.bytes_stored() <= store.quota
    check_sound(store, WIDE)


def test_the_least_recently_used_go_where_one_owner_is_alone(store: Store) -> None:
    """Above its share, which is the whole quota. No owner's bytes are counted then."""
    alone = owner_talks(store, "alone", 4)
    store.quota = store.bytes_stored()
    alone += owner_talks(store, "alone", 2, hours=9)
    assert kept(store, alone) == [False] * 2 + [True] * 4
    with store.reading() as connection:
        names = list(connection.exec_driver_sql("SELECT name FROM total ORDER BY name").scalars())
    assert names == ["checkpoints", "turns"]


def test_the_owner_farthest_above_its_share_gives_first(store: Store) -> None:
    """Three owners with 2, 5 and 8 turns of 15, and a quota of 12: 4 each."""
    least, more, most = (owner_talks(store, name, n, hours=9 * n) for name, n in (("b", 2), ("c", 5), ("a", 8)))
    turn = store.bytes_stored() // 15
    store.collect(12 * turn + 1000)
    assert (all(kept(store, least)), all(kept(store, more)), sum(kept(store, most))) == (True, True, 5)
    store.collect(9 * turn + 1000)
    assert all(kept(store, least))
    assert bytes_of(store, "a", "b", "c") == [pytest.approx(n * turn, abs=turn / 2) for n in (3.5, 2, 3.5)]
    check_sound(store, WIDE)


def test_all_give_in_turn_where_only_pinned_ones_are_above(store: Store) -> None:
    loud = owner_talks(store, "loud", 5)
    for chat in loud:
        store.pin(chat.info.id)
    quiet = owner_talks(store, "quiet", 2, hours=20)
    store.quota = store.bytes_stored()
    other = owner_talks(store, "loud", 1, hours=30)
    assert all(kept(store, loud)), "pinned"
    assert kept(store, [*quiet, *other]) == [False, True, True]
    other += owner_talks(store, "loud", 1, hours=40)
    assert kept(store, [*quiet, *other]) == [False, True, False, True], "it has one of its own to give"
    check_sound(store, WIDE)


def test_thinning_ahead_takes_from_the_owner_that_gives(store: Store) -> None:
    quiet = owner_talks(store, "quiet", 1, 30, spec=RECURRENT)
    loud = talk_of(store, "loud", 60)
    store.quota = store.bytes_stored() + 100
    before, had = states(store, quiet[0]), states(store, loud)
    loud.say("loud-60", "loud-59", "loud asks 60", "yes")
    assert states(store, quiet[0]) == before
    assert states(store, loud) < had - 4, "a sixteenth of the quota, not only the two that it needs"
    assert kept(store, [loud, *quiet]) == [True, True]
    check_sound(store, RECURRENT)


def talk_of(store: Store, owner: str, turns: int) -> Chat:
    chat = owner_talks(store, owner, 1, spec=RECURRENT)[0]
    last = next(iter(chat.turns))
    for i in range(1, turns):
        chat.say(f"{owner}-{i}", last, f"{owner} asks {i}", "yes")
        last = f"{owner}-{i}"
    return chat


def test_states_that_an_owners_sessions_share_count_once(store: Store) -> None:
    """Each prompt of the flood comes twice, in two sessions: no state belongs to one of them alone."""
    quiet = owner_talks(store, "quiet", 3)
    store.quota = 4 * store.bytes_stored()
    for n in range(20):
        chat = Chat(store, f"loud-{n}", WIDE, owner="loud")
        chat.clock = START + timedelta(hours=10 + n)
        turn, checkpoints = chat.make(f"loud-{n}-0", None, [user(f"loud asks {n}")], "yes")
        store.commit([turn], [chat.encode(c) for c in checkpoints], session=chat.info)
        twin = replace(chat.info, id=f"twin-{n}")
        again = [replace(c, turn=None) for c in checkpoints]
        store.commit([replace(turn, id=f"twin-{n}-0", session=twin.id)], [chat.encode(c) for c in again], session=twin)
    assert all(kept(store, quiet))
    assert store.bytes_stored() <= store.quota
    check_sound(store, WIDE)


def test_forks_of_one_owner_give_for_each_other(store: Store) -> None:
    quiet = owner_talks(store, "quiet", 2)
    (loud,) = owner_talks(store, "loud", 1, 2, hours=5)
    fork = store.fork(loud.info.id, f"{loud.info.id}-0")
    assert fork.info.owner == "loud"
    store.quota = store.bytes_stored()
    mine = replace_session(loud, fork.info.id)
    mine.say("f-0", f"{loud.info.id}-0", "other words", "no")
    assert all(kept(store, quiet))
    assert kept(store, [mine]) == [True]
    check_sound(store, WIDE)


def replace_session(chat: Chat, name: str) -> Chat:
    """The conversation of a chat, as a fork of it goes on."""
    fork = Chat(chat.store, name, chat.spec, owner=chat.info.owner)
    fork.clock, fork.turns, fork.ends = chat.clock + timedelta(hours=9), dict(chat.turns), dict(chat.ends)
    return fork


def test_a_dry_run_in_parts_says_what_a_collection_does(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ssmd.sessions.rows.retention.PART_BYTES", 1_000_000)
    for name, n in (("b", 2), ("c", 3), ("a", 5)):
        owner_talks(store, name, n, 3, hours=9 * n)
    for share in (0.7, 0.4, 0.1):
        limit = int(store.bytes_stored() * share)
        told = store.collect(limit, dry_run=True)
        done = store.collect(limit)
        assert done == told
        assert done.left == store.bytes_stored() <= limit
    check_sound(store, WIDE)


def test_an_altered_owner_stops_no_commit(store: Store) -> None:
    quiet = owner_talks(store, "quiet", 2)
    talk(store, "other", 2, WIDE)
    with store.writing() as connection:
        connection.exec_driver_sql("UPDATE session SET owner = CAST(x'ff' AS TEXT) WHERE id = 'other'")
        connection.exec_driver_sql("UPDATE checkpoint SET owner = CAST(x'fe' AS TEXT) WHERE owner = ''")
    store.quota = store.bytes_stored()
    quiet += owner_talks(store, "quiet", 1, hours=9)
    assert kept(store, quiet)[-1]
    assert store.bytes_stored() <= store.quota


@pytest.mark.parametrize(
    ("above", "needed", "part"),
    [([7], 3, 3), ([7, 4], 3, 3), ([4, 7], 5, 4), ([7, 4, 4], 6, 4), ([5, 5], 4, 2), ([5, 2], 9, 5), ([3, 3, 3], 4, 2)],
)
def test_owners_give_down_to_one_level(above: list[int], needed: int, part: int) -> None:
    assert part_of_largest(above, needed) == part
