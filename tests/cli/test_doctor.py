"""The doctor's report: its first lines, its findings, and that a finding does not stop the rest of the checks."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
from pathlib import Path
from typing import Any

import commands
import pytest
from test_server import environment

from ssmd import __version__
from ssmd.cli.doctor import lines
from ssmd.daemon.discovery import Address, announce
from ssmd.sessions.rows.lock import DirectoryLock
from ssmd.sessions.store import Store


def among(*runtimes: str) -> str:
    """Return code that restricts a command to these runtimes, as each check of one starts a process."""
    return f"from ssmd.runtime import devices; devices.runtime_names = lambda: {runtimes!r}"


LITERT = among("litert")  # where it is not the runtimes that are looked at


def ssmd(home: Path, *arguments: str, before: str = "", **extra: str) -> subprocess.CompletedProcess[str]:
    return commands.ssmd(*arguments, env=environment(home, **extra), before=before)


def report(home: Path, *arguments: str, code: int = 0, before: str = "", **extra: str) -> dict[str, Any]:
    done = ssmd(home, "doctor", "--json", *arguments, before=before, **extra)
    assert (done.returncode, done.stderr) == (code, ""), done
    return dict(json.loads(done.stdout))


def test_what_works_and_what_to_do_come_first(home: Path) -> None:
    done = ssmd(home, "doctor")
    assert (done.returncode, done.stderr) == (0, "")
    first, then, empty, *findings = done.stdout.splitlines()
    assert first == f"ssmd {__version__} works here: tiny can answer, with litert"
    assert then == "next: ssmd run tiny, or for OpenAI clients: ssmd serve"
    assert empty == ""
    marks = [line[:4].strip() for line in findings[:-1]]
    assert marks == sorted(marks, reverse=True), "what works stands before what does not"
    assert any(line.startswith("  ok  runtime litert on cpu (") for line in findings)
    assert any(line.startswith("  no  model broken (") and "has 3 bytes" in line for line in findings)
    for name in ("coreml", "litert", "openvino", "wgpu"):
        assert len([line for line in findings if f"runtime {name}" in line]) == 1, name
    for what in ("data directory", "disk: ", "memory: ", "daemon: none runs"):
        assert any(line.startswith(f"  ok  {what}") for line in findings), what
    more = ssmd(home, "doctor", "-v").stdout
    assert more.count("runtime coreml on ") == 3
    assert "Python 3" in more


def test_what_a_script_gets(home: Path) -> None:
    found = report(home)
    devices = {one["name"]: {d["name"]: d["problem"] for d in one["devices"]} for one in found["runtimes"]}
    assert devices["litert"]["cpu"] is None
    problems = {one["name"]: one["problem"] for one in found["models"]}
    assert problems["tiny"] is None
    assert "has 3 bytes" in problems["broken"]
    assert found["data_dir"]["free_bytes"] > 0
    assert found["data_dir"]["quota_bytes"] == 8 << 30
    assert (found["daemon"], found["settings_problem"], found["ok"]) == (None, None, True)


def test_without_a_model(home: Path, tmp_path: Path) -> None:
    done = ssmd(home, "doctor", "--models-dir", str(tmp_path / "none"), before=LITERT)
    assert done.returncode == 1
    assert done.stdout.startswith(
        f"ssmd {__version__} cannot answer here yet: no model is ready\nnext: ssmd pull smollm2\n"
    )
    assert f"  no  models in {tmp_path / 'none'}: none" in done.stdout
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    found = report(home, "--models-dir", str(tmp_path / "open"), before=LITERT, code=1)
    assert "can be written by every user" in found["models_problem"]


def test_a_broken_settings_file_is_a_finding(home: Path, tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text("port = \n")
    done = ssmd(home, "--config", str(file), "doctor", before=LITERT)
    assert (done.returncode, done.stderr) == (1, "")
    first, then = done.stdout.splitlines()[:2]
    assert first.endswith("cannot start here: its settings are refused")
    assert then == "next: correct the settings, as described below"
    assert f"  no  settings: settings file {file} is not TOML" in done.stdout
    assert "  ok  model tiny" in done.stdout, "SSMD_DATA_DIR counts all the same"
    found = report(home, before=LITERT, code=1, SSMD_PROT="1", SSMD_QUOTA="much")
    assert "SSMD_PROT" in found["settings_problem"]
    assert "SSMD_QUOTA" in found["settings_problem"]
    assert found["data_dir"]["quota_bytes"] == 8 << 30
    found = report(home, "--config", str(file), before=LITERT, code=1, SSMD_PROT="1", SSMD_THREADS="x")
    both = found["settings_problem"]
    for wrong in ("is not TOML", "SSMD_PROT: no such setting", "SSMD_THREADS = 'x'"):
        assert wrong in both, "what is wrong in the file hides nothing"
    assert ssmd(home, "doctor", "--data-dir", str(file)).returncode == 2


@pytest.mark.parametrize(
    ("package", "files", "said"),
    [
        (
            "openvino",
            {"__init__.py": "raise ImportError('libtbb.so.12: cannot open shared object file: No such file')"},
            "openvino is installed, the system's library libtbb.so.12 that it needs is not",
        ),
        (
            "wgpu",
            {"__init__.py": "raise RuntimeError('no luck')"},
            "wgpu is installed and cannot be loaded (RuntimeError: no luck); install it anew with: ",
        ),
        (
            "ai_edge_litert",
            {
                "__init__.py": "",
                "libLiteRt.so": "no library",
                "compiled_model.py": "raise ImportError('DLL load failed while importing _pywrap_x: not found')",
            },
            "ai-edge-litert is installed, a DLL that it needs is not: install the Microsoft Visual C++ Redistributable",
        ),
    ],
)
def test_a_library_that_cannot_be_loaded(
    package: str, files: dict[str, str], said: str, home: Path, tmp_path: Path
) -> None:
    """It is installed, says its version, and was never tried before."""
    (tmp_path / package).mkdir()
    for name, text in files.items():
        (tmp_path / package / name).write_text(text)
    runtime = "litert" if package == "ai_edge_litert" else package
    other = "wgpu" if runtime == "litert" else "litert"
    before = f"import sys; sys.path.insert(0, {str(tmp_path)!r})"
    found = report(home, before=f"{before}; {among(runtime, other)}", code=int(runtime == "litert"))
    reasons = {one["name"]: one["why_not"] for one in found["runtimes"]}
    assert reasons.pop(runtime).startswith(said)
    assert "Traceback" not in json.dumps(found)
    assert reasons == {other: None}
    if runtime == "litert":
        done = ssmd(home, "run", "tiny", "hello", before=before)
        assert (done.returncode, done.stdout) == (1, "")
        assert said in done.stderr
        assert done.stderr.count("\n") == 1


def test_a_daemon_that_runs(home: Path, tmp_path: Path) -> None:
    models = ("--models-dir", str(home / "data" / "models"), "--data-dir", str(tmp_path))
    lock = DirectoryLock.take(tmp_path, "")
    try:
        found = report(home, *models, before=LITERT)
        assert found["daemon"]["pid"] == os.getpid()
        assert "does not announce an address" in found["daemon"]["problem"]
        announce(tmp_path, Address("http://127.0.0.1:7763", None, os.getpid(), "9.9", 1.0, "t" * 43))
        found = report(home, *models, before=LITERT)
        assert (found["daemon"]["url"], found["daemon"]["version"]) == ("http://127.0.0.1:7763", "9.9")
        assert "t" * 43 not in json.dumps(found)
        said = ssmd(home, "doctor", *models, before=LITERT).stdout
        assert "next: ssmd run tiny, or an OpenAI client at http://127.0.0.1:7763/v1" in said
        assert f"  ok  daemon: ssmd 9.9 at http://127.0.0.1:7763, process {os.getpid()}, for " in said
        assert f"; this is {__version__}" in said
    finally:
        lock.release()
    assert report(home, *models, before=LITERT)["daemon"] is None


def test_the_store_is_looked_at_and_not_touched(home: Path, tmp_path: Path) -> None:
    models = ("--models-dir", str(home / "data" / "models"), "--data-dir", str(tmp_path))
    assert report(home, *models, before=LITERT)["data_dir"]["stored_bytes"] == 0
    assert not list(tmp_path.iterdir())
    Store.open(tmp_path).close()
    assert report(home, *models, before=LITERT)["data_dir"] | {"free_bytes": 0} == {
        "path": str(tmp_path), "problem": None, "open_to_others": False,
        "free_bytes": 0, "stored_bytes": 0, "quota_bytes": 8 << 30
    }  # fmt: skip
    file = tmp_path / "sessions.sqlite3"
    with sqlite3.connect(file) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '0001'")
    connection.close()
    before = file.read_bytes()
    found = report(home, *models, before=LITERT, code=1)["data_dir"]
    assert found["stored_bytes"] is None
    assert "ssmd session export --all" in found["problem"]
    assert file.read_bytes() == before
    file.write_bytes(b"no database" * 1000)
    found = report(home, *models, before=LITERT, code=1)
    assert "sessions.sqlite3" in found["data_dir"]["problem"]


def test_what_was_found_steers_no_terminal(home: Path) -> None:
    found = report(home, before=LITERT)
    found["models"][0]["problem"] = "\x1b[2J\n" + "x" * 5000
    found["runtimes"][0]["why_not"] = "\x9b1m"
    for line in lines(found):
        assert line.isprintable()
        assert len(line) < 1100


def test_a_full_disk_is_told(home: Path) -> None:
    found = report(home, before=LITERT)
    found["data_dir"]["free_bytes"] = 1_000_000
    assert any(line.startswith("  no  disk: 1.0 MB free: no state can be stored") for line in lines(found))


def test_a_closer_look_at_a_runtime(home: Path, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    done = ssmd(home, "doctor", "coreml", "--report", str(file))
    assert done.returncode == 0, done.stderr
    assert "verified by an independent evaluator on Linux, not executed on Apple hardware" in done.stdout
    assert "ssmd pull smollm2 --runtime coreml makes one" in done.stderr
    assert json.loads(file.read_text())["artifacts"] == []
    for arguments, said in (
        (("coreml", "--report", str(tmp_path / "none" / "x.json")), "there is no folder"),
        (("litert",), "no closer look at litert"),
    ):
        done = ssmd(home, "doctor", *arguments)
        assert (done.returncode, done.stdout) == (1, "")
        assert said in done.stderr
