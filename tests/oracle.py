"""transformers as the oracle: logits that continue a cache, and what its cache holds in canonical form.

Known to be wrong in transformers 5.23, and gone round here:

- Mamba and FalconMamba begin every call of several tokens at a state of zero: `continued` steps them one at a time.
- A cache of recurrent layers only does not know how many tokens it has seen, and LFM2 and Bamba ask it: positions are
  passed, and the masks that it is asked for.
- Bamba begins at position 0 in every call: again, positions are passed.
- NemotronH clamps dt at `time_step_min` in a call of several tokens, and not at all in one of a single token. The
  published model has `time_step_limit` (its pull request 48989), which its mixers are given here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ssmd.model.state import State

STEPPED = ("mamba", "falcon_mamba")
CACHE_PARAMS = (*STEPPED, "mamba2")  # what these call cache_params is past_key_values elsewhere
ATTRIBUTES = {"key": "keys", "value": "values", "conv": "conv_states", "ssm": "recurrent_states"}


def continued(model: Any, ids: Sequence[int], cache: Any = None, position: int = 0) -> tuple[NDArray[np.float32], Any]:
    """Logits (n, V) after every one of the ids, and the cache with them. `position`: tokens that `cache` holds."""
    if cache is not None and len(ids) > 1 and model.config.model_type in STEPPED:
        rows = []
        for at, token in enumerate(ids):
            row, cache = continued(model, [token], cache, position + at)
            rows.append(row)
        return np.concatenate(rows), cache
    name = "cache_params" if model.config.model_type in CACHE_PARAMS else "past_key_values"
    asked: dict[str, Any] = {name: cache, "use_cache": True}
    asked["position_ids"] = torch.arange(position, position + len(ids)).unsqueeze(0)
    if model.config.model_type in ("lfm2", "lfm2_moe") and "full_attention" not in model.config.layer_types:
        asked["attention_mask"] = {"conv": None}
    if model.config.model_type == "bamba" and not model.config.attn_layer_indices:
        asked["attention_mask"] = {"full_attention": None, "linear_attention": None}
    if model.config.model_type == "nemotron_h":
        for layer in model.model.layers:
            if layer.block_type == "linear_attention":
                layer.mixer.time_step_limit = tuple(model.config.time_step_limit)
    with torch.no_grad():
        out = model(torch.tensor([list(ids)]), **asked)
    logits: NDArray[np.float32] = out.logits[0].numpy()
    return logits, out[name]


def state(cache: Any, position: int) -> State:
    """A canonical copy of transformers' cache; of its K conv columns the oldest is never used again."""
    tensors: dict[str, NDArray[Any]] = {}
    for i, layer in enumerate(cache.layers):
        for kind, attribute in ATTRIBUTES.items():
            value = getattr(layer, attribute, None)
            value = value[0] if isinstance(value, dict) else value
            if isinstance(value, torch.Tensor):
                array = value[0].numpy().copy()
                tensors[f"{kind}_{i}"] = array[:, 1:] if kind == "conv" else array
    return State(position, 0, tensors)


def stretched(cache: Any, rows: int, position: int) -> State:
    """Repeat the `rows` rows of keys and values in a cache, which is changed, until it has `position` of them: a long
    history that costs nothing. Returns the canonical state."""
    for layer in cache.layers:
        for name in ("keys", "values"):
            held = getattr(layer, name, None)
            if isinstance(held, torch.Tensor) and held.numel():
                setattr(layer, name, held.repeat(1, 1, -(-position // rows), 1)[:, :, :position].contiguous())
    return state(cache, position)
