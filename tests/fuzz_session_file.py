"""Mutates session files and imports them, under a limit of memory. Run as a process by test_fuzz_session_file.py.

Each file is either refused or imported. A refusal is a SessionFileError or StoreError and leaves no trace. An imported
session has the words and the states of the file, and can be exported and removed. A damaged file is refused, one that
was only rewritten is imported. Anything else ends the process with a traceback that names the case.

Arguments: an empty folder, seed, first case, number of cases. Prints the results on stdout, as JSON. With the seed
"bombs" the files are those that ask for the most memory.
"""

from __future__ import annotations

import collections
import hashlib
import json
import os
import random
import re
import resource
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from forging import altered
from hostile import Parts, join, seal, split
from keeping import LINEAGE, SPECS, VOCABULARY, Chat, new_store
from numpy.typing import NDArray
from sqlalchemy import func, select

from ssmd.model.state import StateSpec, TensorSpec
from ssmd.sessions.files import sessionfile
from ssmd.sessions.files.transfer import LocalModel, export_session, import_session
from ssmd.sessions.rows.schema import checkpoint, layout, segment, turn
from ssmd.sessions.store import Store
from ssmd.sessions.turn import StoreError

Numbers = NDArray[np.float32]
# The limits of the format, all 128 times smaller: so that it shows whether they bound what an import takes.
SCALE = 128
LIMIT = sessionfile.MAX_FILE_BYTES // SCALE
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
CHANGES = {"os.mkdir", "os.rename", "os.link", "os.symlink", "os.remove", "os.rmdir", "os.chmod", "os.truncate"}
NEVER = {"os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "socket.connect", "ctypes.dlopen", "os.fork"}


def main(folder: Path, seed: str, first: int, count: int) -> None:
    sessionfile.MAX_FILE_BYTES = LIMIT
    sessionfile.MAX_HEADER_BYTES //= SCALE
    if seed == "make bombs":
        make_bombs(folder / "bombs")
        return
    bombs: list[Path] = []
    if seed == "bombs":  # made elsewhere: memory that was freed here would hide what an import takes
        command = [sys.executable, "-B", __file__, str(folder), "make bombs", "0", "0"]
        subprocess.run(command, check=True)
        bombs = sorted((folder / "bombs").glob("[0-9]*.ssmd"))
    examples = make_examples(folder / "made")
    store = new_store(folder / "data")
    for example in examples:  # whatever is loaded, started or cached at first use
        (folder / "in.ssmd").write_bytes(example)
        tried(store, folder / "in.ssmd", random.Random(0))
    before = peak = address_space()
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    watch(folder)
    outcomes: collections.Counter[str] = collections.Counter()
    for case in range(first, first + (len(bombs) or count)):
        rng = random.Random(f"{seed}:{case}")
        resource.setrlimit(resource.RLIMIT_AS, (before + 2 * LIMIT, resource.RLIM_INFINITY))
        try:
            if bombs:
                way, data = "bombs", b""
                os.replace(bombs[case], folder / "in.ssmd")
            else:
                way, data = altered(rng, examples)
                (folder / "in.ssmd").write_bytes(data)
            outcome = tried(store, folder / "in.ssmd", rng, fits=way in ("bombs", "rewritten"), free=bool(bombs))
            assert outcome == "refused" or way != "damaged" or data in examples
            assert outcome != "refused" or way != "rewritten"
            outcomes[f"{way}/{outcome}"] += 1
        except BaseException:
            print(f"case {case} of seed {seed}: {folder / 'in.ssmd'}", file=sys.stderr)
            raise
        peak = max(peak, 0 if bombs else address_space())
    store.close()
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - resident) << 10
    print(json.dumps({"outcomes": outcomes, "resident": grown, "mapped": peak - before, "limit": LIMIT}))


def apart(folder: Path, seed: str, first: int, count: int) -> dict[str, Any]:
    """Run this in a process of its own, with nothing beside `folder` to write to. What it says; `said` on stderr."""
    here = Path(__file__).parent
    for name in ("work", "home"):
        (folder / name).mkdir(mode=0o700)
    places = [str(here), str(here.parent), str(here.parent / "runtimes")]
    # One arena: each more would map 64 MiB that is not used.
    settings = {"MALLOC_ARENA_MAX": "1", "PYTHONPATH": os.pathsep.join(places), "HOME": str(folder / "home")}
    done = subprocess.run(
        [sys.executable, "-B", __file__, str(folder / "work"), seed, str(first), str(count)],
        env={**os.environ, **settings, "TMPDIR": str(folder / "home")},
        cwd=folder / "home",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert list((folder / "home").iterdir()) == []
    assert {p.name for p in (folder / "work").iterdir()} <= {"data", "made", "bombs", "in.ssmd", "out.ssmd"}
    data = {"sessions.sqlite3", "sessions.sqlite3-wal", "sessions.sqlite3-shm"}
    assert {p.name for p in (folder / "work" / "data").iterdir()} <= data
    return {**json.loads(done.stdout), "said": done.stderr}


def address_space() -> int:
    return int(re.findall(r"VmSize:\s+(\d+)", Path("/proc/self/status").read_text())[0]) << 10


def watch(folder: Path) -> None:
    """End the process if anything outside the folder is about to be changed. SQLite's own files are not seen here."""
    inside = f"{folder}{os.sep}"

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and args[2] & WRITES and not isinstance(args[0], int):
            places: tuple[Any, ...] = (args[0],)
        elif event in CHANGES:
            places = tuple(a for a in args[:2] if isinstance(a, str | bytes | os.PathLike))
        else:
            if event in NEVER:
                os.write(2, f"{event} {args!r}\n".encode())
                os._exit(3)
            return
        for place in places:
            if not os.path.abspath(os.fsdecode(place)).startswith(inside):
                os.write(2, f"{event} {place!r} is outside\n".encode())
                os._exit(3)

    sys.addaudithook(hook)


def make_examples(folder: Path) -> list[bytes]:
    examples = [(Path(__file__).parent / "data" / "session-file-2-states.ssmd").read_bytes()]
    for name, spec in SPECS.items():
        store = new_store(folder / name)
        chat = Chat(store, "s", spec)
        chat.say("t1", None, "hi", "hello", system="Be brief. 東京 \U0001f600", tokens=5)
        chat.say("t2", "t1", "more", "sure", tokens=5)
        chat.say("t2b", "t1", "less", "fine", tokens=5)
        chat.say("t3", "t2", "and now?", " the end\n", tokens=5)
        for states in ("newest", "all", "none"):
            file = folder / f"{name}-{states}.ssmd"
            export_session(store, "s", file, states=states)
            examples.append(file.read_bytes())
        store.close()
    return examples


def make_bombs(folder: Path) -> list[Path]:
    """As large as the limits allow, or larger. The first comes in; the others are refused."""
    most = sessionfile.MAX_HEADER_BYTES
    spec = StateSpec(
        tuple(TensorSpec(f"{k}_{i}", k, i, (16, 64)) for i in range(4) for k in ("key", "value"))
    )  # 32 KiB
    files = []
    for name, tokens in (("0-large", 470), ("1-small", 110)):
        store = new_store(folder / name)
        chat = Chat(store, "s", spec)
        chat.say("t1", None, "hi", "hello", tokens=tokens)
        files.append(folder / f"{name}.ssmd")
        export_session(store, "s", files[-1])
        store.close()
    size = files[0].stat().st_size
    assert LIMIT * 0.85 < size <= LIMIT, size
    parts = split(files[1].read_bytes())  # four more builds want the same rows, which only equal builds share
    first = parts.document["checkpoints"][0]
    parts.document["checkpoints"] += [dict(first, build=f"{i:064x}") for i in range(4)]
    files[1].write_bytes(seal(join(parts)))

    def header(text: str) -> bytes:
        return len(text).to_bytes(8, "little") + text.encode()

    for text in (
        header("[" + "[]," * (most // 3 - 2) + "[]]"),
        header('{"x":[' + "{}," * (most // 3 - 4) + "{}]}"),
        header("[" * (most - 10)),
        header('{"' + '":0,"'.join(map(str, range(most // 11))) + '":0}'),
        with_document('{"format":2,"x":[' + "[]," * (most // 3 - 200) + "[]]}"),
        with_document('{"format":2,"turns":[' + "{}," * (most // 3 - 200) + "{}]}"),
    ):
        files.append(folder / f"{len(files)}.ssmd")
        files[-1].write_bytes(text)
    files.append(folder / "8-endless.ssmd")
    with files[-1].open("wb") as file:
        file.truncate(1 << 40)
    return files


def with_document(text: str) -> bytes:
    metadata = {"ssmd": text, "sha256": "0" * 64}
    head = json.dumps({"__metadata__": metadata}).encode()
    return seal(len(head).to_bytes(8, "little") + head)


def tried(store: Store, file: Path, rng: random.Random, *, fits: bool = False, free: bool = False) -> str:
    """Import the file, look at all that came in, remove it. What became of it, in a word.

    fits: with no model here, whose layout could be another one. free: with no limit of memory once it is in.
    """
    spec = SPECS[rng.choice(list(SPECS))]
    local = rng.choice(
        [None, {LINEAGE: LocalModel("made-up", spec, VOCABULARY)}, {"c" * 64: LocalModel("other", spec, 9)}]
    )
    believe = rng.random() < 0.9
    if fits:
        local, believe = None, True
    try:
        done = import_session(store, file, local=local, believe=believe)
    except StoreError as err:
        said = str(err)
    else:
        said = ""
    if said:
        assert len(said) < 1000, "a message that nobody reads"
        if free:
            print(said, file=sys.stderr)
        assert said.isprintable(), f"{said!r} can steer a terminal"
        with store.reading() as connection:
            assert connection.scalar(select(func.count()).select_from(turn)) == 0
        return "refused"
    if free:  # the limit is an import's: a state as large as the largest file takes more to be looked at
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    session = store.session(done.session)
    tree = store.turns(done.session)
    assert len(tree) == done.turns
    assert session.head in {t.id for t in tree}
    with store.reading() as connection:
        columns = select(checkpoint.c.id, checkpoint.c.origin, checkpoint.c.position, layout.c.tensors)
        stored = connection.execute(columns.join(layout, layout.c.digest == checkpoint.c.layout)).all()
    there = [] if free else words_in(split(file.read_bytes()))
    states = states_in(split(file.read_bytes())) if stored and not free else set()
    places = {t.id: i for i, t in enumerate(tree)}
    words = [(places.get(t.parent or ""), [(m.role, m.content, m.name) for m in t.conversation]) for t in tree]
    assert free or words == there, "other words than those of the file"
    assert len(stored) == done.checkpoints
    assert not stored or (believe and not done.text_only)
    for row in stored:
        assert row.origin == done.session
        layers = StateSpec.from_json(row.tensors).tensors
        spec = StateSpec(tuple(replace(t, dtype="float32") for t in layers))  # without a model a file's dtypes may lie
        state = store.load(row.id, spec)
        state.check(spec)
        assert state.position == row.position
        assert free or fingerprint(state.position, state.tensors) in states, "a state that is not in the file"
    if rng.random() < 0.1:
        export_session(store, done.session, file.with_name("out.ssmd"), force=True, states="all")
    store.delete(done.session)
    with store.reading() as connection:
        for table in (turn, checkpoint, segment):
            assert connection.scalar(select(func.count()).select_from(table)) == 0
    return "text only" if done.text_only else "imported"


def words_in(parts: Parts) -> list[Any]:
    """Return the words of a file: for each turn, the place of its parent and its messages."""
    turns = parts.document["turns"]
    places = {one["id"]: i for i, one in enumerate(turns)}
    words: list[Any] = []
    for one in turns:
        own = [(m["role"], m["content"], m.get("name")) for m in (*one["items"], *one["answer"])]
        words.append((places.get(one["parent"]), own))
    return words


def states_in(parts: Parts) -> set[bytes]:
    """The fingerprints of a file's states."""
    states = set()
    for i, made in enumerate(parts.document["checkpoints"]):
        tensors = {}
        for t in parts.document["layout"]:
            name = t["name"]
            if t["kind"] not in ("key", "value"):
                tensors[name] = numbers(parts, f"checkpoint.{i}.{name}")
            else:
                tensors[name] = np.concatenate([numbers(parts, f"rows.{k}.{name}") for k in made["rows"]], axis=1)
        states.add(fingerprint(made["position"], tensors))
    return states


def numbers(parts: Parts, name: str) -> Numbers:
    entry = parts.tensors[name]
    start, end = entry["data_offsets"]
    made = np.frombuffer(parts.body[start:end], {"F32": "<f4", "F16": "<f2"}[entry["dtype"]])
    return made.reshape(entry["shape"]).astype(np.float32)


def fingerprint(position: int, tensors: Mapping[str, Numbers]) -> bytes:
    digest = hashlib.sha256(str(position).encode())
    for name in sorted(tensors):
        digest.update(name.encode() + np.ascontiguousarray(tensors[name], np.float32).tobytes())
    return digest.digest()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
