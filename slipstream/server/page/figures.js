// What is said of an answer's speed: the server's own timings, as words.

import { count, percent, plural, seconds, speed } from "./format.js";
import { numPieces } from "./origins.js";

const SUMS = ["predicted_n", "predicted_ms", "draft_n", "draft_n_accepted"];

/** The timings of an answer that came in two parts: sums, and the prompt of the first. */
export function joined(first, then) {
  if (!first) return then;
  const sums = Object.fromEntries(SUMS.map((name) => [name, (first[name] ?? 0) + (then[name] ?? 0)]));
  const rate = (1000 * sums.predicted_n) / sums.predicted_ms;
  return { ...first, ...sums, predicted_per_second: rate, gain: then.gain, speculation: then.speculation };
}

export const gainWords = (gain) => (Number.isFinite(gain) ? `${gain.toFixed(gain < 10 ? 2 : 1)}×` : "–");

/** Speed, tokens and drafts of an answer, or our own count where the stream did not reach its end. */
export function speedLine(answer) {
  const t = answer.timings;
  if (!t) {
    const rate = Number.isFinite(answer.rate) ? `about ${speed(answer.rate)} tok/s` : null;
    return answer.text ? [plural(numPieces(answer), "token"), rate].filter(Boolean).join(" · ") : "";
  }
  const accepted = `${count(t.draft_n_accepted)} of ${count(t.draft_n)} drafts accepted`;
  const drafts = t.draft_n > 0 ? `${accepted} (${percent(t.draft_n_accepted, t.draft_n)})` : "no drafts";
  const gain = t.draft_n > 0 && Number.isFinite(t.gain) ? `${gainWords(t.gain)} plain speed` : null;
  const tokens = plural(answer.continued ? numPieces(answer) : t.predicted_n, "token");
  return [`${speed(t.predicted_per_second)} tok/s`, tokens, drafts, gain].filter(Boolean).join(" · ");
}

/** How long the reader waited, how much of the prompt was cached, and how fast the rest was read. */
export function promptLine({ timings: t }) {
  if (!t || !Number.isFinite(t.prompt_ms)) return "";
  const first = `First token after ${seconds((t.queue_ms ?? 0) + t.prompt_ms)}`;
  const rate = `at ${speed(t.prompt_per_second)} tok/s`;
  if (!t.cached_tokens) return `${first} · prompt of ${plural(t.prompt_n, "token")} ${rate}`;
  const cached = `${count(t.cached_tokens)} of ${count(t.cached_tokens + t.prompt_n)} prompt tokens from cache`;
  return `${first} · ${cached} · ${count(t.prompt_n)} read ${rate}`;
}
