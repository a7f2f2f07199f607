"""`ssmd pull`: fetches a source checkpoint from the Hugging Face hub, and makes an artifact if ssmd has its graph."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ssmd.cli import options
from ssmd.cli.making import (
    check_target,
    check_texts,
    fetch,
    fetch_file,
    hint,
    keep_defaults,
    name_of,
    noted,
    packer_of,
    smollm2_here,
    smollm2_source,
    source_of,
)
from ssmd.cli.output import USAGE, fail

if TYPE_CHECKING:
    from ssmd.config import Settings
    from ssmd.machine.progress import Progress
    from ssmd.model.artifact import Artifact
    from ssmd.model.source import Source

EACH_S = 0.2  # s between two reported lines of one stage
_ON_A_HUB = re.compile(r"([^:/]+/[^:/]+):(.+)")  # owner/name:FILE
_BEHIND_OTHERS = 15  # priority, on the scale of nice


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
    context: Annotated[
        int | None,
        typer.Option(
            help="Tokens that a conversation can have; else the model's own, 32768 at most.", metavar="N", min=1
        ),
    ] = None,
    data_dir: options.DataDir = None,
    models_dir: options.ModelsDir = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the artifact if it exists.")] = False,
    offline: options.Offline = False,
    as_json: options.Json = False,
    report: Annotated[bool, typer.Option("--report", hidden=True)] = False,  # for the daemon that started it
) -> None:
    """Fetch a model and make it ready to run; the same command goes on where a broken one stopped.

    Where ssmd has the model's stripped graph, its weights are put into that in seconds; the others take `ssmd build`.
    Only safetensors, json, tokenizer and chat template are fetched, or the one GGUF file that --from names; pickled
    weights are refused. HF_ENDPOINT names another hub, HF_TOKEN is sent to that hub alone; with HF_HUB_OFFLINE=1
    nothing is fetched.
    """
    with reporting() if report else contextlib.nullcontext():
        _pull(name, revision, folder, to, runtime, context, data_dir, models_dir, force, offline, as_json, report)


def _pull(
    name: str,
    revision: str,
    folder: Path | None,
    to: Path | None,
    runtime: str | None,
    context: int | None,
    data_dir: Path | None,
    models_dir: Path | None,
    force: bool,
    offline: bool,
    as_json: bool,
    report: bool,
) -> None:
    from ssmd.config import Settings
    from ssmd.model import smollm2
    from ssmd.refit import catalog
    from ssmd.runtime.info import target_of

    settings = Settings(data_dir=data_dir, models_dir=models_dir, offline=offline or None)
    if folder is None and (on_hub := _ON_A_HUB.fullmatch(name)):
        if to is not None:
            fail("--to fetches a whole checkpoint, not one file of it: leave out --to, or the file's name", USAGE)
        folder, name = Path(name), Path(on_hub[2]).stem
    if to is not None and (folder is not None or runtime is not None or context is not None):
        fail("--to only fetches: leave out --from, --runtime and --context", USAGE)
    if to is None:
        settings.prepare_models()  # before anything is fetched
    said: dict[str, object] = {"name": name}
    say = _silent if as_json or report else typer.echo
    # before anything is fetched in vain
    ready = (runtime is not None and target_of(runtime)[0].builds_anywhere) or _some_runtime(runtime or "auto")
    if name == smollm2.NAME and folder is None and to is None and not ready and runtime:
        why = catalog.why_runtime_unusable(runtime) or f"ssmd has no stripped graphs for runtime {runtime}"
        fail(f"{why}; with PyTorch it can be built: ssmd build {name} --runtime {runtime}")
    with _source(name, revision, folder, to, runtime, settings, said, say) as path:
        known = said.get("path", path)
        artifact = None
        if to is None:
            with source_of(path) as source:
                if name != smollm2.NAME or folder is not None:
                    check_texts(source)
                artifact, why_not = _install(
                    source,
                    name.rpartition("/")[2],
                    runtime or "auto",
                    settings,
                    say,
                    context=context,
                    force=force,
                    whose=str(said["name"]),
                )
            if artifact is None and (runtime is not None or folder is not None or report):  # an artifact was wanted
                way = _way(path) if runtime is None else f" --runtime {runtime}"
                advice = f"ssmd build {name if folder is None else path}{way}"
                fail(f"{why_not}; with PyTorch it can be built: {advice}")
            if artifact is None and not as_json:
                typer.echo(why_not)
    if as_json or report:
        typer.echo(json.dumps({**said, "artifact": None if artifact is None else str(artifact)}, indent=1))
    elif artifact is None:
        typer.echo(f"{known}; try: ssmd build {name if to is None and folder is None else known}{_way(path)}")


def _way(source: Path) -> str:
    """Return what `ssmd build` needs beside a checkpoint's name: the runtime, where its usual one does not serve it."""
    from ssmd.families.fields import FamilyError
    from ssmd.model.source import SourceError, read_json
    from ssmd.refit.install import with_experts
    from ssmd.runtime.info import targets

    try:
        check_target(read_json(source / "config.json"), targets()[0])
    except FamilyError:
        return f" --runtime {with_experts()[0]}"
    except SourceError:  # a GGUF file, which has none
        return ""
    return ""


def _silent(line: str) -> None:
    pass


def _install(
    source: Source,
    name: str,
    runtime: str,
    settings: Settings,
    say: Progress,
    *,
    context: int | None = None,
    force: bool = False,
    whose: str = "",
) -> tuple[Path | None, str]:
    """Make the artifact of a source checkpoint; return (its folder, ""), or (None, reason) if ssmd has no graph of it.

    An installed one is kept, unless `force`. context: the tokens that a conversation can have; by default the model's
    own. whose: the source's name, if not `name`.
    """
    from ssmd.hub.download import check_room
    from ssmd.machine.size import show_size
    from ssmd.refit import catalog
    from ssmd.refit.gguf import loss
    from ssmd.refit.gguf.source import GGUFSource
    from ssmd.refit.refit import bounded
    from ssmd.runtime.info import info_of

    check_target(source.config, runtime)
    packer, sizes, cost = packer_of(runtime), dict[str, int](), ""  # sizes: bytes of files to be written
    make: Callable[[], Artifact]
    if packer is not None:
        out = _folder(settings, name, packer.runtime, packer.device_class, packer.quantizations[0])
        most, tiers = context, None if context is None else [context]
        make = partial(packer.build, source, out, name=name, tiers=tiers, replace=True, progress=say)
    else:
        graph, why_not = catalog.choose_graph(source.config, catalog.on_processor() if runtime == "auto" else [runtime])
        if graph is None:
            return None, why_not
        h = graph.header
        out = _folder(settings, name, h.runtime, h.device_class, h.quantization)
        most = bounded(h, source.config, context)[-1]  # before anything is replaced
        sizes = {f.name: f.size for f in h.files}
        cost = info_of(h.runtime).first_load(h.device_class, sizes)
        make = partial(catalog.install, graph, source, out, name=name, context=context, progress=say)
    if out.exists() and not force:
        has = _context_of(out)
        other = most is not None and has is not None and has != most
        again = f", for conversations of {has} tokens; --force makes it again, for {most}"
        say(f"{out} is here already{again if other else '; --force makes it again'}")
        return out, ""
    check_room(sum(sizes.values()), settings.models_dir, "SSMD_MODELS_DIR", "written")
    if cost:
        say(cost)
    manifest = make().manifest
    if isinstance(source, GGUFSource):
        say(loss.sentence(source, None if packer is not None else h, manifest.quantization))
    keep_defaults(source.path, whose or name, out, say)
    noted(out, settings)
    say(f"{out}: {show_size(sum(f.size for f in manifest.files.values()))}; {hint(manifest, name)}")
    return out, ""


def _folder(settings: Settings, name: str, runtime: str, device_class: str, quantization: str) -> Path:
    return settings.models_dir / name_of(name) / f"{runtime}-{device_class}-{quantization}"


def _context_of(artifact: Path) -> int | None:
    """Return the most tokens of a conversation with an artifact; None if unbounded, or if it cannot be read."""
    from ssmd.model.artifact import ArtifactError, read_manifest

    try:
        return read_manifest(artifact).context
    except ArtifactError:
        return None


@contextmanager
def _source(
    name: str,
    revision: str,
    folder: Path | None,
    to: Path | None,
    runtime: str | None,
    settings: Settings,
    said: dict[str, object],
    say: Progress,
) -> Iterator[Path]:
    """Yield the folder of the source checkpoint. `said` gets the facts of its origin."""
    from ssmd.hub.hub import is_name
    from ssmd.model import smollm2
    from ssmd.refit import catalog

    if folder is not None:
        on_hub = None if folder.exists() else _ON_A_HUB.fullmatch(folder.as_posix())
        if on_hub is None:
            said["path"] = str(folder)
            yield folder
            return
        done = fetch_file(on_hub[1], on_hub[2], revision, settings, say=say)
        said |= {"revision": done.revision, "commit": done.commit, "path": str(done.path)}
        said |= {"fetched": done.fetched, "files": done.files}
        yield done.path
        return
    if name == smollm2.NAME and to is None and revision == "main":
        with smollm2_source(settings, say) as path:
            yield path
        return
    on_hub_as = name if is_name(name) else catalog.origin_of(name)
    done = fetch(on_hub_as, revision, settings, to, say=say, runtime=runtime)
    said |= {"name": done.name, "revision": done.revision, "commit": done.commit, "path": str(done.path)}
    said |= {"fetched": done.fetched, "files": done.files}
    yield done.path


def pulled(model: str | None, settings: Settings, *, yes: bool = False, ask: bool = True) -> bool:
    """Pull a missing model that ssmd has a graph of, with `yes`, or if `ask` and the user at a terminal agrees.

    Returns True if it was pulled. If not, the error that follows names the command.
    """
    from ssmd.hub import hub
    from ssmd.hub.pull import find, nbytes_of
    from ssmd.installed import places
    from ssmd.machine.size import show_size
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
    with source_of(fetch(origin, "main", settings, say=_aside).path) as source:
        check_texts(source)
        _install_or_fail(source, name, runtime, settings)
    return True


def _install_or_fail(source: Source, name: str, runtime: str, settings: Settings) -> None:
    made, why_not = _install(source, name, runtime, settings, _aside)
    if made is None:
        fail(why_not)


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
        _install_or_fail(source, smollm2.NAME, settings.runtime, settings)
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


@contextlib.contextmanager
def reporting() -> Iterator[None]:
    """Report the progress of all work inside as lines: {"stage", "done", "total", "unit"}, null if unknown.

    Such a process has a low priority. It ends as by Ctrl-C when the daemon closes its stdin, or is gone.
    """
    from ssmd.machine.processor import behind_others
    from ssmd.machine.progress import reported

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a daemon in the background may have it ignored
    behind_others(_BEHIND_OTHERS)
    news = _News(os.dup(1))  # a descriptor of its own: a stage holds stdout back
    threading.Thread(target=news.write_on, daemon=True).start()
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    with reported(news.tell):
        yield


class _News:
    """The last progress, until it is written."""

    def __init__(self, out: int) -> None:
        self._out = out
        self._lock = threading.Lock()
        self._stage, self._line = "", b""

    def tell(self, stage: str, done: int, total: int, unit: str) -> None:
        """Take the progress of a stage. A new stage is written at once."""
        known = {"done": done if total else None, "total": total or None, "unit": unit or None}
        with self._lock:
            new, self._stage = stage != self._stage, stage
            self._line = json.dumps({"stage": stage, **known}).encode() + b"\n"
            if new:
                self._write()

    def write_on(self) -> None:
        """Write new progress every EACH_S, for ever."""
        while True:
            time.sleep(EACH_S)
            with self._lock:
                self._write()

    def _write(self) -> None:
        line, self._line = self._line, b""
        with contextlib.suppress(OSError):  # the daemon is gone, and this process ends in a moment
            os.write(self._out, line)


def _end_with_stdin() -> None:
    with contextlib.suppress(OSError):
        while os.read(0, 4096):
            pass
    if sys.platform == "win32":
        import _thread

        _thread.interrupt_main()
    else:
        os.kill(os.getpid(), signal.SIGINT)
