"""Pictures of the tray for the documentation: its icons, its menu and its window beside a daemon that answers.

    python benchmarks/tray_pictures.py [FOLDER]

The icons are drawn by their own code; all else is taken from an X server without a screen, in which a tray host, a
window manager and `ssmd tray` run. Needs the extra `tray` and Debian's xvfb, xdotool, openbox and trayer.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from daemon_process import HostProcess

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))
from desktop import Desktop, desktop, missing, started  # noqa: E402

FOLDER = ROOT / "docs" / "pictures"
STORY = "Tell a long story of a lighthouse and its keeper."
AHEAD = "Which {} is the largest in the world? Answer in a sentence."
TRAY = (
    "import sys, pathlib; from PySide6.QtGui import QColor, QPalette; from ssmd_tray.qt import app\n"
    "make = app.application\n"
    "def coloured():\n"
    "    one = make(); sys.argv[2] == 'Dark' and one.setPalette(QPalette(QColor('#24292f'))); return one\n"
    "app.application = coloured; sys.exit(app.run(pathlib.Path(sys.argv[1])))"
)
PANELS = {"Light": ("--transparent", "true", "--alpha", "0", "--tint", "0xdfe3e8"),
          "Dark": ("--transparent", "true", "--alpha", "0", "--tint", "0x1c2128")}  # fmt: skip
GROUNDS = {False: "#eef1f4", True: "#1c2128"}


def icons(file: Path) -> None:
    """Each state on light and on dark ground, at the scales 1 and 2."""
    os.environ["QT_QPA_PLATFORM"] = "offscreen"
    from PySide6.QtCore import QRect, Qt
    from PySide6.QtGui import QColor, QPainter, QPixmap
    from PySide6.QtWidgets import QApplication

    from ssmd_tray.qt.icon import INK, pixmap
    from ssmd_tray.view import Icon

    app = QApplication.instance() or QApplication([])
    wide, high = 116, 96
    sheet = QPixmap(wide * len(Icon), 2 * high)
    painter = QPainter(sheet)
    for row, dark in enumerate((False, True)):
        painter.fillRect(0, row * high, sheet.width(), high, QColor(GROUNDS[dark]))
        for column, state in enumerate(Icon):
            left, top = column * wide, row * high
            painter.drawPixmap(left + 18, top + 28, pixmap(state, dark, 22))
            painter.drawPixmap(left + 52, top + 16, pixmap(state, dark, 44))
            painter.setPen(QColor(INK[dark]))
            painter.drawText(QRect(left, top + 66, wide, 24), Qt.AlignmentFlag.AlignCenter, state.value)
    painter.end()
    sheet.save(str(file))
    del app


@contextmanager
def asking(daemon: HostProcess, tokens: int) -> Iterator[None]:
    """An answer that goes on while the body runs."""
    ended = threading.Event()

    def ask() -> None:
        from daemon_process import Reply

        for _ in daemon.stream(Reply(), [{"role": "user", "content": STORY}], model="smollm2", max_tokens=tokens):
            if ended.is_set():
                return

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def shots(place: Desktop, daemon: HostProcess, data: Path, scheme: str, folder: Path) -> None:
    """The menu and the window in one colour scheme, and, in the light one, the window when the daemon is killed."""
    command = [sys.executable, "-c", TRAY, str(data), scheme]
    name = scheme.lower()
    with place.host(*PANELS[scheme]), started(command, place.variables):
        place.soon(lambda: place.icon() is not None)
        for thing in ("ocean", "desert", "island", "lake", "whale"):
            daemon.chat([{"role": "user", "content": AHEAD.format(thing)}], model="smollm2", max_tokens=40)
            time.sleep(6)
        with asking(daemon, 1500):
            time.sleep(6)
            place.click_icon(3)
            time.sleep(1)
            place.xdotool("key", "--delay", "100", "Up", "Up", "Up", "Up", "Right", "Down", "Right")
            time.sleep(1)
            place.picture(folder / f"tray-menu-{name}.png", 420, 0, 580, 250)
            place.xdotool("key", "--delay", "100", "Escape", "Escape", "Escape")
            place.click_icon()
            place.soon(lambda: place.windows("ssmd"))
            time.sleep(2)
            window(place, folder / f"tray-window-{name}.png")
            if scheme == "Dark":
                daemon.kill()
                time.sleep(4)
                window(place, folder / "tray-away.png")


def window(place: Desktop, file: Path) -> None:
    """The tray's window with its frame."""
    at = place.place(place.windows("ssmd")[0])
    place.picture(file, at["X"] - 2, at["Y"] - 40, at["WIDTH"] + 2, at["HEIGHT"] + 26)


def main(folder: Path) -> None:
    if wanted := missing():
        sys.exit(f"install these first: {', '.join(wanted)}")
    folder.mkdir(parents=True, exist_ok=True)
    icons(folder / "tray-icons.png")
    with tempfile.TemporaryDirectory(prefix="ssmd-") as scratch:
        data = Path(scratch) / "data"
        with desktop(Path(scratch) / "desktop") as place, HostProcess(data, "--preload", "smollm2") as daemon:
            for scheme in PANELS:
                shots(place, daemon, data, scheme, folder)
            daemon.start()  # what is stopped at the end
    for file in sorted(folder.glob("tray-*.png")):
        print(f"{file.name}: {file.stat().st_size / 1000:.1f} kB")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
