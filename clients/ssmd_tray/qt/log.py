"""The daemon's log in a window, as it grows."""

from __future__ import annotations

from pathlib import Path

from PySide6.QtCore import QSize, QTimer
from PySide6.QtGui import QFontDatabase, QHideEvent, QKeySequence, QShortcut, QShowEvent
from PySide6.QtWidgets import QPlainTextEdit, QVBoxLayout, QWidget

from ssmd.daemon.logfile import FILE, Reader
from ssmd_tray.view import plain

_LINES = 500
_MOST_CHARS = 4000  # of a line
_LOOK_MS = 500


class Log(QWidget):
    """Read while it is seen."""

    def __init__(self, data_dir: Path) -> None:
        super().__init__()
        self._data_dir = data_dir
        self._reader: Reader | None = None
        self.setWindowTitle("ssmd log")
        self._text = QPlainTextEdit()
        self._text.setReadOnly(True)
        self._text.setTabChangesFocus(True)
        self._text.setMaximumBlockCount(2 * _LINES)
        self._text.setFont(QFontDatabase.systemFont(QFontDatabase.SystemFont.FixedFont))
        self._text.setAccessibleName("The daemon's log")
        self._timer = QTimer(self)
        self._timer.timeout.connect(self._more)
        layout = QVBoxLayout(self)
        layout.addWidget(self._text)
        for keys in ("Esc", "Ctrl+W"):
            QShortcut(QKeySequence(keys), self, self.close)

    def sizeHint(self) -> QSize:
        return QSize(900, 420)

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        self._text.clear()
        self._reader = Reader(self._data_dir)
        try:
            self._write(self._reader.last(_LINES))
            self._timer.start(_LOOK_MS)
        except FileNotFoundError:
            self._write([f"there is no {self._data_dir / FILE}: no daemon with a log has run there"])
        except OSError as err:
            self._write([f"the log cannot be read: {err.strerror or err}"])

    def hideEvent(self, event: QHideEvent) -> None:
        super().hideEvent(event)
        self._timer.stop()

    def _more(self) -> None:
        assert self._reader is not None
        try:
            self._write(list(self._reader.more())[-_LINES:])
        except OSError as err:
            self._timer.stop()
            self._write([f"the log cannot be read any more: {err.strerror or err}"])

    def _write(self, lines: list[str]) -> None:
        for line in lines:
            self._text.appendPlainText(plain(line, _MOST_CHARS))
