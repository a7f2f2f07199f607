"""Labels and buttons that show any text literally, also untrusted text."""

from __future__ import annotations

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QLabel, QSizePolicy, QWidget


class Words(QLabel):
    """A plain text, cut with an ellipsis if the window is narrow. reached: the keyboard reaches it."""

    def __init__(self, *, wrapped: bool = False, reached: bool = False, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setTextFormat(Qt.TextFormat.PlainText)
        self.setWordWrap(wrapped)
        policy = self.sizePolicy()  # knows that wrapped text is higher where it is narrow
        policy.setHorizontalPolicy(QSizePolicy.Policy.Ignored)  # a word without end makes no window wider
        self.setSizePolicy(policy)
        if reached:
            by = Qt.TextInteractionFlag.TextSelectableByMouse | Qt.TextInteractionFlag.TextSelectableByKeyboard
            self.setTextInteractionFlags(by)
            self.setFocusPolicy(Qt.FocusPolicy.TabFocus)

    def say(self, text: str) -> None:
        """Show a text; a screen reader hears it where it is reached."""
        if text != self.text():
            self.setText(text)
            self.setAccessibleName(text)


def literal(text: str) -> str:
    """Return a text for a menu or a button, where & would underline a letter."""
    return text.replace("&", "&&")
