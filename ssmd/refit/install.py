"""The common part of building and refitting an artifact: its copied texts, its manifest, and its placement."""

from __future__ import annotations

import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ssmd.families.fields import FamilyError
from ssmd.families.registry import Family
from ssmd.families.weights import Binding
from ssmd.machine.progress import Progress
from ssmd.model.artifact import SpecialTokens
from ssmd.model.plan import Attention, Plan
from ssmd.model.source import Source, SourceError
from ssmd.runtime.info import Part, Target, infos
from ssmd.text.tokenizer import Tokenizer, TokenizerError

ABANDONED_S = 24 * 3600  # no build takes as long
_SHOWN = 12  # names, in a line
# Tensors in checkpoints that no model reads: tables in older ones, and the head of a model that does not use one.
_IDLE = (".rotary_emb.inv_freq", "lm_head.weight")


def fields_of(
    family: Family,
    config: Any,
    *,
    name: str,
    lineage: str,
    runtime: str,
    device_class: str,
    quantization: str,
    recipe: Mapping[str, Any],
    conversion: Mapping[str, Any],
    buckets: Sequence[int],
    tiers: Sequence[int],
    builders: Mapping[str, str],
    special_tokens: Mapping[str, str],
    stop_tokens: Sequence[int],
) -> dict[str, Any]:
    """Return a manifest for `seal`. config: the family's own. tiers: ascend, and the last is the context."""
    spec = family.plan(config).spec("float32" if quantization == "f32" else "float16")
    return {
        "name": name,
        "family": family.name,
        "lineage": lineage,
        "runtime": runtime,
        "device_class": device_class,
        "quantization": quantization,
        "quantization_recipe": dict(recipe),
        **({"conversion": dict(conversion)} if conversion else {}),
        "buckets": tuple(buckets),
        "context": tiers[-1] if spec.rows else None,
        "tiers": tuple(tiers) if spec.rows else (),
        "vocabulary": config.vocabulary,
        "special_tokens": SpecialTokens(**special_tokens).model_dump(),
        "stop_tokens": list(stop_tokens),
        "state": spec.to_json(),
        "builders": dict(builders),
    }


def config_of(family: Family, source: Source, progress: Progress) -> Any:
    """Read a source's config.json as the family's own. The head is untied if the weights have one of their own.

    progress: gets a line if so, and lines that name fields and tensors without effect. Raises FamilyError, or
    SourceError if the embedding and the head cannot be read.
    """
    config = family.parse(source.config)
    if unread := family.unread(source.config):
        progress(f"config.json has fields that change nothing here, nor in transformers: {_listed(unread)}")
    if has_own_head(family, config, source):
        progress(
            "config.json says tie_word_embeddings, but lm_head.weight is there and is not the embedding: it is used, "
            "as transformers 5 does"
        )
        config = replace(config, tied=False)
    unused = unused_tensors(source, family.bindings(config))
    for prefix, what in family.left_out.items():
        if count := sum(name.startswith(prefix) for name in unused):
            progress(f"left out: {what}, {count} tensor{'s' * (count > 1)} named {prefix}*")
    if unused := [name for name in unused if not name.startswith(tuple(family.left_out))]:
        progress(f"the model has no use for these tensors, nor has transformers: {_listed(unused)}")
    return config


def check_parts(family: Family, config: Any, target: Target) -> None:
    """Raise FamilyError if a model has parts that a target does not serve, with the targets that do.

    config: the family's own.
    """
    plan = family.plan(config)
    for part, layers in _parts(plan).items():
        if part not in target.serves:
            raise FamilyError(
                f"the model has {part}, in {layers} of {len(plan.layers)} layers, and runtime {target.name} does not "
                f"serve them; take --runtime {' or '.join(serving(plan))}"
            )


def serving(plan: Plan) -> list[str]:
    """Return the values of `--runtime` that serve all parts of a model, those of the fastest runtime first."""
    parts = _parts(plan)
    return [target.name for info in infos() for target in info.targets if parts.keys() <= set(target.serves)]


def _parts(plan: Plan) -> dict[Part, int]:
    """Count the layers with each part that some targets do not serve; leave out a part that no layer has."""
    windows = sum(any(isinstance(m, Attention) and m.window is not None for m in x.mixers) for x in plan.layers)
    counts: dict[Part, int] = {"experts": len(plan.experts), "attention windows": windows}
    return {part: layers for part, layers in counts.items() if layers}


def unused_tensors(source: Source, bindings: Mapping[str, Binding]) -> list[str]:
    """Return the names of a source's tensors that no parameter uses, except those of _IDLE."""
    reads = {name for binding in bindings.values() for name in binding.reads}
    return sorted(name for name in source.tensors if name not in reads and not name.endswith(_IDLE))


def _listed(names: Sequence[str]) -> str:
    """Return the first names of a list for a line, with unusual ones escaped, as they are untrusted."""
    shown = [name if re.fullmatch(r"[\w.-]{1,100}", name, re.ASCII) else ascii(name)[:40] for name in names[:_SHOWN]]
    return ", ".join(shown) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def has_own_head(family: Family, config: Any, source: Source) -> bool:
    """Return True if a config ties the head to the embedding, but the source has another head. Raises SourceError."""
    if not getattr(config, "tied", False):
        return False
    bound = family.bindings(replace(config, tied=False))
    (embedding, shape), (head, _) = (next(iter(bound[name].reads.items())) for name in ("embedding", "head"))
    if head not in source.tensors:
        return False
    step = max(1, (1 << 20) // shape[1])
    for at in range(0, shape[0], step):
        if not np.array_equal(
            source.tensor(embedding, shape, at, at + step), source.tensor(head, shape, at, at + step)
        ):
            return True
    return False


def checked_tokenizer(source: Source, vocabulary: int) -> Tokenizer:
    """Return the source's tokenizer. Raises SourceError if it cannot be read or has ids beyond the vocabulary."""
    try:
        tokenizer = Tokenizer.open(source.path / "tokenizer.json")
    except TokenizerError as err:
        raise SourceError(str(err)) from err
    if tokenizer.vocabulary > vocabulary:
        raise SourceError(
            f"tokenizer.json in {source.path} has ids up to {tokenizer.vocabulary - 1} and config.json says "
            f"vocab_size = {vocabulary}: the model knows no such tokens; take the tokenizer that it was trained with"
        )
    outside = [t for t in source.stop_tokens if t >= vocabulary]
    if outside:
        raise SourceError(f"{source.path}: stop tokens {outside} are outside the vocabulary of {vocabulary}")
    return tokenizer


def save_texts(source: Source, folder: Path) -> None:
    """Copy the texts that an artifact takes unchanged from its source: tokenizer.json and the chat template."""
    (folder / "tokenizer.json").write_bytes(source.tokenizer_json)
    if source.chat_template is not None:
        (folder / "chat_template.jinja").write_bytes(source.chat_template.encode())


@contextmanager
def placed(out: Path) -> Iterator[Path]:
    """Yield an empty folder that replaces `out` when the body ends. After an error it is removed."""
    out.parent.mkdir(parents=True, exist_ok=True)
    for left in out.parent.glob(f".{out.name}-*"):  # by one that was killed
        if left.is_dir() and not left.is_symlink() and time.time() - left.stat().st_mtime > ABANDONED_S:
            shutil.rmtree(left, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    made = folder / "artifact"
    made.mkdir()
    try:
        yield made
        for file in (path for path in made.rglob("*") if path.is_file()):
            file.chmod(0o644)  # safetensors makes its files private, a quantizer executable
        if out.exists():
            out.rename(folder / "replaced")  # goes with the temporary folder
        made.rename(out)
    finally:  # also on Ctrl-C
        shutil.rmtree(folder, ignore_errors=True)
