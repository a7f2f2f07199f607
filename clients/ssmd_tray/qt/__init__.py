"""The tray's user interface. Needs the extra `tray`."""
