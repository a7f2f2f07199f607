// Server-sent events as the daemon writes them: LF only, a line of data each.

/** Calls back with the events of each portion that comes, as texts. Ends with the stream. */
export async function readEvents(response, take) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const {done, value} = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    const found = parts.filter((part) => part.startsWith("data: ")).map((part) => part.slice(6));
    if (found.length && take(found) === false) {
      reader.cancel().catch(() => {});
      return;
    }
  }
}
