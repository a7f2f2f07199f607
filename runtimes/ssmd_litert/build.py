"""Builds LiteRT artifacts: source checkpoint -> re-authored module -> .tflite -> quantized -> sealed folder."""

from __future__ import annotations

import gc
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ssmd import quality
from ssmd.artifact import Artifact, SpecialTokens, seal
from ssmd.families.registry import Family, family_of
from ssmd.families.rotation import BLOCK, rotated
from ssmd.families.weights import Binding
from ssmd.flat.signatures import signature_name
from ssmd.memory import most_resident, return_big_blocks, trim
from ssmd.source import Source
from ssmd.text.tokenizer import Tokenizer, TokenizerError
from ssmd_litert import recipe
from ssmd_litert.recipe import Quantization
from ssmd_litert.runtime import LiteRTRuntime

Progress = Callable[[str], None]
if TYPE_CHECKING:
    from ssmd.authoring.reference import Reference  # which loads PyTorch

MODEL = "model.tflite"
LOG_TAIL_BYTES = 2000  # of the converters' own words, shown when they fail


class BuildError(ValueError):
    """An artifact cannot be built as asked; the message says what to change."""


def build(
    source: Source,
    out: Path,
    *,
    name: str,
    quantization: Quantization = "int8",
    buckets: Sequence[int] | None = None,
    tiers: Sequence[int] = (2048,),
    replace: bool = False,
    progress: Progress = lambda line: None,
) -> Artifact:
    """Build the artifact folder `out`; it appears whole or not at all. One that exists is refused unless `replace`.

    `buckets` are prefill lengths (None: those of the family), `tiers` capacities of the KV caches, both in tokens: the
    largest is the context, the smaller ones make short conversations fast, as a step attends over all of its cache.
    `progress` gets lines of text.
    Raises BuildError, SourceError or FamilyError before anything is converted if something does not fit.
    """
    if out.exists() and not replace:
        raise BuildError(f"{out} exists already; remove it, replace it or choose another name")
    missing = [p for p in ("torch", "litert_torch", "ai_edge_quantizer") if find_spec(p) is None]
    if missing:
        raise BuildError(f"building needs {', '.join(missing)}: pip install 'ssmd-daemon[build]'")
    return_big_blocks()  # else what one stage frees stands beside what the next one needs
    family = family_of(source.config)
    config = family.parse(source.config)
    buckets = family.buckets if buckets is None else buckets
    tokenizer = _check(source, config, buckets, tiers)
    out.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    made = folder / "artifact"
    made.mkdir()
    try:
        with _stage(progress, "hash the source"):
            lineage = source.lineage
        reference = _write(source, tokenizer, family, config, made, quantization, buckets, tiers, progress)
        spec = family.state_spec(config, "float32" if quantization == "f32" else "float16")
        turned = {"rotation": BLOCK} if recipe.rotates(quantization) else {}
        fields = {
            "name": name,
            "family": family.name,
            "lineage": lineage,
            "runtime": "litert",
            "device_class": "cpu",
            "quantization": quantization,
            "quantization_recipe": {**turned, "ops": recipe.ops(quantization)} if quantization != "f32" else {},
            "buckets": sorted(buckets),
            "context": max(tiers) if spec.rows else None,
            "tiers": sorted(tiers) if spec.rows else [],
            "vocabulary": config.vocabulary,
            "special_tokens": SpecialTokens(**source.special_tokens).model_dump(),
            "stop_tokens": list(source.stop_tokens),
            "state": spec.to_json(),
            "builders": {p: version(p) for p in ("ssmd-daemon", "torch", "litert-torch", "ai-edge-quantizer")},
        }
        with _stage(progress, "compare with the f32 module"):
            artifact = seal(made, fields)
            program = LiteRTRuntime().load(artifact)
            try:
                measured = quality.measure(artifact, program, reference.text, reference.text_logits)
            finally:
                program.close()
            seal(made, fields | {"quality": measured})
        for file in made.iterdir():
            file.chmod(0o644)  # safetensors makes its files private, the quantizer executable
        if out.exists():
            out.rename(folder / "replaced")  # goes with the temporary folder
        made.rename(out)
    finally:  # also on Ctrl-C
        shutil.rmtree(folder, ignore_errors=True)
    return Artifact.open(out)


def _check(source: Source, config: Any, buckets: Sequence[int], tiers: Sequence[int]) -> Tokenizer:
    """All that can be refused before minutes of work. Returns the source's tokenizer."""
    if not buckets or len(set(buckets)) != len(buckets) or min(buckets) < 2:
        raise BuildError(f"buckets {list(buckets)} must be different lengths of at least 2 tokens")
    if any(b > 64 and b % 64 for b in buckets):
        raise BuildError(f"buckets {list(buckets)}: those above 64 must be multiples of 64")
    if not tiers or len(set(tiers)) != len(tiers):
        raise BuildError(f"capacities {list(tiers)} must be different numbers of tokens")
    if min(tiers) < max(buckets):
        raise BuildError(f"a context of {min(tiers)} tokens does not hold the largest bucket, {max(buckets)}")
    context = max(tiers)
    if context > config.max_position:
        raise BuildError(
            f"a context of {context} tokens is more than the model was made for: config.json says "
            f"max_position_embeddings = {config.max_position}"
        )
    try:
        tokenizer = Tokenizer.open(source.path / "tokenizer.json")
    except TokenizerError as err:
        raise BuildError(str(err)) from err
    if tokenizer.vocabulary > config.vocabulary:
        raise BuildError(
            f"tokenizer.json in {source.path} has ids up to {tokenizer.vocabulary - 1} and config.json says "
            f"vocab_size = {config.vocabulary}: the model knows no such tokens; take the tokenizer that it was trained "
            "with"
        )
    outside = [t for t in source.stop_tokens if t >= config.vocabulary]
    if outside:
        raise BuildError(f"stop tokens {outside} are outside the vocabulary of {config.vocabulary}")
    return tokenizer


def _write(
    source: Source,
    tokenizer: Tokenizer,
    family: Family,
    config: Any,
    folder: Path,
    quantization: Quantization,
    buckets: Sequence[int],
    tiers: Sequence[int],
    progress: Progress,
) -> Reference:
    """Write all but the manifest. Returns what the f32 module computes."""
    with _stage(progress, "load PyTorch and the converter"):
        import litert_torch  # noqa: F401 - here, so that its seconds count as its own

        from ssmd.authoring.reference import Reference
        from ssmd.authoring.registry import author

    (folder / "tokenizer.json").write_bytes(source.tokenizer_json)
    if source.chat_template is not None:
        (folder / "chat_template.jinja").write_text(source.chat_template)
    bindings = family.bindings(config)

    def module_of(bindings: Mapping[str, Binding]) -> Any:
        return author(family.name, config, {name: binding(source) for name, binding in bindings.items()}, max(tiers))

    with _stage(progress, "bind the weights"):
        module = module_of(bindings)
    with _stage(progress, "compute golden values"):
        reference = Reference.of(module, tokenizer)
        reference.save(folder / "golden.safetensors")
    if recipe.rotates(quantization):
        with _stage(progress, "rotate the weights"):
            del module
            module = module_of(rotated(bindings))
            reference.check(module)
    shapes = {name: tuple(value.shape) for name, value in module.named_parameters()}
    unfit = recipe.unfit(shapes, quantization)
    if unfit is not None:
        raise BuildError(
            f"{unfit} has rows of {shapes[unfit][1]} values, {quantization} takes multiples of {recipe.INT4_BLOCK}; "
            "build with --quant int8"
        )
    exported = folder / (MODEL + ".f32")
    capacities = sorted(tiers) if module.spec.rows else [0]
    count = f", each for {len(capacities)} capacities" if len(capacities) > 1 else ""
    with _stage(progress, f"export decode and {len(buckets)} prefill lengths{count}"):
        _export(module, sorted(buckets), capacities, exported)
        del module
    if quantization != "f32":
        with _stage(progress, "quantize"):
            recipe.quantize(exported, folder / MODEL, quantization)
            exported.unlink()
    else:
        exported.rename(folder / MODEL)
    _weights_stand_once(folder / MODEL, shapes, quantization, len(capacities) * (1 + len(buckets)), buckets)
    return reference


def _export(module: Any, buckets: Sequence[int], capacities: Sequence[int], file: Path) -> None:
    import litert_torch
    import torch

    from ssmd.authoring.host import graph_shapes
    from ssmd_litert.hollow import Hollow

    converter: Any = litert_torch
    for capacity in capacities:
        for length in (1, *buckets):
            inputs = {
                "tokens": torch.zeros(1, length, dtype=torch.int32),
                "pos": torch.zeros(1, dtype=torch.int32),
                "n_valid": torch.ones(1, dtype=torch.int32),
                **{n: torch.zeros(s) for n, s in graph_shapes(module.spec, capacity).items()},
            }
            signature = signature_name(length, capacity, capacities[0])
            converter = converter.signature(signature, module, sample_kwargs=inputs)
    weights = file.with_suffix(".weights")
    hollow = Hollow(module)
    trim()
    # A lightweight conversion shares one copy of the weights among the signatures.
    converted = converter.convert(lightweight_conversion=True)
    hollow.empty(weights)
    del converter
    gc.collect()
    trim()
    converted.export(str(file))
    hollow.fill(file, weights)
    weights.unlink()


def _weights_stand_once(
    file: Path, shapes: Mapping[str, tuple[int, ...]], quantization: Quantization, graphs: int, buckets: Sequence[int]
) -> None:
    """Raises BuildError if the file is larger than one copy of the weights and the graphs around it can be."""
    weights = recipe.nbytes(shapes, quantization)
    # Graphs: operators and tensors of every layer, quantization scales by signature; masks of 4 heads for each bucket.
    rows = sum(shape[0] for shape in shapes.values())
    around = graphs * (len(shapes) * 6000 + 12 * rows) + sum(4 * 4 * b * b for b in buckets) + (2 << 20)
    size = file.stat().st_size
    if size > weights + around:
        raise BuildError(
            f"{file.name} has {size} bytes, one copy of the weights has {weights}: the converter has stored some of "
            "them more than once"
        )


@contextmanager
def _stage(progress: Progress, what: str) -> Iterator[None]:
    """Announces a stage, and when it is done its seconds and the most memory that the process has held so far."""
    progress(f"{what} …")
    begin = time.monotonic()
    with _hushed():
        yield
    trim()
    peak = most_resident()
    memory = "" if peak is None else f", peak memory {peak / 2**30:.1f} GiB"
    progress(f"    {time.monotonic() - begin:.1f} s{memory}")


@contextmanager
def _hushed() -> Iterator[None]:
    """Keeps back what is written to stdout and stderr, from C++ too; on an error its end goes to stderr after all.

    The converters write hundreds of lines about themselves, none of which tells a user what to do.
    """
    with tempfile.TemporaryFile() as log:
        sys.stdout.flush()
        sys.stderr.flush()
        kept = [os.dup(fd) for fd in (1, 2)]
        for fd in (1, 2):
            os.dup2(log.fileno(), fd)
        failed = False
        try:
            yield
        except Exception:
            failed = True
            raise
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for fd, original in zip((1, 2), kept, strict=True):
                os.dup2(original, fd)
                os.close(original)
            if failed:
                log.seek(max(0, log.tell() - LOG_TAIL_BYTES))
                sys.stderr.write(log.read().decode(errors="replace"))
