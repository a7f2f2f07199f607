"""Runtimes that are tried in processes of their own: what each can do to the process that tries it."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from ssmd.runtime.devices import RuntimeStatus, find, look, why_not
from ssmd.runtime.info import runtime_names
from ssmd.runtime.protocol import Device

CPU, GPU = Device("cpu", "a processor"), Device("gpu", "a GPU", "there is none")
ODD = "class Odd:\n    def devices(self):\n        "


@pytest.fixture
def odd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The module of a runtime from elsewhere, which is registered and yet to be written."""
    info = tmp_path / "odd_runtime-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: odd-runtime\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[ssmd.runtimes]\nodd = odd_runtime:Odd\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "odd_runtime", raising=False)
    return tmp_path / "odd_runtime.py"


def test_all_that_are_registered_are_tried() -> None:
    found = {one.name: one for one in find()}
    assert [*found] == runtime_names()
    assert [device.name for device in found["litert"].usable] == ["cpu"]
    assert found["litert"].why_not == ""
    assert found["litert"] == look("litert"), "a process of its own finds the same"
    if sys.platform != "darwin":
        assert found["coreml"].why_not.startswith("Core ML cannot execute here")
    assert find([]) == []


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("def (", "fails when it is loaded (SyntaxError: "),
        ("import sys; sys.exit(3)", "(SystemExit: 3)"),
        ("", "(AttributeError: "),
        ("class Odd:\n    def __init__(self):\n        raise OSError('no driver')", "(OSError: no driver)"),
        ("import os; os.abort()", "tried in a process of its own, and it crashed (SIGABRT)"),
        (ODD + "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "it crashed (SIGSEGV)"),
        (ODD + "import os; os._exit(7)", "exit code 7"),
        (ODD + "import ctypes; ctypes.CDLL('libodd.so.7')", "(OSError: libodd.so.7: cannot open shared object file"),
        (ODD + "raise RuntimeError('no driver')", "it cannot list its devices (RuntimeError: no driver)"),
        (ODD + "return None", "it cannot list its devices (TypeError: "),
        (ODD + "return []", "it has no devices"),
        (ODD + "import time; time.sleep(60)", "it was not done after 3 s"),
    ],
)
def test_one_that_cannot_be_loaded_is_told_of(code: str, said: str, odd: Path) -> None:
    odd.write_text(code)
    began = time.monotonic()
    found = {one.name: one for one in find(["odd", "litert"], limit_s=3 if "sleep" in code else 60)}
    assert said in found["odd"].why_not
    assert found["odd"].usable == ()
    assert found["litert"].usable, "the others are none the worse"
    assert time.monotonic() - began < 30


def test_what_a_library_says_is_no_answer(odd: Path) -> None:
    odd.write_text(
        "import atexit, os; from ssmd.runtime import Device\nprint('banner')\n"
        "atexit.register(lambda: (os.write(1, b'bye\\n'), os.abort()))\n"
        + ODD
        + "os.write(1, b'{\"devices\": []}\\nloading '); return [Device('cpu', 'odd')]"
    )
    assert find(["odd"]) == [RuntimeStatus("odd", "", (Device("cpu", "odd"),))]


def test_a_check_is_for_what_can_be_used(odd: Path) -> None:
    """Core ML's imports its library, which takes seconds."""
    check = (
        "\n    def check(self):\n        from ssmd.runtime import RuntimeUnavailable; raise RuntimeUnavailable('no')"
    )
    for reason, said in (("", "no"), ("there is none", "there is none")):
        odd.write_text(ODD + f"from ssmd.runtime import Device; return [Device('cpu', 'odd', {reason!r})]" + check)
        [found] = find(["odd"])
        assert found.why_not == said


def test_why_a_device_cannot_be_used() -> None:
    assert why_not("litert", [CPU, GPU], "cpu") == ""
    assert why_not("litert", [CPU, GPU], "gpu") == "gpu: there is none"
    assert why_not("litert", [CPU, GPU], "npu") == "runtime litert has no device 'npu'; it has: cpu, gpu"
    assert why_not("litert", [], "npu").endswith("it has: none")
    assert RuntimeStatus("x", "", (GPU,)).why_not == "there is none"
    assert RuntimeStatus("x", "", (CPU, GPU)).why_not == ""
    assert RuntimeStatus("x", "broken", ()).why_not == "broken"
