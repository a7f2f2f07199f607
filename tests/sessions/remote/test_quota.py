"""A quota a machine: beyond it turns wait here and removals go, so that nothing is lost and room can be made."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import commands
import pytest
from conftest import TinyArtifacts
from keeping import SPECS, Chat, new_store
from remotes import DatabasePlace, FolderPlace, Place, turn
from sessions.remote.test_retention import DAY_S, age
from sessions.remote.test_roaming import Machine, Messages, until

from ssmd.sessions.remote import allowance as allowance_module
from ssmd.sessions.remote import link as link_module
from ssmd.sessions.remote import sending
from ssmd.sessions.remote.allowance import Allowance, OverQuota
from ssmd.sessions.remote.ends import send_end
from ssmd.sessions.remote.link import Link
from ssmd.sessions.remote.recovery import mark_of
from ssmd.sessions.remote.remote import Quota, Remote, RemoteError, TurnPlace
from ssmd.sessions.remote.retention import Retention
from ssmd.sessions.remote.sending import send
from ssmd.sessions.rows.outbox import Mark
from ssmd.sessions.store import Store

LAPTOP, DESKTOP = Mark("", "laptop", 0), Mark("", "desktop", 0)


def limit(place: Place, nbytes: int, machine: str = "") -> None:
    """Set a quota as an administrator does. machine: "" for each one."""
    if isinstance(place, FolderPlace):
        (place.root / "quotas").mkdir(exist_ok=True)
        (place.root / "quotas" / (machine or "all")).write_text(f"{nbytes}\n")
    else:
        assert isinstance(place, DatabasePlace)
        place.sql(
            f"INSERT INTO ssmd.quota VALUES ('ssmd', '{machine}', {nbytes}) "
            "ON CONFLICT (role, machine) DO UPDATE SET nbytes = excluded.nbytes"
        )


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = new_store(tmp_path / "data")
    made.shares = lambda: None
    yield made
    made.close()


def used(remote: Remote, machine: str) -> int:
    found = remote.quota(machine)
    assert found is not None
    return found.used


def test_bytes_count_for_the_machine_that_sent_them(remote: Remote, place: Place) -> None:
    assert remote.packs is not None
    assert remote.quota("laptop") is None
    limit(place, 500)
    assert remote.quota("laptop") == Quota(500, 0)
    remote.publish([turn("t1"), turn("t2")], LAPTOP)
    remote.publish([turn("t1")], DESKTOP)  # it is there, as the laptop's
    remote.publish([turn("t3")])  # of a copy
    text = used(remote, "laptop")
    assert text >= len(turn("t1").body + turn("t2").body)
    assert used(remote, "desktop") == 0
    row = b"the row"
    for name, older, size, machine in (("t1", [], 1000, "laptop"), ("t2", ["t1"], 3000, "desktop")):
        pack = remote.packs.put([bytes(size)])
        remote.publish_end(TurnPlace("ses_1", name), pack, row, older, machine=machine, nbytes=size)
        assert used(remote, machine) >= size + len(row)
    assert used(remote, "laptop") == text  # the desktop's state took the place of its own
    limit(place, 700, "laptop")
    assert [remote.quota(one).limit for one in ("laptop", "desktop")] == [700, 500]  # type: ignore[union-attr]
    remote.bury("ses_1", None)
    assert [used(remote, one) for one in ("laptop", "desktop")] == [0, 0]


def test_turns_wait_and_removals_go(store: Store, remote: Remote, place: Place) -> None:
    """A removal makes room. Nothing is lost: what waited goes when there is room for it."""
    Chat(store, "ses_1").say("t1", None, "Tell me of a river.", "It flows." * 100)
    send(store, remote)
    machine = mark_of(store, remote).machine
    limit(place, 1)
    limit(place, used(remote, machine) + 100)
    Chat(store, "ses_2").say("o1", None, "And a lake?", "It is still.")
    allowance = Allowance()
    with pytest.raises(OverQuota, match=r"this machine has .* of .* in .*: remove conversations") as failed:
        send(store, remote, allowance=allowance)
    assert (failed.value.refused, failed.value.reason) == (True, "over_quota")
    assert (remote.turns("ses_1"), remote.turns("ses_2")) == (["t1"], [])
    store.delete("ses_1")  # its tombstone stands behind the turn that waits
    with pytest.raises(OverQuota):
        send(store, remote, allowance=allowance)
    assert (remote.turns("ses_1"), set(remote.buried())) == ([], {"ses_1"})
    assert send(store, remote) == 1
    assert remote.turns("ses_2") == ["o1"]


def test_what_was_sent_before_the_limit_is_not_sent_again(
    store: Store, remote: Remote, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "MAX_GROUP_BYTES", 1)  # a turn each
    chat, last = Chat(store, "ses_1"), None
    for n in range(4):
        chat.say(f"t{n}", last, f"Question {n}?", "Yes.")
        last = f"t{n}"
    limit(place, 5000)
    with pytest.raises(OverQuota):
        send(store, remote)
    there = sorted(remote.turns("ses_1"))
    assert there in (["t0"], ["t0", "t1"], ["t0", "t1", "t2"])
    link = Link(store, lambda: remote)
    assert link.waiting == 4 - len(there)
    assert [link.state([f"t{n}"]) for n in (0, 3)] == ["sent", "waiting"]
    limit(place, 10**6)
    assert send(store, remote) == 4 - len(there)


def test_a_link_says_once_that_turns_wait(
    store: Store, remote: Remote, place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It goes on by itself when there is room."""
    caplog.set_level(logging.DEBUG)
    for module, name in ((link_module, "OFFLINE_S"), (allowance_module, "AGAIN_S"), (allowance_module, "COUNT_S")):
        monkeypatch.setattr(module, name, 0.05)
    limit(place, 10)
    link = Link(store, lambda: place.open())
    link.connect()
    link.start()
    Chat(store, "ses_1").say("t1", None, "Tell me of a river.", "It flows.")
    until(lambda: link.problem == "over_quota")
    assert (link.state(["t1"]), link.waiting) == ("waiting", 1)
    until(lambda: sum("what was said waits here" in one.message for one in caplog.records) > 3)
    said = [one.levelname for one in caplog.records if "what was said waits here" in one.message]
    assert said.count("WARNING") == 1
    limit(place, 10**6)
    until(lambda: link.problem == "" and link.waiting == 0)
    assert remote.turns("ses_1") == ["t1"]
    link.close()


def test_a_link_says_each_reason_for_waiting(
    store: Store, remote: Remote, place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The remote is away first, and then the quota is reached: a user has to do something else about it."""
    monkeypatch.setattr(link_module, "OFFLINE_S", 0.05)
    limit(place, 10)
    Chat(store, "ses_1").say("t1", None, "Tell me of a river.", "It flows.")
    link = Link(store, lambda: place.open())
    link.failed(RemoteError("it cannot be reached"))
    link.start()
    until(lambda: link.problem == "over_quota")
    link.close()
    said = [one.message for one in caplog.records if "what was said waits here" in one.message]
    assert len(said) == 2
    assert "it cannot be reached" in said[0]
    assert "this machine has" in said[1]


def test_a_use_is_noted_while_turns_wait(
    store: Store, remote: Remote, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else retention would take the states that a machine without room uses most."""
    assert remote.packs is not None
    one = turn("o1", "ses_9")
    remote.publish([one])
    remote.publish_end(one.place, remote.packs.put([b"a state"]), b"row", [])
    age(place, "ses_9", 30)
    limit(place, 10)
    Chat(store, "ses_1").say("t1", None, "Tell me of a river.", "It flows.")
    link = Link(store, lambda: place.open())
    link._fetched.add(one.place)
    link.start()
    until(lambda: link.problem == "over_quota")
    assert remote.retain(Retention(idle_s=DAY_S), dry_run=True).states == 0
    link.close()


@pytest.mark.skipif(os.name != "posix", reason="needs links")
def test_an_odd_file_does_not_keep_turns_back(store: Store, tmp_path: Path) -> None:
    """A link or a folder among the turns counts for no machine."""
    place = FolderPlace(tmp_path / "remote")
    remote = place.open(create=True)
    remote.publish([turn("t1", "ses_9"), turn("t2", "ses_9")])
    for name, kind in (("t1", "link"), ("t2", "folder")):
        [file] = place.root.glob(f"sessions/*/*/{name}")
        file.unlink()
        if kind == "link":
            file.symlink_to("/dev/null")
        else:
            file.mkdir()
    limit(place, 10**6)
    Chat(store, "ses_1").say("t3", None, "Tell me of a river.", "It flows.")
    assert send(store, remote) == 1


def test_states_leave_room_for_text(store: Store, remote: Remote, place: Place) -> None:
    """There would be room for the state itself, but not for much text after it."""
    assert remote.packs is not None
    for name in ("ses_1", "ses_2"):
        Chat(store, name, SPECS["hybrid"]).say(f"{name}_1", None, "Tell me of a river.", "It flows.")
    send(store, remote)
    nbytes = send_end(store, remote, "ses_1", Allowance())
    limit(place, 10**9)
    machine = mark_of(store, remote).machine
    before = used(remote, machine)
    assert before > nbytes > 0
    limit(place, before + nbytes)
    assert send_end(store, remote, "ses_2", Allowance()) == 0
    assert len(remote.packs.names()) == 1
    limit(place, 2 * (before + nbytes))
    assert send_end(store, remote, "ses_2", Allowance()) == nbytes
    assert used(remote, machine) > before + nbytes


class Counted:
    """A remote that counts how often it is asked for a quota."""

    name = "remote"

    def __init__(self, quota: Quota | None) -> None:
        self.found, self.asked = quota, 0

    def quota(self, machine: str) -> Quota | None:
        self.asked += 1
        return self.found


def test_bytes_are_counted_seldom() -> None:
    """Also without a quota: a look at each sending would cost a round trip."""
    now = [0.0]
    for quota in (None, Quota(1000, 0)):
        remote, allowance = Counted(quota), Allowance(lambda: now[0])
        for _ in range(9):
            allowance.take(remote, "m", 100)  # type: ignore[arg-type]
        assert remote.asked == 1
    allowance.take(remote, "m", 100)  # type: ignore[arg-type]
    remote.found = Quota(1000, 1000)
    for _ in range(3):
        with pytest.raises(OverQuota):
            allowance.take(remote, "m", 1)  # type: ignore[arg-type]
    assert remote.asked == 1
    now[0] += allowance_module.AGAIN_S
    with pytest.raises(OverQuota):
        allowance.take(remote, "m", 1)  # type: ignore[arg-type]
    assert remote.asked == 2
    remote.found, now[0] = Quota(1000, 500), now[0] + allowance_module.AGAIN_S
    allowance.take(remote, "m", 1)  # type: ignore[arg-type]


@pytest.mark.parametrize("said", ["5GB", "", "-1", "1e9", "²"])
def test_a_quota_that_is_no_number_is_named(said: str, tmp_path: Path) -> None:
    place = FolderPlace(tmp_path / "remote")
    remote = place.open(create=True)
    limit(place, 5)
    (place.root / "quotas" / "all").write_text(said)
    with pytest.raises(RemoteError, match="all is not a number of bytes"):
        remote.quota("laptop")


def test_a_daemon_beyond_its_quota_answers(artifacts: TinyArtifacts, tmp_path: Path, place: Place) -> None:
    place.open(create=True).close()
    limit(place, 10)
    machine, said = Machine(tmp_path / "data", artifacts["llama-f32"], place.setting), Messages()
    with machine.daemon:
        own = machine.say(said, "Tell me of a river.")
        assert (own["stored"], own["remote"]) == (True, "waiting")
        until(lambda: machine.remote()["status"] == "over_quota")
        assert "as many bytes in the remote as it may" in machine.remote()["message"]
        assert machine.remote()["waiting"] == 1
        assert machine.say(said, "And then?")["session"] == own["session"]


def test_stats_name_the_machine_and_its_quota(store: Store, remote: Remote, place: Place) -> None:
    Chat(store, "ses_1").say("t1", None, "Tell me of a river.", "It flows.")
    send(store, remote)
    limit(place, 5 * 10**9)
    machine = mark_of(store, remote).machine
    env = {**os.environ, "SSMD_DATA_DIR": str(store.file.parent)}
    told = commands.ssmd("store", "stats", "--remote", place.setting, "--json", env=env)
    assert told.returncode == 0, told.stderr
    found = json.loads(told.stdout)
    assert (found["machine"], found["quota"]) == (machine, {"limit": 5 * 10**9, "used": used(remote, machine)})
    assert f"{machine}, " in (said := commands.ssmd("store", "stats", "--remote", place.setting, env=env).stdout)
    assert "of 5.0 GB" in said
