// What this browser keeps: drafts, options, what was asked. A full or forbidden storage is told of once.
import {tell} from "./notices.js";

const MOST_DRAFTS = 50;
const PREFIX = "ssmd.";
let said = false;

function area(name) {
  try {
    return window[name];
  } catch {
    return null; // forbidden by the browser's settings
  }
}

/** The text that is kept under a name, or null. */
export function read(name, where = "localStorage") {
  try {
    return area(where)?.getItem(PREFIX + name) ?? null;
  } catch {
    return null;
  }
}

/** Keeps a text under a name; null removes it. */
export function write(name, text, where = "localStorage") {
  try {
    if (text === null) area(where)?.removeItem(PREFIX + name);
    else area(where)?.setItem(PREFIX + name, text);
    return true;
  } catch {
    if (!said) tell("This browser's storage is full: drafts are not kept over a reload.", "warning");
    said = true;
    return false;
  }
}

/** What `write` kept as JSON; anything else is as if there was nothing. */
export function readJson(name, otherwise = null) {
  try {
    return JSON.parse(read(name)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

export function writeJson(name, value) {
  return write(name, value === null ? null : JSON.stringify(value));
}

const sent = []; // drafts for the next page only
const before = (session) => sent.map((one) => (one.session === session ? `${one.text}\n` : "")).join("");

/** Keeps what is typed for a session; the oldest drafts make room. */
export function keepDraft(session, typed) {
  const text = typed ? before(session) + typed : before(session).slice(0, -1);
  const order = readJson("drafts", []).filter((one) => one !== session);
  if (text) order.push(session);
  for (const old of order.splice(0, Math.max(0, order.length - MOST_DRAFTS))) write(`draft.${old}`, null);
  write(`draft.${session}`, text || null);
  writeJson("drafts", order);
}

export function draftOf(session) {
  const kept = read(`draft.${session}`) ?? "";
  const first = before(session);
  return `${kept}\n`.startsWith(first) ? kept.slice(first.length) : kept;
}

/** Keeps what is sent as a draft. Returns what ends that: called with true, it is none. */
export function sending(session, text) {
  const one = {session, text};
  const typed = draftOf(session);
  sent.push(one);
  keepDraft(session, typed);
  return (taken) => {
    const at = sent.indexOf(one);
    if (at < 0) return;
    const rest = draftOf(session);
    sent.splice(at, 1);
    keepDraft(session, [!taken && text, rest].filter(Boolean).join("\n"));
  };
}
