"""Bounds on what a hub can make `ssmd pull` read: the size of the index of shards, and the shards that it names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import mirror
import pytest
import tiny
from hub.test_pull import NAME, refused
from mirror import Mirror

from ssmd.hub.pull import MAX_SHARDS
from ssmd.model.source import INDEX, MAX_JSON_BYTES

CONFIG = json.dumps({"model_type": "llama", "vocab_size": 384, **tiny.LLAMA}).encode()


@pytest.fixture
def hub() -> Iterator[Mirror]:
    """A model whose shards are never reached."""
    with mirror.running(NAME, {"config.json": CONFIG, "tokenizer.json": b"{}", INDEX: b"{}"}) as running:
        yield running


def test_an_index_larger_than_is_read_is_not_fetched(hub: Mirror, tmp_path: Path) -> None:
    hub.listed[INDEX] = {"size": MAX_JSON_BYTES + 1}
    assert f"{INDEX} has {MAX_JSON_BYTES + 1} bytes; no more than {MAX_JSON_BYTES}" in refused(tmp_path, hub)
    assert not [a for a in hub.asked if "/resolve/" in a.path]


def test_an_index_that_is_longer_than_listed_is_left(hub: Mirror, tmp_path: Path) -> None:
    hub.more[INDEX], hub.lengths[INDEX] = 8 << 20, None
    assert f"more comes as {INDEX} than the 2 bytes that the hub lists" in refused(tmp_path, hub)
    assert hub.sent.get(INDEX, 0) < 8 << 20


@pytest.mark.parametrize("listed", [True, False])
def test_an_index_of_too_many_shards_is_refused(hub: Mirror, tmp_path: Path, listed: bool) -> None:
    shards = [f"model-{i}.safetensors" for i in range(MAX_SHARDS + 1)]
    hub.files[INDEX] = json.dumps({"weight_map": {f"t{i}": shard for i, shard in enumerate(shards)}}).encode()
    if listed:
        hub.files |= dict.fromkeys(shards, b"")
    hub.commit_now()
    assert f"names {MAX_SHARDS + 1} files; no more than {MAX_SHARDS} are fetched" in refused(tmp_path, hub)
    assert not hub.asked_for(shards[0])
