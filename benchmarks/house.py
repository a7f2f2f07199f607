"""The size of the house: boxes, floors and arrows of its folders, and the files that one streamed turn crosses.

    benchmarks/house.py            a table of folders
    benchmarks/house.py MODEL      and the files of a turn, of an artifact's name or path

A folder's boxes are its modules and the folders in it. An arrow is an import from one box into another. Floors are the
boxes on the longest way along arrows. The turn is the second of a chat, streamed, by a daemon in this process: a file
of ssmd or of a runtime counts if one of its functions is called between the request's first byte and its answer's last.
Background work that begins meanwhile counts too.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from pydantic import SecretStr

ROOT = Path(__file__).parent.parent
FOLDERS = ("engine", "api", "cli", "sessions")
ROOMS = (f"{ROOT / 'ssmd'}/", f"{ROOT / 'runtimes'}/")
TOKENS = 7
QUESTIONS = ("Tell me of the sea.", "And of the wind?")


def boxes(folder: str) -> dict[str, set[str]]:
    """Return the boxes of a folder of ssmd/, and the other boxes of it that each imports."""
    sys.path.insert(0, str(ROOT / "tests"))
    import modules

    prefix = f"ssmd.{folder}."
    of = {name: name.removeprefix(prefix).split(".")[0] for name in modules.MODULES if name.startswith(prefix)}
    found: dict[str, set[str]] = {box: set() for box in of.values()}
    for name, box in of.items():
        found[box] |= {of[other] for other in modules.imported_by(name) if other in of} - {box}
    return found


def reach(arrows: dict[str, set[str]], box: str) -> set[str]:
    """Return the boxes that arrows lead to from a box, over others too."""
    found: set[str] = set()
    todo = [box]
    while todo:
        new = arrows[todo.pop()] - found
        found |= new
        todo += new
    return found


def floors(arrows: dict[str, set[str]]) -> tuple[int, list[list[str]]]:
    """Return the number of boxes on the longest way along arrows, and the circles. A circle counts all its boxes."""
    reached = {box: reach(arrows, box) for box in arrows}
    circle = {box: frozenset({box} | {other for other in reached[box] if box in reached[other]}) for box in arrows}
    heights: dict[frozenset[str], int] = {}

    def height(of: frozenset[str]) -> int:
        if of not in heights:
            below = {circle[other] for box in of for other in arrows[box] - of}
            heights[of] = len(of) + max(map(height, below), default=0)
        return heights[of]

    return max(map(height, circle.values())), sorted(sorted(one) for one in set(circle.values()) if len(one) > 1)


class Calls:
    """Counts calls of ssmd's functions by file, in every thread that is started while it is installed."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str, int]] = Counter()  # by (file, function, first line)
        self.on = False

    def seen(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if self.on and event == "call" and code.co_filename.startswith(ROOMS):
            self.counts[code.co_filename, code.co_qualname, code.co_firstlineno] += 1

    @contextmanager
    def installed(self) -> Iterator[None]:
        threading.setprofile(self.seen)
        try:
            yield
        finally:
            threading.setprofile(None)

    @property
    def files(self) -> list[str]:
        """The files that were called, relative to the repository."""
        return sorted({str(Path(file).relative_to(ROOT)) for file, _, _ in self.counts})


def turn(model: str) -> Calls:
    """Return the calls of a chat's second turn, streamed."""
    from ssmd.cli.chat.here import serving_here
    from ssmd.config import Settings
    from ssmd.daemon.client import Client

    calls = Calls()
    with tempfile.TemporaryDirectory() as folder, calls.installed():
        settings = Settings(data_dir=Path(folder), api_key=SecretStr("of-no-use"))
        with serving_here(settings, model, keep=True) as address:
            [served] = Client(address).get("/v1/models")["data"]
            messages: list[dict[str, str]] = []
            for question in QUESTIONS:
                messages.append({"role": "user", "content": question})
                calls.on = question == QUESTIONS[-1]
                body = {
                    "model": served["id"],
                    "messages": messages,
                    "stream": True,
                    "max_tokens": TOKENS,
                    "temperature": 0,
                }
                text = ""
                for event in Client(address).stream("/v1/chat/completions", body):
                    text += event["choices"][0]["delta"].get("content", "") if event.get("choices") else ""
                calls.on = False
                messages.append({"role": "assistant", "content": text})
    return calls


def main(model: str | None = None) -> None:
    print("| folder | boxes | floors | arrows | circles |\n| --- | ---: | ---: | ---: | --- |")
    for folder in FOLDERS:
        arrows = boxes(folder)
        longest, circles = floors(arrows)
        count = sum(map(len, arrows.values()))
        listed = ", ".join(" ↔ ".join(circle) for circle in circles) or "none"
        print(f"| `{folder}/` | {len(arrows)} | {longest} | {count} | {listed} |")
    if model is None:
        return
    calls = turn(model)
    rooms = Counter("/".join(file.split("/")[:2]) for file in calls.files)
    print(
        f"\nThe second turn of a chat, {TOKENS} tokens streamed, of {Path(model).name}: {len(calls.files)} files, ",
        end="",
    )
    print(f"{len(calls.counts)} functions, {calls.counts.total():,} calls")
    print("\n| room | files |\n| --- | ---: |")
    for room, count in rooms.most_common():
        print(f"| `{room}` | {count} |")
    print("\n" + "\n".join(calls.files))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="of the turn: an artifact's name or path; without it no turn is run")
    main(parser.parse_args().model)
