"""Files and calls that only Linux has are used in ssmd/machine and nowhere else."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from conftest import ROOT

FILES = ("/proc", "/sys")
CALLS = ("sched_", "setpriority", "getpriority", "memfd_", "pidfd_", "posix_fadvise", "prctl", "eventfd", "splice")


def only_on_linux(file: Path) -> Iterator[str]:
    """The places of a module that name a file of Linux' kernel, or a call of `os` that other systems lack."""
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        match node:
            case ast.Constant(value=str(text)) if text in FILES or text.startswith(tuple(f"{f}/" for f in FILES)):
                yield f"{file.name}:{node.lineno} {text}"
            case ast.Attribute(value=ast.Name(id="os"), attr=name) if name.startswith(CALLS):
                yield f"{file.name}:{node.lineno} os.{name}"


def test_linux_is_asked_in_one_place() -> None:
    modules = [f for folder in ("ssmd", "runtimes", "clients") for f in (ROOT / folder).rglob("*.py")]
    outside = [f for f in modules if not f.is_relative_to(ROOT / "ssmd" / "machine")]
    assert [place for file in outside for place in only_on_linux(file)] == []


def test_such_places_are_seen(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text('import os\nos.sched_getaffinity(0)\nopen("/proc/self/status")\nopen("/system/x")\nos.getpid()\n')
    assert list(only_on_linux(module)) == ["module.py:2 os.sched_getaffinity", "module.py:3 /proc/self/status"]
