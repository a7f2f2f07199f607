"""The share of examples in Markdown's specifications that the page draws correctly, in a real Chromium.

benchmarks/page_markdown.py SPEC…     prints a row for each spec.txt: CommonMark's (npm's commonmark-spec), cmark-gfm's
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from browser import Window, chromium
from markdown_spec import counts, examples
from operating import app_of, service_of
from serving import serving

from ssmd.api.own.operations import PAGE
from ssmd.config import Settings


def main() -> None:
    print("| specification | examples | drawn so | of raw HTML | drawn so |\n| --- | ---: | ---: | ---: | ---: |")
    with serving(app_of(service_of(PAGE, Settings()))) as one, chromium() as browser:
        window = Window(browser.new_context(), f"http://127.0.0.1:{one.port}")
        window.page.goto(window.url)
        for name in sys.argv[1:]:
            passed, plain, raw_passed, raw = counts(window, examples(Path(name).read_text("utf-8")))
            print(f"| `{Path(name).name}` | {plain} | {passed} ({passed / plain:.1%}) | {raw} | {raw_passed} |")


if __name__ == "__main__":
    main()
