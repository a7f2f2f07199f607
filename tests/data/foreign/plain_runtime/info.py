"""Facts of this runtime, which ssmd reads without importing the runtime (docs/add-a-runtime.md)."""

from ssmd.runtime import RuntimeInfo

INFO = RuntimeInfo(packs=True)  # it takes the weights of any model as they are
