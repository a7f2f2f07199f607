"""How ssmd was installed here, and so what to type to add what is missing: every such advice is made in this file."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

DISTRIBUTION = "ssmd-daemon"
ROOT = Path(__file__).resolve().parents[2]  # of a clone; else the folder that packages are installed in
_EXTRA = re.compile(r"""(?P<package>[^;]+);\s*extra\s*==\s*["'](?P<extra>[^"']+)["']\s*""")


def extra(name: str) -> tuple[str, ...]:
    """What an extra of ssmd stands for, as pip takes it; () if there is no such extra, or nothing installed knows."""
    try:
        lines = requires(DISTRIBUTION) or ()
    except PackageNotFoundError:
        return ()
    found = filter(None, map(_EXTRA.fullmatch, lines))
    return tuple(f["package"].strip() for f in found if f["extra"] == name)


def to_add(*extras: str) -> str:
    """The command that adds extras: a clone's own script, else pip with the packages that they stand for, as ssmd
    itself may be on no index."""
    if _in_a_clone():
        return f"scripts/setup {' '.join(extras)}"
    packages = dict.fromkeys(package for name in extras for package in extra(name))
    return to_install(*packages) if packages else f"pip install 'WHEEL[{','.join(extras)}]', with ssmd's wheel"


def to_install(*packages: str) -> str:
    """The command that installs packages where this Python finds them."""
    if not has_pip():
        command = f"uv pip install --python {shlex.quote(sys.executable)}"
    elif Path(shutil.which("pip") or "").parent == Path(sys.executable).parent:
        command = "pip install"
    else:  # what `pip` alone means would go elsewhere, or nowhere
        command = f"{shlex.quote(sys.executable)} -m pip install"
    return f"{command} {shlex.join(packages)}"


def has_pip() -> bool:
    """Whether this Python has pip; environments of uv have none."""
    return PathFinder.find_spec("pip") is not None  # importlib.util.find_spec would have setuptools replace distutils


def _in_a_clone() -> bool:
    """Whether this runs in the environment that a clone's scripts/setup makes and fills."""
    return (ROOT / "scripts" / "setup").is_file() and Path(sys.prefix).resolve() == (ROOT / ".venv").resolve()
