// The page: where one is, what stands around it, and the key prompt.
import {locked, giveKey, redeemTicket, unlocked} from "./api.js";
import {forgetOld, unstored} from "./answers.js";
import {Chat} from "./chat.js";
import {Act, Icon, State} from "./controls.js";
import {Dialog} from "./dialog.js";
import {html, render, useEffect, useRef, useState} from "./html.js";
import {daemon, follow, metrics} from "./live.js";
import {Notices, tell} from "./notices.js";
import {plain} from "./numbers.js";
import {go, route} from "./route.js";
import {hidden} from "./session_actions.js";
import {Sessions, problem, refresh, sessions} from "./sessions.js";
import {Signal, use} from "./signal.js";

const VIEWS = [["chat", "Chat"], ["sessions", "Sessions"], ["now", "Now"], ["models", "Models"]];
const BESIDE = 40; // sessions in the list at the side
const chats = new Signal(0);

/** Views that are not needed at once: read when there is time. */
const later = new Signal({});
function readLater() {
  Promise.all([import("./now.js"), import("./models.js")])
    .then(([{Now}, {Models}]) => later.set({Now, Models}))
    .catch(() => setTimeout(readLater, 2000)); // the daemon is away
}

function newChat() {
  chats.set(chats.value + 1);
  go("/chat");
}

function Page() {
  const [view = "chat", id = null, at = null] = use(route);
  const key = use(unlocked);
  const shut = use(locked);
  const count = use(chats);
  const {Now, Models} = use(later);
  const main = () => {
    if (view === "sessions") return html`<${Sessions} id=${id} />`;
    if (view === "now") return Now && html`<${Now} />`;
    if (view === "models") return Models && html`<${Models} />`;
    return html`<${Chat} id=${id} at=${at} count=${count} />`;
  };
  useEffect(() => {
    const named = VIEWS.find(([name]) => name === view);
    document.title = `${named?.[1] ?? "Chat"} – ssmd`;
  }, [view]);
  if (shut) return html`<${KeyPrompt} wrong=${shut === "wrong"} /><${Notices} />`;
  return html`<a class="skip" href="#main" onClick=${(event) => (event.preventDefault(), document.getElementById("main").focus())}>Skip to the content</a>
    <div class="frame" key=${key}>
      <${Side} view=${view} id=${id} />
      <main id="main" tabindex="-1">
        ${main()}
      </main>
    </div>
    <${Notices} /><${Dialog} />`;
}

function Side({view, id}) {
  const list = use(sessions);
  const gone = use(hidden);
  const none = use(problem);
  const now = use(metrics);
  const away = use(daemon) === "away";
  const running = new Set((now?.running ?? []).map((row) => row.session));
  const asked = use(unstored);
  const stored = list?.data ?? [];
  const first = asked.filter((one) => list && !stored.some((session) => session.id === one.id));
  const rows = [...first, ...stored].filter((session) => !gone.has(session.id)).slice(0, BESIDE);
  return html`<div class="side">
    <div class="brand"><a href="#/chat" onClick=${(event) => (event.preventDefault(), newChat())} aria-label="ssmd, new chat"><${Mark} />ssmd</a><${State} now=${now} away=${away} /></div>
    <nav class="views" aria-label="Views">${VIEWS.map(([name, label]) => html`<a href=${`#/${name}`} aria-current=${view === name ? "page" : undefined}><${Icon} name=${name} /><span>${label}</span></a>`)}</nav>
    <${Act} icon="plus" label="New chat" shown kind="framed new" run=${newChat} />
    <nav class="beside" aria-label="Recent sessions">
      ${none ? html`<p class="faint">Nothing is kept: the daemon runs with --no-store.</p>` : html`<ul>${rows.map((session) => html`<li key=${session.id}><a href=${`#/chat/${session.id}`} aria-current=${view === "chat" && id === session.id ? "page" : undefined} dir="auto">
        ${running.has(session.id) && html`<i class="live" title="An answer is under way"></i>`}<bdi>${plain(session.title) || "Untitled"}</bdi></a></li>`)}</ul>`}
    </nav>
  </div>`;
}

const Mark = () => html`<svg class="mark" viewBox="0 0 32 32" aria-hidden="true"><rect width="32" height="32" rx="8" /><path d="M8 21c4 0 4-10 8-10s4 10 8 10" /><circle cx="16" cy="11" r="2.6" /></svg>`;

function KeyPrompt({wrong}) {
  const field = useRef(null);
  const [said, setSaid] = useState(wrong ? "The key of this tab is not known here any more." : "");
  useEffect(() => field.current.focus(), []);
  const give = async (event) => {
    event.preventDefault();
    try {
      await giveKey(field.current.value.trim());
    } catch (error) {
      setSaid(error.status === 401 ? "That key is not known here." : error.message);
      field.current.select();
    }
  };
  return html`<main class="lock"><form onSubmit=${give}>
    <h1><${Mark} />ssmd</h1>
    <p>This daemon asks for a key. It is kept in this tab until you close it.</p>
    <label class="field"><span>API key</span><input ref=${field} type="password" autocomplete="off" aria-invalid=${said ? "true" : undefined} aria-describedby="key-said" /></label>
    <p id="key-said" class="problem" role="alert">${said}</p>
    <p class="row"><span></span><button class="main">Open</button></p>
  </form></main>`;
}

async function redeem(back) {
  try {
    await redeemTicket(back);
  } catch (error) {
    tell(error.status ? "The link was used already, or is too old." : error.message, "warning");
  }
}

async function begin() {
  await redeem();
  addEventListener("hashchange", ({oldURL}) => redeem(oldURL));
  // A file that misses the list does not take the page's place.
  for (const kind of ["dragover", "drop"]) addEventListener(kind, (event) => event.dataTransfer?.types.includes("Files") && event.preventDefault());
  route.set([...route.value]);
  render(html`<${Page} />`, document.getElementById("page"));
  performance.mark("drawn");
  readLater();
  forgetOld();
  refresh();
  follow();
}

begin();
