// What is done with sessions.
import {ask, hasKey, open} from "./api.js";
import {askText} from "./dialog.js";
import {keepDraft} from "./kept.js";
import {metrics} from "./live.js";
import {fail, tell} from "./notices.js";
import {bytes, many} from "./numbers.js";
import {go} from "./route.js";
import {Signal} from "./signal.js";
import {changed, onChange} from "./windows.js";

const UNDO_MS = 8000;
const ROOT = "/ssmd/v1/sessions";

/** Ids of sessions that are about to be removed: no view shows them. */
export const hidden = new Signal(new Set());
const pending = new Map(); // id → {timer, back, since: when the last answer had ended}

/** What can be done with a session, as items of a menu. removed: called when it is deleted. */
export function actions(session, removed = () => {}) {
  return [
    {icon: "sessions", label: "Show the tree", run: () => go(`/sessions/${session.id}`)},
    {icon: "edit", label: "Rename", run: () => rename(session)},
    {icon: "pin", label: session.pinned ? "Unpin" : "Pin", run: () => patch(session, {pinned: !session.pinned})},
    {icon: "fork", label: "Fork", run: () => fork(session)},
    {icon: "out", label: "Export", run: () => exported(session)},
    {icon: "bin", label: "Delete", kind: "danger", run: () => (remove(session), removed())},
  ];
}

async function rename(session) {
  const title = await askText({title: "Rename the session", label: "Title; empty for the first words", value: session.title});
  if (title !== null && title !== session.title) await patch(session, {title: title.trim() || null});
}

async function patch(session, changes) {
  await ask(`${ROOT}/${session.id}`, {method: "PATCH", body: changes});
  changed(session.id);
}

async function fork(session) {
  const made = await ask(`${ROOT}/${session.id}/fork`, {method: "POST"});
  changed(null);
  go(`/chat/${made.id}`);
}

/** Has the browser save a session's file. With a key it passes through this window. */
async function exported(session) {
  const link = document.createElement("a");
  link.download = `${session.id}.ssmd`;
  const path = `${ROOT}/${session.id}/export`;
  await ask(`${ROOT}/${session.id}`); // a link does not say that it is gone
  if (!hasKey()) link.href = path;
  else link.href = URL.createObjectURL(await (await open(path)).blob());
  link.click();
  if (link.href.startsWith("blob:")) setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

/** Imports files, one after the other; says of each what came of it. */
export async function imported(files) {
  for (const file of files) {
    try {
      const session = await ask(`${ROOT}/import`, {method: "POST", raw: file});
      const how = session.text_only ? `its text only: ${session.text_only}` : `with ${many(session.states, "state")}`;
      tell(`${file.name}: ${many(session.turn_count, "turn")}, ${how}`, "info", {label: "Open", run: () => go(`/chat/${session.id}`)});
      changed(null);
    } catch (error) {
      fail(error.status ? {message: `${file.name}: ${error.message}`} : error);
    }
  }
}

/** Hides a session, and removes it when it can no longer be taken back. */
function remove(session) {
  const {id} = session;
  changed(id, "hidden");
  const back = () => {
    clearTimeout(pending.get(id)?.timer);
    if (pending.delete(id)) changed(id, "shown");
  };
  pending.set(id, {timer: setTimeout(() => flush(id), UNDO_MS), back, since: metrics.value?.recent?.at(-1)?.ended_at ?? 0});
  const freed = session.own_bytes ? `, ${bytes(session.own_bytes)}` : "";
  tell(`Deleted: ${session.title}${freed}`, "info", {label: "Undo", run: back}, UNDO_MS);
}

async function flush(id) {
  clearTimeout(pending.get(id)?.timer);
  pending.delete(id);
  try {
    await open(`${ROOT}/${id}`, {method: "DELETE", keepalive: true});
    keepDraft(id, "");
  } catch (error) {
    if (error.status !== 404) {
      fail(error);
      changed(id, "shown");
    }
  }
  changed(null);
}

onChange(({kind, session}) => {
  if (kind !== "hidden" && kind !== "shown") return;
  const next = new Set(hidden.value);
  next[kind === "hidden" ? "add" : "delete"](session);
  hidden.set(next);
});

/** What is used again before it is removed stays. */
function keep(id) {
  pending.get(id).back();
  tell("A session is used again: it is not deleted.", "warning");
}
onChange(({kind, session}) => kind === "asked" && pending.has(session) && keep(session));
metrics.listen(({running, recent = []}) => {
  for (const [id, {since}] of pending) {
    if ([...running, ...recent.filter((row) => row.ended_at > since)].some((row) => row.session === id)) keep(id);
  }
});

addEventListener("pagehide", () => [...pending.keys()].forEach(flush));
