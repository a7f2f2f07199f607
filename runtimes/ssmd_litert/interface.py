"""The C interface of libLiteRt.so: structures, functions, and a check that it can be used here.

The declarations are those of litert/c/*.h in LiteRT 2.3; `open_library` refuses any other version.
"""

from __future__ import annotations

import ctypes
import importlib.util
from ctypes import POINTER, c_char_p, c_int, c_int32, c_int64, c_size_t, c_uint, c_uint32, c_void_p
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from ssmd.machine.installation import broken
from ssmd.runtime.hoststate.graph import Array, GraphError

PACKAGE = "ai-edge-litert"
TESTED = "2.3."
ALIGNMENT = 64  # LITERT_HOST_MEMORY_BUFFER_ALIGNMENT
CPU = 1  # kLiteRtHwAcceleratorCpu
TAG_ACCELERATORS, TAG_SEVERITY = 24, 25  # kLiteRtEnvOptionTagAutoRegisterAccelerators, …MinLoggerSeverity
ANY_INT = 2  # kLiteRtAnyTypeInt
ERRORS_ONLY = 3  # LITERT_ERROR
ELEMENTS: dict[int, np.dtype[Any]] = {1: np.dtype(np.float32), 2: np.dtype(np.int32)}
_ELEMENT_OF = {dtype: code for code, dtype in ELEMENTS.items()}
HOST_MEMORY = 1  # kLiteRtTensorBufferTypeHostMemory
LOCK_READ, LOCK_WRITE = 0, 1
_NAMES = ("libLiteRt.so", "libLiteRt.dylib", "libLiteRt.dll", "LiteRt.dll")


class _Layout(ctypes.Structure):
    _fields_ = (  # LiteRtLayout
        ("rank", c_uint, 7),
        ("has_strides", c_uint, 1),
        ("dimensions", c_int32 * 8),
        ("strides", c_uint32 * 8),
    )


class TensorType(ctypes.Structure):
    _fields_ = (("element", c_int), ("layout", _Layout))  # LiteRtRankedTensorType


class Option(ctypes.Structure):
    _fields_ = (("tag", c_int), ("kind", c_int64), ("value", c_int64))  # LiteRtEnvOption with an integer LiteRtAny


_Destructor = ctypes.CFUNCTYPE(None, c_void_p)
_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "LiteRtCreateEnvironment": (c_int, POINTER(Option), POINTER(c_void_p)),
    "LiteRtCreateModelFromBuffer": (c_void_p, c_void_p, c_size_t, POINTER(c_void_p)),
    "LiteRtCreateOptions": (POINTER(c_void_p),),
    "LiteRtSetOptionsHardwareAccelerators": (c_void_p, c_int),
    "LiteRtCreateOpaqueOptions": (c_char_p, c_void_p, _Destructor, POINTER(c_void_p)),
    "LiteRtAddOpaqueOptions": (c_void_p, c_void_p),
    "LiteRtCreateCompiledModel": (c_void_p, c_void_p, c_void_p, POINTER(c_void_p)),
    "LiteRtCompiledModelResizeInputTensorNonStrict": (c_void_p, c_size_t, c_size_t, POINTER(c_int), c_size_t),
    "LiteRtGetModelMetadata": (c_void_p, c_char_p, POINTER(c_void_p), POINTER(c_size_t)),
    "LiteRtGetNumModelSignatures": (c_void_p, POINTER(c_size_t)),
    "LiteRtGetModelSignature": (c_void_p, c_size_t, POINTER(c_void_p)),
    "LiteRtGetSignatureKey": (c_void_p, POINTER(c_char_p)),
    "LiteRtGetNumSignatureInputs": (c_void_p, POINTER(c_size_t)),
    "LiteRtGetNumSignatureOutputs": (c_void_p, POINTER(c_size_t)),
    "LiteRtGetSignatureInputName": (c_void_p, c_size_t, POINTER(c_char_p)),
    "LiteRtGetSignatureOutputName": (c_void_p, c_size_t, POINTER(c_char_p)),
    "LiteRtGetSignatureInputTensorByIndex": (c_void_p, c_size_t, POINTER(c_void_p)),
    "LiteRtGetSignatureOutputTensorByIndex": (c_void_p, c_size_t, POINTER(c_void_p)),
    "LiteRtGetRankedTensorType": (c_void_p, POINTER(TensorType)),
    "LiteRtCreateTensorBufferFromHostMemory": (POINTER(TensorType), c_void_p, c_size_t, c_void_p, POINTER(c_void_p)),
    "LiteRtCreateManagedTensorBuffer": (c_void_p, c_int, POINTER(TensorType), c_size_t, POINTER(c_void_p)),
    "LiteRtLockTensorBuffer": (c_void_p, POINTER(c_void_p), c_int),
    "LiteRtUnlockTensorBuffer": (c_void_p,),
    "LiteRtRunCompiledModel": (c_void_p, c_size_t, c_size_t, POINTER(c_void_p), c_size_t, POINTER(c_void_p)),
    "LiteRtDestroyTensorBuffer": (c_void_p,),
    "LiteRtDestroyCompiledModel": (c_void_p,),
    "LiteRtDestroyOptions": (c_void_p,),
    "LiteRtDestroyModel": (c_void_p,),
    "LiteRtDestroyEnvironment": (c_void_p,),
}


def package_version() -> str:
    """Return the installed version of ai-edge-litert. Raises ImportError when it is not installed."""
    try:
        return version(PACKAGE)
    except PackageNotFoundError as err:
        raise ImportError(f"{PACKAGE} is not installed") from err


def open_library() -> Any:
    """Return the shared library with all functions declared.

    Raises GraphError if it is another version or lacks a function.
    """
    if not package_version().startswith(TESTED):
        raise GraphError(f"{PACKAGE} {package_version()} is not {TESTED}x, whose C interface is the one known here")
    found = importlib.util.find_spec("ai_edge_litert")  # not imported: it would load the wrapper and its plugins
    folders = list(found.submodule_search_locations or ()) if found else []
    paths = [p for f in folders for n in _NAMES if (p := Path(f) / n).is_file()]
    if not paths:
        raise GraphError(f"{PACKAGE} has none of {_NAMES} in {folders}")
    try:
        library = ctypes.CDLL(str(paths[0]))
        for name, arguments in _ARGUMENTS.items():
            function = getattr(library, name)
            function.argtypes = arguments
            function.restype = None if name.startswith("LiteRtDestroy") else c_int
    except (OSError, AttributeError) as err:
        raise GraphError(f"{paths[0]} cannot be used: {err}") from err
    return library


@cache
def problem() -> str:
    """Return the reason why models cannot be loaded here, or "". Tries the library, then the package's own wrapper."""
    try:
        open_library()
    except GraphError:
        try:
            import_module("ai_edge_litert.compiled_model")
        except (ImportError, OSError) as err:
            return broken(PACKAGE, err)
    return ""


def tensor_type(array: Array) -> TensorType:
    kind = TensorType()
    kind.element = _ELEMENT_OF[array.dtype]
    kind.layout.rank = array.ndim
    for axis, size in enumerate(array.shape):
        kind.layout.dimensions[axis] = size
    return kind


keep = _Destructor(lambda _: None)  # the options' text belongs to Python: LiteRT must not free it
