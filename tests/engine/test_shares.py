"""Shares of the quota at an engine: a key that stores prompts without end takes no state of another key."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine.test_engine import ask, user
from engines import OwnEngine

from ssmd.engine.persist import writer as writer_module
from ssmd.sessions.fsck.repair import check
from ssmd.sessions.store import Store
from ssmd.sessions.turn import Domain
from ssmd.text.messages import Message

SYSTEM = Message("system", "You keep the lighthouse at the end of the pier. " * 10)
QUIET, LOUD = Domain("quiet", ("quiet",)), Domain("loud", ("loud",))


def test_a_flood_leaves_another_keys_prompt_cached(
    engine: OwnEngine, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "COMMIT_PATIENCE_S", 60)
    assert engine.writer is not None
    asked = SYSTEM, user("Who is there?")
    first = ask(engine, *asked, domain=QUIET, max_tokens=4)
    engine.writer.flush()
    quota = 4 * store.bytes_stored()
    monkeypatch.setattr(store, "quota", quota)
    for n in range(12):
        flood = Message("system", f"{n} is the first word of another prompt. {SYSTEM.content}")
        ask(engine, flood, user("Who is there?"), domain=LOUD, max_tokens=1)
        engine.writer.flush()
        assert store.bytes_stored() <= quota
    again = ask(engine, *asked, Message("assistant", first.text), user("And now?"), domain=QUIET, max_tokens=4)
    assert (again.usage.resume, again.usage.cached_tokens) == ("exact", first.usage.prompt_tokens + 3)
    assert not check(tmp_path / "data").damages
