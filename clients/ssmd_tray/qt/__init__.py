"""What is drawn and clicked. Needs the extra `tray`."""
