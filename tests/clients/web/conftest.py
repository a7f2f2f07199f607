"""A daemon in a process of its own with a tiny model, and a browser at its page."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import SHORT, Window, chromium, program
from conftest import TinyArtifacts
from daemon_process import DaemonProcess

MODEL = "mamba-f32"  # no context: its answers go on for as long as they may


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    pytest.importorskip("playwright", reason="scripts/test --ui installs it")
    if program() is None:
        pytest.skip("there is no Chromium: apt-get install chromium")
    with chromium() as one:
        yield one


@pytest.fixture(scope="module")
def served(artifacts: TinyArtifacts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    with DaemonProcess(artifacts[MODEL], tmp_path_factory.mktemp("page") / "data", "--threads", "1") as one:
        yield one


@pytest.fixture
def window(browser: Any, served: DaemonProcess) -> Iterator[Window]:
    context = browser.new_context(viewport={"width": 1200, "height": 800}, accept_downloads=True)
    one = Window(context, f"http://127.0.0.1:{served.port}")
    one.sampling(**SHORT)
    one.open()
    yield one
    one.check()
    context.close()


@pytest.fixture
def another(window: Window) -> Iterator[Callable[[str], Window]]:
    """More windows of the same browser and person."""
    made: list[Window] = []

    def make(path: str = "") -> Window:
        one = Window(window.page.context, window.url)
        made.append(one)
        one.open(path)
        return one

    yield make
    for one in made:
        one.check()


@pytest.fixture
def own(artifacts: TinyArtifacts, tmp_path: Path) -> Iterator[DaemonProcess]:
    """A daemon that may be killed, with one lane."""
    with DaemonProcess(artifacts[MODEL], tmp_path / "data", "--threads", "1", "--max-running", "1") as one:
        yield one


@pytest.fixture
def alone(browser: Any, own: DaemonProcess) -> Iterator[Window]:
    """A window at that daemon; what it asks for may fail."""
    context = browser.new_context()
    one = Window(context, f"http://127.0.0.1:{own.port}")
    one.allowed = ["Failed to load resource: "]
    one.sampling(temperature=0, max_tokens=8)
    one.open()
    yield one
    one.check()
    context.close()
