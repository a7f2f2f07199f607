"""ssmd's installation: the commands that add what is missing. All such advice to users is made in this file."""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import sys
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

DISTRIBUTION = "ssmd-daemon"
ROOT = Path(__file__).resolve().parents[2]  # a clone's root; else the folder of installed packages
_MOST_CHARS = 300  # characters of an import's error that are shown
_NO_LIBRARY = re.compile(r"\b(lib[\w.+-]+?\.so[.\d]*): cannot open shared object file")
_OLD_LIBRARY = re.compile(r"version `((?:GLIBC|GLIBCXX|CXXABI)_[\d.]+)' not found")
_EXTRA = re.compile(r"""(?P<package>[^;]+);\s*extra\s*==\s*["'](?P<extra>[^"']+)["']\s*""")


def extra(name: str) -> tuple[str, ...]:
    """Return an extra's packages, as pip takes them; () if ssmd has no such extra, or no metadata is installed."""
    try:
        lines = requires(DISTRIBUTION) or ()
    except PackageNotFoundError:
        return ()
    found = filter(None, map(_EXTRA.fullmatch, lines))
    return tuple(f["package"].strip() for f in found if f["extra"] == name)


def to_add(*extras: str) -> str:
    """Return the command that adds extras.

    In a clone it is the clone's own script. Else pip gets the packages of the extras, as ssmd itself may not be on any
    index.
    """
    if _in_a_clone():
        setup = r"powershell -ExecutionPolicy Bypass -File scripts\setup.ps1" if os.name == "nt" else "scripts/setup"
        return f"{setup} {' '.join(extras)}"
    packages = dict.fromkeys(package for name in extras for package in extra(name))
    return to_install(*packages) if packages else f"pip install 'WHEEL[{','.join(extras)}]', with ssmd's wheel"


def to_install(*packages: str) -> str:
    """Return the command that installs packages for this Python."""
    if not has_pip():
        command = f"uv pip install --python {_quoted(sys.executable)}"
    elif Path(shutil.which("pip") or "").parent == Path(sys.executable).parent:
        command = "pip install"
    else:  # `pip` alone is another Python's, or missing
        command = f"{_quoted(sys.executable)} -m pip install"
    return f"{command} {' '.join(map(_quoted, packages))}"


def _quoted(word: str) -> str:
    """Return a word quoted for the system's shell; Windows' shell does not support single quotes."""
    if sys.platform == "win32":
        return word if re.fullmatch(r"[\w.:\\/=-]+", word) else f'"{word}"'
    return shlex.quote(word)


def broken(package: str, err: BaseException) -> str:
    """Return the reason why an installed package or its library cannot be loaded, with the remedy."""
    said = str(err)
    if "DLL load failed" in said or getattr(err, "winerror", None) in (126, 127):
        chip = "arm64" if platform.machine().lower() in ("arm64", "aarch64") else "x64"
        return (
            f"{package} is installed, a DLL that it needs is not: install the Microsoft Visual C++ Redistributable, "
            f"https://aka.ms/vs/17/release/vc_redist.{chip}.exe"
        )
    if found := _NO_LIBRARY.search(said):
        return (
            f"{package} is installed, the system's library {found[1]} that it needs is not: install the package of "
            "your system that has it"
        )
    if found := _OLD_LIBRARY.search(said):
        return (
            f"{package} is installed, and needs {found[1]}, which this system's libraries are too old for: use a newer "
            "system, or another runtime"
        )
    line = next(iter(said.splitlines()), "")[:_MOST_CHARS]
    return (
        f"{package} is installed and cannot be loaded ({type(err).__name__}: {line}); install it anew with: "
        f"{to_install('--force-reinstall', _requirement(package))}"
    )


def _requirement(package: str) -> str:
    """Return the package with the version bounds of ssmd's extra."""
    try:
        found = filter(None, map(_EXTRA.fullmatch, requires(DISTRIBUTION) or ()))
        asked = (f["package"].strip() for f in found)
        return next(one for one in asked if re.split(r"[^\w.-]", one)[0] == package)
    except (PackageNotFoundError, StopIteration):
        return package


def has_pip() -> bool:
    """Return True if this Python has pip; environments of uv have none."""
    return PathFinder.find_spec("pip") is not None  # importlib.util.find_spec would have setuptools replace distutils


def _in_a_clone() -> bool:
    """Return True if this runs in the environment that a clone's scripts/setup makes."""
    return (ROOT / "scripts" / "setup").is_file() and Path(sys.prefix).resolve() == (ROOT / ".venv").resolve()
