"""Check of a store: `examine` finds rows that are not what was written, repair.py acts on the findings.

Values are read raw, without the schema's types: any byte may have changed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from sqlalchemy import Connection, text

from ssmd.model.state import StateSpec
from ssmd.sessions.checkpoint import STORED_KINDS, Digested, digest
from ssmd.sessions.fsck.findings import Findings, is_count, is_text, is_time, raw_rows
from ssmd.sessions.fsck.transcript import examine_transcripts
from ssmd.sessions.rows.blobs import MAX_BLOB_BYTES, dtype_of, is_genuine, recurrent_values
from ssmd.sessions.rows.holding import miscounted_owners, stored_bytes, turn_bytes
from ssmd.sessions.rows.schema import metadata
from ssmd.sessions.rows.turns import as_they_are


def examine(connection: Connection, progress: Callable[[int], None] = lambda _: None) -> Findings:
    """Read everything, within one transaction. progress: called with the number of bytes read."""
    found = Findings()
    with as_they_are(connection):
        _structure(connection, found)
        if not found.torn:
            segments = _segments(connection, found, progress)
            _checkpoints(connection, found, segments, progress)
            examine_transcripts(connection, found)
            _links(connection, found)
            _total(connection, found)
    return found


def _structure(connection: Connection, found: Findings) -> None:
    messages = [str(m) for m in connection.scalars(text("PRAGMA integrity_check(20)"))]
    for name, made in metadata.tables.items():
        there = {row[1] for row in connection.execute(text(f"PRAGMA table_info({name})"))}
        if missing := {c.name for c in made.columns} - there:
            messages = [m for m in messages if m != "ok"]
            messages.append(f"the table {name} has no {', '.join(sorted(missing))}")
    if messages != ["ok"]:
        found.torn = True
        found.damages = Findings.of_torn_file("; ".join(m.replace("\n", ", ") for m in messages[:3])).damages


def _blob_problem(row: Any) -> str:
    """Return the problem of a piece or a segment, or ""."""
    if not isinstance(row.data, bytes) or not isinstance(row.dtype, str) or len(row.data) > MAX_BLOB_BYTES:
        return "its numbers are not what was written"
    if not is_genuine(row.data, row.checksum):
        return "its numbers were altered (their checksum differs)"
    if dtype_of(row.dtype) is None:
        return f"its numbers are stored as {row.dtype!r}, which this version does not read"
    if not is_count(row.first, row.last) or row.first >= row.last:
        return "the place of its numbers is not readable"
    return ""


def _segments(
    connection: Connection, found: Findings, progress: Callable[[int], None]
) -> dict[int, tuple[Digested, str]]:
    """Return the sound segments by id, each with its part of a digest and its dtype."""
    sound: dict[int, tuple[Digested, str]] = {}
    for row in raw_rows(connection, "segment", "id first last dtype nbytes checksum data", "id"):
        progress(len(row.data) if isinstance(row.data, bytes) else 0)
        problem = _blob_problem(row)
        if not problem and row.nbytes != len(row.data):
            problem = f"it has {len(row.data)} bytes, not {row.nbytes}"
        if problem:
            found.segments.add(row.id)
            found.add(f"KV rows {row.id}", problem, "the states that need them are removed, their turns are read again")
        else:
            sound[row.id] = ((row.first, row.last, row.checksum), row.dtype)
    return sound


def _checkpoints(
    connection: Connection, found: Findings, segments: dict[int, tuple[Digested, str]], progress: Callable[[int], None]
) -> None:
    specs: dict[str, StateSpec] = {}
    for row in raw_rows(connection, "layout", "digest tensors", "digest"):
        try:
            spec = StateSpec.from_json(json.loads(row.tensors))
        except (ValueError, TypeError, KeyError, AttributeError):
            continue
        if spec.digest() == row.digest:
            specs[row.digest] = spec
    lists: dict[int, list[int]] = {}
    for row in raw_rows(connection, "checkpoint_segment", "checkpoint segment", "checkpoint, segment"):
        lists.setdefault(row.checkpoint, []).append(row.segment)
    pieces: dict[int, list[Any]] = {}
    for row in raw_rows(connection, "piece", "checkpoint first last dtype checksum data", "checkpoint, first"):
        progress(len(row.data) if isinstance(row.data, bytes) else 0)
        known = None if _blob_problem(row) else (row.first, row.last, row.checksum, len(row.data))
        pieces.setdefault(row.checkpoint, []).append(known or _blob_problem(row))
    columns = (
        "id key anchor layout lineage build producer origin owner position kind digest recurrent_nbytes rows_nbytes "
        "created_at last_used_at"
    )
    count = 0
    for row in raw_rows(connection, "checkpoint", columns, "id"):
        count += 1
        own = pieces.pop(row.id, [])
        problem = _checkpoint_problem(row, specs.get(row.layout), own, lists.get(row.id, []), segments)
        if problem:
            found.checkpoints.add(row.id)
            found.add(f"checkpoint {row.id}", problem, "it is removed, its turns are read again")
    if pieces:
        found.add("recurrent values", f"they belong to {len(pieces)} missing checkpoints", "they are removed")
    found.counted = (0, 0, count)


def _checkpoint_problem(
    row: Any, spec: StateSpec | None, pieces: list[Any], listed: list[int], segments: dict[int, tuple[Digested, str]]
) -> str:
    if not is_count(row.position) or not all(isinstance(k, bytes) and len(k) == 32 for k in (row.key, row.anchor)):
        return "its key is not readable"
    if spec is None or not isinstance(row.lineage, str):
        return f"its layout {row.layout!r} is not known"
    broken = next((p for p in pieces if isinstance(p, str)), "")
    if broken:
        return f"{broken.replace('its numbers', 'its recurrent values', 1)}"
    missing = [s for s in listed if s not in segments]
    if missing:
        return f"its KV rows {missing[0]} are damaged or missing"
    rows = [segments[s][0] for s in listed]
    for parts, end, name in (
        ([p[:3] for p in pieces], recurrent_values(spec), "recurrent values"),
        (rows, row.position if spec.rows else 0, "KV rows"),
    ):
        at = 0
        for first, last, _ in parts:
            if first != at:
                break
            at = last
        if at != end or (parts and parts[-1][1] != end):
            return f"its {name} from {at} on are missing"
    if digest((row.key, row.build, row.origin), row.position, rows, [p[:3] for p in pieces]) != row.digest:
        return "it does not consist of the parts that were written"
    if row.recurrent_nbytes != sum(p[3] for p in pieces) or not is_count(row.rows_nbytes):
        return "its size is not the one that was written"
    if not is_text(row.build, row.producer, row.origin, row.owner) or not is_time(row.created_at, row.last_used_at):
        return "its build, producer, owner or times are not readable"
    if row.kind not in STORED_KINDS:
        return f"its kind {row.kind!r} is not known"
    return ""


def _links(connection: Connection, found: Findings) -> None:
    """Find rows that point at nothing, and segments that no checkpoint lists.

    A checkpoint without a turn is not a damage: it may be written ahead of a turn, and is swept if none comes.
    """
    broken = connection.execute(text("PRAGMA foreign_key_check")).all()
    tables = sorted({str(row[0]) for row in broken} - {"turn", "piece", "reply"})  # these are reported elsewhere
    if tables:
        found.add("links", f"rows of {', '.join(tables)} point at missing rows", "they are removed, nothing else is")
    unlisted = "SELECT id FROM segment WHERE id NOT IN (SELECT segment FROM checkpoint_segment)"
    loose = [n for n in connection.scalars(text(unlisted)) if n not in found.segments]
    if loose:
        found.segments.update(loose)
        found.add("KV rows", f"{len(loose)} parts belong to no checkpoint", "they are removed")


def _total(connection: Connection, found: Findings) -> None:
    words = connection.execute(text("SELECT coalesce(sum(nbytes), 0) FROM turn")).scalar_one()
    if words != turn_bytes(connection) and not found.damages:
        found.add(
            "the total", f"{turn_bytes(connection)} bytes of text are counted, not {words}", "it is counted again"
        )
    sizes = "SELECT (SELECT coalesce(sum(recurrent_nbytes), 0) FROM checkpoint) + "
    sizes += "(SELECT coalesce(sum(nbytes), 0) FROM segment)"
    really, said = connection.execute(text(sizes)).scalar_one(), stored_bytes(connection)
    if really != said and not found.damages:
        found.add("the total", f"{said} bytes are counted, {really} are stored", "it is counted again")
    owners = miscounted_owners(connection)
    if owners and not found.damages:
        found.add("the total", f"the bytes of {owners} owners are counted wrong", "they are counted again")
