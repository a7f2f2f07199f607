"""The page's pure modules, in the browser that runs them: Markdown and the tree of turns."""

from __future__ import annotations

import pytest
from browser import Window

pytestmark = pytest.mark.ui
MARKDOWN = r"""async () => {
  const {read, inline, Reader, thoughts, safeAddress} = await import("/page/markdown.js");
  const text = "# One\n\ntwo **three** `four`\n\n- a\n- b\n  - c\n\n```js\nlet x;\n```\nend";
  const reader = new Reader();
  let blocks;
  for (let i = 1; i <= text.length; i++) blocks = reader.take(text.slice(0, i));
  const first = blocks[0];
  const began = performance.now();
  inline("*a ".repeat(50000) + "[".repeat(50000) + "a`".repeat(20000) + "_a".repeat(20000));
  for (const far of [" ".repeat(57000), "\t ".repeat(28000)]) {
    for (const line of [`# a${far}b`, `#${far}#${far}x`, "```" + far + "x`", `* * *${far}x`, `- ${far}x`]) read(line);
  }
  for (const mark of ["~", "`", "#", "-", "*", "_", "|"]) read(mark.repeat(57000) + "`");
  read("> ".repeat(20000) + "\n" + "- ".repeat(20000) + "\n|".repeat(20000));
  return {
    ms: performance.now() - began,
    grown: JSON.stringify(blocks), whole: JSON.stringify(read(text)), same: reader.take(text + " more")[0] === first,
    types: read(text).map((block) => block.type),
    marks: inline("a **b *c* d** ~~e~~ 2 * 3 snake_case_name `x`"),
    links: inline("[x](javascript:alert(1)) [y](https://a.b/c) <https://d.e> https://f.g/h, end"),
    addresses: ["javascript:1", "https://a.b", "mailto:a@b.c", "//x", "data:,x", "https://\0"].map(safeAddress),
    thoughts: [
      "<think>a</think>\nb", "<think>a", "b", "<think>a</think> b </think> c", "a </think> b </think> c",
      "a\n</think>\nb",
    ].map(thoughts),
    tables: ["a | b\n--|:-:\n1 | 2", "a | b\n-|\n1 | 2", "x\na | b\n-|-"].map(read),
    headings: ["# a", "#", "## b ##", "# c#", "#d", "# #", "#  e  #  "]
      .map((line) => read(line)[0]).map(({type, text}) => type === "heading" ? text : type),
    fences: ["~~~ js", "```js x", "```a`", "~~~~"]
      .map((line) => read(line + "\ny")[0]).map(({type, language}) => language ?? type),
    nested: read("1. a\n\n   b\n2. c\n   - d"),
  };
}"""
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
    assert told["grown"] == told["whole"]
    assert told["same"]
    assert told["types"] == ["heading", "paragraph", "list", "code", "paragraph"]
    assert told["marks"] == [
        "a ",
        {"type": "strong", "parts": ["b ", {"type": "em", "parts": ["c"]}, " d"]},
        " ",
        {"type": "del", "parts": ["e"]},
        " 2 ",
        "*",
        " 3 snake",
        "_",
        "case",
        "_",
        "name ",
        {"type": "code", "text": "x"},
    ]
    found = [part["address"] for part in told["links"] if isinstance(part, dict)]
    assert found == ["https://a.b/c", "https://d.e/", "https://f.g/h"]
    assert told["addresses"] == [None, "https://a.b/", "mailto:a@b.c", None, None, None]
    assert [(one["thought"], one["said"], one["open"]) for one in told["thoughts"]] == [
        ("a", "b", False),
        ("a", "", True),
        (None, "b", False),
        ("a", "b </think> c", False),
        (None, "a </think> b </think> c", False),
        ("a", "b", False),  # of a template that wrote the first tag itself
    ]
    [table], paragraph, after = told["tables"]
    assert table == {"type": "table", "head": ["a", "b"], "align": [None, "center"], "rows": [["1", "2"]]}
    assert [block["type"] for block in paragraph] == ["paragraph"], "not as many columns below as in the head"
    assert [block["type"] for block in after] == ["paragraph", "table"]
    [nested] = told["nested"]
    assert [[block["type"] for block in item] for item in nested["items"]] == [
        ["paragraph", "paragraph"],
        ["paragraph", "list"],
    ]
    assert told["headings"] == ["a", "", "b", "c#", "paragraph", "", "e"]
    assert told["fences"] == ["js", "js", "paragraph", ""]
    assert told["ms"] < 1000, "linear in the text"


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
