"""Models installed here: <models dir>/<name>/<runtime>-<device class>-<quant>/, one artifact in each folder."""

from __future__ import annotations

import errno
import math
import os
import re
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from ssmd.machine.cache import forget
from ssmd.machine.privatefile import others_write
from ssmd.machine.spelling import by_likeness, nearest
from ssmd.model.artifact import MANIFEST, NAME_PATTERN, ArtifactError, Manifest
from ssmd.model.checked import read_bounded
from ssmd.model.defaults import Default, defaults_of
from ssmd.runtime.devices import why_not
from ssmd.runtime.info import info_of, target_for, target_of
from ssmd.runtime.protocol import RuntimeUnavailable, get_runtime

_NEARLY = 1.25  # ratio of bytes up to which artifacts count as equally large
_LARGE = 1 << 30  # bytes of a file that may not be a hole: to hash it takes seconds
_HOLE = 16  # ratio of a file's bytes to its bytes on the disk, from which on it is a hole
_PIECES = 1000  # pieces of a file that are looked at


class ModelError(ValueError):
    """A model that is not here or cannot run; the message names those that can be used."""


@dataclass(frozen=True)
class InstalledModel:
    """An artifact's folder."""

    name: str
    path: Path
    manifest: Manifest | None  # None if unreadable
    problem: str = ""  # why it cannot be served, or ""
    defaults: Mapping[str, Default] = field(default_factory=dict)  # sampling defaults, by option

    @property
    def nbytes(self) -> int:
        """Count the bytes of all its files, by the manifest; 0 if that cannot be read."""
        return 0 if self.manifest is None else sum(f.size for f in self.manifest.files.values())


def installed(models_dir: Path) -> list[InstalledModel]:
    """List all artifacts under `models_dir`, broken ones with the reason. Reads manifests, not the files they list."""
    return [read(name, path) for name, path in places(models_dir)]


def places(models_dir: Path) -> list[tuple[str, Path]]:
    """List (name, folder) of all artifacts under `models_dir`; no file is read. Raises ModelError."""
    return [(name.name, path) for name in _folders(models_dir) for path in _folders(name)]


def why_unusable(manifest: Manifest, device: str | None = None) -> str:
    """Return why the artifact cannot run on `device`, by default the one it was built for; "" if it can.

    Imports the runtime.
    """
    try:
        devices = get_runtime(manifest.runtime).devices()
    except (RuntimeUnavailable, ImportError) as err:
        return str(err)
    return why_not(manifest.runtime, devices, device or manifest.device_class)


def resolve(model: str | None, models_dir: Path, runtime: str = "auto", device: str | None = None) -> Path:
    """Return the folder of the artifact to serve. Raises ModelError or ArtifactError.

    `model`: a name in `models_dir`, `name@runtime`, or a path of an artifact or of a model's folder; None for the only
    model there is.
    `runtime`: a target of a runtime, or "auto". "auto" picks the artifact with the fewest bytes among those that run
    here, because a token's time is the time to read them. Among nearly equal ones the fastest runtime wins.
    `device`: a device that the runtime must be able to use.
    """
    if model is not None and not _is_path(model):
        model, at, named_runtime = model.partition("@")
        runtime = named_runtime if at else runtime
    if why := _nowhere(runtime):
        raise ModelError(why)
    return choose_installed(candidates(model, models_dir), runtime, device).path


def choose_installed(found: list[InstalledModel], runtime: str = "auto", device: str | None = None) -> InstalledModel:
    """Choose which of a model's artifacts to serve, as `resolve` does. `found`: at least one. Raises ModelError."""
    fitting = [i for i in found if i.manifest is None or is_for(i.manifest, runtime)]
    if not fitting:
        raise ModelError(_none_for(runtime, found))
    least = min((i.nbytes for i in fitting if i.manifest and not _elsewhere(i.manifest)), default=0)
    problems = []
    for candidate in sorted(fitting, key=lambda i: _rank(i, least)):
        reason = candidate.problem or (why_unusable(candidate.manifest, device) if candidate.manifest else "")
        if not reason:
            return candidate
        problems.append(f"{candidate.path}: {reason}")
    raise ModelError("; ".join(problems) + _usable(found))


def _nowhere(runtime: str) -> str:
    """Return why a runtime cannot run any artifact here, or "". A runtime that is not installed is reported later."""
    try:
        reasons = [d.why_not for d in get_runtime(runtime).devices()]
    except (RuntimeUnavailable, ImportError):
        return ""
    return f"runtime {runtime}: {reasons[0]}" if reasons and all(reasons) else ""


def candidates(model: str | None, models_dir: Path) -> list[InstalledModel]:
    """List the artifacts that `model` may mean, at least one. Raises ModelError."""
    if model is not None and _is_path(model):
        path = Path(os.path.expanduser(model))
        if path.is_file():
            raise ModelError(a_file(path))
        if not path.is_dir():
            raise ModelError(f"there is no folder {path}; {_of_a_hub(model) or _advice(models_dir)}")
        if (path / MANIFEST).exists() or not _folders(path):
            return [read(path.name, path)]
        return [read(path.name, folder) for folder in _folders(path)]
    if model is None:
        everything = installed(models_dir)
        names = sorted({i.name for i in everything if not i.problem})
        if len(names) != 1:
            raise ModelError(f"say which model to use; {_advice(models_dir)}")
        model = names[0]
    return named(model, models_dir)


def named(model: str, models_dir: Path) -> list[InstalledModel]:
    """List the artifacts of an installed model, broken ones too, at least one. Raises ModelError."""
    return [i for i in installed(models_dir) if i.name == model] or _unknown(model, models_dir)


def removable(
    model: str, models_dir: Path, runtime: str | None = None, quantization: str | None = None
) -> list[InstalledModel]:
    """List the artifacts of an installed model that may be removed, at least one. Raises ModelError.

    runtime: only its artifacts, or those of a device class of that name. quantization: only those stored in it. Links
    are not followed.
    """
    found = named(model, models_dir)
    if runtime is not None:
        there = ", ".join(sorted({_runtime(one) for one in found}))
        found = [one for one in found if runtime in (_runtime(one), one.manifest and one.manifest.device_class)]
        if not found:
            raise ModelError(f"model {model!r} has no artifact for runtime {runtime!r}; it has: {there}")
    if quantization is not None:
        there = ", ".join(sorted({one.manifest.quantization for one in found if one.manifest is not None}))
        found = [one for one in found if one.manifest is not None and one.manifest.quantization == quantization]
        if not found:
            raise ModelError(f"model {model!r} has no artifact in {quantization!r}; it has: {there or 'none to read'}")
    for path in (models_dir / model, *(one.path for one in found)):
        if not stat.S_ISDIR(path.lstat().st_mode):
            raise ModelError(f"{path} is a link to {os.path.realpath(path)}; remove the link if you do not want it")
    artifacts = [one for one in found if (one.path / MANIFEST).is_file()]
    if not artifacts:
        raise ModelError(f"{found[0].path} has no {MANIFEST}, so it is not an artifact, and is not removed")
    return artifacts


def discard(found: Iterable[InstalledModel]) -> None:
    """Remove artifacts, the caches of runtimes for them, and the folder of their model once it is empty.

    Each is moved aside at once, then deleted. If the process is killed, the next build deletes the hidden rest. Raises
    OSError.
    """
    for one in found:
        aside = Path(tempfile.mkdtemp(prefix=f".{one.path.name}-", dir=one.path.parent))
        try:
            one.path.rename(aside / "removed")
        finally:
            shutil.rmtree(aside, ignore_errors=True)
        if one.manifest is not None:
            forget(one.manifest.build)
        with suppress(OSError):  # the folder is not empty
            one.path.parent.rmdir()


def _runtime(one: InstalledModel) -> str:
    """Return an artifact's runtime; taken from the folder's name if the manifest cannot be read."""
    return one.path.name.partition("-")[0] if one.manifest is None else one.manifest.runtime


def _unknown(model: str, models_dir: Path) -> NoReturn:
    """Raise ModelError that suggests the model that may have been meant, and how to get it."""
    from ssmd.refit import catalog  # here and below: with all families it takes 50 ms, which a daemon saves

    if os.path.isfile(model):
        raise ModelError(a_file(Path(model)))
    here, known = {i.name for i in installed(models_dir) if not i.problem}, catalog.names()
    wanted = model if model in known else nearest(model, [*here, *known])
    question = "" if wanted in ("", model) else f"did you mean {wanted}? "
    if wanted in known and wanted not in here:
        raise ModelError(f"there is no model {model!r} here; {question}get it with: ssmd pull {wanted}")
    more = [] if question else by_likeness(model, [name for name in known if name not in here])
    pulls = f"; ssmd pull gets: {', '.join(more)}" if more else ""
    raise ModelError(f"there is no model {model!r} here; {question}{_advice(models_dir)}{pulls}")


def a_file(path: Path) -> str:
    """Return the reason why a file is not a model: artifacts are folders, and so are sources other than GGUF."""
    from ssmd.model.gguf import is_gguf

    if is_gguf(path):
        return f"{path} is a GGUF file: make a model of it first, with a name of your own: ssmd pull NAME --from {path}"
    return f"{path} is a file, and a model is a folder"


def _of_a_hub(model: str) -> str:
    """Return advice to pull a text that may be a model's name on a hub, or ""."""
    from ssmd.hub.hub import is_name
    from ssmd.refit import catalog

    short = next((name for name in catalog.names() if catalog.origin_of(name) == model), model)
    return f"get the hub's model with: ssmd pull {short}" if is_name(model) else ""


def _advice(models_dir: Path) -> str:
    names = sorted({i.name for i in installed(models_dir) if not i.problem})
    if names:
        return f"installed in {models_dir}: {', '.join(names)}"
    return f"no model is installed in {models_dir}; get one with: ssmd pull smollm2"


def _is_path(model: str) -> bool:
    separators = [s for s in (os.sep, os.altsep) if s]
    return model in (".", "..") or model.startswith("~") or any(s in model for s in separators)


def is_for(manifest: Manifest, runtime: str) -> bool:
    """Return True if `--runtime` of that name means this artifact."""
    if runtime in ("auto", manifest.runtime):
        return True
    info, target = target_of(runtime)
    return (info.name, target.device_class) == (manifest.runtime, manifest.device_class)


def is_usual(manifest: Manifest) -> bool:
    """Return True if the runtime's own name means this artifact, not the name of another device such as npu."""
    return target_for(manifest.runtime, manifest.device_class).name == manifest.runtime


def _elsewhere(manifest: Manifest) -> bool:
    """Return True if it is built for another device than the processor."""
    return manifest.device_class != "cpu"


def _rank(candidate: InstalledModel, least: int) -> tuple[bool, float, float, str]:
    """Return the order of trials: the processor first, fewest bytes, fastest runtime (docs/notes/benchmarks.md)."""
    manifest = candidate.manifest
    rank = None if manifest is None else info_of(manifest.runtime).rank
    elsewhere = manifest is not None and _elsewhere(manifest)
    return elsewhere, max(candidate.nbytes, _NEARLY * least), math.inf if rank is None else rank, str(candidate.path)


def _none_for(runtime: str, found: list[InstalledModel]) -> str:
    from ssmd.refit import catalog

    there = ", ".join(sorted({i.manifest.runtime for i in found if i.manifest}))
    name = found[0].name
    said = f"model {name!r} has no artifact for runtime {runtime!r}; it has: {there}"
    info, target = target_of(runtime)
    if target.name == info.name:
        return f"{said}; get one with: ssmd pull {name} --runtime {runtime}" if name in catalog.names(runtime) else said
    try:
        why = {d.name: d.why_not for d in get_runtime(info.name).devices()}.get(target.device_class, "")
    except RuntimeUnavailable as err:
        why = str(err)
    unusable_here = f"; and the {target.name.upper()} cannot be used here: {why}" if why else ""
    made = name in catalog.names(target.name)
    way = f"get one with: ssmd pull {name}" if made else "build one with: ssmd build CHECKPOINT"
    return f"{said} ({way} --runtime {target.name}){unusable_here}{_usable(found)}"


def _usable(found: list[InstalledModel]) -> str:
    """Return the options with which the model could be served, or ""."""
    options = set()
    for one in found:
        if one.manifest is not None and not one.problem:
            if not why_unusable(one.manifest):
                options.add(f"--runtime {one.manifest.runtime}")
            elif not why_unusable(one.manifest, "cpu"):
                options.add("--device cpu")
    return f"; what works here: {' or '.join(sorted(options))}" if options else ""


def _folders(path: Path) -> list[Path]:
    """List the folders in it, by name. Hidden ones are work in progress."""
    try:
        found = sorted(p for p in path.iterdir() if re.fullmatch(NAME_PATTERN, p.name) and p.is_dir())
        for folder in (path, *found):
            if others_write(folder.stat()):
                raise ModelError(
                    f"the models folder {folder} can be written by every user of this computer, so its contents cannot "
                    f"be trusted; check them, then run: chmod -R go-w {folder}"
                )
        return found
    except FileNotFoundError:
        return []
    except OSError as err:
        raise ModelError(
            f"the models folder {path} cannot be read: {err.strerror or err}; choose another with SSMD_MODELS_DIR"
        ) from err


def read(name: str, path: Path) -> InstalledModel:
    """Read an artifact's folder as it is now: its manifest, and if its files have the sizes in the manifest.

    A file that is almost all a hole is a problem too: a few bytes on a disk could take a daemon days to hash.
    """
    try:
        manifest = read_bounded(path)
    except (ArtifactError, OSError) as err:
        return InstalledModel(name, path, None, str(err))
    for file, entry in manifest.files.items():
        try:
            found = (path / file).stat()
        except OSError:
            return InstalledModel(name, path, manifest, f"file {file!r} is missing; build it again")
        size = found.st_size
        if size == entry.size and _is_hole(path / file, found):
            hole = f"file {file!r} is almost all a hole: few of its {size} bytes are on the disk; build it again"
            return InstalledModel(name, path, manifest, hole)
        if size != entry.size:
            return InstalledModel(
                name, path, manifest, f"file {file!r} has {size} bytes, not {entry.size}; build it again"
            )
    return InstalledModel(name, path, manifest, defaults=defaults_of(manifest, path))


def _is_hole(file: Path, found: os.stat_result) -> bool:
    """Return True if next to nothing of a large file is on the disk. Only Linux is asked.

    Blocks alone do not tell: some file systems compress, count them late, or not at all. Those report no holes.
    """
    if sys.platform != "linux" or found.st_size < _LARGE or 512 * found.st_blocks >= found.st_size // _HOLE:
        return False
    at = here = 0
    try:
        with file.open("rb") as opened:
            for _ in range(_PIECES):
                begin = os.lseek(opened.fileno(), at, os.SEEK_DATA)
                at = os.lseek(opened.fileno(), begin, os.SEEK_HOLE)
                here += at - begin
    except OSError as err:
        if err.errno != errno.ENXIO:  # else there are no more bytes
            return False
    return here < found.st_size // _HOLE
