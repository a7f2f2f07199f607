// What happens now: times, requests under way, and what of each prompt was not read again.
import {ask} from "./api.js";
import {Chart} from "./chart.js";
import {Act, Empty, Meter, State} from "./controls.js";
import {html} from "./html.js";
import {daemon, metrics} from "./live.js";
import {ago, bytes, count, many, ms, plain, share} from "./numbers.js";
import {sessions} from "./sessions.js";
import {use} from "./signal.js";

const PHASES = {loading: "loading its model", waiting: "waiting", restoring: "restoring its state", prefill: "reading the prompt", decode: "answering"};

export function Now() {
  const now = use(metrics);
  const away = use(daemon) === "away";
  if (!now) return html`<div class="view"><header class="bar"><h1>Now</h1></header><${Empty} title=${away ? "The daemon is away" : "Listening…"}>The numbers come when it answers.<//></div>`;
  const speed = now.running.reduce((sum, row) => sum + (row.tokens_per_s ?? 0), 0);
  return html`<div class="view now">
    <header class="bar"><h1>Now</h1><${State} now=${now} away=${away} /></header>
    <div class="charts">
      <${Series} name="Time to first token" told=${ms} series=${now.ttft_ms} />
      <${Series} name="Time between tokens" told=${ms} series=${now.tbt_ms} />
      <${Series} name="Tokens per second" told=${(n) => (n === null ? "–" : n.toFixed(1))} series=${now.tokens_per_s} live=${speed || null} />
    </div>
    <section aria-labelledby="running"><h2 id="running">Under way</h2>
      ${now.running.length ? html`<ul class="cards">${now.running.map((row, i) => html`<${Running} key=${row.id ?? i} row=${row} />`)}</ul>` : html`<p class="faint">No request is under way.</p>`}
    </section>
    <section aria-labelledby="recent"><h2 id="recent">Not read again</h2>
      <${Totals} now=${now} />
      ${now.recent?.length ? html`<${Recent} rows=${[...now.recent].reverse()} />` : html`<p class="faint">Answers appear here as they end.</p>`}
    </section>
    <section aria-labelledby="room"><h2 id="room">Room</h2>
      <div class="meters">
        <${Meter} label="States on disk" value=${now.stored_bytes ?? 0} of=${now.quota_bytes} />
        <${Meter} label="Loaded models" value=${now.memory.used_bytes} of=${now.memory.budget_bytes} />
      </div>
      <p class="faint">${now.sessions ? `${many(now.sessions.count, "session")}, ${now.sessions.pinned} pinned. ` : ""}${many(now.checkpoints.count, "state")} written since the start, ${count(now.checkpoints.left_out)} left out. The process has ${bytes(now.memory.resident_bytes)} in memory.</p>
    </section>
  </div>`;
}

function Series({name, told, series, live = null}) {
  return html`<section class="card chart" aria-label=${name}>
    <h2>${name}</h2>
    <p class="numbers"><strong>${told(live ?? series.last)}</strong><span>median ${told(series.p50)}</span><span>p95 ${told(series.p95)}</span></p>
    <${Chart} values=${series.recent ?? []} label=${name} told=${told} />
  </section>`;
}

function Running({row}) {
  const part = row.to_feed ? row.fed / row.to_feed : 1;
  const stop = () => ask(`/ssmd/v1/requests/${row.id}/stop`, {method: "POST"});
  return html`<li class="card running">
    <span class="cover"><${Title} session=${row.session} otherwise=${row.id ? "A request without a session" : "Another's request"} /></span>
    <span class="about">${row.model} · ${PHASES[row.phase] ?? row.phase}${row.phase === "prefill" ? ` ${row.fed} of ${row.to_feed}` : ""}${row.tokens ? ` · ${many(row.tokens, "token")}` : ""}${row.tokens_per_s ? ` · ${row.tokens_per_s.toFixed(0)}/s` : ""}</span>
    ${row.phase === "prefill" && html`<div class="track"><div class="fill" style=${{width: `${part * 100}%`}}></div></div>`}
    ${row.id && html`<span class="ends"><${Act} icon="stop" label="Stop" shown run=${stop} /></span>`}
  </li>`;
}

function Totals({now}) {
  const all = now.prompt_tokens;
  if (!all) return null;
  return html`<p class="faint">${count(now.cached_tokens)} of ${many(all, "token")} of all prompts since the start came from stored states (${share(now.cached_tokens / all)}).${now.warm?.requests ? ` Warm beginnings saved ${many(now.warm.tokens, "token")} of ${many(now.warm.requests, "request")}.` : ""}</p>`;
}

function Recent({rows}) {
  return html`<div class="key" aria-hidden="true"><span><i class="cache"></i>from cache</span><span><i class="read"></i>read</span></div>
  <ul class="bars">${rows.map((row) => {
    const cached = row.prompt_tokens ? row.cached_tokens / row.prompt_tokens : 0;
    const saved = row.saved_ms > 0 ? `about ${ms(row.saved_ms)} saved` : "";
    const read = row.prompt_tokens - row.cached_tokens;
    return html`<li key=${row.id ?? row.ended_at}>
      <span class="what"><${Title} session=${row.session} otherwise=${row.model} /> <span class="faint">${ago(row.ended_at)}${row.outcome !== "ok" ? ` · ${row.outcome}` : ""}</span></span>
      <span class="bar-track" aria-hidden="true"><span class="cache" style=${{width: `${cached * 100}%`}}></span><span class="read" style=${{width: `${(1 - cached) * 100}%`}}></span></span>
      <span class="much">${count(row.cached_tokens)} from cache, ${count(read)} read · <strong>${saved || `${ms(row.ttft_ms)} to first token`}</strong></span>
    </li>`;
  })}</ul>`;
}

function Title({session, otherwise}) {
  const list = use(sessions);
  if (!session) return otherwise;
  const known = list?.data.find((one) => one.id === session);
  return html`<a href=${`#/chat/${session}`} dir="auto"><bdi>${known ? plain(known.title) : session}</bdi></a>`;
}
