"""One daemon to a data directory, however the one before it ended; the commands work beside it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import commands
import pytest
from conftest import TinyArtifacts
from daemon import soon
from forked import DaemonProcess
from standing import held_elsewhere

from ssmd.machine.lockfile import LOCK_FILE
from ssmd.sessions.fsck.repair import check
from ssmd.sessions.rows.database import FILE
from ssmd.sessions.rows.lock import DirectoryLock
from ssmd.sessions.store import Store
from ssmd.sessions.turn import StoreError


def test_it_is_held_by_one(tmp_path: Path) -> None:
    held = DirectoryLock.take(tmp_path, "wait")
    with pytest.raises(StoreError, match=rf"another ssmd daemon \(process {os.getpid()}\) uses .*: wait"):
        DirectoryLock.take(tmp_path, "wait")
    held.release()
    held.release()
    again = DirectoryLock.take(tmp_path, "wait")
    assert (tmp_path / LOCK_FILE).stat().st_mode & 0o777 == 0o600
    again.release()


def test_a_killed_process_holds_nothing(tmp_path: Path) -> None:
    with held_elsewhere(tmp_path) as pid, pytest.raises(StoreError, match=f"process {pid}"):
        DirectoryLock.take(tmp_path, "wait")
    DirectoryLock.take(tmp_path, "wait").release()


def test_what_lies_in_its_place(tmp_path: Path) -> None:
    (tmp_path / LOCK_FILE).write_text("not a number\x1b[2J" * 100)
    held = DirectoryLock.take(tmp_path, "wait")
    (tmp_path / LOCK_FILE).write_text("\x1b[2J")
    with pytest.raises(StoreError) as caught:
        DirectoryLock.take(tmp_path, "wait")
    assert "\x1b" not in str(caught.value)
    held.release()
    (tmp_path / LOCK_FILE).unlink()
    (tmp_path / LOCK_FILE).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match="cannot use"):
        DirectoryLock.take(tmp_path, "wait")
    assert not (tmp_path / "elsewhere").exists()


def test_a_second_daemon(artifacts: TinyArtifacts, tmp_path: Path) -> None:
    """Refused at once and by name; commands work beside the first; a killed one leaves nothing in the way."""
    path, data = artifacts["llama-f32"], tmp_path / "data"
    environment = {**os.environ, "SSMD_DATA_DIR": str(data)}

    def ssmd(*args: str) -> subprocess.CompletedProcess[str]:
        return commands.ssmd(*args, env=environment)

    with DaemonProcess(path, data, "--quota", "100MB") as daemon:
        assert daemon.process is not None
        second = ssmd("serve", str(path), "--port", "0")
        assert second.returncode == 1
        assert second.stderr.startswith(f"error: another ssmd daemon (process {daemon.process.pid}) uses {data}: ")
        assert second.stderr.count("\n") == 1
        reply = daemon.chat([{"role": "user", "content": "Tell me a story"}], max_tokens=4)
        assert reply.session is not None
        assert ssmd("session", "pin", reply.session).returncode == 0
        assert ssmd("session", "check").returncode == 0
        refused = ssmd("session", "check", "--repair")
        assert refused.returncode == 1
        assert "stop it, then repair" in refused.stderr
        metrics = daemon.get("/ssmd/v1/metrics")[1]
        assert 0 < metrics["stored_bytes"] <= metrics["quota_bytes"] == 100_000_000
        daemon.kill()
        assert ssmd("session", "check", "--repair").returncode == 0
        daemon.start()
    beside = ssmd("serve", str(path), "--no-store", "--port", "999999")
    assert "daemon" not in beside.stderr, "one that keeps nothing needs no lock"


def test_a_quota_that_became_smaller(artifacts: TinyArtifacts, tmp_path: Path) -> None:
    path, data = artifacts["granite-f32"], tmp_path / "data"
    with DaemonProcess(path, data) as daemon:
        for i in range(3):
            daemon.chat([{"role": "user", "content": f"Tell me story {i}"}], max_tokens=4)
        stored = daemon.get("/ssmd/v1/metrics")[1]["stored_bytes"]
    with DaemonProcess(path, data, "--quota", str(stored // 2)) as daemon:
        assert daemon.get("/ssmd/v1/metrics")[1]["stored_bytes"] <= stored // 2
        assert len(daemon.get("/ssmd/v1/sessions")[1]["data"]) == 3
        reply = daemon.chat([{"role": "user", "content": "Tell me story 9"}], max_tokens=4)
        assert reply.usage["ssmd"]["stored"]
        assert 0 < daemon.get("/ssmd/v1/metrics")[1]["stored_bytes"] <= stored // 2
    with DaemonProcess(path, data, "--quota", "10") as daemon:
        reply = daemon.chat([{"role": "user", "content": "Tell me story 10"}], max_tokens=4)
        assert reply.usage["ssmd"]["stored"], "the turn is; its states are not, and that is counted"
        metrics = daemon.get("/ssmd/v1/metrics")[1]
        assert metrics["stored_bytes"] == 0
        assert metrics["checkpoints"]["left_out"] > 0


def test_a_second_daemon_is_refused_without_the_lock_file(artifacts: TinyArtifacts, tmp_path: Path) -> None:
    """An idle daemon looks once a minute, so this comes before it made its lock again."""
    path, data = artifacts["llama-f32"], tmp_path / "data"
    environment = {**os.environ, "SSMD_DATA_DIR": str(data)}
    with DaemonProcess(path, data) as daemon:
        (data / LOCK_FILE).unlink()
        second = commands.ssmd("serve", str(path), "--port", "0", env=environment)
        assert (second.returncode, second.stderr.count("\n")) == (1, 1)
        assert second.stderr.startswith("error: another ssmd daemon")
        soon(lambda: daemon.get("/health")[0] == 200 and commands.ssmd("ps", env=environment).returncode == 0)
        assert daemon.stop() == 0
    DirectoryLock.take(data, "wait").release()


@pytest.mark.parametrize("other", [False, True], ids=["moved", "another in its place"])
def test_a_store_that_is_moved_is_noticed_at_once(other: bool, artifacts: TinyArtifacts, tmp_path: Path) -> None:
    """Also by a daemon that stores nothing just then. When the same files are back, it stores again."""
    path, data, aside = artifacts["llama-f32"], tmp_path / "data", tmp_path / "aside"
    asked = [{"role": "user", "content": "Tell me a story"}]
    with DaemonProcess(path, data) as daemon:
        assert daemon.chat(asked, max_tokens=4).usage["ssmd"]["stored"]
        data.rename(aside)
        if other:
            shutil.copytree(aside, data)
        soon(lambda: daemon.get("/health")[1].get("reason") == "replaced")
        assert not daemon.chat(asked, max_tokens=4).usage["ssmd"]["stored"]
        if other:
            data.rename(tmp_path / "other")
        aside.rename(data)
        soon(lambda: daemon.get("/health")[1]["status"] == "ok")
        assert daemon.chat(asked, max_tokens=4).usage["ssmd"]["stored"]
        assert daemon.stop() == 0
    said = (tmp_path / "data.log").read_text()
    assert said.count("turns cannot be stored") == 1
    with closing(Store.open(data)) as store:
        assert len(store.sessions()) == 2


@pytest.mark.skipif(sys.platform == "win32", reason="the log's index is locked there")
def test_a_backup_that_is_copied_over_a_store_stays_whole(artifacts: TinyArtifacts, tmp_path: Path) -> None:
    """The daemon keeps the file open, under the same inode. Restarted, it goes on from the backup."""
    path, data, backup = artifacts["llama-f32"], tmp_path / "data", tmp_path / "backup"
    asked = [{"role": "user", "content": "Tell me a story"}]
    with DaemonProcess(path, data) as daemon:
        kept = daemon.chat(asked, max_tokens=4).session
        done = commands.ssmd("backup", str(backup), env={**os.environ, "SSMD_DATA_DIR": str(data)})
        assert done.returncode == 0, done.stderr
        for _ in range(3):
            assert daemon.chat(asked, max_tokens=40).usage["ssmd"]["stored"]
        shutil.copyfile(backup / FILE, data / FILE)
        assert not daemon.chat(asked, max_tokens=4).usage["ssmd"]["stored"]
        soon(lambda: daemon.get("/health")[1].get("reason") == "replaced")
        assert daemon.stop() == 0
        assert (data / FILE).read_bytes() == (backup / FILE).read_bytes()
        daemon.start()
        assert [one["id"] for one in daemon.get("/ssmd/v1/sessions")[1]["data"]] == [kept]
        assert daemon.chat(asked, max_tokens=4).usage["ssmd"]["stored"]
    assert check(data).damages == ()


def test_a_daemon_whose_files_are_removed(artifacts: TinyArtifacts, tmp_path: Path) -> None:
    """It locks the directory again, so that a second one is refused; without its database no turn is called stored."""
    path, data = artifacts["llama-f32"], tmp_path / "data"
    asked = [{"role": "user", "content": "Tell me a story"}]
    with DaemonProcess(path, tmp_path / "other") as daemon:
        assert daemon.chat(asked, max_tokens=4).usage["ssmd"]["stored"]
        (tmp_path / "other" / f"{FILE}-wal").unlink()
        assert not daemon.chat(asked, max_tokens=4).usage["ssmd"]["stored"]
        assert daemon.stop() == 0
    with DaemonProcess(path, data) as daemon:
        (data / LOCK_FILE).unlink()
        soon(lambda: daemon.get("/health")[0] == 200 and (data / LOCK_FILE).exists())
        second = commands.ssmd("serve", str(path), "--port", "0", env={**os.environ, "SSMD_DATA_DIR": str(data)})
        assert second.stderr.startswith("error: another ssmd daemon")
        assert daemon.chat(asked, max_tokens=4).usage["ssmd"]["stored"]
        while data.exists():  # the daemon may make its lock again meanwhile
            shutil.rmtree(data, ignore_errors=True)
        assert not daemon.chat(asked, max_tokens=4).usage["ssmd"]["stored"]
        health = daemon.get("/health")[1]
        assert (health["status"], health["reason"]) == ("degraded", "replaced")
        assert daemon.stop() == 0
    assert "Traceback" not in (tmp_path / "data.log").read_text()
