// Markdown within a line: code, bold, italic, struck, links. Builds nodes; an unclosed mark stays as it was typed.

import { el } from "./dom.js";

const MARKS = [
  ["**", "strong"],
  ["__", "strong"],
  ["~~", "del"],
  ["*", "em"],
  ["_", "em"],
];
const MAX_NESTING = 8;
const ESCAPABLE = "\\`*_{}[]()#+-.!~>|";
const isWord = (char) => char !== undefined && /[\p{L}\p{N}]/u.test(char);
const isSpace = (char) => char === undefined || /\s/.test(char);

/** Nodes for a piece of text. Linear in practice: a mark known to have no end is not looked for again. */
export function inline(text, nesting = 0) {
  const nodes = [];
  const absent = new Set();
  let plain = "";
  let at = 0;
  const flush = () => {
    if (plain) nodes.push(document.createTextNode(plain));
    plain = "";
  };
  while (at < text.length) {
    const found = nesting < MAX_NESTING ? special(text, at, nesting, absent) : null;
    if (found) {
      if (found.node) {
        flush();
        nodes.push(found.node);
      } else plain += found.text;
      at = found.end;
    } else plain += text[at++];
  }
  flush();
  return nodes;
}

function special(text, at, nesting, absent) {
  const char = text[at];
  if (char === "\n") return { node: el("br"), end: at + 1 };
  if (char === "\\" && ESCAPABLE.includes(text[at + 1] ?? " ")) return { text: text[at + 1], end: at + 2 };
  if (char === "`") return codeSpan(text, at, absent);
  if (char === "[") return link(text, at, nesting, absent);
  if ("*_~".includes(char)) return emphasis(text, at, nesting, absent);
  return null;
}

function find(text, mark, from, absent) {
  if (absent.has(mark)) return -1;
  const end = text.indexOf(mark, from);
  if (end < 0) absent.add(mark);
  return end;
}

function codeSpan(text, at, absent) {
  let run = 1;
  while (text[at + run] === "`") run += 1;
  const fence = "`".repeat(run);
  const end = find(text, fence, at + run, absent);
  if (end < 0) return { text: fence, end: at + run };
  const code = text.slice(at + run, end);
  const trimmed = run > 1 && code.startsWith(" ") && code.endsWith(" ") ? code.slice(1, -1) : code;
  return { node: el("code", {}, trimmed), end: end + run };
}

function emphasis(text, at, nesting, absent) {
  for (const [mark, tag] of MARKS) {
    if (!text.startsWith(mark, at)) continue;
    const start = at + mark.length;
    if (isSpace(text[start]) || (mark[0] === "_" && isWord(text[at - 1]))) continue;
    const end = closing(text, mark, start, absent);
    if (end > start)
      return { node: el(tag, {}, ...inline(text.slice(start, end), nesting + 1)), end: end + mark.length };
  }
  const run = text[at + 1] === text[at] ? 2 : 1;
  return { text: text.slice(at, at + run), end: at + run };
}

/** The first end of a mark that touches what it closes; a single mark is not half of a double one. */
function closing(text, mark, start, absent) {
  for (let end = find(text, mark, start, absent); end >= 0; end = find(text, mark, end + mark.length, absent)) {
    const doubled = mark.length === 1 && (text[end + 1] === mark || text[end - 1] === mark);
    const inWord = mark[0] === "_" && isWord(text[end + mark.length]);
    if (!isSpace(text[end - 1]) && !doubled && !inWord) return end;
  }
  return -1;
}

function link(text, at, nesting, absent) {
  const middle = find(text, "](", at + 1, absent);
  if (middle < 0 || text.slice(at, middle).includes("\n")) return null;
  const end = find(text, ")", middle + 2, absent);
  const href = end < 0 ? null : webAddress(text.slice(middle + 2, end));
  if (href === null) return null;
  const attributes = { href, target: "_blank", rel: "noopener noreferrer" };
  return { node: el("a", attributes, ...inline(text.slice(at + 1, middle), nesting + 1)), end: end + 1 };
}

/** Only http and https are followed: a model may write any address, javascript: included. */
function webAddress(text) {
  if (!/^https?:\/\//i.test(text)) return null;
  try {
    return new URL(text).href;
  } catch {
    return null;
  }
}
