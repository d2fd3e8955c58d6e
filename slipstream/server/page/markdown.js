// Markdown by markdown-it's parser; the nodes are built here from its tokens, so that text stays text.
//
// Every stretch of text knows where it stands in the source, which is how the tints of the drafts view find it. While an
// answer streams it is parsed again at each frame, but only blocks whose source changed are rebuilt: what stands above
// stays the same nodes, so a selection in it survives.

import { codeBlock, coloured } from "./code.js";
import { el } from "./dom.js";
import { Tints } from "./origins.js";
import MarkdownIt from "./vendor/markdown-it.js";

const parser = new MarkdownIt({ html: false, breaks: true, linkify: true });
parser.linkify.set({ fuzzyLink: false, fuzzyEmail: false });
parser.core.ruler.disable("text_join"); // escapes stay apart from the text around them, with their source
parser.validateLink = (address) => webAddress(address) !== null;

/** Only http and https are followed: a model may write any address, javascript: included. */
function webAddress(text) {
  if (!/^https?:\/\//i.test(text)) return null;
  try {
    return new URL(text).href;
  } catch {
    return null;
  }
}

/** The blocks of a text: {tokens, source, references}; the last two tell whether a block has to be built again. */
function parse(lines) {
  const env = {};
  const blocks = [];
  for (const token of parser.parse(lines.join("\n"), env)) {
    if (token.level === 0 && token.nesting >= 0) {
      blocks.push({ tokens: [], source: lines.slice(...token.map).join("\n") });
    }
    blocks.at(-1).tokens.push(token);
  }
  const references = Object.keys(env.references ?? {}).length;
  for (const block of blocks) block.key = `${references} ${block.tokens[0].map[0]} ${block.tokens[0].type} ${block.source}`;
  return blocks;
}

/** Where a token's text stands in the source: the token knows its lines, and a line of it ends its source line. */
class Places {
  constructor(lines) {
    this.lines = lines;
    this.starts = [];
    let start = 0;
    for (const line of lines) {
      this.starts.push(start);
      start += line.length + 1;
    }
    this.cursor = 0; // for cells of tables, which do not know their line
  }

  /** The place of each line of a content that begins in line `first`. */
  ofLines(content, first) {
    return content.split("\n").map((line, i) => {
      const source = this.lines[first + i] ?? "";
      return (this.starts[first + i] ?? 0) + Math.max(0, source.lastIndexOf(line));
    });
  }

  ofCell(content, row) {
    const start = this.starts[row];
    this.cursor = Math.max(this.cursor, start);
    const found = this.lines[row].indexOf(content, this.cursor - start);
    const at = found < 0 ? this.cursor : start + found;
    this.cursor = at + content.length;
    return [at];
  }
}

/** Builds the nodes of a block. `ink` turns a text and its place into nodes: {nodes(text, at), whole(text, at)}. */
class Builder {
  constructor(places, ink) {
    this.places = places;
    this.ink = ink;
    this.row = 0; // source line of the table row being built
  }

  build(tokens) {
    const root = el("div");
    const open = [root];
    for (const token of tokens) {
      if (token.nesting < 0) {
        if (!token.hidden) open.pop();
      } else if (token.nesting > 0) {
        if (token.type === "tr_open") this.row = token.map[0];
        if (token.hidden) continue;
        const [outer, inner] = element(token);
        open.at(-1).append(outer);
        open.push(inner);
      } else open.at(-1).append(...this.leaf(token));
    }
    return root.firstChild;
  }

  leaf(token) {
    if (token.type === "inline") return this.inline(token);
    if (token.type === "hr") return [el("hr")];
    return [this.code(token)];
  }

  code(token) {
    const text = token.content.replace(/\n$/, "");
    const language = token.info.trim().split(/\s/)[0];
    if (!this.ink) return codeBlock(text, language, coloured(text, language));
    const places = this.places.ofLines(text, token.map[0] + (token.type === "fence" ? 1 : 0));
    // The end of a line belongs to the token that wrote it.
    const body = text.split("\n").flatMap((line, i, all) => {
      return this.ink.nodes(i + 1 < all.length ? `${line}\n` : line, places[i]);
    });
    return codeBlock(text, language, body);
  }

  inline(token) {
    const places = token.map ? this.places.ofLines(token.content, token.map[0]) : this.places.ofCell(token.content, this.row);
    const content = token.content.replaceAll("\n", " "); // as code spans have it
    const lineStarts = [0];
    for (let at = token.content.indexOf("\n"); at >= 0; at = token.content.indexOf("\n", at + 1)) lineStarts.push(at + 1);
    const root = el("span");
    const open = [root];
    let cursor = 0; // in the content
    let line = 0;
    const find = (written) => {
      const at = Math.max(cursor, content.indexOf(written, cursor));
      cursor = at + written.length;
      while (lineStarts[line + 1] <= at) line += 1;
      return places[line] + at - lineStarts[line];
    };
    for (const child of token.children) {
      if (child.nesting < 0) open.pop();
      else if (child.nesting > 0) {
        const [outer] = element(child);
        open.at(-1).append(outer);
        open.push(outer);
      } else open.at(-1).append(...this.word(child, find));
    }
    return [...root.childNodes];
  }

  word(token, find) {
    if (token.type === "softbreak" || token.type === "hardbreak") return [el("br")];
    if (token.type === "code_inline") return [el("code", {}, ...this.text(token.content, find(token.content)))];
    // Nothing is fetched from elsewhere: a picture is a link to it.
    if (token.type === "image") return [link(token.attrGet("src"), this.text(token.content, find(token.content)))];
    if (token.type !== "text_special") return this.text(token.content, find(token.content));
    const at = find(token.markup);
    return this.ink ? this.ink.whole(token.content, at) : [token.content];
  }

  text(text, at) {
    return this.ink ? this.ink.nodes(text, at) : [text];
  }
}

const link = (address, children) =>
  el("a", { href: webAddress(address), target: "_blank", rel: "noopener noreferrer" }, ...children);

/** An opening token's element, and the one that takes what is inside. */
function element(token) {
  const same = (node) => [node, node];
  if (token.type === "link_open") return same(link(token.attrGet("href"), []));
  // The page's own headings are h1 and h2; the model's begin below them.
  if (token.type === "heading_open") return same(el(`h${Math.min(6, Number(token.tag[1]) + 2)}`));
  if (token.type === "ordered_list_open") return same(el("ol", { start: token.attrGet("start") }));
  if (token.type === "th_open" || token.type === "td_open") {
    return same(el(token.tag, { "data-align": /text-align:(\w+)/.exec(token.attrGet("style") ?? "")?.[1] }));
  }
  if (token.type === "table_open") {
    const table = el("table");
    return [el("div", { class: "table-box", tabindex: "0", role: "region", "aria-label": "Table" }, table), table];
  }
  return same(el(token.tag));
}

/** A body that follows its text, rebuilding only the blocks that changed; with `drafts`, its tokens are tinted. */
export class MarkdownBody {
  constructor(drafts = false) {
    this.node = el("div", { class: drafts ? "prose tinted" : "prose" });
    this.tints = drafts ? new Tints() : null;
    this.keys = [];
  }

  update(answer) {
    this.tints?.follow(answer);
    // Lines as the parser counts them, none of them longer or shorter than in the source.
    const lines = answer.text.replaceAll("\r\n", " \n").replaceAll("\r", "\n").split("\n");
    const blocks = parse(lines);
    let same = 0;
    while (same < blocks.length && this.keys[same] === blocks[same].key) same += 1;
    while (this.node.childNodes.length > same) this.node.lastChild.remove();
    const builder = new Builder(new Places(lines), this.tints);
    this.node.append(...blocks.slice(same).map((block) => builder.build(block.tokens)));
    this.keys = blocks.map((block) => block.key);
  }
}
