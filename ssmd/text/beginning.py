"""What a tokenizer.json puts before every text of its own accord, such as BOS: the template of its post-processor."""

from __future__ import annotations

import json
from typing import Any

_MOST = 16  # tokens; those in use have one


def read_beginning(state: bytes | None) -> tuple[int, ...]:
    """The ids that stand before a text; () for other post-processors than templates, which put none there."""
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
        if "SpecialToken" not in piece:  # the text: what comes after it ends it
            break
        ids += found["special_tokens"][piece["SpecialToken"]["id"]]["ids"]
    return tuple(ids)
