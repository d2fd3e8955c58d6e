// Puts the page together: which conversation is open, and who hears of what.

import { Composer } from "./composer.js";
import { dialogs } from "./dialogs.js";
import { byId, icon, setText } from "./dom.js";
import { Drawer } from "./drawer.js";
import { plural } from "./format.js";
import * as generation from "./generation.js";
import { announce, note } from "./notes.js";
import { numPieces } from "./origins.js";
import { Panel } from "./panel.js";
import { SettingsForm } from "./settings.js";
import { shortcuts } from "./shortcuts.js";
import { Sidebar } from "./sidebar.js";
import { keepPolling } from "./status.js";
import { choice, remember } from "./storage.js";
import * as store from "./store.js";
import { showTab, tabs } from "./tabs.js";
import { themeSwitch } from "./theme.js";
import { Thread } from "./thread.js";
import { transferDialog } from "./transfer.js";

const SPOKEN_CHARS = 500;

let current = null;
let drafts = choice("drafts", "off") === "on";

// A key in the address did its work when the page was served; it should not stay in the history.
if (new URLSearchParams(location.search).has("key")) history.replaceState(null, "", location.pathname);

for (const node of document.querySelectorAll("[data-icon]")) node.prepend(icon(node.dataset.icon));
store.load();
const ask = (words) => {
  generation.ask(current, words);
  thread.toEnd("instant");
  focusWords();
};
const thread = new Thread({ drafts, onAsk: ask });
const composer = new Composer(ask);
const settings = new SettingsForm(() => composer.refresh());
const sidebarDrawer = new Drawer("sidebar", 800, "[data-open=sidebar]");
const panelDrawer = new Drawer("panel", 1180, "[data-open=panel]");
const sidebar = new Sidebar({ open: openFromList, removed: afterRemoval });
const panel = new Panel();

/** Where there is no keyboard in sight, a focus would only bring one up over half the page. */
function focusWords() {
  if (matchMedia("(hover: hover)").matches) byId("words").focus();
}

function open(conversation) {
  current = conversation;
  remember("current", conversation.id);
  for (const view of [thread, composer, settings, panel]) view.open(conversation);
  sidebar.select(conversation.id);
  showTitle();
}

function openFromList(id) {
  open(store.get(id));
  sidebarDrawer.closeIfOver();
  panelDrawer.closeIfOver();
  focusWords();
}

function afterRemoval(id, next) {
  if (id === current.id) open(next ?? store.create());
}

function newChat() {
  openFromList(store.create(current).id);
}

function neighbour(step) {
  const list = store.all();
  const index = list.findIndex((conversation) => conversation.id === current.id) + step;
  if (list[index]) openFromList(list[index].id);
}

function showTitle() {
  setText(byId("title"), current.title);
  document.title = `${generation.running.size ? "● " : ""}${current.title} – Slipstream`;
}

/** Another tab may have written the open conversation: then its version is shown. */
function followStore() {
  const stored = current && store.get(current.id);
  if (!stored) return;
  if (stored === current) showTitle();
  else open(stored);
}

function setDrafts(on) {
  drafts = on;
  remember("drafts", on ? "on" : "off");
  byId("drafts").setAttribute("aria-checked", String(on));
  byId("legend").hidden = !on;
  thread.setDrafts(on);
}

function togglePanel(open) {
  sidebarDrawer.closeIfOver();
  panelDrawer.toggle(open);
}

function openPanel(tab) {
  showTab(tab);
  if (!panelDrawer.isOpen) togglePanel(true);
  byId(`tab-${tab}`).focus();
}

function openSearch() {
  panelDrawer.closeIfOver();
  if (!sidebarDrawer.isOpen) sidebarDrawer.toggle(true);
  byId("search").focus();
}

/** The innermost thing that can be ended ends. */
function escape() {
  if (panelDrawer.closeIfOver() || sidebarDrawer.closeIfOver()) return true;
  if (!generation.running.has(current.id)) return false;
  generation.stop(current);
  return true;
}

function showEnd(conversation, answer) {
  showTitle();
  const where = conversation === current ? "" : ` in “${conversation.title}”`;
  if (answer.state === "failed") announce(`The answer${where} failed. ${answer.notice}`);
  else if (answer.state === "stopped") announce(`Stopped after ${plural(numPieces(answer), "token")}${where}.`);
  else
    announce(
      conversation === current ? `Answer: ${answer.text.slice(0, SPOKEN_CHARS)}` : `An answer is there${where}.`,
    );
}

byId("new-chat").addEventListener("click", newChat);
byId("new-chat-top").addEventListener("click", newChat);
byId("drafts").addEventListener("click", () => setDrafts(!drafts));
byId("settings-button").addEventListener("click", () => openPanel("settings"));
byId("help").addEventListener("click", () => byId("shortcuts").showModal());
store.changed.listen(followStore);
store.droppedForRoom.listen((title) =>
  note(`There was no more room in this browser's storage: “${title}”, the oldest conversation, is gone.`),
);
generation.ended.listen(showEnd);
shortcuts({
  newChat,
  neighbour,
  drafts: () => setDrafts(!drafts),
  panel: () => togglePanel(),
  settings: () => openPanel("settings"),
  help: () => byId("shortcuts").showModal(),
  search: openSearch,
  attach: () => byId("attach").click(),
  escape,
});

themeSwitch();
tabs();
dialogs();
transferDialog({ current: () => current, open: openFromList });
open(store.get(choice("current", "")) ?? store.all()[0] ?? store.create());
setDrafts(drafts);
focusWords();
keepPolling();
document.body.dataset.ready = "true";
