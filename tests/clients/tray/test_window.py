"""The window and the menu without a screen: what keyboard and screen reader reach, and what hostile texts become."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from watched import metrics, model, request

from ssmd.daemon.discovery import Address
from ssmd_tray.seeing import ViewBuilder
from ssmd_tray.view import Icon
from ssmd_tray.watching import Observation

pytestmark = pytest.mark.ui
ADDRESS = Address("http://127.0.0.1:7763", None, 42, "0.1.0", 1000.0, "t" * 43)
NAMES = ("page", "copy", "log", "start", "stop", "restart", "look", "quit", "window", "at_login")
ROWS = ("stop_request", "load", "unload", "pin")


@pytest.fixture(scope="module")
def app() -> Iterator[Any]:
    os.environ["QT_QPA_PLATFORM"] = "offscreen"
    from ssmd_tray.qt.app import application

    yield application()
    del os.environ["QT_QPA_PLATFORM"]


class Clicked:
    """A record of the actions that were clicked."""

    def __init__(self) -> None:
        self.found: list[tuple[Any, ...]] = []

    @property
    def actions(self) -> dict[str, Any]:
        return {name: lambda *given, name=name: self.found.append((name, *given)) for name in (*NAMES, *ROWS)}


def view(found: Any) -> Any:
    return ViewBuilder(lambda: 1100.0).view(Observation(0.0, found, ADDRESS, 42))


REQUESTS = [request(), request(id=None)]
MODELS = [model("a"), model("b", "unloaded"), model("c", "loading")]
BUSY = metrics("generating", running=REQUESTS, models=MODELS)


@pytest.fixture
def shown(app: Any) -> Iterator[tuple[Any, Clicked]]:
    from ssmd_tray.qt.window import Window

    clicked = Clicked()
    window = Window(clicked.actions)
    window.show_view(view(BUSY), False)
    window.show()
    app.processEvents()
    yield window, clicked
    window.hide()
    window.deleteLater()


def chain(window: Any) -> list[Any]:
    """Widgets in the order in which Tab reaches them."""
    from PySide6.QtCore import Qt

    begin = one = window._headline
    found: list[Any] = []
    while not (found and one is begin):
        if one.focusPolicy() & Qt.FocusPolicy.TabFocus and one.isVisible() and one.isEnabled():
            found.append(one)
        one = one.nextInFocusChain()
    return found


def test_the_keyboard_reaches_all_controls_in_their_order(shown: tuple[Any, Clicked]) -> None:
    window, _ = shown
    names = [one.accessibleName() or one.text() for one in chain(window)]
    assert [name.partition(",")[0] for name in names] == [
        "generating: smollm2@litert",
        "ssmd 0.1.0 at http://127.0.0.1:7763",
        "time to first token: last 12.0 ms",
        "time between tokens: last 12.0 ms",
        "12.0 of the last answer",
        "90% (median 50%) of the last prompt",
        "1.0 GB of 8.0 GB",
        "Stop the request to smollm2@litert: decode",
        "Unload a@litert",
        "Pin a@litert: it stays once it is loaded",
        "Load b@litert",
        "Pin b@litert: it stays once it is loaded",
        "Pin c@litert: it stays once it is loaded",
        "Open page",
        "Copy base URL",
        "Log",
        "Stop daemon",
        "Restart daemon",
    ]


def test_a_screen_reader_hears_a_name_for_each(shown: tuple[Any, Clicked]) -> None:
    from PySide6.QtGui import QAccessible

    window, _ = shown
    for one in chain(window):
        heard = QAccessible.queryAccessibleInterface(one)
        assert heard.text(QAccessible.Text.Name), one
    icon = QAccessible.queryAccessibleInterface(window._icon)
    assert icon.text(QAccessible.Text.Name) == "the daemon is generating"


def test_rows_are_changed_in_place(shown: tuple[Any, Clicked], app: Any) -> None:
    """The keyboard focus stays on a button while numbers change and other rows come and go."""
    window, clicked = shown
    button = next(one for one in chain(window) if one.accessibleName().startswith("Load b@litert"))
    window.activateWindow()
    button.setFocus()
    later = metrics("idle", models=[model("0"), model("b", "unloaded"), model("c")])
    window.show_view(view(later), False)
    app.processEvents()
    assert button in chain(window)
    assert button.hasFocus()
    button.click()
    assert clicked.found == [("load", "b@litert")]
    window.show_view(view(metrics(models=[model("b")])), False)
    button.click()
    assert clicked.found[-1] == ("unload", "b@litert")


def test_what_is_clicked(shown: tuple[Any, Clicked]) -> None:
    window, clicked = shown
    for one in chain(window):
        if hasattr(one, "click"):
            one.click()
    assert clicked.found == [
        ("stop_request", "gen_1"),
        ("unload", "a@litert"),
        ("pin", "a@litert", True),
        ("load", "b@litert"),
        ("pin", "b@litert", True),
        ("pin", "c@litert", True),
        *[(name,) for name in ("page", "copy", "log", "stop", "restart")],
    ]


def test_what_came_and_went_leaves_nothing(shown: tuple[Any, Clicked], app: Any) -> None:
    """Qt frees little of a menu that is let go; a day has thousands of requests."""
    from PySide6.QtCore import QEvent, QObject

    from ssmd_tray.qt.menu import Menu

    window, clicked = shown
    menu = Menu(clicked.actions)
    counts = set()
    for i in range(40):
        found = metrics(
            "generating", running=[request(id=f"gen_{i}")], models=[model("a", ("loaded", "unloaded")[i % 2])]
        )
        for one in (found, metrics()):
            window.show_view(view(one), False)
            menu.show_view(view(one))
            app.sendPostedEvents(None, QEvent.Type.DeferredDelete)
        counts.add((len(window.findChildren(QObject)), len(menu.findChildren(QObject))))
    assert len(counts) == 1


def test_hostile_texts_stay_texts(shown: tuple[Any, Clicked], app: Any) -> None:
    from PySide6.QtCore import Qt
    from PySide6.QtWidgets import QLabel

    from ssmd_tray.qt.menu import Menu

    window, clicked = shown
    bad = "<img src='http://203.0.113.9/x'><b>&amp;&Quit</b>" + "x" * 100_000
    rows = {"models": [model(bad, bad, problem=bad)], "running": [request(bad, model=bad)]}
    hostile = view(metrics("degraded", reason=bad, **rows))
    window.show_view(hostile, False)
    window.say(bad[:500])
    menu = Menu(clicked.actions)
    menu.show_view(hostile)
    app.processEvents()
    for label in window.findChildren(QLabel):
        assert label.textFormat() == Qt.TextFormat.PlainText or "<" not in label.text()
    assert window.width() < 800
    titles = [one.text() for one in [*menu.actions(), *menu._models.actions(), *menu._requests.actions()]]
    assert [title for title in titles if "203.0.113.9" in title]
    assert all("&Quit" not in title.replace("&&", "") for title in titles if "203" in title)
    assert all(len(title) < 400 for title in titles)


def test_the_menu_is_changed_in_place(app: Any) -> None:
    from ssmd_tray.qt.menu import Menu

    clicked = Clicked()
    menu = Menu(clicked.actions)
    menu.show_view(view(BUSY))
    before = menu._models.actions()
    menu.show_view(view({**BUSY, "ttft_ms": {"last": 99.0}}))
    assert menu._models.actions() == before
    assert "TTFT 99.0 ms" in menu._numbers.text()
    for one in before[0].menu().actions():
        one.trigger()
    assert clicked.found == [("unload", "a@litert"), ("pin", "a@litert", True)]
    menu.show_view(view(metrics(models=MODELS[:1])))
    assert [one.isVisible() for one in menu._models.actions()] == [True, False, False]
    assert not menu._requests.isEnabled()
    menu.show_view(view(BUSY))
    assert [one.isVisible() for one in menu._models.actions()] == [True] * 3
    menu._requests.actions()[0].trigger()
    assert clicked.found[-1] == ("stop_request", "gen_1")
    assert not menu._requests.actions()[1].isEnabled(), "another's"
    for checked in (True, False):
        menu.at_login.trigger()
        assert list(clicked.found[-1]) == ["at_login", checked]


@pytest.mark.parametrize("dark", [False, True])
def test_the_icon_at_every_scale(app: Any, dark: bool) -> None:
    """Each state differs from each other one in shape: also where all is one colour."""
    from PySide6.QtCore import QSize

    from ssmd_tray.qt.icon import icon, pixmap

    shapes = set()
    for state in Icon:
        for scale in (1.0, 1.25, 1.5, 2.0, 3.0):
            drawn = icon(state, dark).pixmap(QSize(22, 22), scale)
            assert abs(drawn.width() - 22 * scale) <= 1, "not scaled up from something smaller"
        image = pixmap(state, dark, 32).toImage()
        shapes.add(tuple(image.pixelColor(x, y).alpha() > 127 for x in range(32) for y in range(32)))
    assert len(shapes) == len(Icon)
