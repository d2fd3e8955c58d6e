// The open conversation: its messages, the empty state, and staying at the end while text comes.

import { AnswerView } from "./answer.js";
import { byId, el } from "./dom.js";
import * as generation from "./generation.js";
import { note } from "./notes.js";
import { legend } from "./origins.js";
import { QuestionView } from "./question.js";
import * as store from "./store.js";
import { choose, path, remove } from "./tree.js";

const SUGGESTIONS = [
  ["Explain", "Why does a cyclist save energy by riding close behind another one?"],
  ["Code", "Write a Python function that checks whether a string is a palindrome, with a short explanation."],
  ["List", "Give me five practical tips for learning a new language."],
  ["Write", "Write a short story about a lighthouse keeper who finds a message in a bottle."],
];
const NEAR_END_PX = 80;

export class Thread {
  constructor({ drafts, onAsk }) {
    this.scroller = byId("scroller");
    this.list = byId("thread");
    this.jump = byId("jump");
    this.drafts = drafts;
    this.onAsk = onAsk;
    this.conversation = null;
    this.views = new Map(); // message -> its view
    this.frame = null;
    this.closeNote = () => {}; // of the last deletion
    byId("legend").replaceChildren(legend());
    this.jump.addEventListener("click", () => this.toEnd());
    this.scroller.addEventListener("scroll", () => this.showJump(), { passive: true });
    generation.progressed.listen((conversation) => this.refreshSoon(conversation));
    generation.ended.listen((conversation) => this.refreshSoon(conversation));
  }

  open(conversation) {
    this.conversation = conversation;
    this.rebuild();
    this.scroller.scrollTop = conversation.messages.length ? this.scroller.scrollHeight : 0;
  }

  setDrafts(on) {
    this.drafts = on;
    const fromEnd = this.scroller.scrollHeight - this.scroller.scrollTop;
    this.rebuild();
    this.scroller.scrollTop = this.scroller.scrollHeight - fromEnd;
  }

  rebuild() {
    this.views.clear();
    this.list.replaceChildren();
    this.refresh();
  }

  /** Many chunks may come between two frames; one drawing is enough. */
  refreshSoon(conversation) {
    this.closeNote();
    if (conversation !== this.conversation || this.frame !== null) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = null;
      this.refresh();
    });
  }

  refresh() {
    const stay = this.atEnd();
    const messages = path(this.conversation);
    byId("empty").hidden = messages.length > 0;
    this.list.hidden = messages.length === 0;
    this.list.dataset.busy = String(generation.running.has(this.conversation.id));
    if (messages.length === 0) this.showEmpty();
    for (const [message, view] of this.views) if (!messages.includes(message)) this.forget(message, view);
    for (const message of messages) this.show(message);
    if (stay && messages.length) this.toEnd("instant");
    this.showJump();
  }

  forget(message, view) {
    view.node.remove();
    this.views.delete(message);
  }

  show(message) {
    const view = this.views.get(message);
    if (view) {
      view.update();
      return;
    }
    const made = message.role === "user" ? this.questionView(message) : this.answerView(message);
    this.views.set(message, made);
    this.list.append(made.node);
  }

  questionView(question) {
    return new QuestionView(this.conversation, question, {
      edit: (words) => generation.askOtherwise(this.conversation, question, words),
      ...this.commonActions(question),
    });
  }

  answerView(answer) {
    const conversation = this.conversation;
    return new AnswerView(conversation, answer, this.drafts, {
      again: () => generation.again(conversation, answer),
      resume: () => generation.resume(conversation, answer),
      rate: () => generation.running.get(conversation.id)?.rate ?? NaN,
      ...this.commonActions(answer),
    });
  }

  commonActions(message) {
    return { remove: () => this.remove(message), show: (other) => this.showOther(other) };
  }

  /** Another version of a message takes its place, and the arrows keep the focus. */
  showOther(message) {
    const backwards = document.activeElement?.title === "Previous version";
    choose(this.conversation, message);
    store.save(this.conversation);
    const top = this.scroller.scrollTop;
    this.refresh();
    this.scroller.scrollTop = top;
    const arrows = [...this.views.get(message).branches.node.querySelectorAll("button")];
    (backwards ? arrows : arrows.reverse()).find((button) => !button.disabled)?.focus();
  }

  remove(message) {
    const conversation = this.conversation;
    if (generation.running.has(conversation.id)) return;
    const was = structuredClone({ messages: conversation.messages, chosen: conversation.chosen });
    const more = remove(conversation, message);
    store.save(conversation);
    this.rebuild();
    const putBack = () => {
      Object.assign(conversation, was);
      store.save(conversation);
      if (this.conversation === conversation) this.rebuild();
    };
    const words = more ? "This version and what followed it are deleted." : "The message is deleted.";
    // Once something else was said there is no way back to what was.
    this.closeNote = note(words, { label: "Undo", run: putBack });
  }

  showEmpty() {
    const cards = SUGGESTIONS.map(([kind, words]) =>
      el(
        "button",
        { type: "button", class: "card", onclick: () => this.onAsk(words) },
        el("b", {}, kind),
        el("span", {}, words),
      ),
    );
    byId("suggestions").replaceChildren(...cards);
  }

  atEnd() {
    return this.scroller.scrollHeight - this.scroller.scrollTop - this.scroller.clientHeight < NEAR_END_PX;
  }

  toEnd(behavior = "auto") {
    this.scroller.scrollTo({ top: this.scroller.scrollHeight, behavior });
  }

  showJump() {
    this.jump.hidden = this.atEnd() || this.conversation.messages.length === 0;
  }
}
