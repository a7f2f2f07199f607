"""The page's pure modules, in the browser that runs them: Markdown and the tree of turns."""

from __future__ import annotations

import re

import pytest
from browser import Window, npm_file
from conftest import ROOT
from markdown_spec import COMMONMARK, COMMONMARK_SHA256, examples, failed

pytestmark = pytest.mark.ui
MARKDOWN = r"""async () => {
  const {read, inline, Reader, thoughts} = await import("/page/markdown.js");
  const {safeAddress} = await import("/page/inline.js");
  const text = "# One\n\ntwo **three** `four`\n\n- a\n- b\n  - c\n\n```js\nlet x;\n```\nend";
  const reader = new Reader();
  reader.take(text);
  const [same] = reader.blocks;
  return {
    same: reader.take(text + " more")[0] === same,
    types: read(text).map((block) => block.type),
    marks: inline("a **b *c* d** ~~e~~ 2 * 3 snake_case_name `x` <b>f</b>"),
    links: inline("[x](javascript:alert(1)) [y](https://a.b/c) <https://d.e> https://f.g/h, end [z](data:,x)"),
    addresses: ["javascript:1", "https://a.b", "mailto:a@b.c", "//x", "data:,x", "https://\0"].map(safeAddress),
    thoughts: [
      "<think>a</think>\nb", "<think>a", "b", "<think>a</think> b </think> c", "a </think> b </think> c",
      "a\n</think>\nb",
    ].map(thoughts),
    tables: ["a | b\n--|:-:\n1 | 2", "a | b\n-|\n1 | 2", "x\na | b\n-|-", "a \\| b | `c\\|d`\n-|-\n1 | 2"].map(read),
    headings: ["# a", "#", "## b ##", "# c#", "#d", "# #", "#  e  #  ", "f\n==", "g\n--"]
      .map((line) => read(line)[0]).map(({type, text}) => type === "heading" ? text : type),
    fences: ["~~~ js", "```js x", "```a`", "~~~~"]
      .map((line) => read(line + "\ny")[0]).map(({type, language}) => language ?? type),
    wide: ["    \u00a0", "\t\ufeff", "a\n\n    \u3000\nb", "- a\n\n      \u00a0"].map((text) => {
      const found = (blocks) => blocks.map((one) => one.items ? found(one.items[0].blocks) : one).flat();
      return found(read(text)).find((one) => one.type === "code").text;
    }),
    bare: ["http://a.b/x_(y)).", "http://a.b/(c)))!", "http://a.b/x&amp;).", "http://a.b/;."]
      .map((text) => inline(text)[0].to),
    nested: read("1. a\n\n   b\n2. c\n   - [x] d"),
  };
}"""
# Code as models write it in lists: what is copied has to be what was written.
CODE = {
    "in a numbered list": (
        "1. x\n\n   ```python\n   def a():\n       return 1\n   ```\n2. y",
        "def a():\n    return 1",
    ),
    "in a tenth item": ("10. x\n\n    ```\n    a\n      b\n    ```", "a\n  b"),
    "in a nested list": ("- a\n  1. b\n     ~~~\n     c\n       d\n     ~~~", "c\n  d"),
    "with an indent of its own": ("  ```\n  a\n    b\n  ```", "a\n  b"),
    "less indented than its item": ("10. x\n\n   ```\n   a\n    b\n   ```", "a\n b"),
    "with tabs": ("- x\n\n  ```\n  \ta\n  ```", "\ta"),
    "in a quote": ("> ```\n> a\n>   b\n> ```", "a\n  b"),
}
COPIED = """async (text) => {
  const {read} = await import("/page/markdown.js");
  const found = (blocks) => blocks.flatMap((one) =>
    one.type === "code" ? [one.text] : found(one.blocks ?? (one.items ?? []).flatMap((item) => item.blocks)));
  return found(read(text));
}"""
GROWN = """async (texts) => {
  const {read, Reader} = await import("/page/markdown.js");
  return texts.filter((text) => {
    const reader = new Reader();
    for (let i = 1; i <= text.length; i++) reader.take(text.slice(0, i));
    return JSON.stringify(reader.blocks) !== JSON.stringify(read(text));
  });
}"""
FORMULAS = """async (texts) => {
  const {html, render} = await import("/page/html.js");
  const {Written} = await import("/page/markdown_view.js");
  return texts.map((text) => {
    const root = document.createElement("div");
    render(html`<${Written} text=${text} />`, root);
    const maths = [...root.querySelectorAll("math")];
    const one = (math) => [math.namespaceURI.endsWith("MathML"), math.getAttribute("display"), math.textContent];
    return [maths.map(one), root.textContent];
  });
}"""
# A builtin that fails while an answer is drawn stands for a defect that is not known yet.
FAILING = """async (text) => {
  const {html, render} = await import("/page/html.js");
  const {Written} = await import("/page/markdown_view.js");
  const root = document.createElement("div");
  const {has} = WeakMap.prototype;
  WeakMap.prototype.has = () => { throw new Error("a defect"); };
  try {
    render(html`<p>before</p><${Written} text=${text} /><p>after</p>`, root);
  } finally {
    WeakMap.prototype.has = has;
  }
  await new Promise((resolve) => setTimeout(resolve));
  return [...root.querySelectorAll("p, .typed")].map((one) => one.textContent);
}"""
# Milliseconds to read 8 and 64 kB that are one thing again and again.
HOSTILE = """async (parts) => {
  const {Reader, inline, typed} = await import("/page/markdown.js");
  const {formula} = await import("/page/tex.js");
  const words = (one, address) => {
    if (one.text !== undefined && one.type !== "code") inline(one.text, address);
    for (const cell of [...(one.head ?? []), ...(one.rows ?? []).flat()]) inline(cell, address);
    for (const inner of one.blocks ?? (one.items ?? []).flatMap((item) => item.blocks)) words(inner, address);
  };
  const took = (text) => {
    const began = performance.now();
    const reader = new Reader();
    for (const block of reader.take(text)) words(block, reader.address);
    typed(text);
    formula(text.slice(0, 5000));
    return performance.now() - began;
  };
  const fill = ([a, b = a, before = "", after = ""], size) =>
    before + a.repeat(size / 2 / a.length) + b.repeat(size / 2 / b.length) + after;
  return parts.map((part) => [Math.min(took(fill(part, 8000)), took(fill(part, 8000))), took(fill(part, 64000))]);
}"""
WORDS = (
    "[ ] * _ **a_ a** *a_ ~~a ` ``a a` < <b> </b> [a]( [a](<b [a](b) ![a](b) ![ [[]] [a][ > - # | = $ $a $$ \\( \\[ \\ "
    "& &a; <a@ http:// www. http://a) <http:// [a](b)[ <sub>[</sub>] [<b>] *[a*](b) ***a**b* {x ^{ \\frac{ \\left("
)
LINES = "> a|- a|- a\n|  - a|```|$$|\\[|a\n=|a\n-|[a]: b|[a|x\n-|- - - a|1) a\n2. b|a\\|a  |-|[x]|- [ ] a"
SPACED = '**a |*a |` ``|[a](b "|[a](b (|- |1. |\t- | |\t |$a |\n|\\begin{a}\n'
TABLES = ["|a|\n|-|\n", "a|b\n-|-\n", "|\n", "|a\n"]
PARTS = [*WORDS.split(), *(line + "\n" for line in LINES.split("|")), *SPACED.split("|"), *TABLES]
HALVES = [("[", ")"), ("*", "*b"), ("![", "](b)"), ("<b>", "</b>"), ("\\(", "\\)"), ("> ", "\n"), ("- ", "\na")]
# One thing again and again between two others: (what, what begins, what ends).
BETWEEN = [
    (" ", "a|b\n-", "x"),
    *((" ", f"{begins}\nx{ends}", "x") for begins, ends in (("\\[", "\\]"), ("$$", "$$"), ("\\begin{a}", "\\end{a}"))),
    ("a", "` ", "`"),
    ("`", "", "a`"),
]
TREE = """async () => {
  const {grow, pathTo, forksAt, lanes, leafBelow, withSystem} = await import("/page/tree.js");
  const turn = (id, parent, ask, said) =>
    ({id, parent, messages: [{role: "user", content: ask}, {role: "assistant", content: said}]});
  const turns = [turn("a", null, "q", "1"), turn("b", "a", "r", "2"), turn("c", "a", "r", "3")];
  turns.push(turn("d", "a", "s", "4"), turn("e", "b", "t", "5"));
  const tree = grow(turns);
  const {asks, ask, answers, answer} = forksAt(tree, tree.byId.get("c"));
  return {
    path: pathTo(tree, "e").map((one) => one.id),
    asks: asks.map((one) => one.id), ask, answers: answers.map((one) => one.id), answer,
    leaf: [leafBelow(tree, "a"), leafBelow(tree, "a", "e"), leafBelow(tree, "b")],
    lanes: lanes(tree, "e").map((row) => [row.turn.id, row.lane, row.from]),
    system: withSystem([{role: "system", content: "x"}, {role: "user", content: "y"}], "").length,
    kept: grow(turns, tree).byId.get("a") === tree.byId.get("a"),
  };
}"""


def test_markdown(window: Window) -> None:
    told = window.page.evaluate(MARKDOWN)
    assert told["same"]
    assert told["types"] == ["heading", "paragraph", "list", "code", "paragraph"]
    assert told["marks"] == [
        "a ",
        {"type": "strong", "parts": ["b ", {"type": "em", "parts": ["c"], "depth": 1}, " d"], "depth": 2},
        " ",
        {"type": "del", "parts": ["e"], "depth": 1},
        " 2 * 3 snake_case_name ",
        {"type": "code", "text": "x"},
        " ",
        {"type": "b", "parts": ["f"], "depth": 1},
    ]
    found = [(part["address"], part["parts"]) for part in told["links"] if isinstance(part, dict)]
    assert found == [
        (None, ["x"]),
        ("https://a.b/c", ["y"]),
        ("https://d.e/", ["https://d.e"]),
        ("https://f.g/h", ["https://f.g/h"]),
        (None, ["z"]),
    ]
    assert told["addresses"] == [None, "https://a.b/", "mailto:a@b.c", None, None, None]
    assert [(one["thought"], one["said"], one["open"]) for one in told["thoughts"]] == [
        ("a", "b", False),
        ("a", "", True),
        (None, "b", False),
        ("a", "b </think> c", False),
        (None, "a </think> b </think> c", False),
        ("a", "b", False),  # of a template that wrote the first tag itself
    ]
    [table], paragraph, after, [bars] = told["tables"]
    assert table == {"type": "table", "head": ["a", "b"], "align": [None, "center"], "rows": [["1", "2"]]}
    assert [block["type"] for block in paragraph] == ["paragraph"], "not as many columns below as in the head"
    assert [block["type"] for block in after] == ["paragraph", "table"]
    assert bars["head"] == ["a | b", "`c|d`"]
    [nested] = told["nested"]
    assert [[block["type"] for block in item["blocks"]] for item in nested["items"]] == [
        ["paragraph", "paragraph"],
        ["paragraph", "list"],
    ]
    assert nested["items"][1]["blocks"][1]["items"] == [{"task": True, "blocks": [{"type": "paragraph", "text": "d"}]}]
    assert told["headings"] == ["a", "", "b", "c#", "paragraph", "", "e", "f", "g"]
    assert told["fences"] == ["js", "js", "paragraph", ""]
    assert told["wide"] == ["\u00a0", "\ufeff", "\u3000", "\u00a0"]
    assert told["bare"] == ["http://a.b/x_(y)", "http://a.b/(c)", "http://a.b/x", "http://a.b/;"]


@pytest.mark.parametrize("where", CODE)
def test_code_keeps_its_indentation(window: Window, where: str) -> None:
    text, copied = CODE[where]
    assert window.page.evaluate(COPIED, text) == [copied]


def test_the_page_draws_the_examples_of_commonmark(window: Window) -> None:
    spec = examples(npm_file(ROOT / ".cache" / "commonmark", COMMONMARK, COMMONMARK_SHA256, "spec.txt"))
    assert len(spec) == 652
    # An entity's rare names, and addresses without brackets, which are links here as at GitHub.
    assert [one.number for one in failed(window, spec) if not one.raw] == [25, 602, 608, 611]


def test_a_text_that_grows_is_read_as_when_it_is_whole(window: Window) -> None:
    spec = examples(npm_file(ROOT / ".cache" / "commonmark", COMMONMARK, COMMONMARK_SHA256, "spec.txt"))
    texts = [one.markdown for one in spec]
    pairs = [texts[i * 7919 % 652] + texts[i * 104729 % 652] for i in range(300)]
    assert window.page.evaluate(GROWN, texts + pairs) == []


def test_formulas_are_drawn_or_left_as_they_are(window: Window) -> None:
    texts = [
        r"\(a^2\) and $x_1$, \[\frac{n}{2}\,k\]",
        "\\[\n\\begin{cases} 1 & x > 0 \\\\ 0 \\end{cases}\n\\]",
        r"it costs $5, or $10; \(\unheard{x}\)",
        "1. so\n   $$\n   \\sum_{i=1}^n i\n   $$",
        r"`\(a\)` and \\(b\\)",
        r"from $5 to $10, a change of $\frac{5}{5}$",
        r"Costs $5 and $6 today; \(a^2\) and $x_1$.",
    ]
    drawn, block, left, listed, code, *prices = window.page.evaluate(FORMULAS, texts)
    assert drawn == [[[True, None, "a2"], [True, None, "x1"], [True, "block", "n2k"]], "a2 and x1, n2k"]
    assert [(one[0], one[1]) for one in block[0]] == [(True, "block")]
    assert left == [[], r"it costs $5, or $10; \(\unheard{x}\)"]
    assert listed[0] == [[True, "block", "∑i=1ni"]]
    assert code == [[], r"\(a\) and \(b\)"]
    assert prices[0] == [[[True, None, "55"]], "from $5 to $10, a change of 55"]
    assert prices[1] == [[[True, None, "a2"], [True, None, "x1"]], "Costs $5 and $6 today; a2 and x1."]


def test_escaped_brackets_around_words_are_no_formula(window: Window) -> None:
    words = [
        r"C:\Program Files \(x86\)\Foo",
        r"on \(x86_64\), \(ARM64\) or \(H100\)",
        r"file\(s\)",
        r"open\(path, 'r'\)",
    ]
    words += [r"as said \(see below\)", r"a\[i\] and b\[0\]"]
    assert window.page.evaluate(FORMULAS, words) == [[[], re.sub(r"\\([()[\]])", r"\1", text)] for text in words]
    formulas = [
        r"\(x\)",
        r"\(n\)",
        r"\(x^2\)",
        r"\(2x\)",
        r"\(x1\)",
        r"\(10\)",
        r"\(ABC\)",
        r"\(abc\)",
        r"\(n-1\)",
        r"\(a, b\)",
    ]
    formulas += [
        r"\(f(x)\)",
        r"\(x_{12}\)",
        r"\(\alpha\)",
        r"\[42\]",
        r"当\(x\)时",
        r"f\(x^2\)",
        r"(\(x\))",
        r"\(\text{see below}\)",
    ]
    drawn = window.page.evaluate(FORMULAS, formulas)
    assert [text for text, (maths, _) in zip(formulas, drawn, strict=True) if len(maths) != 1] == []


def test_formulas_named_like_methods_stay_as_written(window: Window) -> None:
    names = [r"\constructor{a}", r"\toString x", r"\valueOf", r"\hasOwnProperty{x}", r"\not\frac12", r"\not{ab}"]
    texts = [rf"\({name}\)" for name in names]
    assert window.page.evaluate(FORMULAS, texts) == [[[], text] for text in texts]
    assert window.page.evaluate(FORMULAS, [r"\(\not\in\)"])[0][0] == [[True, None, "∈\u0338"]]


def test_an_answer_that_fails_to_draw_is_plain_text(window: Window) -> None:
    window.allowed = ["Error: a defect"]
    assert window.page.evaluate(FAILING, "a **b**\n\n- c") == ["before", "a **b**\n\n- c", "after"]


def test_hostile_texts_are_read_in_time_that_grows_with_them(window: Window) -> None:
    parts = [[part] for part in PARTS] + [list(one) for one in HALVES]
    parts += [[what, what, begins, ends] for what, begins, ends in BETWEEN]
    assert len(parts) > 60
    slow = [
        (part, small, large)
        for part, (small, large) in zip(parts, window.page.evaluate(HOSTILE, parts), strict=True)
        if large > 500 and large > small * 8 * 4
    ]
    assert slow == [], "eight times the text took more than 32 times as long"


def test_the_tree_of_turns(window: Window) -> None:
    assert window.page.evaluate(TREE) == {
        "path": ["a", "b", "e"],
        "asks": ["c", "d"],
        "ask": 0,
        "answers": ["b", "c"],
        "answer": 1,
        "leaf": ["d", "e", "e"],
        "lanes": [["a", 0, None], ["c", 1, 0], ["d", 1, 0], ["b", 0, 0], ["e", 0, 0]],
        "system": 1,
        "kept": True,
    }
