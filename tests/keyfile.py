"""Files of API keys, and how a client sends one of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def written(file: Path, text: str, mode: int = 0o600) -> Path:
    """The file, with this text and this mode."""
    file.write_text(text, "utf-8")
    file.chmod(mode)
    return file


def bearer(key: str) -> Mapping[str, str]:
    """The header of a client that has the key."""
    return {"authorization": f"Bearer {key}"}
