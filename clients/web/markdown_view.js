// Markdown as vnodes: text becomes text nodes, never markup.
import {Copy} from "./controls.js";
import {html, memo, useMemo, useRef, useState} from "./html.js";
import {Reader, inline, thoughts} from "./markdown.js";
import {count, plain} from "./numbers.js";

const LONGEST = 60_000; // characters of a message that are drawn at once
const FIRST = 20_000;
const drawn = new WeakMap(); // block → vnode: a block that stays is not looked at again

function parts(list) {
  return list.map((part) => {
    if (typeof part === "string") return part;
    if (part.type === "break") return html`<br />`;
    if (part.type === "code") return html`<code>${part.text}</code>`;
    if (part.type === "strong") return html`<strong>${parts(part.parts)}</strong>`;
    if (part.type === "em") return html`<em>${parts(part.parts)}</em>`;
    if (part.type === "del") return html`<del>${parts(part.parts)}</del>`;
    return html`<a href=${part.address} target="_blank" rel="noopener noreferrer nofollow">${parts(part.parts)}</a>`;
  });
}

const line = (text) => parts(inline(text));

function draw(block) {
  if (!drawn.has(block)) drawn.set(block, drawAnew(block));
  return drawn.get(block);
}

function drawAnew(block) {
  switch (block.type) {
    case "code":
      return html`<${Code} block=${block} />`;
    case "heading":
      return html`<p class=${`heading h${block.level}`} role="heading" aria-level=${Math.min(6, block.level + 2)}>
        ${line(block.text)}
      </p>`;
    case "rule":
      return html`<hr />`;
    case "quote":
      return html`<blockquote>${block.blocks.map(draw)}</blockquote>`;
    case "list": {
      const items = block.items.map((item) => html`<li>${item.length === 1 && item[0].type === "paragraph" ? line(item[0].text) : item.map(draw)}</li>`);
      return block.start === null ? html`<ul>${items}</ul>` : html`<ol start=${block.start}>${items}</ol>`;
    }
    case "table":
      return html`<div class="wide" tabindex="0" role="region" aria-label="Table"><table>
        <thead><tr>${block.head.map((cell, i) => html`<th scope="col" style=${{textAlign: block.align[i]}}>${line(cell)}</th>`)}</tr></thead>
        <tbody>${block.rows.map((row) => html`<tr>${row.slice(0, block.head.length).map((cell, i) => html`<td style=${{textAlign: block.align[i]}}>${line(cell)}</td>`)}</tr>`)}</tbody>
      </table></div>`;
    default:
      return html`<p>${line(block.text)}</p>`;
  }
}

function Code({block}) {
  return html`<figure class="code">
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

/** What a person wrote: as it was typed. */
export const Typed = memo(({text}) => html`<${TypedText} text=${text} />`);

function TypedText({text}) {
  const [whole, setWhole] = useState(false);
  const shown = clipped(text, whole);
  return html`<div class="typed" dir="auto">${plain(shown)}</div><${More} text=${text} shown=${shown} show=${() => setWhole(true)} />`;
}

/** What a model wrote: its reasoning folded, then Markdown. grows: it is not at its end yet. */
export function Written({text, grows = false}) {
  const [whole, setWhole] = useState(false);
  const reader = useRef(null);
  const {thought, said, open} = thoughts(text);
  const shown = grows ? said : clipped(said, whole);
  const clean = plain(shown);
  const blocks = useMemo(() => (reader.current ??= new Reader()).take(clean), [clean]);
  return html`<div class="written" dir="auto">
    ${thought !== null &&
    html`<details class="thought" open=${open && grows}>
      <summary>${open && grows ? "Thinking…" : "Reasoning"}</summary>
      <div class="typed">${plain(clipped(thought, whole))}</div>
    </details>`}
    ${blocks.map(draw)}
    <${More} text=${grows ? shown : said} shown=${shown} show=${() => setWhole(true)} />
  </div>`;
}
