"""A desktop of our own: an X server without a screen, a window manager, a tray host; and what is clicked in it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = ("Xvfb", "xdotool", "openbox", "trayer")  # packages of Debian have the same names, in lower case
SIZE = (1000, 800)
PANEL = 32  # pixels


@dataclass(frozen=True)
class Desktop:
    """An X server with nothing on it but what a test starts. folder: for what its programs write."""

    display: str
    folder: Path

    @property
    def variables(self) -> dict[str, str]:
        """Return the environment of programs on this desktop, without the user's own settings."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("SSMD_", "QT_", "WAYLAND", "XDG_", "DBUS_"))}
        own = {"DISPLAY": self.display, "QT_QPA_PLATFORM": "xcb", "XDG_RUNTIME_DIR": str(self.folder)}
        places = {"HOME": str(self.folder), "XDG_CONFIG_HOME": str(self.folder / "config")}
        return {**kept, **own, **places, "PATH": f"{self.folder}:{os.environ['PATH']}"}

    def xdotool(self, *arguments: str) -> str:
        done = subprocess.run(["xdotool", *arguments], env=self.variables, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    def windows(self, name: str) -> list[str]:
        """Return the visible windows of that whole title. The tray's icon does not count."""
        found = self.xdotool("search", "--onlyvisible", "--name", f"^{name}$").split()
        return [window for window in found if self.place(window)["WIDTH"] > PANEL]

    def place(self, window: str) -> Counter[str]:
        lines = (line.split("=") for line in self.xdotool("getwindowgeometry", "--shell", window).split())
        return Counter({name: int(value) for name, value in lines})

    def focused(self) -> str:
        """The title of the window that has the keyboard."""
        return self.xdotool("getwindowfocus", "getwindowname")

    def click(self, x: int, y: int, button: int = 1) -> None:
        self.xdotool("mousemove", str(x), str(y), "click", str(button))

    def icon(self) -> tuple[int, int] | None:
        """The middle of the tray's icon; None if it is not there."""
        for window in self.xdotool("search", "--onlyvisible", "--class", "ssmd-tray").split():
            place = self.place(window)
            if 0 < place["WIDTH"] <= PANEL and place["Y"] < PANEL:
                return place["X"] + place["WIDTH"] // 2, place["Y"] + place["HEIGHT"] // 2
        return None

    def click_icon(self, button: int = 1) -> None:
        place = self.icon()
        assert place is not None
        self.click(*place, button)

    def picture(self, file: Path, left: int, top: int, width: int, height: int) -> Path:
        """Write what is seen in a part of the screen as PNG."""
        grab = (
            "import sys; from PySide6.QtWidgets import QApplication; app = QApplication([])\n"
            "part = app.primaryScreen().grabWindow(0, *map(int, sys.argv[2:]))\n"
            "sys.exit(not part.save(sys.argv[1]))"
        )
        place = map(str, (left, top, width, height))
        variables = {**self.variables, "QT_SCALE_FACTOR": "1", "QT_FONT_DPI": "96"}
        subprocess.run([sys.executable, "-c", grab, str(file), *place], env=variables, check=True)
        return file

    def colours(self) -> Counter[str]:
        """Count the pixels of the tray's icon by colour."""
        from PySide6.QtGui import QImage

        place = self.icon()
        if place is None:
            return Counter()
        x, y = place
        image = QImage(str(self.picture(self.folder / "icon.png", x - 12, y - 12, 24, 24)))
        return Counter(image.pixelColor(i, j).name() for i in range(image.width()) for j in range(image.height()))

    @contextmanager
    def host(self, *colours: str) -> Iterator[None]:
        """A tray at the upper right corner."""
        place = ("--edge", "top", "--align", "right", "--widthtype", "request", "--height", str(PANEL))
        with started(["trayer", *place, *colours], self.variables):
            self.soon(lambda: self.xdotool("search", "--class", "trayer") != "")
            yield

    def soon(self, condition: Callable[[], object], within_s: float = 15) -> None:
        deadline = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < deadline, "it did not happen"
            time.sleep(0.05)


def missing() -> list[str]:
    """Programs that are not installed."""
    return [name for name in PROGRAMS if shutil.which(name) is None]


@contextmanager
def desktop(folder: Path, scale: float = 1.0) -> Iterator[Desktop]:
    """An X server with a window manager, and no tray host yet."""
    folder.mkdir(mode=0o700, exist_ok=True)
    with ExitStack() as held:
        read, write = os.pipe()
        width, height = (round(side * scale) for side in SIZE)
        screen = ("-screen", "0", f"{width}x{height}x24", "-dpi", str(round(96 * scale)), "-nolisten", "tcp")
        held.enter_context(started(["Xvfb", "-displayfd", str(write), *screen], os.environ, write))
        os.close(write)
        with os.fdopen(read) as number:
            one = Desktop(f":{number.readline().strip()}", folder)
        held.enter_context(started(["openbox"], one.variables))
        yield one


@contextmanager
def started(
    command: list[str], variables: Mapping[str, str], keep: int | None = None, out: Path | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A program for as long as the body runs. keep: a descriptor that it inherits; out: where its words go."""
    with open(os.devnull if out is None else out, "ab") as words:
        process = subprocess.Popen(
            command, env=dict(variables), stdout=words, stderr=words, pass_fds=() if keep is None else (keep,)
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def tray_command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "ssmd", "tray", *arguments]
