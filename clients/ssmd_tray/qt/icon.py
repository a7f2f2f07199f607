"""The icon, drawn at whatever size a screen asks for. Its states differ in shape, and not by colour alone."""

from __future__ import annotations

import math
from functools import cache

from PySide6.QtCore import QPointF, QRectF, Qt
from PySide6.QtGui import QColor, QIcon, QPainter, QPainterPath, QPen, QPixmap, QPolygonF

from ssmd_tray.view import Icon

SIZES = (16, 20, 22, 24, 32, 40, 48, 64, 96, 128, 256)  # pixels; of which a screen takes the one that fits its scale
INK = {False: "#24292f", True: "#f0f3f6"}  # by whether it stands on something dark
ACCENT = {False: "#1f6feb", True: "#58a6ff"}
WARNING = {False: "#bf6a02", True: "#f2b13c"}
FAINT = {False: "#7d858f", True: "#8d96a0"}


@cache
def icon(state: Icon, dark: bool) -> QIcon:
    """Return the icon for a state. dark: the background is dark."""
    made = QIcon()
    for size in SIZES:
        made.addPixmap(pixmap(state, dark, size))
    return made


@cache
def pixmap(state: Icon, dark: bool, size: int) -> QPixmap:
    """Return the icon as `size` x `size` pixels."""
    drawn = QPixmap(size, size)
    drawn.fill(Qt.GlobalColor.transparent)
    painter = QPainter(drawn)
    painter.setRenderHint(QPainter.RenderHint.Antialiasing)
    painter.scale(size / 32, size / 32)  # drawn as if it were 32 by 32
    _DRAWN[state](painter, dark)
    painter.end()
    return drawn


def _idle(painter: QPainter, dark: bool) -> None:
    ink = QColor(INK[dark])
    _ring(painter, ink)
    _wave(painter, ink, 3.0)


def _generating(painter: QPainter, dark: bool) -> None:
    painter.setPen(Qt.PenStyle.NoPen)
    painter.setBrush(QColor(ACCENT[dark]))
    painter.drawEllipse(QRectF(1.5, 1.5, 29, 29))
    _wave(painter, QColor("#ffffff" if not dark else "#0d1117"), 7.0)


def _loading(painter: QPainter, dark: bool) -> None:
    accent = QColor(ACCENT[dark])
    painter.setPen(QPen(accent, 3.4, Qt.PenStyle.SolidLine, Qt.PenCapStyle.RoundCap))
    painter.drawArc(QRectF(3.5, 3.5, 25, 25), 90 * 16, -270 * 16)
    painter.setPen(Qt.PenStyle.NoPen)
    painter.setBrush(accent)
    for x in (10.0, 16.0, 22.0):
        painter.drawEllipse(QPointF(x, 16), 2.0, 2.0)


def _degraded(painter: QPainter, dark: bool) -> None:
    _idle(painter, dark)
    triangle = QPolygonF([QPointF(21.5, 12.5), QPointF(31.5, 31), QPointF(11.5, 31)])
    painter.setCompositionMode(QPainter.CompositionMode.CompositionMode_Clear)  # a gap around it
    painter.setPen(
        QPen(Qt.GlobalColor.black, 5, Qt.PenStyle.SolidLine, Qt.PenCapStyle.RoundCap, Qt.PenJoinStyle.RoundJoin)
    )
    painter.drawPolygon(triangle)
    painter.setCompositionMode(QPainter.CompositionMode.CompositionMode_SourceOver)
    painter.setPen(
        QPen(QColor(WARNING[dark]), 1.5, Qt.PenStyle.SolidLine, Qt.PenCapStyle.RoundCap, Qt.PenJoinStyle.RoundJoin)
    )
    painter.setBrush(QColor(WARNING[dark]))
    painter.drawPolygon(triangle)
    painter.setPen(
        QPen(QColor("#ffffff" if not dark else "#0d1117"), 2.4, Qt.PenStyle.SolidLine, Qt.PenCapStyle.RoundCap)
    )
    painter.drawLine(QPointF(21.5, 18.5), QPointF(21.5, 24))
    painter.drawPoint(QPointF(21.5, 28))


def _away(painter: QPainter, dark: bool) -> None:
    faint = QColor(FAINT[dark])
    pen = QPen(faint, 2.6, Qt.PenStyle.CustomDashLine, Qt.PenCapStyle.FlatCap)
    pen.setDashPattern([2.0, 1.55])
    painter.setPen(pen)
    painter.setBrush(Qt.BrushStyle.NoBrush)
    painter.drawEllipse(QRectF(3.5, 3.5, 25, 25))
    painter.setPen(QPen(faint, 2.8, Qt.PenStyle.SolidLine, Qt.PenCapStyle.RoundCap))
    painter.drawLine(QPointF(10, 16), QPointF(22, 16))


def _ring(painter: QPainter, colour: QColor) -> None:
    painter.setPen(QPen(colour, 2.6))
    painter.setBrush(Qt.BrushStyle.NoBrush)
    painter.drawEllipse(QRectF(3, 3, 26, 26))


def _wave(painter: QPainter, colour: QColor, height: float) -> None:
    """Draw one period of a sine, the sign of a state that is carried on."""
    path = QPainterPath(QPointF(7.5, 16))
    for step in range(1, 35):
        x = 7.5 + step / 2
        path.lineTo(QPointF(x, 16 - height * math.sin((x - 7.5) / 17 * 2 * math.pi)))
    painter.setPen(QPen(colour, 2.8, Qt.PenStyle.SolidLine, Qt.PenCapStyle.RoundCap, Qt.PenJoinStyle.RoundJoin))
    painter.setBrush(Qt.BrushStyle.NoBrush)
    painter.drawPath(path)


_DRAWN = {
    Icon.IDLE: _idle,
    Icon.GENERATING: _generating,
    Icon.LOADING: _loading,
    Icon.DEGRADED: _degraded,
    Icon.AWAY: _away,
}
