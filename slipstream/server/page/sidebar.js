// The list of conversations: open, find, rename, delete (with a way back), and which of them stream right now.

import { byId, el, iconButton, setText } from "./dom.js";
import { speed } from "./format.js";
import * as generation from "./generation.js";
import { note } from "./notes.js";
import { match } from "./search.js";
import * as store from "./store.js";

const REFRESH_MS = 500;

export class Sidebar {
  /** `open(id)` shows a conversation; `removed(id)` is called when one is gone. */
  constructor({ open, removed }) {
    this.list = byId("conversations");
    this.onOpen = open;
    this.onRemoved = removed;
    this.current = null;
    this.renaming = null;
    this.rows = new Map(); // conversation id -> the parts of its row
    this.unread = new Set();
    this.search = byId("search");
    this.search.addEventListener("input", () => this.refresh());
    this.search.addEventListener("keydown", (event) => this.searchKey(event));
    store.changed.listen(() => this.refresh());
    generation.ended.listen((conversation) => this.noteEnd(conversation));
    setInterval(() => this.showRates(), REFRESH_MS);
  }

  select(id) {
    this.current = id;
    this.unread.delete(id);
    this.refresh();
  }

  noteEnd(conversation) {
    if (conversation.id !== this.current) this.unread.add(conversation.id);
    this.refresh();
  }

  refresh() {
    const conversations = store.all();
    for (const [id, row] of this.rows) {
      if (store.get(id)) continue;
      row.node.remove();
      this.rows.delete(id);
    }
    conversations.forEach((conversation, index) => {
      const row = this.rows.get(conversation.id) ?? this.add(conversation);
      if (this.list.children[index] !== row.node) this.list.insertBefore(row.node, this.list.children[index] ?? null);
      this.show(row, conversation);
    });
    byId("no-match").hidden = [...this.rows.values()].some((row) => !row.node.hidden);
  }

  /** Enter opens the first that was found, Escape shows all again. */
  searchKey(event) {
    if (event.key !== "Enter" && event.key !== "Escape") return;
    event.preventDefault();
    event.stopPropagation(); // Escape here does not stop an answer
    if (event.key === "Enter") this.list.querySelector("li:not([hidden]) .open")?.click();
    this.search.value = "";
    this.refresh();
  }

  add({ id }) {
    const title = el("span", { class: "title" });
    const rate = el("span", { class: "rate" });
    const snippet = el("span", { class: "snippet" });
    const open = el(
      "button",
      { type: "button", class: "open", onclick: () => this.onOpen(id) },
      el("span", { class: "dot", "aria-hidden": "true" }),
      title,
      rate,
      snippet,
    );
    const rename = iconButton("pencil", "Rename", () => this.rename(id));
    const remove = iconButton("trash", "Delete", () => this.remove(id));
    const node = el("li", { "data-id": id }, open, el("div", { class: "row-tools" }, rename, remove));
    const row = { node, title, rate, snippet, open, rename, remove };
    this.rows.set(id, row);
    return row;
  }

  show(row, conversation) {
    const { id, title } = conversation;
    const found = this.search.value.trim() ? match(conversation, this.search.value) : "";
    row.node.hidden = found === null;
    setText(row.snippet, found ?? "");
    setText(row.title, title);
    row.open.title = title;
    row.rename.setAttribute("aria-label", `Rename ${title}`);
    row.remove.setAttribute("aria-label", `Delete ${title}`);
    row.node.dataset.streaming = String(generation.running.has(id));
    row.node.dataset.unread = String(this.unread.has(id));
    if (id === this.current) row.open.setAttribute("aria-current", "true");
    else row.open.removeAttribute("aria-current");
    this.showRate(id, row);
  }

  showRates() {
    for (const [id, row] of this.rows) this.showRate(id, row);
  }

  showRate(id, row) {
    const rate = generation.running.get(id)?.rate;
    const words =
      rate === undefined ? (this.unread.has(id) ? "new" : "") : Number.isFinite(rate) ? `${speed(rate)} tok/s` : "…";
    setText(row.rate, words);
  }

  rename(id) {
    const conversation = store.get(id);
    const row = this.rows.get(id);
    if (this.renaming || !conversation) return;
    const input = el("input", {
      type: "text",
      class: "rename",
      maxlength: "80",
      "aria-label": "Name of the conversation",
    });
    const end = (keep) => {
      if (this.renaming !== id) return;
      this.renaming = null;
      if (keep && input.value.trim()) conversation.title = input.value.trim();
      input.replaceWith(row.open);
      store.save(conversation);
      row.rename.focus();
    };
    input.value = conversation.title;
    input.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== "Escape") return;
      event.stopPropagation(); // Escape here does not stop an answer
      end(event.key === "Enter");
    });
    input.addEventListener("blur", () => end(true));
    this.renaming = id;
    row.open.replaceWith(input);
    input.select();
  }

  remove(id) {
    const conversation = store.get(id);
    const next = store.all().find((other) => other.id !== id);
    generation.stop(conversation);
    store.remove(conversation);
    this.unread.delete(id);
    this.onRemoved(id, next);
    const putBack = () => {
      store.putBack(conversation);
      this.onOpen(id);
    };
    note(`“${conversation.title}” is deleted.`, { label: "Undo", run: putBack });
    (this.rows.get(next?.id)?.open ?? byId("new-chat")).focus();
  }
}
