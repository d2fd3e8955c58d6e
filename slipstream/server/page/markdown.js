// Markdown by blocks: paragraphs, headings, lists, quotes, rules and fenced code, built of nodes only.
//
// While an answer streams its text is parsed again at each frame, but only blocks whose source changed are rebuilt:
// what stands above stays the same nodes, so a selection in it survives.

import { copyFrom } from "./clipboard.js";
import { el, iconButton } from "./dom.js";
import { inline } from "./inline.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^\s`]*)/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?(.*)$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const MAX_NESTING = 6;

/** The blocks of a text, as {kind, ...}. `source` shows whether a block changed. */
export function parse(text) {
  const lines = text.split("\n");
  const blocks = [];
  for (let at = 0; at < lines.length;) {
    const [block, next] = takeBlock(lines, at);
    if (block) blocks.push({ ...block, source: lines.slice(at, next).join("\n") });
    at = next;
  }
  return blocks;
}

function takeBlock(lines, at) {
  const line = lines[at];
  if (line.trim() === "") return [null, at + 1];
  const heading = HEADING.exec(line);
  if (FENCE.test(line)) return takeCode(lines, at);
  if (heading) return [{ kind: "heading", level: heading[1].length, text: heading[2] }, at + 1];
  if (RULE.test(line)) return [{ kind: "rule" }, at + 1];
  if (QUOTE.test(line)) return takeQuote(lines, at);
  if (ITEM.test(line)) return takeList(lines, at);
  return takeParagraph(lines, at);
}

function takeCode(lines, at) {
  const [, fence, language] = FENCE.exec(lines[at]);
  const isEnd = (line) => line.trim().startsWith(fence) && line.trim() === fence[0].repeat(line.trim().length);
  let end = at + 1;
  while (end < lines.length && !isEnd(lines[end])) end += 1;
  return [{ kind: "code", language, text: lines.slice(at + 1, end).join("\n") }, Math.min(end + 1, lines.length)];
}

function takeQuote(lines, at) {
  const inner = [];
  while (at < lines.length && QUOTE.test(lines[at])) inner.push(QUOTE.exec(lines[at++])[1]);
  return [{ kind: "quote", text: inner.join("\n") }, at];
}

/** A list's lines: its items, what is indented under them, and single blank lines between. */
function takeList(lines, at) {
  const indent = ITEM.exec(lines[at])[1].length;
  const ordered = /\d/.test(ITEM.exec(lines[at])[2]);
  const items = [];
  const start = parseInt(ITEM.exec(lines[at])[2], 10);
  while (at < lines.length) {
    const item = ITEM.exec(lines[at]);
    const blank = lines[at].trim() === "";
    const depth = lines[at].length - lines[at].trimStart().length;
    if (item && depth <= indent + 1 && !RULE.test(lines[at])) {
      if (/\d/.test(item[2]) !== ordered || depth < indent) break;
      items.push({ text: [item[3]], width: item[0].length - item[3].length });
    } else if (blank) {
      const next = lines[at + 1] ?? "";
      if (!ITEM.test(next) && !/^\s{2,}\S/.test(next)) break;
      items.at(-1).text.push("");
    } else if (depth > indent) {
      items.at(-1).text.push(lines[at].slice(Math.min(depth, items.at(-1).width)));
    } else break;
    at += 1;
  }
  return [{ kind: "list", ordered, start, items: items.map((item) => item.text.join("\n")) }, at];
}

function takeParagraph(lines, at) {
  const start = at;
  const starts = (line) =>
    line.trim() === "" || FENCE.test(line) || HEADING.test(line) || QUOTE.test(line) || ITEM.test(line);
  do at += 1;
  while (at < lines.length && !starts(lines[at]));
  return [{ kind: "paragraph", text: lines.slice(start, at).join("\n").trim() }, at];
}

function build(block, nesting = 0) {
  if (block.kind === "code") return codeBlock(block);
  if (block.kind === "rule") return el("hr");
  // The page's own headings are h1 and h2; the model's begin below them.
  if (block.kind === "heading") return el(`h${Math.min(6, block.level + 2)}`, {}, ...inline(block.text));
  if (block.kind === "quote") return el("blockquote", {}, ...nested(block.text, nesting));
  if (block.kind === "list") return list(block, nesting);
  return el("p", {}, ...inline(block.text));
}

function nested(text, nesting) {
  if (nesting >= MAX_NESTING) return [document.createTextNode(text)];
  return parse(text).map((block) => build(block, nesting + 1));
}

function list(block, nesting) {
  const items = block.items.map((text) => {
    const children = nested(text, nesting);
    const tight = children[0]?.tagName === "P" ? [...children[0].childNodes, ...children.slice(1)] : children;
    return el("li", {}, ...tight);
  });
  return block.ordered ? el("ol", { start: block.start === 1 ? null : block.start }, ...items) : el("ul", {}, ...items);
}

function codeBlock({ language, text }) {
  const name = language || "code";
  const copy = iconButton("copy", "Copy the code", () => copyFrom(copy, text));
  const head = el("div", { class: "code-head" }, el("span", {}, name), copy);
  // A block wider than the page scrolls, so the keyboard must be able to reach it.
  const body = el("pre", { tabindex: "0", role: "region", "aria-label": `${name} block` }, el("code", {}, text));
  return el("div", { class: "code-block" }, head, body);
}

/** A body that follows its text, rebuilding only the blocks that changed. */
export class MarkdownBody {
  constructor() {
    this.node = el("div", { class: "prose" });
    this.sources = [];
  }

  update({ text }) {
    const blocks = parse(text);
    let same = 0;
    while (same < blocks.length && this.sources[same] === `${blocks[same].kind} ${blocks[same].source}`) same += 1;
    while (this.node.childNodes.length > same) this.node.lastChild.remove();
    this.node.append(...blocks.slice(same).map((block) => build(block)));
    this.sources = blocks.map((block) => `${block.kind} ${block.source}`);
  }
}
