// The daemon's metrics as they come, and whether it answers at all.
import {locked, open, unlocked} from "./api.js";
import {readEvents} from "./events.js";
import {Signal} from "./signal.js";

const FIRST_MS = 300;
const LONGEST_MS = 5000;

export const metrics = new Signal(null);
/** "connecting", "there" or "away". */
export const daemon = new Signal("connecting");

/** Listens for ever; waits longer and longer while the daemon is away. */
export async function follow() {
  let wait = FIRST_MS;
  for (;;) {
    try {
      const response = await open("/ssmd/v1/metrics/stream");
      await readEvents(response, (events) => {
        metrics.set(JSON.parse(events.at(-1)));
        daemon.set(metrics.value.state === "draining" ? "away" : "there");
        wait = FIRST_MS;
      });
    } catch {
      // said by `daemon`, or by the key prompt
    }
    daemon.set("away");
    if (locked.value) await new Promise((go) => unlocked.listen(go));
    else await new Promise((resolve) => setTimeout(resolve, wait));
    wait = Math.min(wait * 1.6, LONGEST_MS);
  }
}
