"""The tray on a real desktop: X, a window manager, a tray host, and a pointer and a keyboard that are xdotool's."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from conftest import TinyArtifacts
from desktop import Desktop, desktop, missing, started, tray_command
from noted import note_all
from several import GRANITE, LLAMA, Several, models_folder, several
from standing import found_at, standing_in
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from test_server import running
from watched import metrics

from ssmd.daemon.discovery import find

pytestmark = pytest.mark.ui
ACCENT, WARNING, INK, FAINT = "#1f6feb", "#bf6a02", "#24292f", "#7d858f"  # of ssmd_tray.qt.icon, on what is light
TYPIST = (
    "from PySide6.QtWidgets import QApplication, QLineEdit; app = QApplication(['typist'])\n"
    "line = QLineEdit(); line.setWindowTitle('typist'); line.show(); app.exec()"
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desktop]:
    assert not missing(), f"install these: {missing()}"
    with desktop(tmp_path_factory.mktemp("desktop")) as one:
        yield one


@pytest.fixture(scope="module")
def served(artifacts: TinyArtifacts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Several]:
    with several(models_folder(artifacts, tmp_path_factory.mktemp("ui") / "models")) as one:
        yield one


@contextmanager
def tray(place: Desktop, data: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """The command, until the body ends; its words are shown if it says any."""
    words = data.parent / "words"
    with started(tray_command("--data-dir", str(data), *arguments), place.variables, out=words) as process:
        yield process
    assert words.read_text() == ""


def menu(place: Desktop, *keys: str) -> None:
    """Choose in the icon's menu by keyboard."""
    place.click_icon(3)
    place.soon(lambda: len(place.xdotool("search", "--onlyvisible", "--class", "ssmd-tray").split()) >= 1)
    subprocess.run(["sleep", "0.4"], check=True)
    place.xdotool("key", "--delay", "80", *keys)


def test_the_icon_and_its_window(place: Desktop, served: Several, tmp_path: Path) -> None:
    """A click shows the window, one more hides it; no click, no window."""
    with found_at(tmp_path / "data", served.served.url), place.host(), tray(place, tmp_path / "data"):
        place.soon(lambda: place.colours()[INK] > 20)
        assert place.windows("ssmd") == []
        place.click_icon()
        place.soon(lambda: place.windows("ssmd"))
        place.soon(lambda: place.focused() == "ssmd")
        place.click_icon()
        place.soon(lambda: not place.windows("ssmd"))
        place.click_icon()
        place.soon(lambda: place.focused() == "ssmd")
        place.xdotool("key", "Escape")
        place.soon(lambda: not place.windows("ssmd"))


def test_models_by_keyboard(place: Desktop, served: Several, tmp_path: Path) -> None:
    """Loaded, pinned and let go in the menu and in the window; an answer is seen in the icon."""
    with found_at(tmp_path / "data", served.served.url), place.host(), tray(place, tmp_path / "data"):
        place.soon(lambda: place.colours()[INK] > 20)
        menu(place, "m", "Return", "Return")  # Models, the first of them, Load
        place.soon(lambda: served.row(GRANITE)["state"] == "loaded")
        with served.asking(LLAMA, n=4):
            place.soon(lambda: place.colours()[ACCENT] > 100)
        served.quiet()
        place.soon(lambda: place.colours()[ACCENT] == 0)
        menu(place, "w")
        place.soon(lambda: place.focused() == "ssmd")
        # Tab goes from "Open page" back over the models: what comes before it is the last model's Pin.
        place.xdotool("key", "shift+Tab", "space")
        last = served.metrics()["models"][-1]["id"]
        place.soon(lambda: served.row(last)["pinned"])
        place.xdotool("key", "space")
        place.soon(lambda: not served.row(last)["pinned"])
        place.xdotool("key", "shift+Tab", "space")
        place.soon(lambda: served.row(last)["state"] == "loaded")
        menu(place, "m", "Return", "Return")
        place.soon(lambda: served.row(GRANITE)["state"] == "unloaded")


def test_without_a_host(place: Desktop, served: Several, tmp_path: Path) -> None:
    """The window opens and leaves the keyboard to the program in use. When a host comes, the icon goes there."""
    typist = started([sys.executable, "-c", TYPIST], place.variables)
    with found_at(tmp_path / "data", served.served.url), typist:
        place.soon(lambda: place.focused() == "typist")
        with tray(place, tmp_path / "data") as process:
            place.soon(lambda: place.windows("ssmd"))
            assert place.focused() == "typist"
            with place.host():
                place.soon(lambda: place.colours()[INK] > 20)
                place.xdotool("windowactivate", "--sync", place.windows("ssmd")[0])
                subprocess.run(["sleep", "1.5"], check=True)
                place.xdotool("key", "Escape")
                place.soon(lambda: not place.windows("ssmd"))
                assert process.poll() is None, "it lives in the tray now"
        with tray(place, tmp_path / "data") as process:
            place.soon(lambda: place.windows("ssmd"))
            place.xdotool("windowactivate", "--sync", place.windows("ssmd")[0], "key", "Escape")
            assert process.wait(10) == 0, "what nobody can see does not stay"


def test_two_trays(place: Desktop, served: Several, tmp_path: Path) -> None:
    """The second has the first show its window; so has one after a tray that was killed."""
    with found_at(tmp_path / "data", served.served.url), place.host():
        with tray(place, tmp_path / "data") as process:
            place.soon(lambda: place.colours()[INK] > 20)
            process.kill()
        with tray(place, tmp_path / "data") as process:
            place.soon(lambda: place.colours()[INK] > 20)
            second = subprocess.run(
                tray_command("--data-dir", str(tmp_path / "data")), env=place.variables, timeout=30, check=True
            )
            assert second.returncode == 0
            place.soon(lambda: place.windows("ssmd"))
            assert process.poll() is None


def test_killed_in_the_middle_of_an_answer_and_back(place: Desktop, artifacts: TinyArtifacts, tmp_path: Path) -> None:
    data, artifact = tmp_path / "data", str(artifacts["llama-f32"])
    with place.host(), tray(place, data):
        place.soon(lambda: place.colours()[FAINT] > 5)
        with running(tmp_path, artifact) as (process, _):
            place.soon(lambda: place.colours()[INK] > 20, within_s=40)
            process.kill()
            place.soon(lambda: place.colours()[FAINT] > 5)
        with running(tmp_path, artifact) as (process, _):
            place.soon(lambda: place.colours()[INK] > 20, within_s=40)
            place.click_icon()
            place.soon(lambda: place.focused() == "ssmd")
            place.xdotool("key", "alt+t")  # Stop daemon
            assert process.wait(30) == 0
            place.soon(lambda: place.colours()[FAINT] > 5)


def test_start_at_login_and_start(place: Desktop, artifacts: TinyArtifacts, tmp_path: Path) -> None:
    """The desktop's entry starts the tray. The tray starts a daemon, and is quit without ending it."""
    data = tmp_path / "data"
    entry = place.folder / "config" / "autostart" / "ssmd-tray.desktop"
    models = models_folder(artifacts, tmp_path / "models")
    note_all([str(one) for one in models.glob("*/*")], data)
    with place.host():
        with tray(place, data) as process:
            place.soon(lambda: place.colours()[FAINT] > 5)
            menu(place, "g")
            place.soon(entry.exists)
            menu(place, "q")
            assert process.wait(10) == 0
        [line] = [line for line in entry.read_text().splitlines() if line.startswith("Exec=")]
        own = {"SSMD_MODELS_DIR": str(models), "SSMD_PORT": "0"}
        with started(["sh", "-c", line.removeprefix("Exec=")], {**place.variables, **own}):
            place.soon(lambda: place.colours()[FAINT] > 5)
            menu(place, "d", "Return")  # Daemon, Start
            place.soon(lambda: find(data) is not None, within_s=60)
            place.soon(lambda: place.colours()[INK] > 20)
            menu(place, "g")
            place.soon(lambda: not entry.exists())
            menu(place, "q")
        subprocess.run([sys.executable, "-m", "ssmd", "stop", "--data-dir", str(data)], check=True)


def test_the_page_is_opened_with_a_ticket(place: Desktop, tmp_path: Path) -> None:
    async def ticket(_: Request) -> JSONResponse:
        return JSONResponse({"ticket": "T" * 40, "expires_in": 60})

    async def numbers(_: Request) -> JSONResponse:
        return JSONResponse(metrics("degraded", reason="disk_full"))

    app = Starlette(routes=[Route("/ssmd/v1/tickets", ticket, methods=["POST"]), Route("/ssmd/v1/metrics", numbers)])
    opened = place.folder / "opened"
    browser = place.folder / "xdg-open"
    browser.write_text(f'#!/bin/sh\necho "$1" > {opened}\n')
    browser.chmod(0o755)
    with standing_in(tmp_path / "data", app) as url, place.host(), tray(place, tmp_path / "data"):
        place.soon(lambda: place.colours()[WARNING] > 20)
        menu(place, "o")
        place.soon(opened.exists)
        assert opened.read_text() == f"{url}/#ticket={'T' * 40}\n"
