"""The small window: the daemon's state, its numbers with their lines, and the possible actions."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import pairwise

from PySide6.QtCore import QSize, Qt
from PySide6.QtGui import QCloseEvent, QFont, QHideEvent, QKeySequence, QShortcut, QShowEvent
from PySide6.QtWidgets import (
    QApplication,
    QFrame,
    QGridLayout,
    QHBoxLayout,
    QLabel,
    QProgressBar,
    QPushButton,
    QScrollArea,
    QVBoxLayout,
    QWidget,
)

from ssmd_tray.qt.icon import pixmap
from ssmd_tray.qt.rows import Act, ModelRow, RequestRow, Rows
from ssmd_tray.qt.sparkline import Sparkline
from ssmd_tray.qt.words import Words
from ssmd_tray.view import Icon, Quantity, View

_ICON = 36  # pixels, before the screen's scale


class Window(QWidget):
    """The window, which is updated only while it is visible.

    actions: functions of buttons by name: page, copy, start, stop, restart, log, look, quit, stop_request, load,
    unload, pin.
    """

    def __init__(self, actions: Mapping[str, Act]) -> None:
        super().__init__()
        self.setWindowTitle("ssmd")
        self.closing = self.hide  # or the end of all, where there is no tray
        self._view: View | None = None
        self._said = self._standing = ""
        self._dark = False
        self._state: tuple[Icon, bool, float] | None = None
        self._actions = actions
        whole = QVBoxLayout(self)
        whole.setContentsMargins(14, 12, 14, 12)
        whole.setSpacing(8)
        whole.addLayout(self._head())
        whole.addWidget(self._notice())
        whole.addLayout(self._numbers())
        whole.addWidget(self._lists(), 1)
        whole.addLayout(self._buttons())
        self._named["page"].setFocus()
        for keys, name in (
            ("Ctrl+O", "page"),
            ("Ctrl+U", "copy"),
            ("Ctrl+L", "log"),
            ("F5", "look"),
            ("Ctrl+Q", "quit"),
        ):
            QShortcut(QKeySequence(keys), self, partial(self._act, name))
        for keys in ("Esc", "Ctrl+W"):
            QShortcut(QKeySequence(keys), self, self.close)

    def sizeHint(self) -> QSize:
        return QSize(470, 560)

    def show_view(self, view: View, dark: bool) -> None:
        """Show a view now, or when the window becomes visible."""
        self._view, self._dark = view, dark
        if self.isVisible():
            self._update(view)

    def say(self, words: str) -> None:
        """Show the result of an action; "" removes it."""
        self._said = words
        self._tell()

    def stand(self, words: str) -> None:
        """Say why the window is there at all."""
        self._standing = words
        self._tell()

    def unasked(self) -> None:
        """Show the window without taking the keyboard focus from another one."""
        self.setAttribute(Qt.WidgetAttribute.WA_ShowWithoutActivating, True)
        self.show()
        self.setAttribute(Qt.WidgetAttribute.WA_ShowWithoutActivating, False)

    def asked(self) -> None:
        """Show the window in front, as the user clicked for it."""
        self.showNormal()
        self.raise_()
        self.activateWindow()

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        if self._view is not None:
            self._update(self._view)

    def hideEvent(self, event: QHideEvent) -> None:
        super().hideEvent(event)
        self.say("")

    def closeEvent(self, event: QCloseEvent) -> None:
        event.ignore()
        self.closing()

    def _act(self, name: str, *arguments: object) -> None:
        self._actions[name](*arguments)

    def _head(self) -> QHBoxLayout:
        self._icon = QLabel()
        self._icon.setFixedSize(_ICON, _ICON)
        self._headline, self._daemon = Words(reached=True), Words(wrapped=True, reached=True)
        font = QFont(self.font())
        font.setPointSizeF(font.pointSizeF() * 1.25)
        font.setBold(True)
        self._headline.setFont(font)
        words = QVBoxLayout()
        words.setSpacing(1)
        words.addWidget(self._headline)
        words.addWidget(self._daemon)
        row = QHBoxLayout()
        row.setSpacing(10)
        row.addWidget(self._icon)
        row.addLayout(words, 1)
        return row

    def _notice(self) -> Words:
        self._told = Words(wrapped=True, reached=True)
        self._told.setFrameStyle(QFrame.Shape.StyledPanel | QFrame.Shadow.Plain)
        self._told.setMargin(6)
        self._told.hide()
        return self._told

    def _numbers(self) -> QGridLayout:
        grid = QGridLayout()
        grid.setHorizontalSpacing(12)
        grid.setVerticalSpacing(3)
        for column, name in enumerate(("last", "p50", "p95", "five minutes"), 1):
            grid.addWidget(
                _faint(name), 0, column, Qt.AlignmentFlag.AlignRight if column < 4 else Qt.AlignmentFlag.AlignLeft
            )
        self._lines = {}
        for row, (name, joined) in enumerate((("TTFT", False), ("TBT", True)), 1):
            grid.addWidget(QLabel(name), row, 0)
            cells = [_figure() for _ in range(3)]
            for column, cell in enumerate(cells, 1):
                grid.addWidget(cell, row, column)
            line = Sparkline(joined)
            grid.addWidget(line, row, 4)
            self._lines[name] = (cells, line)
        grid.setColumnStretch(4, 1)
        self._rate, self._cached, self._stored = (Words(reached=True) for _ in range(3))
        for row, (name, words) in enumerate(
            (("Tokens/s", self._rate), ("From cache", self._cached), ("Stored", self._stored)), 3
        ):
            grid.addWidget(QLabel(name), row, 0)
            grid.addWidget(words, row, 1, 1, 4)
        self._share = QProgressBar()
        self._share.setRange(0, 1000)
        self._share.setTextVisible(False)
        self._share.setFixedHeight(5)
        grid.addWidget(self._share, 6, 1, 1, 4)
        return grid

    def _lists(self) -> QScrollArea:
        acts = self._actions
        self._requests = Rows(lambda: RequestRow(acts["stop_request"]))
        self._models = Rows(lambda: ModelRow(acts["load"], acts["unload"], acts["pin"]))
        inside = QWidget()
        column = QVBoxLayout(inside)
        column.setContentsMargins(0, 0, 8, 0)
        column.setSpacing(4)
        for name, rows in (("Requests", self._requests), ("Models", self._models)):
            title = QLabel(name)
            font = QFont(title.font())
            font.setBold(True)
            title.setFont(font)
            column.addWidget(title)
            column.addWidget(rows)
        column.addStretch(1)
        area = QScrollArea()
        area.setFrameShape(QFrame.Shape.NoFrame)
        area.setWidgetResizable(True)
        area.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        area.setFocusPolicy(Qt.FocusPolicy.NoFocus)
        area.setAccessibleName("Requests and models")
        area.setWidget(inside)
        return area

    def _buttons(self) -> QGridLayout:
        grid = QGridLayout()
        grid.setSpacing(6)
        names = [("page", "&Open page"), ("copy", "&Copy base URL"), ("log", "&Log")]
        names += [("start", "&Start daemon"), ("stop", "S&top daemon"), ("restart", "&Restart daemon")]
        self._named = {}
        for i, (name, text) in enumerate(names):
            button = QPushButton(text)
            button.setAutoDefault(False)
            button.clicked.connect(partial(self._clicked, name))
            button.setAccessibleName(text.replace("&", ""))
            grid.addWidget(button, i // 3, i % 3)
            self._named[name] = button
        return grid

    def _clicked(self, name: str, _checked: bool = False) -> None:
        self._act(name)

    def _update(self, view: View) -> None:
        self._headline.say(view.headline)
        self._daemon.say(view.daemon)
        state = view.icon, self._dark, self.devicePixelRatioF()
        if state != self._state:
            drawn = pixmap(view.icon, self._dark, round(_ICON * state[2]))
            drawn.setDevicePixelRatio(state[2])
            self._icon.setPixmap(drawn)
            self._icon.setAccessibleName(f"the daemon is {view.icon}")
            self._state = state
        self._tell()
        for name, quantity in (("TTFT", view.ttft), ("TBT", view.tbt)):
            self._quantity(name, quantity)
        self._rate.say(f"{view.rate} of the last answer" if view.rate != "-" else view.rate)
        self._cached.say(f"{view.cached} of the last prompt" if view.cached != "-" else view.cached)
        self._stored.say(view.stored)
        self._share.setVisible(view.stored_share is not None)
        self._share.setValue(round((view.stored_share or 0) * 1000))
        self._share.setAccessibleName(f"stored: {view.stored}")
        requests = [(row.id or f"another's {i}", row) for i, row in enumerate(view.requests)]
        none = "" if requests else ("none is answered" if view.answers else "-")
        moved = self._requests.update_rows(requests, f"and {view.more_requests} more" if view.more_requests else none)
        models = [(row.id, row) for row in view.models]
        none = "" if models else ("none is installed: ssmd pull NAME" if view.answers else "-")
        moved |= self._models.update_rows(models, f"and {view.more_models} more" if view.more_models else none)
        for name, on in enabled(view).items():
            self._named[name].setEnabled(on)
        if moved:
            self._order()

    def _order(self) -> None:
        """Have Tab go as the eye does, also over rows that came later."""
        order: list[QWidget] = [self._headline, self._daemon, self._told]
        order += [line for _, line in self._lines.values()]
        order += [self._rate, self._cached, self._stored, *self._requests.reached(), *self._models.reached()]
        order += self._named.values()
        for before, after in pairwise(order):
            QWidget.setTabOrder(before, after)

    def _quantity(self, name: str, quantity: Quantity) -> None:
        cells, line = self._lines[name]
        for cell, text in zip(cells, (quantity.last, quantity.p50, quantity.p95), strict=True):
            cell.setText(text)
        line.show_quantity(quantity)

    def _tell(self) -> None:
        known = "" if self._view is None else self._view.notice
        words = "\n".join(one for one in (self._said, known, self._standing) if one)
        self._told.say(words)
        self._told.setVisible(bool(words))


def enabled(view: View) -> dict[str, bool]:
    """Return, by action, True if it is possible now."""
    return {
        "page": view.answers,
        "copy": view.base_url is not None,
        "log": True,
        "start": not view.runs,
        "stop": view.answers,
        "restart": view.answers,
    }


def _faint(text: str) -> QLabel:
    label = QLabel(text)
    label.setForegroundRole(QApplication.palette().ColorRole.PlaceholderText)
    return label


def _figure() -> QLabel:
    """Return a label for a number with its unit, of a width that does not change."""
    label = QLabel("-")
    label.setTextFormat(Qt.TextFormat.PlainText)
    label.setAlignment(Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter)
    label.setMinimumWidth(label.fontMetrics().horizontalAdvance("00,000 ms"))
    return label
