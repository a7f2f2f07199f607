// Markdown as plain objects: CommonMark with GitHub's tables, task lists and strikethrough, and formulas. No HTML but a few
// names of marks; links to http, https and mailto only. Linear in the text.
import {inlined, unescaped, withoutDefinitions, withoutSpaces} from "./inline.js";

const FENCE = /^(?:`{3,}|~{3,})/;
const FENCE_END = /^(?:`{3,}|~{3,})(?=[ \t]*$)/;
const HEADING = /^(#{1,6})(?:[ \t]+|$)/;
const UNDERLINE = /^(?:=+|-+)[ \t]*$/;
const RULE = /^(?:\*[ \t]*){3,}$|^(?:_[ \t]*){3,}$|^(?:-[ \t]*){3,}$/;
const BULLET = /^[*+-]/;
const NUMBER = /^(\d{1,9})[.)]/;
const COLUMNS = /^\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?$/; // of a line without spaces at its end, as FORMULA_END
const FORMULA = /^(?:\\\[|\$\$|\\begin\{[a-z]+\*?\})/;
const FORMULA_END = {"\\[": /\\\][ \t]*[.,;]?$/, "$$": /\$\$[ \t]*[.,;]?$/, "\\b": /\\end\{[a-z]+\*?\}[ \t]*[.,;]?$/};
const MAYBE = /^[#`~*+_=<>$0-9\\|:-]/; // what begins a block other than a paragraph
const DEEPEST = 10; // quotes and items in each other
const TAB = 4;

/** What reads a text that grows: only its last block is read again. */
export class Reader {
  text = "";
  blocks = [];
  #from = 0; // where the first block begins that is read again
  #kept = 0; // blocks before that
  #known = new Map(); // addresses of references that are not read again
  #latest = new Map();

  /** Takes the whole text as it is now. Blocks that stay are the same objects as before. */
  take(text) {
    if (!text.startsWith(this.text)) [this.blocks, this.#from, this.#kept, this.#known] = [[], 0, 0, new Map()];
    this.text = text;
    const {blocks, definitions, lines} = parsed(text.slice(this.#from));
    const found = blocks.map((one) => shown(one));
    this.blocks = [...this.blocks.slice(0, this.#kept), ...found];
    const again = readAgain(blocks, lines);
    this.#latest = new Map();
    for (const [label, to, line] of definitions) {
      const map = again >= 0 && line < blocks[again].line ? this.#known : this.#latest;
      if (!this.address(label)) map.set(label, to);
    }
    if (again > 0) {
      for (let i = 0; i < blocks[again].line; i++) this.#from += lines[i].length + 1;
      this.#kept += again;
    }
    return this.blocks;
  }

  /** Where a reference leads: {to, title}, or undefined. */
  address = (label) => this.#known.get(label) ?? this.#latest.get(label);
}

export const read = (text) => new Reader().take(text);

/** A block's words as parts: texts, and {type: "code" | "strong" | "link" | …}. address: where references lead. */
export const inline = (text, address = () => undefined) => inlined(text, address);

/** The first block that a longer text may change: the last one, or the one before, while the last line is not at its end. */
function readAgain(blocks, lines) {
  const last = blocks.length - 1;
  if (last < 1 || blocks[last].line < lines.length - 2 || !lines.at(-1).trim()) return last;
  const before = blocks[last - 1];
  const near = before.last === blocks[last].line - 1 || before.type === "list";
  return near && ["paragraph", "list", "quote", "table"].includes(before.type) ? last - 1 : last;
}

/** What was thought, null if nothing was, and all that was said after that. open: it still thinks. */
export function thoughts(text) {
  const [begins] = /^\s*<think>/.exec(text) ?? [""];
  // Where a template wrote the first tag, the other one ends a line.
  const end = (begins ? /<\/think>\s*/ : /<\/think>[ \t]*(?:\n\s*|$)/).exec(text);
  if (!end) return {thought: begins ? text.slice(begins.length) : null, said: begins ? "" : text, open: Boolean(begins)};
  const thought = text.slice(begins.length, end.index).trim();
  return {thought: thought || null, said: text.slice(end.index + end[0].length), open: false};
}

/** A typed text as it is, and its fenced blocks: [{text}, {type: "code", …}, …]. */
export function typed(text) {
  const found = [];
  const lines = text.split("\n");
  let from = 0;
  const words = (first, last) => {
    while (found.length && first < last && !lines[first].trim()) first++;
    while (last < lines.length && first < last && !lines[last - 1].trim()) last--;
    if (first < last) found.push({text: lines.slice(first, last).join("\n")});
  };
  for (let i = 0; i < lines.length; i++) {
    const [, indent, mark, info] = /^( {0,3})(`{3,}|~{3,})([^]*)$/.exec(lines[i]) ?? [];
    if (!mark || (mark[0] === "`" && info.includes("`"))) continue;
    words(from, i);
    const end = new RegExp(`^ {0,3}${mark[0]}{${mark.length},}[ \\t]*$`);
    const code = [];
    for (i++; i < lines.length && !end.test(lines[i]); i++) code.push(without(lines[i], indent.length));
    found.push({type: "code", language: info.trim(), text: code.join("\n")});
    from = i + 1;
  }
  words(from, lines.length);
  return found;
}

const without = (line, spaces) => line.slice(Math.min(spaces, line.search(/[^ ]|$/)));

/** {blocks, definitions, lines} of a text. */
function parsed(text) {
  const lines = text.split("\n");
  const blocks = new Blocks(lines);
  for (const line of lines) blocks.take(line);
  blocks.end();
  return {blocks: blocks.document.children, definitions: blocks.definitions, lines};
}

/** A block as it is shown, without what only its reading needs. */
function shown({type, children, ...block}) {
  switch (type) {
    case "heading":
      return {type, level: block.level, text: block.text};
    case "code":
      return {type, language: block.language, text: block.text, open: block.unclosed};
    case "quote":
      return {type, blocks: children.map(shown)};
    case "list":
      return {type, start: block.start, tight: block.tight, items: children.map(shownItem)};
    case "table":
      return {type, head: block.head, align: block.align, rows: block.rows};
    default:
      return type === "rule" ? {type} : {type, text: block.text};
  }
}

/** {task, blocks}. task: true or false if it is one to be done, else null. */
function shownItem({children}) {
  const blocks = children.map(shown);
  const [, mark] = (blocks[0]?.type === "paragraph" && /^\[([ xX])\][ \t]+(?=\S)/.exec(blocks[0].text)) || [];
  if (mark) blocks[0].text = blocks[0].text.slice(3).trimStart();
  return {task: mark ? mark !== " " : null, blocks};
}

/** Reads lines into a tree of blocks, as the specification's appendix has it: each line goes to the deepest open block. */
class Blocks {
  document = {type: "document", children: [], depth: 0, line: 0, open: true};
  definitions = []; // [label, {to, title}, line]
  #tip = this.document;
  #number = -1;
  #line = "";
  #at = 0; // in the line, and in columns
  #column = 0;
  #half = false; // within a tab
  #next = 0; // of what is no space
  #nextColumn = 0;
  #blank = false;
  #lines;
  #ends = null;

  constructor(lines) {
    this.#lines = lines;
  }

  get #indent() {
    return this.#nextColumn - this.#column;
  }

  get #rest() {
    return this.#line.slice(this.#next);
  }

  take(line) {
    this.#number++;
    [this.#line, this.#at, this.#column, this.#half] = [line, 0, 0, false];
    let container = this.document;
    for (;;) {
      const deeper = container.children?.at(-1);
      if (!deeper?.open) break;
      this.#look();
      const goes = this.#continues(deeper);
      if (goes === null) return; // the line is used up
      if (!goes) break;
      container = deeper;
    }
    this.#look();
    const matched = container;
    let begun = null;
    let leaf = container.lines !== undefined && container.type !== "paragraph" && container.type !== "table";
    while (!leaf) {
      this.#look();
      if (this.#indent < TAB && !MAYBE.test(this.#rest)) break;
      const one = this.#begins(container, matched);
      if (!one) break;
      container = begun = one;
      leaf = container.children === undefined;
    }
    this.#look();
    if (!begun && this.#tip !== matched && !this.#blank && this.#tip.type === "paragraph") return this.#add(this.#tip); // broken without a mark
    if (!begun) this.#close(matched);
    if (container.lines !== undefined) {
      if (container.type !== "heading") this.#add(container);
    } else if (container.children && !this.#blank) this.#add(this.#open(container, {type: "paragraph", lines: []}));
  }

  end() {
    this.#number++;
    this.#close(null);
  }

  /** Finds what is no space. */
  #look() {
    let [at, column] = [this.#at, this.#column];
    for (let c; (c = this.#line[at]) === " " || c === "\t"; at++) column += c === " " ? 1 : TAB - (column % TAB);
    [this.#next, this.#nextColumn, this.#blank] = [at, column, at >= this.#line.length];
  }

  #advance(count, columns = false) {
    for (let c; count > 0 && (c = this.#line[this.#at]); ) {
      if (c === "\t" && columns) {
        const width = TAB - (this.#column % TAB);
        this.#half = width > count;
        this.#column += Math.min(width, count);
        if (!this.#half) this.#at++;
        count -= Math.min(width, count);
      } else {
        this.#column += c === "\t" ? TAB - (this.#column % TAB) : 1;
        this.#half = false;
        this.#at++;
        count--;
      }
    }
  }

  #toNext() {
    [this.#at, this.#column, this.#half] = [this.#next, this.#nextColumn, false];
  }

  get #atSpace() {
    return this.#line[this.#at] === " " || this.#line[this.#at] === "\t";
  }

  /** Whether an open block has this line too; null: it ends with it. */
  #continues(block) {
    switch (block.type) {
      case "list":
        return true;
      case "quote":
        return this.#quote();
      case "item":
        if (this.#blank) {
          if (!block.children.length) return false;
          this.#toNext();
        } else if (this.#indent >= block.inner) this.#advance(block.inner, true);
        else return false;
        return true;
      case "code":
        return block.fence ? this.#goesOn(block) : this.#isCode();
      case "formula":
        return !this.#blank && !block.ended;
      case "paragraph":
      case "table":
        return !this.#blank;
      default:
        return false;
    }
  }

  #quote() {
    if (this.#indent >= TAB || this.#line[this.#next] !== ">") return false;
    this.#toNext();
    this.#advance(1);
    if (this.#atSpace) this.#advance(1, true);
    return true;
  }

  #isCode() {
    if (this.#indent >= TAB) this.#advance(TAB, true);
    else if (this.#blank) this.#toNext();
    else return false;
    return true;
  }

  #goesOn(block) {
    const end = this.#indent < TAB && FENCE_END.exec(this.#rest)?.[0];
    if (end && end[0] === block.fence[0] && end.length >= block.fence.length) {
      this.#close(block);
      block.ended = true;
      this.#finish(block, this.#number);
      return null;
    }
    for (let i = block.indent; i > 0 && this.#atSpace; i--) this.#advance(1, true);
    return true;
  }

  /** The block that begins in the rest of the line, or null. */
  #begins(container, matched) {
    const rest = this.#rest;
    const paragraph = container.type === "paragraph";
    if (this.#indent >= TAB) {
      if (this.#tip.type === "paragraph" || this.#blank) return null;
      this.#advance(TAB, true);
      return this.#open(container, {type: "code", lines: []});
    }
    const deep = container.depth >= DEEPEST;
    if (rest[0] === ">" && !deep) {
      this.#quote();
      return this.#open(container, {type: "quote", children: []});
    }
    const heading = HEADING.exec(rest);
    if (heading) {
      const text = rest.slice(heading[0].length).trimEnd().replace(/(^|[ \t])#+$/, "").trim();
      return this.#open(container, {type: "heading", level: heading[1].length, text});
    }
    const fence = FENCE.exec(rest)?.[0];
    if (fence && !(fence[0] === "`" && rest.includes("`", fence.length))) {
      const block = this.#open(container, {type: "code", fence, indent: this.#indent, lines: []});
      this.#toNext();
      this.#advance(fence.length);
      return block;
    }
    if (paragraph && matched === container) {
      if (UNDERLINE.test(rest) && this.#define(container)) {
        const text = container.lines.join("\n").trim();
        Object.assign(container, {type: "heading", level: rest[0] === "=" ? 1 : 2, text, last: this.#number, open: false});
        delete container.lines;
        this.#tip = container.parent;
        this.#at = this.#line.length;
        return container;
      }
      if (COLUMNS.test(withoutSpaces(rest)) && this.#table(container, rest)) return this.#tip;
    }
    if (RULE.test(rest)) return this.#open(container, {type: "rule"});
    const item = !deep && this.#item(container, rest);
    if (item) return item;
    if (FORMULA.test(rest) && this.#isFormula(rest)) return this.#open(container, {type: "formula", lines: []});
    return null;
  }

  #item(container, rest) {
    const number = NUMBER.exec(rest);
    const mark = number?.[0] ?? BULLET.exec(rest)?.[0];
    if (!mark || (rest.length > mark.length && !/[ \t]/.test(rest[mark.length]))) return null;
    const within = container.type === "paragraph";
    if (within && ((number && Number(number[1]) !== 1) || !rest.slice(mark.length).trim())) return null;
    const indent = this.#indent;
    this.#toNext();
    this.#advance(mark.length);
    const [at, column, half] = [this.#at, this.#column, this.#half];
    while (this.#column - column < TAB + 1 && this.#atSpace) this.#advance(1, true);
    const spaces = this.#column - column;
    const fits = spaces > 0 && spaces <= TAB && this.#at < this.#line.length;
    if (!fits) {
      [this.#at, this.#column, this.#half] = [at, column, half];
      if (this.#atSpace) this.#advance(1, true);
    }
    const sign = mark.at(-1);
    let list = container;
    if (container.type !== "list" || container.sign !== sign) {
      list = this.#open(container, {type: "list", sign, start: number ? Number(number[1]) : null, children: []});
    }
    return this.#open(list, {type: "item", inner: indent + mark.length + (fits ? spaces : 1), children: []});
  }

  /** Makes a paragraph's last line the head of a table, if the line below it has as many columns. */
  #table(container, rest) {
    const head = container.lines.at(-1);
    const columns = cells(rest);
    if (!head || !(head.includes("|") || rest.includes("|")) || cells(head).length !== columns.length) return false;
    container.lines.pop();
    const {parent} = container;
    const line = this.#number - 1;
    if (container.lines.length) this.#finish(container, line - 1);
    else {
      parent.children.pop();
      this.#tip = parent;
    }
    const align = columns.map((c) => (/^:-*:$/.test(c) ? "center" : c.endsWith(":") ? "right" : c[0] === ":" ? "left" : null));
    this.#append(parent, {type: "table", head: cells(head), align, lines: null, rows: [], line});
    this.#at = this.#line.length;
    return true;
  }

  /** Whether a formula that begins here ends at the end of a line before the next empty one. */
  #isFormula(rest) {
    const kind = rest.slice(0, 2);
    const words = withoutSpaces(rest.slice(2));
    if (kind !== "\\b" && FORMULA_END[kind].test(words)) return !words.replace(FORMULA_END[kind], "").includes(kind === "$$" ? "$$" : "\\]");
    if (kind === "$$" && words.includes("$$")) return false;
    this.#ends ??= formulaEnds(this.#lines);
    return this.#ends[kind][this.#number + (kind === "\\b" ? 0 : 1)] === true;
  }

  /** Ends what is open below a block; null: all. */
  #close(block) {
    while (this.#tip !== block && this.#tip) this.#finish(this.#tip, this.#number - 1);
  }

  /** Begins a block in another one, or in the one around it that can have it. */
  #open(container, block) {
    let inside = container;
    while (!(inside.children && (inside.type !== "list" || block.type === "item"))) inside = inside.parent;
    return this.#append(inside, block);
  }

  #append(container, block) {
    this.#close(container);
    const nests = block.type === "quote" || block.type === "item";
    Object.assign(block, {parent: container, depth: container.depth + (nests ? 1 : 0), line: block.line ?? this.#number, open: true});
    container.children.push(block);
    this.#tip = block;
    return block;
  }

  #add(block) {
    if (block.type === "paragraph") block.lines.push(this.#rest);
    else if (block.type === "table") {
      if (this.#at < this.#line.length) block.rows.push(cells(this.#rest));
    } else if (block.type === "formula") {
      block.lines.push(this.#rest);
      const only = block.lines.length === 1;
      const kind = block.lines[0].slice(0, 2);
      if (FORMULA_END[kind].test(withoutSpaces(only && kind !== "\\b" ? this.#rest.slice(2) : this.#rest))) block.ended = true;
    } else {
      const spaces = this.#half ? " ".repeat(TAB - (this.#column % TAB)) : "";
      block.lines.push(spaces + this.#line.slice(this.#at + (this.#half ? 1 : 0)));
    }
  }

  /** Takes the definitions of references off a paragraph. Returns whether anything else is in it. */
  #define(block) {
    if (block.lines[0]?.[0] !== "[") return true;
    const text = withoutDefinitions(block.lines.join("\n"), (label, to) => this.definitions.push([label, to, block.line]));
    block.lines = text.trim() ? text.split("\n") : [];
    return block.lines.length > 0;
  }

  #finish(block, last) {
    [block.open, block.last, this.#tip] = [false, last, block.parent ?? null];
    switch (block.type) {
      case "paragraph":
        if (this.#define(block)) block.text = block.lines.join("\n").trim();
        else block.parent.children.pop();
        break;
      case "formula":
        block.text = block.lines.join("\n").trim();
        if (!block.ended) block.type = "paragraph";
        break;
      case "code": {
        const info = block.fence ? block.lines.shift() : "";
        block.language = unescaped(info.trim()).split(/\s/)[0];
        if (!block.fence) while (block.lines.length && !/[^ \t]/.test(block.lines.at(-1))) block.lines.pop();
        block.text = block.lines.join("\n");
        block.last = block.fence ? last : block.line + block.lines.length - 1;
        block.unclosed = Boolean(block.fence) && !block.ended;
        break;
      }
      case "item":
        block.last = block.children.at(-1)?.last ?? block.line;
        break;
      case "list":
        block.tight = !block.children.some((item, i, all) => gap(item, all[i + 1]) || item.children.some((one, j, of) => gap(one, of[j + 1])));
        block.last = block.children.at(-1).last;
    }
    delete block.lines;
  }
}

const gap = (block, next) => next && block.last !== next.line - 1;

/** For each line, whether a formula ends at the end of it or of a line below, before an empty one. */
function formulaEnds(lines) {
  const found = {"\\[": [], $$: [], "\\b": []};
  const kinds = Object.keys(found);
  for (let i = lines.length - 1; i >= 0; i--) {
    const line = withoutSpaces(lines[i]);
    const blank = !/[^\s>]/.test(line);
    for (const kind of kinds) found[kind][i] = !blank && (FORMULA_END[kind].test(line) || found[kind][i + 1] === true);
  }
  return found;
}

/** The cells of a table's row; a bar after a backslash is one of the words. */
function cells(line) {
  const found = [];
  let cell = "";
  for (const [part] of line.trim().replace(/^\|/, "").matchAll(/\\[^]?|\||[^\\|]+/g)) {
    if (part !== "|") cell += part === "\\|" ? "|" : part;
    else {
      found.push(cell.trim());
      cell = "";
    }
  }
  if (cell.trim() || !found.length) found.push(cell.trim());
  return found;
}
