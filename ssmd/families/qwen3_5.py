"""Qwen3.5, 3.6 and 3.8, dense, as they are published: the text model of a model with a vision tower.

config.json has its fields in `text_config`, and the checkpoint its tensors below `model.language_model.`. Parameters as
in ssmd/families/qwen3_5_text.py. The tower and the head that predicts further tokens are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ssmd.families import qwen3_5_text
from ssmd.families.fields import FamilyError
from ssmd.model.formats import unread

TEXT_TYPE = "qwen3_5_text"


def text_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields of the text model. Raises FamilyError if there are none.

    `tie_word_embeddings` beside `text_config` goes before the one in it, as in transformers.
    """
    text = config.get("text_config")
    if not isinstance(text, Mapping) or text.get("model_type") not in (None, TEXT_TYPE):
        said = text.get("model_type") if isinstance(text, Mapping) else text
        raise FamilyError(f"config.json: text_config is {said!r}, expected an object of model_type {TEXT_TYPE!r}")
    if why := unread(text):
        raise FamilyError(f"config.json: text_config: {why}")
    tied = config.get("tie_word_embeddings")
    return text if tied is None else {**text, "tie_word_embeddings": tied}


def parse(text: Mapping[str, Any]) -> qwen3_5_text.Config:
    """Read the fields of the text model. Raises FamilyError naming the field."""
    return replace(qwen3_5_text.Config.parse(text), prefix="model.language_model.")
