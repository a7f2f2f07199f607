"""Facts of each runtime that ssmd needs before it imports the runtime: rank, targets, and options of its builds.

A runtime's package has them as INFO in its module `info`, which imports neither the runtime nor its library. A package
without that module gets the defaults of RuntimeInfo.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from ssmd.build.builder import Converter, Packer
    from ssmd.model.artifact import Artifact
    from ssmd.runtime.activations import Activations, Place

log = logging.getLogger(__name__)
Part = Literal["experts", "attention windows"]  # a part of a model that some targets do not compute


@dataclass(frozen=True)
class Target:
    """A value of `--runtime`: a runtime, and the device class that its artifacts are built for, "" for any."""

    name: str
    device_class: str = "cpu"
    converter: str = "CONVERTER"  # attribute of the package's module `build`
    serves: tuple[Part, ...] = ()  # the parts that it computes, of those that some targets do not
    int4_memory: float = 1.0  # memory of packed int4 weights, in sizes of the artifact


@dataclass(frozen=True)
class BuildOption:
    """An option of `ssmd build` that only this runtime has. help: possible values, in words.

    make: returns the converter for (target, value); raises ValueError, which names the possible values. suffix: returns
    what is added to the artifact's folder name for a value.
    """

    help: str
    make: Callable[[str, str], Converter | Packer]
    suffix: Callable[[str], str] = lambda value: ""


@dataclass(frozen=True)
class RuntimeInfo:
    """A runtime's facts. name: set by ssmd, that of the entry point."""

    name: str = ""
    rank: int | None = None  # order among runtimes on the processor, fastest first; None: only if named
    targets: tuple[Target, ...] = ()  # its own name comes first; by default that alone, for the processor
    packs: bool = False  # True: it takes the weights of any model as they are, so a pull needs no graph
    graphs: Path | None = None  # folder of the package's own stripped graphs
    builds_anywhere: bool = False  # True: artifacts can be made where the runtime cannot execute
    parses_safely: bool = False  # True: artifacts need no trial in a process of its own, whatever their origin
    tries: tuple[str, ...] = ()  # devices on which the runtime itself tries an artifact in a process of its own
    build_options: Mapping[str, BuildOption] = field(default_factory=dict)
    activations: Callable[[Artifact, Mapping[str, Place]], Activations] | None = None  # None: it reads no inputs
    first_load: Callable[[str, Mapping[str, int]], str] = lambda device_class, files: ""  # its cost, in words
    suggested: Callable[[str, str], bool] = lambda platform, machine: False  # True: the one to install there


def entry_point_of(name: str) -> EntryPoint | None:
    """Return the entry point of a runtime; None if no package registers it."""
    return _entries(tuple(sys.path)).get(name)


def runtime_names() -> list[str]:
    """Return the names of all runtimes that are registered here, usable or not."""
    return sorted(_entries(tuple(sys.path)))


def infos() -> list[RuntimeInfo]:
    """Return the facts of all registered runtimes, the fastest first. Imports no runtime."""
    found = [info_of(name) for name in runtime_names()]
    return sorted(found, key=lambda info: (info.rank is None, info.rank or 0, info.name))


def info_of(name: str) -> RuntimeInfo:
    """Return the facts of a runtime, the defaults if it is not registered or says nothing."""
    return _info(name, tuple(sys.path))


def targets() -> list[str]:
    """Return all values of `--runtime` but "auto", those of the fastest runtime first."""
    return [target.name for info in infos() for target in info.targets]


def target_of(wanted: str) -> tuple[RuntimeInfo, Target]:
    """Return the runtime and the target that a value of `--runtime` means; the defaults if it is unknown."""
    for info in infos():
        for target in info.targets:
            if target.name == wanted:
                return info, target
    info = info_of(wanted)
    return info, info.targets[0]


def target_for(runtime: str, device_class: str) -> Target:
    """Return the target of a runtime that an artifact of this device class belongs to."""
    mine = info_of(runtime).targets
    return next((target for target in mine if target.device_class == device_class), mine[0])


def package_of(name: str) -> str | None:
    """Return the package of a runtime, to import its modules `build` and `doctor`; None if it is not registered."""
    entry = entry_point_of(name)
    return None if entry is None else entry.module.partition(".")[0]


@cache
def _entries(path: tuple[str, ...]) -> dict[str, EntryPoint]:
    """Return the entry points by name. path: sys.path, in whose folders they are looked for."""
    return {e.name: e for e in entry_points(group="ssmd.runtimes")}


@cache
def _info(name: str, path: tuple[str, ...]) -> RuntimeInfo:
    info, entry = RuntimeInfo(), _entries(path).get(name)
    try:
        package, _, inner = ("", "", "") if entry is None else entry.module.partition(".")
        if inner and _has_info(package):
            info = import_module(f"{package}.info").INFO
    except (Exception, SystemExit) as err:  # a package from elsewhere may raise any error; other runtimes go on
        log.warning("the facts of runtime %s cannot be read (%s: %s)", name, type(err).__name__, err)
    return replace(info, name=name, targets=info.targets or (Target(name),))


def _has_info(package: str) -> bool:
    """Return True if a package has a module `info`. Does not import the package."""
    spec = find_spec(package)
    folders = None if spec is None else spec.submodule_search_locations
    return any((Path(folder) / "info.py").is_file() for folder in folders or ())
