"""The suppression of a line that LiteRT writes to stderr with a process's first model, whatever its log level.

The line is `INFO: Created TensorFlow Lite XNNPACK delegate for CPU.`. A model without operations is loaded first, while
stderr is redirected for 2 ms. Messages about real models are not suppressed.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

LINE = b"Created TensorFlow Lite XNNPACK delegate"
# A flatbuffer of LiteRT's schema 3: one graph, one tensor of float32 [1], which is its input and its output.
MODEL = bytes.fromhex(
    "1800000054464c3300000e00140010000c000800000004000e000000100000001c000000980000000300000001000000"
    "080000000400040004000000010000001400000000000e001800140010000c00080004000e000000140000001c000000"
    "1c0000002000000024000000040000006d61696e00000000000000000100000000000000010000000000000001000000"
    "100000000c000c0008000000000004000c000000080000000c0000000100000078000000010000000100000000000000"
)
_lock = threading.Lock()
_heard = False


def heard(load: Callable[[Path], None]) -> None:
    """Let LiteRT write its line now, with stderr redirected.

    load: loads a model's file and closes it. Its errors are ignored, as a real model will raise them again.
    """
    global _heard
    with _lock:
        if _heard:
            return
        _heard = True
        with contextlib.suppress(Exception), tempfile.TemporaryDirectory(prefix="ssmd-") as folder:
            file = Path(folder) / "nothing.tflite"
            file.write_bytes(MODEL)
            with _without(LINE):
                load(file)


@contextlib.contextmanager
def _without(words: bytes) -> Iterator[None]:
    """Keep stderr from this process, C++ too, for a moment, and then pass on all lines but those with such words."""
    sys.stderr.flush()
    with tempfile.TemporaryFile() as kept:
        original = os.dup(2)
        os.dup2(kept.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(original, 2)
            kept.seek(0)
            others = b"".join(line for line in kept if words not in line)
            with os.fdopen(original, "wb", buffering=0) as stderr:
                if others:
                    stderr.write(others)
