"""Texts for people: README keeps to its size, links lead somewhere, pages are current, docstrings are plain English."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from modules import FILES, ROOT

from ssmd.families.registry import FAMILIES
from ssmd.refit import catalog

README = ROOT / "README.md"
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [*sorted(ROOT.glob("*.md")), *DOCS]
LINK = re.compile(r"\]\(([^)\s]+)\)")
PATH = re.compile(r"`((?:ssmd|runtimes|tests|benchmarks|scripts|docs|migrations|clients)/[\w./-]*\w/?)`")
# A first line that only makes sense after the name: "Of a layer's recurrence.", "`rows`: how many.".
FRAGMENT = re.compile(
    r"(After|As|At|Because|Before|Between|By|For|From|If|In|Into|Like|Of|On|Or|So|To|Until|Unless|With|Within|Without)\b"
    r"|`|[a-z_]+: "
)
# A person, where a client, a request, a thread or a process is meant.
PERSON = re.compile(r"\b(who|whoever|whom|nobody|somebody|anybody)\b", re.IGNORECASE)
# A first line whose subject is a clause: "What is left of it.", "Whether there is one."
CLAUSE = re.compile(r"(What|Whether|How|Those|These|Who|Whose|Which|That)\b")
# The last word of a class's name, if it is a participle: "Listed", "FoundTurns" is a noun. Those in -ing are nouns of
# the field for the most part (Binding, Encoding), so the others are named.
PARTICIPLE = re.compile(
    r"[A-Z]?[a-z]*(?:[^e]ed|wn)|(?:Un)?[Bb]uilt|Found|Given|Gone|Hidden|Kept|Left|Lost|Made|Met|Said|Seen|Sent|Taken|Told"
    r"|Written|Answering|Asking|Getting|Giving|Going|Holding|Keeping|Making|Saying|Taking|Telling|Waiting"
)
IN_DIGESTS = {"Edited", "Held", "Shared"}  # of files that a change of makes all kept artifacts stale
MAX_SENTENCE_WORDS = 30
MAX_TEST_NAME = 60


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


def dead_links(page: Path) -> Iterator[str]:
    """Relative links of a page whose file, or whose heading in that file, is not there."""
    for link in LINK.findall(page.read_text("utf-8")):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            yield link


def dead_paths(page: Path) -> Iterator[str]:
    """Files and folders of the repository that a page names and that are not there."""
    yield from (path for path in PATH.findall(page.read_text("utf-8")) if not (ROOT / path).exists())


def fragments(text: str) -> Iterator[str]:
    """Public names in a module's source whose docstring's first line cannot be read without the name."""

    def walk(node: ast.AST, within: str) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) or child.name[0] == "_":
                continue
            if FRAGMENT.match(ast.get_docstring(child) or ""):
                yield within + child.name
            if isinstance(child, ast.ClassDef):
                yield from walk(child, f"{within}{child.name}.")

    return walk(ast.parse(text), "")


def docstrings(text: str) -> Iterator[tuple[str, str]]:
    """Yield the name and docstring of a module's source and of all in it."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if doc := ast.get_docstring(node):
            yield getattr(node, "name", "module"), doc


def odd_words(text: str) -> Iterator[str]:
    """Yield the names of a module's source whose docstring is not plain English, with the reason; and odd comments."""
    for name, doc in docstrings(text):
        if CLAUSE.match(doc):
            yield f"{name}: begins with {doc.split()[0]!r}"
        if found := PERSON.search(doc):
            yield f"{name}: says {found[0]!r}"
        for sentence in re.split(r"(?<=[.:;?!])\s+|\n\s*\n", doc):
            if len(sentence.split()) > MAX_SENTENCE_WORDS:
                yield f"{name}: {len(sentence.split())} words: {sentence[:40]!r}"
    # Finding a file's comments takes longer than parsing it, and most files name no person at all.
    for token in tokenize.generate_tokens(io.StringIO(text).readline) if PERSON.search(text) else ():
        if token.type == tokenize.COMMENT and (found := PERSON.search(token.string)):
            yield f"line {token.start[0]}: says {found[0]!r}"


def participles(texts: Sequence[str]) -> set[str]:
    """Return the classes of modules that are named by a participle and appear in a signature of a public function."""
    classes, used = set[str](), set[str]()
    for text in texts:
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef) and not any(_is_error(base) for base in node.bases):
                classes.add(node.name)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not re.match(r"_[^_]", node.name):
                for given in (node.args, *filter(None, [node.returns])):
                    used |= set(re.findall(r"\w+", ast.unparse(given)))
    return {name for name in classes & used if PARTICIPLE.fullmatch(re.split(r"(?<=[a-z0-9])(?=[A-Z])", name)[-1])}


def _is_error(base: ast.expr) -> bool:
    return bool(re.search(r"(Error|Exception|Rejected)$", ast.unparse(base)))  # StoreLocked is a sentence


def test_the_readme_fits_two_screens() -> None:
    text = README.read_text("utf-8")
    lines = text.splitlines()
    assert len(lines) <= 100
    assert len(text.split()) <= 800
    assert [line for line in lines if len(line) > 100] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_what_a_page_points_at_is_there(page: Path) -> None:
    assert list(dead_links(page)) == []
    if page.name not in ("log.md", "CHANGELOG.md"):  # these tell what was
        assert list(dead_paths(page)) == []


def test_a_dead_link_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One\n[a](page.md#one) [b](#two) [c](gone.md) [d](https://x.y/z) `ssmd/gone.py` `ssmd/config.py`")
    assert list(dead_links(page)) == ["#two", "gone.md"]
    assert list(dead_paths(page)) == ["ssmd/gone.py"]


def test_every_page_is_in_the_index() -> None:
    folder = ROOT / "docs"
    index = (folder / "README.md").read_text("utf-8")
    pages = [page.relative_to(folder).as_posix() for page in DOCS if page != folder / "README.md"]
    assert any(page.startswith("notes/") for page in pages)
    assert [page for page in pages if f"({page})" not in index] == []


def test_the_shipped_models_are_listed() -> None:
    shipped = {f"| `{name}` | {catalog.origin_of(name)} |" for name in catalog.names()}
    rows = (ROOT / "docs" / "models.md").read_text("utf-8").splitlines()
    assert shipped <= set(rows)
    assert all(name in README.read_text("utf-8") for name in catalog.names())


def test_the_families_are_listed() -> None:
    for page in (README, ROOT / "docs" / "models.md"):
        text = page.read_text("utf-8")
        assert [name for name in FAMILIES if f"`{name}`" not in text] == [], page


def test_the_threads_are_listed() -> None:
    """The threads of a daemon; `ssmd bench` has some of its own."""
    named = re.compile(r'(?:name|thread_name_prefix)="(ssmd-[a-z]+)"')
    found = {name for f in (ROOT / "ssmd").rglob("*.py") for name in named.findall(f.read_text("utf-8"))}
    page = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    assert len(found) > 5
    assert sorted(name for name in found if f"| `{name}` |" not in page) == []


def test_the_page_of_settings_is_current() -> None:
    """Made anew by: .venv/bin/python scripts/configuration > docs/configuration.md"""
    printed = subprocess.run(
        [sys.executable, ROOT / "scripts" / "configuration"], capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout
    assert printed == (ROOT / "docs" / "configuration.md").read_text("utf-8")


def test_docstrings_can_be_read_without_the_name() -> None:
    found = [f"{f.relative_to(ROOT)}: {name}" for f in FILES for name in fragments(f.read_text("utf-8"))]
    assert found == []


def test_a_fragment_is_seen() -> None:
    source = (
        'def a():\n    """Of a cache with so many rows."""\n'
        'class B:\n    """Rows of a cache."""\n    def c(self):\n        """`rows`: how many."""\n'
        '    def _d(self):\n        """Of nobody\'s business."""\n'
        'def e():\n    """Formats: all of them."""\n'
    )
    assert list(fragments(source)) == ["a", "B.c"]


def test_docstrings_are_plain_english() -> None:
    folders = ("ssmd", "runtimes", "clients", "tests", "benchmarks", "migrations")
    files = sorted(f for folder in folders for f in (ROOT / folder).rglob("*.py") if "data" not in f.parts)
    assert len(files) > 600
    assert [f"{f.relative_to(ROOT)}: {odd}" for f in files for odd in odd_words(f.read_text("utf-8"))] == []


def test_odd_words_are_seen() -> None:
    source = (
        'def a():\n    """What is left of it."""\n'
        'def b():\n    """Return the answer to whoever asks."""\n'
        'def c():\n    """Return the rows. A second sentence: short."""  # nobody reads it\n'
        f'def d():\n    """Return {"very " * 30}much."""\n'
    )
    assert list(odd_words(source)) == [
        "a: begins with 'What'",
        "b: says 'whoever'",
        "d: 32 words: 'Return very very very very very very ver'",
        "line 6: says 'nobody'",
    ]


def test_classes_in_signatures_are_nouns() -> None:
    assert participles([f.read_text("utf-8") for f in FILES]) - IN_DIGESTS == set()


def test_a_participle_is_seen() -> None:
    source = (
        "class Told: ...\nclass ModelsListed: ...\nclass RenderedPrompt: ...\nclass Unused: ...\nclass Seed: ...\n"
        "class Locked(OSError): ...\ndef f(a: Told | None, *, b: 'list[RenderedPrompt]') -> ModelsListed: ...\n"
        "def g(a: Locked, b: Seed) -> None: ...\ndef _h(a: Unused) -> None: ...\n"
    )
    assert participles([source]) == {"Told", "ModelsListed"}


def test_names_of_tests_are_short() -> None:
    tests = [
        f"{f.relative_to(ROOT)}: {name}"
        for f in sorted((ROOT / "tests").rglob("*.py"))
        for name in re.findall(r"^ *(?:async )?def (test_\w+)", f.read_text("utf-8"), re.MULTILINE)
    ]
    assert len(tests) > 2000
    assert [name for name in tests if len(name.partition(": ")[2]) > MAX_TEST_NAME] == []
