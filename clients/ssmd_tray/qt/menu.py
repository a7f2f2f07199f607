"""The icon's menu. Its rows are changed in place and kept for others: Qt keeps some of each menu that is let go."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from PySide6.QtGui import QAction
from PySide6.QtWidgets import QMenu

from ssmd_tray.qt.rows import Act
from ssmd_tray.qt.window import enabled
from ssmd_tray.qt.words import literal
from ssmd_tray.view import Model, Request, View, plain

_MOST = 20  # rows of a menu; the window has the others
_LONGEST = 80  # characters of a row


class Menu(QMenu):
    """Everything that can be chosen. actions: as of the window, and also window, at_login."""

    def __init__(self, actions: Mapping[str, Act]) -> None:
        super().__init__()
        self._actions = actions
        self._request_items, self._model_items = list[_RequestItem](), list[_ModelItem]()
        self._headline, self._numbers = self.addAction("ssmd"), self.addAction("-")
        for one in (self._headline, self._numbers):  # enabled, so that a screen reader comes to them
            one.triggered.connect(lambda: actions["window"]())
        self.addSeparator()
        self._named: dict[str, QAction] = {}
        self._add(self, "window", "Show &window")
        self._add(self, "page", "&Open page")
        self._add(self, "copy", "&Copy base URL")
        self.addSeparator()
        self._requests, self._models = self.addMenu("R&equests"), self.addMenu("&Models")
        daemon = self.addMenu("&Daemon")
        for name, text in (("start", "&Start"), ("stop", "S&top"), ("restart", "&Restart"), ("log", "&Log")):
            self._add(daemon, name, text)
        self.addSeparator()
        self.at_login = self._add(self, "at_login", "Start at lo&gin")
        self.at_login.setCheckable(True)
        self._add(self, "quit", "&Quit")

    def _add(self, menu: QMenu, name: str, text: str) -> QAction:
        action = menu.addAction(text)
        action.triggered.connect(lambda checked: self._chosen(name, checked))  # a partial would not hear it
        self._named[name] = action
        return action

    def _chosen(self, name: str, checked: bool) -> None:
        self._actions[name](checked) if name == "at_login" else self._actions[name]()

    def show_view(self, view: View) -> None:
        """Offer the actions that are possible now."""
        _say(self._headline, f"ssmd: {view.headline}")
        numbers = f"TTFT {view.ttft.last}, TBT {view.tbt.last}, {view.rate} tokens/s"
        _say(self._numbers, numbers if view.answers else view.notice or "no daemon answers")
        for name, on in enabled(view).items():
            self._named[name].setEnabled(on)
        self._fill(self._requests, _RequestItem, self._request_items, view.requests)
        self._fill(self._models, _ModelItem, self._model_items, view.models)

    def _fill(self, menu: QMenu, make: Callable[..., Any], items: list[Any], rows: Sequence[Any]) -> None:
        rows = rows[:_MOST]
        while len(items) < len(rows):
            items.append(make(menu, self._actions))
        for item, row in zip_longest(items, rows):
            item.show(row)
        menu.setEnabled(bool(rows))


class _RequestItem:
    """Stops a request under way."""

    def __init__(self, menu: QMenu, actions: Mapping[str, Act]) -> None:
        self._row: Request | None = None
        self._stop = menu.addAction("Stop")
        self._stop.triggered.connect(lambda: self._row and actions["stop_request"](self._row.id))

    def show(self, row: Request | None) -> None:
        self._row = row
        self._stop.setVisible(row is not None)
        if row is not None:
            _say(self._stop, f"Stop: {row.model}")
            self._stop.setEnabled(row.id is not None)


class _ModelItem:
    """A model's own menu."""

    def __init__(self, menu: QMenu, actions: Mapping[str, Act]) -> None:
        self._row: Model | None = None
        self._actions = actions
        self._inner = menu.addMenu("")
        self._load, self._pin = self._inner.addAction("Load"), self._inner.addAction("Pin")
        self._pin.setCheckable(True)
        self._load.triggered.connect(self._change)
        self._pin.triggered.connect(lambda on: self._row and actions["pin"](self._row.id, on))

    def show(self, row: Model | None) -> None:
        self._row = row
        self._inner.menuAction().setVisible(row is not None)
        if row is not None:
            _say(self._inner.menuAction(), row.id)
            _say(self._load, "Unload" if row.loaded else "Load")
            self._load.setEnabled(not row.busy)
            self._pin.setChecked(row.pinned)

    def _change(self) -> None:
        if self._row is not None:
            self._actions["unload" if self._row.loaded else "load"](self._row.id)


def _say(action: QAction, text: str) -> None:
    shown = literal(plain(text, _LONGEST))
    if action.text() != shown:
        action.setText(shown)
