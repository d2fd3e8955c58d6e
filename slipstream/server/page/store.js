// Conversations, kept in this browser. One storage key each, so that two tabs do not overwrite one another's.
//
// Bounded: so many conversations, so many characters each and in all. What has to give way is, in this order, the token
// origins of old answers, branches that are not shown, the first messages of one conversation, and the conversation
// longest unused.

import { signal } from "./signal.js";
import { storage } from "./storage.js";
import { path, remove as removeMessage, restoreTree } from "./tree.js";

export const LIMITS = { conversations: 60, charsEach: 400_000, charsInAll: 3_000_000 };
export const LEFT = "The page was closed while this answer came. What had come is kept.";
const PREFIX = "slipstream.chat.";

/** @typedef {{id: number, parent: number, role: "user"|"assistant", text: string, thinking?: string, marks?: number[],
 *    state?: string, finish?: string, notice?: string, retryAfter?: number|null, timings?: object|null,
 *    usage?: object|null, requestId?: string, continued?: boolean, rate?: number}} Message */
/** @typedef {{id: string, title: string, updated: number, system: string, settings: object, unsent: string,
 *    messages: Message[], chosen: Object<string, number>}} Conversation */

export const changed = signal(); // the list, or something a list shows, is no longer the same
export const droppedForRoom = signal(); // (title) the oldest conversation had to go

/** @type {Map<string, Conversation>} */
const conversations = new Map();

const text = (value) => (typeof value === "string" ? value : "");
const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);

/** What storage or a file holds may be of another version, or edited: keep what has the right shape. */
function restore(id, raw) {
  if (!isObject(raw) || !Array.isArray(raw.messages)) return null;
  const messages = raw.messages
    .filter((m) => isObject(m) && ["user", "assistant"].includes(m.role))
    .map(restoreMessage);
  return {
    id,
    title: text(raw.title) || "Untitled",
    updated: Number.isFinite(raw.updated) ? raw.updated : 0,
    system: text(raw.system),
    settings: isObject(raw.settings) ? raw.settings : {},
    unsent: text(raw.unsent),
    ...restoreTree(messages, isObject(raw.chosen) ? raw.chosen : {}),
  };
}

function restoreMessage(raw) {
  if (raw.role === "user") return { role: "user", id: raw.id, parent: raw.parent, text: text(raw.text) };
  const message = { ...raw, text: text(raw.text), marks: goodMarks(raw.marks, text(raw.text)) };
  message.thinking = text(raw.thinking);
  message.state = ["done", "stopped", "failed"].includes(raw.state) ? raw.state : "done";
  message.notice = text(raw.notice);
  for (const name of ["timings", "usage"]) message[name] = isObject(raw[name]) ? raw[name] : null;
  if (raw.state === "streaming") Object.assign(message, { state: "failed", notice: LEFT });
  return message;
}

function goodMarks(marks, all) {
  const numbers = Array.isArray(marks) && marks.length % 2 === 0 && marks.every(Number.isInteger);
  const length = numbers ? marks.filter((_, i) => i % 2 === 0).reduce((a, b) => a + b, 0) : -1;
  return length === all.length ? marks : unmarked(all);
}

const unmarked = (all) => (all ? [all.length, -1] : []);

export function load() {
  for (let i = 0; i < storage.length; i += 1) {
    const key = storage.key(i);
    if (key.startsWith(PREFIX)) adopt(key.slice(PREFIX.length), storage.getItem(key));
  }
  window.addEventListener("storage", (event) => event.key?.startsWith(PREFIX) && fromOtherTab(event));
}

function adopt(id, json) {
  try {
    const conversation = restore(id, JSON.parse(json));
    if (conversation) conversations.set(id, conversation);
  } catch {
    // Not ours.
  }
}

const isStreaming = (conversation) => conversation?.messages.some((message) => message.state === "streaming") ?? false;

/** Another tab changed a conversation. One that streams here is ours until it ends. */
function fromOtherTab(event) {
  const id = event.key.slice(PREFIX.length);
  if (isStreaming(conversations.get(id))) return;
  if (event.newValue === null) conversations.delete(id);
  else adopt(id, event.newValue);
  changed();
}

export const all = () => [...conversations.values()].sort((a, b) => b.updated - a.updated);
export const get = (id) => conversations.get(id);

const newId = () => crypto.randomUUID?.() ?? `${Date.now()}-${Math.random().toString(36).slice(2)}`;

/** A new conversation, or the empty one there is already; it starts with the settings in use. */
export function create(like = null) {
  const empty = all().find((c) => c.messages.length === 0 && !c.unsent);
  if (empty) return touch(empty);
  const conversation = {
    id: newId(),
    title: "New chat",
    updated: Date.now(),
    system: like?.system ?? "",
    settings: { ...like?.settings },
    unsent: "",
    messages: [],
    chosen: {},
  };
  return touch(conversation);
}

/** Takes a conversation from outside in, as a new one; null where it is none. */
export function take(raw) {
  const conversation = restore(newId(), raw);
  return conversation?.messages.length ? touch(conversation) : null;
}

/** Puts a conversation on top of the list. */
export function touch(conversation) {
  conversation.updated = Math.max(Date.now(), (all()[0]?.updated ?? 0) + 1);
  conversations.set(conversation.id, conversation);
  save(conversation);
  return conversation;
}

export function remove(conversation) {
  conversations.delete(conversation.id);
  storage.removeItem(PREFIX + conversation.id);
  changed();
}

export function putBack(conversation) {
  conversations.set(conversation.id, conversation);
  save(conversation);
}

export function save(conversation) {
  if (!conversations.has(conversation.id)) return; // deleted while it streamed
  const json = fit(conversation);
  while (conversations.size > LIMITS.conversations || charsStored(conversation.id) + json.length > LIMITS.charsInAll) {
    if (!dropOldest(conversation)) break;
  }
  write(conversation, json);
  changed();
}

function write(conversation, json) {
  for (;;) {
    try {
      storage.setItem(PREFIX + conversation.id, json);
      return;
    } catch (error) {
      if (error.name !== "QuotaExceededError" || !dropOldest(conversation)) return; // it lives on in this tab only
    }
  }
}

function charsStored(except) {
  let sum = 0;
  for (const id of conversations.keys()) if (id !== except) sum += storage.getItem(PREFIX + id)?.length ?? 0;
  return sum;
}

function dropOldest(keep) {
  const oldest = all().findLast((c) => c !== keep && !isStreaming(c));
  if (!oldest) return false;
  remove(oldest);
  droppedForRoom(oldest.title);
  return true;
}

/** The conversation as JSON within its bound. */
function fit(conversation) {
  let json = JSON.stringify(conversation);
  for (const message of conversation.messages) {
    if (json.length <= LIMITS.charsEach) return json;
    if (message.marks?.length > 2 && message.state !== "streaming") {
      message.marks = unmarked(message.text);
      json = JSON.stringify(conversation);
    }
  }
  while (json.length > LIMITS.charsEach && conversation.messages.length > 2) {
    let excess = json.length - LIMITS.charsEach;
    while (excess > 0 && conversation.messages.length > 2) excess -= JSON.stringify(dropOne(conversation)).length;
    json = JSON.stringify(conversation);
  }
  return json;
}

/** A branch that is not shown, or the first message; one that is shown begins with a question. */
function dropOne(conversation) {
  const shown = new Set(path(conversation));
  const hidden = conversation.messages.find((message) => !shown.has(message));
  const gone = hidden ?? conversation.messages[0];
  removeMessage(conversation, gone);
  while (!hidden && path(conversation)[0]?.role === "assistant") removeMessage(conversation, path(conversation)[0]);
  return gone;
}

/** A title from the first words asked. */
export function titleFrom(words) {
  const line = words.trim().split("\n")[0].replace(/\s+/g, " ");
  if (line.length <= 48) return line || "New chat";
  const cut = line.slice(0, 48);
  return `${cut.slice(0, cut.lastIndexOf(" ") > 24 ? cut.lastIndexOf(" ") : 48)}…`;
}
