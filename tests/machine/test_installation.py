"""Advised commands, by where ssmd runs: a clone, a wheel, an environment without pip."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from ssmd.machine import installation
from ssmd.machine.installation import ROOT, broken, extra, to_add, to_install

EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def parts(requirement: str) -> set[str]:
    """Its name and bounds, in whatever order."""
    name = re.match(r"[\w-]+", requirement)
    assert name
    return {name[0], *requirement[name.end() :].replace(" ", "").split(",")}


def test_an_extra_stands_for_what_pyproject_says() -> None:
    for name in ("litert", "openvino", "wgpu", "coreml"):
        assert [parts(p) for p in extra(name)] == [parts(p) for p in EXTRAS[name]]
    assert extra("nothing") == ()


def test_a_clone_has_a_script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "prefix", str(ROOT / ".venv"))
    assert to_add("openvino") == "scripts/setup openvino"
    assert to_add("litert", "build") == "scripts/setup litert build"
    (tmp_path / "link").symlink_to(ROOT)  # as where a home folder is one
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "link" / ".venv"))
    assert to_add("openvino") == "scripts/setup openvino"
    monkeypatch.setattr(sys, "prefix", "/another/environment")  # which the script would not fill
    assert to_add("openvino").endswith(f" {shlex.join(extra('openvino'))}")


def test_a_wheel_names_what_an_index_has(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A line that can be typed as it stands, and does not name ssmd-daemon, which is on no index."""
    monkeypatch.setattr(installation, "ROOT", tmp_path)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    command = shlex.split(to_add("litert"))
    assert command[-1] == extra("litert")[0]
    assert command[: command.index("install")] in (["pip"], [sys.executable, "-m", "pip"])
    assert subprocess.run([*command, "--dry-run", "--no-index", "--quiet"], check=False).returncode == 0


def test_pip_is_this_environments(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert to_install("a>=1", "b") == f"{tmp_path}/python -m pip install 'a>=1' b"
    (tmp_path / "pip").write_text("")
    (tmp_path / "pip").chmod(0o755)
    assert to_install("a>=1", "b") == "pip install 'a>=1' b"
    with monkeypatch.context() as patch:
        patch.setattr(sys, "path", [])  # where there is none
        assert to_install("a>=1", "b") == f"uv pip install --python {tmp_path}/python 'a>=1' b"


def test_no_advice_is_made_elsewhere() -> None:
    files = [f for folder in ("ssmd", "runtimes") for f in (ROOT / folder).rglob("*.py")]
    named = {f.name for f in files if re.search(r"pip install|scripts/setup", f.read_text("utf-8"))}
    assert named == {"installation.py"}


@pytest.mark.parametrize(
    ("err", "said"),
    [
        (
            ImportError("DLL load failed while importing _pywrap: The specified module could not be found."),
            "x is installed, a DLL that it needs is not: install the Microsoft Visual C++ Redistributable, https://aka.ms",
        ),
        (
            OSError("libvulkan.so.1: cannot open shared object file: No such file or directory"),
            "the system's library libvulkan.so.1 that it needs is not",
        ),
        (
            ImportError("/lib/libc.so.6: version `GLIBC_2.35' not found (required by /x/libopenvino.so)"),
            "needs GLIBC_2.35, which this system's libraries are too old for",
        ),
        (
            RuntimeError("no luck\nsecond line"),
            "installed and cannot be loaded (RuntimeError: no luck); install it",
        ),
        (ImportError(), "x is installed and cannot be loaded (ImportError: ); install it anew with: "),
    ],
)
def test_why_what_is_installed_cannot_be_loaded(err: Exception, said: str) -> None:
    assert said in broken("x", err)
    assert "\n" not in broken("x", err)


def test_what_is_installed_anew_has_its_bounds() -> None:
    assert shlex.quote(next(iter(extra("openvino")))) in broken("openvino", OSError("odd"))
