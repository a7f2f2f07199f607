// A conversation: turns, the way that is looked at, the answer under way.
import {Answer, answerIn, brokenIn, isAsked, takeFirst, titleOf, until} from "./answers.js";
import {ask} from "./api.js";
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
  #shown = false;
  #from = null; // what was looked at when the answer began
  #key;

  /** id: of a session, null if it is new. at: the turn to show. opened: called with the id it gets. */
  constructor(id, at, opened) {
    super();
    Object.assign(this, {id, at, opened});
    this.#key = id ?? `new-${Math.random()}`;
  }

  /** Begins to be shown, and to look after changes. Returns what ends that. */
  start() {
    this.#shown = true;
    this.#stops = [
      onChange(({kind, session, back}) => {
        if (!this.id || (session !== this.id && !back)) return;
        if (kind === "asked") this.#learn();
        else if (kind === "changed" || kind === "answered") this.load();
      }),
      metrics.listen(() => this.#join()),
    ];
    this.loading = Boolean(this.id && !this.session);
    if (this.loading) this.#first();
    else this.load();
    const asked = !this.id && takeFirst();
    if (asked) this.#run(new Answer(asked));
    return () => {
      this.#shown = false;
      this.#stops.forEach((stop) => stop());
    };
  }

  /** Follows an answer under way before it asks for the session, which may not be stored yet. */
  async #first() {
    await until(() => metrics.value || !isAsked(this.id), 1000);
    await this.load();
    const broken = !this.answer && brokenIn(this.id);
    if (!broken || (broken.parent && !this.tree.byId.has(broken.parent))) return;
    if (this.leaf === broken.parent) [this.answer, this.missing] = [broken, false];
    else if (broken.text) this.#keepHere(broken);
    this.tell();
  }

  get path() {
    return pathTo(this.tree, this.leaf);
  }

  /** Whether the answer belongs below the way that is looked at. */
  get here() {
    return Boolean(this.answer) && (this.answer.question ? this.answer.parent === this.leaf : !this.answer.left);
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
      this.session = told;
      this.#plant();
      if (this.#hides(this.leaf)) this.#giveWay();
      const grown = !this.tree.byId.has(this.leaf) || pathTo(this.tree, told.head).some((turn) => turn.id === this.leaf);
      if (this.at && this.tree.byId.has(this.at)) [this.leaf, this.at] = [leafBelow(this.tree, this.at, told.head), null];
      else if (grown && !(this.answer?.question && this.here)) this.leaf = told.head;
      this.missing = false;
    } catch (error) {
      if (error.status === 404) this.missing = !this.answer;
      else if (error.status !== 0) fail(error);
    }
    this.loading = false;
    this.#join();
    this.tell();
  }

  say(options, text) {
    this.#giveWay();
    return this.#ask(options, this.leaf, [{role: "user", content: text}], "", this.id ?? "new");
  }

  /** Asks a turn's question again, or other words: a branch beside it. */
  again(options, turn, text = null) {
    const question = askOf(turn).map((message, i, all) =>
      text !== null && i === all.length - 1 ? {...message, content: text} : message,
    );
    return this.#ask(options, turn.parent, question, "", text && turn.id);
  }

  goOn(options, turn) {
    return this.#ask(options, turn.parent, askOf(turn), answerOf(turn).content);
  }

  retry(options) {
    const {parent, question, begun} = this.answer;
    this.answer = null;
    return this.#ask(options, parent, question, begun);
  }

  /** What a turn's answer cost, as this window or the daemon knows. */
  costOf(turn) {
    if (!this.costs.has(turn.id) && turn.usage) {
      const {cached_tokens, ...ssmd} = turn.usage;
      this.costs.set(turn.id, {prompt_tokens: turn.prompt_tokens, prompt_tokens_details: {cached_tokens}, ssmd});
    }
    return this.costs.get(turn.id);
  }

  /** {used, context, left}: tokens of the model's context after a turn; null where they are not bounded or not known. */
  roomAfter(turn) {
    const usage = this.costOf(turn);
    const used = turn.tokens || (usage?.completion_tokens === undefined ? 0 : usage.prompt_tokens + usage.completion_tokens);
    const row = metrics.value?.models?.find((one) => [one.id, one.name].includes(this.session?.model ?? this.answer?.request?.model));
    if (!used || !row?.context) return null;
    return {used, context: row.context, left: Math.max(0, row.context - used)};
  }

  /** How many messages before a turn the model was not shown. */
  cutBefore(turn) {
    return turn.cut_messages ?? this.costOf(turn)?.ssmd?.cut_messages ?? 0;
  }

  /** Whether an answer can go on: there is room, or what can be left out makes some. */
  goesOn(turn) {
    const room = this.roomAfter(turn);
    if (!room || room.left > 0) return true;
    const above = messagesOf(pathTo(this.tree, turn.parent)).filter((message) => message.role !== "system");
    return this.cutBefore(turn) < above.length;
  }

  /** What it is called: as it is stored, or by its first question. */
  get title() {
    return this.session?.title ?? (this.path.length ? "" : titleOf(this.answer?.question));
  }

  show(turn) {
    this.#giveWay();
    const {answer} = this;
    if (answer && !answer.question) answer.left = true;
    const below = answer?.question && pathTo(this.tree, answer.parent).includes(turn);
    this.leaf = below ? answer.parent : leafBelow(this.tree, turn.id, this.session?.head);
    this.tell();
  }

  /** What broke off makes room; what it said stays as a turn of this window. */
  #giveWay() {
    if (this.busy || !this.answer) return;
    const {answer, here} = this;
    this.answer = null;
    if (!answer.text) return;
    const turn = this.#keepHere(answer);
    if (here) this.leaf = turn.id;
  }

  #hides(leaf) {
    return (leaf ? this.tree.children.get(leaf) : this.tree.roots)?.length > 0;
  }

  #goTo(id) {
    this.id = id;
    this.#key = id ?? `new-${Math.random()}`;
    if (this.#shown) this.opened(id);
  }

  async #ask({model, system, sampling}, above, question, begun = "", draft = null) {
    if (this.busy) throw new Error("An answer is under way: stop it, or wait for its end.");
    this.#giveWay();
    const path = pathTo(this.tree, above);
    const before = path.length ? messagesOf(path) : [];
    const all = [...before, ...question, ...(begun ? [{role: "assistant", content: begun}] : [])];
    const given = system == null ? all : withSystem(all, system);
    const moved = given.length !== all.length || (given[0]?.role === "system" && given[0].content !== all[0]?.content);
    const request = {model, messages: given, truncation: "auto", ...sampling};
    if (this.session) request.session = this.id;
    // Another system prompt is a branch at the root that has all that was said.
    const parent = moved ? null : (path.at(-1)?.id ?? null);
    const shown = moved ? given.slice(0, begun ? -1 : undefined) : question;
    await this.#run(new Answer({session: this.id, parent, question: shown, begun, request, draft}));
  }

  async #run(answer) {
    answer.before = new Set(this.tree.byId.keys());
    [this.answer, this.#from, this.leaf] = [answer, this.leaf, answer.parent];
    const done = answer.begin(this.#key);
    const stop = answer.listen(() => answer.session && answer.session !== this.id && this.#goTo(answer.session));
    this.tell();
    await done;
    stop();
    await this.#settle(answer);
  }

  /** Takes on an answer that runs in this session, also one that another client began. */
  #join() {
    if (this.busy || !this.id) return;
    const answer = answerIn(this.id);
    if (!answer || answer === this.answer) return;
    this.#giveWay();
    [this.answer, this.#from] = [answer, this.leaf];
    if (answer.question && this.loading) this.leaf = answer.parent;
    this.missing = this.loading = false;
    this.tell();
    const stop = answer.listen(async () => {
      if (!answer.over) return;
      stop();
      await this.#settle(answer);
    });
  }

  /** Puts the turn that an answer became in its place. */
  async #settle(answer) {
    if (!answer.over) return; // the page goes
    this.#settling = true;
    if (this.id) await this.load();
    this.#settling = false;
    const found = this.#turnOf(answer);
    const broke = !found && /failed|lost/.test(answer.state);
    const kept = answer.question && (answer.state === "done" || (answer.text && (!broke || this.#hides(answer.parent))));
    const turn = found ?? (kept ? this.#keepHere(answer) : null);
    if (turn && answer.usage) this.costs.set(turn.id, answer.usage);
    answer.take(Boolean(turn) || answer.came);
    if (this.answer === answer) this.#place(answer, turn, broke);
    this.tell();
    changed(null);
  }

  /** Shows what became of it, and hides nothing that is stored: if nothing came, one is where one was. */
  #place(answer, turn, broke) {
    const {here} = this;
    if (turn && here) this.leaf = turn.id;
    else if (here && !answer.came && !answer.removed) {
      this.leaf = answer.question && this.tree.byId.has(this.#from) ? this.#from : (this.session?.head ?? null);
    }
    const stays = broke && !turn && (this.here || answer.removed);
    if (broke && !stays) fail({message: answer.error});
    if (!stays) this.answer = null;
    if (answer.came || !answer.draft) return;
    if (answer.draft === (this.id ?? "new") || !this.session) answer.question = []; // it is in the box
    if (!this.session && this.id) this.#goTo(null);
  }

  /** Takes over what another window kept of the question. */
  #learn() {
    if (!this.busy || this.answer.question) return;
    this.answer.learn();
    this.answer.tell();
    this.tell();
  }

  /** The turn that an answer became: by its words, else what is new where it belongs. */
  #turnOf(answer) {
    const whole = (answer.begun + answer.text).trim();
    const all = [...this.tree.byId.values()].reverse();
    const there = all.filter((turn) => !answer.question || turn.parent === answer.parent);
    const fresh = there.filter((turn) => answer.before && !answer.before.has(turn.id) && !turn.unsaved);
    const asked = answer.question?.at(-1)?.content;
    // What was over before it could be followed is known by its question. The daemon goes on from the younger of two.
    const same = (turn) => (answer.came ? answerOf(turn).content.trim() === whole : askOf(turn).at(-1)?.content === asked);
    const beside = all.filter((turn) => answer.before && !answer.before.has(turn.id) && !turn.unsaved && same(turn));
    return (answer.before ? fresh : there).find(same) ?? fresh[0] ?? beside[0] ?? null;
  }

  /** A turn that is not stored. It is sent along all the same. */
  #keepHere(answer) {
    const said = {role: "assistant", content: answer.begun + answer.text, ...(answer.calls.length && {tool_calls: answer.calls})};
    const parent = answer.question ? answer.parent : (this.session?.head ?? null);
    const turn = {id: `here-${Math.random()}`, parent, messages: [...(answer.question ?? []), said], complete: answer.state === "done"};
    this.#local.push({...turn, finish_reason: answer.finish, unsaved: true, created: Date.now() / 1000});
    this.#plant();
    return turn;
  }

  #plant() {
    this.tree = grow([...(this.session?.turns ?? []), ...this.#local], this.tree);
  }
}
