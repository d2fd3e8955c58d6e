// One question on the page: its text, the files in it as blocks of code, and a way to word it otherwise.

import { Branches } from "./branches.js";
import { copyFrom } from "./clipboard.js";
import { codeBlock, coloured } from "./code.js";
import { el, iconButton } from "./dom.js";
import { plural } from "./format.js";

const FENCED = /^(`{3,})([^\n`]*)\n([\s\S]*?)\n\1[^\S\n]*$/gm;
const MAX_OPEN_LINES = 12;

export class QuestionView {
  /** `actions`: {edit(words), remove(), show(message)}. */
  constructor(conversation, message, actions) {
    this.message = message;
    this.actions = actions;
    this.body = el("div", { class: "said" }, ...saidNodes(message.text));
    this.branches = new Branches(conversation, message, actions.show);
    const copy = iconButton("copy", "Copy the question", () => copyFrom(copy, message.text));
    this.tools = el(
      "div",
      { class: "tools" },
      this.branches.node,
      copy,
      iconButton("pencil", "Edit and send again", () => this.edit(), "quiet at-rest"),
      iconButton("trash", "Delete the question", actions.remove, "quiet at-rest"),
    );
    this.node = el("article", { class: "question", "aria-label": "You" }, this.body, this.tools);
  }

  update() {
    this.branches.update();
  }

  edit() {
    const box = el("textarea", { class: "edit-box", rows: "3", "aria-label": "Edit the question" });
    const form = el(
      "form",
      { class: "edit" },
      box,
      el("p", { class: "hint" }, "The old wording and its answer stay: the arrows lead back to them."),
      el("button", { type: "button", class: "small", onclick: () => this.close(form) }, "Cancel"),
      el("button", { type: "submit", class: "small main-action" }, "Send"),
    );
    const send = (event) => {
      event.preventDefault();
      const words = box.value.trim();
      if (words) this.actions.edit(words);
    };
    box.value = this.message.text;
    form.addEventListener("submit", send);
    box.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        event.stopPropagation(); // it ends the editing, not an answer
        this.close(form);
      } else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
    });
    this.body.replaceWith(form);
    this.tools.hidden = true;
    box.style.height = `${Math.min(box.scrollHeight + 2, innerHeight / 2)}px`;
    box.focus();
  }

  close(form) {
    form.replaceWith(this.body);
    this.tools.hidden = false;
    this.tools.querySelector(".at-rest").focus();
  }
}

/** Words as they were typed, and code blocks for what is fenced. */
function saidNodes(text) {
  const nodes = [];
  let end = 0;
  const words = (part) => part.trim() && nodes.push(el("p", {}, part.replace(/^\n+|\n+$/g, "")));
  for (const found of text.matchAll(FENCED)) {
    words(text.slice(end, found.index));
    nodes.push(fenced(found[3], found[2].trim()));
    end = found.index + found[0].length;
  }
  words(text.slice(end));
  return nodes;
}

function fenced(text, language) {
  const block = codeBlock(text, language, coloured(text, language));
  const lines = text.split("\n").length;
  if (lines <= MAX_OPEN_LINES) return block;
  return el("details", { class: "folded" }, el("summary", {}, plural(lines, "line")), block);
}
