"""A line of the last five minutes. By keyboard it is reached like a button, and a screen reader reads its numbers."""

from __future__ import annotations

from PySide6.QtCore import QPointF, QRectF, QSize, Qt
from PySide6.QtGui import QPainter, QPainterPath, QPaintEvent, QPalette, QPen
from PySide6.QtWidgets import QSizePolicy, QWidget

from ssmd_tray.history import SPAN_S, Point
from ssmd_tray.view import Quantity

_MARGIN = 3.0
_GAP_S = 4.0  # points further apart are of different answers


class Sparkline(QWidget):
    """A plot of values over time. joined: a line through one value a second; else single points."""

    def __init__(self, joined: bool, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._joined = joined
        self._points: tuple[Point, ...] = ()
        self._most = ""  # what its top stands for
        self.setFocusPolicy(Qt.FocusPolicy.TabFocus)
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)

    def sizeHint(self) -> QSize:
        return QSize(150, 2 * self.fontMetrics().height())

    def show_quantity(self, quantity: Quantity) -> None:
        self._points, self._most = quantity.points, quantity.most
        if self.accessibleName() != quantity.spoken:
            self.setAccessibleName(quantity.spoken)
        self.update()

    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        palette = self.palette()
        box = QRectF(self.rect()).adjusted(_MARGIN, _MARGIN, -_MARGIN, -_MARGIN)
        ground = palette.color(QPalette.ColorRole.PlaceholderText)
        ground.setAlpha(90)
        painter.setPen(QPen(ground, 1))
        painter.drawLine(box.bottomLeft(), box.bottomRight())
        if self._points:
            self._draw(painter, box)
        if self.hasFocus():
            painter.setPen(QPen(palette.color(QPalette.ColorRole.Highlight), 1.5))
            painter.setBrush(Qt.BrushStyle.NoBrush)
            painter.drawRoundedRect(QRectF(self.rect()).adjusted(1, 1, -1, -1), 3, 3)

    def _draw(self, painter: QPainter, box: QRectF) -> None:
        most = max(point.ms for point in self._points) or 1.0
        places = [
            QPointF(box.right() - point.age_s / SPAN_S * box.width(), box.bottom() - point.ms / most * box.height())
            for point in self._points
        ]
        colour = self.palette().color(QPalette.ColorRole.Highlight)
        painter.setPen(QPen(colour, 1.6, Qt.PenStyle.SolidLine, Qt.PenCapStyle.RoundCap, Qt.PenJoinStyle.RoundJoin))
        if not self._joined:
            for place in places:
                painter.drawLine(QPointF(place.x(), box.bottom()), place)
        else:
            path = QPainterPath(places[0])
            for i in range(1, len(places)):
                near = self._points[i - 1].age_s - self._points[i].age_s <= _GAP_S
                path.lineTo(places[i]) if near else path.moveTo(places[i])
            painter.drawPath(path)
        painter.setPen(self.palette().color(QPalette.ColorRole.PlaceholderText))
        font = self.font()
        font.setPointSizeF(font.pointSizeF() * 0.8)
        painter.setFont(font)
        painter.drawText(box, Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignTop, self._most)
        painter.setPen(Qt.PenStyle.NoPen)
        painter.setBrush(colour)
        for place in places if not self._joined else places[-1:]:
            painter.drawEllipse(place, 2.2, 2.2)
