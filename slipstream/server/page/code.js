// A block of code: its language, a copy button, and colours by highlight.js. The library names the scope of each run of
// text; the nodes are built here, so that no text is ever read as markup.

import { copyFrom } from "./clipboard.js";
import { el, iconButton } from "./dom.js";
import hljs from "./vendor/highlight.js";

const MAX_COLOURED_CHARS = 50_000;

/** What highlight.js writes into, instead of its own HTML. */
class Runs {
  constructor() {
    this.runs = []; // [text, scope or undefined]
    this.scopes = [];
  }

  addText(text) {
    if (text !== "") this.runs.push([text, this.scopes.at(-1)]);
  }

  openNode(scope) {
    this.scopes.push(scope);
  }

  closeNode() {
    this.scopes.pop();
  }

  startScope(scope) {
    this.openNode(scope);
  }

  endScope() {
    this.closeNode();
  }

  __addSublanguage(other) {
    this.runs.push(...other.runs);
  }

  finalize() {}

  toHTML() {
    return "";
  }
}

hljs.configure({ __emitter: Runs });

/** The text as nodes, coloured where its language is known. */
export function coloured(text, language) {
  if (!hljs.getLanguage(language) || text.length > MAX_COLOURED_CHARS) return [text];
  const { runs } = hljs.highlight(text, { language, ignoreIllegals: true })._emitter;
  if (runs.map(([run]) => run).join("") !== text) return [text];
  return runs.map(([run, scope]) => (scope ? el("span", { class: `hl-${scope.split(".")[0]}` }, run) : run));
}

/** `body`: the nodes of the text. */
export function codeBlock(text, language, body) {
  const name = language || "code";
  const copy = iconButton("copy", "Copy the code", () => copyFrom(copy, text));
  const head = el("div", { class: "code-head" }, el("span", {}, name), copy);
  // A block wider than the page scrolls, so the keyboard must be able to reach it.
  const pre = el("pre", { tabindex: "0", role: "region", "aria-label": `${name} block` }, el("code", {}, ...body));
  return el("div", { class: "code-block" }, head, pre);
}
