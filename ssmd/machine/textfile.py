"""The text of a file that a user wrote, perhaps on Windows: UTF-8, UTF-16 or UTF-32, by its byte order mark."""

from __future__ import annotations

import codecs

_MARKS = (  # UTF-32 first: its mark begins with one of UTF-16
    ("utf-32", (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)),
    ("utf-16", (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)),  # `>` of Windows PowerShell 5 writes UTF-16
)
UTF_8 = "utf-8-sig"


def encoding(data: bytes | bytearray) -> str:
    """Return the encoding that a byte order mark names, "utf-32" or "utf-16"; else UTF_8."""
    return next((name for name, marks in _MARKS if data.startswith(marks)), UTF_8)


def decode(data: bytes) -> str:
    """Decode text without its byte order mark. Raises UnicodeDecodeError."""
    return data.decode(encoding(data))
