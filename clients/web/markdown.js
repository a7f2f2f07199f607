// A safe subset of Markdown as plain objects: no HTML, links to http, https and mailto only. Linear in the text.

const FENCE = /^ {0,3}(`{3,}(?!`)|~{3,}(?!~))(?!.*`)(.*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t](.*))?$/;
const RULE = /^ {0,3}(?:(?:\*[ \t]*){3,}|(?:-[ \t]*){3,}|(?:_[ \t]*){3,})$/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?:[ \t]+(.*)|)$/;
const QUOTE = /^ {0,3}> ?/;
const CELLS = /^ {0,3}\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;
const DEEPEST = 6; // lists in quotes in lists
const MOST_MARKS = 16; // emphasis in emphasis
const SPECIAL = /\\[!-/:-@[-`{-~]|`+|\*{1,3}|_{1,3}|~~|\[|<(?:https?|mailto):[^\s<>]{1,2000}>|https?:\/\/|\n/g;
const LINK = /\[((?:[^[\]\\\n]|\\.){1,1000})\]\([ \t]*<?([^\s()<>]{1,2000}(?:\([^\s()<>]{0,200}\)[^\s()<>]{0,200})?)>?(?:[ \t]+"[^"\n]{0,200}")?[ \t]*\)/y;
const BARE = /https?:\/\/[^\s<>"'`]{1,2000}/y;
const WORD = /[\p{L}\p{N}]/u;

/** What reads a text that grows: only its last block is read again. */
export class Reader {
  text = "";
  blocks = [];
  #from = 0; // where the last block begins

  /** Takes the whole text as it is now. Blocks that stay are the same objects as before. */
  take(text) {
    if (!text.startsWith(this.text)) [this.blocks, this.#from] = [[], 0];
    this.text = text;
    const found = blocksOf(text.slice(this.#from));
    this.blocks = [...this.blocks.slice(0, -1), ...found.map(([block]) => block)];
    if (found.length) this.#from += found.at(-1)[1];
    return this.blocks;
  }
}

export const read = (text) => new Reader().take(text);

/** What was thought, null if nothing was, and all that was said after that. open: it still thinks. */
export function thoughts(text) {
  const [begins] = /^\s*<think>/.exec(text) ?? [""];
  // Where a template wrote the first tag, the other one ends a line.
  const end = (begins ? /<\/think>\s*/ : /<\/think>[ \t]*(?:\n\s*|$)/).exec(text);
  if (!end) return {thought: begins ? text.slice(begins.length) : null, said: begins ? "" : text, open: Boolean(begins)};
  const thought = text.slice(begins.length, end.index).trim();
  return {thought: thought || null, said: text.slice(end.index + end[0].length), open: false};
}

/** The address of a link if it may be followed, else null. */
export function safeAddress(text) {
  try {
    const url = new URL(text);
    return ["http:", "https:", "mailto:"].includes(url.protocol) ? url.href : null;
  } catch {
    return null;
  }
}

/** [block, where it begins in the text] of each block. */
function blocksOf(text) {
  const lines = text.split("\n");
  const starts = [];
  let at = 0;
  for (const line of lines) {
    starts.push(at);
    at += line.length + 1;
  }
  return grouped(lines, 0).map(([block, line]) => [block, starts[line]]);
}

/** [block, its first line] of each block. */
function grouped(lines, depth) {
  const found = [];
  let i = 0;
  while (i < lines.length) {
    if (!lines[i].trim()) {
      i++;
      continue;
    }
    const [block, next] = blockAt(lines, i, depth);
    found.push([block, i]);
    i = next;
  }
  return found;
}

function blockAt(lines, i, depth) {
  const line = lines[i];
  const fence = FENCE.exec(line);
  if (fence) return fenced(lines, i, fence);
  const heading = HEADING.exec(line);
  if (heading) return [{type: "heading", level: heading[1].length, text: (heading[2] ?? "").trim().replace(/(^|[ \t])#+$/, "").trimEnd()}, i + 1];
  if (RULE.test(line)) return [{type: "rule"}, i + 1];
  if (depth < DEEPEST) {
    if (QUOTE.test(line)) return quoted(lines, i, depth);
    if (ITEM.test(line)) return listed(lines, i, depth);
  }
  if (isTable(lines, i)) return table(lines, i);
  return paragraph(lines, i, depth);
}

function fenced(lines, i, [, mark, language]) {
  const close = new RegExp(`^ {0,3}${mark[0]}{${mark.length},}[ \\t]*$`);
  let end = i + 1;
  while (end < lines.length && !close.test(lines[end])) end++;
  const block = {type: "code", language: language.trim().split(/\s/)[0], text: lines.slice(i + 1, end).join("\n")};
  return [{...block, open: end === lines.length}, end + 1];
}

function quoted(lines, i, depth) {
  let end = i;
  while (end < lines.length && QUOTE.test(lines[end])) end++;
  const inner = lines.slice(i, end).map((line) => line.replace(QUOTE, ""));
  return [{type: "quote", blocks: grouped(inner, depth + 1).map(([block]) => block)}, end];
}

/** A list: items at one indent; what is indented more belongs to the item above it. */
function listed(lines, i, depth) {
  const [, indent, mark] = ITEM.exec(lines[i]);
  const ordered = mark.length > 1;
  const items = [];
  let inner = 0;
  while (i < lines.length) {
    const item = ITEM.exec(lines[i]);
    const deep = lines[i].length - lines[i].trimStart().length;
    if (item && deep <= indent.length + 1 && !(items.length && deep < indent.length)) {
      if (item[2].length > 1 !== ordered || RULE.test(lines[i])) break;
      inner = deep + 2;
      items.push([item[3] ?? ""]);
    } else if (!lines[i].trim()) {
      const next = lines[i + 1] ?? "";
      const goes = ITEM.test(next) || next.length - next.trimStart().length >= inner;
      if (!next.trim() || !goes) break;
      items.at(-1).push("");
    } else if (deep >= inner) {
      items.at(-1).push(lines[i].slice(inner));
    } else if (item || endsParagraph(lines[i])) {
      break;
    } else {
      items.at(-1).push(lines[i].trim()); // a line that was broken without an indent
    }
    i++;
  }
  const start = ordered ? parseInt(mark, 10) : null;
  return [{type: "list", start, items: items.map((item) => grouped(item, depth + 1).map(([block]) => block))}, i];
}

/** A head, and below it a delimiter for each column, as GitHub has it. */
const isTable = (lines, i) =>
  lines[i].includes("|") && CELLS.test(lines[i + 1] ?? "") && cells(lines[i]).length === cells(lines[i + 1]).length;

function table(lines, i) {
  const align = cells(lines[i + 1]).map((c) => (/^:-*:$/.test(c) ? "center" : c.endsWith(":") ? "right" : null));
  const rows = [];
  let end = i + 2;
  for (; end < lines.length && lines[end].includes("|"); end++) rows.push(cells(lines[end]));
  return [{type: "table", head: cells(lines[i]), align, rows}, end];
}

const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());

function endsParagraph(line) {
  return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line);
}

function paragraph(lines, i, depth) {
  let end = i + 1;
  while (end < lines.length && lines[end].trim() && !endsParagraph(lines[end])) {
    if (depth < DEEPEST && ITEM.test(lines[end])) break;
    if (isTable(lines, end)) break;
    end++;
  }
  return [{type: "paragraph", text: lines.slice(i, end).map((line) => line.trim()).join("\n")}, end];
}

/** A line's parts: texts, and {type: "code" | "strong" | "em" | "del" | "link" | "break", …}. */
export function inline(text, links = true) {
  const frames = [{mark: null, parts: []}];
  const unclosed = new Set(); // lengths of runs of backticks that none follows any more
  let at = 0;
  const add = (part) => part !== "" && frames.at(-1).parts.push(part);
  SPECIAL.lastIndex = 0;
  for (let found; (found = SPECIAL.exec(text)); ) {
    add(text.slice(at, found.index));
    let end = found.index + found[0].length;
    const [sign] = found;
    if (sign === "\n") add({type: "break"});
    else if (sign[0] === "\\") add(sign[1]);
    else if (sign[0] === "`") {
      const close = unclosed.has(sign.length) ? -1 : closing(text, sign, end);
      if (close < 0) {
        unclosed.add(sign.length);
        add(sign);
      } else {
        add({type: "code", text: text.slice(end, close).replace(/\n/g, " ").replace(/^ (.*[^ ].*) $/, "$1")});
        end = close + sign.length;
      }
    } else if (sign === "[") {
      LINK.lastIndex = found.index;
      const link = links ? LINK.exec(text) : null;
      const address = link && safeAddress(link[2]);
      add(address ? {type: "link", address, parts: inline(link[1], false)} : sign);
      if (address) end = LINK.lastIndex;
    } else if (sign[0] === "<" || sign[0] === "h") {
      BARE.lastIndex = found.index;
      const bare = sign[0] === "<" ? sign.slice(1, -1) : (BARE.exec(text)?.[0] ?? sign).replace(/[.,;:!?)\]*_]+$/, "");
      const address = links ? safeAddress(bare) : null;
      add(address ? {type: "link", address, parts: [bare]} : sign);
      if (address && sign[0] === "h") end = found.index + bare.length;
    } else emphasise(frames, sign, text[found.index - 1] ?? " ", text[end] ?? " ", add);
    at = SPECIAL.lastIndex = end;
  }
  add(text.slice(at));
  while (frames.length > 1) unwrap(frames);
  return frames[0].parts;
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

function emphasise(frames, sign, before, after, add) {
  const marks = sign.length === 3 ? [sign.slice(0, 2), sign[0]] : [sign];
  const within = sign[0] === "_" && WORD.test(before) && WORD.test(after);
  const closes = !within && before.trim() !== "" && !(sign[0] === "_" && WORD.test(after));
  const opens = !within && after.trim() !== "" && !(sign[0] === "_" && WORD.test(before));
  for (const mark of closes ? [...marks].reverse() : marks) {
    if (closes && frames.some((frame) => frame.mark === mark)) {
      while (frames.at(-1).mark !== mark) unwrap(frames);
      const {parts} = frames.pop();
      const type = mark === "~~" ? "del" : mark.length === 2 ? "strong" : "em";
      frames.at(-1).parts.push(parts.length ? {type, parts} : mark + mark);
    } else if (opens && frames.length < MOST_MARKS) frames.push({mark, parts: []});
    else add(mark);
  }
}

function unwrap(frames) {
  const {mark, parts} = frames.pop();
  const around = frames.at(-1).parts;
  around.push(mark);
  for (const part of parts) around.push(part);
}
