// The words of a Markdown block as parts: emphasis, code, links, formulas, and the few marks of HTML that have a name here.
import {entity} from "./entities.js";

const SPECIAL = /[\\`*_~[\]!<&$\n]|https?:\/\/|www\./g;
const PUNCTUATION = /[!-/:-@[-`{-~]/;
const SIGN = /[\p{P}\p{S}]/u;
const WIDE = /[\p{sc=Han}\p{sc=Hiragana}\p{sc=Katakana}\p{sc=Hangul}]/u; // written without spaces
const SPACE = /[\s\u00a0]/;
const ADDRESS = /<([a-z][a-z0-9+.-]{1,31}:[^\s<>]{0,2000})>/iy;
const MAIL = /<([a-zA-Z0-9.!#$%&'*+/=?^_`{|}~-]{1,256}@[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?(?:\.[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?){0,20})>/y;
const BARE = /(?:https?:\/\/|www\.)[^\s<"`\u3000-\u303f\uff00-\uffef]{1,2000}/y;
const BARE_IN_BRACKETS = /(?:https?:\/\/|www\.)[^\s<\]"`\u3000-\u303f\uff00-\uffef]{1,2000}/y;
const TAG = /<(\/?)(sub|sup|kbd|b|i|u|s|em|strong|del|ins|mark|small|q|br)\s{0,9}(\/?)>/iy;
const ENTITY = /&(?:#x[a-f0-9]{1,6}|#[0-9]{1,7}|[a-z][a-z0-9]{1,31});/iy;
const NAMES = /\\[!-/:-@[-`{-~]|&(?:#x[a-f0-9]{1,6}|#[0-9]{1,7}|[a-z][a-z0-9]{1,31});/gi;
const TITLE = /"(?:[^"\\]|\\[^]){0,1000}"|'(?:[^'\\]|\\[^]){0,1000}'|\((?:[^()\\]|\\[^]){0,1000}\)/y;
const ANGLED = /<((?:[^<>\n\\]|\\.){0,2000})>/y;
const LABEL = /\[((?:[^[\]\\]|\\[^]){0,999})\]/y;
const BLANK = /[ \t]*(?:\n[ \t]*)?/y;
const LINE_END = /[ \t]*(?:\n|$)/y;
const MOST_OPEN = 16; // tags, and images, at a time
const DEEPEST = 24; // marks in marks
const LONGEST_FORMULA = {"\\(": 2000, "\\[": 5000, $$: 5000, $: 500};
const MONEY = /^[^\\^_={}<>+*/|]*\s[^\\^_={}<>+*/|]*$/; // "5 and 10" of "$5 and 10$"

const PLAIN = /^[\p{L}\p{N}\s,.'"-]+$/u; // no sign of a formula in it
const NAME = /^\p{L}+\d{2,}(?:[_-]\d+)?$/u; // "x86"
const PROSE = /\p{Ll}{3}\s+\p{Ll}{3}/u; // "see below"

/** Whether escaped brackets are around words, as in "\(x86\)", "\(see below\)" and "file\(s\)". before: the character there. */
const wordy = (text, before) => NAME.test(text) || (PLAIN.test(text) && (PROSE.test(text) || /[a-z0-9]/i.test(before)));

/** The address of a link if it may be followed, else null. */
export function safeAddress(text) {
  if (!/^[\s\0]*(?:https?|mailto):/i.test(text)) return null;
  try {
    const url = new URL(text);
    return ["http:", "https:", "mailto:"].includes(url.protocol) ? url.href : null;
  } catch {
    return null;
  }
}

/** A text with its escapes and entities as what they stand for. */
export const unescaped = (text) =>
  text.replace(NAMES, (one) => (one[0] === "\\" ? one[1] : (entity(one) ?? one)));

const labelled = (text) => text.trim().replace(/\s+/g, " ").toLowerCase().toUpperCase();

/** What follows the definitions of references that a paragraph begins with. found: called with the label and {to, title}. */
export function withoutDefinitions(text, found) {
  let at = 0;
  while (text[at] === "[") {
    const label = matched(LABEL, text, at);
    if (!label?.[1].trim() || text[LABEL.lastIndex] !== ":") break;
    const begins = after(BLANK, text, LABEL.lastIndex + 1);
    const to = destination(text, begins);
    if (!to || (!to.text && text[begins] !== "<")) break;
    const {end} = to;
    let title = null;
    const from = after(BLANK, text, end);
    const given = from > end && matched(TITLE, text, from);
    let line = given && matched(LINE_END, text, from + given[0].length);
    if (line) title = unescaped(given[0].slice(1, -1));
    else line = matched(LINE_END, text, end);
    if (!line) break;
    found(labelled(label[1]), {to: to.text, title});
    at = LINE_END.lastIndex;
  }
  return text.slice(at);
}

function matched(pattern, text, at) {
  pattern.lastIndex = at;
  return pattern.exec(text);
}

function after(pattern, text, at) {
  matched(pattern, text, at);
  return pattern.lastIndex;
}

/** {text, end} of a link's destination, or null. */
function destination(text, at) {
  if (text[at] === "<") {
    const angled = matched(ANGLED, text, at);
    return angled && {text: unescaped(angled[1]), end: ANGLED.lastIndex};
  }
  let [end, open] = [at, 0];
  for (; end < text.length && end - at < 2000; end++) {
    const c = text[end];
    if (c === "\\" && PUNCTUATION.test(text[end + 1] ?? "")) end++;
    else if (c === "(") open++;
    else if (c === ")" && open-- === 0) break;
    else if (c <= " " || c === "\u007f") break;
    if (open > 32) return null;
  }
  return open > 0 ? null : {text: unescaped(text.slice(at, end)), end};
}

/** A line's parts: texts, and {type, …}. address: where a reference leads, {to, title} or undefined. */
export function inlined(text, address) {
  return new Line(text, address).parts();
}

/** Reads from the left to the right; what may begin something waits in two stacks until its end comes. */
class Line {
  #text;
  #address;
  #first = {next: null, before: null}; // of a list of nodes: {part, next, before}
  #last = this.#first;
  #signs = []; // runs of * _ ~~ that may open or close
  #opened = []; // brackets and tags
  #count = {}; // of those that are open, by name
  #unclosed = new Set(); // runs of backticks that end nowhere any more
  #ends = {}; // where the next end of a formula is, by its beginning
  #at = 0;

  constructor(text, address) {
    [this.#text, this.#address] = [text, address];
  }

  parts() {
    const text = this.#text;
    SPECIAL.lastIndex = 0;
    let from = 0;
    for (let found; (found = SPECIAL.exec(text)); SPECIAL.lastIndex = from = this.#at) {
      if (found.index > from) this.#add(text.slice(from, found.index));
      this.#at = found.index;
      this.#take(found[0]);
    }
    if (from < text.length) this.#add(text.slice(from));
    this.#emphasise(0);
    return collected(this.#first.next);
  }

  #add(part) {
    const node = {part, next: null, before: this.#last};
    this.#last.next = node;
    return (this.#last = node);
  }

  #take(sign) {
    const text = this.#text;
    const at = this.#at;
    const next = text[at + 1];
    this.#at += 1;
    switch (sign) {
      case "\\":
        if ((next === "(" || next === "[") && this.#formula(`\\${next}`, next === "(" ? "\\)" : "\\]", at)) return;
        if (next === "\n") this.#break("break");
        else if (next && PUNCTUATION.test(next)) {
          this.#add(next);
          this.#at = at + 2;
        } else this.#add(sign);
        return;
      case "\n": {
        const {part} = this.#last;
        if (typeof part === "string") this.#last.part = withoutSpaces(part);
        this.#at = at;
        return this.#break(typeof part === "string" && part.endsWith("  ") ? "break" : "soft");
      }
      case "`":
        return this.#code(at);
      case "$":
        if (next === "$" ? this.#formula("$$", "$$", at) : this.#formula("$", "$", at)) return;
        this.#at = next === "$" ? at + 2 : at + 1;
        this.#add(text.slice(at, this.#at));
        return;
      case "&": {
        const name = matched(ENTITY, text, at)?.[0];
        const stands = name && entity(name);
        if (stands) this.#at = at + name.length;
        this.#add(stands ?? sign);
        return;
      }
      case "<":
        return this.#angle(at);
      case "[":
        return this.#openBracket("[");
      case "!":
        if (next !== "[" || this.#count.image >= MOST_OPEN) return void this.#add(sign);
        this.#at = at + 2;
        return this.#openBracket("![", "image");
      case "]":
        return this.#bracket(at);
      case "*":
      case "_":
      case "~":
        return this.#run(sign, at);
      default:
        return this.#bare(sign, at);
    }
  }

  /** Ends a line; spaces that the next one begins with are none. */
  #break(type) {
    this.#add({type});
    this.#at = after(/\n[ \t]*/y, this.#text, this.#at);
  }

  #open(text, name, more) {
    this.#count[name] = (this.#count[name] ?? 0) + 1;
    this.#opened.push({node: this.#add(text), name, signs: this.#signs.length, ...more});
  }

  #openBracket(text, name = "link") {
    const around = this.#bracketOpen;
    if (around) around.inner = true;
    this.#open(text, name, {at: this.#at, active: true});
  }

  get #bracketOpen() {
    return this.#opened.findLast((one) => !one.tag);
  }

  #code(at) {
    const [run] = matched(/`+/y, this.#text, at);
    const end = at + run.length;
    const close = this.#unclosed.has(run) ? -1 : closing(this.#text, run, end);
    if (close < 0) {
      this.#unclosed.add(run);
      this.#at = end;
      return void this.#add(run);
    }
    const words = this.#text.slice(end, close).replace(/\n/g, " ");
    this.#add({type: "code", text: words[0] === " " && words.at(-1) === " " && /[^ ]/.test(words) ? words.slice(1, -1) : words});
    this.#at = close + run.length;
  }

  /** Takes a formula from its sign to the next end. Returns whether there is one. */
  #formula(open, close, at) {
    const text = this.#text;
    const from = at + open.length;
    if (open === "$" && (SPACE.test(text[from] ?? " ") || /[\p{L}\p{N}$]/u.test(text[at - 1] ?? ""))) return false;
    let end = this.#ends[open] ?? 0;
    if (end < from) {
      end = text.indexOf(close, from);
      // Of one character, an end has words before and none after it.
      while (open === "$" && end >= 0 && (SPACE.test(text[end - 1]) || text[end - 1] === "\\" || /[\p{L}\p{N}]/u.test(text[end + 1] ?? ""))) end = text.indexOf(close, end + 1);
      this.#ends[open] = end = end < 0 ? Infinity : end;
    }
    if (end - from > LONGEST_FORMULA[open]) return false;
    const formula = text.slice(from, end).trim();
    if (!/[\p{L}\p{N}]/u.test(formula) || (open === "$" && (MONEY.test(formula) || /`|(?<!\\)\$/.test(formula)))) return false;
    if (open[0] === "\\" && wordy(formula, text[at - 1] ?? "")) return false;
    this.#at = end + close.length;
    this.#add({type: "formula", text: formula, source: text.slice(at, this.#at), display: open === "\\[" || open === "$$"});
    return true;
  }

  #angle(at) {
    const text = this.#text;
    const link = matched(ADDRESS, text, at) ?? matched(MAIL, text, at);
    if (link) {
      this.#at = at + link[0].length;
      const to = ADDRESS.lastIndex === this.#at ? link[1] : `mailto:${link[1]}`;
      return void this.#add({type: "link", to, address: safeAddress(to), title: null, parts: [link[1]]});
    }
    const tag = matched(TAG, text, at);
    if (!tag) return void this.#add("<");
    this.#at = at + tag[0].length;
    const name = tag[2].toLowerCase();
    if (name === "br") return void this.#add(tag[1] ? tag[0] : {type: "break", tag: tag[0]});
    if (!tag[1] && !tag[3] && !(this.#count[name] >= MOST_OPEN)) this.#open(tag[0], name, {tag: true});
    else if (tag[1] && this.#count[name]) {
      const opened = this.#popTo((one) => one.name === name);
      this.#wrap(opened.node, {type: name}, opened.signs);
    } else this.#add(tag[0]);
  }

  /** The youngest that is open and fits; what was opened after it stays as words. */
  #popTo(fits) {
    for (;;) {
      const one = this.#opened.pop();
      this.#count[one.name]--;
      if (fits(one)) return one;
    }
  }

  #bracket(at) {
    const opened = this.#bracketOpen;
    if (!opened) return void this.#add("]");
    if (!opened.active) {
      this.#popTo((one) => one === opened);
      return void this.#add("]");
    }
    const found = this.#inlineLink(at + 1) ?? this.#reference(opened, at);
    this.#popTo((one) => one === opened);
    if (!found) return void this.#add("]");
    this.#at = found.end;
    const {to, title} = found;
    this.#wrap(opened.node, {type: opened.name, to, address: safeAddress(to), title}, opened.signs);
    for (let i = this.#opened.length - 1; opened.name === "link" && i >= 0; i--) {
      const one = this.#opened[i];
      if (one.name !== "link") continue;
      if (!one.active) break;
      one.active = false; // no link in a link
    }
  }

  #inlineLink(at) {
    const text = this.#text;
    if (text[at] !== "(") return null;
    const to = destination(text, after(/\s{0,99}/y, text, at + 1));
    if (!to) return null;
    let end = after(/\s{0,99}/y, text, to.end);
    const title = end > to.end ? matched(TITLE, text, end) : null;
    if (title) end = after(/\s{0,99}/y, text, TITLE.lastIndex);
    return text[end] === ")" ? {to: to.text, title: title && unescaped(title[0].slice(1, -1)), end: end + 1} : null;
  }

  #reference(opened, at) {
    const text = this.#text;
    const label = matched(LABEL, text, at + 1);
    const end = label ? at + 1 + label[0].length : at + 1;
    let name = label?.[1];
    if (!name) {
      if (at - opened.at > 999 || opened.inner) return null;
      name = text.slice(opened.at, at);
    }
    const found = name.trim() ? this.#address(labelled(name)) : undefined;
    return found && {...found, end};
  }

  /** Puts what follows a node into a part that takes the node's place. */
  #wrap(node, part, signs) {
    this.#emphasise(signs);
    const parts = collected(node.next);
    node.next = null;
    this.#last = node;
    node.part = {...part, parts: part.type === "link" ? parts.flatMap(unlinked) : parts, depth: deepest(parts)};
  }

  #bare(sign, at) {
    const text = this.#text;
    const found = /[a-z0-9]/i.test(text[at - 1] ?? "") ? null : matched(this.#bracketOpen ? BARE_IN_BRACKETS : BARE, text, at)?.[0];
    const bare = found && withoutSentence(found);
    const to = sign === "www." ? `http://${bare}` : bare;
    const address = bare && /^(?:https?:\/\/|www\.)[^/?#]*\w/.test(bare) ? safeAddress(to) : null;
    this.#at = at + (address ? bare.length : sign.length);
    this.#add(address ? {type: "link", to, address, title: null, parts: [bare]} : sign);
  }

  #run(sign, at) {
    const text = this.#text;
    let end = at + 1;
    while (text[end] === sign) end++;
    this.#at = end;
    const node = this.#add(text.slice(at, end));
    if (sign === "~" && end - at !== 2) return;
    const before = at === 0 ? " " : String.fromCodePoint(text.codePointAt(at - (text[at - 1] >= "\udc00" && text[at - 1] <= "\udfff" ? 2 : 1)));
    const behind = end >= text.length ? " " : String.fromCodePoint(text.codePointAt(end));
    const [spaceBefore, spaceAfter] = [SPACE.test(before), SPACE.test(behind)];
    const [signBefore, signAfter] = [SIGN.test(before), SIGN.test(behind)];
    const left = !spaceAfter && (!signAfter || spaceBefore || signBefore || WIDE.test(before));
    const right = !spaceBefore && (!signBefore || spaceAfter || signAfter || WIDE.test(behind));
    const opens = sign === "_" ? left && (!right || signBefore) : left;
    const closes = sign === "_" ? right && (!left || signAfter) : right;
    if (opens || closes) this.#signs.push({sign, node, count: end - at, whole: end - at, opens, closes});
  }

  /** Pairs the runs above the `bottom` of their stack, which is left without them. */
  #emphasise(bottom) {
    const runs = this.#signs.splice(bottom);
    runs.forEach((run, i) => Object.assign(run, {before: runs[i - 1] ?? null, after: runs[i + 1] ?? null}));
    const lowest = new Map(); // below which none opens for a run like this
    const drop = (run) => {
      if (run.before) run.before.after = run.after;
      if (run.after) run.after.before = run.before;
    };
    for (let close = runs[0] ?? null; close; ) {
      if (!close.closes) {
        close = close.after;
        continue;
      }
      const kind = `${close.sign}${close.opens}${close.whole % 3}`;
      const low = lowest.get(kind) ?? null;
      let open = close.before;
      for (; open && open !== low; open = open.before) {
        const odd = (close.opens || open.closes) && close.whole % 3 !== 0 && (open.whole + close.whole) % 3 === 0;
        if (open.sign === close.sign && open.opens && (close.sign === "~" || !odd)) break;
      }
      if (!open || open === low) {
        const next = close.after;
        lowest.set(kind, close.before);
        if (!close.opens) drop(close);
        close = next;
        continue;
      }
      const use = open.count >= 2 && close.count >= 2 ? 2 : 1;
      if (!this.#mark(open, close, use)) return;
      [open.after, close.before] = [close, open];
      if (!open.count) drop(open);
      if (!close.count) {
        drop(close);
        close = close.after;
      }
    }
  }

  /** Puts what lies between two runs into a part. Returns false if that is deeper than a page may be: all stay as words. */
  #mark(open, close, use) {
    const [first, last] = [open.node.next, close.node.before];
    last.next = null;
    const parts = first === close.node ? [] : collected(first);
    const depth = deepest(parts);
    last.next = close.node;
    if (depth > DEEPEST) return false;
    open.count -= use;
    close.count -= use;
    const type = open.sign === "~" ? "del" : use === 2 ? "strong" : "em";
    const node = {part: {type, parts, depth}, before: open.node, next: close.node};
    open.node.next = close.node.before = node;
    open.node.part = open.node.part.slice(use);
    close.node.part = close.node.part.slice(use);
    return true;
  }
}

const deepest = (parts) => parts.reduce((most, part) => Math.max(most, 1 + (part.depth ?? 0)), 1);

/** A part of a link's words: no link. */
const unlinked = (part) =>
  part.type === "link" ? part.parts : part.parts && part.type !== "image" ? {...part, parts: part.parts.flatMap(unlinked)} : part;

/** A bare address without the signs at its end that belong to the words around it. */
function withoutSentence(text) {
  let end = text.length;
  let unopened = text.split(")").length - text.split("(").length;
  for (;;) {
    const c = text[end - 1] ?? "";
    const name = c === ";" ? /&[a-z0-9]{1,31};$/i.exec(text.slice(Math.max(0, end - 33), end)) : null;
    if (name) end -= name[0].length;
    else if (c === ")" ? unopened-- > 0 : c && "?!.,:*_~'\"`".includes(c)) end--;
    else return text.slice(0, end);
  }
}

/** A line without the spaces and tabs at its end. */
export function withoutSpaces(text) {
  let end = text.length;
  while (text[end - 1] === " " || text[end - 1] === "\t") end--;
  return text.slice(0, end);
}

/** The parts from a node on; texts beside each other are one. */
function collected(node) {
  const parts = [];
  for (; node; node = node.next) {
    if (node.part === "") continue;
    if (typeof node.part === "string" && typeof parts.at(-1) === "string") parts[parts.length - 1] += node.part;
    else parts.push(node.part);
  }
  return parts;
}

/** Where the run of backticks that ends a span begins, or -1. */
function closing(text, run, from) {
  for (let at = text.indexOf(run, from); at >= 0; ) {
    let end = at + run.length;
    while (text[end] === "`") end++;
    if (end - at === run.length) return at;
    at = text.indexOf(run, end);
  }
  return -1;
}
