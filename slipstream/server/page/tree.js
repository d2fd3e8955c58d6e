// The messages of a conversation as a tree: another answer to a question, or another wording of a question, is a
// sibling. One path from the root is shown; `chosen` says which child it takes where there are several.
//
// Messages have ids from 1 up, a parent's smaller than its children's; 0 is the root.

const ROOT = 0;

export const find = (conversation, id) => conversation.messages.find((message) => message.id === id);

const childrenOf = (conversation, id) => conversation.messages.filter((message) => message.parent === id);

/** The messages that are shown, first to last. */
export function path(conversation) {
  const next = new Map(); // parent -> the child that is shown
  for (const message of conversation.messages) {
    const chosen = conversation.chosen[message.parent];
    if (chosen === undefined || next.get(message.parent)?.id !== chosen) next.set(message.parent, message);
  }
  const shown = [];
  for (let at = next.get(ROOT); at; at = next.get(at.id)) shown.push(at);
  return shown;
}

/** The messages before this one, first to last, whether shown or not. */
export function before(conversation, message) {
  const found = [];
  for (let at = find(conversation, message.parent); at; at = find(conversation, at.parent)) found.unshift(at);
  return found;
}

/** A message and its alternatives, oldest first. */
export const siblings = (conversation, message) => childrenOf(conversation, message.parent);

/** Adds a message after `parent` (null: as the first), and shows it. */
export function add(conversation, parent, message) {
  const id = Math.max(ROOT, ...conversation.messages.map((other) => other.id)) + 1;
  const added = Object.assign(message, { id, parent: parent?.id ?? ROOT });
  conversation.messages.push(added);
  choose(conversation, added);
  return added;
}

export function choose(conversation, message) {
  conversation.chosen[message.parent] = message.id;
}

function withDescendants(conversation, message) {
  const gone = new Set([message.id]);
  for (const other of conversation.messages) if (gone.has(other.parent)) gone.add(other.id); // parents come first
  return gone;
}

/** Takes a message out. One of several alternatives goes with all that follows it; else what follows moves up. */
export function remove(conversation, message) {
  const branch = siblings(conversation, message).length > 1;
  const gone = branch ? withDescendants(conversation, message) : new Set([message.id]);
  if (!branch) {
    for (const child of childrenOf(conversation, message.id)) child.parent = message.parent;
    const next = conversation.chosen[message.id];
    if (next === undefined) delete conversation.chosen[message.parent];
    else conversation.chosen[message.parent] = next;
  }
  conversation.messages = conversation.messages.filter((other) => !gone.has(other.id));
  for (const id of gone) delete conversation.chosen[id];
  return branch && gone.size > 1;
}

/** Whether stored messages are a tree; those of older versions are a plain list. */
function isTree(messages) {
  const seen = new Set([ROOT]);
  return messages.every(({ id, parent }) => {
    const good = Number.isSafeInteger(id) && !seen.has(id) && seen.has(parent) && parent < id;
    seen.add(id);
    return good;
  });
}

/** Stored messages as {messages, chosen}: a list, or a tree that is spoilt, becomes a single path. */
export function restoreTree(messages, chosen) {
  if (!isTree(messages)) {
    return { messages: messages.map((message, i) => ({ ...message, id: i + 1, parent: i })), chosen: {} };
  }
  const entries = Object.entries(chosen ?? {}).filter(([, id]) => messages.some((message) => message.id === id));
  return { messages, chosen: Object.fromEntries(entries) };
}
