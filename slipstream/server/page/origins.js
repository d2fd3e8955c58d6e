// Where each token of an answer came from: the model's own choice, or a draft accepted at position 1, 2, 3...
//
// An answer keeps its text and, beside it, `marks`: [length, origin, length, origin, ...], one pair a piece, lengths in
// UTF-16 units as JavaScript counts them. That is shorter than the pieces and cannot disagree with the text.

import { el } from "./dom.js";
import { count, plural } from "./format.js";

export const UNKNOWN = -1;
const OWN = 0;
const LAST_TINT = 5; // positions from here on share one tint

export const tint = (origin) => (origin === UNKNOWN ? "unknown" : String(Math.min(origin, LAST_TINT)));

const ORDINALS = ["", "1st", "2nd", "3rd"];

export function originName(origin) {
  if (origin === UNKNOWN) return "origin unknown";
  if (origin === OWN) return "the model's own token";
  return `accepted draft, ${ORDINALS[origin] ?? `${origin}th`} position`;
}

const isPiece = (piece) =>
  Array.isArray(piece) && typeof piece[0] === "string" && Number.isInteger(piece[1]) && piece[1] >= 0;

/** Adds what one chunk brought. Pieces that do not spell the text are not believed. */
export function append(answer, text, pieces) {
  const good = Array.isArray(pieces) && pieces.every(isPiece) && pieces.map((piece) => piece[0]).join("") === text;
  for (const [piece, origin] of good ? pieces : [[text, UNKNOWN]]) {
    if (piece !== "") answer.marks.push(piece.length, origin);
  }
  answer.text += text;
}

export const isUnknown = (answer) => answer.marks.some((mark, i) => i % 2 === 1 && mark === UNKNOWN);

export const numPieces = (answer) => answer.marks.length / 2;

/** How many pieces each tint has: [own, 1st, 2nd, 3rd, 4th, 5th and later]. */
export function tally(answer) {
  const counts = new Array(LAST_TINT + 1).fill(0);
  for (let i = 1; i < answer.marks.length; i += 2) {
    if (answer.marks[i] !== UNKNOWN) counts[Math.min(answer.marks[i], LAST_TINT)] += 1;
  }
  return counts;
}

/** Turns stretches of an answer's text into tinted spans, one a token: a token cut by markup has several. */
export class Tints {
  constructor() {
    this.starts = []; // of each piece in the text; and where the last one ends
    this.origins = [];
    this.end = 0;
  }

  /** Takes in what is new; an answer's marks only grow. */
  follow({ marks }) {
    for (let i = 2 * this.starts.length; i < marks.length; i += 2) {
      this.starts.push(this.end);
      this.origins.push(marks[i + 1]);
      this.end += marks[i];
    }
  }

  /** Nodes for `text`, which stands at `from` in the source. */
  nodes(text, from) {
    const spans = [];
    for (let at = 0; at < text.length;) {
      const piece = this.pieceAt(from + at);
      const length = Math.max(1, (this.starts[piece + 1] ?? this.end) - from - at);
      spans.push(tokenSpan(text.slice(at, at + length), this.origins[piece] ?? UNKNOWN, piece));
      at += length;
    }
    return spans;
  }

  /** One span for a text that is spelled otherwise in the source, as `&amp;` is. */
  whole(text, from) {
    const piece = this.pieceAt(from);
    return [tokenSpan(text, this.origins[piece] ?? UNKNOWN, piece)];
  }

  pieceAt(offset) {
    let low = 0;
    let high = this.starts.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.starts[middle] <= offset) low = middle;
      else high = middle - 1;
    }
    return low;
  }
}

function tokenSpan(text, origin, piece) {
  const attributes = { class: "token", "data-tint": tint(origin), "data-origin": origin, "data-piece": piece };
  return el("span", { ...attributes, title: originName(origin) }, text);
}

const NAMES = ["model's own token", "1st draft", "2nd draft", "3rd draft", "4th draft", "5th and later"];

/** The legend; with counts, only the kinds that occur. */
export function legend(counts = null) {
  const rows = NAMES.map((name, k) => (counts === null || counts[k] ? legendItem(name, k, counts?.[k]) : null));
  return el("ul", { class: "legend", "aria-label": "What the tints mean" }, ...rows);
}

function legendItem(name, k, amount) {
  const swatch = el("span", { class: "swatch", "data-tint": k, "aria-hidden": "true" });
  return el("li", {}, swatch, name, amount === undefined ? null : el("b", {}, count(amount)));
}

/** A bar of the answer's tokens by origin, in the tints of the legend. */
export function shareBar(counts) {
  const all = counts.reduce((a, b) => a + b, 0);
  const words = counts
    .map((n, k) => (n ? `${NAMES[k]} ${n}` : null))
    .filter(Boolean)
    .join(", ");
  const bar = el("div", { class: "share", role: "img", "aria-label": `${plural(all, "token")} by origin: ${words}` });
  counts.forEach((n, k) => {
    if (!n) return;
    const part = el("span", { "data-tint": k });
    part.style.flexGrow = String(n);
    bar.append(part);
  });
  return bar;
}
