// Answers under way: asked here, or followed.
import {ApiError, ask, open} from "./api.js";
import {readEvents} from "./events.js";
import {namesOf, readJson, sending, write, writeJson} from "./kept.js";
import {daemon, metrics} from "./live.js";
import {Signal} from "./signal.js";
import {changed} from "./windows.js";

const ASKED_S = 24 * 3600;
const TITLE = 80; // characters
/** Sessions that were asked and are not stored yet, the youngest first: [{id, title}]. */
export const unstored = new Signal([]);
/** By session, or by what the page calls one without an id. */
const running = new Map();
/** Ids that this window has read: the metrics tell of one a moment longer. */
const seen = new Set();

/** The first words of a question, as the daemon names a session until it is named. */
export function titleOf(question) {
  const asked = question?.find((message) => message.role === "user")?.content ?? "";
  return asked.trim().replace(/\s+/g, " ").slice(0, TITLE);
}

let leaving = false; // what breaks off as the page goes is followed by the next page
addEventListener("pagehide", () => (leaving = true));
addEventListener("pageshow", () => (leaving = false));
let first = readJson("first", null, "sessionStorage");

/** The first question that a reload left without a session, or null. Asked once more, it is the same request. */
export function takeFirst() {
  const asked = first;
  first = null;
  return asked;
}

/** One answer. state: "waiting", "answering", "done", "stopped", "failed", "lost" (its daemon went), or "gone" (over before
 * it could be followed). */
export class Answer extends Signal {
  text = ""; // as a turn keeps it: reasoning in <think>
  calls = [];
  state = "waiting";
  id = null;
  usage = null;
  finish = null;
  error = null;
  began = performance.now();
  #stopping = false;
  #kept = null;

  /** parent: the turn above it, ask: messages since that, null if they are not known; begun: what it goes on from.
   * draft: where the question is one until something came. */
  constructor({session, parent = null, question = null, begun = "", request = null, draft = null, name = `ask-${Math.random()}`}) {
    super();
    Object.assign(this, {session, parent, question, begun, request, draft, name});
  }

  tell() {
    if (this.came) this.take(true);
    super.tell();
  }

  /** The question is no draft any more, or, not taken, one to write on. */
  take(taken) {
    this.#kept?.(taken);
  }

  #keep() {
    if (this.draft) this.#kept ??= sending(this.draft, this.question.at(-1).content);
  }

  get came() {
    return Boolean(this.text || this.calls.length) || this.state === "done";
  }

  get over() {
    return !["waiting", "answering"].includes(this.state);
  }

  begin(key) {
    running.set(key, this);
    this.#keep();
    this.#remember();
    const {parent, question, begun, request, draft, name} = this;
    if (!this.session) write("first", JSON.stringify({parent, question, begun, request, draft, name}), "sessionStorage");
    return this.#whole(async () => {
      const body = {...request, stream: true, stream_options: {include_usage: true}, background: true};
      const response = await open("/v1/chat/completions", {method: "POST", body, headers: {"idempotency-key": name}});
      this.session = response.headers.get("x-ssmd-session");
      if (this.session) running.set(this.session, this);
      return response;
    });
  }

  follow(id) {
    running.set(this.session, this);
    seen.add(id);
    this.id = id;
    return this.#whole(() => this.#opened());
  }

  async #whole(begin) {
    try {
      await this.#read(await begin());
    } catch (error) {
      await this.#broke(error);
    }
    this.#end();
  }

  /** Takes over what another window, or this one, kept of the question. */
  learn(id = this.id) {
    const asked = readJson(`asked.${this.session}`);
    if (this.question || !asked?.question || (asked.id && asked.id !== id)) return;
    const {parent, question, begun, draft} = asked;
    Object.assign(this, {parent, question, begun, draft});
    this.#keep();
  }

  /** Ends it, as soon as it has an id; what was said is kept. */
  async stop() {
    this.#stopping = true;
    let id;
    const known = () => (id = this.id ?? metrics.value?.running?.find((one) => this.session && one.session === this.session)?.id);
    await until(() => known() || this.over, 5000); // the metrics tell of what waits
    if (!id) return;
    try {
      await ask(`/ssmd/v1/requests/${id}/stop`, {method: "POST"});
    } catch (error) {
      if (error.status !== 404) throw error; // over meanwhile
    }
  }

  /** Now its session tells of it. */
  #named() {
    if (readJson("first", {}, "sessionStorage").name === this.name) write("first", null, "sessionStorage");
  }

  #opened() {
    return open(`/ssmd/v1/requests/${this.id}/stream`);
  }

  async #read(response) {
    let ended = false;
    this.text = "";
    this.calls = [];
    this.thinks = /^\s*<think>(?![^]*<\/think>)/.test(this.begun);
    const take = (events) => {
      for (const event of events) {
        if (event === "[DONE]") ended = true;
        else this.#take(JSON.parse(event));
      }
      this.tell();
      return !ended && !this.error;
    };
    const broken = await readEvents(response, take).catch((error) => error);
    if (!ended && !this.error) throw new ApiError("The daemon went away in the middle of the answer.", 0, broken);
  }

  #take(chunk) {
    if (chunk.error) {
      [this.error, this.state] = [chunk.error.message, "failed"];
      return;
    }
    if (!this.id) {
      this.id = chunk.id.replace(/^chatcmpl-/, "");
      seen.add(this.id);
      this.#remember();
      if (this.session) changed(this.session, "asked");
      this.#named();
      if (this.#stopping) this.stop().catch(() => {});
    }
    for (const choice of chunk.choices) {
      if (choice.index !== 0) continue;
      const {content, reasoning_content: thought, tool_calls: calls = []} = choice.delta;
      if (thought) this.text += (this.thinks ? "" : "<think>\n") + thought;
      if (content) this.text += (this.thinks ? "\n</think>\n\n" : "") + content;
      if (thought || content) this.thinks = Boolean(thought);
      for (const {index, function: more} of calls) {
        const one = (this.calls[index] ??= {function: {name: more.name, arguments: ""}});
        one.function.arguments += more.arguments;
      }
      if (this.text || this.calls.length) this.state = "answering";
      if (choice.finish_reason) this.finish = choice.finish_reason;
    }
    if (chunk.usage) this.usage = chunk.usage;
  }

  /** The connection is gone: a daemon that still answers has the rest. */
  async #broke(error) {
    if (this.over || leaving) return;
    if (this.id && error.status === 0) {
      await until(() => daemon.value === "there", 3000);
      try {
        await this.#read(await this.#opened());
        return;
      } catch {
        // it is over, or its daemon is
      }
    }
    this.state = error.status === 0 ? "lost" : error.code === "request_not_found" ? "gone" : "failed";
    this.removed = error.code === "session_not_found";
    this.error = this.removed ? "This session is gone." : error.message;
  }

  #end() {
    if (leaving) return;
    this.#named();
    if (!this.over) this.state = this.usage?.ssmd?.stopped || this.#stopping ? "stopped" : "done";
    for (const [key, answer] of running) if (answer === this) running.delete(key);
    if (/lost|failed/.test(this.state) && (this.text || !this.draft)) this.#remember();
    else if (this.session) writeJson(`asked.${this.session}`, null);
    if (this.session && !this.parent) noteUnstored();
    this.tell();
    if (this.session) changed(this.session, "answered");
  }

  /** What a reload, or another window, cannot read elsewhere before the turn is stored. */
  #remember() {
    if (!this.session || !this.question) return;
    const {id, parent, question, begun, draft, text, error} = this;
    writeJson(`asked.${this.session}`, {id, parent, question, begun, draft, text, error, at: Date.now() / 1000});
    if (!parent) noteUnstored();
  }
}

/** Reads which first questions this browser keeps. */
export function noteUnstored() {
  const found = [];
  for (const name of namesOf("asked.")) {
    const {question, parent, at} = readJson(`asked.${name}`) ?? {};
    if (question && !parent) found.push({id: name, title: titleOf(question), at});
  }
  unstored.set(found.sort((a, b) => b.at - a.at));
}

/** The answer under way in a session: one that this window reads, or begins to follow. */
export function answerIn(session) {
  if (!session) return null;
  if (running.has(session)) return running.get(session);
  const row = metrics.value?.running?.find(({session: of, id}) => of === session && id && !seen.has(id));
  if (!row) return null;
  const answer = new Answer({session});
  answer.learn(row.id);
  answer.follow(row.id);
  return answer;
}

export function brokenIn(session) {
  const kept = readJson(`asked.${session}`);
  return kept?.error ? Object.assign(new Answer({session}), kept, {state: "lost"}) : null;
}

/** Whether a page did not see the end of an answer in the session. */
export const isAsked = (session) => readJson(`asked.${session}`)?.error === null;

/** Forgets what windows asked long ago that did not see the end. */
export function forgetOld() {
  for (const name of namesOf("asked.")) {
    if (!(Date.now() / 1000 - (readJson(`asked.${name}`)?.at ?? 0) < ASKED_S)) writeJson(`asked.${name}`, null);
  }
  noteUnstored();
}

export async function until(condition, within_ms) {
  const deadline = performance.now() + within_ms;
  while (!condition() && performance.now() < deadline) await new Promise((resolve) => setTimeout(resolve, 100));
}
