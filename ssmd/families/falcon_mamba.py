"""FalconMamba (arXiv:2410.05355; transformers' `FalconMambaForCausalLM`): Mamba with norms of dt's input, B and C.

The norms have no weights: parameters as in ssmd/families/mamba.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ssmd.families import mamba
from ssmd.families.fields import Fields


def parse(config: Mapping[str, Any]) -> mamba.Config:
    """Read config.json. Raises FamilyError naming the field."""
    return mamba.Config.parse(config, mixer_eps=Fields(config).number("mixer_rms_eps", 1e-6))
