// Small parts that every view has: icons, buttons, menus, meters.
import {html, useEffect, useRef, useState} from "./html.js";
import {fail} from "./notices.js";
import {within} from "./numbers.js";

const DOT = "m-2 0a2 2 0 1 0 4 0a2 2 0 1 0-4 0";
const PATHS = {
  chat: "M4 5h16v11H9l-5 4z",
  sessions: `M6 4v9a4 4 0 0 0 4 4h6M6 8h10M6 4${DOT}M18 8${DOT}M18 17${DOT}`,
  now: "M3 13h4l3-8 4 14 3-6h4",
  models: "M12 3l8 4.5v9L12 21l-8-4.5v-9zM4 7.5l8 4.5 8-4.5M12 12v9",
  send: "M12 19V5M6 11l6-6 6 6",
  stop: "M7 7h10v10H7z",
  copy: "M9 9h11v11H9zM5 15H4V4h11v1",
  done: "M5 12l5 5 9-10",
  again: "M20 11a8 8 0 1 0-2 6M20 5v6h-6",
  edit: "M4 20h4L19 9l-4-4L4 16zM13 7l4 4",
  on: "M5 5l8 7-8 7zM17 5v14",
  fork: "M7 4v6a4 4 0 0 0 4 4h6M7 10v10M14 11l3 3-3 3",
  pin: "M9 4h6l-1 6 3 3H7l3-3zM12 13v7",
  out: "M12 15V4M7 8l5-4 5 4M5 20h14",
  in: "M12 4v11M7 11l5 4 5-4M5 20h14",
  bin: "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13",
  find: "M11 11m-6 0a6 6 0 1 0 12 0a6 6 0 1 0-12 0M16 16l4 4",
  more: "M4.6 12h.8M11.6 12h.8M18.6 12h.8",
  left: "M14 6l-6 6 6 6",
  right: "M10 6l6 6-6 6",
  plus: "M12 5v14M5 12h14",
  clip: "M8 12l6-6a3 3 0 0 1 4 4l-8 8a5 5 0 0 1-7-7l7-7",
  tune: `M4 8h9M17 8h3M15 8${DOT}M4 16h3M11 16h9M9 16${DOT}`,
};

export function Icon({name}) {
  return html`<svg class="icon" viewBox="0 0 24 24" aria-hidden="true"><path d=${PATHS[name]} /></svg>`;
}

const tried = async (run) => {
  try {
    await run();
  } catch (error) {
    fail(error);
  }
};

/** A button with an icon and a name for screen readers; what fails is said. */
export function Act({icon, label, run, shown = false, kind = shown ? "framed" : "", ...more}) {
  const [busy, setBusy] = useState(false);
  const act = async (event) => {
    event.stopPropagation();
    setBusy(true);
    await tried(run);
    setBusy(false);
  };
  return html`<button type="button" class=${`act ${kind}`} title=${shown ? undefined : label} aria-label=${shown ? undefined : label}
    disabled=${busy} onClick=${act} ...${more}>${icon && html`<${Icon} name=${icon} />`}${shown && html`<span>${label}</span>`}</button>`;
}

export function Copy({text, what}) {
  const [done, setDone] = useState(false);
  const copy = async () => {
    await toClipboard(text());
    setDone(true);
    setTimeout(() => setDone(false), 1500);
  };
  return html`<${Act} icon=${done ? "done" : "copy"} label=${done ? "Copied" : `Copy ${what}`} run=${copy} />`;
}

async function toClipboard(text) {
  if (navigator.clipboard) {
    await navigator.clipboard.writeText(text);
    return;
  }
  const area = document.createElement("textarea"); // over http from another machine there is no clipboard
  area.value = text;
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

/** A button that opens a list of actions below it. Escape, and a click elsewhere, close it. */
export function Menu({label, items}) {
  const [open, setOpen] = useState(false);
  const box = useRef(null);
  useEffect(() => {
    if (!open) return undefined;
    box.current.querySelector("[role=menuitem]")?.focus();
    const away = (event) => box.current.contains(event.target) || setOpen(false);
    document.addEventListener("pointerdown", away);
    return () => document.removeEventListener("pointerdown", away);
  }, [open]);
  const keys = (event) => {
    const step = {ArrowDown: 1, ArrowUp: -1}[event.key];
    if (event.key === "Escape" && open) {
      event.stopPropagation();
      setOpen(false);
      box.current.querySelector("button").focus();
    } else if (step && open) {
      event.preventDefault();
      const all = [...box.current.querySelectorAll("[role=menuitem]")];
      all[(all.indexOf(document.activeElement) + step + all.length) % all.length].focus();
    } else if (event.key === "Tab") setOpen(false);
  };
  return html`<div class="menu" ref=${box} onKeyDown=${keys}>
    <${Act} icon="more" label=${label} aria-haspopup="menu" aria-expanded=${open} run=${() => setOpen(!open)} />
    ${open &&
    html`<div role="menu" aria-label=${label}>
      ${items.map(
        (item) => html`<button type="button" role="menuitem" tabindex="-1" class=${item.kind ?? ""}
          onClick=${() => (setOpen(false), tried(item.run))}><${Icon} name=${item.icon} /><span>${item.label}</span></button>`,
      )}
    </div>`}
  </div>`;
}

export function Meter({label, value, of}) {
  const told = within(value, of);
  const part = of ? Math.min(1, value / of) : 0;
  return html`<div class="meter">
    <div class="meter-words"><span>${label}</span><span>${told}</span></div>
    <div class="track" role="meter" aria-label=${label} aria-valuemin="0" aria-valuemax="100" aria-valuenow=${Math.round(part * 100)} aria-valuetext=${told}>
      <div class="fill" style=${{width: `${part * 100}%`}}></div>
    </div>
  </div>`;
}

export const Pill = ({kind = "", children}) => html`<span class=${`pill ${kind}`}>${children}</span>`;

export function State({now, away}) {
  const state = away ? "away" : (now?.state ?? "away");
  const kind = {generating: "accent", degraded: "warn", away: "warn", draining: "warn"}[state] ?? "";
  return html`<${Pill} kind=${kind}>${state}${state === "degraded" ? `: ${now.reason.replace("_", " ")}` : ""}<//>`;
}

export const Empty = ({title, children}) => html`<div class="empty"><p class="big">${title}</p><p>${children}</p></div>`;

export const Missing = () => html`<${Empty} title="This session is not here">It was removed, or belongs to another key.<//>`;
