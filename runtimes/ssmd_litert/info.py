"""Facts of this runtime (ssmd/runtime/info.py). Imports neither the runtime nor LiteRT."""

from ssmd.runtime.info import RuntimeInfo, Target

# On Windows for ARM there is no package of LiteRT.
INFO = RuntimeInfo(
    rank=0,
    targets=(Target("litert", serves=("attention windows",)),),
    suggested=lambda platform, machine: (platform, machine) != ("win32", "arm64"),
)
