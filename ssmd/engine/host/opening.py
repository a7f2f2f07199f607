"""From settings to a host: the models that it serves, the models it loads at the start, and how a model is opened."""

from __future__ import annotations

import logging
import math
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from ssmd.config import Settings, SettingsError
from ssmd.engine.decode.device import DeviceLock
from ssmd.engine.engine import Engine
from ssmd.engine.host.host import KEEP_ALIVE_S, Host
from ssmd.engine.host.models import Model, ModelIndex
from ssmd.engine.metrics import Metrics, ModelMetrics
from ssmd.engine.persist.writer import Writer
from ssmd.installed import places, resolve
from ssmd.machine.memory import available
from ssmd.machine.progress import announce
from ssmd.machine.size import show_size
from ssmd.model import aliases
from ssmd.model.artifact import Artifact, read_manifest
from ssmd.model.checked import CheckedArtifacts
from ssmd.model.made import is_made_here
from ssmd.model.state import StateSpec
from ssmd.runtime.loading import check_first_load, load
from ssmd.runtime.protocol import get_runtime
from ssmd.sessions.remote.link import Link
from ssmd.sessions.remote.postgres.address import is_address
from ssmd.sessions.remote.remote import RemoteError
from ssmd.sessions.remote.sharing import open_remote
from ssmd.sessions.store import Store
from ssmd.sessions.turn import StoreError
from ssmd.text.apart import Texts, opened

log = logging.getLogger(__name__)
_KEPT_TEXTS = 2  # tokenizers kept open, 20 to 60 MB each; to read one takes a tenth of a second and more
TOKENS = 2048  # assumed length of a conversation, if the context is no shorter
SIDES = 2  # copies of a recurrent state: one is read, the other written
PART = 0.75  # share of the free memory that choices may take


def open_host(settings: Settings, model: str | None, *, keep: bool, lazy: bool = False) -> Host:
    """Host `model`, or all installed models, and load those that are to be there at the start.

    A single model is loaded at once; with `lazy` only if `model` names it. `keep` False: no store, nothing is written.

    Raises Rejection if a model cannot be loaded, ModelError, ArtifactError, StoreError or SettingsError.
    """
    host, first = start_host(settings, model, keep=keep, lazy=lazy)
    try:
        first.result()
    except BaseException:
        close_host(host)
        raise
    return host


def start_host(settings: Settings, model: str | None, *, keep: bool, lazy: bool) -> tuple[Host, Future[None]]:
    """Return a host as `open_host` does, and its first loads, which have begun. Their error is a Rejection."""
    shelf = _shelf(settings, model)
    there = shelf.models()
    if not there:
        resolve(None, settings.models_dir)  # raises ModelError, which says what to do
    alone = len(there) == 1 and not (lazy and model is None)
    numbers, writer = Metrics(), None
    if keep:
        if settings.ack == "remote" and (settings.remote is None or not is_address(settings.remote)):
            raise SettingsError("ack = 'remote': this needs a database as `remote`; a folder acknowledges nothing")
        settings.prepare()
        store = Store.open(settings.data_dir, quota=settings.quota)
        store.room.reserve()
        _within_quota(store)
        writer = Writer(store, numbers, settings.prompt_cache_retention)
        if settings.remote is not None:
            writer.remote = _linked(store, settings.remote, acknowledges=settings.ack == "remote")
    keep_alive_s = settings.keep_alive
    if keep_alive_s is None:
        keep_alive_s = math.inf if alone else KEEP_ALIVE_S
    opener = Opener(settings, writer)
    host = Host(
        shelf,
        opener,
        numbers,
        writer,
        trial=opener.try_out,
        keep_alive_s=keep_alive_s,
        budget=settings.memory_budget,
        max_waiting=settings.max_queue,
    )
    try:
        for name in (*settings.preload, *settings.pin):
            shelf.installed(name)
        for name in settings.pin:
            host.pin(shelf.installed(name), True)
    except BaseException:
        close_host(host)
        raise
    names = dict.fromkeys([there[0].id] if alone else [*settings.pin, *settings.preload])
    first = Future[None]()

    def load_all() -> None:
        try:
            for name in names:
                host.load(shelf.installed(name)).result().release()
            first.set_result(None)
        except BaseException as err:
            first.set_exception(err)

    if names:
        threading.Thread(target=load_all, name="ssmd-first", daemon=True).start()
    else:
        first.set_result(None)
    return host, first


def close_host(host: Host) -> None:
    """Close a host and its store."""
    host.close()
    if host.writer is not None:
        if host.writer.remote is not None:
            host.writer.remote.close()
        host.writer.store.close()


def _linked(store: Store, remote: str, *, acknowledges: bool) -> Link:
    """Link a store to a remote. Raises RemoteError if it is no remote, but not if it is away."""
    link = Link(store, partial(open_remote, store, remote), acknowledges=acknowledges)
    try:
        link.connect()
    except RemoteError as err:
        if err.lasting:
            store.close()
            raise
        log.warning("%s; what is said waits here until it is back", err)
    link.start()
    return link


def _shelf(settings: Settings, model: str | None) -> ModelIndex:
    others = aliases.parse(settings.aliases)
    if model is None:
        where = partial(places, settings.models_dir)
        return ModelIndex(where, settings.runtime, settings.device, settings.defaults, others)
    path = resolve(model, settings.models_dir, settings.runtime, settings.device)
    place = read_manifest(path).name, path
    return ModelIndex(lambda: [place], device=settings.device, defaults=settings.defaults, aliases=others)


class Opener:
    """Loads models and starts their engines, as `settings` say. writer: of the store in which all keep their turns."""

    def __init__(self, settings: Settings, writer: Writer | None) -> None:
        self._settings, self._writer = settings, writer
        self._checked = CheckedArtifacts(None if writer is None else settings.data_dir)
        self._turns: dict[str, DeviceLock] = {}  # by device, which its programs share
        self._texts: OrderedDict[str, Texts] = OrderedDict()  # of models made here, last used last

    def __call__(self, model: Model, numbers: ModelMetrics, room: Callable[[int], bool]) -> Engine:
        """Load a model and start its engine. room: returns True if its answers may take that many more bytes of memory.

        Its template and tokenizer are opened beside the graph. Raises ArtifactError, RuntimeUnavailable, ProgramError,
        TemplateError or TokenizerError.
        """
        settings, artifact = self._settings, self._checked.open(model.path)
        made_here = is_made_here(artifact.path, settings.data_dir)
        with ThreadPoolExecutor(1, "ssmd-texts") as beside:
            opening = beside.submit(self._open_texts, artifact, made_here)
            announce("reading its weights")
            try:
                program = load(artifact, made_here=made_here, device=settings.device, threads=settings.threads)
            except BaseException:
                if opening.exception() is None:
                    opening.result().close()
                raise
        texts = None
        try:
            announce("opening its tokenizer and its chat template")
            texts = opening.result()
            device = settings.device or artifact.manifest.device_class
            max_running, spare_choices = affordable(program.spec, program.context, settings.max_running)
            per_choice = choice_bytes(program.spec, program.context)
            if settings.memory_budget is not None and not room(max_running * per_choice):
                fitting = next((n for n in range(max_running - 1, 1, -1) if room(n * per_choice)), 1)
                log.warning("the memory budget has room for %d choices at a time, not for %d", fitting, max_running)
            engine = Engine(
                artifact,
                program,
                self._writer,
                metrics=numbers,
                device=device,
                turns=self._turns.setdefault(device, DeviceLock()),
                max_running=max_running,
                spare_choices=spare_choices,
                choice_bytes=per_choice,
                room=room,
                max_queue=settings.max_queue,
                texts=texts,
            )
            engine.start(warm_up=True)
        except BaseException:
            program.close()
            if texts is not None:
                texts.close()
            raise
        return engine

    def try_out(self, model: Model) -> None:
        """Load a model that was not made here, in a process of its own. Raises ArtifactError or RuntimeUnavailable."""
        artifact = self._checked.open(model.path)
        if not is_made_here(artifact.path, self._settings.data_dir):
            check_first_load(artifact, get_runtime(artifact.manifest.runtime), self._settings.device)

    def _open_texts(self, artifact: Artifact, made_here: bool) -> Texts:
        """Open a model's tokenizer and template. The last used ones of models made here are kept open.

        Models for several runtimes share them, and a model that is loaded again finds them.
        """
        if not made_here:
            return opened(artifact, apart=True)
        m = artifact.manifest
        files = [m.files[name].sha256 for name in ("tokenizer.json", "chat_template.jinja")]
        key = repr((files, m.stop_tokens, m.special_tokens))
        texts = self._texts.pop(key, None) or opened(artifact, apart=False)
        self._texts[key] = texts
        while len(self._texts) > _KEPT_TEXTS:
            self._texts.popitem(last=False)
        return texts


def _within_quota(store: Store) -> None:
    """Free checkpoints if the quota is smaller than the store. If the store is busy, its next commit does it."""
    if store.quota is None or store.bytes_stored() <= store.quota:
        return
    try:
        done = store.collect()
    except StoreError as err:
        log.warning("the store could not be brought within its quota: %s", err)
        return
    log.warning(
        "the store exceeded its quota of %s: %d checkpoints of %d sessions were removed, %s; %s are left",
        *(show_size(store.quota), done.checkpoints, len(done.sessions), show_size(done.nbytes), show_size(done.left)),
    )


def choice_bytes(spec: StateSpec, context: int | None) -> int:
    """Return the bytes of memory of a choice that decodes, with a conversation of TOKENS tokens."""
    tokens = TOKENS if context is None else min(context, TOKENS)
    rows = sum(t.nbytes_at(tokens) * 4 // t.numpy_dtype.itemsize + t.nbytes_at(tokens) for t in spec.rows)
    return SIDES * sum(t.nbytes_at(0) for t in spec.recurrent) + rows  # rows as float32, and as they are stored


def affordable(spec: StateSpec, context: int | None, asked: int, free: int | None = None) -> tuple[int, int]:
    """Return how many of the `asked` choices fit into memory, and how many spare lanes fit beside them.

    At least one of each. Spare lanes: as many again, if there is memory for them. Logs a warning if fewer choices fit.
    free: bytes that can still be taken; by default the system's figure.
    """
    free = available() if free is None else free
    if free is None:
        return asked, asked
    each = choice_bytes(spec, context)
    fitting = int(PART * free) // each
    if fitting >= asked:
        return asked, max(1, min(asked, fitting - asked))
    found = max(1, fitting)
    log.warning(
        "there is memory for %d choices at a time, not for %d: %s are free, and a choice of %d tokens takes %s",
        *(found, asked, show_size(free), TOKENS if context is None else min(context, TOKENS), show_size(each)),
    )
    return found, 1
