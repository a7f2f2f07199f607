// Where one writes: the message, its draft, how it is answered.
import {attach} from "./attachments.js";
import {Act, Icon} from "./controls.js";
import {html, useEffect, useLayoutEffect, useRef, useState} from "./html.js";
import {draftOf, drafts, keepDraft, readJson, writeJson} from "./kept.js";
import {ask, unlocked} from "./api.js";
import {Signal, use} from "./signal.js";
import {metrics} from "./live.js";
import {tell} from "./notices.js";

const MANY = 1e9; // no bound that a person has in mind

/** [name, label, the step of its arrows, its value if neither the user nor the model sets it]; those of sampling as in
    ssmd/model/defaults.py. The daemon declares the bounds. */
const KNOBS = [
  ["temperature", "Temperature", 0.1, "1"],
  ["top_p", "Top p", 0.01, "1"],
  ["top_k", "Top k", 1, "all"],
  ["min_p", "Min p", 0.01, "0"],
  ["repetition_penalty", "Repetition penalty", 0.05, "1"],
  ["dry_multiplier", "DRY, against loops", 0.1, "0"],
  ["max_tokens", "Longest answer", 1, "2,048 tokens"],
  ["seed", "Seed", 1, "random"],
];
/** {whole, least, most} of each number that a request may have, as the daemon declares them; null: not read yet. */
const ranges = new Signal(null);

async function readRanges() {
  const {paths} = await ask("/openapi.json");
  const {properties} = paths["/v1/chat/completions"].post.requestBody.content["application/json"].schema;
  const found = KNOBS.map(([name]) => {
    const of = [properties[name], ...(properties[name].anyOf ?? [])].find((one) => one.minimum !== undefined) ?? {};
    return [name, {whole: of.type === "integer", least: of.minimum, most: of.maximum ?? of.exclusiveMaximum - 1}];
  });
  ranges.set(Object.fromEntries(found));
}

/** Why a text is no value, or "". */
function wrong(text, {whole, least, most} = {}) {
  const number = Number(text);
  if (text === "" || (!Number.isNaN(number) && !(number < least || number > most) && !(whole && !Number.isInteger(number)))) return "";
  const bounds = least < -MANY ? "" : most > MANY ? ` of ${least} or more` : ` from ${least} to ${most}`;
  return `${whole ? "A whole number" : "A number"}${bounds}.`;
}

/** Sampling as it was chosen last, for all sessions. */
export const sampling = new Signal(readJson("sampling", {}));
sampling.listen((chosen) => writeJson("sampling", chosen));

export const models = new Signal([]);
const defaults = new Signal({}); // of sampling, by the model's id
export async function loadModels() {
  const {data} = await ask("/v1/models");
  defaults.set(Object.fromEntries(data.map((model) => [model.id, model.ssmd.defaults])));
  models.set(data.map((model) => model.id));
}
unlocked.listen(() => loadModels().catch(() => {}));
let installed = "";
metrics.listen((now) => {
  const seen = now.models.map((model) => model.id).join();
  if (seen !== installed) loadModels().catch(() => {});
  installed = seen;
});

/** The model if none is chosen: the session's, the one chosen last, a loaded one, any. */
export function modelFor(session, chosen) {
  const there = models.value;
  const loaded = metrics.value?.models.find((row) => row.state === "loaded");
  const wanted = [chosen, session?.model, readJson("model"), loaded?.name, loaded?.id];
  return wanted.find((name) => name && there.includes(name)) ?? there[0] ?? chosen ?? session?.model ?? "";
}

export function ModelPicker({value, choose}) {
  const there = use(models);
  const rows = use(metrics, (now) => now?.models);
  const loaded = (id) => rows?.some((row) => row.state === "loaded" && (row.id === id || row.name === id));
  return html`<label class="picker"><span class="hidden">Model</span>
    <select value=${value} onChange=${(event) => (writeJson("model", event.target.value), choose(event.target.value))}>
      ${!there.includes(value) && html`<option value=${value}>${value || "no model"}</option>`}
      ${there.map((id) => html`<option value=${id} selected=${id === value}>${id}${loaded(id) ? "" : " (not loaded)"}</option>`)}
    </select></label>`;
}

export function Options({model, system, setSystem}) {
  const chosen = use(sampling);
  const own = use(defaults)[model] ?? {};
  const set = (name, text) => {
    const {[name]: _, ...rest} = sampling.value;
    const why = wrong(text, known?.[name]);
    setBad(({[name]: was, ...others}) => (why ? {...others, [name]: {text, why}} : others));
    sampling.set(text === "" || why ? rest : {...rest, [name]: Number(text)});
  };
  const known = use(ranges);
  const [bad, setBad] = useState({});
  useEffect(() => {
    if (!known) readRanges().catch(() => {});
    else for (const [name, value] of Object.entries(sampling.value)) wrong(String(value), known[name]) && set(name, String(value));
  }, [known]);
  return html`<section class="options" aria-label="Options">
    <label class="field wide-field"><span>System prompt</span>
      <textarea rows="3" value=${system} placeholder="None" onInput=${(event) => setSystem(event.target.value)}></textarea></label>
    <div class="knobs">${KNOBS.map(
      ([name, label, step, otherwise]) => html`<div class="field"><label for=${`knob-${name}`}>${label}</label>
        <input id=${`knob-${name}`} type="number" inputmode="decimal" min=${known?.[name].least} max=${known?.[name].most > MANY ? undefined : known?.[name].most} step=${known?.[name].whole ? 1 : step} placeholder=${own[name]?.value ?? otherwise}
          aria-invalid=${bad[name] ? "true" : undefined} aria-describedby=${`why-${name}`}
          value=${bad[name]?.text ?? chosen[name] ?? ""} onInput=${(event) => set(name, event.target.value)} />
        <span id=${`why-${name}`} class="problem">${bad[name]?.why}</span></div>`,
    )}</div>
    <p class="row"><span class="hint">Sampling is kept in this browser, for all sessions.</span>
      <button type="button" onClick=${() => (sampling.set({}), setBad({}))}>Defaults</button></p>
  </section>`;
}

/** The field below the conversation. A draft is kept for each session while it is typed. */
export function Composer({mine, session, busy, stoppable, send, stop}) {
  const name = session ?? "new";
  const [text, setText] = useState(() => draftOf(name));
  const area = useRef(null);
  const file = useRef(null);
  const shown = useRef({mine, name});
  // Before the next key is told: it would find no draft under the new name.
  useLayoutEffect(() => {
    const {mine: before, name: old} = shown.current;
    shown.current = {mine, name};
    if (before === mine && old !== name) {
      // the session has its id now, or lost it
      keepDraft(name, [draftOf(name), draftOf(old)].filter(Boolean).join("\n"));
      keepDraft(old, "");
    }
    setText(draftOf(name));
    if (matchMedia("(hover: hover)").matches) area.current.focus();
    return drafts.listen((one) => one === name && setText(draftOf(name)));
  }, [mine, name]);
  useLayoutEffect(() => {
    area.current.style.height = "auto";
    area.current.style.height = `${Math.min(area.current.scrollHeight, 240)}px`;
  }, [text]);
  const type = (typed) => (setText(typed), keepDraft(name, typed));
  const go = async () => {
    if (!text.trim()) return;
    if (busy) return tell("An answer is under way: stop it, or wait for its end. What you typed is kept.");
    setText("");
    if ((await send(text)) === false) setText((now) => [text, now].filter(Boolean).join("\n"));
  };
  const keys = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      go();
    } else if (event.key === "Escape" && busy) stop();
  };
  const pasted = (event) => {
    const {files = [], types = []} = event.clipboardData ?? {};
    const pictures = [...files].every(({type}) => type.startsWith("image/"));
    if (pictures && (!files.length || types.includes("text/plain"))) return; // cells of a spreadsheet are text and a picture
    event.preventDefault();
    attach(name, files);
  };
  return html`<form class="composer" onSubmit=${(event) => (event.preventDefault(), go())}>
    <input ref=${file} type="file" multiple hidden aria-label="Text files" onChange=${(event) => attach(name, event.target.files).then(() => (event.target.value = ""))} />
    <${Act} icon="clip" label="Put text files into the message" kind="round quiet" run=${() => file.current.click()} />
    <label class="hidden" for="message">Message</label>
    <textarea id="message" ref=${area} rows="1" dir="auto" placeholder="Message" value=${text} enterkeyhint="send"
      onInput=${(event) => type(event.target.value)} onKeyDown=${keys} onPaste=${pasted}></textarea>
    ${busy
      ? html`<${Act} icon="stop" label="Stop" kind="round" disabled=${!stoppable} run=${stop} />`
      : html`<button class="act round main" aria-label="Send" title="Send" disabled=${!text.trim()}><${Icon} name="send" /></button>`}
  </form>`;
}
