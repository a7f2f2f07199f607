"""The desktop's tray, which shows the daemon's work. Code with Qt is in `qt/`; the rest is tested without a display."""
