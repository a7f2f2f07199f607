"""A pull ends with the daemon that began it, however that ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import mirror
import pytest
from conftest import TinyArtifacts
from daemon import soon

from ssmd.refit import catalog

NAME = "mamba-130m"
DAEMON = """
import sys, time
from pathlib import Path
from ssmd.daemon.pulls import Pulls
pulls = Pulls(Path(sys.argv[1]) / "models", Path(sys.argv[1]) / "data")
pulls.begin(sys.argv[2], None)
while not pulls.rows()[0]["done"]:
    time.sleep(0.02)
print(pulls._pulls[0].process.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
@pytest.mark.parametrize("sign", ["SIGKILL", "SIGINT"])
def test_it_ends_when_the_daemon_does(sign: str, artifacts: TinyArtifacts, tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "data").mkdir(mode=0o700)
    kept = {k: v for k, v in os.environ.items() if not k.startswith("HF_") and not k.lower().endswith("_proxy")}
    with mirror.running(catalog.origin_of(NAME), artifacts.source("llama-f32")) as hub:
        hub.stalls["model.safetensors"] = 200_000
        hub.files["config.json"] = mirror.fitting(NAME)
        hub.commit_now()
        environment = kept | {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf")}
        command = [sys.executable, "-c", DAEMON, str(tmp_path), NAME]
        with subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, preexec_fn=_interruptible, stderr=subprocess.DEVNULL
        ) as daemon:
            assert daemon.stdout is not None
            pid = int(daemon.stdout.readline())
            assert _is_there(pid)
            assert os.getpriority(os.PRIO_PROCESS, pid) >= 15
            daemon.send_signal(signal.Signals[sign])
        soon(lambda: not _is_there(pid), within_s=60)
        hub.going.set()
    assert [path for path in (tmp_path / "models").rglob("*") if path.is_file()] == []


def _interruptible() -> None:
    """Python leaves SIGINT ignored where a shell started the tests in the background."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _is_there(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
