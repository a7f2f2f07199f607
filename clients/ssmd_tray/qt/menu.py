"""The icon's menu. It is made anew only when what can be chosen is another; numbers are changed in place."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from PySide6.QtGui import QAction
from PySide6.QtWidgets import QMenu

from ssmd_tray.qt.rows import Act
from ssmd_tray.qt.window import enabled
from ssmd_tray.qt.words import literal
from ssmd_tray.view import View

_MOST = 20  # rows of a menu; the window has the others


class Menu(QMenu):
    """Everything that can be chosen. actions: as of the window, and also window, at_login."""

    def __init__(self, actions: Mapping[str, Act]) -> None:
        super().__init__()
        self._actions = actions
        self._shape: object = None
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
        """Offer what can be chosen now."""
        _say(self._headline, f"ssmd: {view.headline}")
        numbers = f"TTFT {view.ttft.last}, TBT {view.tbt.last}, {view.rate} tokens/s"
        _say(self._numbers, numbers if view.answers else view.notice or "no daemon answers")
        for name, on in enabled(view).items():
            self._named[name].setEnabled(on)
        requests, models = view.requests[:_MOST], view.models[:_MOST]
        shape = [(r.id, r.model) for r in requests], [(m.id, m.loaded, m.busy, m.pinned) for m in models]
        if shape != self._shape:
            self._shape = shape
            self._fill(view)

    def _fill(self, view: View) -> None:
        self._requests.clear()
        for request in view.requests[:_MOST]:
            action = self._requests.addAction(f"Stop: {literal(request.model)}")
            action.setEnabled(request.id is not None)
            action.triggered.connect(partial(self._row, "stop_request", request.id))
        self._requests.setEnabled(bool(view.requests))
        self._models.clear()
        for model in view.models[:_MOST]:
            inner = self._models.addMenu(literal(model.id))
            do = "unload" if model.loaded else "load"
            action = inner.addAction(do.capitalize())
            action.setEnabled(not model.busy)
            action.triggered.connect(partial(self._row, do, model.id))
            pin = inner.addAction("Pin")
            pin.setCheckable(True)
            pin.setChecked(model.pinned)
            pin.triggered.connect(partial(self._row, "pin", model.id, not model.pinned))
        self._models.setEnabled(bool(view.models))

    def _row(self, name: str, *arguments: object) -> None:
        """What a row stands for; whether it is checked now is left out."""
        self._actions[name](*(arguments[:2] if name == "pin" else arguments[:1]))


def _say(action: QAction, text: str) -> None:
    if action.text() != literal(text):
        action.setText(literal(text))
