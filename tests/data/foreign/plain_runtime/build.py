"""The converter of `ssmd build --runtime plain`: writes a family's plan and its parameters as they are."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from plain_runtime.model import Model
from plain_runtime.runtime import PLAN, WEIGHTS, PlainRuntime
from ssmd.build.builder import BuildError, Quantization, targeted
from ssmd.families.registry import family_of
from ssmd.machine.progress import Progress, staged
from ssmd.model.artifact import GOLDEN, Artifact, seal
from ssmd.model.source import Source
from ssmd.refit.install import checked_tokenizer, fields_of, placed, save_texts
from ssmd.runtime.verify import GOLDEN_POSITIONS, golden_tokens, replay, save_golden


class PlainPacker:
    """A Packer (ssmd/build/builder.py)."""

    runtime, device_class = PlainRuntime.name, "cpu"
    quantizations: tuple[Quantization, ...] = ("f32",)
    buckets: tuple[int, ...] | None = None
    most_tokens: int | None = None
    context = 2048
    tiers: tuple[int, ...] = ()

    def build(
        self,
        source: Source,
        out: Path,
        *,
        name: str,
        quantization: Quantization | None = None,
        buckets: Sequence[int] | None = None,
        tiers: Sequence[int] | None = None,
        replace: bool = False,
        progress: Progress = lambda line: None,
    ) -> Artifact:
        if out.exists() and not replace:
            raise BuildError(f"{out} exists already; remove it, replace it or choose another name")
        family = family_of(source.config)
        config = family.parse(source.config)
        asked = targeted(self, family, config, quantization, buckets, tiers)
        plan, tokenizer = family.plan(config), checked_tokenizer(source, config.vocabulary)
        with placed(out) as made:
            with staged(progress, "write the weights"):
                weights = {n: np.array(bound(source), np.float32) for n, bound in family.bindings(config).items()}
                try:
                    Model(plan, weights, asked.context)
                except ValueError as err:
                    raise BuildError(str(err)) from err
                (made / PLAN).write_text(plan.model_dump_json(indent=1))
                save_file(weights, made / WEIGHTS)
            save_texts(source, made)
            (made / GOLDEN).write_bytes(b"")
            fields = fields_of(
                family,
                config,
                name=name,
                lineage=source.lineage,
                runtime=self.runtime,
                device_class=self.device_class,
                quantization=asked.quantization,
                recipe={},
                conversion={},
                buckets=asked.buckets,
                tiers=asked.tiers[-1:],
                builders={"plain-runtime": version("plain-runtime")},
                special_tokens=source.special_tokens,
                stop_tokens=source.stop_tokens,
            )
            fields["golden"] = "itself"
            program = PlainRuntime().load(seal(made, fields))
            tokens = golden_tokens(tokenizer)
            save_golden(made / GOLDEN, tokens, np.stack([row for _, row in replay(program, tokens, GOLDEN_POSITIONS)]))
            program.close()
            seal(made, fields)
        return Artifact.open(out)


CONVERTER = PlainPacker()
