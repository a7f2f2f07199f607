"""The rows of requests and of models. They are changed in place, so that the keyboard focus stays on a row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QCheckBox, QGridLayout, QPushButton, QVBoxLayout, QWidget

from ssmd_tray.qt.words import Words
from ssmd_tray.view import Model, Request

Act = Callable[..., None]


class RequestRow:
    """A request under way, with its Stop."""

    def __init__(self, stop: Act) -> None:
        self.widget = QWidget()
        self._model, self._doing = Words(), Words()
        self._stop = QPushButton("Stop")
        self._id: str | None = None
        self._stop.clicked.connect(lambda: stop(self._id))
        grid = QGridLayout(self.widget)
        grid.setContentsMargins(0, 3, 0, 3)
        grid.setVerticalSpacing(0)
        grid.addWidget(self._model, 0, 0)
        grid.addWidget(self._doing, 1, 0)
        grid.addWidget(self._stop, 0, 1, 2, 1, Qt.AlignmentFlag.AlignVCenter)
        grid.setColumnStretch(0, 1)

    def reached(self) -> list[QWidget]:
        """Return the widgets that the keyboard reaches, in order."""
        return [self._stop]

    def update(self, row: Request) -> None:
        self._id = row.id
        self._model.say(row.model)
        self._doing.say(row.doing)
        self._stop.setEnabled(row.id is not None)
        _name(self._stop, f"Stop the {row.spoken}")


class ModelRow:
    """A model, with Load or Unload, and Pin."""

    def __init__(self, load: Act, unload: Act, pin: Act) -> None:
        self.widget = QWidget()
        self._row: Model | None = None
        self._name, self._doing = Words(), Words()
        self._load, self._pin = QPushButton("Load"), QCheckBox("Pin")
        self._load.clicked.connect(lambda: self._row and (unload if self._row.loaded else load)(self._row.id))
        self._pin.clicked.connect(lambda on: self._row and pin(self._row.id, bool(on)))
        grid = QGridLayout(self.widget)
        grid.setContentsMargins(0, 3, 0, 3)
        grid.setVerticalSpacing(0)
        grid.addWidget(self._name, 0, 0)
        grid.addWidget(self._doing, 1, 0)
        grid.addWidget(self._load, 0, 1, 2, 1, Qt.AlignmentFlag.AlignVCenter)
        grid.addWidget(self._pin, 0, 2, 2, 1, Qt.AlignmentFlag.AlignVCenter)
        grid.setColumnStretch(0, 1)

    def reached(self) -> list[QWidget]:
        """Return the widgets that the keyboard reaches, in order."""
        return [self._load, self._pin]

    def update(self, row: Model) -> None:
        self._row = row
        self._name.say(row.id)
        self._doing.say(f"{row.doing}, {row.memory}" if row.memory else row.doing)
        what = "Unload" if row.loaded else "Load"
        if self._load.text() != what:
            self._load.setText(what)
        self._load.setEnabled(not row.busy)
        self._pin.setChecked(row.pinned)
        _name(self._load, f"{what} {row.spoken}")
        _name(self._pin, f"Pin {row.id}: it stays once it is loaded")


class Rows(QWidget):
    """Rows by key, in the order of the last update, with a text for no rows or too many."""

    def __init__(self, make: Callable[[], RequestRow | ModelRow], parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._make = make
        self._rows: dict[str, Any] = {}
        self._none = Words()
        self._layout = QVBoxLayout(self)
        self._layout.setContentsMargins(0, 0, 0, 0)
        self._layout.setSpacing(0)
        self._layout.addWidget(self._none)

    def reached(self) -> list[QWidget]:
        """Return the widgets that the keyboard reaches, from top to bottom."""
        return [one for row in self._rows.values() for one in row.reached()]

    def update_rows(self, rows: Sequence[tuple[str, object]], said: str) -> bool:
        """Show these rows. Returns True if rows were added or moved."""
        wanted = dict(rows)
        before = list(self._rows)
        for key in [key for key in self._rows if key not in wanted]:
            gone = self._rows.pop(key).widget
            self._layout.removeWidget(gone)
            gone.hide()
            gone.deleteLater()
        for i, (key, row) in enumerate(wanted.items()):
            if key not in self._rows:
                self._rows[key] = self._make()
                self._layout.insertWidget(i, self._rows[key].widget)
            elif self._layout.indexOf(self._rows[key].widget) != i:
                self._layout.insertWidget(i, self._rows[key].widget)
            self._rows[key].update(row)
        self._rows = {key: self._rows[key] for key in wanted}
        self._none.say(said)
        self._none.setVisible(bool(said))
        return list(self._rows) != before


def _name(widget: QWidget, name: str) -> None:
    if widget.accessibleName() != name:
        widget.setAccessibleName(name)
