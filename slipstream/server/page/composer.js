// The message box: what is typed is kept per conversation, Enter sends, the send button is the stop button meanwhile.

import { byId } from "./dom.js";
import { summary } from "./fields.js";
import * as generation from "./generation.js";
import { announce } from "./notes.js";
import * as store from "./store.js";

const MAX_CHARS = 100_000;
const SAVE_AFTER_MS = 400;

export class Composer {
  constructor(onAsk) {
    this.box = byId("words");
    this.send = byId("send");
    this.stop = byId("stop");
    this.settings = byId("settings-summary");
    this.onAsk = onAsk;
    this.conversation = null;
    this.saving = null;
    this.box.maxLength = MAX_CHARS;
    this.box.addEventListener("input", () => this.typed());
    this.box.addEventListener("keydown", (event) => this.key(event));
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.submit();
    });
    this.stop.addEventListener("click", () => generation.stop(this.conversation));
    generation.progressed.listen(() => this.refresh());
    generation.ended.listen(() => this.refresh());
  }

  open(conversation) {
    this.conversation = conversation;
    this.box.value = conversation.unsent;
    this.grow();
    this.refresh();
  }

  key(event) {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    this.submit();
  }

  submit() {
    const words = this.box.value.trim();
    if (words === "") return;
    if (generation.running.has(this.conversation.id)) {
      announce("Still answering. Escape stops it.");
      return;
    }
    this.box.value = "";
    this.typed();
    this.onAsk(words);
  }

  typed() {
    this.conversation.unsent = this.box.value;
    this.grow();
    this.refresh();
    clearTimeout(this.saving);
    const conversation = this.conversation;
    this.saving = setTimeout(() => store.save(conversation), SAVE_AFTER_MS);
  }

  /** As tall as its text, within what CSS allows. */
  grow() {
    this.box.style.height = "auto";
    this.box.style.height = `${this.box.scrollHeight}px`;
  }

  refresh() {
    const streaming = generation.running.has(this.conversation.id);
    const focusWillBeLost = document.activeElement === (streaming ? this.send : this.stop);
    this.send.hidden = streaming;
    this.stop.hidden = !streaming;
    this.send.disabled = this.box.value.trim() === "";
    this.settings.textContent = summary(this.conversation.settings);
    if (focusWillBeLost) this.box.focus();
  }
}
