"""scripts/setup in a copy of the clone whose packages come from the folder itself: what it mends, and what it says."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from mirror import free_port
from modules import ROOT

BACKEND = """
import base64, hashlib, os, zipfile

def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    name, info = "made-1-py3-none-any.whl", "made-1.dist-info"
    files = {f"{info}/METADATA": "Metadata-Version: 2.1\\nName: made\\nVersion: 1\\nProvides-Extra: litert\\n"
             "Provides-Extra: test\\n",
             f"{info}/WHEEL": "Wheel-Version: 1.0\\nGenerator: x\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n",
             f"{info}/entry_points.txt": "[console_scripts]\\nssmd = made:main\\n"}
    with zipfile.ZipFile(os.path.join(wheel_directory, name), "w") as wheel:
        for path, text in files.items():
            wheel.writestr(path, text)
        wheel.writestr("made.txt", "a" * 200_000)
        wheel.writestr(f"{info}/RECORD", "".join(f"{path},,\\n" for path in (*files, "made.txt", f"{info}/RECORD")))
    return name
"""
PROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
"""
MENDED = "mending .venv, which has no pip"
TOOLS = ("awk", "bash", "df", "dirname", "env", "grep", "head", "ls", "mkdir", "sed", "sleep", "tail", "tee", "touch")


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A folder with the script and a project that needs nothing from elsewhere."""
    (tmp_path / "clone" / "scripts").mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "setup", tmp_path / "clone" / "scripts")
    for name in ("ssmd", "runtimes", "clients"):
        (tmp_path / "clone" / name).mkdir()
    (tmp_path / "clone" / "backend.py").write_text(BACKEND)
    (tmp_path / "clone" / "pyproject.toml").write_text(PROJECT)
    return tmp_path / "clone"


def setup(clone: Path, *arguments: str, **extra: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.lower().startswith(("pip_", "python"))}
    env = {**kept, "PYTHON": sys.executable, "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, **extra}
    command = ["scripts/setup", *(arguments or ("litert",))]
    return subprocess.run(command, cwd=clone, env=env, capture_output=True, text=True, timeout=300, check=False)


def steps(done: subprocess.CompletedProcess[str]) -> list[str]:
    """Return the line of each step, without its styling."""
    assert done.returncode == 0, done
    assert done.stdout == ""
    return [re.sub(r"\x1b\[\d*m", "", line).removeprefix("==> ") for line in done.stderr.splitlines()]


def python(clone: Path, body: str) -> str:
    """Return a Python whose `-m venv` runs a shell script instead of making an environment."""
    program = clone.parent / "python"
    program.write_text(f'#!/bin/sh\n[ "$1 $2" = "-m venv" ] || exec {sys.executable} "$@"\n{body}\n')
    program.chmod(0o755)
    return str(program)


def env_without_pip(clone: Path, *options: str) -> None:
    command = [sys.executable, "-m", "venv", "--without-pip", *options, str(clone / ".venv")]
    subprocess.run(command, check=True, timeout=60)


WITHOUT = """{python} -m venv --without-pip .venv
echo "The virtual environment was not created successfully because ensurepip is not
available.  On Debian/Ubuntu systems, you need to install the python3-venv
package using the following command.

    apt install python3.11-venv

You may need to use sudo with that command."
exit 1"""


def test_setup_mends_what_a_python_without_venv_left(clone: Path) -> None:
    """Debian's Python fails midway and names its package; once that is installed, the same command succeeds."""
    done = setup(clone, PYTHON=python(clone, WITHOUT.format(python=sys.executable)))
    assert (done.returncode, done.stdout) == (1, "")
    making, error = done.stderr.splitlines()
    assert "making .venv with Python 3." in making
    assert "on Debian and Ubuntu, as root: apt install python3.11-venv; then the same command again" in error
    assert error.endswith(f"the full output is in {clone}/.cache/setup.log")
    assert "python3-venv\n" in (clone / ".cache/setup.log").read_text()
    assert steps(setup(clone)) == [MENDED, "installing ssmd-daemon[litert], 335 MB on the disk"]
    assert (clone / ".venv/bin/ssmd").exists()
    assert steps(setup(clone)) == []


def test_setup_goes_on_without_a_log_that_it_may_write(clone: Path) -> None:
    """After `sudo scripts/setup` the log is root's. A folder stands for it here, as root may write all files."""
    (clone / ".cache" / "setup.log").mkdir(parents=True)
    env_without_pip(clone, "--system-site-packages")
    note = f"{clone}/.cache/setup.log cannot be written, so pip's output is not kept; -v shows it"
    assert steps(setup(clone)) == [note, "installing ssmd-daemon[litert], 335 MB on the disk"]
    (clone / "pyproject.toml").write_text(PROJECT.replace("[]", '["hatchling>=1.27"]'))
    *_, error = setup(clone).stderr.splitlines()
    assert error.endswith("could not be installed: -v shows the full output")


@pytest.mark.full
def test_setup_goes_on_after_it_was_killed(clone: Path) -> None:
    """This holds too if the rest of .venv is not an environment, and its Python is the system's own."""
    process = subprocess.Popen(
        ["scripts/setup", "litert"],
        cwd=clone,
        env={**os.environ, "PYTHON": sys.executable, "PIP_NO_INDEX": "1"},
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    while not (clone / ".venv/bin/python").exists() and process.poll() is None:
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    assert process.wait(60) != 0
    assert steps(setup(clone))[-1].startswith("installing ssmd-daemon[litert]")
    (clone / ".venv/pyvenv.cfg").unlink()
    assert steps(setup(clone))[0].startswith("making .venv with Python 3.")


def test_setup_says_that_there_is_no_network(clone: Path) -> None:
    env_without_pip(clone, "--system-site-packages")
    (clone / "pyproject.toml").write_text(PROJECT.replace("[]", '["hatchling>=1.27"]'))
    nowhere = f"http://me:secret@127.0.0.1:{free_port()}/simple"
    done = setup(clone, PIP_NO_INDEX="0", PIP_INDEX_URL=nowhere, PIP_RETRIES="1")
    *_, error = done.stderr.splitlines()
    assert done.returncode == 1
    assert "could not be installed: no network: pip cannot reach 127.0.0.1:" in error
    assert "secret" not in done.stderr


def test_setup_says_how_much_room_is_missing(clone: Path, tmp_path: Path) -> None:
    """It reports it before it begins if its own disk is too small, and afterwards if that of temporary files was."""
    env_without_pip(clone, "--system-site-packages")
    small = tmp_path / "small"
    small.mkdir()

    def on_a_small_disk(size: str, command: str) -> subprocess.CompletedProcess[str]:
        mounted = f"mount -t tmpfs -o size={size} none {small} && {command}"
        env = {**os.environ, "PIP_NO_INDEX": "1"}
        words = ["unshare", "--mount", "--map-root-user", "sh", "-c", mounted]
        return subprocess.run(words, env=env, capture_output=True, text=True, timeout=120, check=False)

    if shutil.which("unshare") is None or on_a_small_disk("1m", "true").returncode != 0:
        pytest.skip("no file system can be mounted here")
    done = on_a_small_disk("60m", f"cp -r {clone} {small} && {small}/clone/scripts/setup litert")
    assert done.returncode == 1
    [error] = done.stderr.splitlines()
    found = re.fullmatch(
        rf"error: no room: (\d+) MB more needed; .venv takes 335 MB for litert, and the disk of {small}/clone has "
        r"(\d+) MB free",
        error,
    )
    assert found is not None, error
    assert int(found[1]) + int(found[2]) == 335
    done = on_a_small_disk("64k", f"TMPDIR={small} {clone}/scripts/setup litert")
    assert done.returncode == 1
    assert re.search(rf"could not be installed: no room: the disk of .* free, that of {small} 0 MB; ", done.stderr)


def test_python_3_14_serves_and_does_not_build(clone: Path, tmp_path: Path) -> None:
    program = tmp_path / "bin" / "python3.14"
    program.parent.mkdir()
    program.write_text(
        f"""#!/bin/sh
case "$1 $2" in
"-m venv") echo no more of it is tried here; exit 1 ;;
"--version ") echo Python 3.14.0 ;;
"-c "*) exec {sys.executable} -c "import sys; sys.version_info = (3, 14, 0)
$2" ;;
esac
"""
    )
    program.chmod(0o755)
    for tool in TOOLS:
        (program.parent / tool).symlink_to(shutil.which(tool) or tool)
    only = {"PATH": str(program.parent), "PYTHON": ""}
    assert (
        "making .venv with Python 3.14.0" in setup(clone, "litert", "openvino", "wgpu", "tray", "test", **only).stderr
    )
    for extra in ("build", "coreml"):
        said = setup(clone, "litert", extra, **only).stderr
        [error] = said.splitlines()
        assert error.startswith(f"error: ssmd needs Python 3.11 to 3.13 for litert {extra}; none was found.")


def test_setup_shows_what_pip_says_when_asked_to(clone: Path) -> None:
    env_without_pip(clone, "--system-site-packages")
    said = setup(clone, "-v", "litert")
    assert said.returncode == 0
    assert "Successfully installed made-1" in said.stderr
