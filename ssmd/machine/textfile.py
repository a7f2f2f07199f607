"""The text of a file that a user wrote, perhaps on Windows: UTF-8 or UTF-16, by its byte order mark."""

from __future__ import annotations

import codecs

UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)  # `>` of Windows PowerShell 5 writes UTF-16


def decode(data: bytes) -> str:
    """Decode UTF-8, or UTF-16 behind its byte order mark, without that mark. Raises UnicodeDecodeError."""
    return data.decode("utf-16" if data.startswith(UTF_16) else "utf-8-sig")
