// Where one is in the page: the address' fragment, "#/chat/ses_…".
import {Signal} from "./signal.js";

const parse = () => location.hash.replace(/^#\/?/, "").split("/").filter(Boolean).map(decoded);
const decoded = (part) => {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
};

/** The parts of the address: ["chat", "ses_…"]. */
export const route = new Signal(parse());
addEventListener("hashchange", () => location.hash.startsWith("#ticket") || route.set(parse()));

export const go = (path) => (location.hash = path);

/** Says where one is without going anywhere. */
export function put(path) {
  history.replaceState(null, "", `#${path}`);
  route.set(parse());
}
