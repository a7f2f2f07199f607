// Other windows of this browser: what one of them changed, the others look at again.
import {locked, unlocked} from "./api.js";
import {daemon, metrics} from "./live.js";
import {Signal} from "./signal.js";

const channel = "BroadcastChannel" in window ? new BroadcastChannel("ssmd") : null;
const news = new Signal();

/** Tells all windows, this one too, that a session, or (null) the list of them, is not as it was. */
export function changed(session = null, kind = "changed") {
  channel?.postMessage({kind, session});
  news.tell({kind, session});
}

/** Calls back with {kind, session} for what any window, or another client, changed. */
export const onChange = (listener) => news.listen(listener);

channel?.addEventListener("message", ({data}) => {
  if (typeof data?.kind === "string") news.tell(data);
});

// What other clients do is seen in the metrics: a request that began or is over.
let running = "";
let over = "";
metrics.listen((now) => {
  const seen = (now.running ?? []).map((row) => row.id).join();
  const last = now.recent?.at(-1);
  const ended = last ? `${last.ended_at}` : `${now.last?.ttft_ms}`;
  if (seen === running && ended === over) return;
  const sessions = new Set([...(now.recent ?? []).slice(-4), ...(now.running ?? [])].map((row) => row.session));
  [running, over] = [seen, ended];
  for (const session of sessions) news.tell({kind: "changed", session});
});
const all = () => news.tell({kind: "changed", back: true});
addEventListener("focus", all); // names are in no metrics
daemon.listen((state) => state === "there" && all());
unlocked.listen(() => locked.value || all());
