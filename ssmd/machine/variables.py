"""Environment variables of ssmd: the known ones, and a check for misspelt ones that ssmd does not read."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator

from ssmd.machine.spelling import did_you_mean, printable

PREFIX = "SSMD_"
OTHERS = {  # variables that are not settings, with their meanings for docs/configuration.md
    "SSMD_CONFIG": "where the settings file is",
    "SSMD_CACHE_DIR": "what runtimes keep for a quicker next load; default: the platform's cache folder of ssmd. If "
    "another user owns it, or every user can write to it, `cache` in SSMD_DATA_DIR, or in the default data directory, "
    "is used instead",
    "SSMD_WGPU_WRAPPED": "`1`: wgpu records through wgpu-py, which says at which call something is wrong "
    "([wgpu.md](wgpu.md))",
}
OF_TESTS = frozenset(  # variables of tests and benchmarks, which start programs that read settings
    f"{PREFIX}{name}"
    for name in (
        *("CLIENT_PYTHON", "CONTRACT_FAMILIES", "CONTRACT_RUNTIMES", "DATABASES", "EXAMPLES", "FLIPS", "FUZZ"),
        *("COMMANDS", "FUZZ_SEED", "KILLS", "LLAMA_LIBRARY", "MIXED_SECONDS", "SEED", "STEPS"),
    )
)
# Variables that Kubernetes and Docker set in containers for a service named ssmd.
_OF_SERVICES = re.compile(r"SSMD_(SERVICE_(HOST|PORT)(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)")


def misspelt(settings: Collection[str]) -> Iterator[str]:
    """Yield a line for each unknown variable that begins with SSMD_, without its value, which may be a key.

    settings: names of the known ones. Case makes no difference, and an empty variable counts as not set.
    """
    known = {*settings, *OTHERS}
    for name, value in os.environ.items():
        upper = name.upper()
        if value and upper.startswith(PREFIX) and upper not in known | OF_TESTS and not _OF_SERVICES.fullmatch(upper):
            meant = did_you_mean(upper.removeprefix(PREFIX), [one.removeprefix(PREFIX) for one in known], PREFIX)
            yield f"{printable(name)}: no such setting" + (meant or f"; there are: {', '.join([*settings, *OTHERS])}")
