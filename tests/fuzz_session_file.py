"""Mutates session files and imports them, under a limit of memory. Run as a process by test_fuzz_session_file.py.

Each file must either be refused with a SessionFileError or StoreError that leaves no trace, or come in as a session
all of which can be read, exported and removed. Anything else ends the process with a traceback that names the case.

Arguments: an empty folder, seed, first case, number of cases. Says on stdout what happened, as JSON. With the seed
"bombs" the files are those that ask for the most memory.
"""

from __future__ import annotations

import collections
import copy
import json
import os
import random
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from hostile import Parts, join, seal, split
from keeping import LINEAGE, SPECS, VOCABULARY, Chat, new_store
from sqlalchemy import func, select

from ssmd.model.state import StateSpec, TensorSpec
from ssmd.sessions.files import contents, sessionfile
from ssmd.sessions.files.transfer import Local, export_session, import_session
from ssmd.sessions.rows.schema import checkpoint, layout, segment, turn
from ssmd.sessions.store import Store
from ssmd.sessions.turn import StoreError

# The limits of the format, all 128 times smaller: so that it shows whether they bound what an import takes.
SCALE = 128
LIMIT = sessionfile.MAX_FILE_BYTES // SCALE
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
CHANGES = {"os.mkdir", "os.rename", "os.link", "os.symlink", "os.remove", "os.rmdir", "os.chmod", "os.truncate"}
NEVER = {"os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "socket.connect", "ctypes.dlopen", "os.fork"}
DEEP: Any = json.loads("[" * 200 + "]" * 200)
HOSTILE: tuple[Any, ...] = (
    -1, 0, 1, 2, 3, 255, 1 << 20, (1 << 31) - 1, 1 << 31, 1 << 53, 1 << 64, 10**40, -(1 << 70), 0.5, 1e308,
    float("nan"), float("inf"), None, True, False, "", "x", "../../x", "/etc/passwd", "a" * 65, "0" * 64, "\x00",
    "\x1b[2J", "\ud800", "é" * 300, "system", "turn", "user", "F16", "float16", "key", "ssm", [], {}, [[]], [0], [0, 0],
    [-1], [1 << 40, 1 << 40], [1] * 9, {"a": {}}, DEEP,
)  # fmt: skip


def main(folder: Path, seed: str, first: int, count: int) -> None:
    sessionfile.MAX_FILE_BYTES = LIMIT
    sessionfile.MAX_HEADER_BYTES //= SCALE
    contents.MAX_REBUILT_BYTES //= SCALE
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
                os.replace(bombs[case], folder / "in.ssmd")
            else:
                (folder / "in.ssmd").write_bytes(mutated(rng, rng.choice(examples)))
            outcomes[tried(store, folder / "in.ssmd", rng, free=bool(bombs))] += 1
        except BaseException:
            print(f"case {case} of seed {seed}: {folder / 'in.ssmd'}", file=sys.stderr)
            raise
        peak = max(peak, 0 if bombs else address_space())
    store.close()
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - resident) << 10
    print(json.dumps({"outcomes": outcomes, "resident": grown, "mapped": peak - before, "limit": LIMIT}))


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
    examples = [(Path(__file__).parent / "data" / "session-file-1.ssmd").read_bytes()]
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
        make_unfolding(),
    ):
        files.append(folder / f"{len(files)}.ssmd")
        files[-1].write_bytes(text)
    files.append(folder / "9-endless.ssmd")
    with files[-1].open("wb") as file:
        file.truncate(1 << 40)
    return files


def make_unfolding() -> bytes:
    """Of format 1: each of its turns shares all ids of the first one but the last, so that nothing stands once."""
    old = split((Path(__file__).parent / "data" / "session-file-1.ssmd").read_bytes())
    ids = 250_000
    shared = {"ids_shared": ids - 1, "text_shared": 0, "text": "", "prompt_tokens": 0}
    first = dict(old.document["turns"][0], ids_shared=0, text_shared=0, prompt_tokens=0)
    turns = [first, *(dict(first, id=f"x{i}", parent=first["id"], **shared) for i in range(400))]
    entries = {"turn.0.ids": {"dtype": "I32", "shape": [ids], "data_offsets": [0, 4 * ids]}}
    for i in range(1, len(turns)):
        entries[f"turn.{i}.ids"] = {"dtype": "I32", "shape": [0], "data_offsets": [4 * ids, 4 * ids]}
    session = dict(old.document["session"], head=first["id"])
    document = old.document | {"turns": turns, "session": session, "layout": [], "checkpoints": [], "rows": []}
    return seal(join(Parts(document, entries, bytes(4 * ids))))


def with_document(text: str) -> bytes:
    metadata = {"ssmd": text, "sha256": "0" * 64}
    head = json.dumps({"__metadata__": metadata}).encode()
    return seal(len(head).to_bytes(8, "little") + head)


def tried(store: Store, file: Path, rng: random.Random, *, free: bool = False) -> str:
    """Import the file, look at all that came in, remove it. What became of it, in a word. free: with no model here."""
    spec = SPECS[rng.choice(list(SPECS))]
    local = rng.choice([None, {LINEAGE: Local("made-up", spec, VOCABULARY)}, {"c" * 64: Local("other", spec, 9)}])
    believe = rng.random() < 0.9
    if free:
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
    assert len(stored) == done.checkpoints
    assert not stored or (believe and not done.text_only)
    for row in stored:
        assert row.origin == done.session
        layers = StateSpec.from_json(row.tensors).tensors
        spec = StateSpec(tuple(replace(t, dtype="float32") for t in layers))  # without a model a file's dtypes may lie
        state = store.load(row.id, spec)
        state.check(spec)
        assert state.position == row.position
    if rng.random() < 0.1:
        export_session(store, done.session, file.with_name("out.ssmd"), force=True, states="all")
    store.delete(done.session)
    with store.reading() as connection:
        for table in (turn, checkpoint, segment):
            assert connection.scalar(select(func.count()).select_from(table)) == 0
    return "text only" if done.text_only else "imported"


def mutated(rng: random.Random, data: bytes) -> bytes:
    parts = split(data)
    changes: list[Callable[[random.Random, Parts], Parts]] = [change_document] * 4
    changes += [change_header, change_tensors, change_numbers]
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        parts = rng.choice(changes)(rng, parts)
    text = join(parts)
    if rng.random() < 0.15:
        text = change_bytes(rng, text)
    return seal(text) if rng.random() < 0.9 else text


def change_document(rng: random.Random, parts: Parts) -> Parts:
    change_json(rng, parts.document)
    return parts


def change_header(rng: random.Random, parts: Parts) -> Parts:
    change_json(rng, parts.tensors)
    return parts


def change_tensors(rng: random.Random, parts: Parts) -> Parts:
    """Tensors change places, types or shapes, are renamed, overlap."""
    a, b = (rng.choice(list(parts.tensors)) for _ in range(2))
    one, other = parts.tensors[a], parts.tensors[b]
    if not isinstance(one, dict) or not isinstance(other, dict):
        return parts
    what = rng.randrange(4)
    if what == 0:
        parts.tensors[a], parts.tensors[b] = other, one
    elif what == 1:
        one["data_offsets"] = other.get("data_offsets")
    elif what == 2:
        one["dtype"] = rng.choice(["F32", "F16", "I32", "I64", "BOOL", "U8"])
    elif isinstance(one.get("shape"), list):
        rng.shuffle(one["shape"])
    return parts


def change_numbers(rng: random.Random, parts: Parts) -> Parts:
    """Values that are not finite, huge, or nonsense, somewhere in the tensors."""
    body = bytearray(parts.body)
    for _ in range(rng.choice([1, 1, 4, 64])):
        at = rng.randrange(max(1, len(body) // 2)) * 2
        patch = rng.choice(
            [b"\x00\x00\x80\x7f", b"\x00\x00\xc0\x7f", b"\xff\xff\x7f\x7f", b"\x00\x7c", rng.randbytes(4)]
        )
        body[at : at + len(patch)] = patch[: max(0, len(body) - at)]
    return replace(parts, body=bytes(body))


def change_json(rng: random.Random, root: Any) -> None:
    """One edit somewhere below `root`: of a value, a key, the order or number of elements."""
    where = root
    while True:
        keys = list(where) if isinstance(where, dict) else range(len(where))
        if not keys:
            return
        key = rng.choice(list(keys))
        below = where[key]
        if isinstance(below, dict | list) and below and rng.random() < 0.85:
            where = below
            continue
        break
    what = rng.randrange(7)
    if what <= 2:
        where[key] = copy.deepcopy(rng.choice(HOSTILE))  # a later edit may change it
    elif what == 3:
        where[key] = near(rng, where[key])
    elif what == 4:
        del where[key]
    elif what == 5 and isinstance(where, dict):
        where[
            rng.choice(["more", "id", "parent", "name", "\x1b[2J", "x" * 5000, "checkpoint.9.ids", "rows.0.x", *where])
        ] = where.pop(key)
    elif isinstance(where, list):
        where[key:key] = rng.choice([[where[key]], where[::-1], (where * 50)[:2000]])


def near(rng: random.Random, value: Any) -> Any:
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, int):
        return value + rng.choice([-1, 1, -8, 8, 64])
    if isinstance(value, str):
        return rng.choice([value + "x", value[:-1], value.upper(), value * 40, value[::-1]])
    return [value]


def change_bytes(rng: random.Random, data: bytes) -> bytes:
    octets = bytearray(data)
    at = rng.randrange(len(octets))
    what = rng.randrange(6)
    if what == 0:
        octets[at] ^= 1 << rng.randrange(8)
    elif what == 1:
        del octets[at:]
    elif what == 2:
        octets += rng.randbytes(rng.randrange(1, 100))
    elif what == 3:
        octets[at : at + rng.randrange(1, 200)] = rng.randbytes(rng.randrange(0, 200))
    elif what == 4:
        octets[0:8] = rng.choice([rng.randbytes(8), (at).to_bytes(8, "little"), b"\xff" * 8])
    else:  # a key that stands twice, or any other piece of the header
        end = at + rng.randrange(1, 200)
        octets[end:end] = octets[at:end]
    return bytes(octets)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
