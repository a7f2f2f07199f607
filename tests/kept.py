"""Tiny artifacts as the repository keeps them (tests/data/artifacts): what a build made, less what its source gives.

An artifact's folder is a tar, compressed after what its source makes: every parameter in every encoding. So a weight
costs the few bytes of a reference, and a folder of 2 MB takes 20 to 70 kB. Restoring it takes a hundredth of a second,
to the last bit, without PyTorch or a converter. keys.json has a digest for each: of the code, the packages and the
request. With another digest, or from another source, nothing is restored, and it is built.

A processor may round a parameter otherwise than another one. Then the artifact, which is compressed after its
parameters, is kept once for each kind of processor: NAME.tar.zst and NAME.2.tar.zst.

As a program it keeps what today's code makes: scripts/keep.
"""

from __future__ import annotations

import ast
import hashlib
import io
import json
import tarfile
import tokenize
from collections.abc import Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import tiny
import zstandard
from modules import reached_from

from ssmd.model.source import Source
from ssmd.refit.encodings import ENCODINGS
from ssmd.refit.refit import bindings_of

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "tests" / "data" / "artifacts"
KEYS = FOLDER / "keys.json"
SUFFIX = ".tar.zst"
CONTEXT = 512  # of the tables among the parameters: the largest of tests/conftest.py
_DIGEST = 32  # bytes
_BYTES = 256 << 20  # at most, of an artifact
# What an artifact's bytes depend on, beside its family: of ssmd/families what is no family's own, of a runtime's folder
# the files of that name which there are.
FAMILIES = "ssmd/families"
CODE = (
    *("ssmd/authoring/*.py", "ssmd/build/*.py", "ssmd/refit/install.py", "ssmd/refit/encodings.py"),
    *(f"ssmd/model/{name}.py" for name in ("artifact", "formats", "plan", "rope", "source", "state")),
)
RUNTIME_CODE = (
    *("build", "capacity", "delegated", "inplace", "modelfile", "summed", "late_weights", "constants", "recipe"),
    *("convert", "lint", "xamba", "piecewise", "stacks", "pack", "plan", "reference", "package"),
)
# What a build reaches besides, and no key sees, for it changes often and seldom what is built: what runs an artifact,
# and the names of its parts. test_reproducibility.py builds one of each runtime, and finds what it did change.
UNSEEN = (
    *("ssmd.machine.*", "ssmd.runtime.*", "ssmd.text.*", "ssmd.refit.*", "ssmd.model.random_source"),
    *("ssmd.families.registry", "ssmd.families.unbuilt", "ssmd_*.runtime", "ssmd_*.library", "ssmd_*.graph"),
    *(
        "ssmd_litert.calls",
        "ssmd_litert.excerpt",
        "ssmd_litert.greeting",
        "ssmd_litert.interface",
        "ssmd_litert.lanes",
        "ssmd_litert.managed",
        "ssmd_litert.profiler",
    ),
    *("ssmd_litert.weight_cache", "ssmd_openvino.compile", "ssmd_openvino.devices"),
    *("ssmd_coreml.backend", "ssmd_coreml.program"),
)
PACKAGES = ("ssmd-daemon", "torch", "transformers", "tokenizers")
RUNTIME_PACKAGES = {
    "litert": ("litert-torch", "ai-edge-quantizer"),
    "openvino": ("openvino", "nncf"),
    "coreml": ("coremltools",),
    "wgpu": (),
}


def key(runtime: str, family: str, request: tuple[object, ...]) -> str:
    """A digest of what an artifact is made of: code without comments and docstrings, packages, what is asked for.

    `runtime` as in `ssmd build`. Another family changes no key, nor does what is UNSEEN.
    """
    package = {"npu": "openvino"}.get(runtime, runtime)
    return hashlib.sha256(repr((request, _made_by(package, family))).encode()).hexdigest()[:16]


@cache
def _made_by(package: str, family: str) -> str:
    digest = hashlib.sha256(repr([(p, _version(p)) for p in PACKAGES + RUNTIME_PACKAGES.get(package, ())]).encode())
    for file in sorted(files(package, family)):
        digest.update(f"\n{file.relative_to(ROOT)}\n{code_of(file.read_text('utf-8'))}".encode())
    return digest.hexdigest()


def made_of_sources() -> tuple[object, ...]:
    """Return the code and the package versions that the sources depend on."""
    return code_of(Path(tiny.__file__).read_text("utf-8")), [(p, _version(p)) for p in PACKAGES[1:]]


def files(package: str, family: str) -> set[Path]:
    """The code that a key sees."""
    patterns = (*CODE, *(f"runtimes/ssmd_{package}/{name}.py" for name in RUNTIME_CODE))
    return {f for pattern in patterns for f in ROOT.glob(pattern)} | _of_family(family)


def _of_family(family: str) -> set[Path]:
    """Its own file, those of other families that it imports, and what all share; not the lists of all families."""
    own = {name for name, _ in tiny.VARIANTS.values()}
    reached = reached_from([f"ssmd.families.{family}"])
    every = (ROOT / FAMILIES).glob("*.py")
    lists = ("registry", "unbuilt")
    return {f for f in every if f.stem not in lists and (f.stem not in own or f"ssmd.families.{f.stem}" in reached)}


@cache
def code_of(text: str) -> str:
    """Return a module's lines without comments, docstrings and blank lines."""
    skipped: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node, clean=False):
            skipped.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    lines = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column].rstrip()
    return "\n".join(line for n, line in enumerate(lines, 1) if n not in skipped and line.strip())


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def keys() -> dict[str, str]:
    """Return the key of each kept artifact, by name."""
    found: dict[str, str] = json.loads(KEYS.read_text()) if KEYS.exists() else {}
    return found


def restore(name: str, wanted: str, source: Path, out: Path) -> bool:
    """Write the folder `out` of artifact `name` if what is kept has that key and is of these weights; else False."""
    if keys().get(name) != wanted:
        return False
    return any(unpack(file.read_bytes(), source, out) for file in files_of(name) if file.exists())


def files_of(name: str) -> tuple[Path, Path]:
    """Return where `name` is kept, and where it is for another kind of processor; either may be missing."""
    return FOLDER / f"{name}{SUFFIX}", FOLDER / f"{name}.2{SUFFIX}"


def restorable(name: str, source: Path) -> bool:
    """Return True if a kept file of `name` can be restored on this processor, after this source."""
    return any(_content(file.read_bytes(), source) is not None for file in files_of(name) if file.exists())


def pack(artifact: Path, source: Path) -> bytes:
    """An artifact's folder, compressed after its source: the same bytes for the same folder."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for file in sorted(p for p in artifact.rglob("*") if p.is_file()):
            entry = tarfile.TarInfo(str(file.relative_to(artifact)))
            entry.size = file.stat().st_size
            with file.open("rb") as content:
                tar.addfile(entry, content)
    parameters = zstandard.ZstdCompressionParameters.from_level(
        19, window_log=25, enable_ldm=True, ldm_min_match=32, write_checksum=True
    )
    return zstandard.ZstdCompressor(compression_params=parameters, dict_data=_before(source)).compress(
        _digest(source) + buffer.getvalue()
    )


def unpack(packed: bytes, source: Path, out: Path) -> bool:
    """Write the folder `out` anew. False, and nothing written, if `packed` is not of these weights or is damaged."""
    content = _content(packed, source)
    if content is None:
        return False
    part = out.with_name(f"{out.name}.part")
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        tar.extractall(part, filter="data")
    part.rename(out)
    return True


def _content(packed: bytes, source: Path) -> bytes | None:
    """Decompress a kept tar; None if it is not of these weights, or is damaged."""
    try:
        content = zstandard.ZstdDecompressor(dict_data=_before(source), max_window_size=_BYTES).decompress(
            packed, max_output_size=_BYTES
        )
    except zstandard.ZstdError:  # whose checksum is of the content
        return None
    return content[_DIGEST:] if content[:_DIGEST] == _digest(source) else None


def _digest(source: Path) -> bytes:
    """Of all files of a source."""
    digest = hashlib.sha256()
    for file in sorted(source.iterdir()):
        digest.update(f"{file.name} {file.stat().st_size}\n".encode() + file.read_bytes())
    return digest.digest()


def _before(source: Path) -> zstandard.ZstdCompressionDict:
    """Build the compressor's dictionary, the data before the content: everything that it can refer to."""
    opened = Source.open(source)
    parts = [opened.tokenizer_json]
    for recipe in ({}, {"rotation": True}):
        for binding in bindings_of(opened.config, recipe, CONTEXT).values():
            parts += _encoded(binding(opened))
    return zstandard.ZstdCompressionDict(b"".join(parts), dict_type=zstandard.DICT_TYPE_RAWCONTENT)


def _encoded(array: Any) -> Iterator[bytes]:
    for name, form in ENCODINGS.items():
        if name.startswith("coreml") or "int4" in name:
            continue  # they came later: what is kept was compressed without them
        if array.ndim == 2 or not form.matrices:
            yield np.ascontiguousarray(form.form(array)[form.part]).tobytes()


def main() -> None:
    """Keep all artifacts that are not of today's code, or not of this processor, and remove those no longer kept."""
    from conftest import BUILT, KEPT, opened

    artifacts, known = opened(), keys()
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in KEPT:
        file, beside = files_of(name)
        current = known.get(name) == BUILT[name].key and file.exists()
        if current and restorable(name, artifacts.source(name)):
            continue
        packed = pack(artifacts[name], artifacts.source(name))
        old = file.read_bytes() if file.exists() else b""
        (beside if current else file).write_bytes(packed)
        if not current:
            beside.unlink(missing_ok=True)  # of the code before
        known[name] = BUILT[name].key
        KEYS.write_text(json.dumps({n: known[n] for n in KEPT if n in known}, indent=1) + "\n")
        print(f"{name}: {len(packed):,} bytes{', the same as before' if packed == old else ''}", flush=True)
    every = {file for name in KEPT for file in files_of(name)}
    for file in FOLDER.glob(f"*{SUFFIX}"):
        if file not in every:
            file.unlink()
    print(f"{len(KEPT)} artifacts, {sum(f.stat().st_size for f in FOLDER.iterdir()):,} bytes in {FOLDER}")


if __name__ == "__main__":
    main()
