"""Facts of this runtime (ssmd/runtime/info.py). Imports neither the runtime nor LiteRT."""

from ssmd.runtime.info import RuntimeInfo

# On Windows for ARM there is no package of LiteRT.
INFO = RuntimeInfo(rank=0, suggested=lambda platform, machine: (platform, machine) != ("win32", "arm64"))
