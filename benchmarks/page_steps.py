"""The steps of the page's tests in a real Chromium, with the result of each.

benchmarks/page_steps.py     runs them (scripts/test --ui sets up what they need) and prints the table of docs/page.md
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROOT = Path(__file__).parents[1]


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "ui", "tests/clients/web", f"--junitxml={report}"]
        ended = subprocess.run(command, cwd=ROOT, stdout=sys.stderr, check=False).returncode
        cases = list(ElementTree.parse(report).iter("testcase"))
    steps: dict[tuple[str, str, str], list[str]] = {}
    for case in sorted(cases, key=lambda case: case.attrib["classname"]):
        name, _, form = case.attrib["name"].removeprefix("test_").partition("[")
        file = case.attrib["classname"].rpartition(".")[2] + ".py"
        wrong = next((one.tag for one in case if one.tag in ("failure", "error", "skipped")), "passed")
        steps.setdefault((file, name.replace("_", " "), wrong), []).append(form.removesuffix("]"))
    print("| file | step | |\n| --- | --- | --- |")
    for (file, step, how), taken in steps.items():
        forms = f" ({', '.join(taken)})" if any(taken) else ""
        print(f"| `{file}` | {step}{forms} | {how} |")
    return ended


if __name__ == "__main__":
    sys.exit(main())
