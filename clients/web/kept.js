// What this browser keeps: drafts, options, what was asked. A full or forbidden storage is told of once.
import {tell} from "./notices.js";
import {Signal} from "./signal.js";

const MOST_DRAFTS = 50;
const PREFIX = "ssmd.";
let said = false;

export function read(name, where = "localStorage") {
  try {
    return window[where].getItem(PREFIX + name);
  } catch {
    return null;
  }
}

export function write(name, text, where = "localStorage") {
  try {
    if (text === null) window[where].removeItem(PREFIX + name);
    else window[where].setItem(PREFIX + name, text);
    return true;
  } catch {
    if (!said) tell("This browser's storage is full: drafts are not kept over a reload.", "warning");
    said = true;
    return false;
  }
}

/** What follows `first` in the names of all that is kept under one that begins so. */
export function namesOf(first) {
  try {
    return Object.keys(localStorage).filter((name) => name.startsWith(PREFIX + first)).map((name) => name.slice((PREFIX + first).length));
  } catch {
    return [];
  }
}

/** What `write` kept as JSON; anything else is as if there was nothing. */
export function readJson(name, otherwise = null, where = undefined) {
  try {
    return JSON.parse(read(name, where)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

export function writeJson(name, value) {
  return write(name, value === null ? null : JSON.stringify(value));
}

const full = new Map(); // drafts that the storage had no room for
const sent = []; // drafts for the next page only
const before = (name) => sent.map((one) => (one.name === name ? `${one.text}\n` : "")).join("");
const without = (text, first) => (`${text}\n`.startsWith(first) ? text.slice(first.length) : text);

/** Tells the name of a draft that is another one without being typed. */
export const drafts = new Signal();

/** Keeps what is typed, by a session or a turn that is edited; the oldest drafts make room. */
export function keepDraft(name, typed) {
  const text = typed ? before(name) + typed : before(name).slice(0, -1);
  const order = readJson("drafts", []).filter((one) => one !== name);
  if (text) order.push(name);
  for (const old of order.splice(0, Math.max(0, order.length - MOST_DRAFTS))) write(`draft.${old}`, null);
  if (write(`draft.${name}`, text || null)) full.delete(name);
  else full.set(name, text);
  writeJson("drafts", order);
}

export const draftOf = (name) => without(full.get(name) ?? read(`draft.${name}`) ?? "", before(name));

/** Keeps what is sent as a draft. Returns what ends that: called with true, it is none. */
export function sending(name, text) {
  const one = {name, text};
  const keep = (typed) => (keepDraft(name, typed), drafts.tell(name));
  const typed = without(draftOf(name), `${text}\n`);
  sent.push(one);
  keep(typed);
  return (taken) => {
    if (!sent.includes(one)) return;
    const rest = draftOf(name);
    sent.splice(sent.indexOf(one), 1);
    keep([!taken && text, rest].filter(Boolean).join("\n"));
  };
}
