// Requests to the daemon: with the key where one is set, errors in its own words.
import {Signal} from "./signal.js";
import {read, write} from "./kept.js";

/** Whether the daemon asks for a key; "wrong" if this tab has another one. */
export const locked = new Signal(false);
/** Counts the keys that were given: what was asked before is asked again. */
export const unlocked = new Signal(0);
let key = read("key", "sessionStorage");

export class ApiError extends Error {
  constructor(message, status, code) {
    super(message);
    Object.assign(this, {status, code, told: status === 401}); // the key prompt tells that
  }
}

/** Answers with a response whose status is good. Raises ApiError, with words for people. */
export async function open(path, {method = "GET", body, raw, keepalive = false, bearer = key, headers = {}} = {}) {
  if (bearer) headers.authorization = `Bearer ${bearer}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  let response;
  try {
    const sent = body === undefined ? raw : JSON.stringify(body);
    response = await fetch(path, {method, headers, body: sent, keepalive, cache: "no-store"});
  } catch {
    throw new ApiError("The daemon does not answer.", 0, "away");
  }
  if (response.ok) return response;
  const told = await response.json().catch(() => null);
  if (response.status === 401) locked.set(key ? "wrong" : true);
  throw new ApiError(told?.error?.message ?? `The daemon answered ${response.status}.`, response.status, told?.error?.code);
}

export async function ask(path, options) {
  return (await open(path, options)).json();
}

/** Takes a key if the daemon knows it. Raises ApiError. */
export async function giveKey(given) {
  if (/[^!-~]/.test(given)) throw new ApiError("A key has printable ASCII characters only.", 400);
  await open("/v1/models", {bearer: given});
  key = given;
  write("key", given, "sessionStorage");
  locked.set(false);
  unlocked.set(unlocked.value + 1);
}

/** Whether requests carry a key, so that a plain link would be refused. */
export const hasKey = () => Boolean(key);

/** Redeems the ticket in the address, which is taken out of it first. */
export async function redeemTicket(back = location.pathname) {
  const ticket = /^#ticket=([\w~.-]{1,512})$/.exec(location.hash)?.[1];
  if (!location.hash.startsWith("#ticket")) return;
  history.replaceState(null, "", back);
  if (!ticket) return;
  const got = await ask("/ssmd/v1/tickets/redeem", {method: "POST", body: {ticket}, bearer: null});
  if (got.key) await giveKey(got.key);
}
