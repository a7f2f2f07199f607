// One exchange in the chat: what was asked, the answer, and what can be done with both.
import {Act, Copy, Icon} from "./controls.js";
import {draftOf, keepDraft} from "./kept.js";
import {html, memo, useEffect, useLayoutEffect, useRef, useState} from "./html.js";
import {Typed, Written} from "./markdown_view.js";
import {thoughts} from "./markdown.js";
import {fail} from "./notices.js";
import {count, many, ms, plain} from "./numbers.js";
import {use, useChanges} from "./signal.js";
import {metrics} from "./live.js";
import {answerOf, askOf} from "./tree.js";

const ENDS = {length: "It ended at its token limit.", content_filter: "It was cut by a filter."};

const LITTLE = 64; // tokens that are read in a moment

const FOLDED = {system: "System prompt", developer: "System prompt", tool: "Result"};

const Folded = ({name, text}) => html`<details><summary>${name}</summary><${Typed} text=${text} /></details>`;

const Calls = ({calls}) => calls?.map((one) => html`<${Folded} name=${`Calls ${plain(one.function.name)}`} text=${one.function.arguments} />`);

/** The questions of a turn, the system prompt and what tools gave folded. */
function Asked({messages}) {
  return messages.map((message) =>
    FOLDED[message.role]
      ? html`<${Folded} name=${FOLDED[message.role]} text=${message.content} />`
      : message.role === "assistant"
        ? html`<div class="said"><${Written} text=${message.content} /><${Calls} calls=${message.tool_calls} /></div>`
        : html`<div class="asked"><h2 class="hidden">You said</h2><${Typed} text=${message.content} /></div>`,
  );
}

/** "‹ 2 of 3 ›" where there are several. */
function Switch({at, of, what, step}) {
  if (of < 2) return null;
  return html`<span class="switch" role="group" aria-label=${`${what} ${at + 1} of ${of}`}>
    <${Act} icon="left" label=${`Previous ${what}`} disabled=${at === 0} run=${() => step(-1)} />
    <span>${at + 1} / ${of}</span>
    <${Act} icon="right" label=${`Next ${what}`} disabled=${at === of - 1} run=${() => step(1)} />
  </span>`;
}

function Editor({name, text, done}) {
  const area = useRef(null);
  useLayoutEffect(() => { // at once: later it would move the caret of a user who types already
    area.current.focus();
    area.current.setSelectionRange(text.length, text.length);
  }, []);
  const cancel = () => (keepDraft(name, ""), done());
  const send = () => area.current.value.trim() && done(area.current.value);
  const keys = (event) => {
    if (event.key === "Escape") cancel();
    else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send();
    }
  };
  return html`<form class="editor" onSubmit=${(event) => (event.preventDefault(), send())}>
    <textarea ref=${area} rows="3" aria-label="Edit your message" onKeyDown=${keys} onInput=${(event) => keepDraft(name, event.target.value)}>${text}</textarea>
    <p class="row"><span class="hint">The earlier version stays, as a branch.</span>
      <button type="button" onClick=${cancel}>Cancel</button><button class="main">Send</button></p>
  </form>`;
}

/** What an answer cost, as far as it is known. words: how to ask where and with which words its prompt parts. */
function Cost({usage, words}) {
  const [parting, setParting] = useState(null);
  if (!usage) return null;
  const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
  const own = usage.ssmd ?? {};
  const told = [
    `${count(cached)} of ${many(usage.prompt_tokens, "token")} from cache`,
    `first token ${ms(own.ttft_ms)}`,
    own.tbt_ms ? `${(1000 / own.tbt_ms).toFixed(0)} tokens/s` : null,
    own.parted_at ? `differs from an earlier prompt after ${many(own.parted_at, "token")}` : null,
  ];
  const open = () => (parting ? setParting(null) : words().then(({parting: found}) => setParting({found: found?.position >= own.parted_at ? found : null}), fail));
  return html`<span class="cost">${told.filter(Boolean).join(" · ")}
    ${own.parted_at && words && html` <button type="button" class="link" aria-expanded=${Boolean(parting)} onClick=${open}>${parting ? "Hide the words" : "Show the words"}</button>`}</span>
    ${parting && html`<${Parting} ...${parting} />`}`;
}

/** Where a prompt and an earlier one part, and the words of both. found: null if the daemon has only one that is less alike. */
function Parting({found: parting}) {
  if (!parting) return html`<p class="parting">The earlier prompt is not stored.</p>`;
  const line = (name, text) => html`<dt>${name}</dt><dd dir="auto">…${plain(parting.before)}<mark>${plain(text)}</mark>…</dd>`;
  const same = !parting.here && !parting.there;
  return html`<div class="parting">
    <p>The first ${many(parting.position, "token")} are those of <a href=${`#/chat/${parting.session}/${parting.turn}`}>an earlier prompt</a>.${same && " Then the same words have other tokens."}</p>
    ${!same && html`<dl>${line("Here", parting.here)}${line("There", parting.there)}</dl>`}
  </div>`;
}

/** A stored turn. fork: "ask/asks/answer/answers", a text so that a turn is drawn only when it changes. */
export const Turn = memo((properties) => html`<${Exchange} ...${properties} />`);

/** cut: messages above that were left out here for the first time. more: the answer can go on. */
function Exchange({turn, fork, last, busy, usage, cut, more, does}) {
  const [editing, setEditing] = useState(() => Boolean(draftOf(turn.id)));
  const [ask, asks, answer, answers] = fork.split("/").map(Number);
  const question = askOf(turn);
  const asked = question.at(-1);
  const {content, tool_calls: calls} = answerOf(turn);
  const done = async (text) => {
    setEditing(false);
    if (text) await does.again(turn, text);
    setEditing(Boolean(draftOf(turn.id))); // what could not be sent
  };
  const end = !turn.complete ? "Stopped here." : turn.finish_reason === "length" && !more ? "The model's context is full." : ENDS[turn.finish_reason];
  return html`<article class="turn" data-turn=${turn.id}>
    ${editing
      ? html`<${Asked} messages=${question.slice(0, -1)} /><${Editor} name=${turn.id} text=${draftOf(turn.id) || asked.content}
          done=${done} />`
      : html`<${Asked} messages=${question} />`}
    ${!editing &&
    html`<div class="tools right">
      <${Switch} at=${ask} of=${asks} what="version of this message" step=${(by) => does.step(turn, "ask", by)} />
      ${asked?.role === "user" && html`<${Act} icon="edit" label="Edit this message" disabled=${busy} run=${() => setEditing(true)} />
        <${Copy} text=${() => asked.content} what="message" />`}
    </div>`}
    <div class="said"><h2 class="hidden">Answer</h2><${Written} text=${content} /><${Calls} calls=${calls} />
      ${end && html`<p class="aside">${end} ${more && html`<button class="link" disabled=${busy} onClick=${() => does.goOn(turn)}>Continue</button>`}</p>`}
      ${cut > 0 && html`<p class="aside">The oldest ${cut === 1 ? "message was" : `${count(cut)} messages were`} left out: the model's context has no room for more.</p>`}
      ${turn.unsaved && html`<p class="aside">Not stored: it is gone when this window is.</p>`}
    </div>
    <div class=${`tools ${last ? "stay" : ""}`}>
      <${Switch} at=${answer} of=${answers} what="answer" step=${(by) => does.step(turn, "answer", by)} />
      <${Copy} text=${() => thoughts(content).said} what="answer" />
      <${Act} icon="again" label="Answer again" disabled=${busy} run=${() => void does.again(turn)} />
      ${more && html`<${Act} icon="on" label="Continue this answer" disabled=${busy} run=${() => void does.goOn(turn)} />`}
      ${!turn.unsaved && html`<${Act} icon="fork" label="Fork into a new session here" run=${() => does.fork(turn)} />`}
      <${Cost} usage=${usage} words=${turn.unsaved ? null : () => does.parting(turn)} />
    </div>
  </article>`;
}

/** What happens before the first token, by the metrics. */
function Waiting({answer}) {
  const [, tick] = useState(0);
  const row = use(metrics, (now) => JSON.stringify(rowOf(now, answer)));
  useEffect(() => {
    const timer = setInterval(() => tick((n) => n + 1), 1000);
    return () => clearInterval(timer);
  }, [answer]);
  const {phase, model = "", fed, to_feed: of} = JSON.parse(row ?? "null") ?? {};
  const s = Math.floor((performance.now() - answer.began) / 1000);
  const told = {
    loading: `loading ${model.split("@")[0]}, ${s} s`,
    waiting: s > 0 ? `waiting for others, ${s} s` : "",
    restoring: "restoring its state",
    prefill: of > LITTLE ? `reading ${count(fed)} of ${count(of)}` : "",
  }[phase];
  return html`<p class="waiting"><span></span><span></span><span></span>${told ? html`<em role="status">${told}</em>` : html`<em class="hidden">Waiting for the first token</em>`}</p>`;
}

/** The row of an answer among the requests under way. One without an id yet waits for its model. */
const rowOf = (now, {id, session, request}) =>
  now?.running?.find((row) => (id ? row.id === id : session ? row.session === session : row.phase === "loading" && [row.model, row.model.split("@")[0]].includes(request?.model)));

/** The answer under way, drawn whenever something of it comes. */
export function Growing({answer, retry, anew}) {
  useChanges(answer);
  const broke = answer.state === "failed" || answer.state === "lost";
  const text = answer.begun + answer.text;
  return html`<article class="turn growing" aria-busy=${!answer.over}>
    ${answer.question ? html`<${Asked} messages=${answer.question} />` : html`<p class="aside">Asked by another client.</p>`}
    <div class="said"><h2 class="hidden">Answer</h2>
      ${text ? html`<${Written} text=${text} grows />` : !broke && html`<${Waiting} answer=${answer} />`}
      <${Calls} calls=${answer.calls} />
      ${broke && html`<p class="broke" role="alert">${answer.error} ${answer.removed ? html`<button class="link" onClick=${anew}>Ask in a new chat</button>` : answer.question?.length > 0 && html`<button class="link" onClick=${retry}>Try again</button>`}</p>`}
    </div>
  </article>`;
}

/** Tells a screen reader what came, whole sentences at a time. */
export function Announcer({answer}) {
  const [words, setWords] = useState("");
  useEffect(() => {
    if (!answer) return undefined;
    let told = 0;
    setWords("Answering");
    const look = () => {
      const {said} = thoughts(answer.text);
      const end = answer.over ? said.length : said.slice(told).search(/[.!?:]\s[^.!?:]*$/) + told + 1;
      if (end > told) {
        setWords(said.slice(told, Math.min(end, told + 2000)));
        told = end;
      } else if (answer.over) setWords(answer.error ?? "The answer is complete");
    };
    const timer = setInterval(look, 3000);
    const stop = answer.listen(() => answer.over && look());
    return () => (clearInterval(timer), stop());
  }, [answer]);
  return html`<div class="hidden" aria-live="polite">${words}</div>`;
}
