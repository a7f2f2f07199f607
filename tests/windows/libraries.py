"""Libraries that Windows has and wine 8 has not: made from the C files beside this one, and from lists of exports."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

HERE = Path(__file__).parent
COMPILER, READER = "x86_64-w64-mingw32-gcc", "x86_64-w64-mingw32-objdump"
MATH, OURS = "api-ms-win-crt-math-l1-1-0.dll", "zpi-ms-win-crt-math-l1-1-0.dll"  # names of one length
_COMPLEX = re.compile(r"c(real|imag|abs|arg|exp|pow|(sin|cos|tan)h?)[fl]?")


def make_libraries(python: Path, version: str) -> None:
    """Make them in the folder `python`, whose packages are installed. `version`: of the DLL, as 311."""
    _compiled(python / "bcryptprimitives.dll", HERE / "prng.c", "-ladvapi32")
    # What is built for every Python 3 asks for python3.dll, which has nothing of its own.
    named = f"python{version}"
    exports = [name for name in _exports(python / f"{named}.dll") if name.startswith(("Py", "_Py"))]
    _compiled(python / "python3.dll", _definition(python / "python3.def", {n: f"{named}.{n}" for n in exports}))
    _make_math(python)


def _make_math(python: Path) -> None:
    """Wine finds this library inside its own, whatever lies here; so those that need ours are told another name."""
    needed: set[str] = set()
    for file in [*python.rglob("*.pyd"), *python.rglob("*.dll")]:
        if MATH.encode() in (content := file.read_bytes()):
            names = _imports(file, MATH)
            if any(map(_COMPLEX.fullmatch, names)):
                needed |= names
                file.write_bytes(content.replace(MATH.encode(), OURS.encode()))
    if needed:
        exports = {n: f"my_{n}" if _COMPLEX.fullmatch(n) else f"ucrtbase.{n}" for n in sorted(needed)}
        _compiled(python / OURS, HERE / "complex.c", _definition(python / "math.def", exports))


def _definition(file: Path, exports: dict[str, str]) -> Path:
    """A list of exports, each another name for a function here or, `library.function`, of another library."""
    file.write_text("EXPORTS\n" + "".join(f"{name} = {what}\n" for name, what in exports.items()))
    return file


def _compiled(library: Path, *sources: Path | str) -> None:
    command = [COMPILER, "-shared", "-O1", "-s", "-static-libgcc", "-o", str(library), *map(str, sources)]
    subprocess.run(command, check=True)


def _exports(library: Path) -> list[str]:
    _, _, table = _read(library).partition("[Ordinal/Name Pointer] Table")
    return re.findall(r"^\s*\[ *\d+\].*? (\w+)$", table, re.MULTILINE)


def _imports(file: Path, library: str) -> set[str]:
    """The names that a file takes from a library."""
    _, _, table = _read(file).partition(f"DLL Name: {library}")
    table = table.partition("DLL Name:")[0].partition("\n\n")[0]
    return set(re.findall(r"^\s+[0-9a-f]+\s+\d+\s+(\w+)\s*$", table, re.MULTILINE))


def _read(file: Path) -> str:
    return subprocess.run([READER, "-p", str(file)], check=True, capture_output=True, text=True).stdout
