// The chat: one conversation on the way that is looked at, with every fork on it.
import {ask} from "./api.js";
import {Composer, ModelPicker, Options, loadModels, modelFor, models, sampling} from "./composer.js";
import {attach} from "./attachments.js";
import {Act, Empty, Menu, Missing} from "./controls.js";
import {Conversation} from "./conversation.js";
import {html, useEffect, useLayoutEffect, useMemo, useRef, useState} from "./html.js";
import {draftOf, keepDraft} from "./kept.js";
import {daemon, metrics} from "./live.js";
import {fail} from "./notices.js";
import {count, many, plain} from "./numbers.js";
import {go, put} from "./route.js";
import {actions} from "./session_actions.js";
import {use, useChanges} from "./signal.js";
import {forksAt} from "./tree.js";
import {Announcer, Growing, Turn} from "./turn.js";

const FIRST_TURNS = 24; // drawn at once; the older ones when there is time
const MORE_TURNS = 8;
const NEARLY = 0.85; // of the context
const NEAR_PX = 80; // of the end, within which one goes along with it

let latest = null; // the conversation shown last, to which one may come back

/** id: of the session, null: a new one, the `count`th of this window. at: the turn to show. */
export function Chat({id, at, count}) {
  const conversation = useRef(at ? null : latest);
  const known = conversation.current;
  if (!known || known.id !== id || known.count !== count || (at && at !== known.shownAt)) {
    latest = conversation.current = new Conversation(id, at, (got) => put(got ? `/chat/${got}` : "/chat"));
    Object.assign(latest, {count, shownAt: at});
  }
  const mine = conversation.current;
  useEffect(() => mine.start(), [mine]);
  useChanges(mine);
  return html`<${Shown} mine=${mine} />`;
}

function Shown({mine}) {
  const [options, setOptions] = useState(false);
  const [chosen, setChosen] = useState(null);
  const [system, setSystem] = useState(null);
  const away = use(daemon) === "away";
  use(models);
  use(metrics, (now) => now?.models?.map((row) => row.state).join());
  useEffect(() => {
    setChosen(null);
    setSystem(null);
  }, [mine]);
  const model = modelFor(mine.session, chosen);
  const does = useMemo(() => doing(mine), [mine]);
  does.asking = async () => {
    if (!models.value.length) await loadModels();
    const model = modelFor(mine.session, chosen);
    if (!model) throw new Error("No model is installed.");
    return {model, system, sampling: sampling.value};
  };
  const stop = () => mine.answer.stop().catch(fail);
  const title = plain(mine.title) || (mine.session ? "" : "New chat");
  const empty = !mine.path.length && !mine.here;
  return html`<div class="chat" onDrop=${(event) => event.dataTransfer.types.includes("Files") && (event.preventDefault(), attach(mine.id ?? "new", event.dataTransfer.files))}>
    <header class="bar">
      <h1 dir="auto" title=${title}>${title}</h1>
      <${ModelPicker} value=${model} choose=${setChosen} />
      <${Act} icon="tune" label="System prompt and sampling" aria-expanded=${options} run=${() => setOptions(!options)} />
      ${mine.session && html`<${Menu} label="Session" items=${actions(mine.session, () => go("/chat"))} />`}
    </header>
    ${options && html`<${Options} model=${model} system=${system ?? mine.system} setSystem=${setSystem} />`}
    <${Flow} mine=${mine} does=${does}>
      ${mine.missing && html`<${Missing} />`}
      ${empty && !mine.missing && !mine.loading && html`<${Empty} title="What is said here stays here">Every turn is kept with the model's state. Continue, edit or branch at any point: nothing is read twice.<//>`}
    <//>
    <div class="foot">
      ${away && html`<p class="away" role="status">The daemon is away. What you type is kept.</p>`}
      <${Composer} mine=${mine} session=${mine.id} busy=${mine.busy} stoppable=${mine.answer && !mine.answer.over} send=${does.say} stop=${stop} />
      <${Room} room=${mine.path.length ? mine.roomAfter(mine.path.at(-1)) : null} />
    </div>
    <${Announcer} answer=${mine.busy ? mine.answer : null} />
  </div>`;
}

/** How full the model's context is. */
function Room({room}) {
  if (!room) return null;
  const part = room.used / room.context;
  const words = `${count(room.used)} of ${many(room.context, "token")} of context`;
  return html`<p class=${`room ${part > NEARLY ? "near" : ""}`}>
    <span class="track" role="meter" aria-label="Context" aria-valuemin="0" aria-valuemax="100" aria-valuenow=${Math.round(part * 100)} aria-valuetext=${words}><span class="fill" style=${{width: `${Math.min(1, part) * 100}%`}}></span></span>
    <span>${words}${part > NEARLY ? ". It is nearly full: the oldest messages will be left out." : ""}</span>
  </p>`;
}

/** What the turns' buttons do; one object, so that turns need not be drawn again. */
function doing(mine) {
  /** Asks in one of the conversation's ways. Answers with false if that could not be done. */
  const way = (name) => async (...what) => {
    try {
      await mine[name](await does.asking(), ...what);
    } catch (error) {
      fail(error);
      return false;
    }
  };
  const does = {
    say: way("say"),
    again: way("again"),
    goOn: way("goOn"),
    retry: way("retry"),
    anew: () => {
      const text = mine.answer.question.at(-1)?.content ?? draftOf(mine.id);
      keepDraft("new", [draftOf("new"), text].filter(Boolean).join("\n"));
      go("/chat");
    },
    step: (turn, what, by) => {
      const forks = forksAt(mine.tree, turn);
      mine.show(forks[`${what}s`][forks[what] + by]);
    },
    parting: (turn) => ask(`/ssmd/v1/sessions/${mine.id}/parting?turn=${turn.id}`),
    fork: async (turn) => {
      const made = await ask(`/ssmd/v1/sessions/${mine.id}/fork`, {method: "POST", body: {turn: turn.id}});
      go(`/chat/${made.id}`);
    },
  };
  return does;
}

/** The turns, the youngest drawn first; it goes along with its end while one is there. */
function Flow({mine, does, children}) {
  const box = useRef(null);
  const inner = useRef(null);
  const there = useRef(true);
  const path = mine.path;
  const shown = useFilled(mine, path.length);
  useLayoutEffect(() => {
    there.current = true;
    const follow = () => there.current && (box.current.scrollTop = box.current.scrollHeight);
    const seen = new ResizeObserver(follow);
    seen.observe(inner.current);
    follow();
    let before = 0;
    const scrolled = () => {
      const {scrollTop, scrollHeight, clientHeight} = box.current;
      if (scrollHeight - scrollTop - clientHeight < NEAR_PX) there.current = true;
      else if (scrollTop < before - 2) there.current = false;
      before = scrollTop;
    };
    const element = box.current;
    element.addEventListener("scroll", scrolled, {passive: true});
    return () => (seen.disconnect(), element.removeEventListener("scroll", scrolled));
  }, [mine]);
  useLayoutEffect(() => {
    if (mine.answer && !mine.answer.over) {
      there.current = true;
      box.current.scrollTop = box.current.scrollHeight;
    }
  }, [mine.answer]);
  const from = Math.max(0, path.length - shown);
  return html`<div class="flow" ref=${box} tabindex="0" role="region" aria-label="Conversation">
    <div class="inner" ref=${inner}>
      ${children}
      ${from > 0 && html`<p class="aside">${from} earlier turns are being drawn…</p>`}
      ${path.slice(from).map((turn, i) => {
        const {ask: a, asks, answer, answers} = forksAt(mine.tree, turn);
        const last = from + i === path.length - 1;
        const cut = mine.cutBefore(turn);
        const above = from + i > 0 ? mine.cutBefore(path[from + i - 1]) : 0;
        return html`<${Turn} key=${turn.id} turn=${turn} fork=${`${a}/${asks.length}/${answer}/${answers.length}`} last=${last && !mine.here}
          busy=${mine.busy && from + i >= path.length - FIRST_TURNS} usage=${mine.costOf(turn)} cut=${cut > above ? cut : 0} more=${mine.goesOn(turn)} does=${does} />`;
      })}
      ${mine.here && html`<${Growing} key="growing" answer=${mine.answer} retry=${() => does.retry()} anew=${does.anew} />`}
    </div>
  </div>`;
}

/** How many turns are drawn: soon all, but not in one go. */
function useFilled(mine, length) {
  const [shown, setShown] = useState(FIRST_TURNS);
  const filled = Math.min(shown, length);
  useEffect(() => setShown(FIRST_TURNS), [mine]);
  useEffect(() => {
    if (filled >= length) return undefined;
    const more = () => setShown((now) => now + MORE_TURNS);
    const idle = window.requestIdleCallback ?? ((run) => setTimeout(run, 30));
    const stop = window.cancelIdleCallback ?? clearTimeout;
    const handle = idle(more, {timeout: 200});
    return () => stop(handle);
  }, [mine, filled, length]);
  return Math.max(shown, FIRST_TURNS);
}
