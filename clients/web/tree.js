// A session's turns as a tree: ways, forks, and what is sent to go on.

/** {byId, children, roots} of turns. Those that are as `before` has them are the same objects. */
export function grow(turns, before = null) {
  const byId = new Map();
  const children = new Map();
  const roots = [];
  for (const turn of turns) {
    const known = before?.byId.get(turn.id);
    byId.set(turn.id, known && known.complete === turn.complete && known.finish_reason === turn.finish_reason ? known : turn);
    children.set(turn.id, []);
  }
  for (const turn of byId.values()) (children.get(turn.parent) ?? roots).push(turn);
  return {byId, children, roots};
}

export function pathTo(tree, id) {
  const path = [];
  for (let turn = tree.byId.get(id); turn; turn = tree.byId.get(turn.parent)) path.push(turn);
  return path.reverse();
}

/** Where one arrives from a turn, down to the youngest, or towards `head` if it is below. */
export function leafBelow(tree, id, head = null) {
  if (head && pathTo(tree, head).some((turn) => turn.id === id)) return head;
  let leaf = id;
  for (let below; (below = tree.children.get(leaf)?.at(-1)); ) leaf = below.id;
  return leaf;
}

/** The messages of a way: the whole conversation. */
export const messagesOf = (path) => path.flatMap((turn) => turn.messages);

export const askOf = (turn) => turn.messages.slice(0, -1);
export const answerOf = (turn) => turn.messages.at(-1);

const asked = (turn) => JSON.stringify(askOf(turn));

/**
 * Where a turn is one of several: {asks, ask} the first turn of each question that was asked here, and which it is;
 * {answers, answer} all answers to its question.
 */
export function forksAt(tree, turn) {
  const siblings = tree.children.get(turn.parent) ?? tree.roots;
  if (siblings.length < 2) return {asks: [turn], ask: 0, answers: [turn], answer: 0};
  const groups = new Map();
  for (const one of siblings) groups.set(asked(one), [...(groups.get(asked(one)) ?? []), one]);
  const own = groups.get(asked(turn));
  return {
    asks: [...groups.values()].map((group) => (group === own ? turn : group.at(-1))),
    ask: [...groups.values()].indexOf(own),
    answers: own,
    answer: own.findIndex((one) => one.id === turn.id),
  };
}

/**
 * Rows that draw the tree: {turn, lane, from, through, goes}. Side branches come first, a lane to the right; then the line
 * towards the head goes on in its own. from: the parent's lane, null at a root; through: lanes that pass by; goes: on below.
 */
export function lanes(tree, head = null) {
  const main = new Set(pathTo(tree, head).map((turn) => turn.id));
  const waiting = tree.roots.map((turn) => ({turn, lane: 0, from: null})).reverse();
  const rows = [];
  while (waiting.length) {
    const {turn, lane, from} = waiting.pop();
    const below = tree.children.get(turn.id);
    const on = below.find((child) => main.has(child.id)) ?? below.at(-1);
    rows.push({turn, lane, from, through: new Set(waiting.map((one) => one.from)), goes: below.length > 0});
    if (on) waiting.push({turn: on, lane, from: lane});
    for (const side of below.filter((child) => child !== on).reverse()) waiting.push({turn: side, lane: lane + 1, from: lane});
  }
  return rows;
}

/** The system prompt of a way, "" if it has none. */
export const systemOf = (path) => path[0]?.messages.find((message) => message.role === "system")?.content ?? "";

/** Messages with this system prompt in place of theirs; "" takes it away. */
export function withSystem(messages, system) {
  const rest = messages[0]?.role === "system" ? messages.slice(1) : messages;
  return system ? [{role: "system", content: system}, ...rest] : rest;
}
