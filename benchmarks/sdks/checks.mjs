// Checks of one client library against a daemon, for Node: as checks.py. Run as `PROGRAM URL MODEL`.
export const [url, model] = process.argv.slice(2);
export const base = `${url}/v1`;

/** Run checks by feature, one after the other; one fails if it throws. */
export async function run(checks) {
  for (const [feature, check] of Object.entries(checks)) {
    let why = null;
    try {
      await check();
    } catch (error) {
      why = `${error.name}: ${String(error.message).split("\n")[0].slice(0, 200)}`;
    }
    console.log(JSON.stringify({ feature, why }));
  }
}

/** Throws unless something holds. */
export function assert(holds, said = "it does not hold") {
  if (!holds) throw new Error(said);
}

/** Throws unless the last answer went on from a kept state, at `least` tokens. */
export async function resumed(least = 1) {
  const { recent } = await (await fetch(`${url}/ssmd/v1/metrics`)).json();
  const { cached_tokens: cached, prompt_tokens: prompt } = recent.at(-1);
  assert(cached >= least, `${cached} of ${prompt} tokens were cached`);
}
