"""Use counts for retention: of an age, states go first that no request came back to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from keeping import RECURRENT, Chat, find, new_store, open_store, state_of, user
from sqlalchemy import select

from ssmd.sessions.checkpoint import NewCheckpoint
from ssmd.sessions.line import Line
from ssmd.sessions.rows.holding import HeldCheckpoint, SessionHoldings, read_holding
from ssmd.sessions.rows.loose import in_order
from ssmd.sessions.rows.retention import thinned
from ssmd.sessions.rows.schema import checkpoint
from ssmd.sessions.store import Store

PLACES = (40, 80, 120)  # tokens of the first prompt, inside it, at which states are kept


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = new_store(tmp_path / "data")
    yield store
    store.close()


def used(store: Store) -> dict[int, bool]:
    """True for each checkpoint, by id, to which a request came back."""
    columns = select(checkpoint.c.id, checkpoint.c.last_used_at != checkpoint.c.created_at)
    with store.reading() as connection:
        return {number: bool(used) for number, used in connection.execute(columns)}


def talk(store: Store, name: str, turns: int) -> tuple[Chat, dict[int, int]]:
    """A conversation of a long prompt with states inside it, and short turns. Returns the ids of those, by place."""
    chat = Chat(store, name, RECURRENT)
    turn, (first, second) = chat.make(f"{name}-0", None, [user(f"{name} asks 0")], "yes", 200)
    prompt = first.ids.own
    inside = [NewCheckpoint("prefix", Line.of(prompt[:p]), state_of(RECURRENT, prompt[:p])) for p in PLACES]
    placed = store.commit([turn], [chat.encode(c) for c in (*inside, first, second)], session=chat.info).checkpoints
    chat.remember(turn, placed[-1].id)
    for i in range(1, turns):
        chat.say(f"{name}-{i}", f"{name}-{i - 1}", f"{name} asks {i}", "yes")
    return chat, {place: one.id for place, one in zip(PLACES, placed, strict=False) if one.id is not None}


def come_back(chat: Chat, number: int, place: int) -> None:
    """Another first message begins alike, up to a place inside the prompt. Its turn goes on from the state there."""
    turn, (first, second) = chat.make(f"{chat.info.id}-edit", None, [user("other words")], "no", 200)
    begun = chat.turns[f"{chat.info.id}-0"].ids.own[:place]
    prompt = Line.of([*begun, *first.ids.own[place:]])
    first = replace(first, ids=prompt, state=state_of(RECURRENT, prompt.own), parent=number)
    whole = prompt.then(turn.ids.own[len(prompt) :])
    fed = whole.up_to(len(whole) - 1)
    second = replace(second, ids=fed, state=state_of(RECURRENT, fed.own), parent=first)
    chat.store.commit([replace(turn, ids=whole)], [chat.encode(first), chat.encode(second)], session=chat.info)


def test_a_state_is_used_once_another_turn_goes_on_from_it(store: Store) -> None:
    chat, inside = talk(store, "a", 1)
    assert not any(used(store).values()), "its own request does not count"
    come_back(chat, inside[80], 80)
    assert [number for number, one in used(store).items() if one] == [inside[80]]


def test_a_state_written_ahead_of_its_turn_is_not_used(store: Store) -> None:
    chat = Chat(store, "a", RECURRENT)
    turn, checkpoints = chat.make("a-0", None, [user("hello")], "yes")
    encoded = [chat.encode(c) for c in checkpoints]
    assert store.keep(encoded[0]).id is not None
    store.commit([turn], [encoded[0].without_data(), encoded[1]], session=chat.info)
    assert list(used(store).values()) == [False, False]


def test_evictions_take_what_was_never_used_first(store: Store) -> None:
    """A byte is missing each time. The states of old turns go one by one, the used ones of an age last."""
    _, inside = talk(store, "a", 12)
    store.bound_loose([inside[40]])  # a prompt without a turn came back to it
    order: list[int] = []
    while (size := store.bytes_stored()) > 0:
        before = set(used(store))
        store.collect(size - 1)
        order += sorted(before - set(used(store)))
    gone = {number: order.index(number) for number in inside.values()}
    assert gone[inside[80]] < 4 > gone[inside[120]], "of the oldest turn, inside its prompt, never used"
    assert gone[inside[40]] > len(order) / 2, "others may begin there too"


def test_a_thinned_session_keeps_used_places(store: Store) -> None:
    chat, inside = talk(store, "a", 12)
    store.bound_loose([inside[40]])
    other = Chat(store, "b", RECURRENT)
    other.clock = chat.clock
    store.quota = store.bytes_stored() * 2 // 3
    other.say("b-0", None, "hello", "yes")
    with store.reading() as connection:
        held = {h.id: h.used for h in read_holding(connection, "a").checkpoints}
    assert held.get(inside[40]) is True
    assert not {inside[80], inside[120]} & set(held)
    begun = chat.turns["a-0"].ids.own[:60].tolist()
    found = find(store, chat.scope, begun)
    assert found is not None
    assert found.position == 40


def test_used_places_of_old_turns_grow_sparser() -> None:
    """A client marks a place in each turn and comes back to it, as agents do. The first turn's place stays."""
    names = [f"a-{i}" for i in range(64)]
    held = [
        HeldCheckpoint(2 * i + at, name, ("prefix", "turn")[at], 100 * i + 50 * at, 1, (), shared=False, used=True)
        for i, name in enumerate(names)
        for at in (0, 1)
    ]
    parents = dict(zip(names, (None, *names), strict=False))
    depths = {name: i for i, name in enumerate(names)}
    gone = {one.id for one in thinned(SessionHoldings("a", names[-1], frozenset(), parents, depths, tuple(held), {}))}
    left = [one for one in held if one.id not in gone]
    assert [one.kind for one in left[:2]] == ["prefix", "turn"]
    assert {one.turn for one in left[:2]} == {"a-0"}
    assert len(left) <= 2 * (2 + 6), "two turns at the end, and one for each doubling of the age"


def test_use_is_known_after_a_restart(store: Store, tmp_path: Path) -> None:
    chat, inside = talk(store, "a", 12)
    come_back(chat, inside[40], 40)
    before = used(store)
    store.close()
    again = open_store(tmp_path / "data")
    assert used(again) == before
    again.close()


@pytest.mark.parametrize("back", PLACES)
def test_prompts_without_a_turn_lose_unused_places_first(store: Store, back: int) -> None:
    """States of raw prompts, and sealed ones: one request went on from a place inside, the last one from the end."""
    chat = Chat(store, "a", RECURRENT)
    ids = chat.make("a-0", None, [user("hello")], "yes", 200)[0].ids.own
    kept: dict[int, int] = {}

    def keep(place: int, above: int | None) -> None:
        new = NewCheckpoint("user", Line.of(ids[:place]), state_of(RECURRENT, ids[:place]), kept.get(above or 0))
        placed = store.keep(chat.encode(new))
        assert placed.id is not None
        kept[place] = placed.id

    for above, place in zip((None, *PLACES), (*PLACES, 160), strict=True):
        keep(place, above)
    store.bound_loose(made=list(kept.values()))
    store.bound_loose([kept[back]])
    keep(200, 160)
    store.bound_loose([kept[160]], [kept[200]])
    with store.reading() as connection:
        order = [one.id for one in in_order(connection, sealed=False)]
    assert set(order[:2]) == {kept[place] for place in PLACES if place != back}
    assert set(order[2:4]) == {kept[back], kept[160]}
    assert order[-1] == kept[200], "the end of a conversation goes last"
