// One answer on the page: its body, its timings, what went wrong, and what can be done with it.

import { Branches } from "./branches.js";
import { copyFrom } from "./clipboard.js";
import { el, icon, iconButton, setText } from "./dom.js";
import { promptLine, speedLine } from "./figures.js";
import { plural, speed } from "./format.js";
import { MarkdownBody } from "./markdown.js";
import { isUnknown, legend, numPieces, shareBar, tally } from "./origins.js";

const FINISHES = {
  length: "Cut at the limit of tokens.",
  content_filter: "Ended by a filter.",
};

export class AnswerView {
  /** `actions`: {again(), resume(), remove(), show(message), rate()}; rate() is the speed while it streams. */
  constructor(conversation, answer, drafts, actions) {
    this.answer = answer;
    this.actions = actions;
    this.drafts = drafts;
    this.body = new MarkdownBody(drafts);
    this.branches = new Branches(conversation, answer, actions.show);
    this.thought = el("p");
    this.thinking = el("details", { class: "thinking", hidden: true }, el("summary", {}, "Thinking"), this.thought);
    this.share = el("div", { class: "share-box" });
    this.notice = el("p", { class: "notice" });
    this.timings = el("p", { class: "timings" });
    this.prompt = el("p", { class: "prompt-figures" });
    this.reason = el("p", { class: "reason" });
    this.tools = el("div", { class: "tools" });
    const figures = el("div", { class: "figures" }, this.timings, this.prompt, this.reason);
    this.foot = el("footer", { class: "answer-foot" }, figures, this.branches.node, this.tools);
    this.node = el(
      "article",
      { class: "answer", "aria-label": "Answer" },
      this.thinking,
      this.body.node,
      this.share,
      this.notice,
      this.foot,
    );
    this.state = null;
    this.update();
  }

  update() {
    this.body.update(this.answer);
    this.branches.update();
    this.thinking.hidden = !this.answer.thinking;
    setText(this.thought, this.answer.thinking ?? "");
    this.showTimings();
    if (this.state === this.answer.state) return;
    this.state = this.answer.state;
    this.node.dataset.state = this.state;
    this.node.setAttribute("aria-busy", String(this.state === "streaming"));
    this.showEnd();
  }

  showTimings() {
    const over = this.answer.state !== "streaming";
    setText(this.timings, over ? speedLine(this.answer) : this.soFar());
    setText(this.prompt, over ? promptLine(this.answer) : "");
    this.prompt.title = (over && this.answer.timings?.cache_note) || "";
    setText(this.reason, over ? (this.answer.timings?.speculation ?? "") : "");
    this.node.dataset.waiting = String(!over && this.answer.text === "");
  }

  soFar() {
    if (this.answer.text === "") return this.answer.thinking ? "Thinking…" : "Waiting for the first token…";
    const rate = this.actions.rate();
    return [plural(numPieces(this.answer), "token"), Number.isFinite(rate) ? `${speed(rate)} tok/s` : null]
      .filter(Boolean)
      .join(" · ");
  }

  showEnd() {
    const over = this.state !== "streaming";
    this.share.replaceChildren(...(over && this.drafts ? shares(this.answer) : []));
    this.notice.replaceChildren(...(over ? this.noticeNodes() : []));
    this.tools.replaceChildren(...(over ? this.toolNodes() : []));
  }

  noticeNodes() {
    if (this.state === "failed")
      return [icon("alert"), el("span", {}, this.answer.notice), ...this.resumeNodes(), this.retryButton()];
    const words = this.state === "stopped" ? "Stopped by you." : FINISHES[this.answer.finish];
    return words ? [el("span", {}, words), ...this.resumeNodes()] : [];
  }

  resumeNodes() {
    const button = { type: "button", class: "small resume at-rest", onclick: this.actions.resume };
    return this.answer.text ? [el("button", button, "Continue")] : [];
  }

  /** A full server says how long to wait; the button counts that down. */
  retryButton() {
    const button = el("button", { type: "button", class: "small at-rest", onclick: this.actions.again }, "Try again");
    let left = this.answer.retryAfter ?? 0;
    const tick = () => {
      button.disabled = left > 0;
      setText(button, left > 0 ? `Try again in ${left} s` : "Try again");
      if (left-- > 0) setTimeout(tick, 1000);
    };
    tick();
    this.answer.retryAfter = null; // seen once; after a reload there is nothing left to wait for
    return button;
  }

  /** A failed answer has its one way to try again in its notice. */
  toolNodes() {
    const copy = iconButton("copy", "Copy the answer", () => copyFrom(copy, this.answer.text));
    return [
      this.answer.text && copy,
      this.state !== "failed" && iconButton("again", "Answer again", this.actions.again, "quiet at-rest"),
      iconButton("trash", "Delete the answer", this.actions.remove, "quiet at-rest"),
    ].filter(Boolean);
  }
}

function shares(answer) {
  if (isUnknown(answer)) return [el("p", { class: "hint" }, "The origins of this answer's tokens are not known.")];
  const counts = tally(answer);
  return numPieces(answer) ? [shareBar(counts), legend(counts)] : [];
}
