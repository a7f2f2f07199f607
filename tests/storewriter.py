"""Only writes: turns and checkpoints of made-up sessions, until it is killed. Run as a process by test_crash.py.

Says on stdout `begin SESSION TURN` before a commit and `done SESSION TURN` after it; `open` when the store is open.
Arguments: data directory, name of this writer, seed, number of commits (0: without end).
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

from keeping import Chat, user

from ssmd.model.state import StateSpec, TensorSpec
from ssmd.sessions.store import Store

# Half a megabyte for each checkpoint, in several rows, so that a kill often falls into a write.
SPEC = StateSpec(
    (
        TensorSpec("ssm_0", "ssm", 0, (8, 64, 128)),
        TensorSpec("key_1", "key", 1, (4, 64), "float16"),
        TensorSpec("value_1", "value", 1, (4, 64), "float16"),
        TensorSpec("ssm_2", "ssm", 2, (8, 64, 128)),
    )
)


def say(word: str, *names: str) -> None:
    print(word, *names, flush=True)


def main(folder: str, name: str, seed: str, commits: str) -> None:
    rng = random.Random(seed)
    store = Store.open(Path(folder), busy_ms=20_000)
    say("open")
    chats: list[Chat] = []
    n = 0
    while not int(commits) or n < int(commits):
        n += 1
        if len(chats) < 3 or rng.random() < 0.15:
            chats.append(Chat(store, f"{name}-s{n}", SPEC))
        chat = rng.choice(chats[-3:])
        parent = rng.choice([None, *chat.turns]) if rng.random() < 0.3 else next(reversed(chat.turns), None)
        turn, checkpoints = chat.make(f"{name}-t{n}", parent, [user(f"question {n}")], f"answer {n}", tokens=40)
        encoded = [chat.encode(c) for c in checkpoints]
        if rng.random() < 0.4 and store.keep(encoded[0]).id is not None:
            encoded[0] = encoded[0].without_data()  # written ahead of its turn
        say("begin", chat.info.id, turn.id)
        done = store.commit([turn], encoded, session=chat.info)
        say("done", chat.info.id, turn.id)
        chat.remember(turn, done.checkpoints[-1].id)
        if rng.random() < 0.3:
            store.settle()
        if len(chats) > 6 and rng.random() < 0.1:
            gone = chats.pop(0)
            say("begin", gone.info.id, "-")
            store.delete(gone.info.id)
            say("done", gone.info.id, "-")
    store.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
