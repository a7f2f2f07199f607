"""The examples of CommonMark's and GitHub's specifications, and what the page draws of each, as trees that compare."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from html.parser import HTMLParser
from typing import Any
from urllib.parse import unquote

from browser import Window

COMMONMARK = "commonmark-spec@0.31.2"
COMMONMARK_SHA256 = "588280df96c211f7ce9db0b7943ded34ac4b8ba321e2fdf9c03d188ec0f01fea"
_EXAMPLE = re.compile(r"^`{32} example ?([a-z ]*)\n(.*?)^\.\n(.*?)^`{32}$|^#{1,6} *([^\n]*)$", re.MULTILINE | re.DOTALL)
_TAG = re.compile(r"<[a-zA-Z/!?][^>]*>")
_VOID = ("br", "hr", "img", "input")
_BLOCKS = frozenset(
    ("p", "ul", "ol", "li", "blockquote", "pre", "table", "thead", "tbody", "tr", "th", "td", "hr", "br")
).union(f"h{level}" for level in range(1, 7))
_KEPT = ("href", "src", "title", "alt", "start", "class", "checked")
# Draws a message as the chat does. [name, attributes, children] of each element that Markdown has a name for.
_DRAW = """async (texts) => {
  const {html, render} = await import("/page/html.js");
  const {Written} = await import("/page/markdown_view.js");
  const inner = (node) => [...node.childNodes].flatMap(tree);
  const link = (node) => {
    const to = node.dataset.to ?? node.getAttribute("href") ?? "";
    const title = node.title ? {title: node.title} : {};
    const children = [...node.childNodes].filter((one) => !one.classList?.contains("faint")).flatMap(tree);
    if (!node.classList.contains("image")) return [["a", {href: to, ...title}, children]];
    const alt = children.join("");
    return [["img", {src: to, alt: !node.dataset.to && alt === "image" ? "" : alt, ...title}, []]];
  };
  const tree = (node) => {
    if (node.nodeType === Node.TEXT_NODE) return [node.data];
    const name = node.localName;
    if (!name) return [];
    if (node.classList.contains("heading")) return [[`h${/h(\\d)/.exec(node.className)[1]}`, {}, inner(node)]];
    if (node.classList.contains("wide")) return inner(node);
    if (node.classList.contains("soft")) return ["\\n"];
    if (name === "figure") {
      const language = node.querySelector("span").textContent;
      const more = language === "text" ? {} : {class: `language-${language}`};
      const code = node.querySelector("code").textContent;
      return [["pre", {}, [["code", more, code ? [`${code}\\n`] : []]]]];
    }
    if (name === "a" || node.classList.contains("unlinked")) return link(node);
    if (name === "td" && node.colSpan > 1) return [...Array(node.colSpan)].map(() => ["td", {}, []]);
    if (name === "input") return [["input", node.checked ? {checked: ""} : {}, []]];
    return [[name, name === "ol" && node.start !== 1 ? {start: String(node.start)} : {}, inner(node)]];
  };
  return texts.map((text) => {
    const root = document.createElement("div");
    render(html`<${Written} text=${text} />`, root);
    return inner(root.firstElementChild);
  });
}"""


@dataclass(frozen=True)
class Example:
    """raw: it is about HTML that goes through as it is, which a page of a daemon never does."""

    number: int
    section: str
    markdown: str
    html: str

    @property
    def raw(self) -> bool:
        return "HTML" in self.section or any(tag in self.markdown for tag in _TAG.findall(self.html))


def examples(spec: str) -> list[Example]:
    """Return the examples of a spec.txt."""
    found: list[Example] = []
    section = ""
    for match in _EXAMPLE.finditer(spec.replace("\r\n", "\n")):
        if match[4] is not None:
            section = match[4]
        else:
            found.append(Example(len(found) + 1, section, *(match[i].replace("→", "\t") for i in (2, 3))))
    return found


def failed(window: Window, spec: list[Example]) -> list[Example]:
    """Return those that the page draws with another structure than the specification has."""
    drawn = window.page.evaluate(_DRAW, [one.markdown.removesuffix("\n") for one in spec])
    return [one for one, tree in zip(spec, drawn, strict=True) if _plain(tree) != _plain(_parsed(one.html))]


def counts(window: Window, spec: list[Example]) -> tuple[int, int, int, int]:
    """Return how many pass of how many, then the same of those about raw HTML."""
    wrong = {one.number for one in failed(window, spec)}
    rows = Counter((one.raw, one.number not in wrong) for one in spec)
    return (
        rows[False, True],
        rows[False, True] + rows[False, False],
        rows[True, True],
        rows[True, True] + rows[True, False],
    )


class _Tree(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.stack: list[list[Any]] = [[]]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        node: list[Any] = [tag, {name: value or "" for name, value in attrs if name in _KEPT}, []]
        self.stack[-1].append(node)
        if tag not in _VOID:
            self.stack.append(node[2])

    def handle_endtag(self, tag: str) -> None:
        if tag not in _VOID and len(self.stack) > 1:
            self.stack.pop()

    def handle_data(self, data: str) -> None:
        self.stack[-1].append(data)


def _parsed(text: str) -> list[Any]:
    parser = _Tree()
    parser.feed(text)
    parser.close()
    return parser.stack[0]


def _plain(nodes: list[Any], verbatim: bool = False) -> list[Any]:
    """A tree without what no reader sees: spaces at a block's edge, how an address is written."""
    made: list[Any] = []
    for node in nodes:
        if isinstance(node, str):
            if made and isinstance(made[-1], str):
                made[-1] += node
            else:
                made.append(node)
        else:
            name, attributes, children = node
            plain = {k: _address(v) if k in ("href", "src") else v for k, v in attributes.items()}
            made.append([name, plain, _plain(children, verbatim or name == "pre")])
    if verbatim:
        return made
    trimmed: list[Any] = []
    for i, one in enumerate(made):
        if isinstance(one, str):
            if i == 0 or made[i - 1][0] in _BLOCKS:
                one = one.lstrip()
            if i + 1 == len(made) or made[i + 1][0] in _BLOCKS:
                one = one.rstrip()
        if one:
            trimmed.append(one)
    return trimmed


def _address(text: str) -> str:
    return re.sub(r"[/\\]", "", unquote(text).casefold())
