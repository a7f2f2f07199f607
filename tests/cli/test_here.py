"""The daemon of one command: it answers only its own process, and what it leaves behind."""

from __future__ import annotations

import stat
import tempfile
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import TinyArtifacts

from ssmd.cli.chat.here import serving_here
from ssmd.config import Settings
from ssmd.daemon.client import Client
from ssmd.daemon.discovery import DaemonError
from ssmd.model.made import note


@pytest.mark.parametrize("folder", ["short", "long" * 40])
def test_it_answers_its_own_process_alone(
    artifacts: TinyArtifacts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    """At a socket in a folder of its own; where that cannot be at a port. Both ask for the token."""
    (tmp_path / folder).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / folder))
    settings = Settings(data_dir=tmp_path / "data")
    settings.prepare()
    note(artifacts["llama-f32"], settings.data_dir)
    before = set(threading.enumerate())
    with serving_here(settings, str(artifacts["llama-f32"]), keep=True) as address:
        assert [one["id"] for one in Client(address).get("/v1/models")["data"]] == ["llama"]
        with pytest.raises(DaemonError, match="the API key is wrong") as refused:
            Client(replace(address, token="t" * 43)).get("/v1/models")
        assert refused.value.status == 401
        if folder == "short":
            assert address.socket is not None
            assert stat.S_IMODE(address.socket.stat().st_mode) == 0o600
            assert stat.S_IMODE(address.socket.parent.stat().st_mode) == 0o700
        else:
            assert address.url is not None
            assert address.url.startswith("http://127.0.0.1:")
    assert list((tmp_path / folder).iterdir()) == []
    assert not [t for t in set(threading.enumerate()) - before if t.name in ("ssmd-here", "ssmd-worker")]
    with pytest.raises(DaemonError, match="does not answer"):
        Client(address, 2).get("/v1/models")
