"""Checks of one client library against a daemon: each prints a line of JSON, what it is of and why it failed.

A program that has checks is run as `PROGRAM URL MODEL`, in an environment of its own that has that library.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from collections.abc import Callable
from typing import Any

URL, MODEL = sys.argv[1:3]
BASE = f"{URL}/v1"
Check = Callable[[], object]
CHECKS: dict[str, Check] = {}


def check(feature: str) -> Callable[[Check], Check]:
    """Have a function run as the check of a feature; it fails if it raises."""

    def add(of: Check) -> Check:
        CHECKS[feature] = of
        return of

    return add


def run() -> None:
    """Run all checks, one after the other."""
    for feature, of in CHECKS.items():
        try:
            of()
            why = None
        except Exception as err:  # a client may raise anything
            said = (str(err).splitlines() or [""])[0]
            why = f"{type(err).__name__}: {said[:200]}"
        print(json.dumps({"feature": feature, "why": why}), flush=True)


def resumed(least: int = 1) -> None:
    """Fail unless the last answer continued from a kept state of at least `least` tokens."""
    with urllib.request.urlopen(f"{URL}/ssmd/v1/metrics", timeout=30) as answer:
        last: dict[str, Any] = json.load(answer)["recent"][-1]
    assert last["cached_tokens"] >= least, f"{last['cached_tokens']} of {last['prompt_tokens']} tokens were cached"
