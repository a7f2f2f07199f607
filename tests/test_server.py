"""The daemon as a process: start, port, signals, and what it refuses to start with."""

from __future__ import annotations

import errno
import http.client
import json
import logging
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

import commands
import pytest
from conftest import TinyArtifacts
from daemon import soon
from mirror import free_port
from noted import note_all
from openai_client import openai
from serving import Served

from ssmd.api.generate.fair_reading import LONG_BYTES
from ssmd.config import Settings, SettingsError
from ssmd.daemon import discovery
from ssmd.daemon.logfile import OneLine
from ssmd.machine import network
from ssmd.server import ServerError, listen

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def artifact(artifacts: TinyArtifacts) -> Path:
    return artifacts["llama-f32"]


def environment(tmp_path: Path, **extra: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SSMD_")}
    own = {"SSMD_DATA_DIR": str(tmp_path / "data"), "XDG_CONFIG_HOME": str(tmp_path / "config")}
    own["SSMD_PORT"] = "0"
    return {**kept, **own, **extra}


def start(
    tmp_path: Path,
    *arguments: str,
    extra: Mapping[str, str] | None = None,
    descriptors: int | None = None,
    foreign: bool = False,
    before: str = "",
) -> subprocess.Popen[str]:
    if not foreign:
        note_all(arguments, tmp_path / "data")
    env = environment(tmp_path, **(extra or {}))
    return commands.start("serve", "--threads", "1", *arguments, env=env, descriptors=descriptors, before=before)


@contextmanager
def running(
    tmp_path: Path,
    *arguments: str,
    descriptors: int | None = None,
    extra: Mapping[str, str] | None = None,
    foreign: bool = False,
    before: str = "",
) -> Iterator[tuple[subprocess.Popen[str], Served]]:
    process = start(tmp_path, *arguments, descriptors=descriptors, extra=extra, foreign=foreign, before=before)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.fullmatch(r"ssmd \S+ serves \S+ \(litert, cpu, \w+\) at http://127\.0\.0\.1:(\d+)/v1\n", line)
        if found is None:
            process.kill()
            pytest.fail(f"{line!r} {process.communicate()}")
        yield process, Served(int(found[1]))
    finally:
        process.kill()
        process.communicate()


def failing(tmp_path: Path, *arguments: str, extra: Mapping[str, str] | None = None) -> str:
    """The one line on stderr of a daemon that does not start."""
    process = start(tmp_path, *arguments, extra=extra)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (1, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1, err
    return err


def long_stream(served: Served, model: str, header: str = "", tokens: int = 450) -> socket.socket:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "Tell me a story"}],
        "max_tokens": tokens,
        "n": 4,
        "logit_bias": {"0": -100, "2": -100},
        "stream": True,
    }
    raw = json.dumps(body).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\n{header}connection: close\r\ncontent-length: {len(raw)}"
    one = served.connect(f"{head}\r\n\r\n".encode() + raw)
    assert b"200 OK" in one.recv(64)
    return one


def rest(one: socket.socket) -> bytes:
    received = b""
    while part := one.recv(65536):
        received += part
    return received


def test_it_says_when_it_is_ready_and_is(artifact: Path, tmp_path: Path) -> None:
    with running(tmp_path, str(artifact)) as (_, served):
        assert served.ask("GET", "/health").json["status"] == "ok"
    assert oct((tmp_path / "data").stat().st_mode)[-3:] == "700"


def test_it_names_its_page_and_the_command(artifact: Path, tmp_path: Path) -> None:
    """Both lead to this daemon as they stand, from a shell that knows of no data directory; --open opens the page."""
    browser, opened = tmp_path / "browser", tmp_path / "opened"
    browser.write_text(f'#!/bin/sh\necho "$1" >"{opened}.part" && mv "{opened}.part" "{opened}"\n')
    browser.chmod(0o755)
    other = ("--data-dir", str(tmp_path / "another place"))
    with running(tmp_path, str(artifact), *other, "--open", extra={"BROWSER": str(browser)}) as (process, served):
        assert process.stdout is not None
        page, command = (process.stdout.readline().split(":", 1) for _ in range(2))
        assert [part.strip() for part in page] == ["in a browser", f"http://127.0.0.1:{served.port}/"]
        assert served.ask("GET", "/").status == 200
        program, *words = shlex.split(command[1])
        assert (command[0], program) == ("  in a terminal", "ssmd")
        done = commands.ssmd(*words, "Hi", "--max-tokens", "2", env=environment(tmp_path))
        assert (done.returncode, done.stderr) == (0, f"using the daemon at http://127.0.0.1:{served.port}\n")
        deadline = time.monotonic() + 30
        while not opened.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert opened.read_text() == f"http://127.0.0.1:{served.port}/\n"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_alias_of_a_missing_model_is_told_at_start(artifact: Path, tmp_path: Path) -> None:
    with running(tmp_path, str(artifact), extra={"SSMD_ALIASES": "gpt-5=gone,*=llama"}) as (process, served):
        body = {"model": "any", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
        assert served.ask("POST", CHAT, body).json["model"] == "any"
        process.terminate()
        _, err = process.communicate(timeout=60)
    assert err.count("is in vain") == 1
    assert "the alias gpt-5=gone is in vain: no model gone can be used here; `ssmd list` names them" in err


def test_a_crash_writes_no_memory_to_a_disk(artifact: Path, tmp_path: Path) -> None:
    """A core file would hold what was removed, and the daemon's token."""
    unlimited = (
        "import os, resource as r; r.setrlimit(r.RLIMIT_CORE, (r.getrlimit(r.RLIMIT_CORE)[1],) * 2); "
        f"os.chdir({str(tmp_path)!r})"
    )
    for setting, limit in (("false", ["0", "0"]), ("true", None)):
        extra = {"SSMD_CORE_DUMPS": setting}
        with running(tmp_path, str(artifact), extra=extra, before=unlimited) as (process, _):
            proc = Path(f"/proc/{process.pid}")
            [limits] = [one for one in (proc / "limits").read_text().splitlines() if one.startswith("Max core file")]
            filtered = int((proc / "coredump_filter").read_text(), 16) == 0
            assert filtered == (setting == "false")
            assert limit is None or limits.split()[4:6] == limit
            if limit is not None:
                os.kill(process.pid, signal.SIGSEGV)
                assert process.wait(20) == -signal.SIGSEGV
    assert [one for one in tmp_path.iterdir() if one.name.startswith("core")] == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows has no core files")
def test_a_crash_of_a_command_writes_no_memory_to_a_disk(artifact: Path, tmp_path: Path) -> None:
    """Commands that read sessions hold their text too, and `run` without a daemon holds all that a daemon holds."""
    before = (
        "import atexit, resource as r; r.setrlimit(r.RLIMIT_CORE, (r.getrlimit(r.RLIMIT_CORE)[1],) * 2); "
        "atexit.register(lambda: print('limit:', *r.getrlimit(r.RLIMIT_CORE)))"
    )
    for words in (("run", str(artifact), "Hi", "--max-tokens", "2"), ("session", "list")):
        done = commands.ssmd(*words, env=environment(tmp_path), before=before)
        assert done.returncode == 0, done.stderr
        assert done.stdout.endswith("limit: 0 0\n")


def test_it_sleeps_while_nobody_is_connected(artifact: Path, tmp_path: Path) -> None:
    """And its clock is right for the next client."""
    with running(tmp_path, str(artifact), before="from ssmd import server; server.LOOK_S = 0.2") as (process, served):
        served.ask("GET", "/health")
        time.sleep(0.7)  # the last look after the client left
        before = _sleeps(process.pid)
        time.sleep(1)
        assert _sleeps(process.pid) - before <= 1
        dated = parsedate_to_datetime(served.ask("GET", "/health").headers["date"])
        assert time.time() - dated.timestamp() < 2
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a signal for one thread, by its number")
def test_a_signal_ends_an_idle_one_whichever_thread_it_comes_to(artifact: Path, tmp_path: Path) -> None:
    """A system may give it to any; Python runs what handles it in the first, which then sleeps for a minute."""
    with running(tmp_path, str(artifact)) as (process, served):
        served.ask("GET", "/health")
        time.sleep(1.5)  # the last look after the client left
        other = max(int(task.name) for task in Path(f"/proc/{process.pid}/task").iterdir())
        assert other != process.pid
        os.kill(other, signal.SIGTERM)
        assert process.wait(20) == 0


def _sleeps(process: int) -> int:
    """Return how often a process's first thread went to sleep so far."""
    status = Path(f"/proc/{process}/status").read_text()
    return int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])


def _wait_for_draining(served: Served) -> None:
    """Wait until /health says that the daemon refuses new requests; at most 20 s."""
    deadline = time.monotonic() + 20
    while served.ask("GET", "/health").status == 200:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_signal_lets_what_runs_come_to_its_end(artifact: Path, tmp_path: Path) -> None:
    with running(tmp_path, str(artifact)) as (process, served):
        with long_stream(served, artifact.name) as one:
            process.send_signal(signal.SIGTERM)
            _wait_for_draining(served)
            body = {"model": artifact.name, "messages": [{"role": "user", "content": "x"}]}
            refused = served.ask("POST", CHAT, body)
            assert (refused.status, refused.error["code"]) == (503, "shutting_down")
            assert rest(one).rstrip().endswith(b"data: [DONE]\n\n\r\n0".rstrip())
        assert process.wait(20) == 0


def test_a_daemon_that_drains_answers_and_is_unhealthy(artifact: Path, tmp_path: Path) -> None:
    """A balancer takes it away meanwhile. It stops once no request came for a while."""
    before = "from ssmd import server; server.QUIET_S = 1.0; server.GRACE_S = 0.0"
    with running(tmp_path, str(artifact), extra={"SSMD_DRAIN": "60s"}, before=before) as (process, served):
        with long_stream(served, artifact.name) as one:
            process.send_signal(signal.SIGTERM)
            _wait_for_draining(served)
            assert served.ask("GET", "/health").json["status"] == "shutting_down"
            body = {"model": artifact.name, "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
            assert served.ask("POST", CHAT, body).status == 200
            assert rest(one).rstrip().endswith(b"data: [DONE]\n\n\r\n0".rstrip())
        assert process.wait(20) == 0


def test_a_drain_ends_after_its_time(artifact: Path, tmp_path: Path) -> None:
    """Streams that last longer are cut."""
    before = "from ssmd import server; server.GRACE_S = 0.0"
    with running(tmp_path, str(artifact), extra={"SSMD_DRAIN": "200ms"}, before=before) as (process, served):
        with long_stream(served, artifact.name) as one:
            process.send_signal(signal.SIGTERM)
            assert b'"code":"shutting_down"' in rest(one)
        assert process.wait(20) == 0


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGHUP")
def test_a_hangup_ends_it_as_sigterm_does(artifact: Path, tmp_path: Path) -> None:
    """A closing terminal sends it twice: by the shell and by the kernel."""
    with running(tmp_path, str(artifact)) as (process, served):
        with long_stream(served, artifact.name) as one:
            for _ in range(2):
                process.send_signal(signal.SIGHUP)
                _wait_for_draining(served)
            assert rest(one).rstrip().endswith(b"data: [DONE]\n\n\r\n0".rstrip())
        assert process.wait(20) == 0
    assert "SIGHUP: finishing requests, at most 10 s\n" in (tmp_path / "data" / "daemon.log").read_text()


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGHUP")
@pytest.mark.parametrize("keys", [False, True], ids=["no keys", "keys"])
def test_a_hangup_does_not_end_one_that_nohup_started(artifact: Path, tmp_path: Path, keys: bool) -> None:
    extra = _keys_file(tmp_path) if keys else {}
    ignored = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)"
    with running(tmp_path, str(artifact), extra=extra, before=ignored) as (process, served):
        process.send_signal(signal.SIGHUP)
        if keys:
            _log_until(tmp_path, "1 API keys of 1 names are in force")
        process.send_signal(signal.SIGHUP)
        assert served.ask("GET", "/health").json["status"] == "ok"
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    assert "SIGHUP" not in (tmp_path / "data" / "daemon.log").read_text()


@pytest.mark.skipif(sys.platform != "linux", reason="starts a process in a terminal on Linux alone")
@pytest.mark.parametrize("keys", [False, True], ids=["no keys", "keys"])
def test_a_daemon_ends_with_the_terminal_that_it_is_in(artifact: Path, tmp_path: Path, keys: bool) -> None:
    """With a keys file too, which SIGHUP otherwise makes it read again. The answer in flight is stored."""
    import pty

    extra = _keys_file(tmp_path) if keys else {}
    note_all((str(artifact),), tmp_path / "data")
    ours, theirs = pty.openpty()
    process = commands.start_in(theirs, "serve", "--threads", "1", str(artifact), env=environment(tmp_path, **extra))
    os.close(theirs)
    try:
        said = b""
        while b"in a terminal:" not in said:
            said += os.read(ours, 4096)
        served = Served(int(said.partition(b"http://127.0.0.1:")[2].partition(b"/")[0]))
        with long_stream(served, artifact.name, "authorization: Bearer alice-has-a-key\r\n") as one:
            if keys:
                process.send_signal(signal.SIGHUP)  # the terminal is there: it reads the keys
                _log_until(tmp_path, "1 API keys of 1 names are in force")
                assert served.ask("GET", "/health").json["status"] == "ok"
            os.close(ours)
            assert rest(one).rstrip().endswith(b"data: [DONE]\n\n\r\n0".rstrip())
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
        with suppress(OSError):
            os.close(ours)
    _log_until(tmp_path, "SIGHUP: finishing requests, at most 10 s, because the terminal is gone")
    assert len(json.loads(commands.ssmd("session", "list", "--json", env=environment(tmp_path)).stdout)) == 1


def _keys_file(tmp_path: Path) -> dict[str, str]:
    """Write a file with one key, and return the variable that names it."""
    file = tmp_path / "keys"
    file.touch(0o600)
    file.write_text("alice alice-has-a-key\n")
    return {"SSMD_API_KEYS_FILE": str(file)}


def _log_until(tmp_path: Path, line: str) -> None:
    """Wait until the daemon's log has a line with this text."""
    deadline = time.monotonic() + 20
    while line not in (said := (tmp_path / "data" / "daemon.log").read_text()):
        assert time.monotonic() < deadline, said
        time.sleep(0.02)


def test_one_signal_ends_it_when_the_model_never_comes_back(artifact: Path, tmp_path: Path) -> None:
    ended = _stuck_at_the_end(
        artifact,
        tmp_path,
        "from ssmd.runtime.hoststate.program import FlatProgram as Program; server.GRACE_S = server.STUCK_S = 0.5; "
        "Program._decode = stuck",
    )
    said = "the model did not come back from a step within 1 s: stopping without it"
    assert (ended.returncode, said in ended.stderr.splitlines()[-1]) == (1, True), ended.stderr


@pytest.mark.parametrize("words", ["x", "x" * LONG_BYTES], ids=["short", "long"])
def test_one_signal_ends_it_when_a_request_is_never_read(artifact: Path, tmp_path: Path, words: str) -> None:
    lines = "from ssmd.api.generate import front; server.FLUSH_S = server.LINGER_S = 0.5; front.parse_object = stuck"
    ended = _stuck_at_the_end(artifact, tmp_path, lines, words)
    said = "threads of ended requests did not end: stopping without them"
    assert (ended.returncode, said in ended.stderr.splitlines()[-1]) == (0, True), ended.stderr


def _stuck_at_the_end(artifact: Path, tmp_path: Path, lines: str, words: str = "x") -> subprocess.CompletedProcess[str]:
    """A daemon in which `lines` make something call `stuck`, which does not return, and that got one signal then."""
    stuck = (
        "import sys, time; from ssmd import server; "
        f"stuck = lambda *_: (print('stuck', file=sys.stderr, flush=True), time.sleep(600)); {lines}"
    )
    with start(tmp_path, str(artifact), before=stuck) as process:
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            served = Served(int(process.stdout.readline().rpartition(":")[2].partition("/")[0]))
            raw = json.dumps({"model": artifact.name, "messages": [{"role": "user", "content": words}]}).encode()
            head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(raw)}\r\n\r\n"
            with served.connect(head.encode() + raw):
                assert "stuck\n" in iter(process.stderr.readline, "")
                process.send_signal(signal.SIGTERM)
                out, err = process.communicate(timeout=30)
        finally:
            process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


@contextmanager
def loading(artifact: Path, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Served, Path]]:
    """A daemon whose first load waits until a file is there."""
    port, go_on = free_port(), tmp_path / "go on"
    waits = (
        "import os, time; from ssmd.engine.host import opening; load = opening.load\n"
        "def late(*a, **k):\n"
        f"    while not os.path.exists({str(go_on)!r}): time.sleep(0.02)\n"
        "    return load(*a, **k)\n"
        "opening.load = late\n"
    )
    process = start(tmp_path, str(artifact), "--port", str(port), before=waits)
    try:
        served = Served(port)

        def answers() -> bool:
            with suppress(OSError):
                return bool(json.loads(served.ask("GET", "/health").body)["loading"])
            return False

        soon(answers, within_s=60)
        yield process, served, go_on
    finally:
        process.kill()
        process.communicate()


def test_health_reports_the_first_load(artifact: Path, tmp_path: Path) -> None:
    with loading(artifact, tmp_path) as (process, served, go_on):
        soon(lambda: json.loads(served.ask("GET", "/health").body)["loading"][0]["stage"] == "reading its weights")
        answer = served.ask("GET", "/health")
        assert (answer.status, json.loads(answer.body)["status"]) == (503, "starting")
        assert discovery.find(tmp_path / "data") is None, "commands do not find it yet"
        with ThreadPoolExecutor(1) as asks:
            body = {"model": "llama", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
            waits = asks.submit(served.ask, "POST", CHAT, body)
            go_on.touch()
            assert process.stdout is not None
            assert " serves llama " in process.stdout.readline()
            assert waits.result(60).status == 200
        answer = served.ask("GET", "/health")
        assert (answer.status, json.loads(answer.body)["loading"]) == (200, [])


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_a_signal_in_the_first_load_ends_it_at_once(artifact: Path, tmp_path: Path) -> None:
    with loading(artifact, tmp_path) as (process, _, _):
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 128 + signal.SIGTERM


def test_a_second_signal_ends_it_at_once(artifact: Path, tmp_path: Path) -> None:
    with running(tmp_path, str(artifact)) as (process, served), long_stream(served, artifact.name):
        process.send_signal(signal.SIGINT)
        while served.ask("GET", "/health").status == 200:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 128 + signal.SIGINT  # not 0, as after the grace that the stream would have got


def test_who_is_refused_writes_one_line_that_steers_nothing(artifact: Path, tmp_path: Path) -> None:
    line = "%0a2026-11-23 00:00:00,000 ERROR ssmd.engine: FORGED%0d%1b]0;own%07%1b[2J%e2%80%ae%9b31m".replace(
        " ", "%20"
    )
    with running(tmp_path, str(artifact)) as (process, served):
        for path in (f"/{line}", "/" + "%20x" * 15_000):
            assert served.ask("POST", path, headers={"origin": "https://evil.example"}).status == 403
        broken_off = f"POST {CHAT}?{line} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\n"
        served.connect(broken_off.encode()).close()
        process.terminate()
        _, log = process.communicate(timeout=60)
    lines = log.splitlines()
    assert sum("FORGED" in one for one in lines) == 1
    assert "\\n2026-11-23 00:00:00,000 ERROR ssmd.engine: FORGED\\r\\x1b]0;own\\x07\\x1b[2J\\u202e" in log
    assert all(c.isprintable() for one in lines for c in one)
    assert all(len(one) < 5000 for one in lines)


def test_what_follows_of_an_error_is_marked(capsys: pytest.CaptureFixture[str]) -> None:
    log = logging.Logger("made")
    handler = logging.StreamHandler()
    handler.setFormatter(OneLine("%(levelname)s %(message)s"))
    log.addHandler(handler)
    try:
        raise ValueError("it says\nERROR forged\x1b[2J")
    except ValueError:
        log.exception("it\nfailed", stack_info=True)
    first, *rest = capsys.readouterr().err.splitlines()
    assert first == "ERROR it\\nfailed"
    assert "  | ERROR forged\\x1b[2J" in rest
    assert all(one.startswith("  | ") for one in rest)


def test_a_port_in_use(artifact: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = failing(tmp_path, str(artifact), "--port", str(port))
    assert f"127.0.0.1 port {port}" in said
    assert "--port" in said
    assert f"ended: cannot listen on 127.0.0.1 port {port}" in (tmp_path / "data" / "daemon.log").read_text()


def test_a_second_port_answers_as_the_first(artifact: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        second = free.getsockname()[1]
    with running(tmp_path, str(artifact), "--also-listen", str(second)) as (_, served):
        for port in (served.port, second):
            for host in ("127.0.0.1", "::1"):
                for path, wanted in (("/", "text/html"), ("/api/version", "application/json")):
                    connection = http.client.HTTPConnection(host, port, timeout=20)
                    fields = {"accept": wanted, "host": f"localhost:{port}", "origin": f"http://localhost:{port}"}
                    connection.request("GET", path, headers=fields)
                    response = connection.getresponse()
                    assert response.status == 200, (host, port)
                    assert wanted in response.headers["content-type"]
                    connection.close()
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
            connection.request("GET", "/api/version", headers={"host": f"elsewhere.example:{port}"})
            assert connection.getresponse().status == 403
            connection.close()
        address = discovery.find(tmp_path / "data")
        assert address is not None
        assert address.url == f"http://127.0.0.1:{served.port}", "commands ask at the first"


def test_a_second_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ServerError, match=f"127.0.0.1 port {port}: .*, or leave --also-listen out$"):
            listen(Settings(port=0, also_listen=port))
    with listening(port=0, also_listen=port) as (addresses, place):  # it let go of the first one, too
        assert [address.endswith(f":{port}") for address in addresses] == [False, False, True, True]
        assert place == f"http://{addresses[0]}/v1"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"also_listen": 0}, "greater than or equal to 1"),
        ({"also_listen": 65536}, "less than or equal to 65535"),
        ({"also_listen": 7763}, "listens at this port anyway"),
        ({"also_listen": 11434, "socket": Path("/run/x.sock")}, "there is a socket too"),
    ],
)
def test_a_second_port_that_cannot_be(flags: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        Settings(**flags)


@contextmanager
def listening(**settings: Any) -> Iterator[tuple[list[str], str]]:
    """The addresses of a daemon with these settings, and its place in its first line."""
    sockets, place = listen(Settings(**settings))
    try:
        yield [f"{network.bracketed(one.getsockname()[0])}:{one.getsockname()[1]}" for one in sockets], place
    finally:
        for one in sockets:
            one.close()


def test_localhost_is_both_loopback_addresses(artifact: Path, tmp_path: Path) -> None:
    with running(tmp_path, str(artifact)) as (_, served):
        for host in ("127.0.0.1", "::1", "localhost"):
            connection = http.client.HTTPConnection(host, served.port, timeout=20)
            connection.request("GET", "/health", headers={"host": f"{network.bracketed(host)}:{served.port}"})
            assert connection.getresponse().status == 200, host
            connection.close()
        address = discovery.find(tmp_path / "data")
        assert address is not None
        assert address.url == f"http://127.0.0.1:{served.port}"
        with pytest.raises(OSError, match="in use"):
            socket.create_server(("::1", served.port), family=socket.AF_INET6)
    for host in ("localhost", "LOCALHOST"):
        with listening(host=host, port=served.port) as (addresses, place):  # again, at the port of before
            assert addresses == [f"127.0.0.1:{served.port}", f"[::1]:{served.port}"]
            assert place == f"http://localhost:{served.port}/v1"
    with listening(host="127.0.0.2", port=0) as (addresses, _):
        assert len(addresses) == 1


def test_a_port_that_another_process_has_on_ipv6(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as taken:
        port = taken.getsockname()[1]
        for host in ("127.0.0.1", "localhost"):
            caplog.clear()
            with listening(host=host, port=port) as (addresses, place):
                assert addresses == [f"127.0.0.1:{port}"]
                assert place == f"http://127.0.0.1:{port}/v1", "localhost may be the other process"
            (line,) = (r.getMessage() for r in caplog.records)
            assert line == (
                f"cannot listen at [::1]:{port}, another process listens there: "
                f"open http://127.0.0.1:{port}, not localhost"
            )
        opened, offered = socket.socket.bind, [port]

        def bind(one: socket.socket, address: Any) -> None:
            """Give the taken port to the first that wants any."""
            opened(one, (address[0], offered.pop(), *address[2:]) if address[1] == 0 and offered else address)

        monkeypatch.setattr(socket.socket, "bind", bind)
        with listening(port=0) as (addresses, _):
            assert not offered
            assert len(addresses) == 2
            assert not addresses[0].endswith(f":{port}")


def test_a_machine_without_ipv6_is_served_on_ipv4(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = socket.socket

    def without(family: int = -1, *rest: Any) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))
        return made(family, *rest)

    caplog.set_level(logging.INFO)
    monkeypatch.setattr(socket, "socket", without)
    with listening(port=0) as (addresses, _):
        assert [address.rpartition(":")[0] for address in addresses] == ["127.0.0.1"]
    (line,) = (r for r in caplog.records)
    assert line.levelname == "INFO"
    assert "Address family not supported" in line.getMessage()


def test_what_cannot_be_served(artifact: Path, tmp_path: Path) -> None:
    assert "ssmd pull smollm2" in failing(tmp_path, "no-such-model")
    altered = tmp_path / "altered"
    shutil.copytree(artifact, altered)
    tokenizer = altered / "tokenizer.json"
    tokenizer.write_bytes(tokenizer.read_bytes()[:-1] + b" ")
    assert "sha256 differs" in failing(tmp_path, str(altered))
    tokenizer.unlink()
    assert "is missing" in failing(tmp_path, str(altered))


def test_settings_that_cannot_be(artifact: Path, tmp_path: Path) -> None:
    assert "SSMD_API_KEY" in failing(tmp_path, str(artifact), "--host", "0.0.0.0")
    assert "SSMD_MAX_QUEUE" in failing(tmp_path, str(artifact), extra={"SSMD_MAX_QUEUE": "many"})


def test_a_key_and_a_name_from_the_environment(artifact: Path, tmp_path: Path) -> None:
    key = "correct-horse-battery"
    os_environment = {"SSMD_API_KEY": key, "SSMD_ALLOWED_HOSTS": "box.lan"}
    process = start(tmp_path, str(artifact), extra=os_environment)
    try:
        assert process.stdout is not None
        found = re.search(r":(\d+)/v1", process.stdout.readline())
        assert found is not None
        served = Served(int(found[1]))
        assert served.ask("GET", "/v1/models").status == 401
        allowed = {"authorization": f"Bearer {key}", "host": "box.lan"}
        assert served.ask("GET", "/v1/models", headers=allowed).status == 200
        assert openai("key", served.url, {"keys": [key, "wrong"]}) == {key: "ok", "wrong": "invalid_api_key"}
    finally:
        process.kill()
        process.communicate()


@contextmanager
def at_socket(tmp_path: Path, path: Path, *arguments: str, **extra: str) -> Iterator[subprocess.Popen[str]]:
    process = start(tmp_path, *arguments, "--socket", str(path), extra=extra)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.endswith(f"at the socket {path}\n"), (line, process.communicate())
        yield process
    finally:
        process.kill()
        process.communicate()


def curl(path: Path, *arguments: str) -> Any:
    command = ["curl", "-sS", "--unix-socket", str(path), *arguments]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout)


def test_a_socket_in_place_of_a_port(artifact: Path, tmp_path: Path) -> None:
    path = tmp_path / "ssmd.sock"
    with socket.create_server(("127.0.0.1", 0)) as one:
        port = one.getsockname()[1]
    with at_socket(tmp_path, path, str(artifact), SSMD_PORT=str(port), SSMD_HOST="0.0.0.0"):  # needs no key then
        assert oct(path.lstat().st_mode)[-3:] == "600"
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
        assert curl(path, "http://localhost/health")["status"] == "ok"
        body = {"model": artifact.name, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9}
        assert openai("at_socket", str(path), {**body, "logit_bias": {"0": -100, "2": -100}})
        said = failing(tmp_path, str(artifact), "--socket", str(path), "--data-dir", str(tmp_path / "other"))
        assert str(path) in said
        assert "another process listens there" in said
        both = start(tmp_path, str(artifact), "--socket", str(path), "--port", str(port))
        assert "leave --host, --port and --also-listen out" in " ".join(both.communicate(timeout=60)[1].split())
        assert both.returncode == 2
    assert path.exists()  # it was killed
    with at_socket(tmp_path, path, str(artifact)) as process:
        refused = curl(path, "http://evil.example/health")
        assert refused["error"]["code"] == "host_not_allowed"
        process.terminate()
        assert process.wait(20) == 0
    assert not path.exists()


def test_who_has_not_sent_all_when_it_ends_is_told_in_a_line(artifact: Path, tmp_path: Path) -> None:
    with running(tmp_path, str(artifact), before="from ssmd import server; server.FLUSH_S = 1") as (process, served):
        half = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n1\r\n{{\r\n"
        with served.connect(half.encode()) as one:
            served.ask("GET", "/health")
            process.terminate()
            assert rest(one).startswith(b"HTTP/1.1 503")
        assert process.wait(30) == 0
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()


def test_connections_without_a_word_keep_nobody_out(artifact: Path, tmp_path: Path) -> None:
    """More than it has descriptors for; a stream goes on, and new clients are answered."""
    with running(tmp_path, str(artifact), descriptors=100) as (process, served):
        with ExitStack() as stack:
            stream = stack.enter_context(long_stream(served, artifact.name))
            for number in range(150):
                with suppress(ConnectionResetError):
                    stack.enter_context(served.connect(b"" if number % 2 else b"GET /health HT"))
            for _ in range(30):
                assert served.ask("GET", "/health", timeout=20).status == 200
            assert rest(stream).rstrip().endswith(b"data: [DONE]\n\n\r\n0".rstrip())
        process.terminate()
        assert process.stderr is not None
        assert len(process.stderr.read()) < 10_000
