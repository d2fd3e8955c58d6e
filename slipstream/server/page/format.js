// Numbers as people read them.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

const compact = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });

export const count = (n) => whole.format(n);

/** Exact while it is short: a server that runs for weeks counts millions. */
export const shortCount = (n) => (n < 100_000 ? whole.format(n) : compact.format(n));

/** 3 significant digits below a hundred, whole above: a speed that does not twitch. */
export function speed(perSecond) {
  if (!Number.isFinite(perSecond)) return "–";
  return perSecond < 100 ? perSecond.toFixed(1) : whole.format(perSecond);
}

export const percent = (part, all) => (all > 0 ? `${Math.round((100 * part) / all)}\u00a0%` : "–");

export function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let power = 0;
  while (n >= 1024 && power < units.length - 1) {
    n /= 1024;
    power += 1;
  }
  return `${power === 0 || n >= 100 ? Math.round(n) : n.toFixed(1)}\u00a0${units[power]}`;
}

/** Milliseconds as seconds, with as many digits as one can feel. */
export const seconds = (ms) => `${ms < 10_000 ? (ms / 1000).toFixed(2) : Math.round(ms / 1000)} s`;

export function duration(seconds) {
  const s = Math.floor(seconds);
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
  return `${Math.floor(s / 86400)} d ${Math.floor((s % 86400) / 3600)} h`;
}

export const plural = (n, one, many = `${one}s`) => `${count(n)} ${n === 1 ? one : many}`;
