// What is told at the edge of the page for some seconds.
import {html} from "./html.js";
import {Signal, use} from "./signal.js";

const SHOWN_MS = 7000;
const notices = new Signal([]);
let last = 0;

/** Shows a notice. kind: "info", "warning" or "error". action: {label, run}. */
export function tell(text, kind = "info", action = null, shown_ms = SHOWN_MS) {
  const id = ++last;
  const gone = () => notices.set(notices.value.filter((one) => one.id !== id));
  const same = notices.value.filter((one) => one.text !== text || action);
  notices.set([...same, {id, text, kind, action, gone}].slice(-4));
  setTimeout(gone, shown_ms);
}

export function fail(error) {
  if (error?.name !== "AbortError" && !error?.told) tell(error?.message ?? String(error), "error");
}

export function Notices() {
  const shown = use(notices);
  return html`<div class="notices" role="status" aria-live="polite">
    ${shown.map(
      (one) => html`<div class=${`notice ${one.kind}`} key=${one.id}>
        <span dir="auto">${one.text}</span>
        ${one.action && html`<button onClick=${() => (one.gone(), one.action.run())}>${one.action.label}</button>`}
        <button class="quiet" aria-label="Dismiss" onClick=${one.gone}>×</button>
      </div>`,
    )}
  </div>`;
}
