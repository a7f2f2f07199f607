"""Daemons as processes, found and asked by the commands: `ps`, `stop`, `logs`, and a second `serve`."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.request import urlopen

import commands
import pytest
from conftest import TinyArtifacts
from daemon import CHAT, NO_END, request, soon
from test_server import at_socket, environment, failing, long_stream, running, start

from ssmd.daemon import ending
from ssmd.daemon.client import Client
from ssmd.daemon.discovery import FILE, Address, DaemonError, announce, find
from ssmd.daemon.discovery import running as holder
from ssmd.daemon.logfile import FILE as LOG


@pytest.fixture(scope="module")
def artifact(artifacts: TinyArtifacts) -> Path:
    return artifacts["llama-f32"]


def ssmd(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return commands.ssmd(*arguments, env=environment(tmp_path))


def found(data: Path) -> Address:
    one = find(data)
    assert one is not None
    return one


def test_from_its_start_to_its_end(artifact: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    none = ssmd(tmp_path, "ps")
    assert (none.returncode, none.stdout) == (1, "")
    assert none.stderr == f"error: no daemon runs on {data}; start one with: ssmd serve\n"
    nothing = ssmd(tmp_path, "stop")
    assert (nothing.returncode, nothing.stdout, nothing.stderr) == (0, "", f"no daemon runs on {data}\n")
    assert "no daemon has run there" in ssmd(tmp_path, "logs").stderr
    with running(tmp_path, str(artifact)) as (process, served):
        one = found(data)
        assert (one.url, one.pid) == (served.url, process.pid)
        assert abs(time.time() - one.started_at) < 60
        assert Client(one).get("/v1/models")["data"][0]["id"] == "llama"
        shown = ssmd(tmp_path, "ps")
        assert shown.returncode == 0, shown.stderr
        assert shown.stdout.startswith(f"ssmd {one.version} at {one.url}, process {one.pid}, for ")
        assert json.loads(ssmd(tmp_path, "ps", "--json").stdout)["url"] == one.url
        said = failing(tmp_path, str(artifact))
        assert said.startswith(f"error: another ssmd daemon (process {one.pid}) uses {data}: it is at {one.url}; ")
        assert failing(tmp_path, str(artifact), "--port", str(served.port)) == said, "before the port is found taken"
        assert one.token not in (data / LOG).read_text() + shown.stdout + said
        ended = ssmd(tmp_path, "stop")
        assert (ended.returncode, ended.stderr) == (0, "")
        assert ended.stdout == f"the daemon at {one.url}, process {one.pid}, has ended\n"
        assert holder(data) is None
        assert not (data / FILE).exists()
        assert process.wait(10) == 0
    log = ssmd(tmp_path, "logs").stdout.splitlines()
    begun = rf"\S+ \S+ INFO ssmd: process {one.pid}: ssmd \S+ serves .* at {one.url}/v1"
    assert [line for line in log if re.fullmatch(begun, line)] == log[1:2], log
    assert "model llama@litert was loaded" in log[0]
    assert log[-1].endswith(f"process {one.pid} ended")
    assert ssmd(tmp_path, "logs", "-n", "1").stdout.splitlines() == log[-1:]


def test_what_tells_of_it_is_removed_and_comes_again(artifact: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    with running(tmp_path, str(artifact)) as (process, served):
        one = found(data)
        (data / FILE).unlink()
        served.ask("GET", "/health")  # without connections it looks seldom
        soon(lambda: find(data) == one)
        assert ssmd(tmp_path, "stop").returncode == 0
        assert process.wait(10) == 0
    assert not (data / FILE).exists()


def test_stop_waits_for_a_drain(artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ending, "LONGEST_S", 0.0)
    before = "from ssmd import server; server.QUIET_S = 1.0"
    with running(tmp_path, str(artifact), extra={"SSMD_DRAIN": "60s"}, before=before) as (process, _):
        ending.end(Client(found(tmp_path / "data")), tmp_path / "data")
        assert process.wait(10) == 0


def test_stop_lets_what_runs_come_to_its_end(artifact: Path, tmp_path: Path) -> None:
    """And says nothing before that is over; to ask again meanwhile changes nothing."""
    with running(tmp_path, str(artifact)) as (process, served), long_stream(served, artifact.name) as stream:
        client = Client(found(tmp_path / "data"))
        assert client.send("POST", "/ssmd/v1/stop") == {"status": "shutting_down"}
        assert client.send("POST", "/ssmd/v1/stop") == {"status": "shutting_down"}
        soon(lambda: served.ask("GET", "/health").status == 503)  # it begins once the answer is on its way
        with pytest.raises(DaemonError, match="shutting down") as refused:
            client.send("POST", CHAT, {"model": artifact.name, "messages": [{"role": "user", "content": "x"}]})
        assert refused.value.code == "shutting_down"
        assert ssmd(tmp_path, "stop").returncode == 0
        received = b""
        while part := stream.recv(65536):
            received += part
        assert b"data: [DONE]" in received
        assert process.wait(20) == 0


def test_a_signal_after_it_ends_all_at_once(artifact: Path, tmp_path: Path) -> None:
    with running(tmp_path, str(artifact)) as (process, served), long_stream(served, artifact.name):
        Client(found(tmp_path / "data")).send("POST", "/ssmd/v1/stop")
        soon(lambda: served.ask("GET", "/health").status == 503)
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 128 + signal.SIGTERM
    assert find(tmp_path / "data") is None, "though what it wrote is still there"
    assert (tmp_path / "data" / FILE).exists()


def test_a_killed_one_is_not_found_and_a_new_one_is(artifact: Path, tmp_path: Path) -> None:
    with running(tmp_path, str(artifact)) as (process, served):
        first = found(tmp_path / "data")
        process.kill()
        process.wait()
        assert find(tmp_path / "data") is None
        with socket.create_server(("127.0.0.1", served.port)) as stranger:  # which has the port now
            stranger.settimeout(0.2)
            assert "no daemon runs" in ssmd(tmp_path, "ps").stderr
            assert ssmd(tmp_path, "stop").returncode == 0
            with pytest.raises(TimeoutError):
                stranger.accept()
    with running(tmp_path, str(artifact)):
        second = found(tmp_path / "data")
        assert second.pid != first.pid
        assert second.token != first.token


def test_one_that_starts(artifact: Path, tmp_path: Path) -> None:
    """It has the lock and is not to be asked yet; what one before it left does not count, though the number is its."""
    go_on = tmp_path / "go on"
    late = (
        "import os, time; from ssmd.engine.host import opening; load = opening.load\n"
        "def wait():\n"
        "    print('loading', flush=True)\n"
        f"    while not os.path.exists({str(go_on)!r}): time.sleep(0.02)\n"
        "opening.load = lambda *a, **k: (wait(), load(*a, **k))[1]\n"
        "import runpy; runpy.run_module('ssmd', run_name='__main__', alter_sys=True)"
    )
    data = tmp_path / "data"
    data.mkdir(mode=0o700)
    with subprocess.Popen(
        ["sh", "-c", f'echo $$; exec {sys.executable} -c "$0" serve --threads 1 "$1"', late, str(artifact)],
        env=environment(tmp_path),
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            pid = int(process.stdout.readline())
            announce(data, Address("http://127.0.0.1:9", None, pid, "0.1.0", 0.0, "t" * 43))
            assert process.stdout.readline() == "loading\n"
            assert find(data) is None
            assert holder(data) == pid
            for command in ("ps", "stop"):
                said = ssmd(tmp_path, command)
                assert said.returncode == 1
                assert f"process {pid} uses {data} and does not answer yet (starting, stopping or" in said.stderr
            assert f"(process {pid}) uses {data}: it is starting" in failing(tmp_path, str(artifact))
            go_on.touch()
            assert " serves " in process.stdout.readline()
            assert found(data).pid == pid
        finally:
            process.kill()


def test_stop_of_a_model_leaves_the_daemon(artifact: Path, tmp_path: Path) -> None:
    with running(tmp_path, str(artifact)) as (process, served):
        [listed] = served.ask("GET", "/v1/models").json["data"]
        done = ssmd(tmp_path, "stop", listed["id"])
        assert (done.returncode, done.stdout) == (0, "unloaded llama@litert\n")
        again = ssmd(tmp_path, "stop", "llama@litert")
        assert (again.returncode, again.stdout, again.stderr) == (0, "", "llama@litert is not loaded\n")
        asked = [{"role": "user", "content": "On and on"}]
        body = {"model": listed["id"], "messages": asked, "stream": True, "max_tokens": 450, "n": 8}
        with served.connect(request({**body, "logit_bias": NO_END})) as stream:
            assert stream.recv(64).startswith(b"HTTP/1.1 200")
            busy = ssmd(tmp_path, "stop", listed["id"])
            assert (busy.returncode, busy.stdout) == (0, "llama@litert is unloaded once its requests have ended\n")
        assert served.ask("GET", "/health").status == 200
        unknown = ssmd(tmp_path, "stop", "no/such")
        assert (unknown.returncode, unknown.stderr.count("\n")) == (1, 1)
        assert process.poll() is None
    none = ssmd(tmp_path, "stop", listed["id"])
    assert (none.returncode, "no daemon runs" in none.stderr) == (1, True)


def test_at_a_socket_with_keys(artifact: Path, tmp_path: Path) -> None:
    path = tmp_path / "ssmd.sock"
    with at_socket(tmp_path, path, str(artifact), SSMD_API_KEY="correct-horse-battery") as process:
        one = found(tmp_path / "data")
        assert (one.url, one.socket) == (None, path)
        body = {
            "model": artifact.name,
            "messages": [{"role": "user", "content": "Hi"}],
            "max_tokens": 9,
            "stream": True,
        }
        with Client(one).stream(CHAT, {**body, "logit_bias": NO_END}) as events:
            assert len(list(events)) > 2
        assert f"at the socket {path}" in ssmd(tmp_path, "ps").stdout
        assert f"it is at the socket {path}; " in failing(tmp_path, str(artifact))
        assert ssmd(tmp_path, "stop").returncode == 0
        assert process.wait(10) == 0


def test_one_that_listens_everywhere(artifact: Path, tmp_path: Path) -> None:
    process = start(tmp_path, str(artifact), "--host", "0.0.0.0", extra={"SSMD_API_KEY": "correct-horse-battery"})
    try:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(4)]
        assert (found(tmp_path / "data").url or "").startswith("http://127.0.0.1:")
        [address] = re.findall(r"from elsewhere: +(http://\S+/)  \(the page asks for the key\)\n", lines[3])
        assert "0.0.0.0" not in "".join(lines)
        assert "127.0.0.1" not in address
        with urlopen(address, timeout=30) as page:
            assert page.status == 200
        assert ssmd(tmp_path, "stop").returncode == 0
    finally:
        process.kill()
        process.communicate()


def test_one_that_keeps_nothing(artifact: Path, tmp_path: Path) -> None:
    """It is not found, writes no log, and has no token that a client could read."""
    with running(tmp_path, str(artifact), "--no-store") as (_, served):
        assert "no daemon runs" in ssmd(tmp_path, "ps").stderr
        assert served.ask("POST", "/ssmd/v1/stop").status == 403
        assert not (tmp_path / "data" / LOG).exists()
        assert not (tmp_path / "data" / FILE).exists()


def test_one_of_another_version(artifact: Path, tmp_path: Path) -> None:
    with running(tmp_path, str(artifact)) as (process, _):
        file = tmp_path / "data" / FILE
        file.write_text(json.dumps({**json.loads(file.read_text()), "version": "9.9"}))
        shown = ssmd(tmp_path, "ps")
        assert (shown.returncode, shown.stderr.count("\n")) == (0, 1)
        assert "the daemon is ssmd 9.9" in shown.stderr
        assert ssmd(tmp_path, "stop").returncode == 0
        assert process.wait(10) == 0


def test_a_file_that_no_daemon_wrote(artifact: Path, tmp_path: Path) -> None:
    with running(tmp_path, str(artifact)), socket.create_server(("127.0.0.1", 0)) as stranger:
        stranger.settimeout(0.2)
        file = tmp_path / "data" / FILE
        forged = {**json.loads(file.read_text()), "url": f"http://203.0.113.9:{stranger.getsockname()[1]}"}
        file.write_text(json.dumps(forged))
        said = ssmd(tmp_path, "stop")
        assert said.returncode == 1
        assert "is not trusted (its `url` is not an address of this computer)" in said.stderr
        file.write_text(json.dumps({**forged, "url": forged["url"].replace("203.0.113.9", "127.0.0.1")}))
        file.chmod(0o644)
        assert "by others" in ssmd(tmp_path, "ps").stderr
        with pytest.raises(TimeoutError):
            stranger.accept()


@pytest.mark.skipif(os.getuid() != 0, reason="directories are given away by root alone")
def test_one_of_another_user(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    os.chown(tmp_path / "data", 12345, 12345)
    for command in ("ps", "stop", "logs"):
        said = ssmd(tmp_path, command)
        assert (said.returncode, said.stderr.count("\n")) == (1, 1)
        assert f"{tmp_path / 'data'} belongs to user 12345; only that user can use its daemon" in said.stderr


def test_a_disk_that_takes_nothing(artifact: Path, tmp_path: Path) -> None:
    """No commands find it then, and it serves."""
    data = tmp_path / "data"
    data.mkdir(mode=0o700)
    for name in (FILE, LOG):
        (data / name).mkdir()
    with running(tmp_path, str(artifact)) as (process, served):
        assert served.ask("GET", "/health").status == 200
        process.terminate()
        _, err = process.communicate(timeout=30)
    assert "no log is kept" in err
    assert "will not find this daemon" in err
    assert "Traceback" not in err


def test_what_fails_at_the_start_is_in_the_log(tmp_path: Path) -> None:
    assert "no-such-model" in failing(tmp_path, "no-such-model")
    assert "no-such-model" in ssmd(tmp_path, "logs").stdout


def test_logs_follows(artifact: Path, tmp_path: Path) -> None:
    with (
        running(tmp_path, str(artifact)) as (_, served),
        subprocess.Popen(
            [sys.executable, "-m", "ssmd", "logs", "-f", "-n", "1"],
            env=environment(tmp_path),
            stdout=subprocess.PIPE,
            text=True,
        ) as follows,
    ):
        try:
            assert follows.stdout is not None
            assert " serves " in follows.stdout.readline()
            served.ask("GET", "/v1/models", headers={"host": "evil.example\x9b"})
            line = follows.stdout.readline()
            assert "refused GET /v1/models: Host" in line
            assert line.rstrip("\n").isprintable()
            follows.send_signal(signal.SIGINT)
            assert follows.wait(10) == 130
        finally:
            follows.kill()
