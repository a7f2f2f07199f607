"""The tokens that a tokenizer.json puts before every text, such as BOS: read from its post-processor's template."""

from __future__ import annotations

import json
from typing import Any

_MOST = 16  # tokens read; tokenizers in use have one


def read_beginning(state: bytes | None) -> tuple[int, ...]:
    """Return the ids that stand before a text. () for post-processors other than templates: they add none there."""
    try:
        found = json.loads(state) if state else None
    except ValueError:
        return ()
    return _of(found)[:_MOST]


def _of(found: Any) -> tuple[int, ...]:
    if not isinstance(found, dict):
        return ()
    if found.get("type") == "Sequence":
        parts = found.get("processors")
        return tuple(token for part in (parts if isinstance(parts, list) else []) for token in _of(part))
    if found.get("type") != "TemplateProcessing":
        return ()
    ids: list[int] = []
    for piece in found.get("single", []):
        if "SpecialToken" not in piece:  # the text itself: tokens after it belong to its end
            break
        ids += found["special_tokens"][piece["SpecialToken"]["id"]]["ids"]
    return tuple(ids)
