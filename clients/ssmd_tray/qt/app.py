"""The tray as a process: the icon, its menu, the window, and the thread that watches the daemon."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from PySide6.QtCore import QFileSystemWatcher, QObject, Qt, QTimer, QUrl, Signal
from PySide6.QtGui import QDesktopServices, QGuiApplication, QPalette
from PySide6.QtNetwork import QLocalServer, QLocalSocket
from PySide6.QtWidgets import QApplication, QSystemTrayIcon

from ssmd_tray import actions, login
from ssmd_tray.doing import ActionRunner, Outcome
from ssmd_tray.qt.icon import icon
from ssmd_tray.qt.log import Log
from ssmd_tray.qt.menu import Menu
from ssmd_tray.qt.window import Window
from ssmd_tray.seeing import ViewBuilder
from ssmd_tray.single import Single, socket_name
from ssmd_tray.view import Icon
from ssmd_tray.watching import Observation, Paces, Watch

NO_HOST = "this desktop shows no tray icons, so this window stands in; to close it ends the tray"
_HOST_S, _HOST_AT_LOGIN_S = 2.0, 20.0  # a panel may start after the tray
_LOOK_MS = 1000  # for a panel
_TOOLTIP_S = 1.0
_SAID_MS = 15_000
_ASK_MS = 2000
_AGAIN_MS = 10_000  # so that "for 5 min" does not stand still


class Tray(QObject):
    """All of it, for one data directory."""

    seen = Signal(object)
    told = Signal(object)

    def __init__(self, data_dir: Path, *, at_login: bool = False, paces: Paces | None = None) -> None:
        super().__init__()
        self._data_dir = data_dir
        self._seeing, self._sight = ViewBuilder(), Observation(time.monotonic(), problem="looking for the daemon")
        self._url: str | None = None  # of the daemon that was seen last
        self.view = self._seeing.view(self._sight)
        self._doing = ActionRunner(self.told.emit)
        chosen = self._actions()
        self.window, self.menu, self._log = Window(chosen), Menu(chosen), Log(data_dir)
        self.icon = QSystemTrayIcon()
        self.icon.setContextMenu(self.menu)
        self.icon.activated.connect(self._activated)
        self._icon: tuple[Icon, bool] | None = None
        self._tooltip_at = 0.0
        self._host_by = time.monotonic() + (_HOST_AT_LOGIN_S if at_login else _HOST_S)
        self.seen.connect(self.saw, Qt.ConnectionType.QueuedConnection)
        self.told.connect(self._came, Qt.ConnectionType.QueuedConnection)
        self.watch = Watch(data_dir, self.seen.emit, paces)
        self._quiet = QTimer(self, singleShot=True, interval=_SAID_MS)
        self._quiet.timeout.connect(partial(self.window.say, ""))
        self._host = QTimer(self, interval=_LOOK_MS)
        self._host.timeout.connect(self._look_for_host)
        self._again = QTimer(self, interval=_AGAIN_MS)
        self._again.timeout.connect(self._redraw)
        self._files = QFileSystemWatcher([str(data_dir)])
        self._files.directoryChanged.connect(self._stirred)
        QGuiApplication.styleHints().colorSchemeChanged.connect(self._redraw)

    def start(self) -> None:
        self.menu.at_login.setChecked(self._login().enabled)
        self._redraw()
        self.icon.show()
        self._look_for_host()
        self._host.start()
        self._again.start()
        self.watch.start()

    def end(self) -> None:
        for one in (self.icon, self.window, self._log):
            one.hide()
        self.watch.stop()

    def _actions(self) -> dict[str, Callable[..., None]]:
        doing: dict[str, Callable[..., str]] = {
            "load": actions.load,
            "unload": actions.unload,
            "pin": actions.pin,
            "stop_request": actions.stop_request,
            "page": actions.page,
            "start": self._start_again,
            "stop": actions.stop,
            "restart": actions.restart,
        }
        return {
            **{name: partial(self._do, name, what) for name, what in doing.items()},
            "copy": self._copy,
            "log": self._show_log,
            "look": self._look,
            "window": self._show_window,
            "at_login": self._start_at_login,
            "quit": QApplication.quit,
        }

    def _start_again(self, data_dir: Path) -> str:
        return actions.start(data_dir, self._url)

    def _do(self, name: str, action: Callable[..., str], *arguments: object) -> None:
        key = " ".join([name, *map(str, arguments[:1])])
        if self._doing.do(key, partial(action, self._data_dir, *arguments)):
            self._say({"start": "the daemon starts …", "restart": "the daemon ends and starts again …"}.get(name, ""))

    def _came(self, outcome: Outcome) -> None:
        """Handle the result of an action, in the window's thread."""
        if outcome.key == "page" and not outcome.failed:
            shown = QDesktopServices.openUrl(QUrl(outcome.words))
            self._say("" if shown else f"no browser was found: open {outcome.words.partition('#')[0]}")
        else:
            self._say(outcome.words)
            if outcome.failed and not self.window.isVisible():
                self.window.unasked()  # an action chosen in the menu failed: the window shows the error
        self._redraw(always=True)
        self.watch.look()

    def _say(self, words: str) -> None:
        self.window.say(words)
        self._quiet.start()

    def saw(self, sight: Observation) -> None:
        """Show a sight of the daemon. Called in the window's thread."""
        self._sight = sight
        if sight.address is not None:
            self._url = sight.address.url
        self._redraw()

    def _redraw(self, *_: object, always: bool = False) -> None:
        view = self.view = self._seeing.view(self._sight)
        dark = is_dark()
        changed = always or self._icon != (view.icon, dark)
        if self._icon != (view.icon, dark):
            self._icon = view.icon, dark
            self.icon.setIcon(icon(view.icon, dark))
            self.window.setWindowIcon(icon(view.icon, dark))
        now = time.monotonic()
        if changed or now - self._tooltip_at >= _TOOLTIP_S:
            self._tooltip_at = now
            self.icon.setToolTip(view.tooltip.replace("<", "‹"))  # some hosts read markup
            self.menu.show_view(view)
        self.window.show_view(view, dark)

    def _activated(self, reason: QSystemTrayIcon.ActivationReason) -> None:
        if reason in (QSystemTrayIcon.ActivationReason.Trigger, QSystemTrayIcon.ActivationReason.DoubleClick):
            self.window.hide() if self.window.isVisible() and self.window.isActiveWindow() else self._show_window()

    def _show_window(self) -> None:
        self.watch.look()
        self.window.asked()

    def _show_log(self) -> None:
        self._log.show()
        self._log.raise_()
        self._log.activateWindow()

    def _stirred(self, _: str) -> None:
        """Look for a daemon, as a file was added to the data directory or removed: it may have its address."""
        if self._sight.found is None:
            self.watch.look()

    def _look(self) -> None:
        self.watch.look()

    def _copy(self) -> None:
        if self.view.base_url is None:
            self._say(self.view.why_no_url)
            return
        QGuiApplication.clipboard().setText(self.view.base_url)
        self._say(f"copied {self.view.base_url}")

    def _start_at_login(self, on: bool) -> None:
        item = self._login()
        try:
            item.enable() if on else item.disable()
            self._say("" if item.tried else f"{item.path} was written; on this system it has not been tested")
        except OSError as err:
            self._say(f"cannot change {item.path}: {err.strerror or err}")
            self.window.unasked()
        self.menu.at_login.setChecked(self._login().enabled)

    def _login(self) -> login.Item:
        return login.item(self._data_dir)

    def _look_for_host(self) -> None:
        """Have the window stand in for the icon where no host shows that, for as long as that is so."""
        there = QSystemTrayIcon.isSystemTrayAvailable()
        self.window.closing = self.window.hide if there else QApplication.quit
        if there:
            self.window.stand("")
        elif time.monotonic() >= self._host_by:
            self.window.stand(NO_HOST)
            if not self.window.isVisible():
                self.window.unasked()


def run(data_dir: Path, *, at_login: bool = False) -> int:
    """Run the tray until it is quit; where one runs already, have that show its window. Returns the exit code."""
    single = Single.take(data_dir)
    if single is None:
        return _ask_first(data_dir)
    app = application()
    server = QLocalServer()
    server.setSocketOptions(QLocalServer.SocketOption.UserAccessOption)
    name = socket_name(data_dir)
    QLocalServer.removeServer(name)  # left by a killed tray: the holder of the lock is the only one
    server.listen(name)  # where that fails a second tray cannot have this one shown, and no more
    tray = Tray(data_dir, at_login=at_login)
    server.newConnection.connect(partial(_shown, server, tray))
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's own handler would wait for the next event
    tray.start()
    try:
        return int(app.exec())
    finally:
        tray.end()
        server.close()
        single.release()


def is_dark() -> bool:
    """Return True if this desktop is dark, by its windows' colours, as not every desktop reports it."""
    return bool(QGuiApplication.palette().color(QPalette.ColorRole.Window).lightness() < 128)


def application() -> QApplication:
    """Make the process's only QApplication."""
    app = QApplication(["ssmd-tray"])
    app.setApplicationName("ssmd-tray")
    app.setApplicationDisplayName("ssmd")
    app.setDesktopFileName("ssmd-tray")
    app.setQuitOnLastWindowClosed(False)
    return app


def _ask_first(data_dir: Path) -> int:
    asking = QLocalSocket()
    asking.connectToServer(socket_name(data_dir))
    if asking.waitForConnected(_ASK_MS):
        asking.disconnectFromServer()
    return 0


def _shown(server: QLocalServer, tray: Tray) -> None:
    """Show the window, as the user has started a second tray."""
    while (other := server.nextPendingConnection()) is not None:
        other.disconnected.connect(other.deleteLater)
        other.disconnectFromServer()
    tray.window.asked()
