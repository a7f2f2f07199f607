"""The share of examples in Markdown's specifications that the page draws correctly, in a real Chromium.

benchmarks/page_markdown.py SPEC…     prints a row for each spec.txt: CommonMark's (npm's commonmark-spec), cmark-gfm's
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from browser import Window, chromium
from markdown_spec import counts, examples
from serving import serving

from ssmd.api.http.keys import Keys
from ssmd.api.http.security import Rules, guarded
from ssmd.api.own.page import Page
from ssmd.config import Settings


def main() -> None:
    print("| specification | examples | drawn so | of raw HTML | drawn so |\n| --- | ---: | ---: | ---: | ---: |")
    page = Page.read()
    rules = Rules.of(Settings(), Keys.of(Settings()), open_paths=page.paths)
    with serving(guarded(page.routes(), rules)) as one, chromium() as browser:
        window = Window(browser.new_context(), f"http://127.0.0.1:{one.port}")
        window.page.goto(window.url)
        for name in sys.argv[1:]:
            passed, plain, raw_passed, raw = counts(window, examples(Path(name).read_text("utf-8")))
            print(f"| `{Path(name).name}` | {plain} | {passed} ({passed / plain:.1%}) | {raw} | {raw_passed} |")


if __name__ == "__main__":
    main()
