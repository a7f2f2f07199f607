"""Source checkpoints pulled from a hub: <data dir>/sources/<owner>--<name>/<commit>/, each whole or not there.

During a download its files are in the hidden folder beside it that ends in .partial. Files there are hashed again
before they are used. Only files that `Source` reads are downloaded, so a name that a server invents never becomes a
path.

A source that was fetched to make one artifact is temporary: a hidden file beside it, its mark, says so. The command
that makes the artifact holds the mark, and removes the source afterwards. After a kill the next command goes on with
the source, and removes it then.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock

from ssmd.families.fields import FamilyError
from ssmd.families.registry import family_of
from ssmd.hub import hub
from ssmd.hub.download import LOCK, Progress, check_room, download, held
from ssmd.hub.hub import COMMIT, HubError, HubFile, HubUnreachable, Listing
from ssmd.machine.size import show_size
from ssmd.model.source import (
    INDEX,
    MAX_JSON_BYTES,
    PICKLES,
    SHARD_NAME,
    WEIGHTS,
    Source,
    SourceError,
    read_json,
    weight_map,
)

CONFIG, TOKENIZER = "config.json", "tokenizer.json"
OPTIONAL = ("generation_config.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
RECORD = "pulled.json"  # in the folder: its origin, its commit, the files' hashes
REVISIONS = "revisions.json"  # beside the folders: the commit of each branch or tag when it was pulled
OFFLINE = "--offline, SSMD_OFFLINE or HF_HUB_OFFLINE"  # one of them is set; it is not known here which one
GGUF_FOLDER, GGUF_NAME = "gguf", re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}\.gguf")
REMOVED = ".removed"  # ends the hidden name of a source that is being removed
MAX_SHOWN = 20  # names of files in a message
MAX_SHARDS = 2000  # files of weights; the largest models have some 200


@dataclass(frozen=True)
class Purpose:
    """The artifact that a source is fetched for. nbytes: what it takes of the disk of `folder`, beside the source.

    temporary: the source is removed when the artifact is there. needed: False if the artifact is there already.
    """

    folder: Path | None = None
    nbytes: int = 0
    temporary: bool = False
    needed: bool = True


Look = Callable[[Mapping[str, Any]], Purpose]  # takes a config.json; raises FamilyError if it cannot be built
KEPT = Purpose()  # of a source that stays


@dataclass(frozen=True)
class PulledSource:
    """A source checkpoint from a hub. files: their sizes in bytes. fetched: this call downloaded it.

    `path` is not there if the artifact that it would be fetched for is.
    """

    name: str
    revision: str
    commit: str
    path: Path
    files: dict[str, int]
    fetched: bool

    @property
    def nbytes(self) -> int:
        return sum(self.files.values())


def find(name: str, revision: str, data_dir: Path) -> PulledSource | None:
    """Return the checkpoint pulled for a branch, tag or commit, without a request. Raises HubError if it is damaged."""
    home = _home(name, data_dir)
    commit = revision if COMMIT.fullmatch(revision) else _revisions(home).get(revision)
    if commit is None or not (home / commit).is_dir():
        return None
    return PulledSource(name, revision, commit, home / commit, _whole(home / commit), fetched=False)


def pull(
    name: str,
    revision: str,
    data_dir: Path,
    progress: Progress,
    to: Path | None = None,
    *,
    offline: bool = False,
    look: Look = lambda config: KEPT,
) -> PulledSource:
    """Download the present commit of `revision` of `name` into `to` or the data directory, unless it is there.

    The hub's list is requested first, then config.json, which must be of a supported family. look: returns the purpose
    of a source with that config.json; what it raises ends the call before any weights are fetched. Raises HubError,
    FamilyError or SourceError. Then the folder is not there, and downloaded bytes are kept for the next call.
    """
    if offline or hub.offline():
        pulled = _offline(name, revision, data_dir, to)
        look(read_json(pulled.path / CONFIG))
        return pulled
    try:
        listing = hub.listing(name, revision)
    except HubUnreachable as err:
        here = find(name, revision, data_dir)
        raise err if here is None else HubUnreachable(f"{err}. Pulled before: {here.path}") from err
    home = _home(name, data_dir)
    folder = home / listing.commit if to is None else to
    _sweep(home)
    if to is None and folder.is_dir():
        sizes = _whole(folder)
        look(read_json(folder / CONFIG))
        _remember(home, revision, listing.commit)
        return PulledSource(name, revision, listing.commit, folder, sizes, fetched=False)
    if to is not None and (to.is_symlink() or to.exists()) and not (to.is_dir() and not any(to.iterdir())):
        raise HubError(f"{to} exists and is not an empty folder; --to takes a new one")
    _may_be_pulled(listing)
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.parent / f".{folder.name}-{listing.commit[:12]}.partial"
    with held(partial, name):
        files, purpose = _fetch(listing, partial, progress, look)
        if not purpose.needed:
            return PulledSource(name, revision, listing.commit, folder, {}, fetched=False)
        if to is None:
            _mark(folder, purpose)
        _seal(listing, partial, folder, files)
    if to is None:
        _remember(home, revision, listing.commit)
    return PulledSource(name, revision, listing.commit, folder, {f.name: f.size for f in files}, fetched=True)


def pull_file(
    name: str,
    file: str,
    revision: str,
    data_dir: Path,
    progress: Progress,
    *,
    offline: bool = False,
    purpose: Purpose = KEPT,
) -> PulledSource:
    """Download one GGUF file of the present commit of `revision` of `name`, unless it is there; `path` is the file.

    Files are in <data dir>/sources/<owner>--<name>/gguf/<commit>/, and incomplete ones in a hidden folder beside it.
    Raises HubError. Then no such file is there, and downloaded bytes are kept for the next call.
    """
    home = _home(name, data_dir) / GGUF_FOLDER
    if not GGUF_NAME.fullmatch(file):
        raise HubError(f"{file[:80]!r} is not a file's name for {name}: expected one as NAME.gguf, without folders")
    if offline or hub.offline():
        commit = revision if COMMIT.fullmatch(revision) else _revisions(home).get(revision, "")
        place = home / commit / file
        if not purpose.needed and not place.is_file():
            return PulledSource(name, revision, commit, place, {}, fetched=False)
        if not commit or not place.is_file():
            raise HubError(f"{file} of {name} at {revision!r} is not here and {OFFLINE} forbids fetching it")
        return PulledSource(name, revision, commit, place, {file: place.stat().st_size}, fetched=False)
    listing = hub.listing(name, revision)
    if file not in listing.entries:
        there = sorted(n for n in listing.entries if GGUF_NAME.fullmatch(n))
        shown = ", ".join(there[:MAX_SHOWN]) + (" and more" if len(there) > MAX_SHOWN else "")
        raise HubError(f"{name} has no file {file} at {revision}; its GGUF files: {shown or 'none'}")
    listed = listing.file(file)
    place = home / listing.commit / file
    _sweep(place.parent)
    found = place.is_file() and place.stat().st_size == listed.size
    if not found and not purpose.needed:
        return PulledSource(name, revision, listing.commit, place, {}, fetched=False)
    if not found:
        place.parent.mkdir(parents=True, exist_ok=True)
        partial = place.parent.with_name(f".{listing.commit}.partial")
        with held(partial, name):
            _room([listed], partial, purpose)
            download(listing, listed, partial / file, progress)
            _mark(place, purpose)
            (partial / file).replace(place)
    _remember(home, revision, listing.commit)
    return PulledSource(name, revision, listing.commit, place, {file: listed.size}, fetched=not found)


@contextmanager
def used_up(source: PulledSource, *, keep: bool = False) -> Iterator[None]:
    """Hold a temporary source for this process, and remove it if the body ends without an error.

    keep: it stays, and is not temporary any more. Other sources are left as they are. Raises HubError if another
    process holds it.
    """
    mark = _mark_of(source.path)
    if not mark.exists():
        yield
        return
    file = mark.with_suffix(".lock")  # not the mark: a lock makes its file anew, and the mark may be gone by then
    lock = filelock.FileLock(file, timeout=0)
    try:
        lock.acquire()
    except filelock.Timeout as err:
        raise HubError(f"another ssmd makes a model of {source.name} right now: wait for it") from err
    try:
        if not source.path.exists():  # removed by another process, a moment ago
            raise HubError(f"another ssmd made a model of {source.name} and removed its source: run this again")
        temporary = mark.exists() and not keep  # another process may have kept it, a moment ago
        yield
        if temporary:
            removed = source.path.with_name(f".{source.path.name}{REMOVED}")
            source.path.rename(removed)  # a name that no command takes for a source, if this process is killed now
            _sweep(removed.parent)
    finally:
        if keep or not source.path.exists():
            mark.unlink(missing_ok=True)
        with suppress(OSError):  # Windows removes no open file
            file.unlink()
        lock.release()


def _mark_of(source: Path) -> Path:
    return source.with_name(f".{source.name}.temporary")


def _mark(source: Path, purpose: Purpose) -> None:
    """Mark a source that is about to be put in place as temporary, or as one that stays."""
    if purpose.temporary:
        _mark_of(source).touch()
    else:
        _mark_of(source).unlink(missing_ok=True)


def _sweep(folder: Path) -> None:
    """Finish the removal of sources by processes that were killed."""
    for left in folder.glob(f".*{REMOVED}"):
        if left.is_dir() and not left.is_symlink():
            shutil.rmtree(left, ignore_errors=True)
        else:
            left.unlink(missing_ok=True)


def nbytes_of(name: str, revision: str) -> int:
    """Return the bytes that `pull` would fetch for a model, by the hub's list. Raises HubError."""
    listing = hub.listing(name, revision)
    _may_be_pulled(listing)
    weights = [WEIGHTS] if WEIGHTS in listing.entries else [n for n in listing.entries if SHARD_NAME.fullmatch(n)]
    files = [*(n for n in (CONFIG, TOKENIZER, *OPTIONAL) if n in listing.entries), *weights]
    return sum(listing.file(n).size for n in files)


def _offline(name: str, revision: str, data_dir: Path, to: Path | None) -> PulledSource:
    here = find(name, revision, data_dir)
    if here is None:
        raise HubError(
            f"{name} at {revision!r} is not here and {OFFLINE} forbids fetching it: leave that out once, or take a "
            f"folder that is here: {hub.OTHERWISE}"
        )
    if to is not None:
        raise HubError(f"{OFFLINE} forbids fetching into {to}; what was pulled before is at {here.path}")
    return here


def _may_be_pulled(listing: Listing) -> None:
    """Check by the list alone that ssmd may be able to build this. Raises HubError."""
    there = listing.entries
    if CONFIG not in there:
        raise HubError(f"{listing.name} has no {CONFIG}: it is not a whole model of the transformers library")
    if WEIGHTS not in there and INDEX not in there:
        pickles = sorted(n for n in there if "/" not in n and n.endswith(PICKLES))
        if pickles:
            raise HubError(
                f"{listing.name} has its weights in {pickles[0]!r}, a pickle, which can run any code when it is read; "
                "ssmd takes safetensors only: look for the same model under a name that ends in -hf, for another "
                "revision (--revision refs/pr/N), or convert it on a disposable machine"
            )
        raise HubError(f"{listing.name} has neither {WEIGHTS} nor {INDEX}: ssmd builds from safetensors only")
    if TOKENIZER not in there:
        raise HubError(
            f"{listing.name} has no {TOKENIZER}; with transformers, AutoTokenizer.from_pretrained({listing.name!r})"
            ".save_pretrained(folder) makes one: put it beside the other files and build the folder"
        )


def _fetch(listing: Listing, partial: Path, progress: Progress, look: Look) -> tuple[list[HubFile], Purpose]:
    """Download all files, first the small ones and those by which the model may be refused."""
    settings = [listing.file(name) for name in (CONFIG, TOKENIZER, *OPTIONAL) if name in listing.entries]
    weights = [listing.file(WEIGHTS if WEIGHTS in listing.entries else INDEX)]
    small = [*settings, *(f for f in weights if f.name == INDEX)]
    for file in small:
        if file.size > MAX_JSON_BYTES:
            raise HubError(f"{listing.name}: {file.name} has {file.size} bytes; no more than {MAX_JSON_BYTES} are read")
    _room(small, partial)  # not of the weights yet: the artifact may be there
    _get(listing, settings[:1], partial, progress)
    try:
        config = read_json(partial / CONFIG)
        family_of(config).parse(config)
        purpose = look(config)
    except BaseException as err:
        _clear(partial)
        if not isinstance(err, (SourceError, FamilyError)):
            raise
        raise HubError(f"{listing.name} cannot be built: {str(err).replace(f'{partial}{os.sep}', '')}") from err
    if not purpose.needed:
        _clear(partial)
        return [], purpose
    if weights[0].name == INDEX:
        _get(listing, weights, partial, progress)
        weights += [listing.file(name) for name in _shards(listing, partial)]
    files = [*settings, *weights]
    _room(files, partial, purpose)
    _get(listing, files, partial, progress)
    return files, purpose


def _clear(partial: Path) -> None:
    """Remove what was fetched, unless it has weights: another call may go on with them."""
    if not any(SHARD_NAME.fullmatch(name) for name in os.listdir(partial)):
        shutil.rmtree(partial, ignore_errors=True)


def _shards(listing: Listing, partial: Path) -> list[str]:
    try:
        names = sorted(set(weight_map(partial / INDEX).values()))
    except SourceError as err:
        raise HubError(f"{listing.name}: {str(err).replace(f'{partial}{os.sep}', '')}") from err
    if len(names) > MAX_SHARDS:
        raise HubError(f"{listing.name}: {INDEX} names {len(names)} files; no more than {MAX_SHARDS} are fetched")
    if len({name.casefold() for name in names}) != len(names):
        raise HubError(f"{listing.name}: {INDEX} names files that differ in upper and lower case only")
    return names


def _get(listing: Listing, files: Iterable[HubFile], partial: Path, progress: Progress) -> None:
    for file in files:
        download(listing, file, partial / file.name, progress)


def _room(files: list[HubFile], partial: Path, purpose: Purpose = KEPT) -> None:
    """Check that the missing bytes fit on the disk, and the artifact beside them. Raises NoDiskSpace."""
    here = sum(min((partial / f.name).stat().st_size, f.size) for f in files if (partial / f.name).is_file())
    missing = sum(f.size for f in files) - here
    if purpose.folder is None:
        check_room(missing, partial, "--to DIR or SSMD_DATA_DIR")
    elif purpose.folder.stat().st_dev != partial.stat().st_dev:
        check_room(missing, partial, "SSMD_DATA_DIR")
        check_room(purpose.nbytes, purpose.folder, "SSMD_MODELS_DIR", "written")
    else:
        written = f"fetched and {show_size(purpose.nbytes)} to be written beside them" if purpose.nbytes else "fetched"
        check_room(missing, partial, "SSMD_DATA_DIR", written, beside=purpose.nbytes)


def _seal(listing: Listing, partial: Path, folder: Path, files: list[HubFile]) -> None:
    """Put the downloaded files in place, all at once."""
    try:
        Source.open(partial)
    except SourceError as err:  # the files are those that the hub lists: fetching them again would not help
        shutil.rmtree(partial, ignore_errors=True)
        raise HubError(f"{listing.name} at {listing.commit}: {str(err).replace(str(partial), 'it')}") from err
    hashes = {f.name: {"size": f.size, **({"sha256": f.sha256} if f.sha256 else {"git_blob": f.blob})} for f in files}
    record = {"name": listing.name, "hub": hub.host(), "revision": listing.revision, "commit": listing.commit}
    _write_json(partial / RECORD, {**record, "files": hashes})
    for stray in set(os.listdir(partial)) - {RECORD, LOCK, *hashes}:
        (partial / stray).unlink()
    partial.rename(folder)
    (folder / LOCK).unlink(missing_ok=True)


def _home(name: str, data_dir: Path) -> Path:
    if not hub.is_name(name):  # which also keeps the folder inside
        raise HubError(f"{name!r} is not a model's name; expected owner/name, such as ibm-granite/granite-4.0-h-350m")
    return data_dir / "sources" / name.replace("/", "--")


def _whole(folder: Path) -> dict[str, int]:
    """Return the files' bytes by name, from the folder's record. Raises HubError if a file is missing or differs."""
    try:
        sizes = {name: int(f["size"]) for name, f in read_json(folder / RECORD)["files"].items()}
        damaged = [n for n, size in sizes.items() if (folder / n).stat().st_size != size]
    except (SourceError, OSError, KeyError, TypeError, ValueError, AttributeError) as err:
        raise HubError(f"{folder} is not as it was pulled ({err}): remove it and pull again") from err
    if damaged:
        raise HubError(f"{folder} is not as it was pulled: {damaged[0]} has another size; remove it and pull again")
    return sizes


def _revisions(home: Path) -> dict[str, str]:
    try:
        commits = read_json(home / REVISIONS, optional=True)
    except SourceError:  # written anew by the next pull
        return {}
    return {r: c for r, c in commits.items() if isinstance(c, str) and COMMIT.fullmatch(c)}


def _remember(home: Path, revision: str, commit: str) -> None:
    commits = _revisions(home)
    if commits.get(revision) != commit:
        new = home / f".{REVISIONS}-{os.getpid()}"
        for left in home.glob(f".{REVISIONS}-*"):  # by a process that was killed
            left.unlink(missing_ok=True)
        _write_json(new, {**commits, revision: commit})
        new.replace(home / REVISIONS)


def _write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=1) + "\n", newline="\n")
