"""Facts of this runtime (ssmd/runtime/info.py). Imports neither the runtime nor wgpu."""

from ssmd.runtime.info import RuntimeInfo, Target

# Its packs of JSON and safetensors are read by ssmd, not by a vendor's parser.
INFO = RuntimeInfo(
    targets=(Target("wgpu", "", serves=("experts",)),),
    packs=True,
    parses_safely=True,
    suggested=lambda platform, machine: (platform, machine) == ("win32", "arm64"),
)
