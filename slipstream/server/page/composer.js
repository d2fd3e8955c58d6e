// The message box: what is typed is kept per conversation, Enter sends, the send button is the stop button meanwhile.

import { fencedFile, Unusable } from "./attach.js";
import { byId, setText } from "./dom.js";
import { summary } from "./fields.js";
import { count } from "./format.js";
import * as generation from "./generation.js";
import { announce, note } from "./notes.js";
import { polled } from "./status.js";
import * as store from "./store.js";
import { path } from "./tree.js";

const MAX_CHARS = 200_000;
const SAVE_AFTER_MS = 400;
const NEARLY_FULL = 0.9;

export class Composer {
  constructor(onAsk) {
    this.box = byId("words");
    this.send = byId("send");
    this.stop = byId("stop");
    this.settings = byId("settings-summary");
    this.onAsk = onAsk;
    this.conversation = null;
    this.status = null; // the server's last
    this.saving = null;
    this.box.maxLength = MAX_CHARS;
    this.box.addEventListener("input", () => this.typed());
    this.box.addEventListener("keydown", (event) => this.key(event));
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.submit();
    });
    this.stop.addEventListener("click", () => generation.stop(this.conversation));
    this.listenForFiles();
    generation.progressed.listen(() => this.refresh());
    generation.ended.listen(() => this.refresh());
    polled.listen(({ latest }) => {
      this.status = latest ?? this.status;
      this.refresh();
    });
  }

  listenForFiles() {
    const chooser = byId("file");
    byId("attach").addEventListener("click", () => chooser.click());
    chooser.addEventListener("change", async () => {
      await this.attach([...chooser.files]);
      chooser.value = ""; // the same file may be chosen again
    });
    const form = byId("composer");
    const hasFiles = (event) => event.dataTransfer?.types.includes("Files");
    form.addEventListener("dragover", (event) => hasFiles(event) && event.preventDefault());
    form.addEventListener("drop", (event) => {
      if (!hasFiles(event)) return;
      event.preventDefault();
      this.attach([...event.dataTransfer.files]);
    });
  }

  async attach(files) {
    const conversation = this.conversation;
    for (const file of files) {
      try {
        const block = await fencedFile(file, MAX_CHARS - conversation.unsent.length - 2);
        if (conversation !== this.conversation) return; // another one was opened meanwhile
        const words = this.box.value.trimEnd();
        this.box.value = words ? `${words}\n\n${block}` : block;
        this.typed();
        announce(`${file.name} is in the message.`);
      } catch (error) {
        if (!(error instanceof Unusable)) throw error;
        note(error.message);
      }
    }
    this.box.focus();
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
    if (this.conversation === null) return;
    const streaming = generation.running.has(this.conversation.id);
    const focusWillBeLost = document.activeElement === (streaming ? this.send : this.stop);
    this.send.hidden = streaming;
    this.stop.hidden = !streaming;
    this.send.disabled = this.box.value.trim() === "";
    setText(this.settings, summary(this.conversation.settings, this.status?.sampling_defaults));
    this.showContext();
    if (focusWillBeLost) this.box.focus();
  }

  /** How much of the model's context the conversation filled when it was last counted. */
  showContext() {
    const usage = path(this.conversation).findLast((message) => message.usage)?.usage;
    const used = usage?.total_tokens;
    const all = this.status?.model?.context;
    const meter = byId("context");
    meter.hidden = !(used > 0 && all > 0);
    if (meter.hidden) return;
    setText(byId("context-words"), `${count(used)} of ${count(all)}`);
    byId("context-fill").style.width = `${Math.min(100, (100 * used) / all)}%`;
    meter.dataset.full = String(used > NEARLY_FULL * all);
  }
}
