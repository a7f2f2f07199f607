"""Session files altered by chance: damaged as a disk or a network would, or forged, with the right hash."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from hostile import Parts, join, seal, split

DEEP: Any = json.loads("[" * 200 + "]" * 200)
HOSTILE: tuple[Any, ...] = (
    -1, 0, 1, 2, 3, 255, 1 << 20, (1 << 31) - 1, 1 << 31, 1 << 53, 1 << 64, 10**40, -(1 << 70), 0.5, 1e308,
    float("nan"), float("inf"), None, True, False, "", "x", "../../x", "/etc/passwd", "a" * 65, "0" * 64, "\x00",
    "\x1b[2J", "\ud800", "é" * 300, "system", "turn", "user", "F16", "float16", "key", "ssm", [], {}, [[]], [0], [0, 0],
    [-1], [1 << 40, 1 << 40], [1] * 9, {"a": {}}, DEEP,
)  # fmt: skip


def altered(rng: random.Random, examples: Sequence[bytes]) -> tuple[str, bytes]:
    """(in which way, the file): "damaged" has the hash that it had, the others the right one.

    "rewritten" says the same in other bytes; "spliced" has parts of two; "forged" says something else, or nonsense.
    """
    data = rng.choice(examples)
    way = rng.choices(["damaged", "rewritten", "spliced", "forged"], [25, 10, 10, 55])[0]
    if way == "damaged":
        return way, change_bytes(rng, data)
    if way == "rewritten":
        return way, rewritten(rng, data)
    if way == "spliced":
        return way, spliced(rng, data, rng.choice(examples))
    return way, mutated(rng, data)


def rewritten(rng: random.Random, data: bytes) -> bytes:
    """The same in another order and by another program."""
    parts = split(data)
    names = list(parts.tensors)
    rng.shuffle(names)
    body, tensors = b"", {}
    for name in names:
        start, end = parts.tensors[name]["data_offsets"]
        place = [len(body), len(body) + end - start]
        tensors[name] = {**dict(rng.sample(list(parts.tensors[name].items()), 3)), "data_offsets": place}
        body += parts.body[start:end]
    document = shuffled(rng, parts.document) | {"written_by": f"another {rng.random()}"}
    return seal(join(Parts(document, tensors, body)))


def shuffled(rng: random.Random, value: Any) -> Any:
    """The same JSON, its names in another order."""
    if isinstance(value, dict):
        return {k: shuffled(rng, v) for k, v in rng.sample(list(value.items()), len(value))}
    return [shuffled(rng, v) for v in value] if isinstance(value, list) else value


def spliced(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """Numbers, turns or states of one file in another, or of one place in another place."""
    one, two = split(data), split(other)
    for _ in range(rng.choice([1, 1, 2])):
        name, source = rng.choice(list(one.tensors)), rng.choice(list(two.tensors))
        (start, end), (at, to) = one.tensors[name]["data_offsets"], two.tensors[source]["data_offsets"]
        fields = [f for f in one.document if f in two.document and f not in ("format", "written_by")]
        where = rng.choice(fields)
        what = rng.randrange(4)
        if what <= 1:
            piece = (two.body[at:to] * (1 + (end - start) // max(1, to - at)))[: end - start].ljust(end - start, b"\0")
            one = replace(one, body=one.body[:start] + piece + one.body[end:])
        elif what == 2:
            one.document[where] = copy.deepcopy(two.document[where])
        elif isinstance(one.document[where], list) and one.document[where] and two.document[where]:
            place = rng.randrange(len(one.document[where]))
            one.document[where][place] = copy.deepcopy(rng.choice(two.document[where]))
    return seal(join(one))


def mutated(rng: random.Random, data: bytes) -> bytes:
    parts = split(data)
    changes: list[Callable[[random.Random, Parts], Parts]] = [change_document] * 4
    changes += [change_header, change_tensors, change_numbers]
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        parts = rng.choice(changes)(rng, parts)
    text = join(parts)
    if rng.random() < 0.15:
        text = change_bytes(rng, text)
    return seal(text)


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
