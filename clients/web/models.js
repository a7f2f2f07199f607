// Models and runtimes: what is installed, loaded, to be had, and usable here.
import {ask, unlocked} from "./api.js";
import {Act, Empty, Meter, Pill} from "./controls.js";
import {html, useEffect, useState} from "./html.js";
import {metrics} from "./live.js";
import {fail} from "./notices.js";
import {ago, bytes, count, many, ms, share, within} from "./numbers.js";
import {Signal, use} from "./signal.js";

const ROOT = "/ssmd/v1/models";
const catalog = new Signal(null); // null: not read yet

export function Models() {
  const now = use(metrics);
  const rows = now?.models ?? [];
  return html`<div class="view models">
    <header class="bar"><h1>Models and runtimes</h1></header>
    <section aria-labelledby="installed"><h2 id="installed">Installed</h2>
      ${now && html`<${Meter} label="Memory for models" value=${now.memory.used_bytes} of=${now.memory.budget_bytes} />`}
      ${now && !rows.length && html`<${Empty} title="No model is installed">Pull one below.<//>`}
      <ul class="cards">${rows.map((row) => html`<${Model} key=${row.id} row=${row} />`)}</ul>
    </section>
    <${Pulls} told=${now?.pulls} rows=${rows} />
    <${Runtimes} />
  </div>`;
}

function Model({row}) {
  const post = (what) => () => ask(`${ROOT}/${encodeURIComponent(row.id)}/${what}`, {method: "POST"});
  const pin = () => ask(`${ROOT}/${encodeURIComponent(row.id)}`, {method: "PATCH", body: {pinned: !row.pinned}});
  const about = [row.device, row.quantization, row.context ? `${count(row.context)} tokens of context` : row.device && "context not bounded", bytes(row.file_bytes)];
  const loaded = row.state === "loaded";
  const base = use(catalog)?.some((entry) => entry.name === row.name && entry.base);
  return html`<li class="card model">
    <span class="cover">${row.name} <span class="faint">${row.runtime}</span> ${base && html`<${Pill} kind="warn">base: continues text, does not chat<//>`}</span>
    <span class="about"><${Pill} kind=${loaded ? "accent" : row.state === "failed" ? "warn" : ""}>${row.state}<//>${row.pinned && html`<${Pill}>pinned<//>`} ${about.filter(Boolean).join(" · ")}</span>
    ${loaded && html`<span class="about">${row.resident_bytes ? `${bytes(row.resident_bytes)} in memory · ` : ""}loaded in ${ms(row.load_ms)}${row.last_used ? ` · used ${ago(row.last_used)}` : ""}${row.generated_tokens ? ` · ${many(row.generated_tokens, "token")} generated` : ""}</span>`}
    ${row.problem && html`<span class="problem">${row.problem}</span>`}
    ${row.stage && html`<span class="about">${row.stage}</span>`}
    <span class="ends">
      <${Act} icon="pin" label=${row.pinned ? "Unpin" : "Pin: once loaded, it stays"} kind=${row.pinned ? "on" : ""} run=${pin} />
      ${loaded ? html`<${Act} label="Unload" shown run=${post("unload")} />` : html`<${Act} label=${row.state === "loading" ? "Loading…" : "Load"} shown run=${post("load")} />`}
    </span>
  </li>`;
}

/** What a model takes on disk, and its pull of memory, for a runtime. */
function takes({bytes: disk, memory_bytes: memory}) {
  return disk ? [`${bytes(disk)} on disk`, `${bytes(memory)} of memory`] : [];
}

/** What a model takes for the runtime that is taken if none is chosen. */
function sizeOf({download_bytes: download, runtimes}) {
  const one = runtimes.find((row) => row.installed) ?? runtimes.find((row) => row.usable);
  return one ? [!one.installed && `about ${bytes(download)} to fetch`, ...takes(one)] : [];
}

function Pulls({told, rows}) {
  const offers = use(catalog);
  const [own, setOwn] = useState([]);
  const key = use(unlocked);
  const installed = rows.map((row) => row.id).join();
  useEffect(() => {
    ask("/ssmd/v1/catalog").then((list) => catalog.set(list.data), (error) => (error.status === 403 || error.status === 404 ? catalog.set([]) : fail(error)));
    ask("/ssmd/v1/pulls").then((list) => setOwn(list.data), () => {});
  }, [key, installed]);
  const pulls = told ?? own;
  const busy = (model, runtime) => pulls.find((row) => row.model === model && row.runtime === runtime && ["waiting", "running"].includes(row.state));
  const pull = (model, runtime) => () => ask("/ssmd/v1/pulls", {method: "POST", body: {model, runtime}}).then((row) => setOwn((all) => [...all.filter((one) => one.id !== row.id), row]));
  return html`<section aria-labelledby="pull"><h2 id="pull">To be had</h2>
    ${offers && !offers.length && html`<p class="faint">This key may not pull models.</p>`}
    <ul class="cards">${(offers ?? []).map((entry) => html`<li class="card offer" key=${entry.name}>
      <span class="cover">${entry.name} ${entry.base && html`<${Pill} kind="warn">base: continues text, does not chat<//>`}</span>
      <span class="about">${[entry.about, ...sizeOf(entry)].filter(Boolean).join(" · ")} ${entry.runtimes.map((one) => busy(entry.name, one.runtime)?.state)}</span>
      <span class="ends">${entry.runtimes.some((one) => one.installed)
        ? html`<${Pill}>installed<//>`
        : html`<${Act} icon="in" label="Pull" aria-label=${`Pull ${entry.name}`} shown disabled=${!entry.runtimes.some((one) => one.usable) || entry.runtimes.some((one) => busy(entry.name, one.runtime))} run=${pull(entry.name, entry.runtimes.find((one) => one.usable)?.runtime)} />`}</span>
      <details class="runtimes"><summary>Runtimes</summary><ul>${entry.runtimes.map((one) => html`<li>
        <span>${one.runtime} <span class="faint">${[...takes(one), one.problem].filter(Boolean).join(" · ")}</span></span>
        ${one.installed ? html`<${Pill}>installed<//>` : html`<${Act} icon="in" label="Pull" aria-label=${`Pull ${entry.name} for ${one.runtime}`} shown disabled=${!one.usable || Boolean(busy(entry.name, one.runtime))} run=${pull(entry.name, one.runtime)} />`}
      </li>`)}</ul></details>
    </li>`)}</ul>
    ${pulls.length > 0 && html`<ul class="cards">${[...pulls].reverse().slice(0, 5).map((row) => html`<${Pull} key=${row.id} row=${row} />`)}</ul>`}
  </section>`;
}

function Pull({row}) {
  const goes = ["waiting", "running"].includes(row.state);
  const part = row.total ? row.done / row.total : 0;
  const far = !row.total ? "" : row.unit === "bytes" ? within(row.done, row.total) : share(part);
  const cancel = () => ask(`/ssmd/v1/pulls/${row.id}`, {method: "DELETE"});
  return html`<li class="card pull">
    <span class="cover">${row.model} <span class="faint">${row.runtime ?? ""}</span></span>
    <span class="about"><${Pill} kind=${{running: "accent", failed: "warn"}[row.state] ?? ""}>${row.state}<//> ${goes ? [row.stage, far].filter(Boolean).join(" · ") : row.ended_at ? ago(row.ended_at) : ""}</span>
    ${row.error && html`<span class="problem">${row.error}</span>`}
    ${goes && html`<div class="track" role="progressbar" aria-label=${`Pull of ${row.model}`} aria-valuemin="0" aria-valuemax="100" aria-valuenow=${row.total ? Math.round(part * 100) : undefined}><div class="fill" style=${{width: `${part * 100}%`}}></div></div>
      <span class="ends"><${Act} icon="stop" label="Cancel" shown run=${cancel} /></span>`}
  </li>`;
}

function Runtimes() {
  const [found, setFound] = useState(null);
  const key = use(unlocked);
  useEffect(() => {
    ask("/ssmd/v1/runtimes").then(setFound, fail);
  }, [key]);
  return html`<section aria-labelledby="runtimes"><h2 id="runtimes">Runtimes</h2>
    ${!found && html`<p class="faint">Looking what can be used here…</p>`}
    ${found && html`<ul class="cards">${found.data.map((one) => html`<li class="card runtime" key=${one.name}>
      <span class="cover">${one.name}</span><span class="about"><${Pill} kind=${one.usable ? "accent" : ""}>${one.usable ? "usable" : "not usable"}<//></span>
      ${one.problem && html`<span class="problem">${one.problem}</span>`}
      <ul class="devices">${one.devices.map((device) => html`<li><strong>${device.name}</strong> ${device.description}${device.problem && html`<span class="problem">${device.problem}</span>`}</li>`)}</ul>
    </li>`)}</ul>`}
  </section>`;
}
