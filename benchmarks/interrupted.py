"""SIGKILLs of commands that write, spread over all of their work, and a look at what they leave.

Each command runs once undisturbed. Then copies of it are killed: at even numbers after a share of that time, at odd
numbers after a share of the changes that it made to files. After each kill the store must be sound, as far as it was
before, and have every turn. A file must be whole or absent. The same command must then succeed, and leave nothing else.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import sqlite3
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import commands
import mirror
from conftest import opened
from keeping import Chat
from refitting import stripped
from storewriter import SPEC

from ssmd.model.artifact import Artifact, ArtifactError
from ssmd.model.source import Source
from ssmd.refit import catalog
from ssmd.refit.install import ABANDONED_S
from ssmd.sessions.files.sessionfile import SessionFileError, open_session_file
from ssmd.sessions.fsck.repair import check
from ssmd.sessions.rows.database import FILE, PAGE_BYTES
from ssmd.sessions.store import Store
from ssmd.sessions.turn import StoreError

KILLS = 20  # of each command
SESSIONS, TURNS = 5, 3
LONGEST_S = 60.0
Told = dict[str, list[str]]  # by session: the text of its turns
_KEPT = re.compile(  # in a data directory
    rf"{re.escape(FILE)}(-wal|-shm|\.damaged-\d+)?|reserve|checked\.txt|made-here\.txt|daemon\.(log|lock|json)"
    r"|sources|models|token|config"
)


class Place:
    """A data directory for one run of a command, and a folder for the files that it writes."""

    def __init__(self, folder: Path, stock: Stock) -> None:
        self.folder, self.stock = folder, stock
        self.data, self.out = folder / "data", folder / "out"
        folder.mkdir(parents=True)
        self.out.mkdir()
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("SSMD_", "HF_"))}
        self.env = {**kept, "SSMD_DATA_DIR": str(self.data), "SSMD_PORT": "0", "HF_HOME": str(folder / "hf")}
        self.env |= {"XDG_CONFIG_HOME": str(folder / "config"), "XDG_CACHE_HOME": str(folder / "cache")}

    def with_store(self) -> None:
        """Put a store there whose last turns are in its log, as a killed daemon leaves it."""
        shutil.copytree(self.stock.store, self.data)

    def state(self) -> tuple[tuple[str, int, int], ...]:
        """Return the names, sizes and times of all files."""
        found: list[tuple[str, int, int]] = []
        waiting = [self.data, self.out]
        while waiting:
            with contextlib.suppress(OSError), os.scandir(waiting.pop()) as entries:
                for one in entries:
                    about = one.stat(follow_symlinks=False)
                    found.append((one.path, about.st_size, about.st_mtime_ns))
                    if one.is_dir(follow_symlinks=False):
                        waiting.append(Path(one.path))
        return tuple(sorted(found))

    def turns(self) -> Told:
        with contextlib.closing(Store.open(self.data, busy_ms=20_000)) as store:
            return {s.id: [t.messages[-1].content for t in store.turns(s.id)] for s in store.sessions()}


class Stock:
    """A store, files of its sessions, and a hub with a model, with which all runs begin."""

    def __init__(self, artifact: Path, folder: Path) -> None:
        self.artifact, self.folder = artifact, folder
        self.store, self.files, self.graphs = folder / "store", folder / "files", folder / "graphs"
        self.files.mkdir(parents=True)
        with contextlib.closing(Store.open(folder / "writer")) as store:
            for number in range(SESSIONS):
                chat = Chat(store, f"s{number}", SPEC)
                for turn in range(TURNS):
                    name, above = f"s{number}-{turn}", f"s{number}-{turn - 1}" if turn else None
                    chat.say(name, above, f"question {number} {turn}", f"answer {turn}", tokens=40)
            shutil.copytree(folder / "writer", self.store)
        self.told: Told = {f"s{n}": [f"question {n} {t}" for t in range(TURNS)] for n in range(SESSIONS)}
        self.hub: mirror.Mirror | None = None
        self.before = ""

    @contextlib.contextmanager
    def model(self) -> Iterator[None]:
        """Serve the source of a tiny model, of which the commands have a graph."""
        made = opened()
        built, source = Artifact.open(made["granite-int8"]), Source.open(made.source("granite-int8"))
        h = (graph := stripped(built, source, "tiny-granite")).header
        self.graphs.mkdir()
        graph.save(self.graphs / catalog.file_name(h.name, h.runtime, h.device_class, h.quantization))
        self.before = "from pathlib import Path; from ssmd.refit import catalog; "
        self.before += f"catalog.SHIPPED = Path({str(self.graphs)!r})"
        with mirror.running("acme/tiny-granite", made.source("granite-int8")) as self.hub:
            yield


@dataclass(frozen=True)
class Command:
    """A command. prepare: makes what it works on. words: of the command line. again: words to repeat it with.

    judge: raises AssertionError if what is there after a kill, or after the repetition (True), is wrong.
    once: returns True if the command did all of its work, and would be refused if repeated.
    """

    name: str
    prepare: Callable[[Place], None]
    words: Callable[[Place], list[str]]
    judge: Callable[[Place, bool], None]
    again: tuple[str, ...] = ()
    serves: bool = False  # it ends only by a signal
    once: Callable[[Place], bool] = lambda place: False


def _same(place: Place, done: bool) -> None:
    assert place.turns() == place.stock.told, "turns are missing"
    assert not (damages := check(place.data).damages), f"the store is not sound: {damages}"


def _new(place: Place, done: bool) -> None:
    assert not place.data.exists() or place.turns() == {}


def _removed(place: Place, done: bool) -> None:
    there = place.turns()
    wanted = {name: turns for name, turns in place.stock.told.items() if name != "s0"}
    assert there in ([wanted] if done else [wanted, place.stock.told]), f"there are {there}"
    assert not (damages := check(place.data).damages), f"the store is not sound: {damages}"


def _imported(place: Place, done: bool) -> None:
    there, told = place.turns(), place.stock.told
    assert {name: turns for name, turns in there.items() if name in told} == told, "turns are missing"
    more = [turns for name, turns in there.items() if name not in told]
    assert all(turns in told.values() for turns in more), "a part of a session was imported"
    assert not done or len(more) >= 2
    assert not (damages := check(place.data).damages), f"the store is not sound: {damages}"


def _repaired(place: Place, done: bool) -> None:
    if done:
        _same(place, done)
        return
    wanted = dict(place.stock.told)
    with contextlib.suppress(StoreError):  # it may still be torn
        there = place.turns()
        if "s1" not in there:  # its row was removed before
            del wanted["s1"]
        assert there == wanted, "turns are missing"


def _exported(place: Place, done: bool) -> None:
    _same(place, done)
    files = list(place.out.rglob("*.ssmd"))
    for file in files:
        with open_session_file(file) as reader:
            assert len(reader.document.turns) == TURNS
    assert not done or files


def _backed_up(place: Place, done: bool) -> None:
    _same(place, done)
    file = place.out / "backup" / FILE
    assert not done or file.exists()
    if file.exists():
        copy = place.folder / "restored"
        shutil.rmtree(copy, ignore_errors=True)
        copy.mkdir(mode=0o700)
        shutil.copy(file, copy)
        with contextlib.closing(Store.open(copy)) as store:
            assert sorted(store.ids()) == sorted(place.stock.told), "a backup is not whole"


def _pulled(place: Place, done: bool) -> None:
    made = list(place.data.glob("models/*/*/artifact.json"))
    for file in made:
        if not file.parent.name.startswith("."):
            Artifact.open(file.parent)
    assert not done or len(made) == 1, f"there are {made}"


def _damaged(place: Place) -> None:
    place.with_store()
    with contextlib.closing(sqlite3.connect(place.data / FILE)) as raw, raw:
        raw.execute("UPDATE piece SET data = zeroblob(length(data)) WHERE checkpoint % 3 = 0")
        raw.execute("DELETE FROM session WHERE id = 's1'")


def _torn(place: Place) -> None:
    place.with_store()
    with contextlib.closing(sqlite3.connect(place.data / FILE)) as raw:
        raw.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        (root,) = raw.execute("SELECT rootpage FROM sqlite_master WHERE name = 'piece'").fetchone()
    with (place.data / FILE).open("r+b") as file:
        file.seek((root - 1) * PAGE_BYTES)
        file.write(bytes(PAGE_BYTES))


def _importing(place: Place) -> list[str]:
    files = place.stock.files
    if not (files / "s0.ssmd").exists():
        env = {**place.env, "SSMD_DATA_DIR": str(place.stock.folder / "writer")}
        done = commands.ssmd("session", "export", "s0", "s1", "--into", str(files), env=env)
        assert done.returncode == 0, done.stderr
    return ["session", "import", str(files / "s0.ssmd"), str(files / "s1.ssmd")]


def _pulling(place: Place) -> list[str]:
    assert place.stock.hub is not None
    place.env["HF_ENDPOINT"] = place.stock.hub.url
    return ["pull", "tiny-granite"]


def _nothing(place: Place) -> None:
    pass


with_store = Place.with_store
COMMANDS = (
    Command("open, new", _nothing, lambda p: ["session", "list"], _new),
    Command("open", with_store, lambda p: ["session", "list"], _same),
    Command("session gc", with_store, lambda p: ["session", "gc", "--quota", "4MB"], _same),
    Command(
        "session rm", with_store, lambda p: ["session", "rm", "s0"], _removed, once=lambda p: "s0" not in p.turns()
    ),
    Command(
        *("session export", with_store),
        lambda p: ["session", "export", "s0", str(p.out / "talk.ssmd")],
        *(_exported, ("--force",)),
    ),
    Command(
        *("session export --all", with_store),
        lambda p: ["session", "export", "--all", "--into", str(p.out / "all")],
        *(_exported, ("--force",)),
    ),
    Command("session import", with_store, _importing, _imported),
    Command(
        *("backup", with_store),
        lambda p: ["backup", str(p.out / "backup")],
        _backed_up,
        once=lambda p: (p.out / "backup" / FILE).exists(),
    ),
    Command("check --repair, rows", _damaged, lambda p: ["session", "check", "--repair"], _repaired),
    Command("check --repair, torn", _torn, lambda p: ["session", "check", "--repair"], _repaired),
    Command("pull", _nothing, _pulling, _pulled, ("--force",)),
    Command(
        *("gc of the daemon", with_store),
        lambda p: ["serve", str(p.stock.artifact), "--quota", "4MB", "--threads", "1"],
        _same,
        serves=True,
    ),
)


def run(artifact: Path, first: int, count: int, seed: str, folder: Path) -> tuple[Counter[str], list[str]]:
    """Kill command `first // KILLS` `count` times; count the outcomes by its name."""
    command = COMMANDS[first // KILLS % len(COMMANDS)]
    with contextlib.ExitStack() as held:
        stock = Stock(artifact, folder / "stock")
        if command.name == "pull":
            held.enter_context(stock.model())
        return kill_often(command, stock, count, random.Random(f"{seed}:{command.name}"), folder)


def kill_often(
    command: Command, stock: Stock, count: int, rng: random.Random, folder: Path
) -> tuple[Counter[str], list[str]]:
    counts, failures = Counter[str](), list[str]()
    whole = Place(folder / "whole", stock)
    command.prepare(whole)
    seconds, changes, _ = _strike(command, whole, command.words(whole), LONGEST_S, None)
    for number in range(count):
        place = Place(folder / f"kill{number}", stock)
        command.prepare(place)
        share = (number // 2 + rng.random()) / -(-count // 2)
        words = command.words(place)
        if number % 2:
            _, seen, ended = _strike(command, place, words, LONGEST_S, 1 + int(share * changes))
        else:
            _, seen, ended = _strike(command, place, words, share * seconds, None)
        counts.update([f"{command.name}/injected"])
        counts.update([f"{command.name}/{'ended before' if ended else 'at work' if seen else 'at its beginning'}"])
        try:
            command.judge(place, False)
            if not command.once(place):
                _repeat(command, place, words)
                command.judge(place, True)
            _leaves_nothing(command, place, words)
        except (AssertionError, StoreError, SessionFileError, ArtifactError) as err:
            counts.update([f"{command.name}/failures"])
            failures.append(f"{command.name}, kill {number}: {type(err).__name__}: {err}")
        else:
            shutil.rmtree(place.folder)
    return counts, failures


def _strike(
    command: Command, place: Place, words: list[str], after_s: float, after_changes: int | None
) -> tuple[float, int, bool]:
    """Run a command, and kill it after a time or a number of changes of files, unless it has ended before.

    Returns the seconds that it ran, the changes that were seen, and True if it had ended.
    """
    started, before, changes = time.monotonic(), place.state(), 0
    process = commands.start(*words, env=place.env, before=place.stock.before)
    try:
        while time.monotonic() - started < after_s and process.poll() is None:
            if (now := place.state()) != before:
                before, changes = now, changes + 1
            if after_changes is not None and changes >= after_changes:
                break
            if command.serves and (place.data / "daemon.json").exists():
                return time.monotonic() - started, changes, True
            time.sleep(0.0005)
        return time.monotonic() - started, changes, process.poll() is not None
    finally:
        process.kill()
        process.communicate()


def _repeat(command: Command, place: Place, words: list[str]) -> None:
    if command.serves:
        _, _, ended = _strike(command, place, words, LONGEST_S, None)
        assert ended, "the daemon did not start again"
        return
    done: subprocess.CompletedProcess[str] = commands.ssmd(
        *words, *command.again, env=place.env, before=place.stock.before
    )
    assert done.returncode == 0, f"repeated, it fails: {done.stdout}{done.stderr}"


def _leaves_nothing(command: Command, place: Place, words: list[str]) -> None:
    abandoned = list(place.data.glob("models/*/.*"))
    if abandoned:  # a running build looks the same, so only an old one is removed
        for folder in abandoned:
            os.utime(folder, (time.time() - 2 * ABANDONED_S,) * 2)
        _repeat(command, place, words)
    left = [p.name for p in place.data.iterdir() if not _KEPT.fullmatch(p.name)]
    left += [str(p) for p in place.data.glob("sources/*/.*")] + [str(p) for p in place.data.glob("models/*/.*")]
    left += [str(p) for p in place.out.rglob("*") if p.name not in ("talk.ssmd", "all", "backup", FILE)]
    left = [name for name in left if not re.search(r"/all/s\d+\.ssmd$", name)]
    assert not left, f"left are {left}"
