// What this browser keeps: drafts, options, what was asked. A storage that is full or forbidden is said once, and no more.
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

/** Keeps what is typed for a session; the oldest drafts make room. */
export function keepDraft(session, text) {
  const order = readJson("drafts", []).filter((one) => one !== session);
  if (text) order.push(session);
  for (const old of order.splice(0, Math.max(0, order.length - MOST_DRAFTS))) write(`draft.${old}`, null);
  write(`draft.${session}`, text || null);
  writeJson("drafts", order);
}

export const draftOf = (session) => read(`draft.${session}`) ?? "";
