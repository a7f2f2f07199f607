"""Artifacts as a stranger may send them: what lies in them was exchanged, and every hash is right."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ssmd.model.artifact import MANIFEST, seal

RARE, SLOW = "\ue000", "\ue001"  # characters that no text has by chance


def forged(artifact: Path, out: Path, files: Mapping[str, bytes], **said: Any) -> Path:
    """A copy with other files, sealed anew. said: what its manifest says otherwise."""
    shutil.copytree(artifact, out)
    for name, data in files.items():
        (out / name).write_bytes(data)
    manifest = json.loads((out / MANIFEST).read_text())
    (out / MANIFEST).unlink()
    seal(out, {k: v for k, v in manifest.items() if k not in ("format", "build", "files")} | said)
    return out


def replacing(*pairs: tuple[dict[str, str], str]) -> dict[str, Any]:
    """A tokenizer.json's normalizer."""
    return {
        "type": "Sequence",
        "normalizers": [{"type": "Replace", "pattern": pattern, "content": content} for pattern, content in pairs],
    }


GROWS = (({"String": "boom"}, RARE * 1000), ({"String": RARE}, RARE * 1000), ({"String": RARE}, "b" * 1000))
TAKES_LONG = ({"Regex": f"{SLOW}+{SLOW}+c"}, "")  # cubic


def hostile(tokenizer: Path, normalizer: dict[str, Any]) -> bytes:
    """A tokenizer.json with another normalizer."""
    return json.dumps(json.loads(tokenizer.read_text()) | {"normalizer": normalizer}).encode()
