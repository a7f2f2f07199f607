// Files that go into a message: text as a fenced block below its name, all else is refused in words.
import {draftOf, drafts, keepDraft} from "./kept.js";
import {tell} from "./notices.js";
import {bytes} from "./numbers.js";

const MOST_BYTES = 200_000; // of one file

/** Puts text files at the end of a draft; says of each other one why not. */
export async function attach(name, files) {
  for (const file of [...files]) {
    const {text, refused} = await read(file);
    if (refused) tell(refused, "warning");
    else {
      keepDraft(name, `${[draftOf(name).trimEnd(), fenced(file.name, text)].filter(Boolean).join("\n\n")}\n\n`);
      drafts.tell(name);
    }
  }
}

/** {text} of a file, or {refused}: why it has none. */
async function read(file) {
  const name = file.name || "The file";
  if (/^image\//.test(file.type)) return {refused: `${name} is an image; the models here read text alone.`};
  if (/\.ssmd$/i.test(name)) return {refused: `${name} is a session; drop it on the list of sessions.`};
  if (file.size > MOST_BYTES) return {refused: `${name} has ${bytes(file.size)}; a file of at most ${bytes(MOST_BYTES)} goes into a message.`};
  try {
    const text = new TextDecoder("utf-8", {fatal: true}).decode(await file.arrayBuffer());
    if (text.includes("\0")) return {refused: `${name} is no text.`};
    return text.trim() ? {text: text.replace(/\r\n?/g, "\n").trimEnd()} : {refused: `${name} is empty.`};
  } catch {
    return {refused: `${name} is no text in UTF-8; only text goes into a message.`};
  }
}

/** A file's name, and its text in a fence that is longer than any in it. */
function fenced(name, text) {
  const longest = Math.max(2, ...(text.match(/^ {0,3}`{3,}/gm) ?? []).map((run) => run.trim().length));
  const fence = "`".repeat(longest + 1);
  const kind = /\.([a-z0-9+]{1,12})$/i.exec(name)?.[1].toLowerCase() ?? "";
  return `${name}\n${fence}${kind}\n${text}\n${fence}`;
}
