"""Asks a running daemon what its own document says that it takes, and more: schemathesis over /openapi.json.

    pip install schemathesis        # into an environment of its own
    ssmd serve smollm2 &
    python benchmarks/fuzz_interface.py http://127.0.0.1:7763 smollm2 --schemathesis /path/to/schemathesis

It fails on a status that is not in the document, on a 5xx, and on an answer of another shape or type. What ends the
daemon, fetches models or never ends is left out. Answers are short, and the model is one that there is, else all would
be 404.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

from ssmd.api.operations import OPERATIONS

NOT_BUILT = 501  # schemathesis takes it for an error
LEFT_OUT = {
    (one.method.lower(), one.template) for one in OPERATIONS if one.effect or one.endless or one.status == NOT_BUILT
}
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
LONGEST = 4  # tokens
LIMITS = {"max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict"}


def narrowed(document: dict[str, Any], model: str) -> dict[str, Any]:
    """The document with a model that there is, and answers that take no time."""
    paths = {
        path: kept
        for path, methods in document["paths"].items()
        if (kept := {method: one for method, one in methods.items() if (method, path) not in LEFT_OUT})
    }
    for path, methods in paths.items():
        for operation in methods.values():
            for content in operation.get("requestBody", {}).get("content", {}).values():
                properties = content["schema"].get("properties", {})
                short = {"type": "integer", "minimum": 1, "maximum": LONGEST}
                for name in properties.keys() & {
                    "max_tokens",
                    "max_completion_tokens",
                    "max_output_tokens",
                    "n_predict",
                }:
                    properties[name] = short
                if path in ("/api/chat", "/api/generate"):
                    limited = {"type": "object", "properties": {"num_predict": short}, "required": ["num_predict"]}
                    properties["options"] = limited
                needed = [name for name in ("max_output_tokens", "options", "max_tokens") if name in properties][:1]
                content["schema"]["required"] = [*content["schema"].get("required", []), *needed]
                if "model" in properties:
                    properties["model"] = {"enum": [model]}
                if "prompt" in properties:
                    ids = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 300}, "minItems": 1}
                    properties["prompt"] = {"anyOf": [{"type": "string", "minLength": 1}, ids]}
                properties.pop("keep_alive", None)  # 0 would have the model loaded for each request
            for parameter in operation.get("parameters", []):
                if parameter["name"] == "model":
                    parameter["schema"] = {"enum": [model, "gpt-2"]}
    return document | {"paths": paths}


def main() -> int:
    """Run it. The exit status is schemathesis's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("model")
    parser.add_argument("--schemathesis", default="schemathesis")
    parser.add_argument("--examples", type=int, default=100, help="cases of each route and phase")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    with urllib.request.urlopen(f"{given.url}/openapi.json", timeout=60) as answer:
        document = narrowed(json.load(answer), given.model)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "openapi.json"
        file.write_text(json.dumps(document), "utf-8")
        asked = [given.schemathesis, "run", str(file), "--url", given.url, "--checks", CHECKS]
        asked += ["--max-examples", str(given.examples), "--seed", str(given.seed), "--request-timeout", "60"]
        asked += ["--continue-on-failure", "--no-color"]
        return subprocess.run(asked, cwd=folder, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
