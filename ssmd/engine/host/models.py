"""The shelf: the models on disk that requests can name."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType

from ssmd.engine.terms import Rejection
from ssmd.installed import InstalledModel, ModelError, choose_installed, is_for, read
from ssmd.machine.spelling import MOST_CHARS, meant, nearest, printable
from ssmd.model import defaults
from ssmd.model.aliases import ANY, Alias, parse
from ssmd.model.artifact import MANIFEST, Manifest
from ssmd.model.defaults import Defaults

AVOID_S = 30.0  # time for which a name avoids a model that failed to load, if it fits another one
_AGAIN_S = 0.5  # least time between reads of a broken model: it may take long to read, and any request may look
LATEST = ":latest"  # Ollama's tag of a model's name that has no other
Stamp = tuple[int, ...]
Places = Callable[[], Sequence[tuple[str, Path]]]  # (name, folder) of artifacts; raises ModelError


@dataclass(frozen=True, eq=False)
class Model:
    """A model that requests can name. id: `name@runtime`, or `name@folder` if a runtime has several of that name.

    stamp: of the files of its manifest and defaults when they were read; another stamp means another artifact.
    defaults: sampling defaults for requests.
    """

    id: str
    found: InstalledModel
    stamp: Stamp | None
    defaults: Defaults = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Return its name, which the same model for other runtimes shares."""
        return self.found.name

    def named(self, asked: str) -> str:
        """Return its name in an answer, to a request for the name `asked`: an alias as it was asked, else its own."""
        name, at, _ = untagged(asked).partition("@")
        if name == self.name:
            return self.id if at else name
        return self.name if not at and name in self.other_names else asked

    @cached_property
    def other_names(self) -> frozenset[str]:
        """Return further names that requests may use: its manifest's, and those of its folders."""
        if self.found.manifest is None:
            return frozenset()
        path = self.path.resolve()
        return frozenset((self.manifest.name, path.name, path.parent.name))

    @property
    def path(self) -> Path:
        """Return its folder."""
        return self.found.path

    @property
    def manifest(self) -> Manifest:
        """Return the manifest in its folder. Raises Rejection if it cannot be read."""
        if self.found.manifest is None:
            raise unusable_model(self.id, self.found.problem)
        return self.found.manifest

    @property
    def is_current(self) -> bool:
        """Return True if its folder is unchanged since it was read."""
        return self.stamp is not None and _stamp(self.path) == self.stamp


class ModelIndex:
    """Finds models by name. From any thread.

    runtime, device: settings of the daemon, as `choose_installed` takes them. defaults: sampling options that override
    those of every model. aliases: other names of models; the first that fits counts, and only for a name that no model
    has.

    The folders are looked at anew for each call. Unchanged models are not read again.
    """

    def __init__(
        self,
        places: Places,
        runtime: str = "auto",
        device: str | None = None,
        defaults: Defaults = MappingProxyType({}),
        aliases: Sequence[Alias] = (),
    ) -> None:
        self._places, self._runtime, self._device, self._defaults = places, runtime, device, defaults
        self._aliases = tuple(aliases)
        self._lock = threading.Lock()
        self._seen: dict[tuple[str, Path], tuple[Stamp | None, InstalledModel]] = {}
        self._looked = 0.0
        self._models: dict[str, Model] = {}
        self._names: frozenset[str] = frozenset()  # of all models, the other ones too
        self._chosen: dict[str, Model] = {}
        self._avoided: dict[Model, float] = {}  # and until when, monotonic seconds

    def models(self) -> list[Model]:
        """Return all models by id, broken ones too. Raises Rejection if their folder cannot be read."""
        with self._lock:
            self._look()
            return list(self._models.values())

    def find(self, asked: str) -> Model:
        """Return the model for a client's request, which may name it by an alias or with a tag (`untagged`).

        Of several runtimes it is the fastest that is usable here. Raises Rejection.
        """
        return self._find(asked, self._aliases)

    def installed(self, asked: str) -> Model:
        """Return the model as `find` does, but by its own name alone: a change must not hit another one."""
        return self._find(asked, ())

    def aliases(self) -> list[tuple[str, Model]]:
        """List the aliases that are a single name, with their models, in the written order. Those in vain are left out.

        Raises Rejection if the folder of models cannot be read.
        """
        with self._lock:
            self._look()
            exact = [alias for alias in self._aliases if alias.is_exact and alias.pattern not in self._names]
        found = [(alias.pattern, self.preferred(alias.model)) for alias in exact]
        return [(name, model) for name, model in found if model is not None]

    def _find(self, asked: str, aliases: Sequence[Alias]) -> Model:
        with self._lock:
            self._look()
            if any(until < time.monotonic() for until in self._avoided.values()):
                self._avoided, self._chosen = {}, {}
            name = asked
            if aliases and untagged(asked).partition("@")[0] not in self._names:
                plain = asked.removesuffix(LATEST)
                name = next((alias.model for alias in aliases if alias.fits(asked) or alias.fits(plain)), asked)
            if name in self._models:
                return self._models[name]
            if name not in self._chosen:
                self._chosen[name] = self._choose(name, asked)
            return self._chosen[name]

    def avoid(self, model: Model) -> None:
        """Let names avoid a model that failed to load for AVOID_S, if they fit another one."""
        with self._lock:
            self._avoided[model] = time.monotonic() + AVOID_S
            self._chosen = {}

    def preferred(self, name: str) -> Model | None:
        """Return the result of `installed`; None if no model of that name can be used here."""
        try:
            return self.installed(name)
        except Rejection:
            return None

    def _look(self) -> None:
        try:
            places = [(place, _stamp(place[1])) for place in self._places()]
        except ModelError as err:
            raise Rejection(str(err), status=503, code="models_unreadable") from err
        broken = any(one.problem for _, one in self._seen.values())  # perhaps it was half written, and is whole by now
        again = broken and time.monotonic() - self._looked >= _AGAIN_S
        if not again and [(place, stamp) for place, (stamp, _) in self._seen.items()] == places:
            return
        before, self._looked = self._seen, time.monotonic()
        self._seen = {}
        for place, stamp in places:
            known = before.get(place)
            stays = known is not None and known[0] == stamp and not known[1].problem
            self._seen[place] = known if known is not None and stays else (stamp, read(*place))
        fitting = [
            (stamp, one)
            for stamp, one in self._seen.values()
            if one.manifest is None or self._runtime == "auto" or is_for(one.manifest, self._runtime)
        ]
        kept = {(model.path, model.stamp): model for model in self._models.values()}
        self._chosen, self._models = {}, {}
        for stamp, one in fitting:
            number = sum(_runtime(one) == _runtime(other) and one.name == other.name for _, other in fitting)
            id_ = f"{one.name}@{_runtime(one) if number == 1 else one.path.name}"
            old = kept.get((one.path, stamp))
            same = old is not None and old.id == id_ and old.found == one
            new = Model(id_, one, stamp, {**one.defaults, **self._defaults})
            self._models[id_] = old if old is not None and same else new
        all_ = self._models.values()
        self._names = frozenset(model.name for model in all_).union(*(model.other_names for model in all_))

    def _choose(self, wanted: str, asked: str) -> Model:
        """Return the model of the name `wanted`, which a request `asked` for, perhaps by an alias. Raises Rejection."""
        name, at, which = untagged(wanted).partition("@")
        everything = list(self._models.values())
        found = [model for model in everything if model.name == name]
        if not found and not at:  # the manifest's own name, or a folder's
            found = [m for m in everything if name in m.other_names]
        if at:
            found = [m for m in found if m.found.manifest is not None and which and _is_for(m, which)]
        if not found:
            raise self._unknown(asked) if wanted == asked else self._in_vain(asked, wanted)
        found = [model for model in found if model not in self._avoided] or found
        try:
            chosen = choose_installed([model.found for model in found], device=self._device)
        except ModelError as err:
            raise unusable_model(wanted, str(err)) from err
        return next(model for model in found if model.found is chosen)

    def _in_vain(self, asked: str, wanted: str) -> Rejection:
        """Build the error for an alias whose model is not installed."""
        names = sorted({model.name for model in self._models.values()})
        message = (
            f"Model not found: '{printable(asked)}' is an alias for {printable(wanted)}, which is not installed here; "
            f"install that, or name an installed model in the setting aliases: {', '.join(names) or 'none is'}"
        )
        return Rejection(message, status=404, code="model_not_found", param="model")

    def _unknown(self, asked: str) -> Rejection:
        names = sorted({model.name for model in self._models.values()})
        there = (
            f"this daemon serves: {', '.join(names)}"
            if names
            else "no model is installed; get one with: ssmd pull smollm2"
        )
        name, at, _ = asked.partition("@")
        hint = meant(asked, self._models if at else names)
        if at and not hint and (others := [id_ for id_, model in self._models.items() if model.name == name]):
            hint = f"did you mean {' or '.join(others)}? "
        message = f"Model not found: there is no model '{printable(asked)}' here; {hint}{there}"
        if names and name not in self._names and _can_be_an_alias(asked):
            message += f"; to serve one by this name, add {asked}={nearest(asked, names) or names[0]} to SSMD_ALIASES"
        return Rejection(message, status=404, code="model_not_found", param="model")


def untagged(asked: str) -> str:
    """Return a model's name without a tag: `smollm2:latest` is `smollm2`, and `qwen3:0.6b` is `qwen3-0.6b`.

    No name of ssmd's own has a colon.
    """
    return asked.removesuffix(LATEST).replace(":", "-")


def unusable_model(asked: str, why: str) -> Rejection:
    """Build the error for a model that is installed but cannot be used. A retry does not help."""
    return Rejection(f"model {asked} cannot be used: {why}", status=503, code="model_unusable", param="model")


def _runtime(found: InstalledModel) -> str:
    """Return the runtime in a model's id; its folder if the manifest cannot be read."""
    return found.path.name if found.manifest is None else found.manifest.runtime


def _is_for(model: Model, which: str) -> bool:
    """Return True if `which` names the model's runtime or its folder."""
    return model.path.name == which or is_for(model.manifest, which)


def _can_be_an_alias(name: str) -> bool:
    """Return True if the setting takes this name, and a message has room for it."""
    try:
        return len(name) <= MOST_CHARS and ANY not in name and bool(parse([f"{name}=model"]))
    except ValueError:
        return False


def _stamp(path: Path) -> Stamp | None:
    try:
        found = (path / MANIFEST).stat()
    except OSError:
        return None
    stamp = found.st_mtime_ns, found.st_ino, found.st_size
    try:
        beside = (path / defaults.FILE).stat()
    except OSError:
        return stamp
    return *stamp, beside.st_mtime_ns, beside.st_ino, beside.st_size
