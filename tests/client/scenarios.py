"""Runs the scenarios of a real client: `scenarios.py MODULE SCENARIO URL JSON` prints JSON.

With MODULE alone each line of its input is a list of the other three, and its answer a line.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

Scenarios = Mapping[str, Callable[[str, Any], Any]]


def serve(scenarios: Scenarios) -> None:
    """Run each line's scenario in a fork of this process, as to import a client takes a second or three."""
    for line in sys.stdin:
        child = os.fork()
        if not child:
            scenario, where, given = json.loads(line)
            try:
                said = {"said": scenarios[scenario](where, given)}
            except BaseException:  # whatever it is, the test is to see it
                said = {"failed": traceback.format_exc()}
            print(json.dumps(said), flush=True)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status:
            print(json.dumps({"failed": f"it ended with status {status}"}), flush=True)


if __name__ == "__main__":
    client, *asked = sys.argv[1:]
    found: Scenarios = import_module(client).SCENARIOS
    if not asked:
        serve(found)
        sys.exit()
    named, url, arguments = asked
    print(json.dumps(found[named](url, json.loads(arguments))))
