// Numbers, sizes and times in words.

const UNITS = ["B", "kB", "MB", "GB", "TB"];

/** 842184 → "842 kB". */
export function bytes(n) {
  if (n == null) return "–";
  let unit = 0;
  while (n >= 999.5 && unit < UNITS.length - 1) [n, unit] = [n / 1000, unit + 1];
  return `${n < 10 && unit > 0 ? n.toFixed(1) : Math.round(n)} ${UNITS[unit]}`;
}

export const within = (used, most) => (most ? `${bytes(used)} of ${bytes(most)}` : bytes(used));

/** 38.289 → "38 ms"; 2104 → "2.1 s". */
export function ms(n) {
  if (n == null) return "–";
  if (n < 10) return `${n.toFixed(1)} ms`;
  if (n < 1000) return `${Math.round(n)} ms`;
  if (n < 100000) return `${(n / 1000).toFixed(1)} s`;
  return `${Math.round(n / 60000)} min`;
}

export const count = (n) => (n == null ? "–" : n.toLocaleString("en"));

export const many = (n, what) => `${count(n)} ${what}${n === 1 ? "" : "s"}`;

export const share = (n) => `${Math.round(n * 100)} %`;

/** Seconds since 1970 → "3 min ago"; what is in the future is now. */
export function ago(at) {
  const s = Math.max(0, Date.now() / 1000 - at);
  if (s < 60) return "just now";
  if (s < 3600) return `${Math.floor(s / 60)} min ago`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ago`;
  if (s < 86400 * 7) return `${many(Math.floor(s / 86400), "day")} ago`;
  return new Date(at * 1000).toLocaleDateString("en", {day: "numeric", month: "short", year: "numeric"});
}

/** Text without what could act or hide: control characters are shown as pictures of them. */
export function plain(text) {
  return text.replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u202a-\u202e\u2066-\u2069]/g, (one) => {
    const code = one.charCodeAt(0);
    if (one === "\r") return "";
    return code < 32 ? String.fromCharCode(0x2400 + code) : code === 127 ? "\u2421" : "\ufffd";
  });
}
