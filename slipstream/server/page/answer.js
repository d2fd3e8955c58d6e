// One answer on the page: its body in either view, its timings, what went wrong, and what can be done with it.

import { copyFrom } from "./clipboard.js";
import { el, icon, iconButton, setText } from "./dom.js";
import { count, percent, plural, speed } from "./format.js";
import { MarkdownBody } from "./markdown.js";
import { DraftsBody, isUnknown, legend, numPieces, shareBar, tally } from "./origins.js";

const FINISHES = {
  length: "Cut at the limit of tokens.",
  content_filter: "Ended by a filter.",
};

export class AnswerView {
  /** `actions`: {again(), rate()}; rate() is the speed while it streams. */
  constructor(answer, drafts, actions) {
    this.answer = answer;
    this.actions = actions;
    this.drafts = drafts;
    this.body = drafts ? new DraftsBody() : new MarkdownBody();
    this.thought = el("p");
    this.thinking = el("details", { class: "thinking", hidden: true }, el("summary", {}, "Thinking"), this.thought);
    this.share = el("div", { class: "share-box" });
    this.notice = el("p", { class: "notice" });
    this.timings = el("p", { class: "timings" });
    this.reason = el("p", { class: "reason" });
    this.tools = el("div", { class: "tools" });
    this.foot = el(
      "footer",
      { class: "answer-foot" },
      el("div", { class: "figures" }, this.timings, this.reason),
      this.tools,
    );
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
    setText(this.timings, this.answer.state === "streaming" ? this.soFar() : figures(this.answer).join(" · "));
    setText(this.reason, this.answer.timings?.speculation ?? "");
    this.node.dataset.waiting = String(this.answer.state === "streaming" && this.answer.text === "");
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
    if (this.state === "failed") return [icon("alert"), el("span", {}, this.answer.notice), this.retryButton()];
    if (this.state === "stopped") return [el("span", {}, "Stopped by you.")];
    const words = FINISHES[this.answer.finish];
    return words ? [el("span", {}, words)] : [];
  }

  /** A full server says how long to wait; the button counts that down. */
  retryButton() {
    const button = el("button", { type: "button", class: "small", onclick: this.actions.again }, "Try again");
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

  toolNodes() {
    const copy = iconButton("copy", "Copy the answer", () => copyFrom(copy, this.answer.text));
    return [
      this.answer.text ? copy : null,
      iconButton("again", "Answer again", this.actions.again, "quiet again"),
    ].filter(Boolean);
  }
}

/** Speed, tokens and drafts of an answer: the server's numbers, or ours where the stream did not reach its end. */
function figures(answer) {
  const t = answer.timings;
  if (!t) {
    const rate = Number.isFinite(answer.rate) ? `about ${speed(answer.rate)} tok/s` : null;
    return answer.text ? [plural(numPieces(answer), "token"), rate].filter(Boolean) : [];
  }
  const accepted = `${count(t.draft_n_accepted)} of ${count(t.draft_n)} drafts accepted`;
  const drafts = t.draft_n > 0 ? `${accepted} (${percent(t.draft_n_accepted, t.draft_n)})` : "no drafts";
  return [`${speed(t.predicted_per_second)} tok/s`, plural(t.predicted_n, "token"), drafts];
}

function shares(answer) {
  if (isUnknown(answer)) return [el("p", { class: "hint" }, "The origins of this answer's tokens are not known.")];
  const counts = tally(answer);
  return numPieces(answer) ? [shareBar(counts), legend(counts)] : [];
}
