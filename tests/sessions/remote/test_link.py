"""A link whose remote lies, hangs or is full: the requests beside it are served, and the rest is sent later."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from keeping import SPECS, Chat, user
from sessions.remote.test_ends import SECOND, Roaming, until

from ssmd.sessions.remote import link as link_module
from ssmd.sessions.remote.ends import send_end
from ssmd.sessions.remote.link import FIRST_BYTES_PER_S, Link
from ssmd.sessions.remote.remote import RemoteError
from ssmd.sessions.remote.sending import send
from ssmd.text.messages import Message


@pytest.fixture
def roaming(tmp_path: Path) -> Roaming:
    """Return two stores and a remote, which has a conversation with its state."""
    roaming = Roaming(tmp_path, SPECS["hybrid"])
    send_end(roaming.a, roaming.remote, "ses_1")
    return roaming


def bring(link: Link, roaming: Roaming, said: list[Message] | None = None, **changes: Any) -> None:
    reader = replace(roaming.reader, **changes)
    link.bring(roaming.said() if said is None else said, roaming.b.domain, None, reader)


def asks(link: Link) -> bool:
    """Return True if the link would ask the remote for the next request."""
    return link._may_ask()


def another(roaming: Roaming, session: str) -> list[Message]:
    """Share one more conversation with its state. Returns a request that goes on with it."""
    Chat(roaming.a, session, roaming.spec).say(f"{session}_1", None, f"Of {session}.", "Yes.")
    send(roaming.a, roaming.remote)
    send_end(roaming.a, roaming.remote, session)
    return [m for t in roaming.a.turns(session) for m in t.conversation] + [user("And then?")]


def slowly(roaming: Roaming, monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Semaphore, threading.Event]:
    """Let packs come once the event is set. Returns a count of the fetches that began, and the event."""
    began, go_on, get = threading.Semaphore(0), threading.Event(), roaming.remote.packs.get

    def slow(name: str, nbytes: int) -> bytes:
        began.release()
        go_on.wait(60)
        return get(name, nbytes)

    monkeypatch.setattr(roaming.remote.packs, "get", slow)
    return began, go_on


def test_a_fetch_holds_no_other_look_up_up(roaming: Roaming, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else another request's conversation would go on as a new one. States are fetched one at a time all the same."""
    others = [another(roaming, f"ses_{n}") for n in range(2, 5)]
    began, go_on = slowly(roaming, monkeypatch)
    link = roaming.link()
    threads = [threading.Thread(target=bring, args=(link, roaming), kwargs={"ms_per_token": 1e3})]
    threads[0].start()
    began.acquire()
    threads += [
        threading.Thread(target=bring, args=(link, roaming, said), kwargs={"ms_per_token": 1e3}) for said in others
    ]
    for thread in threads[1:]:
        thread.start()
    until(lambda: len(roaming.b.sessions(9)) == 4)
    assert not began.acquire(timeout=0.5)
    go_on.set()
    for thread in threads:
        thread.join()
    assert roaming.found("ses_1")[0] > 0


def test_a_lie_on_length_makes_no_request_wait(roaming: Roaming, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "MOST_S", 2.0)
    row, position = roaming.row(), 200_000  # 300 s of reading
    each = 4 + roaming.spec.nbytes_at(2) - roaming.spec.nbytes_at(1)
    forged = row | {"position": position, "nbytes": row["nbytes"] + (position - row["position"]) * each}
    roaming.remote.publish_end(SECOND, row["pack"], roaming.signed(forged), [])
    began, go_on = slowly(roaming, monkeypatch)
    thread = threading.Thread(target=bring, args=(roaming.link(), roaming))
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    assert began.acquire(blocking=False)
    go_on.set()
    assert [t.id for t in roaming.b.turns("ses_1")] == ["t1", "t2"]


def test_a_pack_that_did_not_come_says_no_bandwidth(roaming: Roaming) -> None:
    roaming.packs()[0].unlink()
    link = roaming.link()
    bring(link, roaming)
    assert [t.id for t in roaming.b.turns("ses_1")] == ["t1", "t2"]
    assert link._bandwidth.bytes_per_s == FIRST_BYTES_PER_S


def _raising(err: BaseException) -> Callable[..., Any]:
    def fail(*_: object) -> Any:
        raise err

    return fail


def test_a_state_without_room_leaves_the_text(roaming: Roaming, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store's disk has room for words alone. The remote is asked for the next request all the same."""
    link = roaming.link()
    monkeypatch.setattr(roaming.b.room, "holds", lambda *_: False)
    bring(link, roaming)
    assert [t.id for t in roaming.b.turns("ses_1")] == ["t1", "t2"]
    assert roaming.found("ses_1") == (0, None)
    assert asks(link)


def test_a_state_beyond_memory_leaves_the_text(roaming: Roaming, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roaming.remote.packs, "get", _raising(MemoryError()))
    link = roaming.link()
    bring(link, roaming)
    assert [t.id for t in roaming.b.turns("ses_1")] == ["t1", "t2"]
    assert asks(link)


def test_a_full_remote_is_tried_with_one_state(
    roaming: Roaming, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In each round another one, so that one which fails for ever holds no other up."""
    for n in range(2, 5):
        another(roaming, f"ses_{n}")
    tried: list[str] = []

    def full(store: object, remote: object, session: str, allowance: object) -> int:
        tried.append(session)
        raise RemoteError("its disk is full")

    now = [0.0]
    link = Link(roaming.a, lambda: roaming.remote, lambda: now[0])
    link._remember()
    monkeypatch.setattr(link_module, "send_end", full)
    with caplog.at_level(logging.WARNING):
        for round_ in range(1, 5):
            now[0] += 10
            link._send_ends(roaming.remote)
            assert len(tried) == round_
    assert len(set(tried)) == 4


def test_a_daemon_that_stops_sends_all_ends(roaming: Roaming, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if its thread is at the state of another conversation then."""
    began, go_on = threading.Event(), threading.Event()

    def slow(*args: Any) -> int:
        began.set()
        go_on.wait(60)
        return send_end(*args)

    monkeypatch.setattr(link_module, "send_end", slow)
    now = [0.0]
    link = Link(roaming.a, lambda: roaming.remote, lambda: now[0])
    link.start()
    time.sleep(0.2)
    now[0] += 10
    link._wake.set()
    began.wait(60)
    Chat(roaming.a, "ses_2").say("o1", None, "Another.", "Yes.")
    closing = threading.Thread(target=link.close)
    closing.start()
    until(link._stopped.is_set)
    go_on.set()
    closing.join()
    assert roaming.remote.ends("ses_2") == ["o1"]
