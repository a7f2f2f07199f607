"""Stripped graphs of artifacts that were built: what is left of them without their source's weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ssmd.build.stripping import strip
from ssmd.model.artifact import Artifact
from ssmd.model.source import Source
from ssmd.refit.catalog import seeded_ids, seeded_tokens
from ssmd.refit.graphfile import Golden, Header, StrippedGraph
from ssmd.refit.refit import bindings_of
from ssmd_coreml.build import CONVERTER as COREML
from ssmd_litert.build import CONVERTER as LITERT
from ssmd_openvino.build import CONVERTER as OPENVINO

CONVERTERS: Mapping[str, Any] = {"litert": LITERT, "openvino": OPENVINO, "coreml": COREML}


def stripped(artifact: Artifact, source: Source, name: str = "tiny") -> StrippedGraph:
    """Without golden values that would mean anything."""
    m = artifact.manifest
    tiers = m.tiers or (512,)
    bindings = bindings_of(source.config, m.quantization_recipe, tiers[-1])
    converter = CONVERTERS[m.runtime]
    files, literals = strip(artifact.path, converter.constants(artifact.path), bindings, source, converter.encodings)
    row = (0.0,) * len(seeded_ids(m.vocabulary))
    header = Header(
        **{k: getattr(m, k) for k in ("runtime", "device_class", "quantization", "conversion", "buckets", "builders")},
        name=name,
        origin=f"acme/{name}",
        provenance="",
        family=m.family,
        config=dict(source.config),
        recipe=m.quantization_recipe,
        tiers=tiers,
        golden=Golden(seed=1, tokens=tuple(seeded_tokens(m.vocabulary)), positions=(0,), logits=(row,), rms=(0.0,)),
        files=files,
    )
    return StrippedGraph(header, literals)
