"""The desktop's tray shows what the daemon does. What needs Qt lies in `qt/`; all else is tested without a display."""
