// Markdown as vnodes: text becomes text nodes, never markup.
import {Copy} from "./controls.js";
import {Component, h, html, memo, useMemo, useRef, useState} from "./html.js";
import {Reader, inline, thoughts, typed} from "./markdown.js";
import {count, plain} from "./numbers.js";
import {formula} from "./tex.js";

const LONGEST = 60_000; // characters of a message that are drawn at once
const FIRST = 20_000;
const ALIGNED = {left: "left", right: "right", center: "center"};
const drawn = new WeakMap(); // block → vnode: a block that stays is not looked at again

const words = (list) => list.map((part) => (typeof part === "string" ? part : part.text ?? words(part.parts ?? []))).join("");

function parts(list) {
  return list.map((part) => {
    if (typeof part === "string") return part;
    switch (part.type) {
      case "soft":
        return html`<br class="soft" />`;
      case "break":
        return html`<br />`;
      case "code":
        return html`<code dir="ltr">${part.text}</code>`;
      case "formula":
        return formula(part.text, part.display) ?? html`<code class="tex" dir="ltr">${part.source}</code>`;
      case "link":
        return html`<${Link} part=${part}>${parts(part.parts)}<//>`;
      case "image":
        return html`<${Link} part=${part} image>${words(part.parts) || (part.address ? "image" : "")}<//>`;
      default:
        return h(part.type, null, parts(part.parts));
    }
  });
}

/** A link; one that may not be followed is its words and where it was to lead. */
function Link({part: {address, to, title}, image, children}) {
  const kind = image ? "image" : undefined;
  if (address) return html`<a class=${kind} href=${address} title=${title ?? undefined} target="_blank" rel="noopener noreferrer nofollow">${children}</a>`;
  return html`<span class=${image ? "unlinked image" : "unlinked"} data-to=${to} title=${title ?? undefined}>${children}${to && html`<span class="faint" dir="ltr"> (${to})</span>`}</span>`;
}

/** Blocks as vnodes. dir: "auto" where a block has a direction of its own, not within one that has it. */
const draw = (address, dir = "auto") => (block) => {
  if (!drawn.has(block)) drawn.set(block, drawAnew(block, (text) => parts(inline(text, address)), address, dir));
  return drawn.get(block);
};

function drawAnew(block, line, address, dir) {
  const within = draw(address, undefined);
  switch (block.type) {
    case "code":
      return html`<${Code} block=${block} />`;
    case "formula":
      return html`<div class="wide formula" dir="ltr" tabindex="0" role="region" aria-label="Formula">${formula(withoutSigns(block.text), true) ?? html`<code class="tex">${block.text}</code>`}</div>`;
    case "heading":
      return html`<p class=${`heading h${block.level}`} role="heading" aria-level=${Math.min(6, block.level + 2)} dir=${dir}>${line(block.text)}</p>`;
    case "rule":
      return html`<hr />`;
    case "quote":
      return html`<blockquote dir=${dir}>${block.blocks.map(within)}</blockquote>`;
    case "list": {
      const one = (inner) => (block.tight && inner.type === "paragraph" ? line(inner.text) : within(inner));
      const items = block.items.map(({task, blocks}) => html`<li class=${task === null ? undefined : "task"}>${task !== null && html`<input type="checkbox" disabled checked=${task} aria-label=${task ? "done" : "to do"} />`}${blocks.map(one)}</li>`);
      return block.start === null ? html`<ul dir=${dir}>${items}</ul>` : html`<ol dir=${dir} start=${block.start}>${items}</ol>`;
    }
    case "table": {
      const columns = block.head.length;
      const style = (i) => ({textAlign: ALIGNED[block.align[i]]});
      return html`<div class="wide" tabindex="0" role="region" aria-label="Table"><table dir=${dir}>
        <thead><tr>${block.head.map((cell, i) => html`<th scope="col" style=${style(i)}>${line(cell)}</th>`)}</tr></thead>
        ${block.rows.length > 0 && html`<tbody>${block.rows.map((row) => html`<tr>${row.slice(0, columns).map((cell, i) => html`<td style=${style(i)}>${line(cell)}</td>`)}${row.length < columns && html`<td colspan=${columns - row.length}></td>`}</tr>`)}</tbody>`}
      </table></div>`;
    }
    default:
      return html`<p dir=${dir}>${line(block.text)}</p>`;
  }
}

/** A formula without the signs that it stands between. */
const withoutSigns = (text) => text.replace(/^(?:\\\[|\$\$)|(?:\\\]|\$\$)[ \t]*[.,;]?$/g, "");

function Code({block}) {
  return html`<figure class="code" dir="ltr">
    <figcaption><span>${block.language || "text"}</span><${Copy} text=${() => block.text} what="code" /></figcaption>
    <pre tabindex="0" aria-label=${block.language ? `Code, ${block.language}` : "Code"}><code>${block.text}</code></pre>
  </figure>`;
}

/** A message's text, or the beginning of a very long one. */
function clipped(text, whole) {
  return whole || text.length <= LONGEST ? text : text.slice(0, FIRST);
}

function More({text, shown, show}) {
  if (shown.length === text.length) return null;
  return html`<button class="more" onClick=${show}>Show all ${count(text.length)} characters</button>`;
}

/** What a person wrote: as it was typed, and its fenced blocks as code. */
export const Typed = memo(({text}) => html`<${TypedText} text=${text} />`);

function TypedText({text}) {
  const [whole, setWhole] = useState(false);
  const shown = clipped(text, whole);
  const blocks = useMemo(() => typed(plain(shown)), [shown]);
  return html`${blocks.map((block) => (block.type === "code" ? html`<${Code} block=${block} />` : html`<div class="typed" dir="auto">${block.text}</div>`))}<${More} text=${text} shown=${shown} show=${() => setWhole(true)} />`;
}

/** Draws what a model wrote, or its plain text if that fails: a defect in reading one answer hides no other turn. */
export class Written extends Component {
  componentDidCatch(error) {
    console.error(error);
    this.setState({failed: true});
  }
  render(props, {failed}) {
    return failed ? html`<div class="written"><div class="typed" dir="auto">${plain(props.text)}</div></div>` : html`<${Markdown} ...${props} />`;
  }
}

/** What a model wrote: its reasoning folded, then Markdown. grows: it is not at its end yet. */
function Markdown({text, grows = false}) {
  const [whole, setWhole] = useState(false);
  const reader = useRef(null);
  const {thought, said, open} = thoughts(text);
  const shown = grows ? said : clipped(said, whole);
  const clean = plain(shown);
  const blocks = useMemo(() => (reader.current ??= new Reader()).take(clean), [clean]);
  return html`<div class="written">
    ${thought !== null &&
    html`<details class="thought" open=${open && grows}>
      <summary>${open && grows ? "Thinking…" : "Reasoning"}</summary>
      <div class="typed" dir="auto">${plain(clipped(thought, whole))}</div>
    </details>`}
    ${blocks.map(draw(reader.current.address))}
    <${More} text=${grows ? shown : said} shown=${shown} show=${() => setWhole(true)} />
  </div>`;
}
