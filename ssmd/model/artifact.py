"""An artifact: a folder that one runtime can load. Format 3 is described in docs/artifact-format.md."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from ssmd.model.state import StateError, StateSpec

FORMAT = 3
READABLE = (1, 2, 3)  # 1: the context is the only tier; 1 and 2: golden values count in the build
MANIFEST = "artifact.json"
NAME_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}"
MAX_MANIFEST_BYTES = 8 << 20
MAX_FILES = 1000
GOLDEN = "golden.safetensors"
REQUIRED = ("tokenizer.json", GOLDEN)
MEASURED = ("quality", "golden")  # of a manifest: what was found out about an artifact, not what it is

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
PositiveInt = Annotated[int, Field(gt=0, strict=True)]
TokenId = Annotated[int, Field(ge=0, strict=True)]


class ArtifactError(ValueError):
    """An artifact is missing, damaged, or not of this format; the message says which file and what to do."""


class FileEntry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    sha256: Sha256
    size: Annotated[int, Field(ge=0, strict=True)]


class SpecialTokens(BaseModel):
    """Texts of the special tokens that a chat template may use; None for those that the source does not define."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    bos: str | None = None
    eos: str | None = None
    pad: str | None = None
    unk: str | None = None


class Manifest(BaseModel):
    """The contents of artifact.json. `build` hashes all of it but MEASURED, and every file but the golden values.

    quality: measured losses by quantization (ssmd/build/quality.py), unknown for some builds.
    golden: the source of the golden values: the re-authored module in float32, or the artifact itself when it was new.
    "none" if it was made on a system on which its runtime cannot execute.
    conversion: changes to the graph by a runtime's build, if it reports them.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    format: int
    name: Annotated[str, Field(pattern=f"^{NAME_PATTERN}$")]
    family: Annotated[str, Field(pattern=r"^[a-z0-9_]{1,64}$")]
    lineage: Sha256
    build: Sha256
    runtime: Annotated[str, Field(pattern=r"^[a-z0-9_]{1,32}$")]
    device_class: Annotated[str, Field(pattern=r"^[a-z0-9_]{1,32}$")]
    quantization: Annotated[str, Field(pattern=r"^[a-z0-9_.-]{1,32}$")]
    quantization_recipe: dict[str, Any]
    buckets: Annotated[tuple[PositiveInt, ...], Field(min_length=1, max_length=32)]
    context: PositiveInt | None
    tiers: Annotated[tuple[PositiveInt, ...], Field(max_length=64)] = ()
    vocabulary: PositiveInt
    special_tokens: SpecialTokens
    stop_tokens: tuple[TokenId, ...]
    state: list[dict[str, Any]]
    files: Annotated[dict[str, FileEntry], Field(max_length=MAX_FILES)]
    builders: dict[str, str]
    quality: dict[str, dict[str, float]] = {}
    golden: Literal["reference", "itself", "none"] = "reference"
    conversion: dict[str, Any] = {}

    @field_validator("files")
    @classmethod
    def _names_stay_inside(cls, files: dict[str, FileEntry]) -> dict[str, FileEntry]:
        for name in files:
            parts = PurePosixPath(name).parts
            if not parts or not all(re.fullmatch(NAME_PATTERN, p) for p in parts) or "/".join(parts) != name:
                raise ValueError(f"file name {name!r} is not allowed")
            if name == MANIFEST:
                raise ValueError(f"{MANIFEST} cannot list itself")
        missing = [r for r in REQUIRED if r not in files]
        if missing:
            raise ValueError(f"required files are not listed: {missing}")
        return files

    @model_validator(mode="after")
    def _makes_sense(self) -> Manifest:
        if list(self.buckets) != sorted(set(self.buckets)):
            raise ValueError(f"buckets {self.buckets} are not ascending and unique")
        if any(t >= self.vocabulary for t in self.stop_tokens):
            raise ValueError(f"stop tokens {self.stop_tokens} are outside the vocabulary of {self.vocabulary}")
        try:
            spec = StateSpec.from_json(self.state)
        except StateError as err:
            raise ValueError(str(err)) from err
        if spec.rows and self.context is None:
            raise ValueError("a model with attention needs a context")
        if self.tiers and (list(self.tiers) != sorted(set(self.tiers)) or self.tiers[-1] != self.context):
            raise ValueError(f"tiers {self.tiers} are not ascending up to the context of {self.context}")
        return self

    @property
    def spec(self) -> StateSpec:
        return StateSpec.from_json(self.state)


def build_hash(fields: dict[str, Any]) -> str:
    """Return the build: sha256 of the manifest's canonical JSON without `build` and MEASURED.

    Measured values may differ in the last digits on another processor.
    """
    whole = {k: v for k, v in fields.items() if k not in ("build", *MEASURED)}
    if isinstance(whole.get("format"), int) and whole["format"] >= 3:
        whole["files"] = {k: v for k, v in whole["files"].items() if k != GOLDEN}
    return hashlib.sha256(json.dumps(whole, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def file_entry(path: Path) -> FileEntry:
    with path.open("rb") as f:
        digest = hashlib.file_digest(f, "sha256").hexdigest()
        return FileEntry(sha256=digest, size=f.tell())


@dataclass(frozen=True)
class Artifact:
    """An artifact whose every file was checked."""

    path: Path
    manifest: Manifest

    def file(self, name: str) -> Path:
        """Return the path of a listed file. Raises ArtifactError if the manifest does not list it."""
        if name not in self.manifest.files:
            raise ArtifactError(f"artifact {self.path} has no file {name!r}")
        return self.path / name

    def has(self, name: str) -> bool:
        return name in self.manifest.files

    @staticmethod
    def open(path: Path) -> Artifact:
        """Read the manifest and check size and sha256 of every file. Raises ArtifactError."""
        manifest = read_manifest(path)
        for name, entry in manifest.files.items():
            file = path / name
            if file.is_symlink() or not file.is_file():
                raise ArtifactError(f"artifact {path}: file {name!r} is missing or not a plain file; build it again")
            if file.stat().st_size != entry.size:
                raise ArtifactError(
                    f"artifact {path}: file {name!r} has {file.stat().st_size} bytes, {entry.size} were written; "
                    "it is cut off or was altered; build it again"
                )
            if file_entry(file) != entry:
                raise ArtifactError(f"artifact {path}: file {name!r} was altered (sha256 differs); build it again")
        return Artifact(path, manifest)


def read_manifest(path: Path) -> Manifest:
    """Read and check only the manifest, not the files that it lists. Raises ArtifactError."""
    file = path / MANIFEST
    if not file.is_file():
        raise ArtifactError(f"{path} is no artifact: it has no {MANIFEST}")
    if file.stat().st_size > MAX_MANIFEST_BYTES:
        raise ArtifactError(f"{file} is larger than {MAX_MANIFEST_BYTES} bytes")
    try:
        fields = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as err:
        raise ArtifactError(f"{file} is not JSON ({err}); build the artifact again") from err
    if not isinstance(fields, dict):
        raise ArtifactError(f"{file} is not a JSON object")
    if fields.get("format") not in READABLE:
        raise ArtifactError(
            f"artifact {path} has format {fields.get('format')!r}, this ssmd reads up to format {FORMAT}: "
            "build it again with this version"
        )
    try:
        manifest = Manifest.model_validate(fields)
    except ValidationError as err:
        first = err.errors()[0]
        where = ".".join(str(p) for p in first["loc"])
        raise ArtifactError(f"{file}: {where or 'manifest'}: {first['msg']}") from err
    if build_hash(fields) != manifest.build:
        raise ArtifactError(f"{file} was altered: its contents do not hash to its build; build the artifact again")
    return manifest


def seal(path: Path, fields: dict[str, Any], known: Mapping[str, FileEntry] | None = None) -> Artifact:
    """Write artifact.json for the files in `path`. Raises ArtifactError if the result would not open.

    fields: all but format, build and files. known: entries of files that have not changed since the entries were made.
    """
    known = known or {}
    files = {
        name: (known.get(name) or file_entry(p)).model_dump()
        for p in sorted(path.rglob("*"))
        if p.is_file() and (name := p.relative_to(path).as_posix()) != MANIFEST
    }
    whole = json.loads(json.dumps({**fields, "format": FORMAT, "files": files}))
    whole["build"] = build_hash(whole)
    (path / MANIFEST).write_text(json.dumps(whole, indent=1) + "\n", newline="\n")
    return Artifact(path, read_manifest(path))
