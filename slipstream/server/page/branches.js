// "2 / 3" with arrows: which of a message's alternatives is shown.

import { el, iconButton, setText } from "./dom.js";
import { siblings } from "./tree.js";

export class Branches {
  /** `show(message)` puts another one in its place. */
  constructor(conversation, message, show) {
    this.conversation = conversation;
    this.message = message;
    this.back = iconButton("back", "Previous version", () => show(this.at(-1)));
    this.next = iconButton("next", "Next version", () => show(this.at(1)));
    this.words = el("span");
    this.node = el(
      "div",
      { class: "branches", role: "group", "aria-label": "Versions", hidden: true },
      this.back,
      this.words,
      this.next,
    );
    this.update();
  }

  at(step) {
    const all = siblings(this.conversation, this.message);
    return all[all.indexOf(this.message) + step];
  }

  update() {
    const all = siblings(this.conversation, this.message);
    this.node.hidden = all.length < 2;
    setText(this.words, this.node.hidden ? "" : `${all.indexOf(this.message) + 1} / ${all.length}`);
    this.back.disabled = !this.at(-1);
    this.next.disabled = !this.at(1);
  }
}
