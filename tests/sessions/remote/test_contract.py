"""Every kind of remote keeps a turn once, removes for good, and refuses what was altered."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from remotes import Place, turn

from ssmd.sessions.remote.remote import InvalidTurn, Remote, RemoteError, RemoteTurn, TurnPlace
from ssmd.sessions.turn import EVERYBODY, Domain


def at_once(place: Place, works: list[Callable[[Remote], object]], *, create: bool = False) -> list[BaseException]:
    """Do each piece of work with a remote of its own, all at the same time. Returns what was raised."""
    failed: list[BaseException] = []
    all_ = threading.Barrier(len(works))

    def run(work: Callable[[Remote], object]) -> None:
        try:
            all_.wait()
            opened = place.open(create=create)
            work(opened)
            opened.close()
        except BaseException as err:
            failed.append(err)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    return failed


def test_a_turn_is_found_by_the_last_chain(remote: Remote) -> None:
    first, second = turn("t1"), turn("t2")
    remote.publish([first, second])
    assert remote.known([first.chain, second.chain], EVERYBODY) == [second.place]
    assert remote.known([first.chain, bytes(32)], EVERYBODY) == [first.place]
    assert remote.known([bytes(32)], EVERYBODY) == remote.known([], EVERYBODY) == []
    assert remote.fetch(second.place) == second.body
    assert remote.fetch(TurnPlace("ses_1", "t3")) is remote.fetch(TurnPlace("ses_2", "t1")) is None
    assert sorted(remote.turns("ses_1")) == ["t1", "t2"]


def test_a_domain_sees_the_turns_of_its_owners(remote: Remote) -> None:
    mine, other = turn("t1", owner="ann", chain=bytes(32)), turn("t2", owner="bob", chain=bytes(32))
    remote.publish([mine, other])
    assert remote.known([bytes(32)], Domain("ann", ("ann",))) == [mine.place]
    assert remote.known([bytes(32)], EVERYBODY) == [mine.place, other.place]


def test_a_new_remote_is_made_by_one_of_many(place: Place) -> None:
    """Four daemons come to an empty place at once, and each sends a turn."""
    turns = [turn(f"t{i}") for i in range(4)]
    failed = at_once(place, [lambda its, one=one: its.publish([one]) for one in turns], create=True)  # type: ignore[misc]
    assert not failed
    opened = place.open()
    assert sorted(opened.turns("ses_1")) == ["t0", "t1", "t2", "t3"]
    opened.close()


def test_a_turn_that_is_published_twice_is_kept_once(remote: Remote, place: Place) -> None:
    """Four daemons send the same turns at once, in another order each."""
    turns = [turn(f"t{i}") for i in range(20)]
    assert not at_once(place, [lambda its, n=n: its.publish(turns[n:] + turns[:n]) for n in range(4)])  # type: ignore[misc]
    assert len([name for name in place.rows() if not name.startswith("chains/")]) == len(turns)
    assert [remote.fetch(one.place) for one in turns] == [one.body for one in turns]


def test_what_was_published_first_stays(remote: Remote) -> None:
    first = turn("t1")
    remote.publish([first])
    remote.publish([RemoteTurn(first.place, "", first.chain, b"other words")])
    assert remote.fetch(first.place) == first.body


def test_a_buried_session_never_returns(remote: Remote, place: Place) -> None:
    remote.publish([turn("t1"), turn("t2"), turn("o1", "ses_2")])
    remote.bury("ses_1", None)
    remote.publish([turn("t1"), turn("t3")])  # of a machine that has not heard of it
    assert remote.fetch(TurnPlace("ses_1", "t1")) is None
    assert remote.known([turn("t1").chain], EVERYBODY) == []
    assert remote.turns("ses_1") == []
    assert remote.buried() == {"ses_1"}
    assert remote.turns("ses_2") == ["o1"]
    assert not any("ses_1" in name for name in place.rows())


def test_a_buried_turn_leaves_the_others(remote: Remote) -> None:
    remote.publish([turn("t1"), turn("t2")])
    remote.bury("ses_1", "t2")
    remote.publish([turn("t2")])
    assert remote.turns("ses_1") == ["t1"]
    assert remote.known([turn("t1").chain, turn("t2").chain], EVERYBODY) == [TurnPlace("ses_1", "t1")]


def test_a_session_buried_while_it_is_sent_is_gone(remote: Remote, place: Place) -> None:
    """The tombstone may come between the look for it and the turn."""
    for round_ in range(25):
        session, both = f"ses_{round_}", threading.Barrier(2)

        def bury(session: str = session, both: threading.Barrier = both) -> None:
            both.wait()
            remote.bury(session, None)

        thread = threading.Thread(target=bury)
        thread.start()
        both.wait()
        remote.publish([turn(f"t{i}", session) for i in range(4)])
        thread.join()
        assert {name for name in place.rows() if f"{session}/" in name or f"{session}~" in name} == set()


@pytest.mark.parametrize("part", ["digest", "body"])
def test_an_altered_turn_is_refused_and_written_again(part: str, remote: Remote, place: Place) -> None:
    remote.publish([turn("t1")])
    place.alter(TurnPlace("ses_1", "t1"), part)
    with pytest.raises(InvalidTurn, match=r"is not what its digest says|is damaged"):
        remote.fetch(TurnPlace("ses_1", "t1"))
    remote.publish([turn("t1")])
    assert remote.fetch(TurnPlace("ses_1", "t1")) == turn("t1").body


def test_a_turn_of_a_newer_version_is_left_alone(remote: Remote, place: Place) -> None:
    remote.publish([turn("t1")])
    place.make_newer(TurnPlace("ses_1", "t1"))
    for _ in range(2):
        with pytest.raises(InvalidTurn, match="of another version"):
            remote.fetch(TurnPlace("ses_1", "t1"))
        remote.publish([turn("t1")])
    remote.bury("ses_1", None)
    assert not place.rows()


def test_a_state_takes_the_place_of_the_one_before(remote: Remote, place: Place) -> None:
    """Its row comes after its pack, and both go with the session."""
    packs = remote.packs
    assert packs is not None
    remote.publish([turn("t1"), turn("t2")])
    names = [packs.put([b"state ", name]) for name in (b"1", b"2", b"3")]
    first, second = TurnPlace("ses_1", "t1"), TurnPlace("ses_1", "t2")
    remote.publish_end(first, names[0], b"of t1", [])
    remote.publish_end(second, names[1], b"of t2", ["t1"])
    assert (remote.ends("ses_1"), remote.end(first), remote.end(second)) == (["t2"], None, b"of t2")
    remote.publish_end(second, names[2], b"again", [])
    assert [packs.there(name) for name in names] == [False, False, True]
    assert packs.get(names[2], 7) == b"state 3"
    remote.bury("ses_1", None)
    remote.publish_end(second, packs.put([b"state 4"]), b"of a machine that has not heard", [])
    assert remote.end(second) is None
    assert not place.rows()


def test_a_remote_that_is_away_is_named(remote: Remote, place: Place) -> None:
    remote.publish([turn("t1")])
    place.go_away()
    steps: list[Callable[[], object]] = [
        lambda: remote.publish([turn("t2", "ses_9")]),
        remote.buried,
        lambda: place.open(create=True),
    ]
    for step in steps:
        with pytest.raises(RemoteError, match=r"cannot be used|is it mounted"):
            step()
    place.come_back()
    remote.publish([turn("t2")])
    assert sorted(remote.turns("ses_1")) == ["t1", "t2"]


def test_an_empty_place_is_no_remote_any_more(place: Place) -> None:
    with pytest.raises(RemoteError, match="holds no remote any more"):
        place.open()
    place.open(create=True).close()
    place.open().close()
