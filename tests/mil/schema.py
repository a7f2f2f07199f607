"""The protobuf schema of Core ML's files as coremltools 9.0 ships it, imported without the noise of its import.

On Linux coremltools says that its prediction library is missing, and that it was not tested with this torch; torch's
own packages have more to say. None of it matters here: a package is read by the schema alone.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet() -> Iterator[None]:
    """Neither warnings nor log lines, while coremltools is imported or converts a model."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


with quiet():
    import coremltools
    from coremltools.proto import FeatureTypes_pb2 as features
    from coremltools.proto import MIL_pb2 as mil
    from coremltools.proto import Model_pb2 as model
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

__all__ = ["DecodeError", "coremltools", "features", "mil", "model", "quiet"]
