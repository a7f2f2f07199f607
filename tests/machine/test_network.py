"""Private sockets: anything in the place of one is seen, other users are kept out, closing it leaves nothing."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ssmd.machine.network import listen_privately


@pytest.fixture
def path() -> Iterator[Path]:
    """A place in a folder that every user can look into."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder / "one.sock"
    shutil.rmtree(folder)


def test_it_is_there_while_it_is_open(path: Path) -> None:
    umask = os.umask(0)
    try:
        with listen_privately(path, 5):
            assert oct(path.lstat().st_mode)[-3:] == "600"
            assert os.umask(0) == 0
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(str(path))
    finally:
        os.umask(umask)
    assert not path.exists()


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="only root can be another user")
def test_another_user_is_kept_out(path: Path) -> None:
    script = "import os, socket, sys; os.setuid(65534); socket.socket(socket.AF_UNIX).connect(sys.argv[1])"
    with listen_privately(path, 5):
        done = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=False)
    assert "PermissionError" in done.stderr


def test_what_a_dead_process_left_is_replaced(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with listen_privately(path, 5), socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))


def test_one_that_lives_is_left_alone(path: Path) -> None:
    with listen_privately(path, 5):
        with pytest.raises(OSError, match="another process listens there"):
            listen_privately(path, 5)
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))


def test_only_its_own_file_is_taken_away(path: Path) -> None:
    with listen_privately(path, 5):
        path.unlink()
        path.write_text("another's")
    assert path.read_text() == "another's"


@pytest.mark.parametrize("to", ["file", "socket", "nothing"])
def test_a_link_is_not_followed(path: Path, to: str) -> None:
    target = path.with_name("target")
    with socket.socket(socket.AF_UNIX) as dead:
        if to == "socket":
            dead.bind(str(target))
        elif to == "file":
            target.touch()
        path.symlink_to(target)
        with pytest.raises(OSError, match="not a socket"):
            listen_privately(path, 5)
    assert path.is_symlink()
    assert target.exists() == (to != "nothing")


def test_files_and_folders_are_left_alone(path: Path) -> None:
    path.write_text("kept")
    with pytest.raises(OSError, match="not a socket"):
        listen_privately(path, 5)
    assert path.read_text() == "kept"
    with pytest.raises(OSError, match="not a socket"):
        listen_privately(path.parent, 5)


def test_a_folder_where_every_user_may_replace_files_is_refused(path: Path) -> None:
    path.parent.chmod(0o777)
    with pytest.raises(OSError, match="every user"):
        listen_privately(path, 5)
    path.parent.chmod(0o1777)  # as /tmp
    listen_privately(path, 5).close()
