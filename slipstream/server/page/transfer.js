// Conversations out of this browser and into it: JSON of one or all, Markdown of one.

import { byId, el } from "./dom.js";
import { plural } from "./format.js";
import { note } from "./notes.js";
import * as store from "./store.js";
import { path } from "./tree.js";

const FORMAT = "slipstream-conversations";
const MAX_BYTES = 20_000_000;

export const asJson = (conversations) => JSON.stringify({ format: FORMAT, version: 2, conversations }, null, 1);

/** What is shown of a conversation, as a document. */
export function asMarkdown(conversation) {
  const parts = [`# ${conversation.title}`];
  if (conversation.system.trim()) parts.push("## System prompt", conversation.system.trim());
  for (const { role, text } of path(conversation)) parts.push(role === "user" ? "## You" : "## Answer", text.trim());
  return `${parts.join("\n\n")}\n`;
}

/** The conversations of an exported file that this page can read. */
export function conversationsIn(text) {
  let raw;
  try {
    raw = JSON.parse(text);
  } catch {
    return [];
  }
  const list = Array.isArray(raw) ? raw : (raw?.conversations ?? [raw]);
  return Array.isArray(list) ? list : [];
}

function download(name, type, text) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  el("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

const fileName = (title) => title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 48) || "conversation";

async function importFile(file, open) {
  const name = `“${file.name}”`;
  if (file.size > MAX_BYTES) return `${name} is too large to be an export of this page.`;
  const found = conversationsIn(await file.text());
  const taken = found.reverse().map(store.take).filter(Boolean); // the first one comes to stand on top
  if (taken.length === 0) return `${name} has no conversations that this page can read.`;
  open(taken.at(-1).id);
  return `${plural(taken.length, "conversation")} imported.`;
}

/** The dialog. `current()` is the open conversation, `open(id)` shows one. */
export function transferDialog({ current, open }) {
  const dialog = byId("transfer");
  const all = () => store.all().filter((conversation) => conversation.messages.length);
  const json = "application/json";
  const actions = {
    "export-markdown": () => download(`${fileName(current().title)}.md`, "text/markdown", asMarkdown(current())),
    "export-json": () => download(`${fileName(current().title)}.json`, json, asJson([current()])),
    "export-all": () => download("conversations.json", json, asJson(all())),
  };
  for (const [id, run] of Object.entries(actions)) {
    byId(id).addEventListener("click", () => {
      run();
      dialog.close();
    });
  }
  const chooser = byId("import-file");
  byId("import").addEventListener("click", () => chooser.click());
  chooser.addEventListener("change", async () => {
    const [file] = chooser.files;
    if (!file) return;
    dialog.close();
    note(await importFile(file, open));
    chooser.value = "";
  });
  byId("transfer-button").addEventListener("click", () => {
    byId("export-markdown").disabled = current().messages.length === 0;
    byId("export-json").disabled = current().messages.length === 0;
    byId("export-all").disabled = all().length === 0;
    dialog.showModal();
  });
}
