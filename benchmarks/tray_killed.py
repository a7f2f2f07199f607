"""The tray's display, second by second, while its daemon is killed in the middle of an answer and started again.

    python benchmarks/tray_killed.py [MODEL]

The daemon is real, and so are the tray's icon and window; they are drawn without a screen. Needs the extra `tray`.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

from daemon_process import HostProcess, Reply, conditions

os.environ.setdefault("QT_QPA_PLATFORM", "offscreen")
MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
STORY = [{"role": "user", "content": "Tell a long story of a lighthouse and its keeper."}]
SECONDS = 24


class Stage:
    """A daemon to which things happen at their seconds."""

    def __init__(self, daemon: HostProcess) -> None:
        self._daemon = daemon
        self.happens: dict[int, tuple[str, Callable[[], None]]] = {
            2: ("an answer is asked for", self._ask),
            6: ("kill -9", daemon.kill),
            13: ("ssmd serve", daemon.spawn),
            18: ("an answer is asked for", self._ask),
        }

    def _ask(self) -> None:
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        try:
            for _ in self._daemon.stream(Reply(), STORY, model=MODEL, max_tokens=700):
                pass
        except Exception:
            pass


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        with HostProcess(data, "--preload", MODEL) as daemon:
            shown(Stage(daemon), data)
    print(f"\n{conditions()}")


def shown(stage: Stage, data: Path) -> None:
    """Print a line of what is shown each second."""
    from PySide6.QtCore import QTimer

    from ssmd_tray.qt.app import Tray, application

    app = application()
    tray = Tray(data)
    tray.start()
    tray.window.unasked()
    seconds = iter(range(SECONDS + 1))
    print("| s | what happens | icon | headline | said | request |\n| --- | --- | --- | --- | --- | --- |")

    def look() -> None:
        second = next(seconds, None)
        if second is None:
            app.quit()
            return
        what, act = stage.happens.get(second, ("", None))
        view = tray.view
        request = view.requests[0].doing if view.requests else ""
        notice = view.notice.replace(str(data), "the data directory")
        print(f"| {second} | {what} | {view.icon} | {view.headline} | {notice} | {request} |", flush=True)
        if act is not None:
            threading.Thread(target=act).start()

    timer = QTimer(interval=1000)
    timer.timeout.connect(look)
    timer.start()
    app.exec()
    tray.end()


if __name__ == "__main__":
    main()
