"""`ssmd pull`: fetches a source checkpoint from the Hugging Face hub, and makes an artifact if ssmd has its graph."""

from __future__ import annotations

import codecs
import contextlib
import json
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ssmd.cli import options
from ssmd.cli.build import Quant
from ssmd.cli.making import (
    BuildFailed,
    alone,
    builds,
    check_target,
    check_texts,
    fetch,
    fetch_file,
    hint,
    keep_defaults,
    name_of,
    needs_of,
    noted,
    packer_of,
    removed,
    smollm2_here,
    smollm2_source,
    source_of,
)
from ssmd.cli.output import USAGE, fail
from ssmd.cli.reporting import reporting
from ssmd.machine.size import show_size

if TYPE_CHECKING:
    from ssmd.build.builder import Packer, Quantization
    from ssmd.config import Settings
    from ssmd.hub.pull import PulledSource, Purpose
    from ssmd.machine.progress import Progress
    from ssmd.model.source import Source
    from ssmd.refit.graphfile import StrippedGraph

_TEXT_BYTES = 256 << 10  # of a text to calibrate with: more than the tokens that are read take
SMALLER = "int4"  # where memory is too small for a graph's usual quantization
_ON_A_HUB = re.compile(r"([^:/]+/[^:/]+):(.+)")  # owner/name:FILE


def pull(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="Such as granite-4.0-h-350m, smollm2 or, on the hub, owner/name."),
    ],
    revision: Annotated[str, typer.Option(help="Branch, tag or commit.", metavar="REV")] = "main",
    folder: Annotated[
        Path | None,
        typer.Option(
            "--from",
            help="A source checkpoint: a folder, a GGUF file, or a GGUF file on the hub as owner/name:FILE.",
            metavar="SOURCE",
        ),
    ] = None,
    to: Annotated[
        Path | None,
        typer.Option(help="A new folder to fetch into, instead of the data directory; no more.", metavar="DIR"),
    ] = None,
    runtime: Annotated[
        str | None,
        typer.Option(
            help="Runtime to make the artifact for; else the fastest here.",
            metavar="NAME",
            callback=options.known_runtime,
        ),
    ] = None,
    quant: Annotated[
        Quant | None,
        typer.Option(
            help="How weights are stored; else int8, and int4 where only that fits into memory.", show_default=False
        ),
    ] = None,
    calibrate: Annotated[
        Path | None,
        typer.Option(
            help="With --quant int4: round the weights for this text, of 1,024 to 8,192 tokens. Takes minutes.",
            metavar="TEXT",
        ),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            help="Tokens that a conversation can have; else the model's own, 32768 at most.", metavar="N", min=1
        ),
    ] = None,
    data_dir: options.DataDir = None,
    models_dir: options.ModelsDir = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the artifact if it exists.")] = False,
    keep_source: options.KeepSource = False,
    anyway: Annotated[bool, typer.Option("--anyway", help="Make the artifact even if memory seems too small.")] = False,
    offline: options.Offline = False,
    as_json: options.Json = False,
    report: Annotated[bool, typer.Option("--report", hidden=True)] = False,  # for the daemon that started it
) -> None:
    """Fetch a model and make it ready to run; the same command goes on where a broken one stopped.

    Where ssmd has the model's stripped graph, its weights are put into that in seconds; the others take `ssmd build`.
    Only safetensors, json, tokenizer and chat template are fetched, or the one GGUF file that --from names; pickled
    weights are refused. They are removed when the artifact is there. HF_ENDPOINT names another hub, HF_TOKEN is sent to
    that hub alone; with HF_HUB_OFFLINE=1 nothing is fetched.
    """
    from ssmd.config import Settings

    settings = Settings(data_dir=data_dir, models_dir=models_dir, offline=offline or None)
    with reporting() if report else contextlib.nullcontext():
        making = _Making(settings, name, runtime or "auto", context, force, keep_source, anyway)
        making.quantization = None if quant is None else quant.value
        if calibrate is not None:
            if to is not None or making.quantization != SMALLER:
                fail(f"--calibrate rounds weights of 4 bits: add --quant {SMALLER}, and leave out --to", USAGE)
            making.text = _text_of(calibrate)
        _pull(making, name, revision, folder, to, runtime, as_json, report)


def _text_of(file: Path) -> str:
    """Read a text to calibrate with. Ends the command if it is none, or too short."""
    from ssmd.refit.calibration import LEAST_TOKENS, MOST_TOKENS

    try:
        with file.open("rb") as f:
            data = f.read(_TEXT_BYTES + 1)
    except OSError as err:
        fail(f"--calibrate {file}: {err.strerror or err}", USAGE)
    cut = data[:_TEXT_BYTES]
    try:
        text = codecs.getincrementaldecoder("utf-8-sig")().decode(cut, final=len(data) == len(cut))
    except UnicodeDecodeError as err:
        fail(f"--calibrate {file}: it is no text in UTF-8, from byte {err.start} on", USAGE)
    if len(text) < LEAST_TOKENS:
        fail(
            f"--calibrate {file}: {len(text)} characters are less than {LEAST_TOKENS} tokens; the first {MOST_TOKENS} "
            "are read: take texts of the kind that the model is for",
            USAGE,
        )
    return text


def _pull(
    making: _Making,
    name: str,
    revision: str,
    folder: Path | None,
    to: Path | None,
    runtime: str | None,
    as_json: bool,
    report: bool,
) -> None:
    from ssmd.model import smollm2
    from ssmd.refit import catalog
    from ssmd.runtime.info import target_of

    if folder is None and (on_hub := _ON_A_HUB.fullmatch(name)):
        if to is not None:
            fail("--to fetches a whole checkpoint, not one file of it: leave out --to, or the file's name", USAGE)
        folder, name = Path(name), Path(on_hub[2]).stem
    made = (folder, runtime, making.context, making.quantization)
    if to is not None and any(asked is not None for asked in made):
        fail("--to only fetches: leave out --from, --runtime, --quant and --context", USAGE)
    if to is None:
        making.settings.prepare_models()  # before anything is fetched
    said: dict[str, object] = {"name": name}
    say = _silent if as_json or report else typer.echo
    # before anything is fetched in vain
    ready = (runtime is not None and target_of(runtime)[0].builds_anywhere) or _some_runtime(runtime or "auto")
    if name == smollm2.NAME and folder is None and to is None and not ready and runtime:
        why = catalog.why_runtime_unusable(runtime) or f"ssmd has no stripped graphs for runtime {runtime}"
        fail(f"{why}; with PyTorch it can be built: ssmd build {name} --runtime {runtime}")
    making.name = name.rpartition("/")[2]
    if report or any(asked is not None for asked in (runtime, folder, making.quantization)):  # an artifact is wanted
        making.build = name if folder is None else str(folder)
    if making.quantization is not None and (name, revision, folder) == (smollm2.NAME, "main", None):
        making.look(catalog.config_of_graph(name))  # which is known, so nothing is fetched or unpacked for a refusal
    with _source(making, name, revision, folder, to, said, say) as path:
        known = said.get("path", path)
        artifact = None
        if to is None and path is None:
            artifact = making.made_before(say)
        elif to is None:
            assert path is not None
            with source_of(path) as source:
                making.look(source.config)
                if making.recipe is not None and (name != smollm2.NAME or folder is not None):
                    check_texts(source)
                artifact = making.install(source, say, whose=str(said["name"]))
            if artifact is None and not as_json:
                typer.echo(making.why_not)
    if as_json or report:
        if "path" in said and not Path(str(said["path"])).exists():
            said["path"] = None
        typer.echo(json.dumps({**said, "artifact": None if artifact is None else str(artifact)}, indent=1))
    elif artifact is None:
        assert path is not None
        typer.echo(f"{known}; try: ssmd build {name if to is None and folder is None else known}{_way(path)}")


def _way(source: Path) -> str:
    """Return what `ssmd build` needs beside a checkpoint's name: the runtime, where its usual one does not serve it."""
    from ssmd.model.source import SourceError, read_json

    try:
        return _way_of(read_json(source / "config.json"))
    except SourceError:  # a GGUF file, which has none
        return ""


def _way_of(config: Mapping[str, Any]) -> str:
    from ssmd.families.fields import FamilyError
    from ssmd.families.registry import family_of
    from ssmd.refit.install import serving
    from ssmd.runtime.info import targets

    try:
        family = family_of(config)
        first = serving(family.plan(family.parse(config)))[:1]
    except FamilyError:  # the build says so itself
        return ""
    return "" if first in ([], targets()[:1]) else f" --runtime {first[0]}"


def _silent(line: str) -> None:
    pass


@dataclass(frozen=True)
class _Recipe:
    """An artifact that can be made: from a graph, or by a packer. Its folder, and bytes of memory and disk.

    most: tokens of a conversation, None if unbounded. exact: True if the bytes of the disk are no estimate. why: a line
    about a quantization that was not asked for, or "".
    """

    out: Path
    runtime: str
    graph: StrippedGraph | None
    packer: Packer | None
    most: int | None
    memory: int
    disk: int
    exact: bool
    why: str = ""


@dataclass
class _Making:
    """The artifact that a command wants, and its recipe once a source's config is known.

    context: the tokens that a conversation can have; None: the model's own. build: the argument of `ssmd build` if an
    artifact is to be made or the command fails, else "".
    """

    settings: Settings
    name: str
    runtime: str = "auto"
    context: int | None = None
    force: bool = False
    keep_source: bool = False
    anyway: bool = False
    build: str = ""
    quantization: Quantization | None = None  # None: the usual one, or the one that fits into memory
    text: str | None = None  # to calibrate with
    recipe: _Recipe | None = None
    why_not: str = ""

    def look(self, config: Mapping[str, Any]) -> Purpose:
        """Return the purpose of a source with that config: what is made of it here. Fetches and writes nothing.

        Ends the command if no graph fits. Raises FamilyError, RefitError, BuildError, or BuildFailed: no memory.
        """
        from ssmd.hub.pull import KEPT, Purpose

        check_target(config, self.runtime)
        if self.recipe is None:
            self.recipe, self.why_not = _recipe(config, self)
        if self.recipe is None:
            if self.build:
                fail(f"{self.why_not}; {self._built(config)}")
            return KEPT
        if self.recipe.out.exists() and not self.force:
            return Purpose(needed=False)
        if not self.anyway:
            _check_memory(self.recipe.memory)
        return Purpose(self.settings.models_dir, self.recipe.disk, temporary=not self.keep_source)

    def _built(self, config: Mapping[str, Any]) -> str:
        """Return the command that builds the artifact, or that no runtime stores weights so."""
        from ssmd.runtime.info import targets

        if self.quantization is None:
            way = _way_of(config) if self.runtime == "auto" else f" --runtime {self.runtime}"
            return f"with PyTorch it can be built: ssmd build {self.build}{way}"
        wanted = targets() if self.runtime == "auto" else [self.runtime]
        runtime = next((name for name in wanted if builds(name, self.quantization, config)), None)
        if runtime is None:
            return f"nor does `ssmd build` make {self.quantization} for {' or '.join(wanted)}"
        return f"with PyTorch it can be built: ssmd build {self.build} --runtime {runtime} --quant {self.quantization}"

    def made_before(self, say: Progress) -> Path | None:
        """Return the artifact's folder and say that it is there. None if it is not, or is to be replaced.

        Without a recipe, that of the first usable runtime.
        """
        if self.force:
            return None
        out = next(self._places(), None) if self.recipe is None else self.recipe.out
        if out is None or not out.exists():
            return None
        most, has = None if self.recipe is None else self.recipe.most, _context_of(out)
        again = f", for conversations of {has} tokens; --force makes it again, for {most}"
        other = most is not None and has is not None and has != most
        if self.text is not None and not _is_rounded_for(out, self.text):
            again, other = ", not rounded for this text; --force makes it again, for it", True
        say(f"{out} is here already{again if other else '; --force makes it again'}")
        return out

    def _places(self) -> Iterator[Path]:
        """Yield the folders in which an artifact of the first usable runtime may be, of any graph."""
        from ssmd.refit import catalog

        mine = self.settings.models_dir / name_of(self.name)
        packer = packer_of(self.runtime)
        if packer is not None:
            quantization = self.quantization or packer.quantizations[0]
            yield _folder(mine, packer.runtime, packer.device_class, quantization)
            return
        for runtime in catalog.on_processor() if self.runtime == "auto" else [self.runtime]:
            if self.runtime != "auto" or not catalog.why_runtime_unusable(runtime):
                forms = {file.stem.partition("@")[2] for file in catalog.files(runtime, quantization=self.quantization)}
                yield from (mine / form for form in sorted(forms) if (mine / form).exists())
                return

    def install(self, source: Source, say: Progress, *, whose: str = "") -> Path | None:
        """Make the artifact of a source. Returns its folder; None if there is no recipe, for the reason `why_not`.

        An installed one is kept, unless `force`. whose: the source's name, if not `name`.
        """
        from ssmd.hub.download import check_room
        from ssmd.refit import catalog
        from ssmd.refit.gguf import loss
        from ssmd.refit.gguf.source import GGUFSource
        from ssmd.runtime.info import info_of

        recipe = self.recipe
        if recipe is None:
            return None
        out, graph, packer = recipe.out, recipe.graph, recipe.packer
        defaults = partial(keep_defaults, source.path, whose or self.name, say=say)
        with alone(out):
            if self.made_before(say) is not None:
                return out
            if recipe.why:
                say(recipe.why)
            if recipe.exact:
                copies = 1 if self.text is None else 3  # one whose inputs are read, and its packed weights
                check_room(copies * recipe.disk, self.settings.models_dir, "SSMD_MODELS_DIR", "written")
            if graph is not None:
                h = graph.header
                if cost := info_of(h.runtime).first_load(h.device_class, {f.name: f.size for f in h.files}):
                    say(cost)
                options: dict[str, Any] = {"context": self.context, "text": self.text, "progress": say}
                made = catalog.install(graph, source, out, name=self.name, finish=defaults, **options)
            else:
                assert packer is not None
                tiers = None if self.context is None else [self.context]
                how: dict[str, Any] = {"quantization": self.quantization, "tiers": tiers}
                made = packer.build(source, out, name=self.name, **how, replace=True, progress=say)
                defaults(out)
            manifest = made.manifest
            if isinstance(source, GGUFSource):
                say(loss.sentence(source, None if graph is None else graph.header, manifest.quantization))
            noted(out, self.settings)
            nbytes = sum(f.size for f in manifest.files.values())
            say(f"{out}: {show_size(nbytes)}; {hint(manifest, self.name, out)}")
        return out


def _recipe(config: Mapping[str, Any], making: _Making) -> tuple[_Recipe | None, str]:
    """Return (the recipe, ""), or (None, the reason) if ssmd has no graph of such a config.

    Without a quantization it is the usual one. Where memory is too small for that, it is int4 if there is a graph that
    fits; the recipe says so.
    """
    from ssmd.machine.memory import available
    from ssmd.refit import calibration

    if making.text is not None and (why := calibration.why_not(making.runtime)):
        fail(why, USAGE)
    runtime, mine = making.runtime, making.settings.models_dir / name_of(making.name)
    packer = packer_of(runtime)
    if packer is not None:
        quantization = making.quantization or packer.quantizations[0]
        out = _folder(mine, packer.runtime, packer.device_class, quantization)
        tiers = None if making.context is None else [making.context]
        needs = needs_of(packer, config, quantization, tiers=tiers)
        return _Recipe(out, runtime, None, packer, making.context, needs.memory, needs.disk, exact=False), ""
    recipe, why_not = _of_graph(config, making, mine, making.quantization)
    if recipe is None or making.quantization is not None or (recipe.out.exists() and not making.force):
        return recipe, why_not
    smaller, _ = _of_graph(config, making, mine, SMALLER)
    if smaller is None or smaller.runtime != recipe.runtime or smaller.disk >= recipe.disk:
        return recipe, ""
    usual, free = recipe.graph.header.quantization if recipe.graph else "", available()
    if free is not None and smaller.memory <= free < recipe.memory and not making.anyway:
        takes = f"{usual} takes about {show_size(recipe.memory)} of memory, and {show_size(free)} are free"
        return replace(smaller, why=f"the weights become {SMALLER}, as {takes}; --quant {usual} is the usual one"), ""
    disk = f"takes {show_size(smaller.disk)} of disk and memory in place of {show_size(recipe.disk)}"
    return replace(recipe, why=f"the weights become {usual}, the usual one; --quant {SMALLER} {disk}"), ""


def _of_graph(
    config: Mapping[str, Any], making: _Making, mine: Path, quantization: str | None
) -> tuple[_Recipe | None, str]:
    """Return (the recipe of a graph, ""), or (None, the reason). mine: the folder of the model."""
    from ssmd.refit import calibration, catalog
    from ssmd.refit.refit import bounded

    runtimes = catalog.on_processor() if making.runtime == "auto" else [making.runtime]
    graph, why_not = catalog.choose_graph(config, runtimes, quantization)
    if graph is None:
        return None, why_not
    h = graph.header
    out = _folder(mine, h.runtime, h.device_class, h.quantization)
    most = bounded(h, config, making.context)[-1]  # before anything is replaced
    memory, disk = catalog.memory_of(h), catalog.disk_of(h)
    if making.text is not None:
        calibration.check_calibrates(h)
        memory += calibration.memory_of(h)
    return _Recipe(out, h.runtime, graph, None, most, memory, disk, exact=True), ""


def _check_memory(needed: int) -> None:
    """Check that the machine has the memory free that a pull takes. Raises BuildFailed."""
    from ssmd.machine.memory import available

    free = available()
    if free is not None and free < needed:
        raise BuildFailed(
            f"this pull takes about {show_size(needed)} of memory, and {show_size(free)} are free: close other "
            "programs, choose a smaller model of `ssmd list --available`, or try it with `ssmd pull --anyway`"
        )


def _folder(mine: Path, runtime: str, device_class: str, quantization: str) -> Path:
    return mine / f"{runtime}-{device_class}-{quantization}"


def _is_rounded_for(artifact: Path, text: str) -> bool:
    from ssmd.model.artifact import ArtifactError, read_manifest
    from ssmd.refit.calibration import hash_of

    try:
        told = read_manifest(artifact).quantization_recipe.get("calibrated")
    except ArtifactError:
        return False
    return isinstance(told, dict) and told.get("sha256") == hash_of(text)


def _context_of(artifact: Path) -> int | None:
    """Return the most tokens of a conversation with an artifact; None if unbounded, or if it cannot be read."""
    from ssmd.model.artifact import ArtifactError, read_manifest

    try:
        return read_manifest(artifact).context
    except ArtifactError:
        return None


@contextmanager
def _source(
    making: _Making,
    name: str,
    revision: str,
    folder: Path | None,
    to: Path | None,
    said: dict[str, object],
    say: Progress,
) -> Iterator[Path | None]:
    """Yield the folder of the source checkpoint; None if it is not needed, as the artifact is there.

    `said` gets the facts of its origin. A source that was fetched to make an artifact is removed afterwards.
    """
    from ssmd.hub import hub
    from ssmd.hub.hub import is_name
    from ssmd.hub.pull import KEPT, Purpose, find
    from ssmd.model import smollm2
    from ssmd.refit import catalog

    settings = making.settings
    if folder is not None:
        on_hub = None if folder.exists() else _ON_A_HUB.fullmatch(folder.as_posix())
        if on_hub is None:
            said["path"] = str(folder)
            yield folder
            return
        needed = making.made_before(_silent) is None
        purpose = Purpose(temporary=needed and not making.keep_source, needed=needed)
        done = fetch_file(on_hub[1], on_hub[2], revision, settings, purpose=purpose, say=say)
        made_of = str(said["name"])
        making.build = str(done.path)
    elif name == smollm2.NAME and to is None and revision == "main":
        with smollm2_source(settings, say) as path:
            yield path
        return
    else:
        on_hub_as = name if is_name(name) else catalog.origin_of(name)
        no_net = settings.offline or hub.offline()
        if (
            no_net
            and to is None
            and find(on_hub_as, revision, settings.data_dir) is None
            and making.made_before(_silent)
        ):
            yield None
            return
        done = fetch(
            on_hub_as, revision, settings, to, say=say, look=making.look if to is None else lambda config: KEPT
        )
        made_of = done.name
    there = done.path.exists()
    said |= {"name": made_of, "revision": done.revision, "commit": done.commit, "path": str(done.path)}
    said |= {"fetched": done.fetched, "files": done.files}
    with _used_up(done, making, say) if to is None and there else contextlib.nullcontext():
        yield done.path if there else None


@contextmanager
def _used_up(source: PulledSource, making: _Making, say: Progress) -> Iterator[None]:
    """Hold a source while an artifact is made of it. It is removed then if it was fetched for that alone."""
    from ssmd.hub.pull import used_up

    for_build = making.recipe is None and source.path.is_dir()  # a GGUF file's recipe is not known before it is open
    with used_up(source, keep=making.keep_source or for_build):
        yield
    if not source.path.exists():
        say(removed(source))


def pulled(model: str | None, settings: Settings, *, yes: bool = False, ask: bool = True) -> bool:
    """Pull a missing model that ssmd has a graph of, with `yes`, or if `ask` and the user at a terminal agrees.

    Returns True if it was pulled. If not, the error that follows names the command.
    """
    from ssmd.hub import hub
    from ssmd.hub.pull import find, nbytes_of
    from ssmd.installed import places
    from ssmd.model import smollm2
    from ssmd.refit import catalog

    name, _, runtime = (model or "").partition("@")
    runtime = runtime or settings.runtime
    known = name != smollm2.NAME and name in catalog.names(None if runtime == "auto" else runtime)
    if not known or name in {there for there, _ in places(settings.models_dir)}:
        return False
    asks = ask and sys.stdin.isatty() and sys.stderr.isatty()
    origin = catalog.origin_of(name)
    here = find(origin, "main", settings.data_dir)
    fetched_anew = here is None and (settings.offline or hub.offline())
    if fetched_anew or not (yes or asks) or not _some_runtime(runtime):
        return False
    size = "nothing to fetch" if here is not None else show_size(nbytes_of(origin, "main"))
    if not yes and not typer.confirm(f"{name} is not installed; pull it ({size})?", default=True, err=True):
        return False
    settings.prepare_models()
    making = _Making(settings, name, runtime)
    source = fetch(origin, "main", settings, say=_aside, look=making.look)
    with _used_up(source, making, _aside), source_of(source.path) as opened:
        check_texts(opened)
        _install_or_fail(opened, making)
    return True


def _install_or_fail(source: Source, making: _Making) -> None:
    making.look(source.config)
    if making.install(source, _aside) is None:
        fail(making.why_not)


def _aside(line: str) -> None:
    typer.echo(line, err=True)  # stdout is for answers


def first_model(model: str | None, settings: Settings, *, yes: bool = False, ask: bool = True) -> str | None:
    """Return the model to use, and install it if needed.

    A missing SmolLM2 is made at once if it is named: only for this name weights are fetched without asking. It is also
    made if no model is named or installed and its weights are here. Other models are pulled as `pulled` does.
    """
    from ssmd.installed import installed, is_for, is_usual
    from ssmd.model import smollm2
    from ssmd.refit import catalog
    from ssmd.runtime.info import target_of

    if model not in (None, smollm2.NAME):
        pulled(model, settings, yes=yes, ask=ask)
        return model
    there = installed(settings.models_dir)
    info, target = target_of(settings.runtime)
    named = target.name != info.name  # a device other than the runtime's usual one, such as npu
    fitting = [i for i in there if i.manifest is None or is_for(i.manifest, settings.runtime)]
    if not (named or settings.device):  # then an artifact for such a device does not count
        fitting = [i for i in fitting if i.manifest is None or is_usual(i.manifest)]
    if there if model is None else [i for i in fitting if i.name == model]:
        return model
    if model is None and smollm2_here(settings) is None:
        return model  # the caller raises an error that lists the models
    if not _some_runtime(settings.runtime, settings.device or (target.device_class if named else None)):
        if named:  # before anything is fetched
            why = catalog.why_runtime_unusable(target.name, settings.device or target.device_class)
            fail(f"runtime {target.name}: {why}; to run its artifacts on the processor add: --device cpu")
        return model

    settings.prepare_models()
    with smollm2_source(settings, _aside) as path, source_of(path) as source:
        _install_or_fail(source, _Making(settings, smollm2.NAME, settings.runtime))
    return smollm2.NAME


def _some_runtime(wanted: str, device: str | None = None) -> bool:
    """Return True if a runtime, or any for "auto", can run SmolLM2's artifact here.

    device: where; by default the processor, or the device of a packer's artifacts. Raises RuntimeUnavailable, which
    says what to install, if the runtime is not installed.
    """
    from ssmd.refit import catalog
    from ssmd.runtime.info import target_of
    from ssmd.runtime.protocol import get_runtime

    packer = packer_of(wanted)
    names = catalog.on_processor() if wanted == "auto" else [wanted]
    device = device or ("cpu" if packer is None else packer.device_class)
    if any((packer or catalog.files(name)) and catalog.why_runtime_unusable(name, device) == "" for name in names):
        return True
    get_runtime(target_of(names[0])[0].name)
    return False
