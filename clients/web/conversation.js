// One conversation: its session's turns, the way that is looked at, and the answer under way.
import {Answer, answerIn, brokenIn, isFresh} from "./answers.js";
import {ask} from "./api.js";
import {sending} from "./kept.js";
import {metrics} from "./live.js";
import {fail} from "./notices.js";
import {Signal} from "./signal.js";
import {answerOf, askOf, grow, leafBelow, messagesOf, pathTo, systemOf, withSystem} from "./tree.js";
import {changed, onChange} from "./windows.js";

const EMPTY = grow([]);

export class Conversation extends Signal {
  session = null; // as the daemon tells of it; null before its first turn is stored
  tree = EMPTY;
  leaf = null; // the turn that is looked at, null: the beginning
  answer = null;
  missing = false;
  loading = false;
  costs = new Map(); // turn → usage, of answers that this window saw
  #local = []; // turns that are not stored
  #stops = [];
  #settling = false;
  #key;

  /** id: of a session, null for one that is new. at: the turn to show. opened: called with the id it gets. */
  constructor(id, at = null, opened = () => {}) {
    super();
    Object.assign(this, {id, at, opened});
    this.#key = id ?? `new-${Math.random()}`;
  }

  /** Begins to look after changes. Returns what ends that. */
  start() {
    this.#stops = [
      onChange(({kind, session, back}) => {
        if (!this.id || (session !== this.id && !back)) return;
        if (kind === "asked") this.#learn();
        else if (kind === "changed" || kind === "answered") this.load();
      }),
      metrics.listen(() => this.#join()),
    ];
    this.loading = Boolean(this.id);
    this.#first();
    return () => this.#stops.forEach((stop) => stop());
  }

  /** What is not stored yet is not asked for: the session's first answer is followed. */
  async #first() {
    for (let i = 0; this.id && isFresh(this.id) && !metrics.value && i < 20; i++) await new Promise((go) => setTimeout(go, 50));
    await this.load();
    const broken = this.id && !this.answer && brokenIn(this.id);
    if (!broken || (broken.parent && !this.tree.byId.has(broken.parent))) return;
    [this.answer, this.leaf, this.missing] = [broken, broken.parent, false];
    this.tell();
  }

  get path() {
    return pathTo(this.tree, this.leaf);
  }

  /** Whether an answer is under way, or on its way into its place. */
  get busy() {
    return Boolean(this.answer && (!this.answer.over || this.#settling));
  }

  get system() {
    return systemOf(this.path);
  }

  /** Reads the session again, and goes along where the way has grown in another window. */
  async load() {
    this.#join();
    if (!this.id || (!this.session && this.answer && !this.answer.over)) return;
    try {
      const told = await ask(`/ssmd/v1/sessions/${this.id}`);
      const atEnd = this.leaf === (this.session?.head ?? null);
      this.session = told;
      this.#plant();
      if (this.at && this.tree.byId.has(this.at)) [this.leaf, this.at] = [leafBelow(this.tree, this.at, told.head), null];
      else if (atEnd || !this.tree.byId.has(this.leaf)) this.leaf = this.answer ? this.leaf : told.head;
      this.missing = false;
    } catch (error) {
      if (error.status === 404) this.missing = !this.answer;
      else if (error.status !== 0) fail(error);
    }
    this.loading = false;
    this.#join();
    this.tell();
  }

  /** Says something on the way that is looked at. Returns false if nothing came: it is a draft again. */
  async say(text, options) {
    const taken = sending(this.id ?? "new", text);
    try {
      if (!this.busy && this.answer?.text) this.leaf = this.#keepHere(this.answer).id;
      return (await this.#ask(this.path, [{role: "user", content: text}], options, "", taken)).came;
    } finally {
      taken(false);
    }
  }

  /** Asks a turn's question again, or other words: a branch beside it. */
  again(turn, options, text = null) {
    const question = askOf(turn).map((message, i, all) =>
      text !== null && i === all.length - 1 ? {...message, content: text} : message,
    );
    return this.#ask(pathTo(this.tree, turn.parent), question, options);
  }

  /** Goes on with a turn's answer where it ends. */
  goOn(turn, options) {
    return this.#ask(pathTo(this.tree, turn.parent), askOf(turn), options, answerOf(turn).content);
  }

  /** Asks once more what came to no answer. */
  retry(options) {
    const {parent, question, begun} = this.answer;
    return this.#ask(pathTo(this.tree, parent), question, options, begun);
  }

  /** What a turn's answer cost, as this window or the daemon knows. */
  costOf(turn) {
    if (!this.costs.has(turn.id) && turn.usage) {
      const {cached_tokens, ...ssmd} = turn.usage;
      this.costs.set(turn.id, {prompt_tokens: turn.prompt_tokens, prompt_tokens_details: {cached_tokens}, ssmd});
    }
    return this.costs.get(turn.id);
  }

  show(turn) {
    this.leaf = leafBelow(this.tree, turn.id, this.session?.head);
    if (!this.busy) this.answer = null;
    this.tell();
  }

  async #ask(path, question, {model, system, sampling}, begun = "", taken = null) {
    if (this.busy) throw new Error("An answer is under way: stop it, or wait for its end.");
    const before = path.length ? messagesOf(path) : [];
    const all = [...before, ...question, ...(begun ? [{role: "assistant", content: begun}] : [])];
    const given = system === null || system === undefined ? all : withSystem(all, system);
    const moved = given.length !== all.length || (given[0]?.role === "system" && given[0].content !== all[0]?.content);
    const request = {model, messages: given, ...sampling};
    if (this.session) request.session = this.id;
    // Another system prompt is another conversation: a branch at the root that has all that was said.
    const parent = moved ? null : (path.at(-1)?.id ?? null);
    const shown = moved ? given.slice(0, begun ? -1 : undefined) : question;
    this.leaf = parent;
    this.answer = new Answer({session: this.id, parent, question: shown, begun, request, fresh: !this.session});
    this.answer.before = new Set(this.tree.byId.keys());
    this.answer.typed = Boolean(taken);
    const done = this.answer.begin(this.#key);
    const stop = this.answer.listen((answer) => {
      if (answer.came) taken?.(true);
      if (answer.session && answer.session !== this.id) {
        this.id = this.#key = answer.session;
        this.opened(this.id);
      }
    });
    this.tell();
    const {answer} = this;
    await done;
    stop();
    await this.#settle(answer);
    return answer;
  }

  /** Takes on an answer that runs in this session, whoever asked. */
  #join() {
    if (this.busy || !this.id) return;
    const answer = answerIn(this.id);
    if (!answer || answer === this.answer) return;
    this.answer = answer;
    if (answer.question) this.leaf = answer.parent;
    this.missing = this.loading = false;
    this.tell();
    const stop = answer.listen(async () => {
      if (!answer.over) return;
      stop();
      await this.#settle(answer);
    });
  }

  /** Puts the turn that an answer became in its place. What became none stays below, with what went wrong. */
  async #settle(answer) {
    this.#settling = true;
    if (this.id) await this.load();
    this.#settling = false;
    const found = this.#turnOf(answer);
    const whole = answer.question && (answer.state === "done" || (answer.state === "stopped" && answer.text));
    const turn = found ?? (whole ? this.#keepHere(answer) : null);
    if (turn && answer.usage) this.costs.set(turn.id, answer.usage);
    if (turn && this.answer === answer) [this.leaf, this.answer] = [turn.id, null];
    else if (answer.typed && !answer.came) this.#giveBack(answer);
    else if (this.answer === answer && answer.state !== "failed" && answer.state !== "lost") {
      [this.leaf, this.answer] = [this.session?.head ?? null, null]; // another client's
    }
    this.tell();
    changed(null);
  }

  #giveBack(answer) {
    if (this.id && !this.session) {
      [this.id, this.#key] = [null, `new-${Math.random()}`];
      this.opened(null);
    }
    if (this.answer !== answer) return;
    answer.question = [];
    if (answer.state === "stopped") this.answer = null;
  }

  /** Takes over what another window kept of the question. */
  #learn() {
    if (!this.busy || this.answer.question) return;
    this.answer.learn();
    if (this.answer.question) this.leaf = this.answer.parent;
    this.answer.tell();
    this.tell();
  }

  /** The turn that an answer became: by its words, else what is new where it belongs. */
  #turnOf(answer) {
    const whole = (answer.begun + answer.text).trim();
    const all = [...this.tree.byId.values()].reverse();
    const there = all.filter((turn) => !answer.question || turn.parent === answer.parent);
    const fresh = there.filter((turn) => answer.before && !answer.before.has(turn.id) && !turn.unsaved);
    const same = (turn) => answerOf(turn).content.trim() === whole;
    // Of two turns with the same words the daemon goes on from the younger one.
    const beside = all.filter((turn) => answer.before && !answer.before.has(turn.id) && !turn.unsaved && same(turn));
    return (answer.before ? fresh : there).find(same) ?? fresh[0] ?? beside[0] ?? null;
  }

  /** A turn that is not stored (--no-store, a full disk). It is sent along all the same. */
  #keepHere(answer) {
    const said = {role: "assistant", content: answer.begun + answer.text, ...(answer.calls.length && {tool_calls: answer.calls})};
    const parent = answer.question ? answer.parent : (this.session?.head ?? null);
    const turn = {id: `here-${this.#local.length}`, parent, messages: [...(answer.question ?? []), said], complete: answer.state === "done"};
    this.#local.push({...turn, finish_reason: answer.finish, unsaved: true, created: Date.now() / 1000});
    this.#plant();
    return turn;
  }

  #plant() {
    this.tree = grow([...(this.session?.turns ?? []), ...this.#local], this.tree);
  }
}
