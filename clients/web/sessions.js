// The sessions: a list that is searched, and the tree of one.
import {ask} from "./api.js";
import {Act, Empty, Icon, Menu, Missing, Pill} from "./controls.js";
import {html, useEffect, useRef, useState} from "./html.js";
import {fail} from "./notices.js";
import {ago, bytes, many, plain} from "./numbers.js";
import {go} from "./route.js";
import {actions, hidden, imported} from "./session_actions.js";
import {Signal, use} from "./signal.js";
import {answerOf, askOf, grow, lanes} from "./tree.js";
import {onChange} from "./windows.js";

const PAGE = 60;
const SEARCH_MS = 250;
const LANE = 18; // px
const ROW = 40;
const WORDS = 90; // characters of a message in the tree

/** The sessions used last. null: not read yet. */
export const sessions = new Signal(null);
export const problem = new Signal(null); // why there are none

let reading = null;
/** Reads the list again. A call while it is being read waits for the next reading. */
export function refresh() {
  if (reading) return (reading.again = true);
  reading = {again: false};
  const read = reading;
  return ask(`/ssmd/v1/sessions?limit=${PAGE}`)
    .then((list) => (problem.set(null), sessions.set(list)))
    .catch((error) => error.code === "no_store" && (problem.set(error.message), sessions.set({data: [], has_more: false})))
    .then(() => {
      reading = null;
      if (read.again) setTimeout(refresh, 200);
    });
}
onChange(({kind}) => kind !== "hidden" && kind !== "shown" && kind !== "asked" && refresh());

/** About the first `most` that have all words. The daemon looks for a second at a time. */
async function looked(words, most) {
  let list = {data: [], has_more: true};
  for (let after = ""; list.has_more && list.data.length <= most - PAGE; ) {
    const part = await ask(`/ssmd/v1/sessions?limit=${PAGE}${words && `&search=${encodeURIComponent(words)}`}${after}`);
    after = `&after=${part.after ?? part.data.at(-1)?.id}`;
    list = {...part, data: [...list.data, ...part.data]};
  }
  return list;
}

export function weight(session) {
  const shared = session.bytes - session.own_bytes;
  return shared > 0 ? `${bytes(session.bytes)}, ${bytes(shared)} shared` : bytes(session.bytes);
}

export function Sessions({id}) {
  return html`<div class="view sessions">
    <header class="bar"><h1>Sessions</h1></header>
    <div class=${`columns ${id ? "one" : ""}`}><${List} chosen=${id} />${id && html`<${Tree} id=${id} key=${id} />`}</div>
  </div>`;
}

function List({chosen}) {
  const latest = use(sessions);
  const gone = use(hidden);
  const none = use(problem);
  const [words, setWords] = useState("");
  const [found, setFound] = useState(null); // for the words, or more than the latest
  const [over, setOver] = useState(false);
  const file = useRef(null);
  const [most, setMost] = useState(PAGE);
  useEffect(() => {
    if (!words && most === PAGE) return setFound(null);
    let asked = true;
    const show = (list) => asked && setFound(list);
    const look = () => looked(words, most).then(show, (error) => show({data: [], problem: error.message}));
    const timer = setTimeout(look, words && SEARCH_MS);
    return () => (clearTimeout(timer), (asked = false));
  }, [words, most, latest]);
  const list = found ?? latest;
  const rows = (list?.data ?? []).filter((session) => !gone.has(session.id));
  const drop = (event) => {
    event.preventDefault();
    setOver(false);
    imported([...event.dataTransfer.files]);
  };
  return html`<section class=${`list ${over ? "over" : ""}`} aria-label="List of sessions"
    onDragOver=${(event) => (event.preventDefault(), setOver(true))} onDragLeave=${() => setOver(false)} onDrop=${drop}>
    <div class="row search">
      <label class="find"><${Icon} name="find" /><span class="hidden">Search titles and words</span>
        <input type="search" placeholder="Search titles and words" maxlength="200" onInput=${(event) => (setMost(PAGE), setWords(event.target.value.trim()))} /></label>
      <input ref=${file} type="file" accept=".ssmd" multiple hidden aria-label="Session files" onChange=${(event) => (imported([...event.target.files]), (event.target.value = ""))} />
      <${Act} icon="in" label="Import" shown run=${() => file.current.click()} />
    </div>
    <p class="hint drop">A <code>.ssmd</code> file can be dropped here.</p>
    ${none && html`<${Empty} title="Nothing is kept">${none}<//>`}
    ${!none && list && !rows.length && html`<${Empty} title=${words ? "Nothing found" : "No sessions yet"}>${list.problem ?? (words ? "No title and no turn has all of these words." : "Every conversation appears here, whichever client began it.")}<//>`}
    <ul class="cards">${rows.map((session) => html`<${Row} key=${session.id} session=${session} chosen=${session.id === chosen} />`)}</ul>
    ${list?.has_more && html`<p class="center"><${Act} label="Show more" shown run=${() => setMost(most + PAGE)} /></p>`}
  </section>`;
}

function Row({session, chosen}) {
  return html`<li class=${`card session ${chosen ? "chosen" : ""}`}>
    <a class="cover" href=${`#/chat/${session.id}`} dir="auto"><bdi>${plain(session.title) || "Untitled"}</bdi></a>
    <span class="about">${session.pinned && html`<${Pill} kind="accent">pinned<//>`}${session.imported && html`<${Pill}>imported<//>`}
      ${session.model} · ${many(session.turn_count, "turn")} · ${weight(session)} · ${ago(session.last_used)}</span>
    <span class="ends"><${Act} icon="sessions" label="Show the tree" run=${() => go(`/sessions/${session.id}`)} /><${Menu} label=${`Actions for ${plain(session.title).slice(0, 60)}`} items=${actions(session)} /></span>
  </li>`;
}

/** A session's turns, drawn as a tree; each leads to the chat at that turn. */
function Tree({id}) {
  const [session, setSession] = useState(null);
  const [missing, setMissing] = useState(false);
  useEffect(() => {
    const load = () => ask(`/ssmd/v1/sessions/${id}`).then(setSession, (error) => (error.status === 404 ? setMissing(true) : fail(error)));
    load();
    return onChange((news) => (news.session === id || news.back) && load());
  }, [id]);
  if (missing) return html`<section class="detail" aria-label="Tree"><${Missing} /></section>`;
  if (!session) return html`<section class="detail" aria-label="Tree"></section>`;
  const rows = lanes(grow(session.turns), session.head);
  const width = (Math.max(...rows.map((row) => row.lane)) + 1) * LANE + 6;
  return html`<section class="detail" aria-label="Tree">
    <p class="row top"><h2 dir="auto">${plain(session.title)}</h2><a class="act framed" href="#/sessions">Close</a></p>
    <dl class="facts">
      <div><dt>Model</dt><dd>${session.model}</dd></div><div><dt>Turns</dt><dd>${session.turn_count}</dd></div>
      <div><dt>On disk</dt><dd>${weight(session)}</dd></div><div><dt>Used</dt><dd>${ago(session.last_used)}</dd></div>
    </dl>
    <ol class="tree">${rows.map((row, i, all, {turn} = row, head = turn.id === session.head) => html`<li key=${turn.id}><a href=${`#/chat/${id}/${turn.id}`} aria-current=${head ? "true" : undefined}>
      <${Lanes} row=${row} width=${width} head=${head} />
      <span class="words"><span dir="auto">${first(askOf(turn).at(-1))}</span><span class="faint" dir="auto">${first(answerOf(turn))}</span></span>
      ${head && html`<${Pill} kind="accent">head<//>`}${!turn.complete && html`<${Pill}>stopped<//>`}
    </a></li>`)}</ol>
  </section>`;
}

const first = (message) => plain((message?.content ?? "").slice(0, 400)).replace(/\s+/g, " ").slice(0, WORDS);

function Lanes({row, width, head}) {
  const x = (lane) => lane * LANE + LANE / 2 + 2;
  const mid = ROW / 2;
  const through = [...row.through].filter((lane) => lane !== null);
  const bend = `M${x(row.from)} 0C${x(row.from)} ${mid} ${x(row.lane)} 0 ${x(row.lane)} ${mid}`;
  return html`<svg class="lanes" width=${width} height=${ROW} aria-hidden="true">
    ${through.map((lane) => html`<path d=${`M${x(lane)} 0V${ROW}`} />`)}
    ${row.from !== null && html`<path d=${row.from === row.lane ? `M${x(row.lane)} 0V${mid}` : bend} />`}
    ${row.goes && html`<path d=${`M${x(row.lane)} ${mid}V${ROW}`} />`}
    <circle class=${head ? "head" : ""} cx=${x(row.lane)} cy=${mid} r="4.5" />
  </svg>`;
}
